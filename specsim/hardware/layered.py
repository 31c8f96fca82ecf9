"""Step costs put together from kernels: by tokens, by logits rows, and attention by its own shape."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from specsim.hardware.shape import Axis, Part, Prices, Shape, last_slope
from specsim.hardware.tables import Count, Seconds, SecondsOrNone, increasing, same_length

Whole = Annotated[int, Field(ge=0, le=1 << 31)]
AXES = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
NAMES = ("tokens in a prefill chunk", "KV tokens before a prefill", "decoding sequences", "KV tokens of a sequence")


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
        if not any(c == 0 and n > 0 for c, _, n, _ in points):
            raise ValueError("n_decode: expected points of decoding without a prefill (prefill_chunk 0)")
        return self


class Skew(Part):
    """How much a batch of unequal lengths costs above one where all have the mean length.

    seconds = A(mean) + alpha · (A(longest) − A(mean)), alpha by buckets, each given by its upper edges
    (``skew_rate`` = (mean − shortest) / (longest − shortest)); ``default`` where no bucket was measured.
    The correction of LLMServingSim's skew_fit.csv.
    """

    prefill_chunk: tuple[Whole, ...]
    n_decode: tuple[Whole, ...]
    skew_rate: tuple[float, ...]
    kv_longest: tuple[Whole, ...]
    kv_prefill: tuple[Whole, ...]
    alpha: tuple[float, ...]
    default: float = 0.0

    @model_validator(mode="after")
    def _check(self) -> Skew:
        for name in ("n_decode", "skew_rate", "kv_longest", "kv_prefill", "alpha"):
            same_length(name, getattr(self, name), "prefill_chunk", self.prefill_chunk)
        return self


class Layered(Part):
    """Verify seconds as the sum of a model's kernels.

    ``tokens``: everything that works token by token, at the tokens in the forward. ``rows``: output head
    and sampler, at the rows of logits (one for each decode and draft token, one for each prefill).
    ``attention`` by its own shape; with ``kv_reads="once"`` the draft tokens of a sequence share one read
    of its KV (a lower bound), with ``"per_query"`` each token reads it again, as if it were a sequence of
    its own (an upper bound). Each prefill in a step adds what it would add alone beside the decodes.
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
        tokens = _spread(self.tokens, max_tokens, extrapolate)
        if self.capture_sizes:
            count = np.arange(max_tokens + 1)
            sizes = np.array([s for s in self.capture_sizes if s <= max_tokens] or [0])
            padded = sizes[np.minimum(np.searchsorted(sizes, count), len(sizes) - 1)]
            tokens[:-1] = tokens[np.maximum(count, padded)]
        return LayeredSurface(
            tokens=tokens,
            rows=_spread(self.rows, max_tokens, extrapolate),
            attention=Grid(self.attention, extrapolate),
            per_query=self.kv_reads == "per_query",
            alpha=_Buckets(self.skew) if self.skew else None,
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
    alpha: _Buckets | None
    last_tokens: int
    last_rows: int

    @property
    def needs_lengths(self) -> bool:
        """Whether prices depend on the shortest and longest decoding sequence."""
        return self.alpha is not None

    def curve(self, shape: Shape, most: int) -> Prices:
        """Seconds [most + 1] with 0..``most`` draft tokens."""
        n, chunks = shape.num_seqs, shape.chunks
        base, rows = n + sum(chunks), n + len(chunks)
        context = shape.kv_tokens / n if n else 0.0
        attention: Any = self._attention(shape, n, context)
        if self.per_query and n and most:
            attention += self.attention.decodes(n, most, context)
        seconds: Prices = self.tokens[base : base + most + 1] + self.rows[rows : rows + most + 1] + attention
        return seconds

    def _attention(self, shape: Shape, n: int, context: float) -> float:
        seconds = self._skewed(0, 0, n, context, shape)
        if not shape.chunks:
            return seconds
        alone = seconds
        for chunk, history in zip(shape.chunks, shape.histories, strict=True):
            seconds += self._skewed(chunk, history, n, context, shape) - alone
        return seconds

    def _skewed(self, chunk: int, history: int, n: int, context: float, shape: Shape) -> float:
        mean = self.attention.at(chunk, history, n, context)
        if self.alpha is None or n < 2 or not shape.longest > context:
            return mean
        rate = (context - shape.shortest) / (shape.longest - shape.shortest)
        longest = self.attention.at(chunk, history, n, shape.longest)
        return mean + max(0.0, longest - mean) * self.alpha.of(chunk, n, rate, shape.longest, history)

    def axes(self, shape: Shape, num_tokens: int) -> list[Axis]:
        """Tokens, rows of logits, and the axes of attention."""
        n, chunks = shape.num_seqs, shape.chunks
        rows = num_tokens - sum(chunks) + len(chunks)
        queries = num_tokens - sum(chunks) if self.per_query else n
        axes: list[Axis] = [("tokens", num_tokens, 1, self.last_tokens), ("rows of logits", rows, 0, self.last_rows)]
        context = shape.kv_tokens / n if n else 0
        longest = max(context, shape.longest if self.alpha else 0)
        return axes + self.attention.axes(chunks, shape.histories, queries, n, longest)


class Grid:
    """Attention seconds on the full grid that the points span, and which entries lie between measured ones."""

    def __init__(self, attention: Attention, extrapolate: bool) -> None:
        columns = [np.array(getattr(attention, name)) for name in AXES]
        axes = [np.unique(np.append(column, 0)) for column in columns]
        place = tuple(np.searchsorted(axis, column) for axis, column in zip(axes, columns, strict=True))
        table = np.full([len(axis) for axis in axes], np.nan)
        table[place] = attention.seconds
        self.extrapolate, self.places = extrapolate, [axis.tolist() for axis in axes]
        filled, self.known = _full(table, axes)
        if not extrapolate:
            filled[~self.known] = np.inf
        self.table: list[Any] = filled.tolist()  # Python floats: a look-up touches 16 of them at most

    def at(self, chunk: int, history: int, n: int, context: float) -> float:
        """Seconds at one shape; infinite outside what was measured, unless extrapolated."""
        shape = [self._spot(2, n), self._spot(3, context)]
        if not chunk:
            return self._mix(self.table[0][0], shape)
        if len(self.places[0]) == 1:
            return math.inf  # no prefill was measured: nothing to extrapolate from
        return self._mix(self.table, [self._spot(0, chunk), self._spot(1, history), *shape])

    def _mix(self, block: Any, spots: list[tuple[int, float]]) -> float:
        """Interpolate in the axes of ``block``, one spot each."""
        (i, share), rest = spots[0], spots[1:]
        low: float = self._mix(block[i], rest) if rest else block[i]
        if not share or low == math.inf:
            return low
        if share > 1 and not self.extrapolate:
            return math.inf
        high: float = self._mix(block[i + 1], rest) if rest else block[i + 1]
        if share <= 1:
            return low + (high - low) * share
        return high + max(0.0, high - low) * (share - 1)

    def decodes(self, n: int, most: int, context: float) -> Prices:
        """What 0..``most`` queries beside ``n`` add, each reading ``context`` tokens, [most + 1]."""
        at = np.array(self.places[2], dtype=np.float64)
        prices = np.array([self.at(0, 0, k, context) for k in self.places[2]])
        count = np.arange(n, n + most + 1)
        with np.errstate(invalid="ignore"):
            out = np.nan_to_num(np.interp(count, at, prices), nan=np.inf)  # towards a price that is infinite
        beyond = count > at[-1]
        if beyond.any():
            slope = last_slope(at, prices) if self.extrapolate else math.inf
            out[beyond] = prices[-1] + slope * (count[beyond] - at[-1])
        return np.asarray(out - out[0], dtype=np.float64)

    def _spot(self, axis: int, value: float) -> tuple[int, float]:
        """Place below ``value`` on an axis and the share of the way to the next; a share above 1 is beyond the end.

        Nothing is interpolated towards 0, which stands for a prefill or decodes that are not there; only a
        history of 0 is a length like any other.
        """
        places = self.places[axis]
        if value <= 0:
            return 0, 0.0
        if len(places) == 1:
            return 0, 0.0 if self.extrapolate else math.inf
        if axis != 1 and value < places[1]:
            return 1, 0.0
        i = min(bisect_right(places, value) - 1, len(places) - 2)
        if i == 0 and axis != 1:  # one place besides 0
            return 1, 0.0 if value == places[1] or self.extrapolate else math.inf
        share = (value - places[i]) / (places[i + 1] - places[i])
        return (i + 1, 0.0) if share == 1 else (i, share)

    def axes(self, chunks: Any, histories: Any, queries: int, n: int, context: float) -> list[Axis]:
        """The axes of attention with their ranges; beside a prefill fewer sequences may have been measured."""
        last = [places[-1] for places in self.places]
        axes: list[Axis] = [(NAMES[2], queries, 0, last[2]), (NAMES[3], math.ceil(context), 0, last[3])]
        if len(chunks):
            axes += [(NAMES[0], max(chunks), 1, last[0]), (NAMES[1], max(histories), 0, last[1])]
            axes.append((f"{NAMES[2]} beside a prefill", n, 0, self._beside))
        return axes

    @cached_property
    def _beside(self) -> int:
        known = self.known[1:].all(axis=(0, 1, 3))  # of each number of sequences: beside every prefill
        return int(self.places[2][int(np.flatnonzero(known).max(initial=0))])


class _Buckets:
    """The alpha of a bucket, found by its upper edges."""

    def __init__(self, skew: Skew) -> None:
        columns = (skew.prefill_chunk, skew.n_decode, skew.skew_rate, skew.kv_longest, skew.kv_prefill)
        self.edges = [sorted(set(column)) for column in columns]
        self.default = skew.default
        self.alpha: dict[tuple[float, ...], float] = dict(zip(zip(*columns, strict=True), skew.alpha, strict=True))

    def of(self, *values: float) -> float:
        """The alpha of (chunk, sequences, skew rate, longest KV, history)."""
        key = []
        for edges, value in zip(self.edges, values, strict=True):
            i = bisect_right(edges, value)
            key.append(edges[i - 1] if i and edges[i - 1] == value else edges[min(i, len(edges) - 1)])
        return self.alpha.get(tuple(key), self.default)


def _full(table: NDArray[np.float64], axes: list[NDArray[np.int64]]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """The table without holes, and which entries were measured or lie between measured ones.

    Entries are chunk, history, sequences, context. Where no prefill was measured beside decodes, attention
    is the sum of both alone.
    """
    table[0, 0, 0, 0] = 0.0
    separate = not np.isfinite(table[1:, :, 1:, 1:]).any()
    whole = (slice(None),) * 4
    none = slice(1)
    parts: list[tuple[tuple[slice, ...], tuple[int, ...]]] = [(whole, (3, 1, 0, 2))]
    if separate:
        parts = [((*whole[:2], none, none), (1, 0)), ((none, none, *whole[2:]), (3, 2))]
    for part, order in parts:
        for axis in order:
            _fill(table[part], axes[axis], axis, beyond=False)
    known = ~np.isnan(table)
    for part, order in parts:
        for axis in order:
            _fill(table[part], axes[axis], axis, beyond=True)
    for values in (table, known):
        values[:, :, 1:, 0] = values[:, :, 1:, min(1, len(axes[3]) - 1)]  # a context of 0: the shortest
        values[:, :, 0, :] = values[:, :, 0, :1]  # without decodes their length means nothing
        values[0] = values[0, :1]  # nor does a history without a prefill
    if separate:
        table[1:, :, 1:, :] = table[1:, :, :1, :] + table[:1, :, 1:, :]
        known[1:, :, 1:, :] = known[1:, :, :1, :] & known[:1, :, 1:, :]
    return table, known


def _fill(table: NDArray[np.float64], places: NDArray[np.int64], axis: int, beyond: bool) -> None:
    """Fill holes along one axis, in place: linear between entries, with ``beyond`` the last slope after them.

    The place 0 takes no part (nothing is there) but on the axis of histories, where it is a length.
    """
    first = 0 if axis == 1 else 1
    lines, at = np.moveaxis(table, axis, -1)[..., first:], places[first:].astype(np.float64)
    for index in np.argwhere(np.isnan(lines).any(axis=-1)):
        line = lines[tuple(index)]
        there = np.flatnonzero(~np.isnan(line))
        if len(there):
            low, high = int(there[0]), int(there[-1]) + 1
            line[low:high] = np.interp(at[low:high], at[there], line[there])
            if beyond:
                line[:low] = line[low]
                line[high:] = line[high - 1] + last_slope(at[there], line[there]) * (at[high:] - at[high - 1])


def _spread(curve: Curve, size: int, extrapolate: bool) -> Prices:
    """Prices [size + 2] at 0..size and, infinite, beyond."""
    at, price = np.array(curve.at, dtype=np.float64), np.array(curve.seconds)
    count = np.arange(size + 1)
    out = np.interp(count, at, price)
    beyond = count > at[-1]
    out[beyond] = price[-1] + last_slope(at, price) * (count[beyond] - at[-1]) if extrapolate else np.inf
    out[0] = 0.0
    return np.append(out, np.inf)
