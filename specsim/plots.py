"""Pictures of fronts: throughput against interactivity, and any metric against load.

Curves differ by colour (the Okabe-Ito palette and three more, safe for the colour-blind), by marker and by dash, so
that they stay apart in black and white. Figures are made without pyplot: no window, no global state.
Saved files have the same bytes for the same figure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, Locator, LogLocator, MaxNLocator, NullLocator
from numpy.typing import NDArray

from specsim.crossovers import crossover_span, crossovers
from specsim.files import write_atomic
from specsim.pareto import Front
from specsim.types import SpecsimError

COLOURS = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#D55E00", "#0072B2",
    "#7F1FE0", "#663311", "#1A2B8C",  # as far from the others, to the colour-blind too, as these are from each other
)  # fmt: skip
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
DASHES: tuple[Any, ...] = (
    "-", (0, (5, 2)), (0, (7, 2, 1.5, 2)), (0, (1, 1.2)), (0, (9, 2)), (0, (3, 1.5)), (0, (6, 1.5, 1, 1.5, 1, 1.5)),
)  # fmt: skip
GREY = "#595959"
RING: dict[str, Any] = {
    "linestyle": "none",
    "marker": "o",
    "markersize": 11,
    "markerfacecolor": "none",
    "markeredgecolor": "black",
}
PNG_DPI = 160
NO_GLYPH = "\N{WHITE SQUARE}"

LABELS = {
    "throughput": "throughput (output tok/s per GPU)",
    "interactivity_p50": "interactivity, median user (tok/s/user)",
    "interactivity_p10": "interactivity that 90 % of users get (tok/s/user)",
    "interactivity_mean": "interactivity, mean (tok/s/user)",
    "tps_per_request": "throughput per request in flight (tok/s)",
    "verified_tokens": "verified tokens per request and cycle",
    "tau": "tokens produced per request and cycle, τ",
    "acceptance_rate": "accepted share of verified draft tokens",
    "goodput": "goodput (requests/s per GPU that meet every SLO)",
    "ttft_p50": "time to first token, median (s)",
    "ttft_p99": "time to first token, 99th percentile (s)",
    "tpot_p50": "time per output token, median (s)",
    "tpot_p99": "time per output token, 99th percentile (s)",
    "itl_mean": "gap between emissions, mean (s)",
}


def plot_pareto(front: Front, floors: Iterable[float] = (), title: str | None = None) -> Figure:
    """Return a figure of the fronts, one curve a policy: y (throughput) against x (interactivity).

    A translucent band spans the 95 % intervals of both; the outermost points carry their load;
    ``floors`` (in units of x) are dashed vertical lines. Rings, with the load, mark where the policy
    with the most y at equal load changes; with several seeds only where each of them shows it. A caption
    names analytic profiles.
    """
    floors = sorted(floors)
    top = 1.06 * max(_top(front, front.x), *floors, 0.0)
    rows_up = _rows_up(floors, 0.05 * top)
    figure, axes = _axes(front, title, title_pad=16 + 10 * max(rows_up) if floors else 8)
    for policy, style, rows in _curves(front):
        _band(axes, rows, front, style["color"])
        axes.plot(rows[front.x], rows[front.y], label=policy, **style)
    for floor, up in zip(floors, rows_up, strict=True):
        axes.axvline(floor, color=GREY, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
        place: dict[str, Any] = {
            "xycoords": ("data", "axes fraction"),
            "xytext": (0, 2 + 10 * up),
            "textcoords": "offset points",
        }
        axes.annotate(f"≥ {floor:g}", (floor, 1), ha="center", va="bottom", fontsize=8, color=GREY, **place)
    axes.set(xlabel=LABELS.get(front.x, front.x), ylabel=LABELS.get(front.y, front.y))
    axes.set_xlim(0, top or None)
    axes.set_ylim(0, 1.06 * _top(front, front.y) or None)
    notes = _mark_loads(axes, front)
    handles, labels = axes.get_legend_handles_labels()
    _legend(axes, handles + list(notes), labels + list(notes.values()))
    return figure


def plot_load(front: Front, metric: str = "verified_tokens", title: str | None = None) -> Figure:
    """Return a figure of ``metric`` (a column of the sweep) against the load, on a log-2 axis.

    One curve a policy, with the band of its 95 % interval. Raises SpecsimError for a metric
    that the sweep lacks or has no numbers of.
    """
    if f"{metric}_ci" not in front.points.columns:
        known = [c.removesuffix("_ci") for c in front.points.columns if c.endswith("_ci")]
        raise SpecsimError(f"metric: {metric!r} is not in the front, expected one of {', '.join(known)}")
    if front.points[metric].isna().all():
        raise SpecsimError(f"metric: {metric!r} has no numbers in this sweep, expected some to draw")
    figure, axes = _axes(front, title)
    for policy, style, rows in _curves(front):
        load, mean = rows["load"].to_numpy(), rows[metric].to_numpy()
        half = rows[f"{metric}_ci"].fillna(0.0).to_numpy()
        axes.fill_between(load, mean - half, mean + half, color=style["color"], alpha=_faint(front), linewidth=0)
        axes.plot(load, mean, label=policy, **style)
    axes.set_xscale("log", base=2)
    loads = np.unique(front.points["load"])
    axes.set_xticks(loads, [f"{v:g}" for v in loads])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(0, 1.06 * _top(front, metric) or None)
    axes.set(xlabel=_load(front), ylabel=LABELS.get(metric, metric))
    _legend(axes, *axes.get_legend_handles_labels(), beside=True)
    return figure


def save_figure(figure: Figure, path: str | Path) -> Path:
    """Write ``figure`` as PNG (160 dpi) or SVG, by the suffix of ``path``; return the path.

    The same figure gives the same bytes: no dates, no random ids. An older file stays whole until
    the new one is complete. Raises SpecsimError for another suffix or a path that cannot be written.
    """
    kind = Path(path).suffix.lower()
    if kind not in (".png", ".svg"):
        raise SpecsimError(f"{path}: suffix {kind!r}, expected .png or .svg")
    _as_they_are(figure)
    metadata = {"Date": None} if kind == ".svg" else {"Software": None}
    with matplotlib.rc_context({"svg.hashsalt": "specsim"}):
        return write_atomic(path, lambda p: figure.savefig(p, format=kind[1:], dpi=PNG_DPI, metadata=metadata))


def _as_they_are(figure: Figure) -> None:
    """Texts hold names that users chose: a $ in them starts no formula, and a box stands for what no font here has."""
    ticks = [
        t for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) for t in (*axis.majorTicks, *axis.minorTicks)
    ]
    labels = {label for tick in ticks for label in (tick.label1, tick.label2)}
    for text in figure.findobj(lambda artist: isinstance(artist, Text) and artist not in labels):
        assert isinstance(text, Text)
        text.set_parse_math(False)
        font = get_font(findfont(text.get_fontproperties()))
        text.set_text("".join(c if c == "\n" or font.get_char_index(ord(c)) else NO_GLYPH for c in text.get_text()))


def some_ticks(axis: Axis) -> None:
    """Ticks at 1, 2 and 5 times powers of ten on an axis of logarithms; evenly apart where that would leave too few."""
    low, high = sorted(axis.get_view_interval())
    locator: Locator = LogLocator(10, (1, 2, 5))
    if sum(low <= at <= high for at in locator.tick_values(low, high)) < 3:
        locator = MaxNLocator(5, steps=[1, 2, 2.5, 5, 10])
    axis.set_major_locator(locator)
    axis.set_minor_locator(NullLocator())


def caption(figure: Figure, lines: Sequence[str]) -> None:
    """Write ``lines`` below everything else in ``figure``: what must stand beside it wherever it goes."""
    if lines:
        figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=8, color=GREY)


def plain_axes(axes: Axes) -> None:
    """Open to the top and the right, over a faint grid: how every panel here looks."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(color="#d9d9d9", linewidth=0.5)
    axes.set_axisbelow(True)


