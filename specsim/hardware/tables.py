"""Step costs as tables: by tokens, by tokens and KV tokens, and as a sum of parts; and what drafting costs.

Token counts are whole numbers, so a table is spread out once into one price per count; a step, or a
scheduler's array of candidate token counts, is then a plain look-up.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

import numpy as np
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from specsim.hardware.shape import Axis, Part, Prices, Shape, last_slope

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
SecondsOrNone = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=1 << 31)]
UNBOUNDED = 1 << 31
"""The end of a range that has none."""


class _Staircase(Part):
    """The rules by which a verify price depends on the tokens in the forward."""

    tokens: tuple[Count, ...] = Field(min_length=1)
    capture_limit: Count | None = None
    below: Literal["next_size", "linear", "floor"] = "next_size"
    above: Literal["linear", "flat"] = "linear"
    monotone: bool = False

    @property
    def range(self) -> tuple[int, int]:
        """Smallest and largest token count that has a price."""
        first = 1 if self.below == "next_size" else self.tokens[0]
        return first, UNBOUNDED if self.above == "flat" else self.tokens[-1]

    def spread(self, column: tuple[float, ...], size: int, extrapolate: bool) -> Prices:
        """Seconds [size + 1] for 0..size tokens from one column of seconds by ``tokens``.

        Outside the range infinite, or with ``extrapolate`` the last slope (below it, the first price).
        """
        at, price = np.array(self.tokens), np.array(column)
        if self.monotone:
            price = np.maximum.accumulate(price)
        count = np.arange(size + 1)
        graph = at <= (self.capture_limit or at[-1])
        out = np.empty(size + 1)
        if graph.any():
            if self.below == "linear":
                out = np.interp(count, at[graph], price[graph])
            elif self.below == "next_size":
                out = price[np.minimum(np.searchsorted(at, count), graph.sum() - 1)]
            else:
                out = price[np.clip(np.searchsorted(at, count, side="right") - 1, 0, graph.sum() - 1)]
        eager = ~graph
        if eager.any():
            beyond = count > at[graph].max(initial=0)
            out[beyond] = np.interp(count[beyond], at[eager], price[eager])
        first, last = self.range[0], self.tokens[-1]
        if self.above == "flat":
            out[count > last] = price[-1]
        elif extrapolate:
            out[count > last] = price[-1] + last_slope(at, price) * (count[count > last] - last)
        else:
            out[count > last] = np.inf
        out[count < first] = price[0] if extrapolate else np.inf
        return np.asarray(out, dtype=np.float64)


class Table1D(_Staircase):
    """Verify seconds by tokens in the forward.

    Up to ``capture_limit`` (the largest CUDA graph; null: the whole table) the rule is ``below``:
    ``next_size`` pads to the next captured size, a staircase; ``linear`` interpolates; ``floor``
    takes the size below. Above it (the eager tail) prices are linear between the sizes above the
    limit alone, and a count between the limit and the first of them costs that first one, so the
    cliff stays a cliff. ``monotone`` takes the running maximum over sizes, as vLLM does at load.
    ``above="flat"`` charges any larger step the last price, as SGLang does: tokens look free there.
    ``low`` and ``high`` bound the seconds: quartiles where measured, an interval where fitted (the
    provenance says which).
    """

    type: Literal["table1d"] = "table1d"
    seconds: tuple[Seconds, ...]
    low: tuple[SecondsOrNone, ...] | None = None
    high: tuple[SecondsOrNone, ...] | None = None

    @model_serializer(mode="wrap")
    def _without_absent(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Bounds and parts that are not there are left out of the file."""
        optional = ("low", "high", "kv_tokens", "kv_seconds")
        return {key: value for key, value in write(self).items() if value is not None or key not in optional}

    @model_validator(mode="after")
    def _check(self) -> Table1D:
        increasing("tokens", self.tokens)
        same_length("seconds", self.seconds, "tokens", self.tokens)
        for name in ("low", "high"):
            if (bound := getattr(self, name)) is not None:
                same_length(name, bound, "tokens", self.tokens)
        return self

    def surface(self, max_tokens: int, max_seqs: int, extrapolate: bool) -> TableSurface:
        """Spread out for steps of up to ``max_tokens`` tokens; prices depend on nothing else."""
        return TableSurface(
            padded(self.spread(self.seconds, max_tokens, extrapolate))[None, :], np.zeros(1), self.range
        )


