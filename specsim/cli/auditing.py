"""audit: is a scheduler lossless?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specsim.audit import MOST_STEPS
from specsim.audit import audit as run_audit
from specsim.audit.models import CONFIDENCES
from specsim.cli import show
from specsim.cli.inputs import one_of, parse_scheduler, policy_files, split_policy
from specsim.files import check_apart, check_output
from specsim.types import SpecsimError


def audit(
    scheduler: Annotated[str, typer.Argument(metavar="SCHEDULER", help="NAME, 'NAME(args)' or file.py:NAME.")],
    confidence: Annotated[
        str,
        typer.Option(
            "--confidence",
            help="What it is told of draft token k: head (a function of the tokens before k) or draft_prob (the "
            "drafter's probability of token k, drafts being sampled).",
        ),
    ] = "head",
    instances: Annotated[
        int,
        typer.Option(
            "--instances",
            help="Drawn instances of one step, beside plain ones; of blocks of 4 half as many, of 5 a quarter, ..",
            min=0,
        ),
    ] = 10_000,
    histories: Annotated[int, typer.Option("--histories", help="The same, of several steps.", min=0)] = 200,
    steps: Annotated[
        int,
        typer.Option(
            "--steps",
            help="How many steps those have; 1: none of them. More than 3 may take minutes; more than 4 are one "
            "request's, in blocks of 1 or 2.",
            min=1,
            max=MOST_STEPS,
        ),
    ] = 3,
    seed: Annotated[int, typer.Option("--seed", help="Of the drawn instances.", min=0)] = 0,
    json: Annotated[Path | None, typer.Option("--json", help="Also write what was found as JSON here.")] = None,
) -> None:
    """Is a scheduler lossless: does speculative decoding under it keep the target's own distribution?

    Small decoders (vocabulary 2 and 3, blocks of 1 to 3, one or two requests, many step-cost curves and confidences)
    are worked out exactly with real rejection sampling: the joint law of the first output tokens against the target's.
    The smallest counterexample is printed. Exit code 0: no difference found; 1: not lossless; 2: bad input.

    Not looked at, and so never found: what happens only with three requests or more, in longer blocks (of a scheduler
    with a gamma of 3 to 8, others than those and, of one request in one step, one longer), or after more steps than
    --steps (in blocks of 3 or 4, more than 4; from 5 on, more than 3; with two requests, more than 4, 2 or 1); what
    depends on the time, or is remembered outside start().

    Example: specsim audit DSparkGreedy
    """
    one_of("--confidence", confidence, CONFIDENCES)
    name, trace, _ = split_policy(scheduler)
    if trace is not None:
        raise SpecsimError(
            f"scheduler {scheduler!r}: an audit takes no @TRACE, as it makes drafters of its own: expected {name!r}"
        )
    check_apart({"--json": json}, {"SCHEDULER": policy_files(scheduler)})
    check_output("--json", json)
    policy = parse_scheduler(scheduler)
    with show.progress("instances audited") as report:
        done = run_audit(
            policy, confidence=confidence, instances=instances, histories=histories, steps=steps, seed=seed,  # type: ignore[arg-type]
            progress=report,
        )  # fmt: skip
    if json is not None:
        show.write_json_file(json, done.data())
    show.console().print(str(done), soft_wrap=True)
    if not done.lossless:
        raise typer.Exit(1)
