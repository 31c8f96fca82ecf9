"""Crossovers: the loads at which another policy has the most throughput at equal load, and what they are worth."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from specsim.pareto import NAN, Front, Reading, half_width, number

Array = NDArray[np.float64]


def crossovers(front: Front) -> pd.DataFrame:
    """Return the loads at which the policy with the most y at equal load changes.

    One row a change, by load: ``load``, ``load_ci``, ``before``, ``after`` (policies), and
    ``interactivity`` and ``throughput``: x and y of ``after`` there. Only policies measured on both
    sides take part. ``load_ci`` is NaN unless every seed by itself shows that very change, once:
    without it the change may be noise.
    """
    columns = ["load", "before", "after", "interactivity", "throughput"]
    table = pd.DataFrame(_changes(front, front.points), columns=columns)
    seeds = [_changes(front, runs) for _, runs in front.runs.groupby("seed")]
    half_widths = []
    for before, after in zip(table["before"], table["after"], strict=True):
        loads = [[row[0] for row in rows if row[1:3] == (before, after)] for rows in seeds]
        once = all(len(found) == 1 for found in loads)
        half_widths.append(half_width([found[0] for found in loads]) if once else NAN)
    table.insert(1, "load_ci", np.array(half_widths, dtype=np.float64))
    return table


def crossover_lines(front: Front) -> list[str]:
    """Return a sentence for each of ``crossovers``: at which load, who overtakes whom, and what that is worth."""
    what = "users" if front.workload == "closed" else "requests/s"
    first, last = float(front.points["load"].min()), float(front.points["load"].max())
    lowest, highest = f"{first:g} or fewer, the lowest simulated,", f"{last:g} or more, the highest simulated"
    lines = []
    for row in crossovers(front).to_dict("records"):
        kind, bound = crossover_span(front, row["load"], row["load_ci"])
        where = f"At about {number(row['load'])} {what} (from {{}} to {{}})"
        where = {
            "at": f"At {Reading(row['load'], row['load_ci'])} {what}",
            "below": where.format(lowest, number(bound)),
            "above": where.format(number(bound), highest),
            "anywhere": where.format(lowest, highest),
        }[kind]
        doubt = np.isnan(row["load_ci"]) and front.points["seeds"].max() > 1
        lines.append(
            f"{where}, {row['after']} overtakes {row['before']} in throughput: {number(row['throughput'])} "
            f"tok/s/GPU, where {row['after']}'s users get {number(row['interactivity'])} tok/s."
            + (" Not every seed shows it: it may be noise." if doubt else "")
        )
    return lines


def crossover_span(front: Front, load: float, half: float) -> tuple[str, float]:
    """Return what an interval ``load`` ± ``half`` settles, and the load that bounds it.

    "at" a load; "below" or "above" one, where the interval reaches an end of the loads simulated; "anywhere", with
    NaN, where it reaches both.
    """
    low = load - half <= float(front.points["load"].min())
    high = load + half >= float(front.points["load"].max())
    if low and high:
        return "anywhere", NAN
    return ("below", load + half) if low else ("above", load - half) if high else ("at", load)


def _changes(front: Front, table: pd.DataFrame) -> list[tuple[float, str, str, float, float]]:
    """Walk the upper envelope of y over load; return (load, before, after, x, y) of its changes."""
    curves = list(table.groupby("policy", sort=False))
    loads = np.unique(table["load"].to_numpy(dtype=np.float64))

    def on_grid(column: str) -> Mapping[str, Array]:
        return {str(p): np.interp(loads, rows["load"], rows[column], left=np.nan, right=np.nan) for p, rows in curves}

    xs, ys = on_grid(front.x), on_grid(front.y)
    changes = []
    best: str | None = None
    for i in range(len(loads) - 1):
        there = {p: (y[i], y[i + 1] - y[i]) for p, y in ys.items() if np.isfinite(y[i : i + 2]).all()}
        if best not in there:
            # The first load, or the best one ends here: whoever leads now overtook nobody.
            best = max(there, key=lambda p: there[p], default=None)
        while best is not None:
            start, slope = there[best]
            # Shares of the way to the next load at which a steeper policy draws level.
            level = {p: max((start - v) / (s - slope), 0.0) for p, (v, s) in there.items() if s > slope}
            after = min(level, key=lambda p: (level[p], -there[p][1]), default=None)
            if after is None or level[after] >= 1.0:
                break
            share = level[after]
            load = float(loads[i] + share * (loads[i + 1] - loads[i]))
            x = float(xs[after][i] + share * (xs[after][i + 1] - xs[after][i]))
            changes.append((load, best, after, x, float(there[after][0] + share * there[after][1])))
            best = after
    return changes
