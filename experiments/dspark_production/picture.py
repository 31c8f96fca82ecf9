"""The picture of a prediction: throughput, verified tokens and the front, predicted and published together."""

from __future__ import annotations

import math

import pandas as pd
from figures import MTP, Figures
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter
from verdict import Gain, Verdict

# Okabe-Ito colours; what is published is a line, what is predicted is markers, so grey prints suffice.
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#595959"


def draw(figures: Figures, verdict: Verdict, fit_loads: list[int], floor: float, matched: float) -> Figure:
    """Three panels; filled markers are predictions, open ones the loads that the fit has seen."""
    figure = Figure(figsize=(13.5, 4.9), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.06)  # type: ignore[union-attr]
    load, tokens, front = figure.subplots(1, 3)
    points = verdict.points.assign(speed=verdict.points["throughput"] / verdict.points["concurrency"])
    seen = points["concurrency"].isin(fit_loads)
    last = points["concurrency"].max()

    for curve, style in ((figures.mtp_throughput, _mtp()), (figures.throughput, _dspark())):
        inside = curve.load <= 1.1 * last
        load.plot(curve.load[inside], curve.y[inside], **style)
        front.plot(curve.y[inside] / curve.load[inside], curve.y[inside], **style)
    tokens.plot([0, 1.1 * last], [2, 2], **_mtp())
    tokens.plot(figures.verified.load, figures.verified.y, **_dspark())
    _mark(load, points, seen, "concurrency", "throughput", "throughput_ci")
    _mark(tokens, points, seen, "concurrency", "verified_tokens", "verified_tokens_ci")
    _mark(front, points, seen, "speed", "throughput", None)
    for _, row in points.iterrows():
        front.annotate(
            f"{row['concurrency']:.0f}",
            (row["speed"], row["throughput"]),
            xytext=(6, 4),
            textcoords="offset points",
            fontsize=7.5,
            color=GREY,
        )
    front.axvline(floor, color=GREY, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
    front.axhline(matched, color=GREY, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)

    worst, mean, verified, *_ = verdict.bars
    _title(load, f"throughput: off by {worst.value:.1f} % at worst, {mean.value:.1f} % on average")
    _title(tokens, f"verified tokens: off by {verified.value:.2f} at worst")
    _title(
        front,
        f"at {floor:g} tok/s/user: throughput {_gain(verdict.throughput_gain)}\n"
        f"at {matched:,.0f} tok/s per GPU: speed {_gain(verdict.speed_gain)}",
    )
    load.set(xlabel="concurrent requests per GPU", ylabel="throughput (output tok/s per GPU)", xlim=(0, 1.1 * last))
    tokens.set(xlabel="concurrent requests per GPU", ylabel="verified tokens per request and step")
    tokens.set(xlim=(0, 1.1 * last), ylim=(1, 1 + figures.gamma))
    front.set(xlabel="interactivity (tok/s/user)", ylabel="throughput (output tok/s per GPU)")
    slowest = min(points["speed"].min(), floor)
    front.set_xlim(0.85 * slowest, 1.1 * max(points["speed"].max(), floor))
    for axes in (load, front):
        axes.set_ylim(0, 1.08 * points["throughput"].max())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}"))
    for axes in (load, tokens, front):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#d9d9d9", linewidth=0.5)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=8.5)
    handles = [
        Line2D([], [], **_mtp(), label=f"{MTP} published (gives the step times)"),
        Line2D([], [], **_dspark(), label=f"{figures.method} published"),
        Line2D([], [], **_predicted(filled=True), label=f"{figures.method} predicted"),
        Line2D([], [], **_predicted(filled=False), label=f"{figures.method} at a load of the fit"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=9, frameon=False, handlelength=3)
    title = f"{figures.target}: {figures.method} predicted from the {MTP} curve and two fitted parameters"
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    return figure


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=8.5, color=GREY)


def _gain(gain: Gain) -> str:
    predicted, true = (f"{100 * g:+.1f} %" if math.isfinite(g) else "–" for g in (gain.predicted, gain.published))
    return f"{predicted} (published {true})"


def _mark(axes: Axes, points: pd.DataFrame, seen: pd.Series, x: str, y: str, ci: str | None) -> None:
    for rows, filled in ((points[~seen], True), (points[seen], False)):
        bars = rows[ci] if ci else None
        axes.errorbar(rows[x], rows[y], yerr=bars, ecolor=ORANGE, elinewidth=1.2, capsize=2.5, **_predicted(filled))


def _mtp() -> dict[str, object]:
    return {"color": "black", "linestyle": (0, (5, 2)), "linewidth": 1.5}


def _dspark() -> dict[str, object]:
    return {"color": BLUE, "linestyle": "-", "linewidth": 1.8}


def _predicted(filled: bool) -> dict[str, object]:
    face = ORANGE if filled else "white"
    return {"linestyle": "none", "marker": "o", "markersize": 6, "color": ORANGE, "markerfacecolor": face,
            "markeredgecolor": ORANGE, "markeredgewidth": 1.4}  # fmt: skip
