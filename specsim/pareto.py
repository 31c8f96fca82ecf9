"""Fronts: what throughput each policy sells at which interactivity, with intervals, and what to read off.

A policy's front is the polyline through its measured loads, in the order of load: linear between
adjacent loads and nothing beyond. Intervals are 95 % Student-t intervals over the seeds. A number
read off a front (a throughput, a gain, an area) is that of the front through the mean points; its
interval comes from reading every seed's own front, so gains are paired by seed. An interval is NaN
unless each of two or more seeds' fronts gives the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from specsim.hardware import analytic_caveat
from specsim.types import SpecsimError

KEYS = ("policy", "workload", "load", "seed", "domain")
CONFIDENCE = 0.95
ROUNDING = 1e-12

Array = NDArray[np.float64]
NAN = float("nan")


@dataclass(frozen=True, eq=False)
class Front:
    """The curves of a sweep's policies in one domain, ``y`` against ``x``.

    ``points`` has a row a policy and load, policies in order of first appearance and loads rising:
    ``policy``, ``load``, ``seeds`` (how many), the mean over seeds of every metric and, as
    ``<metric>_ci``, the half-width of its interval (NaN with one seed). ``runs`` has the rows behind
    them, one a seed. ``workload`` is the kind of workload, the first word of their labels: ``load`` is
    the concurrency if that is "closed", requests/s for "poisson" and all others.
    """

    points: pd.DataFrame
    runs: pd.DataFrame
    x: str
    y: str
    domain: str
    workload: str

    @property
    def policies(self) -> list[str]:
        """The policies' labels, in the order of the sweep."""
        return list(self.points["policy"].unique())

    @property
    def caveats(self) -> list[str]:
        """What must stand beside these curves: a line for each analytic profile that runs rest on."""
        return caveats(self.runs)


@dataclass(frozen=True)
class Reading:
    """A number read off a front.

    ``value`` and the half-width ``ci`` of its interval; or, where the measured loads do not settle
    the number, a NaN ``value``, the ``reason``, and ``at_least`` if they bound it from below.
    """

    value: float
    ci: float = NAN
    at_least: float = NAN
    reason: str = ""

    def __str__(self) -> str:
        if np.isfinite(self.value):
            # The half-width is rounded as the value is: 15,594 ± 68.
            rounded = f"{self.ci:,.0f}" if abs(self.value) >= 100 else f"{self.ci:.2g}"
            return number(self.value) + (f" ± {rounded}" if np.isfinite(self.ci) else "")
        return f"≥ {number(self.at_least)}" if np.isfinite(self.at_least) else "–"


def caveats(df: pd.DataFrame) -> list[str]:
    """A line for each analytic profile that the rows of a sweep rest on."""
    if "profile_kind" not in df.columns:
        return []
    return [analytic_caveat(str(name)) for name in df.loc[df["profile_kind"] == "analytic", "profile"].unique()]


def pareto(df: pd.DataFrame, domain: str = "all", x: str = "interactivity_p50", y: str = "throughput") -> Front:
    """Return the fronts of a sweep ``df`` in ``domain``, metric ``y`` against metric ``x``.

    ``df`` has a row a (policy, load, seed, domain), with the columns KEYS, ``x`` and ``y``; all
    its other numeric columns are averaged with them, NaNs left out.

    Raises SpecsimError for an empty table, a missing or non-numeric column, an unknown domain,
    workloads of several kinds, and two rows for one run.
    """
    for column in (*KEYS, x, y):
        if column not in df.columns:
            numbers = [c for c in df.select_dtypes("number").columns if c not in KEYS]
            wanted = ", ".join(map(str, KEYS if column in KEYS else numbers)) or "a metric"
            raise SpecsimError(f"sweep: no column {column!r}, expected {wanted}")
    if df.empty:
        raise SpecsimError("sweep: no rows, expected one a policy, load, seed and domain")
    for column in ("load", x, y):
        if not pd.api.types.is_numeric_dtype(df[column]):
            raise SpecsimError(f"sweep: column {column!r} is {df[column].dtype}, expected numbers")
        if df[column].isna().all():
            raise SpecsimError(f"sweep: column {column!r} is empty, expected numbers")
    if not np.isfinite(df["load"]).all():
        raise SpecsimError("sweep: column 'load' has gaps or infinities, expected a number in every row")
    known = [str(d) for d in df["domain"].unique()]
    if domain not in known:
        raise SpecsimError(f"domain: {domain!r} is not in the sweep, expected one of {', '.join(known)}")
    runs = df[df["domain"].astype(str) == domain].copy()
    runs["policy"] = runs["policy"].astype(str)
    kinds = list(dict.fromkeys(str(w).partition(" ")[0] for w in runs["workload"]))
    if len(kinds) > 1:
        raise SpecsimError(f"workload: {' and '.join(kinds)} are mixed, expected one kind: their loads do not compare")
    if (twice := runs.duplicated(["policy", "load", "seed"])).any():
        row = runs[twice].iloc[0]
        raise SpecsimError(
            f"sweep: two rows for {row['policy']} at load {row['load']:g}, seed {row['seed']}, expected one"
        )
    order = {p: i for i, p in enumerate(runs["policy"].unique())}
    runs = runs.sort_values(["policy", "load"], key=lambda c: c.map(order) if c.name == "policy" else c)
    runs = runs.reset_index(drop=True)
    return Front(_points(runs), runs, x, y, domain, kinds[0])


