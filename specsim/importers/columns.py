"""Columns of sizes and one time in any of the usual spellings, the plain form of a table of step or draft times."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from specsim.files import csv_rows, parse_json
from specsim.importers.profile_parts import Ask, Point, json_kind, whole
from specsim.importers.units import UNITS, in_seconds, read_name, told_unit
from specsim.types import SpecsimError

# Names of columns, by what we call them.
_COLUMNS = {
    "tokens": ("tokens", "num_tokens", "batch_tokens", "verify_tokens", "x"),
    "num_seqs": ("num_seqs", "num_reqs", "seqs", "reqs", "sequences", "requests"),
    "kv_tokens": ("kv_tokens",),
    "part": ("part",),
}
_NAMED = {name: ours for ours, names in _COLUMNS.items() for name in names}

_ROLES = {"verify": {"verify", "verification", "target"}, "draft": {"draft", "drafting", "drafter"}}
"""Words in a time's name that tell what was timed."""


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
        if ask.unit is None:
            raise SpecsimError(
                f"{path}: line {table[0][0]}: expected a header that tells the unit, as in {first},time_ms, or --unit, "
                "got numbers"
            )
        heads = [first, "time"]
    else:
        table = table[1:]
    names, timed, unit = _header(path, heads, ask, first)
    rows = []
    for i, cells in table:
        where = f"line {i}"
        if len(cells) != len(heads):
            raise SpecsimError(f"{path}: {where}: expected {len(heads)} columns, got {len(cells)}")
        given = dict(zip(names, cells, strict=True))
        kind = given.pop("part", "draft" if first == "num_seqs" else "verify").strip()
        if kind not in ("verify", "draft"):
            raise SpecsimError(f"{path}: {where}: part: expected verify or draft, got {kind!r}")
        seconds = in_seconds(f"{path}: {where}: {heads[timed]}", given.pop("time").strip(), unit)
        sizes = {
            name: whole(f"{path}: {where}: {name}", cell.strip(), 0 if name == "kv_tokens" else 1)
            for name, cell in given.items()
        }
        tokens, seqs = (sizes.get(name) for name in ("tokens", "num_seqs"))
        if tokens is not None and seqs is not None and seqs > tokens:
            raise SpecsimError(f"{path}: {where}: num_seqs: expected at most the {tokens} tokens, got {seqs}")
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


def _header(path: Path, heads: list[str], ask: Ask, first: str) -> tuple[list[str], int, str]:
    """What the columns are, which holds the time, and its unit."""
    names = [_NAMED.get(head.lower(), "") for head in heads]
    if first == "num_seqs":  # a table by sequences: a size without a name is theirs
        names = ["num_seqs" if head.lower() == "x" else name for head, name in zip(heads, names, strict=True)]
        if "tokens" in names:
            raise SpecsimError(
                f"{path}: column {heads[names.index('tokens')]!r}: expected num_seqs: drafting is by them"
            )
    said = {i: read_name(heads[i]) for i, name in enumerate(names) if not name}
    for i, (kind, unit) in said.items():
        column = f"{path}: column {heads[i]!r}"
        if kind == "rate":
            raise SpecsimError(f"{column}: is a rate, not a time: expected a time with its unit (as in time_ms)")
        if kind == "unknown":
            raise SpecsimError(f"{column}: is in {unit}, expected a time in {', '.join(UNITS)}")
        if kind == "other":
            raise SpecsimError(
                f"{column}: expected tokens, num_seqs, kv_tokens, part or a time with its unit "
                f"(as in time_ms); take it out if it is none of them"
            )
    units = {unit for _, unit in said.values()}
    if len(said) != 1:
        listed = ", ".join(heads[i] for i in said) or "none"
        mixed = ": mixed units" if len(units) > 1 else ""
        raise SpecsimError(f"{path}: expected one column of times, got {listed}{mixed}")
    if first not in names:
        raise SpecsimError(f"{path}: expected a column {first}, got {', '.join(heads)}")
    for name in names:
        if name and names.count(name) > 1:
            raise SpecsimError(f"{path}: expected one column {name}, got {names.count(name)}")
    timed, unit = next(iter(said)), units.pop()
    role, other = ("draft", "verify") if first == "num_seqs" else ("verify", "draft")
    words = set(re.findall("[a-z]+", heads[timed].lower()))
    if "part" not in names and words & _ROLES[other] and not words & _ROLES[role]:
        where = "another file with --draft" if role == "verify" else "the source"
        raise SpecsimError(
            f"{path}: column {heads[timed]!r}: expected the times of {role} steps, got those of {other}: "
            f"they belong into {where}, or into a table with a column part"
        )
    if ask.unit is not None:
        told = told_unit(ask.unit)
        if unit not in (None, told):
            raise SpecsimError(f"{path}: --unit: the column {heads[timed]!r} is in {unit}, got {ask.unit}")
        unit = told
    if unit is None:
        raise SpecsimError(f"{path}: column {heads[timed]!r}: expected its unit, as in time_ms, or --unit")
    names[timed] = "time"
    return names, timed, unit


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
