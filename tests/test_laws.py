"""Laws that every run obeys, whatever the scheduler, the hardware, the traffic and the memory.

Random small scenarios, the same ones in every run of the suite; what a law says is checked from the
request table and the step table alone.
"""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import make_arrivals, make_blocks, make_profile
from hypothesis import given, settings
from hypothesis import strategies as st

from specsim.acceptance import Drafter, synthetic
from specsim.engine import Policy, Scenario, _Run, simulate
from specsim.hardware import Profile
from specsim.metrics import summarize
from specsim.rules import Rules
from specsim.schedulers import (
    MTP1,
    BatchSizeTable,
    DSparkAsync,
    DSparkGreedy,
    GlobalArgmax,
    LoadBlind,
    NoSpec,
    Oracle,
    StaticGamma,
    Threshold,
)
from specsim.sweep import sweep
from specsim.types import Result
from specsim.workload import Arrivals, ClosedLoop, Empirical, Poisson
from specsim.zoo import TETRIS, GammaBandit, SmartSpec, SpecDecPP, WrongCost

Make = Callable[[int], Any]


class Erratic:
    """A user's scheduler with memory that verifies any number of tokens."""

    def start(self) -> Callable[[Any], Any]:
        rng = np.random.default_rng(11)
        return lambda view: rng.integers(0, view.gamma + 1, view.num_seqs)


SCHEDULERS: dict[str, Make] = {
    "NoSpec": lambda gamma: NoSpec(),
    "MTP1": lambda gamma: MTP1(),
    "StaticGamma(0)": lambda gamma: StaticGamma(0),
    "StaticGamma": StaticGamma,
    "BatchSizeTable": lambda gamma: BatchSizeTable(((1, 2, gamma), (3, 5, 1))),
    "Threshold": lambda gamma: Threshold(0.6),
    "DSparkGreedy": lambda gamma: DSparkGreedy(),
    "DSparkAsync(2)": lambda gamma: DSparkAsync(),
    "DSparkAsync(1, mean)": lambda gamma: DSparkAsync(1, "mean"),
    "DSparkAsync(SGLang)": lambda gamma: DSparkAsync(floor=1e-6, fill=True, reset=True),
    "LoadBlind": lambda gamma: LoadBlind(every=3),
    "GlobalArgmax": lambda gamma: GlobalArgmax(),
    "Oracle": lambda gamma: Oracle(),
    "TETRIS": lambda gamma: TETRIS(4),
    "SmartSpec": lambda gamma: SmartSpec(),
    "SpecDecPP": lambda gamma: SpecDecPP(0.5),
    "GammaBandit": lambda gamma: GammaBandit(0.2),
    "WrongCost": lambda gamma: WrongCost(DSparkAsync(), "scaled", 0.5),
    "Erratic": lambda gamma: Erratic(),
}

seconds = st.floats(0.01, 0.2)


@st.composite
def profiles(draw: Any, max_tokens: int, max_seqs: int, gamma: int) -> Profile:
    """A profile that covers every step of a scenario; its prices go up and down."""
    sizes = draw(st.sets(st.integers(2, max_tokens), max_size=4)) | {1, max_tokens}
    sizes = sorted(sizes)
    below = draw(st.sampled_from(["next_size", "linear", "floor"]))
    verify: dict[str, Any] = {"type": "table1d", "tokens": sizes, "below": below}
    verify |= {"capture_limit": draw(st.none() | st.integers(1, max_tokens)), "monotone": draw(st.booleans())}
    if draw(st.booleans()):
        verify["seconds"] = [draw(seconds) for _ in sizes]
    else:
        verify |= {"type": "table2d", "kv_tokens": [0, draw(st.integers(1, 200)), 5000]}
        verify["seconds"] = [[draw(seconds) for _ in range(3)] for _ in sizes]
    draft = {
        "type": draw(st.sampled_from(["parallel", "autoregressive"])),
        "num_seqs": sorted({1, max_seqs}),
        "seconds": [draw(st.floats(0, 0.02)) for _ in {1, max_seqs}],
    }
    return make_profile(
        verify=verify,
        draft=draft,
        host_seconds=draw(st.sampled_from([0.0, 0.004])),
        sync_seconds=draw(st.sampled_from([0.0, 0.01])),
    )


