"""Blocks for a drafter to learn from: anchors of answers, the tokens after them, and the target's distributions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specsim.drafters.responses import Response
from specsim.drafters.target import Target


@dataclass(frozen=True)
class Batch:
    """S answers with A anchors each.

    ``hidden`` [S, L, m, d] are the target's states (of the drafter's layers) and ``tokens`` int[S, L + 1]
    the tokens, padded at the end; ``positions`` [S, A] of the anchors; ``block`` int[S, A, γ + 1]: the
    anchor and the γ tokens that follow it; ``final`` [S, A, γ, d] and ``log_normalizer`` [S, A, γ] give the
    target's distribution of each of these γ.
    """

    hidden: Tensor
    tokens: Tensor
    positions: Tensor
    block: Tensor
    final: Tensor
    log_normalizer: Tensor


def anchor_range(response: Response, gamma: int) -> tuple[int, int]:
    """Positions [first, end) of the answer whose block of ``gamma`` lies within what was recorded.

    The first anchor is the answer's first token. An answer shorter than a block has none.
    """
    first = response.prompt_tokens
    return first, min(first + response.output_tokens, len(response.tokens) - gamma)


def make_batch(
    responses: Sequence[Response], positions: Tensor, columns: Sequence[int], final: int, gamma: int
) -> Batch:
    """Gather ``responses`` and their anchors at ``positions`` int[S, A].

    ``columns`` are the places of the drafter's layers in the responses' ``hidden``, ``final`` that of the last layer.
    """
    longest = max(len(r.tokens) for r in responses)
    m, d = len(columns), responses[0].hidden.shape[-1]
    hidden = torch.zeros(len(responses), longest - 1, m, d)
    tokens = torch.zeros(len(responses), longest, dtype=torch.long)
    for row, r in enumerate(responses):
        hidden[row, : len(r.tokens) - 1] = r.hidden[:-1, list(columns)].float()
        tokens[row, : len(r.tokens)] = r.tokens
    steps = positions[..., None] + torch.arange(gamma)
    return Batch(
        hidden=hidden,
        tokens=tokens,
        positions=positions,
        block=torch.stack(
            [r.tokens[p[:, None] + torch.arange(gamma + 1)] for r, p in zip(responses, positions, strict=True)]
        ),
        final=torch.stack([r.hidden[s, final].float() for r, s in zip(responses, steps, strict=True)]),
        log_normalizer=torch.stack([r.log_normalizer[s] for r, s in zip(responses, steps, strict=True)]),
    )


def draw_batch(
    responses: Sequence[Response],
    rows: int,
    anchors: int,
    columns: Sequence[int],
    final: int,
    gamma: int,
    rng: np.random.Generator,
) -> Batch:
    """``rows`` answers at random with ``anchors`` anchors each, spread at random over the answer."""
    chosen = [responses[i] for i in rng.integers(len(responses), size=rows)]
    positions = []
    for r in chosen:
        first, end = anchor_range(r, gamma)
        positions.append(
            torch.from_numpy(np.sort(rng.choice(end - first, anchors, replace=end - first < anchors)) + first)
        )
    return make_batch(chosen, torch.stack(positions), columns, final, gamma)


def target_probabilities(
    target: Target, final: Tensor, log_normalizer: Tensor, temperature: float, vocabulary: Tensor | None
) -> Tensor:
    """The target's probabilities [.., V'] of the draft vocabulary, from its final states [.., d].

    They sum to less than 1 by what lies outside of it.
    """
    head = target.head if vocabulary is None else target.head[vocabulary]
    logits = final.to(target.device, head.dtype) @ head.T
    return (logits.float() / (temperature or 1.0) - log_normalizer.to(target.device)[..., None]).exp()


def draft_ids(vocabulary: Tensor | None, vocab_size: int) -> Tensor:
    """int[V]: the place of every token in the draft ``vocabulary`` int[V'], -1 for those outside of it."""
    if vocabulary is None:
        return torch.arange(vocab_size)
    ids = torch.full((vocab_size,), -1, device=vocabulary.device)
    ids[vocabulary] = torch.arange(len(vocabulary), device=vocabulary.device)
    return ids.cpu()