class Table2D(_Staircase):
    """Verify seconds by tokens and by KV tokens read: ``seconds[i][j]`` at tokens i, KV tokens j.

    Each KV column follows the rules of Table1D; between columns the price is linear. A KV total
    below the first column costs the first; beyond the last it is outside the measured range.
    """

    type: Literal["table2d"] = "table2d"
    kv_tokens: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=2)
    seconds: tuple[tuple[Seconds, ...], ...]

    @model_validator(mode="after")
    def _check(self) -> Table2D:
        increasing("tokens", self.tokens)
        increasing("kv_tokens", self.kv_tokens)
        same_length("seconds", self.seconds, "tokens", self.tokens)
        for i, row in enumerate(self.seconds):
            same_length(f"seconds[{i}]", row, "kv_tokens", self.kv_tokens)
        return self

    def surface(self, max_tokens: int, max_seqs: int, extrapolate: bool) -> TableSurface:
        """Spread out for steps of up to ``max_tokens`` tokens, one row of prices a KV column."""
        columns = zip(*self.seconds, strict=True)
        prices = np.stack([padded(self.spread(column, max_tokens, extrapolate)) for column in columns])
        return TableSurface(prices, np.array(self.kv_tokens, dtype=np.float64), self.range, extrapolate)


class Additive(Table1D):
    """Verify seconds as a sum: by tokens (as Table1D), by sequences and, where given, by KV tokens read.

    ``seqs_seconds`` by ``num_seqs`` (decoding sequences and prefills alike) and ``kv_seconds`` by
    ``kv_tokens`` are linear between their points; before the first they cost the first, beyond the last
    the same rule holds as for tokens (``above``). Measured or fitted curves, SGLang's additive tables.
    """

    type: Literal["additive"] = "additive"  # type: ignore[assignment]
    num_seqs: tuple[Count, ...] = Field(min_length=1)
    seqs_seconds: tuple[SecondsOrNone, ...]
    kv_tokens: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    kv_seconds: tuple[SecondsOrNone, ...] | None = None

    @model_validator(mode="after")
    def _check_parts(self) -> Additive:
        increasing("num_seqs", self.num_seqs)
        same_length("seqs_seconds", self.seqs_seconds, "num_seqs", self.num_seqs)
        if (self.kv_tokens is None) != (self.kv_seconds is None) or self.kv_tokens == ():
            raise ValueError("kv_tokens, kv_seconds: expected both, with at least one entry, or neither")
        if self.kv_tokens is not None and self.kv_seconds is not None:
            increasing("kv_tokens", self.kv_tokens)
            same_length("kv_seconds", self.kv_seconds, "kv_tokens", self.kv_tokens)
        return self

    def surface(self, max_tokens: int, max_seqs: int, extrapolate: bool) -> AdditiveSurface:  # type: ignore[override]
        """Spread out for steps of up to ``max_tokens`` tokens and ``max_seqs`` sequences."""
        flat = self.above == "flat"
        kv_at, kv_price = np.array(self.kv_tokens or (0,), dtype=np.float64), np.array(self.kv_seconds or (0.0,))
        bounded = self.kv_tokens is not None and not flat and not extrapolate
        return AdditiveSurface(
            tokens=padded(self.spread(self.seconds, max_tokens, extrapolate)),
            seqs=spread_line(self.num_seqs, self.seqs_seconds, max_seqs, extrapolate or flat, flat),
            kv_at=kv_at,
            kv_price=kv_price,
            kv_slope=math.inf if bounded else last_slope(kv_at, kv_price) if extrapolate else 0.0,
            range=self.range,
            most_seqs=UNBOUNDED if flat else self.num_seqs[-1],
        )


class DraftCost(Part):
    """What drafting costs a step, by decoding sequences; linear between the sizes measured.

    ``parallel``: seconds of the whole block, whatever its length. ``autoregressive``: seconds of one
    of the γ forwards.
    """

    type: Literal["parallel", "autoregressive"]
    num_seqs: tuple[Count, ...] = Field(min_length=1)
    seconds: tuple[SecondsOrNone, ...]

    @model_validator(mode="after")
    def _check(self) -> DraftCost:
        increasing("num_seqs", self.num_seqs)
        same_length("seconds", self.seconds, "num_seqs", self.num_seqs)
        return self

    def spread(self, size: int, gamma: int, extrapolate: bool) -> Prices:
        """Seconds [size + 1] of drafting γ tokens for 0..size sequences; none for 0."""
        out = spread_line(self.num_seqs, self.seconds, size, extrapolate)
        out[0] = 0.0
        return np.asarray(out * (gamma if self.type == "autoregressive" else 1), dtype=np.float64)


