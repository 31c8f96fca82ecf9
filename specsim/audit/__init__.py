"""Is a scheduler lossless? Small decoders are worked out exactly, and the law of what comes out is compared.

A verification scheduler must leave the target's law as it is. It does if, whatever the confidences, the decision to
verify draft token k looks only at what comes before token k: at earlier tokens of its block, at past steps, and at
other requests' tokens as long as the decisions about those were made first. Algorithm 1's early stop and the K largest
current survivals with K fixed beforehand do so (Appendix A and §5.2 of arXiv 2607.05147); the best Θ of all K does not,
nor does a threshold on the drafter's probability of the very token that it drops.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from specsim.asking import TooLong, check_callable
from specsim.audit.case import Counterexample, explained
from specsim.audit.found import TOLERANCE, Audit, Verified
from specsim.audit.law import Asked, distance_of
from specsim.audit.models import CONFIDENCES, Confidence, Instance, drawn, plain
from specsim.audit.simpler import simplified
from specsim.audit.sizes import MOST_STEPS, Size, not_looked_at, own_gamma, shares, sizes_for
from specsim.types import SpecsimError

__all__ = ["CONFIDENCES", "MOST_STEPS", "TOLERANCE", "Audit", "Counterexample", "Size", "audit"]

PLAIN, PLAIN_LONG = (50, 160), (12, 24)
"""Instances of plain numbers of each size, of one step and of several: those, one more for each drawn one, at most."""
TWICE = 20
"""Drawn instances of each size in which each question is put twice, as it is in all plain ones."""


def audit(
    scheduler: Any,
    *,
    confidence: Confidence = "head",
    instances: int = 10_000,
    histories: int = 200,
    steps: int = 3,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Audit:
    """Work out whether ``scheduler`` keeps the target's law, in small decoders with real rejection sampling.

    ``confidence`` is what it is told of draft token k: "head", any function of the tokens before k (right or wrong),
    or "draft_prob", the drafter's own probability of token k. ``instances`` of one step (vocabulary 2 and 3, γ 1 to
    3, one or two requests) and ``histories`` of ``steps`` steps, 1 to 6 (vocabulary 2, γ 1 and 2; requests join late
    or pause; two of them in 4 steps at most) are drawn with ``seed``, beside some of plain numbers. A scheduler's
    ``gamma``, up to 8, makes blocks longer: of γ = 4 half as many are drawn, of 5 a quarter and so on, in fewer steps
    (``Size``); from 3 on they are of that length and, of one request in one step, one longer. ``progress(done,
    total)`` is called as they are worked out. Sizes come smallest first, and the first with a difference ends the
    audit.

    SpecsimError: what is no scheduler, an oracle, blocks too long, an answer that is no draft length, or that chance or
    hidden memory changes.
    """
    check_callable(scheduler)
    asked = Asked(scheduler)
    check_numbers(confidence, instances, histories, steps, seed)
    if getattr(scheduler, "oracle", False):
        raise SpecsimError(
            f"scheduler {asked.name}: knows what will be accepted: an upper bound, expected a scheduler that does not"
        )
    short, long = sizes_for(scheduler, steps)
    plan = [*zip(short, shares(instances, short), strict=True)]
    plan += zip(long, shares(histories, long), strict=True)
    plans = [(size, count, _plain_count(size, confidence, count)) for size, count in plan]
    plans = [worked for worked in plans if sum(worked[1:])]
    total = sum(count + plain_count for _, count, plain_count in plans)
    done = {False: 0, True: 0}
    largest = 0.0
    for i, (size, count, plain_count) in enumerate(plans):
        # Of each size the same instances in the same order, however many others there are.
        rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(*vars(size).values(),)))
        first = itertools.islice(plain(size, confidence), plain_count)
        worst: tuple[float, bool, Instance] | None = None
        for n, (is_plain, instance) in enumerate(_tagged(first, size, confidence, rng, count)):
            asked.twice = is_plain or n < TWICE
            try:
                tv = distance_of(instance, asked)
            except SpecsimError as error:
                hint = _hint(scheduler, size.gamma, error)
                if hint:
                    raise SpecsimError(f"{error} ({hint})") from error
                raise
            largest = max(largest, tv)
            done[size.steps > 1] += 1
            if tv > TOLERANCE and (worst is None or (is_plain == worst[1] and tv > worst[0] + 1e-9)):
                worst = tv, is_plain, instance
            if progress is not None:
                progress(sum(done.values()), total)
        if worst is not None:
            found = worst[2] if worst[1] else simplified(worst[2], asked, TOLERANCE)
            case, seen = explained(found, asked, TOLERANCE), plans[: i + 1]
            largest = max(largest, case.tv)
            break
    else:
        case, seen = None, plans
    sizes = [size for size, *_ in seen]
    missing = () if case else not_looked_at(sizes, steps)
    counts = done[False], done[True], asked.calls
    verified: Verified = "none" if not asked.verified else "some" if asked.left_out else "all"
    looked = asked.reads_confidence, verified
    return Audit(asked.name, confidence, *looked, largest, *counts, tuple(sizes), missing, case)


def _hint(scheduler: Any, gamma: int, error: SpecsimError) -> str | None:
    """What helps where a scheduler cannot do with blocks of ``gamma`` tokens."""
    own, answered = own_gamma(scheduler), isinstance(error, TooLong)
    if own_gamma(scheduler, "exact_gamma") is not None:
        return None
    if own is None and (answered or isinstance(error.__cause__, IndexError)):
        return f"asked about blocks of {gamma}; a field gamma would say which ones it is made for"
    if own is not None and gamma > own >= 1 and (answered or error.__cause__ is not None):
        return f"asked about blocks of {gamma}; exact_gamma = {own} would say that it takes no longer ones"
    return None


def check_numbers(confidence: str, instances: int, histories: int, steps: int, seed: int) -> None:
    """SpecsimError, in the argument's name, for numbers that cannot be worked out."""
    if confidence not in CONFIDENCES:
        raise SpecsimError(f"confidence: expected {' or '.join(CONFIDENCES)}, got {confidence!r}")
    for name, value, low, high in (
        ("instances", instances, 0, 10_000_000), ("histories", histories, 0, 1_000_000),
        ("steps", steps, 1, MOST_STEPS), ("seed", seed, 0, 2**63),
    ):  # fmt: skip
        if not isinstance(value, int | np.integer) or isinstance(value, bool) or not low <= value <= high:
            raise SpecsimError(f"{name}: expected a whole number, {low} to {high:,}, got {value!r}")


def _plain_count(size: Size, confidence: Confidence, count: int) -> int:
    if size.blocks > 3**4 or size.telling < size.gamma:
        return 0
    least, most = PLAIN_LONG if size.steps > 1 else PLAIN
    most = min(least + count, most)
    return sum(1 for _ in itertools.islice(plain(size, confidence), most))


def _tagged(first: Any, size: Size, confidence: Confidence, rng: np.random.Generator, count: int) -> Any:
    """Plain instances, then drawn ones, told apart."""
    for instance in first:
        yield True, instance
    for _ in range(count):
        yield False, drawn(size, confidence, rng)
