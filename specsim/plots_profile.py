"""Pictures of hardware profiles: steps a second, step time, and the survival above which one more draft token pays.

They share the palette and dashes of :mod:`specsim.plots`; save them with its ``save_figure``.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from specsim.hardware import Prices, Profile, Table1D, Table2D
from specsim.marginal import decode_seconds, held
from specsim.plots import COLOURS, DASHES, GREY, caption, plain_axes, some_ticks
from specsim.types import SpecsimError

MOST_TOKENS = 16384
"""The largest step drawn."""
POINTS = 400
PLAIN = FuncFormatter(lambda v, _: f"{v:,.0f}" if v >= 1000 else f"{v:g}")
NEVER = 1.08
"""Where a threshold above 1 is drawn."""


def plot_profiles(
    profiles: Mapping[str, Profile],
    thresholds: Mapping[str, Mapping[int, tuple[Prices, Prices]]],
    context: int = 1024,
    num_seqs: int | None = None,
    title: str | None = None,
    *,
    extrapolate: bool = False,
) -> Figure:
    """Return three panels: SPS(B), step time, and survival thresholds, against tokens B in the forward.

    Steps are of B sequences (or ``num_seqs``, the tokens beyond one each being drafts) with ``context`` KV tokens
    each; a band spans ``low`` to ``high`` where a profile has them. ``thresholds`` gives for each profile's label and
    for R sequences the thresholds of one more token and of looking ahead, [R·γ] each (see :mod:`specsim.marginal`):
    the latter is drawn as lines, and with a single profile the former as dots. A caption names analytic profiles.
    What does not fit in a profile's KV cache is left out. Raises SpecsimError if there is nothing to draw.
    """
    if not profiles:
        raise SpecsimError("profiles: none given, expected at least one to draw")
    figure = Figure(figsize=(13.0, 4.4), layout="constrained")
    speed, time, pays = figure.subplots(1, 3)
    drawn, alone = False, len(profiles) == 1
    known_cases = (r for found in thresholds.values() for r, (_, ahead) in found.items() if np.isfinite(ahead).any())
    dashes = dict(zip(dict.fromkeys(known_cases), itertools.cycle(DASHES), strict=False))
    for i, (name, profile) in enumerate(profiles.items()):
        style: dict[str, Any] = {"color": COLOURS[i % len(COLOURS)], "linestyle": DASHES[i % len(DASHES)]}
        tokens = _counts(profile, num_seqs)
        seconds = decode_seconds(profile, tokens, context, num_seqs, extrapolate=extrapolate)
        known = np.isfinite(seconds)
        drawn |= bool(known.any())
        b, s = np.array(tokens)[known], seconds[known]
        label = f"{name} (analytic)" if profile.kind == "analytic" else name
        speed.plot(b, 1 / s, label=label, linewidth=1.6, **style)
        time.plot(b, 1e3 * s, label=label, linewidth=1.6, **style)
        _band(profile, b, speed, time, style["color"])
        _thresholds(pays, thresholds.get(name, {}), None if alone else style["color"], dashes)
    if not drawn:
        raise SpecsimError(f"context: nothing to draw, no step fits at {context} KV tokens a sequence")
    _dress(speed, "tokens B in the forward", "steps a second, SPS(B)")
    _dress(time, "tokens B in the forward", "step time (ms)")
    _dress(pays, "tokens B in the forward: R sequences and their drafts", "survival above which a draft token pays")
    for axes in (speed, time):
        axes.set_yscale("log")
        some_ticks(axes.yaxis)
        axes.yaxis.set_major_formatter(PLAIN)
    _mark_starts(pays, {r: COLOURS[(i + 1) % len(COLOURS)] if alone else GREY for i, r in enumerate(dashes)})
    if not alone:
        lines = [
            Line2D([], [], color=_shade("black", i, len(dashes)), linestyle=dash, linewidth=1.6, label=f"R = {r}")
            for i, (r, dash) in enumerate(dashes.items())
        ]
        pays.legend(handles=lines, fontsize=8, handlelength=4, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    pays.set_ylim(0, NEVER)
    pays.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1, NEVER], ["0", "0.2", "0.4", "0.6", "0.8", "1", "never"])
    who = f"{num_seqs or 'B'} sequences, {held(profiles.values(), context)}"
    speed.set_title(who, loc="left", fontsize=9)
    what = "line: seeing all drafts at once" + ("; dots: the next token alone" if alone else "")
    pays.set_title(what, loc="left", fontsize=9)
    handles, labels = speed.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=min(3, len(labels)), fontsize=9, frameon=False)
    caption(figure, [profile.caveat for profile in profiles.values() if profile.caveat])
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


def _counts(profile: Profile, num_seqs: int | None) -> list[int]:
    """Token counts that show every stair and cliff: the measured sizes with their neighbours, and a log grid."""
    low, high = profile.verify.range[0], min(profile.last_tokens, MOST_TOKENS)
    low = max(low, num_seqs or 1)
    if low > high:
        raise SpecsimError(f"num_seqs: expected at most {high}, the tokens that {profile.name} has prices for")
    counts = set(np.geomspace(low, high, POINTS).round().astype(int).tolist())
    for size in profile.verify.tokens if isinstance(profile.verify, Table1D | Table2D) else ():
        counts |= {b for b in (size, size + 1) if low <= b <= high}
    return sorted(counts)


def _band(profile: Profile, b: Prices, speed: Axes, time: Axes, colour: str) -> None:
    """The seconds between a table's bounds, drawn at its own sizes."""
    verify = profile.verify
    if type(verify) is not Table1D or verify.low is None or verify.high is None or not len(b):
        return
    sizes = np.array(verify.tokens)
    there = (sizes >= b[0]) & (sizes <= b[-1]) & (np.array(verify.low) > 0)
    low, high = (np.array(bound)[there] + profile.host_seconds for bound in (verify.low, verify.high))
    look: dict[str, Any] = {"color": colour, "alpha": 0.18, "linewidth": 0}
    look["step"] = "pre" if verify.below == "next_size" else None
    speed.fill_between(sizes[there], 1 / high, 1 / low, **look)
    time.fill_between(sizes[there], 1e3 * low, 1e3 * high, **look)


