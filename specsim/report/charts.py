"""The page's charts as Vega-Lite specifications: plain dicts, whose data are the numbers drawn.

Colours are the page's CSS variables (``var(--s0)`` …), so that light, dark and print need no other chart. Curves
differ by colour, marker and dash as in :mod:`specsim.plots`; the page's keys and tables name them, so the charts
have no legends of their own. Names that users chose are data here, never expressions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from specsim.pareto import Front
from specsim.plots import LABELS, MARKERS
from specsim.plots_trace import FEW
from specsim.report.looks import CONFIG, DASHES, PALETTE, SHAPES

Spec = dict[str, Any]

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
FEWER_TICKS = {"expr": "width < 420 ? 4 : 8"}
LIT: Spec = {"name": "lit", "value": ""}
FADED = 0.12
"""What is left of a curve's opacity while another is pointed at."""
ROOM = 1.06
"""How far an axis goes beyond the largest number on it."""
LATENCIES = {"ttft": ("Time to first token", 1e3, "ms"), "tpot": ("Time per output token", 1e3, "ms"),
             "e2e": ("End to end", 1.0, "s")}  # fmt: skip
QUANTILES = ("p50", "p90", "p99")


def _lit(value: float) -> Spec:
    """An opacity that falls where another scheduler is the one pointed at (the parameter ``lit``, "" for none)."""
    return {"condition": {"test": "lit === '' || datum.policy === lit", "value": value}, "value": value * FADED}


def front_chart(front: Front, floor: float) -> Spec:
    """Throughput against interactivity, a line a scheduler with the band of its 95 % intervals.

    The page moves the parameter ``floor``, a dashed vertical line, and fills the data set ``readings`` (x, y, policy).
    """
    points = front.points.dropna(subset=[front.x, front.y])
    rows = [
        {
            "policy": r["policy"], "load": r["load"], "x": r[front.x], "y": r[front.y], "n": n,
            "Throughput": _with_ci(r[front.y], r[f"{front.y}_ci"], "tok/s per GPU"),
            "Interactivity": _with_ci(r[front.x], r[f"{front.x}_ci"], "tok/s per user"),
            "τ": _with_ci(r.get("tau"), r.get("tau_ci"), ""),
        }
        for n, r in enumerate(points.to_dict("records"))
    ]  # fmt: skip
    top_x, top_y = _top(points, front.x), _top(points, front.y)
    x = _axis("x", LABELS.get(front.x, front.x), domain=[0, ROOM * max(top_x, floor)])
    y = _axis("y", LABELS.get(front.y, front.y), domain=[0, ROOM * top_y])
    colour, dash, shape = _series(front.policies)
    load = "Users" if front.workload == "closed" else "Requests/s"
    tips = [
        {"field": "policy", "title": "Scheduler"},
        {"field": "load", "title": load},
        *({"field": name} for name in ("Throughput", "Interactivity", "τ")),
    ]
    where: Spec = {"x": x, "y": y}
    rule: Spec = {"field": "at", "type": "quantitative"}
    return _spec(
        "Throughput per GPU against interactivity, a line a scheduler. The table below has the same numbers.",
        360,
        {
            "params": [{"name": "floor", "value": floor}, LIT],
            "data": {"name": "points", "values": rows},
            "layer": [
                {
                    "data": {"values": _bands(points, front)},
                    "mark": {"type": "line", "filled": True, "strokeWidth": 0, "aria": False},
                    "encoding": {**where, "order": {"field": "n"}, "color": colour, "fillOpacity": _lit(0.16)},
                },
                {
                    "data": {"values": [{}]},
                    "transform": [{"calculate": "floor", "as": "at"}],
                    "mark": {"type": "rule", "color": "var(--ink)", "strokeDash": [4, 4], "aria": False},
                    "encoding": {"x": rule},
                },
                {
                    "mark": {"type": "line", "strokeWidth": 2, "aria": False},
                    "encoding": {
                        **where,
                        "order": {"field": "load"},
                        "color": colour,
                        "strokeDash": dash,
                        "opacity": _lit(1),
                    },
                },
                {
                    "mark": {"type": "point", "filled": True, "size": 60},
                    "encoding": {**where, "color": colour, "shape": shape, "opacity": _lit(1)},
                },
                {
                    "transform": [{"filter": {"field": "n", "oneOf": _outermost(points, front)}}],
                    "mark": {"type": "text", "align": "left", "dx": 6, "dy": -7, "fontSize": 11, "aria": False},
                    "encoding": {**where, "text": {"field": "load"}},
                },
                {
                    "data": {"name": "readings", "values": []},
                    "mark": {"type": "point", "size": 150, "strokeWidth": 2, "aria": False},
                    "encoding": {**where, "color": colour, "opacity": _lit(1)},
                },
                {  # what the mouse or a finger hits, larger than what is seen
                    "mark": {"type": "point", "filled": True, "size": 500, "opacity": 0},
                    "encoding": {**where, "tooltip": tips, "detail": {"field": "policy"}},
                },
            ],
        },
    )


