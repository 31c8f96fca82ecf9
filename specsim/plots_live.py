"""A picture of a check on a running engine: what was measured, with the engine's spread, and what was predicted.

It shares the palette of :mod:`specsim.plots`; save it with its ``save_figure``.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from specsim.live.comparing import Row, half_interval
from specsim.plots import COLOURS, GREY, caption, plain_axes
from specsim.plots_validate import PLAIN

PANELS = (
    ("throughput", "throughput (output tok/s)", 1.0),
    ("tpot", "time per output token (ms)", 1e3),
    ("ttft", "time to first token (ms)", 1e3),
)
MEASURED: dict[str, Any] = {"color": COLOURS[0], "marker": "o", "markersize": 5}
PREDICTED: dict[str, Any] = {"color": COLOURS[5], "marker": "D", "markersize": 5}
APART = 0.12
"""How far left and right of a load its two marks stand, so that one does not hide the other."""


def plot_live(rows: Sequence[Row], title: str | None = None, notes: Sequence[str] = ()) -> Figure:
    """Return three panels, throughput, tpot and ttft, by load: the mean of what was measured with every repetition and
    the 95 % interval, and the mean of what was predicted with its own; the errors above. ``notes`` go below.
    """
    figure = Figure(figsize=(11.0, 4.2), layout="constrained")
    panels = list(figure.subplots(1, 3).flat)
    for axes, (metric, label, unit) in zip(panels, PANELS, strict=True):
        chosen = [row for row in rows if row.metric == metric]
        _panel(axes, chosen, unit)
        plain_axes(axes)
        axes.tick_params(labelsize=8, color=GREY)
        axes.set_ylabel(label, fontsize=9)
        axes.set_xlabel("users of a closed loop, or arrivals", fontsize=9)
    handles = [
        Line2D([], [], linestyle="none", **MEASURED, label="measured (bar: 95 % interval, dots: repetitions)"),
        Line2D([], [], linestyle="none", **PREDICTED, label="predicted (bar: 95 % interval of the calibrations)"),
    ]
    figure.legend(handles=handles, loc="outside lower right", ncols=2, fontsize=8, frameon=False)
    caption(figure, [line for note in notes for line in textwrap.wrap(note, 72)])
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


def _panel(axes: Axes, rows: Sequence[Row], unit: float) -> None:
    at = np.arange(len(rows))
    for side, style, values in (
        (-APART, MEASURED, [row.measured for row in rows]),
        (APART, PREDICTED, [row.predicted for row in rows]),
    ):
        means = [unit * float(np.mean(v)) for v in values]
        halves = [unit * (half_interval(v) or 0.0) for v in values]
        axes.errorbar(at + side, means, yerr=halves, linestyle="none", capsize=3, linewidth=1.2, zorder=3, **style)
    for i, row in enumerate(rows):
        each = [unit * v for v in row.measured]
        axes.scatter([i - 3 * APART] * len(each), each, s=7, color=GREY, alpha=0.7, linewidth=0, zorder=2)
        broken = row.broken
        axes.annotate(
            f"{round(100 * row.error, 1) + 0.0:+.1f} %",
            (i, 1.0),
            xycoords=("data", "axes fraction"),
            ha="center",
            va="bottom",
            fontsize=8,
            color=COLOURS[5] if broken else GREY,
            weight="bold" if broken else "normal",
        )
    axes.set_xticks(at, [row.load.replace("closed ", "").replace("poisson ", "Poisson\n") for row in rows])
    axes.set_xlim(-0.6, len(rows) - 0.4)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(PLAIN)