def _axes(front: Front, title: str | None, title_pad: float = 8) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8.0, 5.2), layout="constrained")
    axes = figure.add_subplot()
    plain_axes(axes)
    axes.tick_params(labelsize=9, color=GREY)
    plain = FuncFormatter(lambda v, _: f"{v:,.0f}" if v >= 1000 else f"{v:g}")
    axes.xaxis.set_major_formatter(plain)
    axes.yaxis.set_major_formatter(plain)
    if title is None and front.domain != "all":
        title = f"domain: {front.domain}"
    if title:
        axes.set_title(title, loc="left", fontsize=11, pad=title_pad)
    caption(figure, front.caveats)
    return figure, axes


def _curves(front: Front) -> Iterable[tuple[str, dict[str, Any], pd.DataFrame]]:
    for i, (policy, rows) in enumerate(front.points.groupby("policy", sort=False)):
        yield (
            str(policy),
            {
                "color": COLOURS[i % len(COLOURS)],
                "marker": MARKERS[i % len(MARKERS)],
                "linestyle": DASHES[i % len(DASHES)],
                "linewidth": 1.6,
                "markersize": 6,
                "markeredgecolor": "white",
                "markeredgewidth": 0.5,
            },
            rows,
        )


def _load(front: Front) -> str:
    return "concurrency" if front.workload == "closed" else "requests/s"


