"""Pictures of block traces: reliability of the confidences, acceptance by position, threshold sweeps.

They share the palette, markers and dashes of :mod:`specsim.plots`; save them with its ``save_figure``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.textpath import TextPath

from specsim.blocktrace import TOTAL
from specsim.plots import COLOURS, DASHES, GREY, MARKERS, plain_axes
from specsim.types import SpecsimError

BEFORE: dict[str, Any] = {"color": COLOURS[5], "marker": "s", "linestyle": (0, (4, 1.5)), "label": "raw"}
AFTER: dict[str, Any] = {"color": COLOURS[6], "marker": "o", "linestyle": "-", "label": "calibrated (STS)"}
ANY = "*"
"""The domain of a synthetic trace that serves every domain: drawn in each."""
MARKER_AREA = 200.0
"""Points² of a marker that stands for all blocks of its position; a bin's is its share of that."""
FEW = 30
"""Bins of fewer blocks have a marker, but no line goes through them: it would draw noise."""


def plot_reliability(before: pd.DataFrame, after: pd.DataFrame, title: str | None = None) -> Figure:
    """Return reliability diagrams, a panel a position, from two of ``calibration.reliability_table``'s tables.

    Observed survival against predicted survival, before and after calibration; a marker's area is its
    bin's share of the blocks, so that the distance from the diagonal times the ink is the ECE, which
    stands in the corner. Raises SpecsimError for tables without a row.
    """
    positions = sorted(set(before["position"]) | set(after["position"]))
    if not positions:
        raise SpecsimError("reliability: no blocks, expected at least one to draw")
    columns = min(len(positions), 4 if len(positions) <= 8 else 8)
    figure, panels = _grid(len(positions), columns, (2.35, 2.45), title)
    for axes, position in zip(panels, positions, strict=True):
        axes.plot([0, 1], [0, 1], color=GREY, linewidth=0.8, zorder=1)
        errors = []
        for table, style in ((before, BEFORE), (after, AFTER)):
            rows = table[table["position"] == position]
            share = rows["count"] / rows["count"].sum()
            many = rows[rows["count"] >= FEW]
            axes.plot(many["predicted"], many["observed"], **style | {"marker": None}, linewidth=1.1)
            axes.scatter(
                rows["predicted"], rows["observed"], MARKER_AREA * share, color=style["color"], marker=style["marker"],
                edgecolor="white", linewidth=0.4, alpha=0.75, zorder=3,
            )  # fmt: skip
            errors.append(float((share * (rows["predicted"] - rows["observed"]).abs()).sum()))
        _note(axes, f"ECE {errors[0]:.3f} → {errors[1]:.3f}")
        axes.set_title(f"first {position} tokens" if position > 1 else "first token", loc="left", fontsize=9)
        axes.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03), aspect="equal")
        axes.set_xticks([0, 0.5, 1])
        axes.set_yticks([0, 0.5, 1])
    _label(panels, "predicted survival", "observed survival")
    diagonal = Line2D([], [], color=GREY, linewidth=0.8, label="perfect")
    handles = [Line2D([], [], markersize=7, markeredgecolor="white", **style) for style in (BEFORE, AFTER)]
    area = Line2D([], [], linestyle="none", marker="o", color="#999999", label="marker area: share of the blocks")
    _legend(figure, [*handles, diagonal, area])
    return figure


