"""Step costs from a model's shape and a GPU's ratings: for hardware that nobody measured.

Every kernel takes the longer of its FLOPs at the reachable FLOP/s and its bytes at the reachable bandwidth,
and a constant besides. What that leaves out (tiles that do not divide, caches, overlap, the engine's own time)
is why the kind of such a profile is analytic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, model_validator

from specsim.hardware.devices import BANDWIDTH_EFFICIENCY, FLOPS_EFFICIENCY, KERNEL_SECONDS, Device
from specsim.hardware.model_shape import BYTES, Dtype, ModelShape, kv_bytes_on_gpu
from specsim.hardware.shape import Axis, Part, Prices, Shape
from specsim.hardware.tables import Count

LIMIT = 1 << 20
"""The most tokens of a step. Nothing was measured, so no range ends; this only catches slips."""

ACTIVATION = BYTES["bf16"]
SAMPLER_KERNELS = 8
"""LLMServingSim's sampler takes 25 µs for one sequence on an RTX 4090 and on an RTX PRO 6000: eight kernels' worth."""

LEAST_SHARE = 1e-3
"""No kernel is so far below the ratings; a smaller share is a slip."""
Share = Annotated[float, Field(ge=LEAST_SHARE, le=1)]


class Roofline(Part):
    """Verify seconds of ``model`` on ``tp`` GPUs of one kind, worked out from their ratings.

    A GEMM of B tokens, K inputs and N outputs: max(2·B·K·N / (FLOP/s · efficiency), bytes / (bandwidth ·
    efficiency)) + ``kernel_seconds``, weights read once. Experts: a step of B tokens reads in expectation
    E·(1 − (1 − k/E)^B) of them. Output head and sampler by rows of logits. Attention: the KV of each decoding
    sequence is read once for its token and its drafts together; prefill chunks are causal over their history.
    ``tp`` GPUs split weights and heads, and each layer has two all-reduces: link_seconds + 2(tp−1)/tp · bytes /
    (link_bandwidth · efficiency).

    ``weights`` and ``kv`` are their number formats; activations, embedding, router and head are bf16.
    ``kernel_seconds`` is what a kernel costs whatever it does: launched from a CUDA graph by default, more
    where none are used.
    """

    type: Literal["roofline"] = "roofline"
    model: ModelShape
    device: Device
    tp: Count = 1
    weights: Dtype = "bf16"
    kv: Dtype = "bf16"
    flops_efficiency: Share = FLOPS_EFFICIENCY
    bandwidth_efficiency: Share = BANDWIDTH_EFFICIENCY
    kernel_seconds: Annotated[float, Field(ge=0, le=1)] = KERNEL_SECONDS

    @model_validator(mode="after")
    def _check(self) -> Roofline:
        if self.model.heads % self.tp:
            raise ValueError(f"tp: expected a divisor of the {self.model.heads} heads, got {self.tp}")
        kv_heads = self.model.kv_heads
        if kv_heads % self.tp and self.tp % kv_heads:
            raise ValueError(f"tp: expected a divisor or a multiple of the {kv_heads} kv_heads, got {self.tp}")
        if self.weights == "fp8" and self.device.fp8_flops is None:
            raise ValueError(f"weights: {self.device.name} has no rating for fp8, expected bf16")
        return self

    @property
    def range(self) -> tuple[int, int]:
        """Smallest and largest token count that has a price: no measurement bounds it."""
        return 1, LIMIT

    @property
    def capture_limit(self) -> int | None:
        """None: no cliff is known of."""
        return None

    def surface(self, max_tokens: int, max_seqs: int, extrapolate: bool) -> RooflineSurface:
        """Spread out for steps of up to ``max_tokens`` tokens."""
        count = np.arange(max_tokens + 1, dtype=np.float64)
        parts = [sum(parts(count).values(), np.zeros_like(count)) for parts in (self.by_tokens, self.by_rows)]
        for prices in parts:
            prices[0] = 0.0
            prices[LIMIT + 1 :] = np.inf
        m, heads = self.model, self.model.heads / self.tp
        return RooflineSurface(
            tokens=np.append(parts[0], np.inf),
            rows=np.append(parts[1], np.inf),
            per_kv_token=kv_bytes_on_gpu(m, self.kv, self.tp) / self._bandwidth,
            per_pair=4 * heads * m.head_dim * m.layers / self._flops("bf16"),
        )

    def by_tokens(self, count: Prices) -> dict[str, Prices]:
        """Seconds of the kernels that work token by token, by name, each in the shape of ``count`` tokens."""
        m, tp = self.model, self.tp
        q, kv = m.heads / tp * m.head_dim, max(1, m.kv_heads / tp) * m.head_dim
        dense = m.layers - m.moe_layers
        parts = {
            "embedding": self._move(count * m.hidden * 2),
            # Each norm adds the residual first: two vectors read, two written.
            "norms": m.layers * self._move(count * m.hidden * 8, kernels=2),
            "qkv": m.layers * self._gemm(count, m.hidden, q + 2 * kv),
            "rotary": m.layers * self._move(count * 2 * (q + kv)),
            "cache write": m.layers * self._move(count * 4 * kv),
            # What attention costs by its shape is added for each step; its kernel, and the one that combines
            # its parts, are launched in every step.
            "attention kernels": m.layers * self._move(0 * count, kernels=2),
            "attention output": m.layers * self._gemm(count, q, m.hidden),
        }
        if dense:
            parts |= {k: dense * v for k, v in self._feed_forward(count, m.intermediate / tp, "").items()}
        if m.moe_layers:
            parts |= {k: m.moe_layers * v for k, v in self._experts(count).items()}
        if tp > 1:
            parts["all-reduce"] = 2 * m.layers * self._all_reduce(count * m.hidden)
        return parts

    def by_rows(self, rows: Prices) -> dict[str, Prices]:
        """Seconds of what works on rows of logits: final norm, head and sampler."""
        m, tp = self.model, self.tp
        parts = {
            "final norm": self._move(rows * m.hidden * 4),
            "head": self._gemm(rows, m.hidden, m.vocab / tp, "bf16"),
            # Logits are turned to 32 bits and read again for the choice.
            "sampler": self._move(rows * m.vocab * 4, kernels=SAMPLER_KERNELS),
        }
        if tp > 1:
            sent = rows * m.vocab * ACTIVATION * (tp - 1) / tp
            parts["logits gather"] = self.device.link_seconds + sent / self._link
        return parts

    def _feed_forward(self, count: Prices, width: float, prefix: str) -> dict[str, Prices]:
        return {
            f"{prefix}gate and up": self._gemm(count, self.model.hidden, 2 * width),
            f"{prefix}activation": self._move(count * 3 * width),
            f"{prefix}down": self._gemm(count, width, self.model.hidden),
        }

    def _experts(self, count: Prices) -> dict[str, Prices]:
        m, k = self.model, self.model.experts_per_token
        width = m.expert_intermediate / self.tp
        active = m.experts * (1 - (1 - k / m.experts) ** count)
        parts = {
            "router": self._gemm(count, m.hidden, m.experts, "bf16"),
            "routing": self._move(count * m.experts, kernels=2),  # the choice, and the sort by expert
            "experts' gate and up": self._gemm(count * k, m.hidden, 2 * width, copies=active),
            "experts' activation": self._move(count * k * 3 * width),
            "experts' down": self._gemm(count * k, width, m.hidden, copies=active),
            "experts' sum": self._move(count * (k + 1) * m.hidden),
        }
        if m.shared_intermediate:
            parts |= self._feed_forward(count, m.shared_intermediate / self.tp, "shared experts' ")
        return parts

    def _gemm(self, count: Prices, k: float, n: float, weights: Dtype | None = None, copies: Any = 1) -> Prices:
        """Seconds of ``count`` rows times ``copies`` weight matrices [k, n], each row meeting one of them."""
        weights = weights or self.weights
        flops = 2 * count * k * n
        size = copies * k * n * BYTES[weights] + count * (k + n) * ACTIVATION
        longer: Prices = np.maximum(flops / self._flops(weights), size / self._bandwidth)
        return longer + self.kernel_seconds

    def _move(self, numbers: Prices, kernels: int = 1) -> Prices:
        """Seconds to read or write so many bf16 numbers in so many kernels."""
        return kernels * self.kernel_seconds + numbers * ACTIVATION / self._bandwidth

    def _all_reduce(self, numbers: Prices) -> Prices:
        sent = 2 * (self.tp - 1) / self.tp * numbers * ACTIVATION
        return self.device.link_seconds + sent / self._link

    def _flops(self, dtype: Dtype) -> float:
        rated = self.device.fp8_flops if dtype == "fp8" else None
        return (rated or self.device.bf16_flops) * self.flops_efficiency

    @property
    def _bandwidth(self) -> float:
        return self.device.bandwidth * self.bandwidth_efficiency

    @property
    def _link(self) -> float:
        return self.device.link_bandwidth * self.bandwidth_efficiency


@dataclass(frozen=True)
class RooflineSurface:
    """Prices by tokens and by rows of logits [max tokens + 2], and what attention costs.

    ``per_kv_token``: seconds to read the KV of one token in all layers; ``per_pair``: seconds of the FLOPs of
    one query on one token of context.
    """

    tokens: Prices
    rows: Prices
    per_kv_token: float
    per_pair: float
    needs_lengths = False

    def curve(self, shape: Shape, most: int) -> Prices:
        """Seconds [most + 1] with 0..``most`` draft tokens."""
        n, kv = shape.num_seqs, shape.kv_tokens
        base, rows, fixed = n, n, 0.0
        if shape.chunks:
            base, rows = n + sum(shape.chunks), n + len(shape.chunks)
            for chunk, history in zip(shape.chunks, shape.histories, strict=True):
                pairs = chunk * (history + (chunk + 1) / 2)
                fixed += max((history + chunk) * self.per_kv_token, pairs * self.per_pair)
        seconds: Prices = self.tokens[base : base + most + 1] + self.rows[rows : rows + most + 1]
        read, query = kv * self.per_kv_token, self.per_pair * kv / n if n else 0.0
        if query * (n + most) <= read:  # the common case: memory bounds decoding, drafts or not
            seconds += read + fixed
        else:
            seconds += np.maximum(read, query * np.arange(n, n + most + 1)) + fixed
        return seconds

    def axes(self, shape: Shape, num_tokens: int) -> list[Axis]:
        """Tokens alone: nothing else was given a range."""
        return [("tokens", num_tokens, 1, LIMIT)]
