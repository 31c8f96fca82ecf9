"""Turn prices that can be asked for at any size into a short table that is linear between its places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specsim.hardware import Prices


def thin(at: NDArray[Any], values: Prices, slack: Prices) -> list[int]:
    """Indices of the places ``at`` [n] between which a linear table is within ``slack`` of all ``values``.

    ``values`` and ``slack`` are [n] or [n, m]: m curves that share their places. The first and the last place
    are always among them; each segment reaches as far as one can from its start.
    """
    x = np.asarray(at, dtype=np.float64)
    value, room = (np.asarray(a, dtype=np.float64).reshape(len(x), -1) for a in (values, slack))
    places, last = [0], len(x) - 1
    while (a := places[-1]) < last:
        step = (x[a + 1 :] - x[a])[:, None]
        rest = value[a + 1 :] - value[a]
        low = np.maximum.accumulate((rest - room[a + 1 :]) / step)
        high = np.minimum.accumulate((rest + room[a + 1 :]) / step)
        slope = rest / step  # the next place always fits: nothing lies between
        places.append(a + 1 + int(np.flatnonzero(((slope >= low) & (slope <= high)).all(axis=1)).max()))
    return places


def thin_rows(
    rows: NDArray[Any], columns: NDArray[Any], values: Prices, slack: Prices
) -> tuple[list[tuple[int, int]], float]:
    """Index pairs (row, column) that keep ``values`` [rows, columns] within ``slack``, and the worst error over slack.

    Half of the slack goes to leaving out rows, half to leaving out columns, in each row those that it can spare:
    between its own columns a row is linear, and between the rows kept so is everything.
    """
    kept = thin(rows, values, slack / 2)
    pairs: list[tuple[int, int]] = []
    table = np.empty((len(kept), len(columns)))
    for i, row in enumerate(kept):
        places = thin(columns, values[row], slack[row] / 2)
        pairs += [(row, place) for place in places]
        table[i] = np.interp(columns, columns[places], values[row, places])
    share = np.interp(rows, rows[kept], np.arange(len(kept), dtype=np.float64))
    low = np.minimum(share.astype(np.int64), max(len(kept) - 2, 0))
    part = (share - low)[:, None]
    between = (1 - part) * table[low] + part * table[np.minimum(low + 1, len(kept) - 1)]
    return pairs, float((np.abs(between - values) / slack).max())


def steps(first: int, last: int, per_octave: int, extra: Sequence[int] = ()) -> NDArray[np.int64]:
    """Whole numbers from ``first`` to ``last``, ``per_octave`` of them a doubling, with those of ``extra`` inside."""
    count = max(2, round(per_octave * np.log2(max(last / first, 2))) + 1)
    spaced = np.rint(np.geomspace(first, last, count)).astype(np.int64)
    inside = [value for value in extra if first <= value <= last]
    return np.unique(np.concatenate([spaced, np.array([first, last, *inside], dtype=np.int64)]))


def round_to(value: float, digits: int = 5) -> float:
    """``value`` with so many significant digits: enough for a price, and a short file."""
    return float(f"{value:.{digits}g}")
