"""What curves, axes and words on the page look like: colours, markers, dashes, and Vega-Lite's configuration."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from specsim.plots import COLOURS

PALETTE = [f"var(--s{i})" for i in range(len(COLOURS))]
DARK = {0: "#f2f2f2", 6: "#2f8fd0", 7: "#9b4dff", 8: "#e6d96a", 9: "#c9d0ff"}
"""The colours of COLOURS that a dark page has others for."""

SHAPES = (
    "circle", "square", "triangle-up", "diamond", "triangle-down", "cross",
    "M-1,-0.6L-0.6,-1L0,-0.4L0.6,-1L1,-0.6L0.4,0L1,0.6L0.6,1L0,0.4L-0.6,1L-1,0.6L-0.4,0Z", "triangle-left",
    "triangle-right",
)  # fmt: skip
DASHES: tuple[list[float], ...] = (
    [1, 0], [8, 3], [11, 3, 2.5, 3], [2, 2], [14, 3], [5, 2.5], [10, 2.5, 2, 2.5, 2, 2.5],
)  # fmt: skip
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
CONFIG: dict[str, Any] = {
    "font": FONT,
    "view": {"stroke": None},
    "axis": {
        "labelColor": "var(--muted)", "titleColor": "var(--ink)", "gridColor": "var(--grid)",
        "domainColor": "var(--line)", "tickColor": "var(--line)", "labelFontSize": 12, "titleFontSize": 12,
        "titleFontWeight": "normal", "titlePadding": 8, "labelOverlap": True, "labelPadding": 4, "tickSize": 4,
    },
    "header": {"labelColor": "var(--ink)", "titleColor": "var(--ink)", "labelFontSize": 12},
    "title": {
        "color": "var(--ink)", "fontSize": 13, "fontWeight": 600, "anchor": "start", "frame": "group", "offset": 12,
    },
    "text": {"fill": "var(--muted)", "stroke": "var(--paper)", "strokeWidth": 3},  # legible where it lies on a line
}  # fmt: skip


def palette() -> str:
    """The style sheet's part that sets the curves' colours."""

    def rule(colours: Iterable[tuple[int, str]]) -> str:
        return ":root { " + " ".join(f"--s{i}: {colour};" for i, colour in colours) + " }"

    dark = f"@media screen and (prefers-color-scheme: dark) {{ {rule(DARK.items())} }}"
    return f"{rule(enumerate(COLOURS))}\n{dark}\n"
