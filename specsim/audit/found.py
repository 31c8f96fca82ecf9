"""What an audit found, and how it is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from specsim.audit.case import Counterexample
from specsim.audit.sizes import Size, fewer, one_longer

Verified = Literal["all", "some", "none"]
TOLERANCE = 1e-12
TOLD = {
    "head": "a head's, any function of the tokens before each draft token, right or wrong",
    "draft_prob": "the drafter's own probability of each draft token",
}
ALWAYS = {
    "all": "In every instance it verified all drafts: what it does when it verifies fewer was not met.",
    "none": "In no instance did it verify a draft: what it does when it verifies some was not met.",
}


@dataclass(frozen=True)
class Audit:
    """What an audit found.

    ``tv``: the largest total variation met between the law of the first output tokens and the target's; ``lossless``
    if it is at most 1e-12. ``instances`` of one step and ``histories`` of several were worked out (plain ones and
    drawn ones), ``questions`` put to the scheduler, which looked at confidences or did not. ``verified``: "all" if it
    verified all drafts of every request each time (as many as a field ``gamma`` of its own says), "none" if it never
    verified one, else "some". ``sizes`` were looked at, smallest first; the first with a difference is the last.
    ``counterexample``: of that size, or smaller where a request or steps of it played no part. ``not_looked_at``:
    what the length of its blocks, or the numbers asked for, left out, in words (nothing of one that is not lossless).
    """

    scheduler: str
    confidence: str
    reads_confidence: bool
    verified: Verified
    tv: float
    instances: int
    histories: int
    questions: int
    sizes: tuple[Size, ...]
    not_looked_at: tuple[str, ...]
    counterexample: Counterexample | None

    @property
    def lossless(self) -> bool:
        """Whether no instance showed a difference. That is no proof: larger ones were not looked at."""
        return self.counterexample is None

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def data(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "scheduler": self.scheduler,
            "confidence": self.confidence,
            "reads_confidence": self.reads_confidence,
            "verified": self.verified,
            "lossless": self.lossless,
            "tv": self.tv,
            "tolerance": TOLERANCE,
            "instances": self.instances,
            "histories": self.histories,
            "questions": self.questions,
            "sizes": [vars(size) for size in self.sizes],
            "not_looked_at": list(self.not_looked_at),
            "counterexample": None if self.counterexample is None else self.counterexample.data(),
        }


def _lines(found: Audit) -> list[str]:
    lines = [_first(found)]
    if found.reads_confidence:
        lines += ["", f"Confidences: {TOLD[found.confidence]}."]
        if found.lossless and found.verified in ALWAYS:
            lines.append(ALWAYS[found.verified])
    elif found.lossless:
        lines += [
            "",
            "In no instance did it look at a confidence: if it ever should, the case that matters was not reached.",
        ]
    if found.lossless:
        steps = sorted({size.steps for size in found.sizes})
        lines.append("Sizes: " + "; ".join(_sizes([s for s in found.sizes if s.steps == n]) for n in steps) + ".")
        shares = {s.gamma: fewer(s) for s in found.sizes if fewer(s) > 1}
        if shares:
            told = (f"of blocks of {gamma}, one drawn for each {share}" for gamma, share in sorted(shares.items()))
            lines.append(f"{', '.join(told).capitalize()} asked for.")
        lines.append(
            "Exact for each of these instances, and no proof for others: what happens only with more requests, in "
            "longer blocks or after more steps was not met."
        )
        if found.reads_confidence and found.confidence == "head":
            lines.append(
                "If its confidences are the drafter's probability of each token, audit --confidence draft_prob too."
            )
    return lines


def _first(found: Audit) -> str:
    """What was found, in one line; the counterexample after it."""
    if found.counterexample is not None:
        told = f"{found.scheduler} is not lossless: total variation up to {found.tv:.4g}"
        return f"{told}. Smallest counterexample:\n\n{found.counterexample}"
    steps = sorted({s.steps for s in found.sizes if s.steps > 1})
    several = f" and {found.histories:,} of {' or '.join(map(str, steps))}" if found.histories else ""
    missing = f". Not looked at: {'; '.join(found.not_looked_at)}" if found.not_looked_at else ""
    return (
        f"{found.scheduler} is lossless in {found.instances:,} instances of one step{several}, blocks of "
        f"{_span([s.gamma for s in found.sizes])}: total variation at most {found.tv:.1g}{missing}"
    )


def _sizes(sizes: list[Size]) -> str:
    steps, longer = sizes[0].steps, [s.gamma for s in sizes if one_longer(s, sizes)]
    main = [s for s in sizes if not one_longer(s, sizes)]
    return (
        f"{steps} step{'s' * (steps > 1)}: vocabulary {_span([s.vocabulary for s in main])}, blocks of "
        f"{_span([s.gamma for s in main])}, requests {_span([s.requests for s in main])}"
        + "".join(f", and blocks of {gamma} of one request in vocabulary 2" for gamma in longer)
    )


def _span(values: list[int]) -> str:
    return f"{min(values)}" if min(values) == max(values) else f"{min(values)}–{max(values)}"
