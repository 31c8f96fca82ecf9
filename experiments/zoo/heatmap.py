"""The picture of a ranking: throughput against the reference, a row a policy and a column a load."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

CAP = 30.0
"""Gains beyond this many per cent share the deepest colour."""
GREY, INK = "#767676", "#1a1a1a"
# Orange to blue through white: told apart by the colour-blind, and by lightness alone.
SCALE = LinearSegmentedColormap.from_list("loss to gain", ["#D55E00", "#F6C9A0", "#FFFFFF", "#A9CDE6", "#0072B2"])
GAP = 0.35


def draw(table: pd.DataFrame, groups: Mapping[str, Sequence[str]], reference: str, seeds: int) -> Figure:
    """A figure of ``table`` (rank.ranking's): numbers are per cent, ≈ is noise, boxes hold the best contenders."""
    columns = list(dict.fromkeys(zip(table["setting"], table["users"], strict=True)))
    by = table.set_index(["setting", "users", "policy"])
    x, at = 0.0, {}
    for i, column in enumerate(columns):
        x += GAP if i and column[0] != columns[i - 1][0] else 0.0
        at[column] = x
        x += 1.0
    y, rows, heads = 0.0, {}, {}
    for title, names in groups.items():
        there = [name for name in names if name in set(table["policy"])]
        if there:
            heads[title] = y
            y += 0.75
            for name in there:
                rows[name] = y
                y += 1.0
            y += GAP
    figure = Figure(figsize=(2.9 + 0.62 * x, 1.55 + 0.285 * y), layout="constrained")
    axes = figure.add_subplot()
    axes.set(xlim=(-0.1, x + 0.05), ylim=(y - GAP + 0.05, -1.25))
    axes.axis("off")
    for column, left in at.items():
        for name, top in rows.items():
            if (*column, name) in by.index:
                _cell(axes, left, top, by.loc[(*column, name)], name == reference)
            else:
                axes.text(left + 0.5, top + 0.5, "–", ha="center", va="center", fontsize=8, color=GREY)
        axes.text(left + 0.5, -0.2, f"{column[1]}", ha="center", va="bottom", fontsize=8.5, color=INK)
    for setting in dict.fromkeys(s for s, _ in columns):
        lefts = [left for (s, _), left in at.items() if s == setting]
        title = setting.replace(", ", ",\n")
        axes.text((lefts[0] + lefts[-1] + 1) / 2, -1.05, title, ha="center", va="bottom", fontsize=9, color=INK,
                  fontweight="bold", clip_on=False)  # fmt: skip
    for title, top in heads.items():
        axes.text(-0.15, top + 0.42, title, ha="right", va="center", fontsize=8.5, color=GREY, style="italic")
    for name, top in rows.items():
        weight = "bold" if name == reference else "normal"
        axes.text(-0.15, top + 0.5, name, ha="right", va="center", fontsize=9, color=INK, fontweight=weight)
    axes.text(-0.15, -0.2, "users", ha="right", va="bottom", fontsize=8.5, color=GREY)
    figure.suptitle(f"Throughput against {reference}, %", x=0.01, ha="left", fontsize=11.5, fontweight="bold")
    figure.supxlabel(
        f"{seeds} paired seeds. Grey ≈: no difference from {reference} (paired t, Holm over all pairs, 5 %).\n"
        "Boxes: the best that is lossless, and what is no different from it.",
        x=0.01, ha="left", fontsize=8, color=GREY,
    )  # fmt: skip
    return figure


def signed(value: float, digits: int) -> str:
    """A number with its sign, a real minus, and none of either for zero."""
    text = f"{value:+.{digits}f}".replace("-", "−")
    return text if any(c in "123456789" for c in text) else text[1:]


def _cell(axes, left: float, top: float, row: pd.Series, is_reference: bool) -> None:
    gain = float(row["gain_percent"])
    noise = bool(row["noise"]) and not is_reference
    shade = "#F2F2F2" if noise or is_reference else SCALE(0.5 + 0.5 * np.clip(gain / CAP, -1, 1))
    axes.add_patch(Rectangle((left + 0.02, top + 0.04), 0.96, 0.92, facecolor=shade, linewidth=0))
    text = "0" if is_reference else signed(gain, 0 if abs(gain) >= 9.95 else 1) + " ≈" * noise
    deep = not (noise or is_reference) and abs(gain) > 0.75 * CAP
    color = "white" if deep else GREY if noise else INK
    axes.text(left + 0.5, top + 0.5, text, ha="center", va="center", fontsize=8.2, color=color)
    if row["ties_with_best"]:
        box = Rectangle((left + 0.05, top + 0.09), 0.90, 0.82, fill=False, edgecolor=INK, linewidth=1.2, zorder=3)
        axes.add_patch(box)
