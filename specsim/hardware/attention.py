"""Attention seconds looked up between measured points, and the correction for sequences of unequal lengths."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specsim.hardware.shape import Axis, Prices, last_slope

NAMES = ("tokens in a prefill chunk", "KV tokens before a prefill", "decoding sequences", "KV tokens of a sequence")
NOWHERE = 1e250
"""A price no mixture of measured ones comes near: it stands for infinity, so that mixing it gives no NaN."""

Spot = tuple[int, float]
"""A place on an axis and the share of the way to the next; above 1 beyond the last."""
Beside = tuple[Spot, Spot]
"""Spots of a number of decoding sequences and of their KV length."""


class Grid:
    """Attention seconds on the full grid that points span, and which entries were measured or lie between those.

    ``points``: chunk, history, sequences and context [points each]; ``seconds`` [points]. Prices are linear in
    each axis between entries, and infinite outside the measured ones unless ``extrapolate``.
    """

    def __init__(self, points: Sequence[Sequence[int]], seconds: Sequence[float], extrapolate: bool) -> None:
        columns = [np.array(column, dtype=np.int64) for column in points]
        axes = [np.unique(np.append(column, 0)) for column in columns]
        place = tuple(np.searchsorted(axis, column) for axis, column in zip(axes, columns, strict=True))
        table = np.full([len(axis) for axis in axes], np.nan)
        table[place] = seconds
        self.extrapolate, self.places = extrapolate, [axis.tolist() for axis in axes]
        filled, self.known = fill(table, axes)
        filled[np.isnan(filled) if extrapolate else ~self.known] = NOWHERE
        self.table: list[Any] = filled.tolist()  # Python floats: a look-up touches 16 of them at most

    def beside(self, n: int, context: float) -> Beside:
        """The spots of ``n`` decoding sequences with ``context`` KV tokens each."""
        return self._spot(2, n), self._spot(3, context)

    def decode(self, beside: Beside) -> float:
        """Seconds of decodes alone."""
        (i, si), (j, sj) = beside
        look = _inside if si <= 1 and sj <= 1 else self._plane
        return _price(look(self.table[0][0], i, si, j, sj))

    def prefill(self, chunk: int, history: int, beside: Beside) -> float:
        """Seconds of one prefill and of the decodes beside it."""
        if len(self.places[0]) == 1:
            return math.inf  # no prefill was measured: nothing to extrapolate from
        (c, chunk_share), (h, history_share) = self._spot(0, chunk), self._spot(1, history)
        (i, si), (j, sj) = beside
        look = _inside if si <= 1 and sj <= 1 else self._plane
        block = self.table[c]
        price = look(block[h], i, si, j, sj)
        if history_share:
            price = self._mix(price, look(block[h + 1], i, si, j, sj), history_share)
        if chunk_share:
            block = self.table[c + 1]
            high = look(block[h], i, si, j, sj)
            if history_share:
                high = self._mix(high, look(block[h + 1], i, si, j, sj), history_share)
            price = self._mix(price, high, chunk_share)
        return _price(price)

    def at(self, chunk: int, history: int, n: int, context: float) -> float:
        """Seconds at one shape; infinite outside what was measured, unless extrapolated."""
        beside = self.beside(n, context)
        return self.prefill(chunk, history, beside) if chunk else self.decode(beside)

    def _plane(self, plane: Any, i: int, si: float, j: int, sj: float) -> float:
        """Mixed over sequences and context, for one entry of chunk and history."""
        row = plane[i]
        low: float = row[j]
        if sj:
            low = self._mix(low, row[j + 1], sj)
        if not si:
            return low
        row = plane[i + 1]
        high: float = row[j]
        if sj:
            high = self._mix(high, row[j + 1], sj)
        return self._mix(low, high, si)

    def _mix(self, low: float, high: float, share: float) -> float:
        if share <= 1:
            return low + (high - low) * share
        if not self.extrapolate or high >= NOWHERE:
            return NOWHERE
        return high + max(0.0, high - low) * (share - 1)  # a curve that ends falling is not followed down

    def decodes(self, n: int, most: int, context: float) -> Prices:
        """What 0..``most`` queries beside ``n`` add, each reading ``context`` tokens, [most + 1]."""
        spot = self._spot(3, context)
        at = np.array(self.places[2][1:], dtype=np.float64)
        prices = np.array([self.decode(((i, 0.0), spot)) for i in range(1, len(self.places[2]))])
        count = np.arange(n, n + most + 1)
        place = np.minimum(np.searchsorted(at, count), len(at) - 1)
        before = np.maximum(place - 1, 0)
        exact = (count >= at[place]) | (count <= at[0])
        share = np.where(exact, 1.0, (count - at[before]) / np.maximum(at[place] - at[before], 1))
        with np.errstate(invalid="ignore"):  # from an infinite price to another
            out = np.where(exact, prices[place], prices[before] + (prices[place] - prices[before]) * share)
        out[np.isnan(out)] = np.inf
        beyond = count > at[-1]
        if beyond.any():
            slope = last_slope(at, prices) if self.extrapolate and prices[-1] < math.inf else math.inf
            out[beyond] = prices[-1] + slope * (count[beyond] - at[-1])
        return np.asarray(out - out[0] if out[0] < math.inf else np.zeros(most + 1), dtype=np.float64)

    def _spot(self, axis: int, value: float) -> Spot:
        """Where ``value`` stands on an axis.

        Nothing is interpolated towards 0, which stands for a prefill or decodes that are not there; only a
        history of 0 is a length like any other.
        """
        places = self.places[axis]
        if value <= 0:
            return 0, 0.0
        i = bisect_right(places, value) - 1
        last = len(places) - 1
        if i == last:
            if value == places[i]:
                return i, 0.0
            # Beyond the end: from the last two places, or flat where there is one (besides that for nothing).
            if last - (axis != 1) >= 1:
                return i - 1, (value - places[i - 1]) / (places[i] - places[i - 1])
            return (i, 0.0) if self.extrapolate else (i - 1, math.inf)
        if i == 0 and axis != 1:
            return 1, 0.0
        return i, (value - places[i]) / (places[i + 1] - places[i])

    # What lies outside

    def axes(self, chunk: int, history: int, n: int, context: float) -> list[Axis]:
        """The axes of one look-up with the ranges that have a price beside its other sizes."""
        values = (chunk, history, n, context)
        used = (2, 3) if n else ()
        used = (*used, 0, 1) if chunk else used
        axes: list[Axis] = [(NAMES[a], math.ceil(values[a]), int(a == 0), self.places[a][-1]) for a in used]
        if any(value > high for _, value, _, high in axes):
            return axes
        spots = [self._near(axis, value) for axis, value in enumerate(values)]
        if not chunk:
            spots[0] = spots[1] = [0]
        if self.known[np.ix_(*spots)].all():
            return axes
        # Inside the box of all points, but not among them: the axis to move along is the first that can help.
        what = f" of {math.ceil(context):,} KV tokens" if n else ""
        for axis in (2, 3, 1, 0) if chunk else (2, 3):
            if axis not in used:
                continue
            others = [range(len(self.places[axis])) if a == axis else spots[a] for a in range(4)]
            known = np.array(self.known[np.ix_(*others)].all(axis=tuple(a for a in range(4) if a != axis)))
            # No size lies between 0, which is none of it, and the first; but a prefill may have no decodes beside it.
            first = int(axis != 1 and not (axis == 2 and chunk and known[0] and (known[1] or not known[1:].any())))
            there = first + np.flatnonzero(known[first:])
            if len(there) and (chunk or there[0]):
                name = NAMES[axis] + (what if axis == 2 else "") + (" beside a prefill" if chunk and axis == 2 else "")
                bounds = self.places[axis][there[0]], self.places[axis][there[-1]]
                return [*axes, (name, math.ceil(values[axis]), *bounds)]
        return [*axes, (NAMES[0], chunk, 0, 0) if chunk else (f"{NAMES[2]}{what}", n, 0, 0)]

    def _near(self, axis: int, value: float) -> list[int]:
        i, share = self._spot(axis, value)
        return [i, i + 1] if share else [i]


class Buckets:
    """The alpha of a bucket, found by its upper edges; beyond the last edge the last bucket."""

    def __init__(self, columns: Sequence[Sequence[float]], alpha: Sequence[float], default: float) -> None:
        self.edges = [sorted(set(column)) for column in columns]
        self.default = default
        self.alpha: dict[tuple[float, ...], float] = dict(zip(zip(*columns, strict=True), alpha, strict=True))

    def edge(self, axis: int, value: float) -> float:
        """The upper edge of the bucket of ``value``."""
        edges = self.edges[axis]
        return edges[min(bisect_left(edges, value), len(edges) - 1)]

    def of(self, chunk: int, history: int, batch: tuple[float, float, float]) -> float:
        """The alpha of a prefill beside a batch, whose buckets of sequences, skew rate and longest KV are given."""
        return self.alpha.get((self.edge(0, chunk), *batch, self.edge(4, history)), self.default)


def fill(table: Prices, axes: Sequence[NDArray[np.int64]]) -> tuple[Prices, NDArray[np.bool_]]:
    """The table without holes, and which entries were measured or lie between measured ones.

    Entries are chunk, history, sequences, context; those that are no number after it have nothing to be told
    from. Where no prefill was measured beside decodes, attention is the sum of both alone.
    """
    table[0, 0, 0, 0] = 0.0
    separate = not np.isfinite(table[1:, :, 1:, 1:]).any()
    from_history = bool(np.isfinite(table[1:, 0]).any())
    whole = (slice(None),) * 4
    none = slice(1)
    parts: list[tuple[tuple[slice, ...], tuple[int, ...]]] = [(whole, (3, 1, 0, 2))]
    if separate:
        parts = [((*whole[:2], none, none), (1, 0)), ((none, none, *whole[2:]), (3, 2))]
    known = np.empty(table.shape, dtype=np.bool_)
    for step in ("between", "slope", "flat"):
        holes = -1
        while holes != (holes := int(np.isnan(table).sum())):  # what one axis filled may help on another
            for part, order in parts:
                for axis in order:
                    _fill_line(table[part], axes[axis], axis, step)
        if step == "between":
            known = ~np.isnan(table)
    for values in (table, known):
        if not from_history and len(axes[1]) > 1:
            values[1:, 0] = values[1:, 1]  # a history shorter than any measured costs the shortest
        values[:, :, 1:, 0] = values[:, :, 1:, min(1, len(axes[3]) - 1)]  # so does a context
        values[:, :, 0, :] = values[:, :, 0, :1]  # without decodes their length means nothing
        values[0] = values[0, :1]  # nor does a history without a prefill
    if separate:
        table[1:, :, 1:, :] = table[1:, :, :1, :] + table[:1, :, 1:, :]
        known[1:, :, 1:, :] = known[1:, :, :1, :] & known[:1, :, 1:, :]
    return table, known


def _fill_line(table: Prices, places: NDArray[np.int64], axis: int, step: str) -> None:
    """Fill holes along one axis, in place: linear "between" entries, by the last "slope" after two or more of
    them, or "flat" on both sides. An axis with one entry says nothing of its slope: another may.

    The place 0 takes no part (nothing is there) but on the axis of histories, where it is a length.
    """
    first = 0 if axis == 1 else 1
    view, at = np.moveaxis(table, axis, -1)[..., first:], places[first:].astype(np.float64)
    holes = np.isnan(view)
    some = holes.any(axis=-1) & ~holes.all(axis=-1)
    if not some.any():
        return
    lines, holes, size = view[some], holes[some], len(at)
    index, row = np.arange(size), np.arange(len(lines))[:, None]
    before = np.maximum.accumulate(np.where(holes, -1, index), axis=1)  # the last entry up to here; -1: none
    after = np.flip(np.minimum.accumulate(np.flip(np.where(holes, size, index), 1), axis=1), 1)
    left, right = np.maximum(before, 0), np.minimum(after, size - 1)
    low, high = lines[row, left], lines[row, right]
    inside = holes & (before >= 0) & (after < size)
    share = (at - at[left]) / np.where(inside, at[right] - at[left], 1)
    lines = np.where(inside, low + (high - low) * share, lines)
    past = (after == size) & (before >= 0)
    if step == "slope":
        earlier = before[row, np.maximum(left - 1, 0)]  # the entry before the last, if there is one
        two = past & (left > 0) & (earlier >= 0)
        rise = np.where(two, low - lines[row, np.maximum(earlier, 0)], 0.0)
        run = np.where(two, at[left] - at[np.maximum(earlier, 0)], 1.0)
        lines = np.where(two, low + np.maximum(0.0, rise / run) * (at - at[left]), lines)
    elif step == "flat":
        lines = np.where(before < 0, high, np.where(past, low, lines))
    view[some] = lines


def _inside(plane: Any, i: int, si: float, j: int, sj: float) -> float:
    """As ``Grid._plane``, where both shares are at most 1: most of what a simulation spends on attention."""
    row = plane[i]
    low: float = row[j]
    if sj:
        low += (row[j + 1] - low) * sj
    if si:
        row = plane[i + 1]
        high: float = row[j]
        if sj:
            high += (row[j + 1] - high) * sj
        low += (high - low) * si
    return low


def _price(price: float) -> float:
    return price if price < 1e100 else math.inf