def load_chart(front: Front, metric: str) -> Spec:
    """``metric`` against the load on a log-2 axis, with the bands of its intervals."""
    points = front.points.dropna(subset=[metric])
    rows = [
        {"policy": r["policy"], "load": r["load"], "value": r[metric], **_span(r[metric], r[f"{metric}_ci"])}
        for r in points.to_dict("records")
    ]
    title = LABELS.get(metric, metric)
    return _spec(
        f"{title} against load, a line a scheduler. The table below has the same numbers.",
        280,
        {
            "params": [LIT],
            "data": {"values": rows},
            **_lines(front, _axis("y", "", domain=[0, ROOM * _top(points, metric)]), [(title, "value", ",.4~g")]),
            "title": title[:1].upper() + title[1:],
        },
    )


def latency_chart(front: Front, name: str) -> Spec:
    """The percentiles of a latency against the load; the parameter ``quantile`` says which one shows."""
    title, factor, unit = LATENCIES[name]
    rows = []
    for r in front.points.to_dict("records"):
        for q in QUANTILES:
            value, half = factor * r.get(f"{name}_{q}", np.nan), factor * r.get(f"{name}_{q}_ci", np.nan)
            if np.isfinite(value):
                rows.append({"policy": r["policy"], "load": r["load"], "q": q, "value": value, **_span(value, half)})
    values = [row["value"] for row in rows]
    # Queues make a few loads wait a hundred times as long as the others: only logarithms show both. The axis is that
    # of all percentiles, so that going from one to another moves the curves alone.
    wide = bool(values) and min(values) > 0 and max(values) > 20 * min(values)
    y = _axis("y", "", domain=[0, ROOM * max(values, default=1.0)])
    if wide:
        ticks = _decades(min(values), max(values))
        y = _axis("y", "", kind="log", domain=[ticks[0], ticks[-1]])
        y["axis"] = {**y["axis"], "values": ticks, "format": ",~g"}
    chart = _lines(front, y, [(title, "value", ",.4~g")])
    if wide:  # a log axis has no place for 0
        chart["transform"] = [{"calculate": f"max(datum.low, {ticks[0]})", "as": "low"}]
    return _spec(
        f"{title} in {unit} against load, a line a scheduler. The table below has the same numbers.",
        260,
        {
            "params": [{"name": "quantile", "value": "p50"}, LIT],
            "data": {"values": rows},
            **chart,
            "transform": [{"filter": "datum.q === quantile"}, *chart.get("transform", [])],
            "title": f"{title} ({unit})",
        },
    )


def acceptance_chart(table: pd.DataFrame) -> Spec:
    """Conditional acceptance by position, a line a domain, from ``trace_stats.acceptance_table``'s rows."""
    domains = [str(d) for d in table["domain"].unique()]
    rows = [
        {"policy": str(r["domain"]), "load": r["position"], "value": r["conditional"],
         "low": _or(r["conditional_low"], r["conditional"]), "high": _or(r["conditional_high"], r["conditional"])}
        for r in table[table["reached"] >= FEW].to_dict("records")
    ]  # fmt: skip
    low = min((row["low"] for row in rows), default=0.0)
    y = _axis("y", "", domain=[max(0.0, np.floor(10 * low) / 10), 1])
    positions = sorted({int(row["load"]) for row in rows})
    x = _axis("x", "draft position", domain=[0.7, (positions or [1])[-1] + 0.3])
    x["axis"] = {"values": positions, "format": "d"}
    return _spec(
        "Conditional acceptance by draft position, a line a domain. The table below has the same numbers.",
        260,
        {
            "params": [LIT],
            "data": {"values": rows},
            **_lines(domains, y, [("Accepted", "value", ".3f")], x, "Domain", "Position"),
            "title": "Conditional acceptance",
        },
    )


