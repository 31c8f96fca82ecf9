"""One way to ask any drafter: read what the target has seen, start blocks after anchors, draft.

A drafter has ``gamma``, ``target_layers`` (the target layers it reads, maybe none), ``vocabulary`` (the
tokens it can propose, None: all) and three methods: ``context`` makes an empty memory, ``read`` takes
tokens and the target's states into it, ``block`` starts blocks after anchors, whose ``next`` gives
the logits of one position after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from specsim.types import SpecsimError


class Blocks(Protocol):
    """Blocks in the making."""

    def next(self, before: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits [S, A, V'] of the next position after tokens ``before`` int[S, A], and confidence logits [S, A]."""
        ...


class Drafter(Protocol):
    """What every drafter is to its callers."""

    gamma: int
    target_layers: tuple[int, ...]
    vocabulary: Tensor | None

    def context(self, rows: int, size: int) -> Any:
        """An empty memory of ``rows`` sequences of up to ``size`` tokens.

        Its ``part(first, last, size)`` are some of its rows, sharing storage; ``move(rows, first, size)`` moves rows.
        """
        ...

    def read(self, context: Any, tokens: Tensor, hidden: Tensor | None, slots: Tensor) -> None:
        """Take in ``tokens`` int[S, n + 1], and ``hidden`` [S, n, m, d] of the first n, at ``slots`` [S, n]."""
        ...

    def block(self, context: Any, anchors: Tensor, positions: Tensor) -> Blocks:
        """Start blocks after ``anchors`` int[S, A] at ``positions`` [S, A], blind to what stands after them."""
        ...


@dataclass(frozen=True)
class Draft:
    """Drafted blocks. ``tokens`` int[S, A, γ] of the target's vocabulary; ``draft_prob`` [S, A, γ] of each of them;
    ``q`` are the γ distributions [S, A, V'] they were drawn from; ``confidence`` [S, A, γ] in 0..1 or None;
    ``proposed`` int[S, A] tokens proposed (a lookup may find fewer than γ).
    """

    tokens: Tensor
    draft_prob: Tensor
    q: list[Tensor]
    confidence: Tensor | None
    proposed: Tensor


Choose = Callable[[int, Tensor], Tensor]
"""Picks a token of the draft vocabulary int[S, A] at position k (0-based) from its probabilities [S, A, V']."""


@torch.inference_mode()
def draft(
    drafter: Drafter, context: Any, anchors: Tensor, positions: Tensor, temperature: float | Tensor, choose: Choose
) -> Draft:
    """Draft γ tokens after each of ``anchors`` int[S, A] at ``positions`` [S, A], many at once.

    ``choose`` draws each token from the drafter's distribution at ``temperature`` (one, or [S, 1]): :func:`sampler`
    freely, the recorder coupled to what the target said.
    """
    blocks = drafter.block(context, anchors, positions)
    before = anchors
    tokens, distributions, probs, confidences = [], [], [], []
    for k in range(drafter.gamma):
        logits, confidence = blocks.next(before)
        q = probabilities(logits, temperature)
        chosen = choose(k, q)
        distributions.append(q)
        probs.append(q.gather(-1, chosen[..., None])[..., 0])
        before = chosen if drafter.vocabulary is None else drafter.vocabulary[chosen]
        tokens.append(before)
        confidences.append(None if confidence is None else confidence.float().sigmoid())
    draft_prob = torch.stack(probs, -1)
    if draft_prob.isnan().any():
        raise SpecsimError("drafter: its logits are not numbers, expected weights that do not overflow")
    heads = [c for c in confidences if c is not None]
    return Draft(
        tokens=torch.stack(tokens, -1),
        draft_prob=draft_prob,
        q=distributions,
        confidence=torch.stack(heads, -1) if heads else None,
        proposed=(draft_prob > 0).cumprod(-1).sum(-1),
    )


def probabilities(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """softmax(logits / T), float32; one-hot at T = 0; all zero where nothing is proposed (logits all -inf).

    A tensor of temperatures has a value for each distribution, or broadcasts to them.
    """
    wide = logits.float()
    if isinstance(temperature, Tensor):
        warm = probabilities(wide / torch.where(temperature > 0, temperature, 1.0)[..., None], 1.0)
        return torch.where((temperature > 0)[..., None], warm, probabilities(wide, 0.0))
    if temperature == 0:
        best = wide.argmax(-1, keepdim=True)
        q = torch.zeros_like(wide).scatter_(-1, best, 1.0)
    else:
        q = (wide if temperature == 1 else wide / temperature).softmax(-1)
    nothing = wide.amax(-1, keepdim=True).isneginf()
    return torch.where(nothing, 0.0, q) if nothing.any() else q


def over_target(q: Tensor, vocabulary: Tensor | None, vocab_size: int) -> Tensor:
    """Probabilities ``q`` [.., V'] of the draft ``vocabulary`` as [.., V] of the target's."""
    if vocabulary is None:
        return q
    full = q.new_zeros(*q.shape[:-1], vocab_size)
    full[..., vocabulary] = q
    return full


SPAN = 64
BELOW_ONE = 1 - 2**-53


def pick(weights: Tensor, generator: torch.Generator) -> Tensor:
    """Draw an index int[..] in proportion to ``weights`` [.., n]; index 0 where all are zero.

    By the inverse of the cumulated weights, first among spans of SPAN entries and then within one: a large
    vocabulary costs one sum, not a random number a token.
    """
    if odd := weights.shape[-1] % SPAN:
        weights = torch.nn.functional.pad(weights, (0, SPAN - odd))
    spans = weights.unflatten(-1, (-1, SPAN))
    draws = torch.rand(weights.shape[:-1], generator=generator, device=weights.device, dtype=torch.double)
    span, rest = _inverse(spans.sum(-1), draws)
    place, _ = _inverse(spans.take_along_dim(span[..., None, None], -2)[..., 0, :], rest)
    return span * SPAN + place


def _inverse(weights: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """Where ``draws`` [..] in 0..1 fall among the cumulated ``weights`` [.., n], and how far into that entry (0..1)."""
    weights = weights.double()
    cumulated = weights.cumsum(-1)
    level = draws[..., None] * cumulated[..., -1:]
    # Right of equals: an entry of no weight is never drawn, unless all have none.
    place = torch.searchsorted(cumulated, level, right=True).clamp(max=weights.shape[-1] - 1)
    place = torch.where(cumulated[..., -1:] > 0, place, 0)
    own = weights.gather(-1, place)
    into = 1 - (cumulated.gather(-1, place) - level) / own
    return place[..., 0], into.nan_to_num(0)[..., 0].clamp(0, BELOW_ONE)


def sampler(generator: torch.Generator) -> Choose:
    """Draw freely from the drafter's distribution."""
    return lambda _, q: pick(q, generator)
