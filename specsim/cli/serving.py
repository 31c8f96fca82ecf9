"""serve-reference: one's scheduler for real, behind an HTTP interface.

Torch is imported by the verb, not by this module: the command line works without it.
"""

from __future__ import annotations

import asyncio
import json
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from specsim.asking import scheduler_name
from specsim.cli.drafting import DTYPES, Device, Dtype, Seed, TargetPath, Temperature, above_zero
from specsim.cli.inputs import one_of, parse_scheduler
from specsim.drafters import check_installed
from specsim.files import check_apart, check_output
from specsim.hardware import load_profile
from specsim.schedulers import NoSpec
from specsim.types import SpecsimError

if TYPE_CHECKING:
    from specsim.live.server import Server

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve_reference(
    target: TargetPath,
    drafter: Annotated[
        str | None, typer.Option("--drafter", help="Checkpoint folder, 'ngram(longest=4, shortest=2)', or a small LM.")
    ] = None,
    scheduler: Annotated[
        str, typer.Option("--scheduler", "-s", help="NAME, 'NAME(args)' or file.py:NAME, as in simulate.")
    ] = "NoSpec",
    gamma: Annotated[
        int | None, typer.Option("--gamma", help="Block length (default: the drafter's, or 7).", min=1, max=64)
    ] = None,
    profile: Annotated[
        Path | None, typer.Option("--profile", help="Step times that the scheduler is told (default: all the same).")
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="0: any that is free.", min=0, max=65535)] = 8000,
    allow_remote: Annotated[bool, typer.Option("--allow-remote", help="Listen beyond this machine.")] = False,
    max_num_seqs: Annotated[int, typer.Option("--max-num-seqs", help="Requests at once.", min=1)] = 16,
    max_model_len: Annotated[
        int | None, typer.Option("--max-model-len", help="Tokens of a request (default: the target's, or 2048).", min=2)
    ] = None,
    max_num_batched_tokens: Annotated[
        int, typer.Option("--max-num-batched-tokens", help="Tokens of a step, above which prompts wait.", min=1)
    ] = 8192,
    temperature: Temperature = 1.0,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    log: Annotated[Path | None, typer.Option("--log", help="Write a line of JSON a step there.")] = None,
) -> None:
    """Serve a target and a drafter for real, under the scheduler that was simulated, as OpenAI's API does.

    Variable-length verification with rejection sampling, so answers are the target's own; requests join and leave at
    step boundaries. POST /v1/completions and /v1/chat/completions, GET /v1/models, /health, /version and /metrics.

    Example: specsim serve-reference --target models/ --drafter experiments/smollm2/dspark -s DSparkGreedy
    --profile hw_profiles/cpu-2core-smollm2-135m.json
    """
    above_zero("--temperature", temperature, or_zero=True)
    one_of("--dtype", dtype, DTYPES)
    if host not in LOOPBACK and not allow_remote:
        raise SpecsimError(
            f"--host: {host}: expected {LOOPBACK[0]}, or --allow-remote: whoever can reach it may use it"
        )
    policy = parse_scheduler(scheduler)
    check_apart({"--log": log}, {"--profile": profile, "--target": Path(target)})
    if log is not None:
        check_output("--log", log)
    prices = None if profile is None else load_profile(profile)
    check_installed()
    from specsim.drafters.load import load_drafter_model, parse_spec
    from specsim.drafters.target import load_target
    from specsim.live.reference import Engine
    from specsim.live.server import Server

    spec = None if drafter is None else parse_spec(drafter)
    llm = load_target(target, dtype, device)
    model = None
    if spec is not None and not isinstance(policy, NoSpec):
        exact = getattr(policy, "exact_gamma", None)
        model = load_drafter_model(spec, llm, exact if gamma is None else gamma)
    with ExitStack() as files:
        opened: list[TextIO] = []

        def write(row: dict[str, Any]) -> None:
            if not opened:  # with the first step: what cannot be served leaves no file
                path = Path(str(log))
                path.parent.mkdir(parents=True, exist_ok=True)
                opened.append(files.enter_context(path.open("w", encoding="utf-8", buffering=1)))
            opened[0].write(json.dumps(row) + "\n")

        engine = Engine(
            llm, model, policy, max_num_seqs=max_num_seqs, max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens, temperature=temperature, seed=seed, profile=prices,
            log=None if log is None else write,
        )  # fmt: skip
        name = f"{llm.name} on {llm.device}, {scheduler_name(policy)}"
        name += f" with {spec.name}, γ = {engine.gamma}" if model is not None and spec is not None else ""
        asyncio.run(_serve(Server(engine, llm.name), host, port, name))


async def _serve(server: Server, host: str, port: int, name: str) -> None:
    """Serve until interrupted or told to end."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    at = f"[{host}]" if ":" in host else host
    await server.run(host, port, stop, lambda port: typer.echo(f"{name}: http://{at}:{port}/v1 (Ctrl-C ends it)"))
    counts = server.engine.counts
    typer.echo(f"{counts.generated:,} tokens in {counts.steps:,} steps, {counts.tau:.3f} a decode")
