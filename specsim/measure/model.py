"""A lean decoder with random weights: the target's forward over one ragged batch, ready to be captured as a graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from specsim.hardware import ModelShape
from specsim.measure.attention import Cache, Plan, fill

EPS = 1e-6
THETA = 10000.0


class Layer(NamedTuple):
    """Weights of a layer: projections [out, in], norms [width]; head norms only where the shape has them."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    before: Tensor
    between: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None


class Weights(NamedTuple):
    """Weights of a decoder; ``cos`` and ``sin`` [positions, d / 2] are the rotary angles'."""

    embed: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Tensor
    cos: Tensor
    sin: Tensor


class Batch(NamedTuple):
    """One forward: ``tokens`` and ``positions`` [N], padding last; ``rows`` [M] are those that need logits."""

    tokens: Tensor
    positions: Tensor
    rows: Tensor
    plan: Plan


class Fused(NamedTuple):
    """The element-wise parts between matrix products; compiled into one kernel each, or as they are."""

    rotate: Callable[..., tuple[Tensor, Tensor]]
    add_norm: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    gated: Callable[[Tensor], Tensor]
    compiled: bool


def rotate(
    q: Tensor, k: Tensor, query_norm: Tensor | None, key_norm: Tensor | None, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Norm the heads of ``q`` [N, heads, d] and ``k`` (where there are norms) and turn them by their positions."""
    if query_norm is not None and key_norm is not None:
        q, k = rms_norm(q, q.shape[-1:], query_norm, EPS), rms_norm(k, k.shape[-1:], key_norm, EPS)
    return _turn(q, cos, sin), _turn(k, cos, sin)


def add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of both [N, width], normed and as it is."""
    total = x + residual
    return rms_norm(total, total.shape[-1:], weight, EPS), total


def gated(x: Tensor) -> Tensor:
    """SwiGLU of gate and up, side by side in the last axis."""
    gate, up = x.chunk(2, -1)
    return silu(gate) * up


def make_fused(compiled: bool) -> Fused:
    """The element-wise parts, through torch.compile or plainly."""
    if not compiled:
        return Fused(rotate, add_norm, gated, False)
    first, second, third = (torch.compile(part, dynamic=True) for part in (rotate, add_norm, gated))
    return Fused(first, second, third, True)


def make_layer(shape: ModelShape, like: Tensor, generator: Any) -> Layer:
    """A layer of ``shape`` with random weights of ``like``'s dtype and device."""
    width, queries, keys = shape.head_dim, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norm = like.new_ones(width) if shape.qk_norm else None
    return Layer(
        qkv=matrix(queries + 2 * keys, shape.hidden, like, generator),
        out=matrix(shape.hidden, queries, like, generator),
        gate_up=matrix(2 * shape.intermediate, shape.hidden, like, generator),
        down=matrix(shape.hidden, shape.intermediate, like, generator),
        before=like.new_ones(shape.hidden),
        between=like.new_ones(shape.hidden),
        query_norm=norm,
        key_norm=norm,
    )


def make_weights(shape: ModelShape, like: Tensor, positions: int, generator: Any) -> Weights:
    """Random weights of ``shape``, for sequences of up to ``positions`` tokens."""
    embed = matrix(shape.vocab, shape.hidden, like, generator)
    half = shape.head_dim // 2
    frequency = THETA ** (-torch.arange(half, device=like.device, dtype=torch.float32) / half)
    angle = torch.arange(positions, device=like.device, dtype=torch.float32)[:, None] * frequency
    return Weights(
        embed=embed,
        layers=tuple(make_layer(shape, like, generator) for _ in range(shape.layers)),
        norm=like.new_ones(shape.hidden),
        head=embed if shape.tied else matrix(shape.vocab, shape.hidden, like, generator),
        cos=angle.cos().to(like.dtype),
        sin=angle.sin().to(like.dtype),
    )


def matrix(outputs: int, inputs: int, like: Tensor, generator: Any) -> Tensor:
    """A random projection [outputs, inputs] that keeps the scale of what goes through."""
    return fill(like.new_empty(outputs, inputs), inputs**-0.5, generator)


@dataclass(frozen=True)
class Decoder:
    """Layers that share a cache: one step of them over a batch."""

    shape: ModelShape
    cache: Cache
    fused: Fused

    def run(self, layers: tuple[Layer, ...], x: Tensor, norm: Tensor, cos: Tensor, sin: Tensor, plan: Plan) -> Tensor:
        """Take ``x`` [N, hidden] through ``layers`` and the last ``norm``; ``cos``, ``sin`` [N, 1, d / 2]."""
        s = self.shape
        sizes = [s.heads * s.head_dim, s.kv_heads * s.head_dim, s.kv_heads * s.head_dim]
        normed = rms_norm(x, x.shape[-1:], layers[0].before, EPS)
        following = [*(layer.before for layer in layers[1:]), norm]
        for i, (layer, after) in enumerate(zip(layers, following, strict=True)):
            q, k, v = (t.view(len(x), -1, s.head_dim) for t in linear(normed, layer.qkv).split(sizes, -1))
            q, k = self.fused.rotate(q, k, layer.query_norm, layer.key_norm, cos, sin)
            mixed = linear(self.cache.attend(i, q, k, v, plan), layer.out)  # type: ignore[arg-type]
            normed, x = self.fused.add_norm(mixed, x, layer.between)
            fed = linear(self.fused.gated(linear(normed, layer.gate_up)), layer.down)
            normed, x = self.fused.add_norm(fed, x, after)
        return normed

    def logits(self, weights: Weights, batch: Batch) -> Tensor:
        """The target's logits [M, vocab] of the batch's ``rows``."""
        cos, sin = weights.cos[batch.positions, None], weights.sin[batch.positions, None]
        hidden = self.run(weights.layers, weights.embed[batch.tokens], weights.norm, cos, sin, batch.plan)
        out: Tensor = linear(hidden[batch.rows], weights.head)
        return out


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)
