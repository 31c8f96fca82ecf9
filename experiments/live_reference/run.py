"""The reference engine with a trained DSpark drafter, under the schedulers that are simulated: predicted and measured.

    python experiments/live_reference/run.py --models models --out out/live_reference
    python experiments/live_reference/summary.py out/live_reference

Needs ``make models``, the extras ``drafters`` and ``live``, and a quiet machine for about 45 minutes; what is there
already (trace, profiles, reports) is kept, so a run that was cut short goes on. First the drafter is recorded on the
prompts, and steps under random draft lengths are logged and imported, as the prices that schedulers are told: equal
lengths for static schedulers, unequal ones for those that look at confidences, whose steps take longer at as many
tokens (attention pads). Then, for each scheduler, two engines are up: the one under it, and one under random lengths
again, asked before and after every load. How much slower or faster than its prices the latter was is what the
simulation's times are stretched by: the machine drifts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np

sys.path.append(str(Path(__file__).parent.parent / "engines"))
from serving import reference

from specsim.acceptance import load_drafter
from specsim.cli import living_report
from specsim.cli.inputs import parse_scheduler
from specsim.drafters.prompts import prompt_tokens, read_prompts
from specsim.drafters.target import load_target
from specsim.hardware import Profile, Shape, load_profile, step_cost
from specsim.live.client import Target, open_client
from specsim.live.comparing import Model, measured_numbers, rows_of, workload_of
from specsim.live.engines import detect, drafted, scrape
from specsim.live.experiment import Measured, Plan, Repeat
from specsim.live.load import Driver, Prompts
from specsim.live.load import read_prompts as read_orders
from specsim.workload import ClosedLoop

HERE = Path(__file__).parent
LENGTHS = {kind: f"{HERE / 'lengths.py'}:{kind.capitalize()}" for kind in ("equal", "unequal")}
SMOLLM2 = HERE.parent / "smollm2"
DRAFTER = SMOLLM2 / "dspark"
SCHEDULERS = ("StaticGamma(1)", "StaticGamma(3)", "StaticGamma(5)", "DSparkGreedy", "DSparkAsync")
USERS = (1, 4, 8, 16)
GAMMA = 7
EXPONENTS = {"throughput": -1, "speed": -1, "tpot": 1, "ttft": 1}
"""How a closed loop's numbers follow the time that a step takes."""
TOKENS = 64
"""Tokens of an answer, about; fewer where the model ends by itself."""
ANSWERS = 8
"""Recorded answers of each of the twenty prompts."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=Path("models"), help="the target (make models)")
    parser.add_argument("--out", type=Path, default=Path("out/live_reference"))
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--requests", type=int, default=16, help="in each load")
    parser.add_argument("--schedulers", nargs="*", default=SCHEDULERS)
    asked = parser.parse_args()
    out = asked.out
    out.mkdir(parents=True, exist_ok=True)
    serve = ["--target", str(asked.models), "--drafter", str(DRAFTER), "--max-num-seqs", str(max(USERS)),
             "--max-model-len", "512"]  # fmt: skip
    orders, trace = out / "orders.jsonl", out / "trace.parquet"
    if not orders.exists():
        write_orders(asked.models, orders)
    if not trace.exists():
        specsim("record", "--target", asked.models, "--drafter", DRAFTER, "--prompts", SMOLLM2 / "prompts.jsonl",
                "--responses-per-prompt", ANSWERS, "--max-tokens", round(1.25 * TOKENS), "--out", trace)  # fmt: skip
    for kind, lengths in LENGTHS.items():
        if not prices_of(out, kind).exists():
            log = out / f"steps-{kind}.jsonl"
            log.unlink(missing_ok=True)
            with reference(out / f"{kind}.log", *serve, "-s", lengths, "--log", str(log)) as url:
                asyncio.run(load(url, orders))
            specsim("profile", "import", log, "--model", "SmolLM2-135M-Instruct", "--device", device(),
                    "--out", prices_of(out, kind))  # fmt: skip
    for scheduler in asked.schedulers:
        folder = out / "".join(c for c in scheduler if c.isalnum())
        if (folder / "report.json").exists():
            continue
        folder.mkdir(exist_ok=True)
        log = folder / "steps.jsonl"
        log.unlink(missing_ok=True)
        kind = kind_of(scheduler)
        profile = prices_of(out, kind)
        with (
            reference(folder / "lengths.log", *serve, "-s", LENGTHS[kind], "--log", str(log)) as learn,
            reference(folder / "server.log", *serve, "-s", scheduler, "--profile", str(profile)) as url,
        ):
            prices = load_profile(profile)
            measured, plan, drifts = asyncio.run(measure(learn, log, prices, url, orders, asked.repeat, asked.requests))
        report(folder, trace, measured, plan, scheduler, prices, drifts)
    return 0


def kind_of(scheduler: str) -> str:
    """Which draft lengths it asks for."""
    return "equal" if scheduler.startswith("StaticGamma") else "unequal"


def prices_of(out: Path, kind: str) -> Path:
    """The profile of steps under such lengths."""
    return out / f"profile-{kind}.json"


async def measure(
    learn: str, log: Path, prices: Profile, url: str, orders: Path, repeat: int, requests: int
) -> tuple[Measured, Plan, list[dict[str, float]]]:
    """Each load on the engine that is checked, and before and after on the one under random lengths; ``repeat`` times.

    By repetition and load: how many times as long as ``prices`` say the former's steps took.
    """
    plan = Plan((1,), USERS, output_tokens=TOKENS, requests=requests, repeat=repeat)
    async with AsyncExitStack() as stack:

        async def side(address: str) -> tuple[httpx.AsyncClient, Any, Driver]:
            target = Target(address, "", temperature=1.0, ignore_eos=False)
            client = await stack.enter_async_context(open_client(target))
            engine = await detect(client)
            clock = asyncio.get_running_loop().time
            return client, engine, Driver(client, replace(target, model=engine.model), Prompts(0, read_orders(orders)),
                                          clock() + 7200)  # fmt: skip

        _, _, learning = await side(learn)
        client, engine, checking = await side(url)
        measured = Measured(engine, speculates=True)
        drifts: list[dict[str, float]] = []
        for number in range(repeat):
            measured.repeats.append(Repeat())
            drifts.append({})
            for users in USERS:
                print(f"repetition {number + 1} of {repeat}, {users} users", flush=True)
                done = len(log.read_text().splitlines()) if log.exists() else 0
                beside = replace(plan.closed(users), measured=max(4, users))
                await learning.closed(beside, number)
                before = await scrape(client)
                drive = await checking.closed(plan.closed(users), number)
                drive.name = f"closed {users}"
                drive.drafted = drafted(before, await scrape(client), drive.answers)
                measured.repeats[-1].checks[drive.name] = drive
                await learning.closed(beside, number)
                drifts[-1][drive.name] = drift(prices, log.read_text().splitlines()[done:])
    return measured, plan, drifts


def drift(prices: Profile, lines: list[str]) -> float:
    """How many times as long as ``prices`` say the logged steps took, drafting included."""
    cost = step_cost(prices, 8192, max(USERS), GAMMA, extrapolate=True)
    took = expected = 0.0
    for row in map(json.loads, lines):
        n, prompts, tokens = row["num_seqs"], row["prefills"], row["prefill_tokens"]
        # How long each prompt was is not logged, and their sum is what counts.
        chunks = [tokens - prompts + 1, *[1] * (prompts - 1)] if prompts else []
        curve = cost.curve(Shape(n, row["kv_tokens"], chunks, [0] * prompts), row["draft_tokens"])
        expected += float(curve[row["draft_tokens"]]) - prices.host_seconds + (float(cost.draft[n]) if n else 0.0)
        took += row["seconds"]
    return took / expected


def report(
    folder: Path, trace: Path, measured: Measured, plan: Plan, scheduler: str, prices: Profile,
    drifts: list[dict[str, float]],
) -> None:  # fmt: skip
    """Compare with the simulation, its times stretched, and write table, picture, JSON and recorded runs."""
    model = Model(prices, measured.engine, parse_scheduler(scheduler), load_drafter(trace))
    gates, rows = {"throughput": 0.10}, []
    for users in USERS:
        name = f"closed {users}"
        found, ours = [], []
        for number, repeat in enumerate(measured.repeats):
            drive, longer = repeat.checks[name], drifts[number][name]
            numbers = measured_numbers(drive)
            if numbers is None:
                sys.exit(f"{scheduler}, {name}: nothing was answered: {drive.counts()}")
            predicted, _ = model.predict(workload_of(plan, name, drive), number)
            found.append(numbers)
            ours.append({k: v * longer ** EXPONENTS.get(k, 0) for k, v in predicted.items()})
        rows += rows_of(name, users, found, ours, gates)
    notes = [f"steps took {min(d.values()):.2f} to {max(d.values()):.2f} times as long as priced" for d in drifts]
    models = dict.fromkeys(range(plan.repeat), model)
    told = living_report.Report(measured, replace(plan, known_steps=True), models, rows, notes, gates)
    living_report.show_all(told)
    living_report.write(told, folder / "live.png", folder / "runs", folder / "report.json")


def write_orders(models: Path, path: Path) -> None:
    """The prompts as the recorder asks them, in token ids, in an order that mixes the domains."""
    target = load_target(models)
    prompts = read_prompts(SMOLLM2 / "prompts.jsonl")
    mixed = np.random.default_rng(0).permutation(len(prompts))
    ids = [prompt_tokens(target.tokenizer, prompts[i]) for i in mixed]
    path.write_text("".join(json.dumps({"prompt": [int(t) for t in tokens]}) + "\n" for tokens in ids))


async def load(url: str, orders: Path) -> None:
    """Closed loops of every size that is checked, and between."""
    target = Target(url, "", temperature=1.0)
    async with open_client(target) as client:
        target = replace(target, model=(await detect(client)).model)
        driver = Driver(client, target, Prompts(0, read_orders(orders)), asyncio.get_running_loop().time() + 3600)
        for users in (1, 2, 3, 4, 6, 8, 12, 16):
            print(f"steps of {users} users", flush=True)
            drive = await driver.closed(ClosedLoop(users, 1, TOKENS, measured=max(8, 2 * users)))
            if drive.faults() or drive.stopped:
                sys.exit(f"{users} users: {drive.counts()} {drive.faults()} {drive.stopped}")


def specsim(*words: object) -> None:
    """Run a verb."""
    line = [str(word) for word in words]
    print("$ specsim", *line, flush=True)
    if subprocess.run([sys.executable, "-m", "specsim", *line], check=False).returncode:
        sys.exit(1)


def device() -> str:
    """The processor's name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")


if __name__ == "__main__":
    sys.exit(main())