@st.composite
def drafters(draw: Any, gamma: int) -> Drafter:
    """A recorded trace of one or two domains, short enough that requests come past its end."""
    n = draw(st.integers(1, 30))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    kind = draw(st.sampled_from(["dense", "sequential"]))
    proposed = rng.integers(0, gamma + 1, n) if draw(st.booleans()) else np.full(n, gamma)
    accepted = np.minimum(rng.integers(0, gamma + 1, n), proposed)
    domain = ["a"] * n if n < 2 or draw(st.booleans()) else ["a"] * (n // 2) + ["b"] * (n - n // 2)
    confidence = rng.random((n, gamma)).astype(np.float32)
    blocks = make_blocks(
        accepted.tolist(), gamma, kind=kind, confidence=confidence, proposed=proposed.tolist(), domain=domain
    )
    return Drafter(blocks, gamma, name="random")


@st.composite
def scenarios(draw: Any, make: Make, closed: bool = False) -> Scenario:
    gamma = 1 if make(1) == MTP1() else draw(st.integers(1, 6))
    max_seqs = draw(st.integers(1, 8))
    budget = draw(st.integers(1 + gamma, 16) | st.integers(20, 90))
    lengths = st.integers(1, 50), st.integers(1, 25)
    if closed:
        prompts, outputs = (tuple(draw(st.lists(x, min_size=1, max_size=4))) for x in lengths)
        think = draw(st.sampled_from([0.0, 0.3]))
        turns = draw(st.sampled_from([1, 1, 2]))
        users = draw(st.integers(1, 5))
        workload: Any = ClosedLoop(users, Empirical(prompts), Empirical(outputs), think, measured=15, turns=turns)
        prompts = (*prompts, turns * max(prompts) + (turns - 1) * max(outputs))
    else:
        n = draw(st.integers(1, 14))
        arrivals = sorted(
            draw(st.lists(st.sampled_from([0.0, 0.1, 0.1, 1.0]) | st.floats(0, 3), min_size=n, max_size=n))
        )
        prompts, outputs = ([draw(x) for _ in range(n)] for x in lengths)
        workload = make_arrivals(arrivals, prompts, outputs)  # type: ignore[arg-type]
        alike = draw(st.sampled_from(["", "", "sessions", "prefixes"]))
        groups = [draw(st.integers(0, 2)) for _ in range(n)]
        if alike == "sessions":
            table = replace(workload.table, session_id=np.array(groups))
            workload = replace(workload, table=table)
        elif alike:
            workload = replace(workload, table=replace(workload.table, prefix_hashes=tuple((g,) for g in groups)))
    block = draw(st.sampled_from([16, 16, 16, 4, 1]))
    most = -(-(max(prompts) + max(outputs) + gamma) // block)  # blocks that one request may come to need
    rules = Rules().without(*draw(st.sets(st.sampled_from([f.name for f in fields(Rules)]), max_size=2)))
    return Scenario(
        profile=draw(profiles(max(budget, 2), max_seqs, gamma)),
        workload=workload,
        drafter=draw(drafters(gamma)),
        scheduler=make(gamma),
        replicas=draw(st.integers(1, 3)),
        router=draw(st.sampled_from(["round_robin", "least_loaded", "random", "vllm"])),
        max_num_seqs=max_seqs,
        max_num_batched_tokens=budget,
        kv_tokens=draw(
            st.sampled_from([None, 0, 0, 1, 3]).map(
                lambda spare: None if spare is None else (most + spare) * block + block // 3
            )
        ),
        block_size=block,
        rules=rules,
        lockstep=draw(st.sampled_from([False, False, True])),
        async_scheduling=draw(st.sampled_from([False, False, True])),
        prefill=draw(st.sampled_from(["chunked", "chunked", "free"])),
    )


def check(scenario: Scenario, run: Result) -> None:
    """Every law that a run with its step table must obey."""
    requests, steps = run.requests, run.steps
    assert steps is not None
    gamma = 0 if isinstance(scenario.scheduler, NoSpec) else scenario.drafter.gamma  # type: ignore[union-attr]
    free = scenario.prefill == "free"
    finished = requests["finish"].notna()
    done = requests[finished]

    # Tokens are conserved: what requests count is what steps count.
    assert (done["emitted"] == done["output_tokens"]).all()
    assert (requests["emitted"] <= requests["output_tokens"]).all()
    assert steps["draft_tokens"].sum() == requests["verified"].sum()
    if not free:
        assert steps["emitted"].sum() == requests["emitted"].sum()
    elif finished.all():
        # Free prefills have no step: a token at each admission, whether the first or after a preemption.
        assert steps["emitted"].sum() + len(requests) + requests["preemptions"].sum() == requests["emitted"].sum()
    assert (requests["accepted"] <= requests["verified"]).all()
    assert (requests["verified"] <= gamma * requests["cycles"]).all()
    made = 1 + requests["cycles"] + requests["accepted"]  # before the length clips, recomputation aside
    assert (requests["emitted"] <= made + requests["preemptions"]).all()
    smooth = done[done["preemptions"] == 0]
    assert (made[smooth.index] - smooth["output_tokens"]).between(0, gamma).all()

    # Nothing happens before its cause.
    order = done[["arrival", "queued", "scheduled", "first_token", "finish"]].to_numpy()
    assert (np.diff(order, axis=1) >= 0).all()
    assert (requests["arrival"].diff().dropna() >= 0).all()
    for _, mine in requests.groupby("replica"):
        seated = mine["scheduled"].dropna()
        assert (seated.diff().dropna() >= 0).all()  # first come, first served
        assert seated.index.tolist() == mine.index[: len(seated)].tolist()

    # A step stays within its limits and holds what it says.
    assert (steps["num_tokens"] == steps["num_seqs"] + steps["prefill_tokens"] + steps["draft_tokens"]).all()
    assert (steps["num_tokens"] > 0).all()
    assert (steps["num_tokens"] <= scenario.max_num_batched_tokens).all()
    assert (steps["draft_tokens"] <= gamma * steps["num_seqs"]).all()
    # A decode reserves its whole block, but for the last one of a step, which may get what is left.
    reserved = (1 + gamma) * (steps["num_seqs"] - 1) + 1 + steps["prefill_tokens"]
    assert (reserved[steps["num_seqs"] > 0] <= scenario.max_num_batched_tokens).all()
    assert (steps["num_seqs"] <= scenario.max_num_seqs).all()
    assert (steps["emitted"] >= steps["num_seqs"]).all()
    assert (steps["waiting"] >= 0).all()
    if not scenario.rules.mixed:
        assert ((steps["num_seqs"] == 0) | (steps["prefill_tokens"] == 0)).all()
    table = scenario.workload.table if isinstance(scenario.workload, Arrivals) else None
    shares = table is not None and (table.session_id is not None or table.prefix_hashes is not None)
    shares |= isinstance(scenario.workload, ClosedLoop) and scenario.workload.has_turns
    if scenario.kv_tokens is not None and not shares:  # what several share is read by each
        assert (steps["kv_tokens"] <= scenario.kv_tokens // scenario.block_size * scenario.block_size).all()
    if not shares:
        assert (requests["cached"] == 0)[requests["preemptions"] == 0].all()
    if not scenario.rules.prefix_caching:
        assert (requests["cached"] == 0).all()
    if free:
        assert (steps["prefill_tokens"] == 0).all()

    # A step lasts what its profile says.
    pays = gamma > 0 and getattr(scenario.scheduler, "synchronous", False)
    for row in steps.head(40).itertuples():
        price = scenario.profile.step_seconds(
            row.num_tokens, row.num_seqs, gamma if row.num_seqs else 0, row.kv_tokens
        )  # fmt: skip
        sync = scenario.profile.sync_seconds if pays and row.num_seqs else 0.0
        if scenario.async_scheduling:  # the host's time is hidden behind the forward
            forward = float(scenario.profile.step_seconds(row.num_tokens, row.num_seqs, 0, row.kv_tokens))
            price = price - forward + max(forward - scenario.profile.host_seconds, scenario.profile.host_seconds)
        if scenario.lockstep:
            together = steps[steps["start"] == row.start]
            assert (together["duration"] == row.duration).all()
            assert row.duration >= (float(price) + sync) * (1 - 1e-9)
        else:
            assert row.duration == pytest.approx(float(price) + sync, rel=1e-9)

    # Steps of a replica follow one another, and it rests only when it has nothing to do.
    for replica, mine in steps.groupby("replica"):
        start = mine["start"].to_numpy()
        end = start + mine["duration"].to_numpy()
        assert (start[1:] >= end[:-1]).all()
        here = requests[requests["replica"] == replica]
        for rest, again in zip(end[:-1], start[1:], strict=True):
            if again > rest and not scenario.lockstep:  # in lockstep it may rest until the others' step ends
                before = here[here["arrival"] < again]
                assert (before["finish"] <= rest).all() or free  # a free prefill may end without a step

    # Little's law, exactly: the time that requests spend decoding is the sum of steps × requests in them.
    whole = (1 + gamma) * scenario.max_num_seqs <= scenario.max_num_batched_tokens
    if finished.all() and whole and scenario.rules.mixed and requests["preemptions"].sum() == 0:
        decoding = (requests["finish"] - requests["first_token"]).sum()
        assert (steps["num_seqs"] * steps["duration"]).sum() == pytest.approx(decoding, abs=1e-9)
        assert steps["num_seqs"].sum() == requests["cycles"].sum()


@pytest.mark.parametrize("name", SCHEDULERS)
def test_laws_of_open_loops(name):
    @settings(max_examples=25)
    @given(scenario=scenarios(SCHEDULERS[name]), seed=st.integers(0, 3))
    def hold(scenario, seed):
        run = simulate(scenario, seed, steps=True)
        asked = scenario.workload.requests(seed)
        # Every request that arrived finishes, once, with what it asked for.
        assert run.requests["request_id"].tolist() == list(range(len(asked)))
        assert run.requests["arrival"].tolist() == pytest.approx(asked.arrival_s.tolist(), rel=1e-12)
        assert run.requests["output_tokens"].tolist() == asked.output_tokens.tolist()
        assert run.requests["finish"].notna().all()
        assert run.num_steps == len(run.steps)
        check(scenario, run)

    hold()


@pytest.mark.parametrize("name", SCHEDULERS)
def test_laws_of_closed_loops(name):
    @settings(max_examples=10)
    @given(scenario=scenarios(SCHEDULERS[name], closed=True), seed=st.integers(0, 3))
    def hold(scenario, seed):
        run = simulate(scenario, seed, steps=True)
        users, window = scenario.workload.concurrency, run.window
        assert (window.first, window.last) == (5 * users, 5 * users + 15)
        measured = run.requests.iloc[window.first : window.last]
        assert measured["finish"].notna().all()
        # Never more requests in the system than users.
        finish = run.requests["finish"].fillna(np.inf).to_numpy()
        for time in run.requests["arrival"].tolist():
            assert ((run.requests["arrival"] <= time) & (finish > time)).sum() <= users
        # The window holds tokens of its own: no more than were emitted, no less than its requests' last steps.
        assert 0 <= window.tokens.sum() <= run.requests["emitted"].sum()
        assert window.start == measured["arrival"].iloc[0]
        assert window.end == measured["finish"].max()
        check(scenario, run)

    hold()


@settings(max_examples=60)
@given(scenario=scenarios(SCHEDULERS["StaticGamma"]))
def test_all_blocks_come_back(scenario):
    run = _Run(scenario, 0, False, None)
    run.result()
    for replica in run.replicas:
        replica.pool.settle(0)
        assert replica.pool.shared == 0
        assert not replica.pool._uses
        assert not any(chain.users for chain in replica.pool._chains.values())
        if replica.pool.tracking:
            assert sum(free.count for free in replica.pool._queue) == run.limits.kv_blocks


def test_the_scenarios_reach_what_they_are_for():
    """The laws above are worth as much as the scenarios: between them they preempt, chunk, wait and wrap."""
    seen = dict.fromkeys(("preempted", "chunked", "waited", "trimmed", "rested", "crowded", "found", "found again"), 0)

    @settings(max_examples=300, derandomize=True)  # the same scenarios every time
    @given(scenario=scenarios(SCHEDULERS["Erratic"]))
    def look(scenario):
        run = simulate(scenario, steps=True)
        seen["preempted"] += run.requests["preemptions"].sum() > 0
        seen["chunked"] += (run.requests["prompt_tokens"] > scenario.max_num_batched_tokens).any()
        seen["waited"] += (run.steps["waiting"] > 0).any()
        seen["trimmed"] += run.steps["draft_tokens"].sum() < scenario.drafter.gamma * run.steps["num_seqs"].sum()
        seen["rested"] += (run.steps["start"].diff() > run.steps["duration"].shift() + 1e-9).any()
        seen["found"] += (run.requests["cached"] > 0).any()
        seen["found again"] += ((run.requests["cached"] > 0) & (run.requests["preemptions"] > 0)).any()
        seen["crowded"] += (1 + scenario.drafter.gamma) * scenario.max_num_seqs > scenario.max_num_batched_tokens

    look()
    assert all(count >= 6 for count in seen.values()), seen


# The seed decides everything


def table_bytes(table: pd.DataFrame) -> bytes:
    buffer = io.BytesIO()
    table.to_parquet(buffer)
    return buffer.getvalue()


def digest() -> str:
    """A fingerprint of runs that use every stream of randomness."""
    blocks = make_blocks(
        [0, 1, 2, 3, 1, 0, 2], 3, domain=["x", "x", "x", "y", "y", "z", "z"], kind="dense"
    )  # fmt: skip
    total = hashlib.sha256()
    for drafter in (Drafter(blocks, 3, name="recorded"), synthetic(0.7, 3, concentration=4.0, autocorrelation=0.5)):
        for scheduler in (NoSpec(), StaticGamma(2), DSparkGreedy(), DSparkAsync(1, "mean"), Oracle()):
            for workload in (
                Poisson(2.0, 40, Empirical((3, 30)), Empirical((2, 9))),
                ClosedLoop(3, 20, 9, measured=20),
            ):
                scenario = Scenario(
                    make_profile(), workload, drafter, scheduler, replicas=2, router="random", kv_tokens=96,
                    max_num_batched_tokens=40,
                )  # fmt: skip
                run = simulate(scenario, 7, steps=True)
                assert run.steps is not None
                total.update(table_bytes(run.requests))
                total.update(table_bytes(run.steps))
                total.update(table_bytes(summarize(run)))
                total.update(repr((run.window, run.label, run.num_steps)).encode())
    return total.hexdigest()


def test_the_same_seed_gives_the_same_bytes_in_every_process():
    here = digest()
    assert digest() == here
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_laws; print(test_laws.digest())"
    )
    others = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
        )
        for hash_seed in ("1", "2")
    ]
    assert [process.communicate()[0].strip() for process in others] == [here, here]