def throughput_at(front: Front, policy: str, interactivity: float) -> Reading:
    """Return the most throughput ``policy`` sells while x (the interactivity) is ``interactivity`` or more.

    On a front that falls, as most do, it is the y of the point where x equals the floor; where
    overload makes the front bend back, it is that of the bend. Nothing is read beyond the measured
    loads: where the highest load still leaves x above the floor, the answer is the ``at_least``.
    """
    x, y = _curve(front, policy)
    reading = _read(x, y, interactivity, open_end=-1)
    if np.isfinite(reading.value):
        per_seed = _by_seed(front, policy, lambda u, v: _read(u, v, interactivity, open_end=-1).value)
        return Reading(reading.value, half_width(per_seed))
    if np.isfinite(reading.at_least):
        why = f"the highest load measured still has {front.x} above {interactivity:g}"
    else:
        why = f"no load measured has {front.x} of {interactivity:g} or more"
    return Reading(NAN, NAN, reading.at_least, why)


def interactivity_at(front: Front, policy: str, throughput: float) -> Reading:
    """Return the most interactivity ``policy`` offers while y (the throughput) is ``throughput`` or more.

    As ``throughput_at``, the other way round: where already the lowest measured load has y above
    ``throughput``, a lighter load might offer more and the answer is the ``at_least``.
    """
    x, y = _curve(front, policy)
    reading = _read(y, x, throughput, open_end=0)
    if np.isfinite(reading.value):
        per_seed = _by_seed(front, policy, lambda u, v: _read(v, u, throughput, open_end=0).value)
        return Reading(reading.value, half_width(per_seed))
    if np.isfinite(reading.at_least):
        why = f"the lowest load measured already has {front.y} above {throughput:g}"
    else:
        why = f"no load measured has {front.y} of {throughput:g} or more"
    return Reading(NAN, NAN, reading.at_least, why)


def hypervolume(front: Front, base_policy: str) -> pd.DataFrame:
    """Return the area each policy's front dominates for x in [0, the base front's largest x].

    A point (x, y) of a front dominates all that offers no more of either, so at each x the height is
    ``throughput_at`` it, or the ``at_least``, or 0. Columns: ``policy``, ``hypervolume`` (units of
    x·y), ``relative`` (to ``base_policy``: 1 is as good) and ``relative_ci``.
    """
    base = _curve(front, base_policy)
    limits = _by_seed(front, base_policy, lambda u, _: float(u.max(initial=0.0)))
    base_area = dominated(*base, float(base[0].max(initial=0.0)))
    base_areas = _areas(front, base_policy, limits)
    rows = []
    for policy in front.policies:
        area = dominated(*_curve(front, policy), float(base[0].max(initial=0.0)))
        ratios = _areas(front, policy, limits) / base_areas
        rows.append((policy, area, area / base_area if base_area else NAN, half_width(ratios)))
    return pd.DataFrame(rows, columns=["policy", "hypervolume", "relative", "relative_ci"])


def sla_table(front: Front, floors: Iterable[float], base_policy: str | None = None) -> pd.DataFrame:
    """Return what every policy sells at each floor of interactivity.

    One row a policy and floor: ``policy``, ``floor``, ``throughput`` and ``ci``; ``at_least`` where
    the measured loads only bound it, with the ``reason``; ``gain`` over ``base_policy`` (default:
    the first; 0.1 is 10 % more) and its ``gain_ci``, paired by seed, or ``gain_at_least`` where the
    throughput is only bounded; and ``text`` such as "12,345 ± 67", "≥ 12,345" or "–".
    """
    base_policy = front.policies[0] if base_policy is None else base_policy
    rows = []
    for floor in floors:
        base = throughput_at(front, base_policy, floor)

        def read(x: Array, y: Array, floor: float = floor) -> float:
            return _read(x, y, floor, open_end=-1).value

        bases = _by_seed(front, base_policy, read)
        for policy in front.policies:
            reading = throughput_at(front, policy, floor)
            gain, gain_ci, gain_at_least = NAN, NAN, NAN
            if base.value > 0:
                gain, gain_at_least = (value / base.value - 1 for value in (reading.value, reading.at_least))
                gain_ci = half_width(_by_seed(front, policy, read) / bases)
            row = (policy, floor, reading.value, reading.ci, reading.at_least, gain, gain_ci, gain_at_least)
            rows.append((*row, str(reading), reading.reason))
    names = ["policy", "floor", "throughput", "ci", "at_least", "gain", "gain_ci", "gain_at_least", "text", "reason"]
    table = pd.DataFrame(rows, columns=names)
    rank = table["policy"].map({p: i for i, p in enumerate(front.policies)})
    return table.iloc[np.argsort(rank.to_numpy(), kind="stable")].reset_index(drop=True)