def plot_acceptance(
    tables: Mapping[str, pd.DataFrame], taus: Mapping[str, pd.DataFrame], title: str | None = None
) -> Figure:
    """Return what a drafter's positions are worth, a column of panels a domain and a line a drafter.

    Above conditional acceptance by position (as in DSpark's figure 2), below τ of blocks cut to so many
    tokens. ``tables`` maps a drafter's label to its ``trace_stats.acceptance_table``, ``taus`` to its
    ``tau_table``; bands are their intervals. Positions that fewer than FEW blocks of a domain reached are
    left out, which the figure then says. Raises SpecsimError if there is nothing to draw.
    """
    domains = _domains(tables)
    figure, panels = _grid(2 * len(domains), len(domains), (2.9, 2.5), title, share_y="row")
    few = any(((table["reached"] < FEW) & (table["domain"] != TOTAL)).any() for table in tables.values())
    tables = {name: table[table["reached"] >= FEW] for name, table in tables.items()}
    for column, domain in enumerate(domains):
        above, below = panels[column], panels[column + len(domains)]
        _curves(above, tables, domain, "position", "conditional")
        _curves(below, taus, domain, "gamma", "tau")
        above.set_title("any domain" if domain == ANY else domain, loc="left", fontsize=9)
    last = max(int(table["gamma"].max()) for table in taus.values())
    panels[0].set_xticks(range(1, last + 1, 1 if last <= 10 else -(-last // 8)))
    panels[0].set_xlim(0.6, last + 0.4)
    high = max((float(table["conditional"].max()) for table in tables.values() if len(table)), default=1.0)
    panels[0].set_ylim(_floor(tables, "conditional"), min(1.02, np.ceil(10 * high + 0.5) / 10))
    _label(panels[: len(domains)], "", "conditional acceptance")
    _label(panels[len(domains) :], "draft position, block length γ", "tokens a cycle, τ")
    _legend(figure, [Line2D([], [], label=name, **_style(i)) for i, name in enumerate(tables) if len(taus[name])])
    if few:
        left_out = f"conditional acceptance: positions that fewer than {FEW} blocks reached are left out"
        figure.legends[0].set_title(left_out)
        figure.legends[0].get_title().set(fontsize=7, color=GREY)
    return figure


def plot_thresholds(tables: Mapping[str, pd.DataFrame], title: str | None = None) -> Figure:
    """Return what stopping at a confidence threshold does: a column of panels a domain, a line a drafter.

    Above the token acceptance rate, (accepted + 1)/(ℓ + 1), as in DSpark's figure 5; below the tokens a cycle,
    τ, that are paid for it. ``tables`` maps a drafter's label to its ``trace_stats.threshold_sweep``;
    bands are its intervals.
    An empty table leaves its drafter out and keeps its colour free. Raises SpecsimError if nothing is to be drawn.
    """
    domains = _domains(tables)
    figure, panels = _grid(2 * len(domains), len(domains), (2.9, 2.4), title, share_y="row")
    for column, domain in enumerate(domains):
        above, below = panels[column], panels[column + len(domains)]
        _curves(above, tables, domain, "threshold", "token_acceptance_rate")
        _curves(below, tables, domain, "threshold", "tau")
        above.set_title("any domain" if domain == ANY else domain, loc="left", fontsize=9)
    panels[0].set_ylim(_floor(tables, "token_acceptance_rate"), 1.02)
    panels[-1].set_ylim(bottom=0.9)
    panels[0].set_xlim(-0.02, 1.02)
    panels[0].set_xticks([0, 0.25, 0.5, 0.75, 1])
    _label(panels[: len(domains)], "", "token acceptance rate")
    _label(panels[len(domains) :], "confidence threshold", "tokens a cycle, τ")
    _legend(figure, [Line2D([], [], label=name, **_style(i)) for i, name in enumerate(tables) if len(tables[name])])
    return figure


def _domains(tables: Mapping[str, pd.DataFrame]) -> list[str]:
    """The domains of any of ``tables``, in order; "all" is left to the tables that people read."""
    names = list(dict.fromkeys(str(name) for table in tables.values() for name in table["domain"] if name != TOTAL))
    if not names:
        raise SpecsimError("tables: no domain in them, expected at least one to draw")
    return [name for name in names if name != ANY] or [ANY]


def _floor(tables: Mapping[str, pd.DataFrame], column: str) -> float:
    """The tenth below the smallest share in ``column``, with some room; 0 where there is none."""
    low = float(pd.concat(tables.values())[column].min())
    return max(0.0, np.floor(10 * low - 0.5) / 10) if low == low else 0.0


def _style(i: int) -> dict[str, Any]:
    return {
        "color": COLOURS[i % len(COLOURS)],
        "marker": MARKERS[i % len(MARKERS)],
        "linestyle": DASHES[i % len(DASHES)],
        "linewidth": 1.4,
        "markersize": 5,
        "markeredgecolor": "white",
        "markeredgewidth": 0.5,
    }


def _curves(axes: Axes, tables: Mapping[str, pd.DataFrame], domain: str, x: str, y: str) -> None:
    for i, table in enumerate(tables.values()):
        rows = table[table["domain"] == (domain if (table["domain"] == domain).any() else ANY)]
        if rows.empty:
            continue
        style = _style(i)
        axes.fill_between(rows[x], rows[f"{y}_low"], rows[f"{y}_high"], color=style["color"], alpha=0.16, linewidth=0)
        axes.plot(rows[x], rows[y], markevery=-(-len(rows) // 10), **style)


def _grid(
    count: int, columns: int, size: tuple[float, float], title: str | None, share_y: bool | Literal["row"] = True
) -> tuple[Figure, list[Axes]]:
    """A figure with ``count`` panels in rows of ``columns``, each of about ``size`` inches."""
    rows = -(-count // columns)
    figure = Figure(figsize=(max(size[0] * columns, 4.6), size[1] * rows + 1.1), layout="constrained")
    panels = list(figure.subplots(rows, columns, sharex=True, sharey=share_y, squeeze=False).flat)
    for axes in panels[count:]:
        axes.remove()
    for i, axes in enumerate(panels[:count]):
        # A panel with nothing under it carries the numbers of its column.
        lowest, leftmost = i + columns >= count, i % columns == 0
        axes.tick_params(labelsize=8, color=GREY, labelbottom=lowest, left=leftmost, labelleft=leftmost)
        plain_axes(axes)
    if title:
        figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    return figure, panels[:count]


def _label(panels: Sequence[Axes], x: str, y: str) -> None:
    """Name the axes where their numbers stand."""
    for axes in panels:
        if axes.xaxis.get_tick_params()["labelbottom"]:
            axes.set_xlabel(x, fontsize=9)
        if axes.yaxis.get_tick_params()["labelleft"]:
            axes.set_ylabel(y, fontsize=9)


def _note(axes: Axes, text: str) -> None:
    axes.text(0.97, 0.04, text, transform=axes.transAxes, ha="right", va="bottom", fontsize=7.5, color="#333333")


def _legend(figure: Figure, handles: list[Line2D]) -> None:
    figure.legend(
        handles=handles, loc="outside lower center", ncols=_columns([str(h.get_label()) for h in handles], figure),
        fontsize=8, frameon=False, handlelength=3.5,
    )  # fmt: skip


def _columns(labels: list[str], figure: Figure) -> int:
    """The most columns of a legend, up to four, that the figure's width has room for."""
    em = 8.0
    # With a dot, because an empty label has no path; then the line and its gap.
    widths = [TextPath((0, 0), f"{label}.", size=em).get_extents().width + 4.5 * em for label in labels]
    for columns in range(min(len(labels), 4), 1, -1):
        wide = sum(max(part) for part in np.array_split(widths, columns)) + 2 * em * columns
        if wide <= 72 * figure.get_figwidth():
            return columns
    return 1
