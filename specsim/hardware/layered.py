"""Step costs put together from kernels: by tokens, by logits rows, and attention by its own shape."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, model_validator

from specsim.hardware.attention import Buckets, Grid
from specsim.hardware.shape import Axis, Part, Prices, Shape
from specsim.hardware.tables import Count, Seconds, SecondsOrNone, increasing, padded, same_length, spread_line

Number = Annotated[float, Field(allow_inf_nan=False)]
Whole = Annotated[int, Field(ge=0, le=1 << 31)]
BUCKETS = ("prefill_chunk", "n_decode", "skew_rate", "kv_longest", "kv_prefill")
AXES = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")


class Curve(Part):
    """Seconds at increasing sizes, linear between them; below the first size the first price."""

    at: tuple[Count, ...] = Field(min_length=1)
    seconds: tuple[SecondsOrNone, ...]

    @model_validator(mode="after")
    def _check(self) -> Curve:
        increasing("at", self.at)
        same_length("seconds", self.seconds, "at", self.at)
        return self


class Attention(Part):
    """Attention seconds of the whole model at measured points, one entry of each list a point.

    A forward with one prefill of ``prefill_chunk`` tokens after ``kv_prefill`` in the cache (0 and 0: none)
    beside ``n_decode`` sequences of one query, each with ``kv_decode`` tokens of KV (0 and 0: none). The
    points need not fill the grid that they span: what lies between measured neighbours is interpolated.
    """

    prefill_chunk: tuple[Whole, ...] = Field(min_length=1)
    kv_prefill: tuple[Whole, ...]
    n_decode: tuple[Whole, ...]
    kv_decode: tuple[Whole, ...]
    seconds: tuple[Seconds, ...]

    @model_validator(mode="after")
    def _check(self) -> Attention:
        for name in (*AXES[1:], "seconds"):
            same_length(name, getattr(self, name), AXES[0], self.prefill_chunk)
        points = set(zip(*(getattr(self, name) for name in AXES), strict=True))
        if len(points) != len(self.seconds):
            raise ValueError("seconds: expected one entry a point, got a point twice")
        for i, (c, h, n, k) in enumerate(zip(*(getattr(self, name) for name in AXES), strict=True)):
            if not c and h:
                raise ValueError(f"kv_prefill[{i}]: expected 0 without a prefill, got {h}")
            if (n > 0) != (k > 0):
                raise ValueError(f"kv_decode[{i}]: expected KV tokens of each of n_decode, got {k} for {n}")
            if not c and not n:
                raise ValueError(f"prefill_chunk[{i}]: expected a prefill or decodes, got neither")
        if not any(c == 0 and n > 0 for c, _, n, _ in points):
            raise ValueError("n_decode: expected points of decoding without a prefill (prefill_chunk 0)")
        return self


class Skew(Part):
    """How much a batch of unequal lengths costs above one where all have the mean length.

    seconds = A(mean) + alpha · (A(longest) − A(mean)), alpha by buckets, each given by its upper edges
    (``skew_rate`` = (mean − shortest) / (longest − shortest)); ``default`` where no bucket was measured.
    The correction of LLMServingSim's skew_fit.csv.
    """

    prefill_chunk: tuple[Whole, ...] = Field(min_length=1)
    n_decode: tuple[Whole, ...]
    skew_rate: tuple[Number, ...]
    kv_longest: tuple[Whole, ...]
    kv_prefill: tuple[Whole, ...]
    alpha: tuple[Number, ...]
    default: Number = 0.0

    @model_validator(mode="after")
    def _check(self) -> Skew:
        for name in (*BUCKETS[1:], "alpha"):
            same_length(name, getattr(self, name), "prefill_chunk", self.prefill_chunk)
        if len(set(zip(*(getattr(self, name) for name in BUCKETS), strict=True))) != len(self.alpha):
            raise ValueError("alpha: expected one entry a bucket, got a bucket twice")
        return self


class Layered(Part):
    """Verify seconds as the sum of a model's kernels.

    ``tokens``: everything that works token by token, at the tokens in the forward. ``rows``: output head
    and sampler, at the rows of logits (one for each decode and draft token, one for each prefill).
    ``attention`` by its own shape; with ``kv_reads="once"`` the draft tokens of a sequence share one read
    of its KV (a lower bound), with ``"per_query"`` each token reads it again, as if it were a sequence of
    its own (an upper bound). Of several prefills in a step the largest is priced beside the decodes, and each
    other one as it would be alone: what they would cost the decodes too, the largest has cost them already.
    ``capture_sizes``: token-wise kernels are padded up to the next of them (CUDA graphs).
    """

    type: Literal["layered"] = "layered"
    tokens: Curve
    rows: Curve
    attention: Attention
    kv_reads: Literal["once", "per_query"] = "once"
    capture_sizes: tuple[Count, ...] = ()
    skew: Skew | None = None

    @model_validator(mode="after")
    def _check(self) -> Layered:
        increasing("capture_sizes", self.capture_sizes)
        if self.capture_sizes and self.capture_sizes[-1] > self.tokens.at[-1]:
            raise ValueError(
                f"capture_sizes: expected at most {self.tokens.at[-1]}, the last of tokens.at, "
                f"got {self.capture_sizes[-1]}"
            )
        return self

    @property
    def range(self) -> tuple[int, int]:
        """Smallest and largest token count that has a price."""
        return 1, self.tokens.at[-1]

    @property
    def capture_limit(self) -> int | None:
        """The largest CUDA graph."""
        return self.capture_sizes[-1] if self.capture_sizes else None

    def surface(self, max_tokens: int, max_seqs: int, extrapolate: bool) -> LayeredSurface:
        """Spread out for steps of up to ``max_tokens`` tokens and ``max_seqs`` sequences."""
        count = np.arange(max_tokens + 1)
        if self.capture_sizes:
            sizes = np.array(self.capture_sizes)
            count = np.maximum(count, sizes[np.minimum(np.searchsorted(sizes, count), len(sizes) - 1)])
        tokens = np.append(_spread(self.tokens, int(count.max()), extrapolate)[count], np.inf)
        tokens[0] = self.tokens.seconds[0] if extrapolate else np.inf  # as in tables: no step without tokens
        points = [getattr(self.attention, name) for name in AXES]
        skew = self.skew
        return LayeredSurface(
            tokens=tokens,
            rows=_spread(self.rows, max_tokens, extrapolate),
            attention=Grid(points, self.attention.seconds, extrapolate),
            per_query=self.kv_reads == "per_query",
            alpha=Buckets([getattr(skew, name) for name in BUCKETS], skew.alpha, skew.default) if skew else None,
            last_tokens=self.tokens.at[-1],
            last_rows=self.rows.at[-1],
        )


@dataclass(frozen=True)
class LayeredSurface:
    """Prices by tokens and by rows [max tokens + 2], and the attention grid."""

    tokens: Prices
    rows: Prices
    attention: Grid
    per_query: bool
    alpha: Buckets | None
    last_tokens: int
    last_rows: int

    @property
    def needs_lengths(self) -> bool:
        """Whether prices depend on the shortest and longest decoding sequence."""
        return self.alpha is not None

    def curve(self, shape: Shape, most: int) -> Prices:
        """Seconds [most + 1] with 0..``most`` draft tokens."""
        n, chunks = shape.num_seqs, shape.chunks
        base, rows = shape.num_tokens, n + len(chunks)
        context = shape.kv_tokens / n if n else 0.0
        attention: Any = self._attention(shape, n, context)
        if self.per_query and n and most:
            attention = attention + self.attention.decodes(n, most, context)
        seconds: Prices = self.tokens[base : base + most + 1] + self.rows[rows : rows + most + 1] + attention
        return seconds

    def _attention(self, shape: Shape, n: int, context: float) -> float:
        """Seconds of attention where each decode has one query."""
        grid, alpha = self.attention, self.alpha
        mean = grid.beside(n, context)
        alone = grid.decode(mean)
        uneven = alpha is not None and n > 1 and shape.longest > context
        if alpha is not None and uneven:
            rate = (context - shape.shortest) / (shape.longest - shape.shortest)
            batch = alpha.edge(1, n), alpha.edge(2, rate), alpha.edge(3, shape.longest)
            longest = grid.beside(n, shape.longest)
            alone = _uneven(alone, grid.decode(longest), alpha.of(0, 0, batch))
        if not shape.chunks:
            return alone
        chunk, history, others = _beside(shape)
        price = grid.prefill(chunk, history, mean)
        if alpha is not None and uneven:
            price = _uneven(price, grid.prefill(chunk, history, longest), alpha.of(chunk, history, batch))
        nothing = grid.beside(0, 0)
        for chunk, history in others:
            price += grid.prefill(chunk, history, nothing)
        return price if alone < math.inf else alone

    def axes(self, shape: Shape, num_tokens: int) -> list[Axis]:
        """Tokens, rows of logits, and the axes of attention."""
        n, chunks = shape.num_seqs, shape.chunks
        decoding = num_tokens - sum(chunks)
        axes: list[Axis] = [
            ("tokens", num_tokens, 1, self.last_tokens),
            ("rows of logits", decoding + len(chunks), 0, self.last_rows),
        ]
        contexts = [shape.kv_tokens / n if n else 0.0]
        if self.per_query and n:
            axes += self.attention.axes(0, 0, decoding, contexts[0])
        if self.alpha is not None and n > 1 and shape.longest > contexts[0]:
            contexts.append(shape.longest)
        chunk, history, others = _beside(shape) if chunks else (0, 0, [])
        for context in contexts:
            axes += self.attention.axes(chunk, history, n, context)
        for chunk, history in others:
            axes += self.attention.axes(chunk, history, 0, 0)
        return axes


def _beside(shape: Shape) -> tuple[int, int, list[tuple[int, int]]]:
    """Chunk and history of the prefill that is priced beside the decodes, the largest; and the other prefills."""
    prefills = list(zip(shape.chunks, shape.histories, strict=True))
    largest = prefills.pop(prefills.index(max(prefills)) if len(prefills) > 1 else 0)
    return *largest, prefills


def _uneven(mean: float, longest: float, alpha: float) -> float:
    """Seconds of a batch of unequal lengths, from those of its mean length and of its longest."""
    if mean == math.inf or longest == math.inf:
        return math.inf
    return max(0.0, mean + max(0.0, longest - mean) * alpha)


def _spread(curve: Curve, size: int, extrapolate: bool) -> Prices:
    """Prices [size + 2] at 0..size and, infinite, beyond."""
    out = spread_line(curve.at, curve.seconds, size, extrapolate)
    out[0] = 0.0
    return padded(out)