@dataclass(frozen=True)
class TableSurface:
    """Prices [KV columns, max tokens + 2] by token count, the last entry standing for any larger count (infinite)."""

    prices: Prices
    kv_tokens: Prices
    range: tuple[int, int]
    extrapolate: bool = False
    needs_lengths = False

    def curve(self, shape: Shape, most: int) -> Prices:
        """Seconds [most + 1] with 0..``most`` draft tokens."""
        base, kv = shape.num_seqs, shape.kv_tokens
        if shape.chunks:
            base += sum(shape.chunks)
            kv += sum(shape.histories)
        return self._column(kv)[base : base + most + 1]

    def _column(self, kv: float) -> Prices:
        at = self.kv_tokens
        if len(at) == 1 or kv <= at[0]:
            return cast(Prices, self.prices[0])
        if kv > at[-1] and not self.extrapolate:
            return np.full_like(self.prices[0], np.inf)
        j = min(int(at.searchsorted(kv)), len(at) - 1)
        share = (kv - at[j - 1]) / (at[j] - at[j - 1])
        if share == 1.0:
            return cast(Prices, self.prices[j])
        with np.errstate(invalid="ignore"):  # inf - inf where both columns are outside the range
            mixed = (1 - share) * self.prices[j - 1] + share * self.prices[j]
        return np.where(np.isnan(mixed), np.inf, mixed)

    def axes(self, shape: Shape, num_tokens: int) -> list[Axis]:
        """Tokens, and KV tokens where prices depend on them."""
        axes: list[Axis] = [("tokens", num_tokens, *self.range)]
        if len(self.kv_tokens) > 1:
            axes.append(kv_axis(shape, int(self.kv_tokens[-1])))
        return axes


@dataclass(frozen=True)
class AdditiveSurface:
    """Prices by tokens [max tokens + 2] and by sequences [max + 1], and points by KV tokens with what follows them."""

    tokens: Prices
    seqs: Prices
    kv_at: Prices
    kv_price: Prices
    kv_slope: float
    range: tuple[int, int]
    most_seqs: int
    needs_lengths = False

    def curve(self, shape: Shape, most: int) -> Prices:
        """Seconds [most + 1] with 0..``most`` draft tokens."""
        base, seqs, kv = shape.num_seqs, shape.num_seqs, shape.kv_tokens
        if shape.chunks:
            base += sum(shape.chunks)
            seqs += len(shape.chunks)
            kv += sum(shape.histories)
        seconds: Prices = self.tokens[base : base + most + 1] + (self.seqs[seqs] + self._kv(kv))
        return seconds

    def _kv(self, kv: float) -> float:
        if kv <= self.kv_at[-1]:
            return float(np.interp(kv, self.kv_at, self.kv_price))
        return float(self.kv_price[-1] + self.kv_slope * (kv - self.kv_at[-1]))

    def axes(self, shape: Shape, num_tokens: int) -> list[Axis]:
        """Tokens, sequences, and KV tokens where prices depend on them."""
        axes: list[Axis] = [("tokens", num_tokens, *self.range)]
        axes.append(("sequences", shape.num_seqs + len(shape.chunks), 0, self.most_seqs))
        if len(self.kv_at) > 1 or self.kv_price.any():
            bounded = self.most_seqs < UNBOUNDED
            axes.append(kv_axis(shape, int(self.kv_at[-1]) if bounded else UNBOUNDED))
        return axes


def kv_axis(shape: Shape, most: int) -> Axis:
    """The axis of KV tokens read, by decodes and prefills."""
    return ("KV tokens", math.ceil(shape.kv_tokens + sum(shape.histories)), 0, most)


def spread_line(
    at: tuple[int, ...], price: tuple[float, ...], size: int, extrapolate: bool, flat: bool = False
) -> Prices:
    """Prices [size + 1] at 0..size, linear between the points; beyond the last infinite, its slope, or flat."""
    x, y, count = np.array(at, dtype=np.float64), np.array(price), np.arange(size + 1)
    out = np.interp(count, x, y)
    beyond = count > x[-1]
    slope = 0.0 if flat else last_slope(x, y)
    out[beyond] = y[-1] + slope * (count[beyond] - x[-1]) if extrapolate else np.inf
    return np.asarray(out, dtype=np.float64)


def padded(prices: Prices) -> Prices:
    """The prices with one entry more, which stands for any larger count: infinite."""
    return np.append(prices, np.inf)


def increasing(name: str, values: tuple[int, ...]) -> None:
    """Raise ValueError unless ``values`` increase."""
    for i, (a, b) in enumerate(itertools.pairwise(values)):
        if b <= a:
            raise ValueError(f"{name}[{i + 1}]: expected more than {a}, got {b}: sizes must increase")


def same_length(name: str, values: tuple[Any, ...], other: str, others: tuple[Any, ...]) -> None:
    """Raise ValueError unless there is a value for each of ``others``."""
    if len(values) != len(others):
        raise ValueError(f"{name}: expected {len(others)} entries, one for each of {other}, got {len(values)}")