def _points(runs: pd.DataFrame) -> pd.DataFrame:
    metrics = [c for c in runs.select_dtypes("number").columns if c not in KEYS]
    groups = runs.groupby(["policy", "load"], sort=False)
    mean, std, count = groups[metrics].mean(), groups[metrics].std(), groups[metrics].count()
    halves: pd.DataFrame = std * _t_factor(count.to_numpy())
    seeds = groups.size().rename("seeds").to_frame()
    return pd.concat([seeds, mean, halves.add_suffix("_ci")], axis=1).reset_index()


def _curve(front: Front, policy: str, table: pd.DataFrame | None = None) -> tuple[Array, Array]:
    """Return x and y of a policy's points in the order of load, those without numbers left out."""
    if policy not in front.policies:
        raise SpecsimError(f"policy: {policy!r} is not in the front, expected one of {front.policies}")
    table = front.points if table is None else table
    rows = table.loc[table["policy"] == policy, [front.x, front.y]].to_numpy(dtype=np.float64)
    rows = rows[np.isfinite(rows).all(axis=1)]
    return rows[:, 0], rows[:, 1]


def _by_seed(front: Front, policy: str, read: Callable[[Array, Array], float]) -> pd.Series[Any]:
    """Return ``read(x, y)`` of every seed's own front, indexed by seed."""
    runs = front.runs[front.runs["policy"] == policy]
    return pd.Series(
        {seed: read(*_curve(front, policy, rows)) for seed, rows in runs.groupby("seed")}, dtype=np.float64
    )


def _read(keep: Array, give: Array, floor: float, open_end: int) -> Reading:
    """Return the most of ``give`` along a polyline where ``keep`` is ``floor`` or more.

    ``open_end`` (0 or -1) is the end at which more measured loads would add smaller ``keep``: if
    ``keep`` is still above the floor there, what was found is a lower bound only.
    """
    best = best_where(keep, give, floor)
    if best == -np.inf:
        return Reading(NAN)
    return Reading(NAN, at_least=best) if keep[open_end] > floor else Reading(best)


def best_where(keep: Array, give: Array, floor: float) -> float:
    """Return the most of ``give`` along a polyline where ``keep`` is ``floor`` or more; −∞ if that is nowhere."""
    above = keep >= floor
    crossed = np.flatnonzero(above[:-1] != above[1:])
    k, g = keep[crossed], give[crossed]
    share = (floor - k) / (keep[crossed + 1] - k)
    at_floor = g + share * (give[crossed + 1] - g)
    return float(np.concatenate([give[above], at_floor]).max(initial=-np.inf))


def dominated(x: Array, y: Array, limit: float) -> float:
    """Return the area in [0, limit] under the height max{y of the polyline at or right of x}.

    The height is linear between the places where two of its parts (segments, and the levels of the
    corners) meet, so its value half-way, times the width, is exact.
    """
    segments = list(pairwise(zip(x.tolist(), y.tolist(), strict=True)))
    lines = [(a, b, (d - b) / (c - a)) for (a, b), (c, d) in segments if c != a]
    lines += [(0.0, level, 0.0) for level in y.tolist()]
    meets = [(d - b + s * a - t * c) / (s - t) for i, (a, b, s) in enumerate(lines) for c, d, t in lines[:i] if s != t]
    edges = np.unique(np.clip([0.0, limit, *x.tolist(), *meets], 0.0, limit))
    heights = [max(best_where(x, y, middle), 0.0) for middle in (edges[:-1] + edges[1:]) / 2]
    return float(np.dot(np.diff(edges), heights))


def _areas(front: Front, policy: str, limits: pd.Series[Any]) -> pd.Series[Any]:
    runs = front.runs[front.runs["policy"] == policy]
    areas = {
        seed: dominated(*_curve(front, policy, rows), float(limits[seed]))
        for seed, rows in runs.groupby("seed")
        if seed in limits.index
    }
    return pd.Series(areas, dtype=np.float64)


def _t_factor(count: NDArray[np.int64]) -> Array:
    """Return t/√n, by which a standard deviation over n seeds becomes a half-width; NaN below two."""
    from scipy.special import stdtrit  # the t quantile without the second that scipy.stats takes to load

    freedom = np.where(count > 1, count - 1.0, np.nan)
    factor: Array = stdtrit(freedom, (1 + CONFIDENCE) / 2) / np.sqrt(freedom + 1)
    return factor


def half_width(values: Iterable[float]) -> float:
    """Return the half-width of the interval of the mean of ``values``, NaN if any is or there is one.

    Values that differ by rounding alone (1e-12 of their mean) count as equal.
    """
    v = np.fromiter(values, dtype=np.float64)
    if len(v) < 2:
        return NAN
    spread = np.std(v, ddof=1)
    if spread <= ROUNDING * abs(v.mean()):
        return 0.0
    return float(_t_factor(np.array(len(v))) * spread)


def number(value: float) -> str:
    """A value read off a front, for people: three digits, or whole from 100 on."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
