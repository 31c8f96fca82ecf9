"""The picture of a measurement: SPS(B), the staircase, one more token's cost, where that stops being free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, NullLocator

from specsim.hardware import Additive, Profile
from specsim.measure.curves import FREE, Curves, curves
from specsim.measure.records import Run
from specsim.measure.timing import Measured
from specsim.plots import COLOURS, GREY, plain_axes, some_ticks

BLACK, ORANGE, SKY, GREEN = COLOURS[:4]


def plot_measured(run: Run, profile: Profile) -> Figure:
    """Return the figure of a measurement: four panels over the tokens B in the forward."""
    grid = run.grid
    context = grid.contexts[0]
    drawn = curves(profile, grid.gamma, context)
    figure = Figure(figsize=(11.0, 7.6), layout="constrained")
    rate, time, marginal, free = figure.subplots(2, 2).ravel()
    full = _shape(run, context, blocks=True)
    single = _shape(run, context, blocks=False)
    _rate(rate, drawn, full, single, grid.gamma)
    _time(time, run, profile, drawn, full)
    _marginal(marginal, drawn)
    _free(free, drawn)
    for axes in (rate, time, marginal, free):
        _dress(axes, drawn, grid.capture[-1] if run.graphs else None)
    figure.suptitle(f"{profile.model}, on {run.device}; context {context}", x=0.01, ha="left", fontsize=11)
    return figure


def _rate(axes: Axes, drawn: Curves, full: Sequence[Measured], single: Sequence[Measured], gamma: int) -> None:
    axes.plot(
        drawn.tokens, 1 / drawn.block_seconds, color=BLACK, linewidth=1.4, label=f"the profile, blocks of {gamma + 1}"
    )
    for points, marker, colour, label in (
        (full, "o", ORANGE, f"measured, blocks of {gamma + 1}"),
        (single, "D", SKY, "measured, 1 token a sequence"),
    ):
        rates = [1 / m.quartiles[1] for m in points]
        axes.plot([m.point.tokens for m in points], rates, marker=marker, color=colour, label=label, **_dots(points))
    axes.set_title("Engine steps per second, SPS(B)", loc="left", fontsize=10)
    axes.set_ylabel("steps/s")
    axes.set_ylim(bottom=0)
    _legend(axes)


def _time(axes: Axes, run: Run, profile: Profile, drawn: Curves, full: Sequence[Measured]) -> None:
    verify = profile.verify
    assert isinstance(verify, Additive)
    assert verify.low is not None
    assert verify.high is not None
    at = np.array(verify.tokens)
    # The quartiles are of the curve by tokens; sequences and KV shift all three alike.
    place = np.searchsorted(at, drawn.tokens) if run.graphs else None
    bounds = []
    for bound in (verify.low, verify.high):
        gap = np.array(bound) - np.array(verify.seconds)
        bounds.append(gap[place] if place is not None else np.interp(drawn.tokens, at, gap))
    low, high = (1e3 * (drawn.block_seconds + gap) for gap in bounds)
    axes.fill_between(drawn.tokens, low, high, color=BLACK, alpha=0.2, linewidth=0, label="quartiles")
    line = "the profile" + (": padded to graphs" if run.graphs else "")
    axes.plot(drawn.tokens, 1e3 * drawn.block_seconds, color=BLACK, linewidth=1.4, label=line)
    for context, colour, marker in zip(run.grid.contexts, (ORANGE, GREEN, SKY), "osv", strict=False):
        points = full if context == run.grid.contexts[0] else _shape(run, context, blocks=True)
        q1, median, q3 = (1e3 * np.array([m.quartiles[i] for m in points]) for i in range(3))
        axes.errorbar(
            [m.point.tokens for m in points], median, (median - q1, q3 - median), marker=marker, color=colour,
            label=f"measured, context {context}", elinewidth=1.2, **_dots(points),
        )  # fmt: skip
    axes.set_title("Step time", loc="left", fontsize=10)
    axes.set_ylabel("ms")
    axes.set_yscale("log")
    some_ticks(axes.yaxis)
    _legend(axes)


def _marginal(axes: Axes, drawn: Curves) -> None:
    axes.stairs(1e3 * drawn.marginal, drawn.sizes, color=BLACK, linewidth=1.4, baseline=None)
    axes.axhline(0, color=GREY, linewidth=0.8)
    last = int(drawn.tokens[-1])
    average = 1e3 * float(drawn.alone_seconds[-1]) / last
    axes.axhline(average, color=ORANGE, linewidth=1.2, linestyle=(0, (5, 2)), label=f"mean of a token at {last:,}")
    _legend(axes)
    axes.set_title("Cost of one more verified token", loc="left", fontsize=10)
    axes.set_ylabel("ms/token")


def _free(axes: Axes, drawn: Curves) -> None:
    share = drawn.alone_seconds / drawn.alone_seconds[0]
    axes.plot(drawn.tokens, share, color=BLACK, linewidth=1.4)
    axes.axhline(1 + FREE, color=ORANGE, linewidth=1.2, linestyle=(0, (5, 2)))
    until = drawn.free_until
    if until is None:
        text = f"still free at {drawn.tokens[-1]:,} tokens"
    else:
        axes.plot([until], [share[until - 1]], marker="o", markersize=9, markerfacecolor="none", color=BLACK)
        axes.axvline(until, color=GREY, linewidth=0.9, linestyle=(0, (1, 1.5)))
        text = f"free up to {until:,} token{'s' * (until > 1)}"
    at = until or int(drawn.tokens[-1])
    left = at * at > drawn.tokens[-1]  # where there is more room, on the axis of logarithms
    axes.annotate(
        text, (at, 1), xycoords=("data", "axes fraction"), xytext=(-5 if left else 5, -12), fontsize=9,
        textcoords="offset points", ha="right" if left else "left",
        path_effects=[withStroke(linewidth=2.5, foreground="white")],
    )  # fmt: skip
    title = f"Where tokens stop being free: over {1 + FREE:g} × the step of one"
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_ylabel("× the step of one token")
    top = max(2.0, min(4.0, float(share.max())))
    axes.set_ylim(min(0.9, float(share.min())), top)


def _dots(points: Sequence[Measured]) -> dict[str, Any]:
    """Dots, smaller where they are many."""
    size = 5.0 if len(points) < 25 else 3.5
    return {"linestyle": "none", "markersize": size, "markeredgecolor": "white", "markeredgewidth": 0.4}


def _shape(run: Run, context: int, blocks: bool) -> list[Measured]:
    """The verifying points at a context by size: in full blocks (the fewest sequences), or of single tokens."""
    points = sorted((m for m in run.of("verify") if m.point.context == context), key=lambda m: m.point)
    if not blocks:
        return [m for m in points if m.point.num_seqs == m.point.tokens]
    return list({m.point.tokens: m for m in reversed(points)}.values())[::-1]


def _dress(axes: Axes, drawn: Curves, capture: int | None) -> None:
    plain_axes(axes)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}" if abs(v) >= 1000 else f"{v:.4g}"))
    axes.tick_params(labelsize=9, color=GREY)
    axes.set_xlabel("tokens B in the forward", fontsize=9)
    axes.set_xlim(0.9, 1.1 * float(drawn.tokens[-1]))
    if capture is not None and capture < drawn.tokens[-1]:
        axes.axvline(capture, color=GREY, linewidth=0.8, linestyle=(0, (4, 3)))


def _legend(axes: Axes) -> None:
    axes.legend(fontsize=8, framealpha=0.85, edgecolor="none", fancybox=False)