def reliability_chart(tables: Sequence[tuple[str, pd.DataFrame]]) -> Spec:
    """Observed against predicted survival, a panel a position; the first of ``tables`` is what schedulers see.

    ``tables``: pairs of a name and ``calibration.reliability_table``'s rows. The page sets the panels' size.
    """
    rows: list[Spec] = []
    for name, table in tables:
        blocks = table.groupby("position")["count"].sum()
        rows += [
            {
                "policy": name, "panel": f"first {r['position']} tokens" if r["position"] > 1 else "first token",
                "position": r["position"], "x": r["predicted"], "y": r["observed"], "blocks": r["count"],
                "share": r["count"] / blocks[r["position"]], "few": r["count"] < FEW,
            }
            for r in table.to_dict("records")
        ]  # fmt: skip
    panels = list(dict.fromkeys(row["panel"] for row in sorted(rows, key=lambda row: row["position"])))
    names = [name for name, _ in tables]
    scale = {"domain": names, "range": ["var(--s6)", "var(--s5)"][: len(names)]}
    shape: Spec = {"field": "policy", "type": "nominal", "legend": None,
                   "scale": {"domain": names, "range": ["circle", "square"][: len(names)]}}  # fmt: skip
    colour: Spec = {"field": "policy", "type": "nominal", "scale": scale, "legend": None}
    axis: Spec = {"values": [0, 0.5, 1], "format": "~g"}
    where: Spec = {channel: {**_axis(channel, "", domain=[0, 1]), "axis": axis} for channel in ("x", "y")}
    tips = [
        {"field": "policy", "title": "Confidences"}, {"field": "panel", "title": "Survival of"},
        {"field": "x", "title": "Predicted", "format": ".3f"}, {"field": "y", "title": "Observed", "format": ".3f"},
        {"field": "blocks", "title": "Blocks", "format": ","},
    ]  # fmt: skip
    ends: Spec = {"x": {"datum": 0}, "y": {"datum": 0}, "x2": {"datum": 1}, "y2": {"datum": 1}}
    layer: list[Spec] = [
        {"mark": {"type": "rule", "color": "var(--line)", "aria": False}, "encoding": ends},
        {
            "transform": [{"filter": "!datum.few"}],
            "mark": {"type": "line", "strokeWidth": 1.4, "aria": False},
            "encoding": {**where, "color": colour, "order": {"field": "x"}},
        },
        {
            "mark": {"type": "point", "filled": True, "opacity": 0.8, "clip": False},
            "encoding": {
                **where, "color": colour, "shape": shape, "tooltip": tips,
                "size": {"field": "share", "type": "quantitative", "legend": None,
                         "scale": {"domain": [0, 0.5], "range": [12, 160], "clamp": True}},
            },
        },
    ]  # fmt: skip
    return {
        "$schema": SCHEMA, "description": "Reliability of the drafter's confidences: observed against predicted "
        "survival, a panel a position. The table below has errors by position.",
        "config": CONFIG, "background": "transparent", "data": {"values": rows},
        "facet": {"field": "panel", "type": "nominal", "title": None, "sort": panels,
                  "header": {"labelAnchor": "start"}},
        # Axes of their own: shared ones would stand under the empty places of the last row.
        "resolve": {"axis": {"x": "independent", "y": "independent"}},
        "columns": 4, "spacing": 14, "spec": {"width": 130, "height": 130, "layer": layer},
    }  # fmt: skip


def _lines(
    of: Front | Sequence[str],
    y: Spec,
    tips: Sequence[tuple[str, str, str]],
    x: Spec | None = None,
    names: str = "Scheduler",
    load: str = "",
) -> Spec:
    """Bands, lines and points of rows (policy, load, value, low, high)."""
    if isinstance(of, Front):
        policies, loads = of.policies, np.unique(of.points["load"]).tolist()
        closed = of.workload == "closed"
        x = _axis("x", "users" if closed else "requests/s", kind="log", domain=[loads[0] / 1.15, loads[-1] * 1.15])
        x["axis"] = {"values": loads, "format": "~g", "labelOverlap": "greedy"}
        load = "Users" if closed else "Requests/s"
    else:
        policies = list(of)
    assert x is not None
    x, value = {**x, "field": "load"}, {**y, "field": "value"}
    colour, dash, shape = _series(policies)
    tooltip = [{"field": "policy", "title": names}, {"field": "load", "title": load}]
    tooltip += [{"field": field, "title": title, "format": form} for title, field, form in tips]
    return {
        "layer": [
            {
                "mark": {"type": "area", "aria": False},
                "encoding": {
                    "x": x,
                    "y": {**y, "field": "low"},
                    "y2": {"field": "high"},
                    "color": colour,
                    "opacity": _lit(0.16),
                },
            },
            {
                "mark": {"type": "line", "strokeWidth": 2, "aria": False},
                "encoding": {"x": x, "y": value, "color": colour, "strokeDash": dash, "opacity": _lit(1)},
            },
            {
                "mark": {"type": "point", "filled": True, "size": 50},
                "encoding": {"x": x, "y": value, "color": colour, "shape": shape, "opacity": _lit(1)},
            },
            {
                "mark": {"type": "point", "filled": True, "size": 400, "opacity": 0, "aria": False},
                "encoding": {"x": x, "y": value, "detail": {"field": "policy"}, "tooltip": tooltip},
            },
        ]
    }