def _top(front: Front, metric: str) -> float:
    return float((front.points[metric] + front.points[f"{metric}_ci"].fillna(0.0)).max())


def _band(axes: Axes, rows: pd.DataFrame, front: Front, colour: str) -> None:
    # On a falling curve the intervals' boxes reach from the lower left corners to the upper right ones.
    x, y = rows[front.x].to_numpy(), rows[front.y].to_numpy()
    dx, dy = rows[f"{front.x}_ci"].fillna(0).to_numpy(), rows[f"{front.y}_ci"].fillna(0).to_numpy()
    axes.fill(
        np.concatenate([x + dx, (x - dx)[::-1]]),
        np.concatenate([y + dy, (y - dy)[::-1]]),
        color=colour,
        alpha=_faint(front),
        linewidth=0,
    )


def _rows_up(floors: Sequence[float], room: float) -> list[int]:
    """How many rows up the label of each of the rising ``floors`` goes to have ``room`` to its left in its row."""
    last: list[float] = []  # the last one's place in every row
    rows = []
    for floor in floors:
        row = next((i for i, place in enumerate(last) if floor - place >= room), len(last))
        last[row : row + 1] = [floor]
        rows.append(row)
    return rows


def _faint(front: Front) -> float:
    """How opaque bands are: the more there may be on top of each other, the less."""
    return min(0.18, 1.26 / len(front.policies))


def _mark_loads(axes: Axes, front: Front) -> dict[Artist, str]:
    """Write loads beside the outermost points and the crossovers; return what the legend says of them."""
    load = _load(front)
    points = front.points.dropna(subset=[front.x, front.y])
    outer = points.loc[(points[front.x] * points[front.y]).groupby(points["load"]).idxmax()]
    taken: list[NDArray[np.float64]] = []
    # From the heaviest load down: the light ones crowd where nobody reads a front.
    for row in outer.sort_values("load", ascending=False)[["load", front.x, front.y]].to_numpy():
        at = axes.transData.transform(row[1:])
        if all((np.abs(at - other) > (22, 12)).any() for other in taken):
            taken.append(at)
            _write(axes, f"{row[0]:g}", (row[1], row[2]), (5, 4), GREY)
    notes: dict[Artist, str] = {
        Line2D(
            [], [], linestyle="none", marker="$64$", color=GREY, markersize=10, markeredgewidth=0
        ): f"{load} at that point"
    }
    changes = crossovers(front)
    if front.points["seeds"].max() > 1:
        changes = changes.dropna(subset=["load_ci"])
    rows = changes[["load", "load_ci", "interactivity", "throughput"]].to_numpy()
    # One whose interval reaches an end of the loads simulated may be no change at all.
    inside = [row for row in rows if crossover_span(front, row[0], row[1])[0] == "at"]
    for at_load, _, x, y in inside:
        axes.plot([x], [y], **RING)
        _write(axes, f"≈{at_load:.{0 if at_load >= 10 else 1}f}", (x, y), (-4, -6), "black")
    if inside:
        notes[Line2D([], [], **RING)] = f"best policy at equal {load} changes"
    return notes


def _write(axes: Axes, text: str, at: tuple[float, float], offset: tuple[float, float], colour: str) -> None:
    outline = [withStroke(linewidth=2.0, foreground="white")]  # legible where it lies on a line
    right, above = offset[0] > 0, offset[1] > 0
    place: dict[str, Any] = {"ha": "left" if right else "right", "va": "bottom" if above else "top"}
    axes.annotate(
        text,
        at,
        fontsize=8,
        color=colour,
        path_effects=outline,
        zorder=5,
        xytext=offset,
        textcoords="offset points",
        **place,
    )


def _legend(axes: Axes, handles: Sequence[Artist], labels: Sequence[str], beside: bool = False) -> None:
    """A legend where the curves leave room, or ``beside`` the axes where they cross all of it."""
    look: dict[str, Any] = {"framealpha": 0.85, "edgecolor": "none", "fancybox": False}
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)} if beside else {"loc": "best"}
    axes.legend(handles, labels, fontsize=8, handlelength=4.5, **place, **look)