def test_another_seed_gives_another_run():
    scenario = Scenario(make_profile(), Poisson(1.0, 30, 4, 9), synthetic(0.7, 3), StaticGamma(3))
    runs = [simulate(scenario, seed).requests for seed in (0, 1)]
    assert not runs[0]["arrival"].equals(runs[1]["arrival"])
    assert not runs[0]["accepted"].equals(runs[1]["accepted"])


def test_a_sweep_is_the_same_whatever_its_processes():
    drafter = synthetic(0.7, 3, concentration=4.0)
    mtp = synthetic(0.7, 1, name="mtp")
    base = Scenario(make_profile(), ClosedLoop(1), drafter)
    policies = [NoSpec(), StaticGamma(3), DSparkGreedy(), Policy(MTP1(), mtp)]
    workloads = [ClosedLoop(c, 4, Empirical((3, 17)), measured=30) for c in (1, 4)]
    tables = [sweep(base, policies, workloads, seeds=(0, 3), jobs=jobs) for jobs in (1, 2)]
    assert table_bytes(tables[0]) == table_bytes(tables[1])
    assert len(tables[0]) == 4 * 2 * 2
    assert tables[0]["policy"].unique().tolist() == [
        "NoSpec()", "StaticGamma(3)", "DSparkGreedy()", "MTP1()@mtp",
    ]  # fmt: skip
    # A row is the run that it names.
    alone = summarize(simulate(Scenario(make_profile(), workloads[1], drafter, StaticGamma(3)), 3))
    row = tables[0].query("policy == 'StaticGamma(3)' and load == 4 and seed == 3")
    assert row["throughput"].tolist() == alone["throughput"].tolist()
