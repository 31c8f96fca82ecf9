"""The drafter's forward: a parallel backbone with a sequential head (DSpark), or one forward a token (Eagle, MTP).

Weights are random and the target's embedding and head are shared. Source of the shape: arXiv 2607.05147.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from specsim.measure.attention import Plan
from specsim.measure.model import Decoder, Layer, Weights, make_layer, matrix

FOLDED = 5
"""Target layers that a parallel drafter reads."""


class DraftWeights(NamedTuple):
    """Weights of a drafter. ``fold`` [hidden, inputs] brings the states that it reads to its width.

    ``markov_in``, ``markov_out`` [vocab, rank] bias a position's logits by the token before it, ``confidence``
    [1, hidden + rank] says how sure it is: the head loop, which only a parallel drafter has.
    """

    fold: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    markov_in: Tensor | None
    markov_out: Tensor | None
    confidence: Tensor | None


class DraftBatch(NamedTuple):
    """Drafting for R sequences: ``anchors`` [R], ``states`` of the target, the block's ``positions`` and its plan.

    ``states`` [R * (γ + 1), 5 hidden] of the tokens just verified for a parallel drafter, [R, hidden] for an
    autoregressive one; ``slots`` [R * (γ + 1)] are the positions of those states.
    """

    anchors: Tensor
    states: Tensor
    positions: Tensor
    slots: Tensor
    plan: Plan


def make_draft_weights(
    decoder: Decoder, kind: str, layers: int, rank: int, like: Tensor, generator: Any
) -> DraftWeights:
    """Random weights of a drafter of ``layers`` layers of the target's shape."""
    shape, parallel = decoder.shape, kind == "parallel"
    return DraftWeights(
        fold=matrix(shape.hidden, (FOLDED if parallel else 2) * shape.hidden, like, generator),
        layers=tuple(make_layer(shape, like, generator) for _ in range(layers)),
        norm=like.new_ones(shape.hidden),
        markov_in=matrix(shape.vocab, rank, like, generator) if parallel else None,
        markov_out=matrix(shape.vocab, rank, like, generator) if parallel else None,
        confidence=matrix(1, shape.hidden + rank, like, generator) if parallel else None,
    )


def draft_block(
    decoder: Decoder, target: Weights, weights: DraftWeights, batch: DraftBatch, gamma: int
) -> tuple[Tensor, Tensor]:
    """Draft γ tokens for each sequence in one forward and a loop of light heads; tokens [γ, R], confidences [γ, R].

    First the states of the tokens just verified are folded, and their keys and values are computed, as a drafter
    that reads the target's states has to do in every step.
    """
    assert weights.markov_in is not None
    assert weights.markov_out is not None
    assert weights.confidence is not None
    shape, count = decoder.shape, len(batch.anchors)
    cos, sin = target.cos[batch.slots, None], target.sin[batch.slots, None]
    features = linear(batch.states, weights.fold)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    for layer in weights.layers:
        k, _ = linear(features, layer.qkv[queries:]).split(keys, -1)
        k = k.view(len(k), -1, shape.head_dim)
        decoder.fused.rotate(k, k, layer.key_norm, layer.key_norm, cos, sin)
    block = batch.anchors[:, None].repeat(1, gamma)
    block[:, 1:] = 0  # masks
    cos, sin = target.cos[batch.positions, None], target.sin[batch.positions, None]
    hidden = decoder.run(weights.layers, target.embed[block.flatten()], weights.norm, cos, sin, batch.plan)
    base = linear(hidden, target.head).view(count, gamma, -1)
    hidden = hidden.view(count, gamma, -1)
    before, tokens, sure = batch.anchors, [], []
    for k in range(gamma):
        token = weights.markov_in[before]
        sure.append(linear(torch.cat((hidden[:, k], token), -1), weights.confidence)[:, 0].sigmoid())
        before = (base[:, k] + linear(token, weights.markov_out)).argmax(-1)
        tokens.append(before)
    return torch.stack(tokens), torch.stack(sure)


def draft_chain(
    decoder: Decoder, target: Weights, weights: DraftWeights, batch: DraftBatch, gamma: int
) -> tuple[Tensor, Tensor]:
    """Draft γ tokens for each sequence, one forward each; tokens [γ, R] and their probabilities [γ, R]."""
    cos, sin = target.cos[batch.positions, None], target.sin[batch.positions, None]
    before, state, tokens, sure = batch.anchors, batch.states, [], []
    for _ in range(gamma):
        x = linear(torch.cat((target.embed[before], state), -1), weights.fold)
        state = decoder.run(weights.layers, x, weights.norm, cos, sin, batch.plan)
        logits = linear(state, target.head)
        before = logits.argmax(-1)
        sure.append(logits.float().softmax(-1).gather(-1, before[:, None])[:, 0])
        tokens.append(before)
    return torch.stack(tokens), torch.stack(sure)
