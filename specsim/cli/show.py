"""What the command line shows: tables on stdout, progress on stderr."""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from specsim.files import write_text

PATIENCE = 2.0
"""Seconds before progress shows; without a terminal a line is written every five times as long."""


def console() -> Console:
    """The console of stdout; wide where there is no terminal, so that piped tables keep their columns."""
    # Names that users chose print as they are: no [markup], no :emoji:.
    return Console(width=None if sys.stdout.isatty() else 180, highlight=False, markup=False, emoji=False)


def table(title: str, columns: list[str], rows: list[list[Any]], caption: str | None = None) -> Table:
    """A plain table: text to the left, numbers to the right."""
    # Not narrower than its title, or the title would wrap.
    out = Table(
        title=title,
        min_width=len(title.strip()),
        caption=caption,
        box=box.SIMPLE_HEAD,
        title_justify="left",
        caption_justify="left",
    )
    for i, column in enumerate(columns):
        left = all(isinstance(row[i], str) and not _is_number(row[i]) for row in rows)
        out.add_column(column, justify="left" if left else "right", no_wrap=True)
    for row in rows:
        out.add_row(*(cell if isinstance(cell, str) else number(cell) for cell in row))
    return out


def number(value: Any, digits: int = 4) -> str:
    """A number for people: thousands apart, about ``digits`` figures, a dash for none."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, int) or abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:,.{digits}g}"


def milliseconds(seconds: float) -> str:
    """Seconds shown as milliseconds."""
    return number(seconds * 1e3, 3)


def _is_number(text: str) -> bool:
    return text[:1].isdigit() or text.startswith(tuple("–≥≈+−-"))


def write_json_file(path: Path, data: Any) -> None:
    """Write plain data as JSON; what is not a number becomes null."""
    write_text(path, json.dumps(_plain(data), indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """Yield ``report(done, total)``; what it is told shows on stderr once the work takes over two seconds."""
    err = Console(stderr=True, markup=False, emoji=False)
    if not err.is_terminal:
        yield _lines(label, err)
        return
    bar = Progress(
        TextColumn(label), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=err, transient=True
    )
    task = bar.add_task(label, total=None)
    last = 0.0

    def report(done: int, total: int) -> None:
        nonlocal last
        if (now := time.monotonic()) - last > 0.1:
            last = now
            bar.update(task, completed=done, total=total)

    timer = threading.Timer(PATIENCE, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield report
    finally:
        timer.cancel()
        bar.stop()


def _lines(label: str, err: Console) -> Callable[[int, int], None]:
    start = last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - start > PATIENCE and (now - last > 5 * PATIENCE or done == total):
            last = now
            err.print(f"{label}: {done:,} of {total:,}, {now - start:.0f} s", highlight=False)

    return report
