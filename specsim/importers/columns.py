"""Columns of sizes and one time in any of the usual spellings, the plain form of a table of step or draft times."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from specsim.files import csv_rows, parse_json
from specsim.importers.profile_parts import UNITS, Ask, Point, json_kind, positive, read_unit, unit_of, whole
from specsim.types import SpecsimError

_TIME = re.compile("time|latency|duration|cost")

# Names of columns, by what we call them.
_COLUMNS = {
    "tokens": ("tokens", "num_tokens", "batch_tokens", "verify_tokens", "x"),
    "num_seqs": ("num_seqs", "num_reqs", "seqs", "reqs", "sequences", "requests"),
    "kv_tokens": ("kv_tokens",),
    "part": ("part",),
}
_NAMED = {name: ours for ours, names in _COLUMNS.items() for name in names}


class Row:
    """One row of columns: where it stands, its sizes by name, its time and what it is a part of."""

    def __init__(self, where: str, sizes: Mapping[str, int], seconds: float, part: str) -> None:
        self.where, self.sizes, self.seconds, self.part = where, sizes, seconds, part

    def point(self, path: str | Path, size: str) -> Point:
        """The row as a point by one of its sizes."""
        return Point(self.where, self.sizes[size], self.seconds)


def read_rows(path: Path, text: str, ask: Ask, first: str = "tokens") -> list[Row]:
    """The rows of columns divided by commas, semicolons or white space; the first column is ``first`` if unnamed."""
    _refuse_json(path, text, first)
    lines = ["" if line.startswith("#") or not line.strip() else line for line in text.splitlines()]
    start = next((line for line in lines if line), None)
    if start is None:
        raise SpecsimError(f"{path}: expected columns of {first} and time, got an empty file")
    divider = next((mark for mark in ",;\t" if mark in start), None)
    split = csv_rows(path, lines, delimiter=divider) if divider else enumerate((line.split() for line in lines), 1)
    table = [(i, cells) for i, cells in split if cells]
    heads = [cell.strip() for cell in table[0][1]]
    if all(_is_number(head) for head in heads):
        if len(heads) != 2:
            raise SpecsimError(f"{path}: line {table[0][0]}: expected a header, got numbers")
        heads = [first, "time"]
    else:
        table = table[1:]
    names, timed, scale = _header(path, heads, ask, first)
    rows = []
    for i, cells in table:
        where = f"line {i}"
        if len(cells) != len(heads):
            raise SpecsimError(f"{path}: {where}: expected {len(heads)} columns, got {len(cells)}")
        given = dict(zip(names, cells, strict=True))
        kind = given.pop("part", "verify").strip()
        if kind not in ("verify", "draft"):
            raise SpecsimError(f"{path}: {where}: part: expected verify or draft, got {kind!r}")
        seconds = positive(f"{path}: {where}: {heads[timed]}", given.pop("time").strip()) / scale
        sizes = {
            name: whole(f"{path}: {where}: {name}", cell.strip(), 0 if name == "kv_tokens" else 1)
            for name, cell in given.items()
        }
        rows.append(Row(where, sizes, seconds, kind))
    if not rows:
        raise SpecsimError(f"{path}: expected rows below the header, got none")
    return rows


def _refuse_json(path: Path, text: str, first: str) -> None:
    """Raise SpecsimError where the whole text is one JSON value: that is none of the tables written as JSON."""
    try:
        data = parse_json(text)
    except ValueError:
        return
    raise SpecsimError(f"{path}: expected columns of {first} and time, got JSON of another kind: {json_kind(data)}")


def _header(path: Path, heads: list[str], ask: Ask, first: str) -> tuple[list[str], int, float]:
    """What the columns are, which holds the time, and how many of its units are a second."""
    names = [_NAMED.get(head.lower(), "") for head in heads]
    if first == "num_seqs":  # a table by sequences: a bare size is theirs
        names = ["num_seqs" if name == "tokens" else name for name in names]
    times = [i for i, name in enumerate(names) if not name and (unit_of(heads[i]) or _TIME.search(heads[i].lower()))]
    strange = [heads[i] for i, name in enumerate(names) if not name and i not in times]
    if strange:
        raise SpecsimError(
            f"{path}: column {strange[0]!r}: expected tokens, num_seqs, kv_tokens, part or a time with its unit "
            f"(as in time_ms); take it out if it is none of them"
        )
    units = {unit_of(heads[i]) for i in times}
    if len(times) != 1:
        listed = ", ".join(heads[i] for i in times) or "none"
        mixed = ": mixed units" if len(units) > 1 else ""
        raise SpecsimError(f"{path}: expected one column of times, got {listed}{mixed}")
    if first not in names:
        raise SpecsimError(f"{path}: expected a column {first}, got {', '.join(heads)}")
    for name in names:
        if name and names.count(name) > 1:
            raise SpecsimError(f"{path}: expected one column {name}, got {names.count(name)}")
    unit = units.pop()
    if ask.unit is not None:
        told = read_unit(ask.unit)
        if unit not in (None, told):
            raise SpecsimError(f"{path}: --unit: the column {heads[times[0]]!r} is in {unit}, got {ask.unit}")
        unit = told
    if unit is None:
        raise SpecsimError(f"{path}: column {heads[times[0]]!r}: expected its unit, as in time_ms, or --unit")
    names[times[0]] = "time"
    return names, times[0], UNITS[unit]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
