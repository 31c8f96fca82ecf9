"""How large the instances are that an audit works out, how many of each, and what is too long to be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specsim.asking import scheduler_name
from specsim.types import SpecsimError

MOST_GAMMA = 8
MOST_STEPS = 6
MOST_WHOLE = 3
"""γ up to which two requests' confidences may depend on all tokens of their blocks; beyond, on a few."""
FULL_GAMMA = 3
"""γ up to which as many instances are drawn as are asked for; beyond, each further token halves the number."""


@dataclass(frozen=True)
class Size:
    """How large an instance is: tokens in the vocabulary, drafts a block, requests, steps."""

    vocabulary: int
    gamma: int
    requests: int
    steps: int

    @property
    def blocks(self) -> int:
        """Drafts of a step, all requests together."""
        return int(self.vocabulary ** (self.gamma * self.requests))

    @property
    def telling(self) -> int:
        """How many tokens of a block its confidences may depend on: all, or few, for fewer views to ask about."""
        if self.steps == 1:
            return self.gamma if self.requests == 1 or self.gamma <= MOST_WHOLE else 3
        if self.requests * self.gamma <= 4:
            return self.gamma
        return 2 if self.requests == 1 else 1

    @property
    def length(self) -> int:
        """Tokens compared: as many as the last step can add to the fewest before it; of large sizes, a block and 1."""
        return self.gamma + (self.steps if self.telling == self.gamma else 1)


def own_gamma(scheduler: Any, field: str = "gamma") -> int | None:
    """The length of blocks in a ``field`` of a scheduler, None without one.

    A gamma that is no whole number is something else (a discount, say), as for engines; of exact_gamma SpecsimError.
    """
    gamma = getattr(scheduler, field, None)
    if isinstance(gamma, int | np.integer) and not isinstance(gamma, bool):
        return int(gamma)
    if gamma is None or field == "gamma":
        return None
    got = repr(gamma) if isinstance(gamma, str | float | bool) else type(gamma).__name__
    raise SpecsimError(f"scheduler {scheduler_name(scheduler)}: {field}: expected a whole number, got {got}")


def sizes_for(scheduler: Any, steps: int) -> tuple[list[Size], list[Size]]:
    """Sizes of one step and of up to ``steps`` (none for 1) that ``scheduler`` can be asked about, smallest first.

    One whose ``gamma`` is 3 or more can be run on longer blocks too, and is asked about one token more.
    """
    exact, own = own_gamma(scheduler, "exact_gamma"), own_gamma(scheduler)
    least = 1 if own is None else own
    if exact is not None and exact < 1:
        raise SpecsimError(f"scheduler {scheduler_name(scheduler)}: exact_gamma: expected 1 or more, got {exact}")
    if max(exact or 0, least) > MOST_GAMMA:
        raise SpecsimError(
            f"scheduler {scheduler_name(scheduler)}: gamma: expected blocks of at most {MOST_GAMMA} tokens, which can "
            f"be enumerated, got {max(exact or 0, least)}"
        )

    def fitting(most: int) -> list[int]:
        return [exact] if exact is not None else [g for g in range(1, most + 1) if g >= least] or [int(least)]

    short = [Size(v, g, r, 1) for v in (2, 3) for g in fitting(3) for r in (1, 2)]
    short = [s for s in short if s.vocabulary == 2 or s.blocks <= (3**4 if s.gamma > MOST_WHOLE else 3**6)]
    long = [Size(2, g, r, min(steps, _most_steps(g, r))) for g in fitting(2) for r in (1, 2)]
    long = [s for s in long if s.steps > 1]
    if exact is None and FULL_GAMMA <= least < MOST_GAMMA:
        short.append(Size(2, least + 1, 1, 1))
    short, long = (sorted(sizes, key=lambda s: (s.blocks, s.requests)) for sizes in (short, long))
    return short, long


def _most_steps(gamma: int, requests: int) -> int:
    """Steps that can be worked out with histories told apart: each multiplies those."""
    if requests == 1:
        return MOST_STEPS if gamma <= 2 else 4 if gamma <= 4 else 3
    return 4 if gamma <= 2 else 2 if gamma <= 6 else 1


def shares(total: int, sizes: list[Size]) -> list[int]:
    """How many instances of each size are drawn: as many of each, and fewer of blocks beyond ``FULL_GAMMA``.

    Those of blocks beyond a scheduler's gamma come on top.
    """
    if not sizes:
        return []
    main = [s for s in sizes if not one_longer(s, sizes)]
    each = {size: total // len(main) + (i < total % len(main)) for i, size in enumerate(main)}
    return [-(-each.get(size, total // len(main)) // fewer(size)) for size in sizes]


def one_longer(size: Size, sizes: Sequence[Size]) -> bool:
    """Whether the blocks of ``size`` are one longer than the gamma of a scheduler that has 3 or more."""
    return size.gamma > max(FULL_GAMMA, min(s.gamma for s in sizes))


def fewer(size: Size) -> int:
    """What the number of instances of ``size`` is divided by."""
    return int(2 ** max(0, size.gamma - FULL_GAMMA))


def not_looked_at(sizes: list[Size], steps: int) -> tuple[str, ...]:
    """What is missing from the ``sizes`` worked out, of those of a scheduler that takes any γ, in words."""
    gamma = max(s.gamma for s in sizes if not one_longer(s, sizes))
    most = {r: max((s.steps for s in sizes if s.requests == r), default=0) for r in (1, 2)}
    too_long = ["a vocabulary of 3"] * all(s.vocabulary == 2 for s in sizes)
    others = []
    for requests, who in ((1, "one request"), (2, "two requests")):
        if max(most.values()) == 1 or most[requests] == steps:
            continue
        beyond = f"{who} in {f'more than {most[requests]}' if most[requests] > 1 else 'several'} steps"
        if most[requests] < min(steps, _most_steps(1, requests)):
            too_long.append(beyond)
        else:
            others.append(f"{beyond} (too many histories)")
    if too_long:
        others.insert(0, f"{', '.join(too_long)} (γ = {gamma} is too long to enumerate)")
    if max(most.values()) == 1:
        asked = "steps are 1" if steps == 1 else "histories are 0"
        others.append(f"memory from step to step ({asked})")
    return tuple(others)
