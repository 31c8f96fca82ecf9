"""What a measured profile says: the step's curve, one more token's cost, and where that stops being free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specsim.hardware import Additive, Profile, Shape, step_cost
from specsim.types import Floats, Ints

FREE = 0.10
"""A token counts as free while the step lasts at most this share longer than that of a single token."""


@dataclass(frozen=True)
class Curves:
    """Prices by token count: ``tokens`` [n] from 1, all in between.

    ``block_seconds`` [n]: verification in full blocks of γ + 1 at the reference context. ``alone_seconds`` [n]:
    one sequence at that context, so that nothing but the tokens changes. ``sizes`` [m], a sixth apart or more, and
    ``marginal`` [m - 1] (seconds a token) between them: what one more token costs. ``free_until``: the last size
    up to which every step is within FREE of a single token's; None where the largest size still is.
    """

    tokens: Ints
    block_seconds: Floats
    alone_seconds: Floats
    sizes: Ints
    marginal: Floats
    free_until: int | None


def curves(profile: Profile, gamma: int, context: int) -> Curves:
    """The curves of a measured profile at the reference ``context`` (tokens of KV a sequence)."""
    verify = profile.verify
    assert isinstance(verify, Additive)
    last = verify.range[1]
    tokens = np.arange(1, last + 1)
    cost = step_cost(profile, last, last, 0, extrapolate=True)
    full = [-(-int(n) // (1 + gamma)) for n in tokens]
    block = np.array([cost.seconds(Shape(r, r * context), int(n) - r) for r, n in zip(full, tokens, strict=True)])
    alone = cost.curve(Shape(1, context), last - 1)
    sizes = np.array(verify.tokens)
    apart = _apart(verify.tokens, verify.capture_limit)
    over = np.flatnonzero(alone[sizes - 1] > (1 + FREE) * alone[0])
    return Curves(
        tokens=tokens,
        block_seconds=block,
        alone_seconds=np.asarray(alone),
        sizes=apart,
        marginal=np.diff(alone[apart - 1]) / np.diff(apart),
        # A size's price holds for its tokens and, with graphs, for those padded up to it.
        free_until=int(sizes[max(0, over[0] - 1)]) if len(over) else None,
    )


def _apart(tokens: Sequence[int], capture_limit: int | None) -> Ints:
    """Sizes so far apart that their difference is more than noise; the largest graph too, after which a cliff is."""
    chosen = [tokens[0]]
    for size in tokens[1:]:
        if 6 * size >= 7 * chosen[-1] or size in (capture_limit, tokens[-1]):
            chosen.append(size)
    return np.array(chosen)
