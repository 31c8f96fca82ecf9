"""audit: is a scheduler lossless?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specsim.audit import MOST_STEPS, Audit, Size
from specsim.audit import audit as run_audit
from specsim.audit.models import CONFIDENCES
from specsim.audit.sizes import fewer
from specsim.cli import show
from specsim.cli.inputs import one_of, parse_scheduler, policy_files
from specsim.files import check_apart, check_output

TOLD = {
    "head": "a head's, any function of the tokens before each draft token, right or wrong",
    "draft_prob": "the drafter's own probability of each draft token",
}
ALWAYS = {
    "all": "In every instance it verified all drafts: what it does when it verifies fewer was not met.",
    "none": "In no instance did it verify a draft: what it does when it verifies some was not met.",
}


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
    with a gamma, up to 8, those blocks alone), or after more steps than --steps (in blocks of 3 or 4, more than 4; from
    5 on, more than 3; with two requests, more than 4, 2 or 1); what depends on the time, or is remembered outside
    start().

    Example: specsim audit DSparkGreedy
    """
    one_of("--confidence", confidence, CONFIDENCES)
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
    show.console().print("\n".join(_lines(done)), soft_wrap=True)
    if not done.lossless:
        raise typer.Exit(1)


def _lines(done: Audit) -> list[str]:
    lines = [str(done)]
    if done.reads_confidence:
        lines += ["", f"Confidences: {TOLD[done.confidence]}."]
        if done.lossless and done.verified in ALWAYS:
            lines.append(ALWAYS[done.verified])
    elif done.lossless:
        lines += [
            "",
            "In no instance did it look at a confidence: if it ever should, the case that matters was not reached.",
        ]
    if done.lossless:
        steps = sorted({size.steps for size in done.sizes})
        lines.append("Sizes: " + "; ".join(_sizes([s for s in done.sizes if s.steps == n]) for n in steps) + ".")
        share = max(map(fewer, done.sizes))
        if share > 1:
            longest = max(size.gamma for size in done.sizes)
            lines.append(f"Of blocks of {longest}, one drawn for each {share} asked for.")
        lines.append(
            "Exact for each of these instances, and no proof for others: what happens only with more requests, in "
            "longer blocks or after more steps was not met."
        )
        if done.reads_confidence and done.confidence == "head":
            lines.append(
                "If its confidences are the drafter's probability of each token, audit --confidence draft_prob too."
            )
    return lines


def _sizes(sizes: list[Size]) -> str:
    def span(values: list[int]) -> str:
        return f"{min(values)}" if min(values) == max(values) else f"{min(values)}–{max(values)}"

    steps = sizes[0].steps
    return (
        f"{steps} step{'s' * (steps > 1)}: vocabulary {span([s.vocabulary for s in sizes])}, blocks of "
        f"{span([s.gamma for s in sizes])}, requests {span([s.requests for s in sizes])}"
    )
