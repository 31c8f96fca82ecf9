"""Pictures of a replay: what was measured and what was simulated, by distribution, by request and over time.

They share the palette of :mod:`specsim.plots`; save them with its ``save_figure``.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from specsim.plots import COLOURS, GREY, caption, plain_axes
from specsim.types import Floats
from specsim.validate import LATENCIES, Comparison

MEASURED: dict[str, Any] = {"color": COLOURS[0], "linestyle": "-", "linewidth": 1.6, "label": "measured"}
SIMULATED: dict[str, Any] = {"color": COLOURS[5], "linestyle": (0, (4, 1.5)), "linewidth": 1.6, "label": "simulated"}
NAMES = {
    "ttft": ("time to first token (s)", 1.0),
    "tpot": ("time per output token (ms)", 1e3),
    "e2e": ("time to last token (s)", 1.0),
}
"""What each latency is called, and its unit's share of a second."""
PLAIN = FuncFormatter(lambda v, _: f"{v:,.0f}" if v >= 1000 else f"{v:g}")
LEAST = 1e-3
"""Seconds below which a point of the scatter is drawn at the edge: no engine answers sooner."""


def plot_validation(comparison: Comparison, title: str | None = None, notes: Sequence[str] = ()) -> Figure:
    """Return six panels: the distributions of ttft, tpot and e2e, ttft request by request, and the requests
    running and waiting over time; measured and simulated in each.

    A latency that no request has leaves its panel empty, and so does a load that was not recorded its line.
    ``notes`` go below the panels.
    """
    figure = Figure(figsize=(11.0, 6.6), layout="constrained")
    panels = list(figure.subplots(2, 3).flat)
    for axes, name in zip(panels, LATENCIES, strict=False):
        _distribution(axes, comparison, name)
    _by_request(panels[3], comparison)
    _over_time(panels[4], comparison, "running")
    _over_time(panels[5], comparison, "waiting")
    for axes in panels:
        plain_axes(axes)
        axes.tick_params(labelsize=8, color=GREY)
    handles = [Line2D([], [], **style) for style in (MEASURED, SIMULATED)]
    figure.legend(handles=handles, loc="outside lower right", ncols=2, fontsize=9, frameon=False, handlelength=3.5)
    caption(figure, [line for note in notes for line in textwrap.wrap(note, 115)])  # beside the legend
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


def _distribution(axes: Axes, comparison: Comparison, name: str) -> None:
    """The share of requests that took at most so long."""
    label, unit = NAMES[name]
    for timings, style in ((comparison.measured, MEASURED), (comparison.simulated, SIMULATED)):
        values = unit * np.sort(getattr(timings, name))
        if len(values):
            share = np.arange(len(values) + 1) / len(values)
            axes.plot([values[0], *values], share, drawstyle="steps-post", **style)
    errors = [f"{stat} {_error(comparison.metrics[name][stat].error)}" for stat in ("mean", "p50", "p99")]
    axes.set_title(f"error: {', '.join(errors)}", loc="left", fontsize=9)
    axes.set_ylim(0, 1.02)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(PLAIN)
    axes.set_xlabel(label, fontsize=9)
    axes.set_ylabel("share of the requests", fontsize=9)


def _by_request(axes: Axes, comparison: Comparison) -> None:
    measured, simulated = (np.maximum(t.ttft, LEAST) for t in (comparison.measured, comparison.simulated))
    low, high = _range(measured, simulated)
    axes.plot([low, high], [low, high], color=GREY, linewidth=0.8, zorder=1)
    axes.scatter(measured, simulated, s=12, color=COLOURS[6], alpha=0.5, linewidth=0, zorder=3)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set(xlim=(low, high), ylim=(low, high))
    axes.set_box_aspect(1)
    axes.xaxis.set_major_formatter(PLAIN)
    axes.yaxis.set_major_formatter(PLAIN)
    if comparison.correlation is not None:
        axes.set_title(f"a dot a request, correlation {comparison.correlation:.4f}", loc="left", fontsize=9)
    axes.set_xlabel("measured time to first token (s)", fontsize=9)
    axes.set_ylabel("simulated (s)", fontsize=9)


def _over_time(axes: Axes, comparison: Comparison, name: str) -> None:
    recorded, ours = comparison.measured_load, comparison.simulated_load
    if recorded is not None:
        axes.plot(recorded.t, getattr(recorded, name), **MEASURED)
    else:
        axes.set_title("not recorded", loc="left", fontsize=9)
    axes.plot(ours.t, getattr(ours, name), **SIMULATED)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(PLAIN)
    axes.set_xlabel("seconds since the first arrival", fontsize=9)
    axes.set_ylabel(f"requests {name}", fontsize=9)


def _range(*values: Floats) -> tuple[float, float]:
    """A range that holds all ``values``, with some room on a log scale."""
    both = np.concatenate(values)
    return float(both.min() / 1.3), float(both.max() * 1.3)


def _error(error: float | None) -> str:
    return "–" if error is None else f"{100 * error:+.1f} %"
