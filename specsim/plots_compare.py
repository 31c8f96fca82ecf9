"""A picture of a comparison: the fronts of two baselines, one over the other.

It shares the palette of :mod:`specsim.plots`; save it with its ``save_figure``.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from specsim.baseline import Baseline
from specsim.pareto import pareto
from specsim.plots import COLOURS, GREY, LABELS, MARKERS, caption, plain_axes

BASE: dict[str, Any] = {"linestyle": (0, (4, 2)), "linewidth": 1.2, "markerfacecolor": "white", "markersize": 5}
NEW: dict[str, Any] = {"linestyle": "-", "linewidth": 1.6, "markersize": 5}


def plot_compare(
    base: Baseline,
    new: Baseline,
    floors: Iterable[float] = (),
    marks: Mapping[str, str] | None = None,
    *,
    x: str = "interactivity_p50",
    title: str | None = None,
    notes: Sequence[str] = (),
) -> Figure:
    """Return a figure of both fronts, throughput against ``x``, a colour and a marker a policy: means over seeds.

    BASE is dashed with hollow marks, NEW solid; ``floors`` (tok/s/user) are dashed vertical lines; ``marks`` are words
    that the legend has behind a policy ("regression", "undecided"); ``notes`` go below. A side whose runs lack ``x`` or
    the throughput has no curve.
    """
    floors = list(floors)
    figure = Figure(figsize=(8.0, 5.4), layout="constrained")
    axes = figure.add_subplot()
    plain_axes(axes)
    axes.tick_params(labelsize=9, color=GREY)
    plain = FuncFormatter(lambda v, _: f"{v:,.0f}" if v >= 1000 else f"{v:g}")
    axes.xaxis.set_major_formatter(plain)
    axes.yaxis.set_major_formatter(plain)
    policies = list(dict.fromkeys([*base.policies, *new.policies]))
    top = {"x": 0.0, "y": 0.0}
    for side, look in ((base, BASE), (new, NEW)):
        frame = side.frame()
        if frame[[x, "throughput"]].isna().all().any():
            continue
        points = pareto(frame, x=x).points
        for i, policy in enumerate(policies):
            rows = points[points["policy"] == policy]
            colour = COLOURS[i % len(COLOURS)]
            place: dict[str, Any] = {"color": colour, "marker": MARKERS[i % len(MARKERS)], "markeredgecolor": colour}
            axes.plot(rows[x], rows["throughput"], **place, **look)
        top = {"x": max(top["x"], points[x].max()), "y": max(top["y"], points["throughput"].max())}
    for floor in floors:
        axes.axvline(floor, color=GREY, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
        at: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "xytext": (0, 2), "textcoords": "offset points"}
        axes.annotate(f"≥ {floor:g}", (floor, 1), ha="center", va="bottom", fontsize=8, color=GREY, **at)
    axes.set(xlabel=LABELS[x], ylabel=LABELS["throughput"])
    axes.set_xlim(0, 1.06 * max(top["x"], *floors, 0.0) or None)
    axes.set_ylim(0, 1.06 * top["y"] or None)
    handles = [Line2D([], [], color=GREY, marker="o", markeredgecolor=GREY, label="BASE", **BASE)]
    handles.append(Line2D([], [], color=GREY, marker="o", markeredgecolor=GREY, label="NEW", **NEW))
    for i, policy in enumerate(policies):
        there = [policy in side.policies for side in (base, new)]
        word = (marks or {}).get(policy) or ("" if all(there) else "gone" if there[0] else "new")
        said = f" ({word})" if word else ""
        handles.append(
            Line2D([], [], color=COLOURS[i % len(COLOURS)], marker=MARKERS[i % len(MARKERS)], label=f"{policy}{said}")
        )
    axes.legend(handles=handles, fontsize=8, handlelength=4.0, loc="best", framealpha=0.85, edgecolor="none")
    caption(figure, [line for note in notes for line in textwrap.wrap(note, 115)])
    if title:
        axes.set_title(textwrap.fill(title, 85), loc="left", fontsize=11, pad=16 if floors else 8)
    return figure
