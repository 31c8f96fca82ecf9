"""HTML as text: everything that a user may have named is escaped here, and nowhere else let through."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from html import escape
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Any

from specsim.files import read_text
from specsim.report.looks import DASHES, PALETTE, SHAPES
from specsim.types import SpecsimError, to_install

PAGE = Path(__file__).parent / "page"
VEGA_LITE = "6.4"
EXTRA = f"the page's charts need vl-convert-python: {to_install('report')}"
OUTLINES = {
    "circle": '<circle cx="15" cy="6" r="4"/>',
    "square": '<rect x="11.4" y="2.4" width="7.2" height="7.2"/>',
    "triangle-up": '<path d="M15 1.5L19.5 9.5H10.5Z"/>',
    "diamond": '<path d="M15 0.8L19.5 6L15 11.2L10.5 6Z"/>',
    "triangle-down": '<path d="M15 10.5L19.5 2.5H10.5Z"/>',
    "cross": '<path d="M13.5 1.5h3v3h3v3h-3v3h-3v-3h-3v-3h3z"/>',
    "triangle-left": '<path d="M10.5 6L18.5 1.5V10.5Z"/>',
    "triangle-right": '<path d="M19.5 6L11.5 1.5V10.5Z"/>',
}


def text(value: object) -> str:
    """``value`` as text within HTML; bytes of a path that are no UTF-8 become question marks."""
    return escape(str(value).encode("utf-8", "replace").decode(), quote=True)


def cell(value: object) -> str:
    """``text`` whose signs stay with their numbers where a cell is narrow, intervals smaller than what they are of."""
    return re.sub(" ±\u00a0.*", r"<small>\g<0></small>", re.sub("([≥≤±]) ", "\\1\u00a0", text(value)))


def name(label: str) -> str:
    """A scheduler's label, which may break where its parts meet."""
    return re.sub(r"([(@])", r"<wbr>\1", text(label))


def script_json(data: Any) -> str:
    """``data`` as JSON that no HTML parser takes for markup; numbers that JSON has not become null."""
    plain = json.dumps(_plain(data), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return plain.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def page_file(name: str) -> str:
    """A part of the page that ships with the package."""
    return read_text(PAGE / name)


def fill(name: str, **parts: str) -> str:
    """The template ``name`` with its ``$parts`` filled in, as they are."""
    return Template(page_file(name)).substitute(parts)


def hash_of(script: str) -> str:
    """What a Content-Security-Policy calls this script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def check_library() -> None:
    """Raise SpecsimError, which says what to install, where the plotting library is not there."""
    if find_spec("vl_convert") is None:
        raise SpecsimError(f"report: {EXTRA}")


@lru_cache(maxsize=1)
def library() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script of about 0.9 MB, which defines ``vegaEmbed``."""
    check_library()
    import vl_convert

    bundle: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=VEGA_LITE)
    # Within a script only these could end it or hide its end; in strings and patterns both spellings mean the same.
    bundle = bundle.replace("\r\n", "\n").replace("</script", "<\\/script").replace("<!--", "<\\!--")
    return f"(() => {{\n{bundle}\n}})();"


def library_versions() -> dict[str, str]:
    """The versions of what ``library`` returns."""
    import vl_convert

    return {
        "Vega": vl_convert.get_vega_version(),
        "Vega-Lite": VEGA_LITE,
        "Vega-Embed": vl_convert.get_vega_embed_version(),
    }


def swatch(i: int) -> str:
    """The line and marker of curve ``i``, as the charts draw it."""
    dash = " ".join(f"{d:g}" for d in DASHES[i % len(DASHES)])
    shape = SHAPES[i % len(SHAPES)]
    mark = OUTLINES.get(shape) or f'<path transform="translate(15 6) scale(4.5)" d="{shape}"/>'
    colour = PALETTE[i % len(PALETTE)]
    line = f'<path d="M0 6H30" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>'
    return f'<svg class="swatch" viewBox="0 0 30 12" aria-hidden="true"><g fill="{colour}">{line}{mark}</g></svg>'


def key(names: Iterable[str]) -> str:
    """What the curves of the charts that follow are called."""
    items = "".join(f'<li data-curve="{i}">{swatch(i)}<span>{name(label)}</span></li>' for i, label in enumerate(names))
    return f'<ul class="key">{items}</ul>'


def table(
    caption: str, heads: Sequence[str], rows: Iterable[Sequence[object]], *, names: int = 1, kind: str = ""
) -> str:
    """A table; the first ``names`` cells of a row name it. Cells are escaped. ``kind`` is its class, if any."""
    kind = f' class="{kind}"' if kind else ""
    top = "".join(f'<th scope="col">{text(head)}</th>' for head in heads)
    body = "".join(
        "<tr>"
        + "".join(
            f'<th scope="row">{name(str(c))}</th>' if i < names else f"<td>{cell(c)}</td>" for i, c in enumerate(row)
        )
        + "</tr>\n"
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(caption)}"><table{kind}><caption>'
        f"<span>{text(caption)}</span></caption><thead><tr>{top}</tr></thead>\n<tbody>{body}</tbody></table></div>"
    )


def details(summary: str, body: str) -> str:
    """``body``, shown when asked for."""
    return f"<details><summary>{text(summary)}</summary>{body}</details>"


def fold(heading: str, body: str) -> str:
    """A part under its ``heading``, HTML both: open where there is room, and in print."""
    return f'<details class="fold" open><summary><h3>{heading}</h3></summary>{body}</details>'


def chart(name: str, caption: str = "") -> str:
    """The place of a chart."""
    below = f"<figcaption>{text(caption)}</figcaption>" if caption else ""
    return f'<figure><div data-chart="{text(name)}"></div>{below}</figure>'


def section(name: str, heading: str, body: str) -> str:
    """A section of the page."""
    return f'<section id="{name}" aria-labelledby="{name}-h"><h2 id="{name}-h">{text(heading)}</h2>\n{body}\n</section>'


def number(value: Any, half: Any = None, factor: float = 1.0, digits: int = 3) -> str:
    """A number for people, with the half-width of its interval if there is one; a dash for none."""
    if value is None or not math.isfinite(value):
        return "–"
    value = factor * float(value)
    shown = f"{value:,.0f}" if abs(value) >= 1000 or (digits == 3 and abs(value) >= 100) else f"{value:.{digits}g}"
    if half is None or not math.isfinite(half):
        return shown
    half = factor * float(half)
    return f"{shown} ± {f'{half:,.0f}' if half >= 100 else f'{half:.2g}'}"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