def _spec(description: str, height: int, parts: Spec) -> Spec:
    return {
        "$schema": SCHEMA, "description": description, "width": "container", "height": height, "config": CONFIG,
        "background": "transparent", "autosize": {"type": "fit-x", "contains": "padding"}, **parts,
    }  # fmt: skip


def _axis(channel: str, title: str, kind: str = "linear", domain: list[float] | None = None) -> Spec:
    scale: Spec = {"type": kind, "nice": False} if domain else {"type": kind}
    scale |= {"base": 2} if kind == "log" and channel == "x" else {}
    scale |= {"domain": domain} if domain else {}
    axis: Spec = {"tickCount": FEWER_TICKS if channel == "x" else 6, "grid": channel == "y"}
    return {"field": channel, "type": "quantitative", "scale": scale, "title": title or None, "axis": axis}


def _decades(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten from below ``low`` to above ``high``, or the powers alone where these are many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [float(f"{m}e{k}") for k in powers for m in (1, 2, 5)]
    start = max(i for i, tick in enumerate(ticks) if tick <= low)
    stop = min(i for i, tick in enumerate(ticks) if tick >= high)
    kept = ticks[start : stop + 1]
    return kept if len(kept) <= 8 else [float(f"1e{k}") for k in powers]


def _series(names: Sequence[str]) -> tuple[Spec, Spec, Spec]:
    """The channels colour, dash and marker of curves of these names."""

    def channel(looks: Sequence[Any]) -> Spec:
        scale = {"domain": list(names), "range": [looks[i % len(looks)] for i in range(len(names))]}
        return {"field": "policy", "type": "nominal", "scale": scale, "legend": None}

    assert len(SHAPES) == len(MARKERS)
    return channel(PALETTE), channel(DASHES), channel(SHAPES)


def _bands(points: pd.DataFrame, front: Front) -> list[Spec]:
    """The outlines of the bands: on a falling curve the intervals' boxes reach from lower left to upper right."""
    rows = []
    for policy, part in points.groupby("policy", sort=False):
        x, y = part[front.x].to_numpy(), part[front.y].to_numpy()
        dx, dy = part[f"{front.x}_ci"].fillna(0).to_numpy(), part[f"{front.y}_ci"].fillna(0).to_numpy()
        xs = np.concatenate([x + dx, (x - dx)[::-1]]).tolist()
        ys = np.concatenate([y + dy, (y - dy)[::-1]]).tolist()
        rows += [{"policy": policy, "n": n, "x": a, "y": b} for n, (a, b) in enumerate(zip(xs, ys, strict=True))]
    return rows


def _outermost(points: pd.DataFrame, front: Front) -> list[int]:
    """Which points carry their load: the outermost of each load, the heaviest first, where there is room."""
    points = points.reset_index(drop=True)
    scaled = points[[front.x, front.y]].to_numpy() / np.array([_top(points, front.x), _top(points, front.y)])
    outer = points.loc[(points[front.x] * points[front.y]).groupby(points["load"]).idxmax()]
    taken: list[int] = []
    for n in outer.sort_values("load", ascending=False).index.tolist():
        if all((np.abs(scaled[n] - scaled[other]) > (0.06, 0.05)).any() for other in taken):
            taken.append(n)
    return taken


def _top(points: pd.DataFrame, metric: str) -> float:
    return float((points[metric] + points[f"{metric}_ci"].fillna(0.0)).max()) or 1.0


def _span(value: float, half: float) -> Spec:
    half = _or(half, 0.0)
    return {"low": value - half, "high": value + half}


def _or(value: float, other: float) -> float:
    return float(value) if np.isfinite(value) else float(other)


def _with_ci(value: float | None, half: float | None, unit: str) -> str:
    if value is None or not np.isfinite(value):
        return "–"
    digits = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    around = f" ± {half:.2g}" if half is not None and np.isfinite(half) and half < 100 else ""
    around = f" ± {half:,.0f}" if half is not None and np.isfinite(half) and half >= 100 else around
    return f"{digits}{around} {unit}".strip()