def _thresholds(
    axes: Axes, found: Mapping[int, tuple[Prices, Prices]], colour: str | None, dashes: Mapping[int, Any]
) -> None:
    """A curve a number of sequences; of several profiles in shades of the profile's ``colour``, with ``dashes``.

    Drawn where the next token costs something: on a staircase at the end of each stair, since inside a stair
    tokens are free. A single profile (no colour) has a colour for each number of sequences, and dots for the next
    token alone; those above 1, which no survival pays, lie at NEVER.
    """
    for i, (r, dash) in enumerate(dashes.items()):
        one, ahead = found.get(r, (np.empty(0), np.empty(0)))
        own = COLOURS[(i + 1) % len(COLOURS)]
        look: dict[str, Any] = {"color": own, "linestyle": "-"}
        if colour:
            look = {"color": _shade(colour, i, len(dashes)), "linestyle": dash}
        b = r + np.arange(len(ahead))
        dear = np.flatnonzero(np.isfinite(ahead) & (one > 0))
        if not len(dear):
            continue
        line, dots = np.clip(ahead[dear], 0, NEVER), np.where(one[dear] > 1, NEVER, one[dear])
        axes.plot(b[dear], line, linewidth=1.6, label=f"R = {r}", **look)
        if not colour:
            apart = dots > line + 0.01
            place: dict[str, Any] = {"s": 9, "linewidth": 0, "alpha": 0.8, "clip_on": False}
            axes.scatter(b[dear][apart], dots[apart], color=own, **place)


def _shade(colour: str, i: int, count: int) -> str:
    """The ``i``-th of ``count`` shades of a colour, from a light one to the colour itself."""
    white = 0.6 * (1 - (i + 1) / count)
    red, green, blue = ((1 - white) * part + white for part in to_rgb(colour))
    return to_hex((red, green, blue))


def _mark_starts(axes: Axes, starts: Mapping[int, str]) -> None:
    """A dotted line where each number of sequences starts, without a draft, and its name beside it."""
    for r, colour in starts.items():
        axes.axvline(r, color=colour, linewidth=0.8, linestyle=(0, (1, 2)), zorder=0)
        text = axes.annotate(
            f"R = {r}", (r, 0.92), xytext=(3, 0), textcoords="offset points", fontsize=8, color=colour, ha="left",
            va="center", zorder=6,
        )  # fmt: skip
        text.set_path_effects([withStroke(linewidth=2.0, foreground="white")])


def _dress(axes: Axes, x: str, y: str) -> None:
    plain_axes(axes)
    axes.tick_params(labelsize=8, color=GREY)
    axes.set_xscale("log", base=2)
    low, high = axes.get_xlim()
    first, last = int(np.ceil(np.log2(max(low, 1)))), int(np.floor(np.log2(max(high, 2))))
    every = max(1, round((last - first) / 7))
    axes.xaxis.set_major_locator(FixedLocator([2.0**i for i in range(first, last + 1, every)]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(PLAIN)
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
