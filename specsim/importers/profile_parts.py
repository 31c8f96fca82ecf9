"""What every importer of profiles shares: a user's answers, what a file says, and how numbers are checked."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from specsim.files import csv_rows, first_error, read_text
from specsim.hardware import DraftCost, Profile, Provenance
from specsim.hardware.profile import SCHEMA, Verify
from specsim.types import SpecsimError

PartType = TypeVar("PartType", bound=BaseModel)

LEAP = 100.0
"""A price that changes by more than this from one size to the next is taken for a change of unit: the
steepest cliff published, from CUDA graphs to eager kernels, is a factor of five."""


@dataclass(frozen=True)
class Ask:
    """What a user says of a source: see ``specsim.importers.profiles.load_profile_source``."""

    name: str | None = None
    model: str | None = None
    device: str | None = None
    gpus: int | None = None
    tp: int | None = None
    engine: str | None = None
    kv_tokens: int | None = None
    max_num_tokens: int | None = None
    host_seconds: float | None = None
    date: str | None = None
    command: str | None = None
    as_engine: bool = False
    capture_limit: int | None = None
    monotone: bool = False
    unit: str | None = None
    draft: Path | None = None
    config: Path | None = None
    no_skew: bool = False
    kv_reads: Literal["once", "per_query"] | None = None
    expert_parallel: int | None = None
    link_bandwidth: float | None = None
    link_latency: float | None = None
    system: str | None = None
    backend: str | None = None
    engine_version: str | None = None
    utilisation: float | None = None
    max_context: int | None = None
    draft_layers: int | None = None
    draft_gamma: int | None = None


COMMON = (
    "name", "model", "device", "gpus", "tp", "engine", "kv_tokens", "max_num_tokens", "host_seconds", "date", "command",
    "draft",
)  # fmt: skip
"""Answers that every format has a use for."""

BOUNDS: dict[str, tuple[float, float]] = {
    "gpus": (1, 10_000),
    "tp": (1, 10_000),
    "expert_parallel": (1, 10_000),
    "kv_tokens": (1, 10**9),
    "max_num_tokens": (1, 10**7),
    "capture_limit": (1, 10**7),
    "max_context": (1, 10**9),
    "draft_layers": (1, 1000),
    "draft_gamma": (1, 64),
    "host_seconds": (0, 1000),
    "link_latency": (0, 1),
    "link_bandwidth": (1, 10**15),
}
"""The least and the most that an answer may be: beyond any deployment, and short of what cannot be computed with."""


def check_bounds(answers: Mapping[str, float | None], spell: Callable[[str], str] = str) -> None:
    """Raise SpecsimError for the first answer out of its BOUNDS, named as ``spell`` writes it."""
    for name, (least, most) in BOUNDS.items():
        value = answers.get(name)
        if value is not None and not least <= value <= most:
            raise SpecsimError(f"{spell(name)}: expected {least} to {most:,}, got {shown(value)}")


def option(name: str) -> str:
    """An answer's name on the command line."""
    return f"--{name.replace('_', '-')}"


def check_gpus(gpus: int, tp: int) -> None:
    """Refuse GPUs that are no whole number of tensor-parallel groups: throughput a GPU would be off."""
    if gpus % tp:
        raise SpecsimError(f"--gpus: expected a multiple of --tp {tp}, got {gpus}")


@dataclass(frozen=True)
class Found:
    """What a source says of one engine. ``source`` says who measured; ``warnings`` are for the user now.

    ``holds_drafting``: the steps that were measured drafted too. ``gpus``: the numbers of GPUs that the prices can be
    of, where the source's parts tell them; empty where a source prices whole steps, of whatever ran them.
    """

    verify: Verify
    source: str
    draft: DraftCost | None = None
    holds_drafting: bool = False
    name: str | None = None
    model: str | None = None
    device: str | None = None
    engine: str | None = None
    tp: int | None = None
    gpus: tuple[int, ...] = ()
    kv_tokens: int | None = None
    kv_bytes_per_token: float | None = None
    max_num_tokens: int | None = None
    host_seconds: float = 0.0
    date: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class Point(NamedTuple):
    """One measured size: where it stands in its file, the size, seconds."""

    where: str
    size: int
    seconds: float


class Row(NamedTuple):
    """One row of a CSV file: its line, and its cells by column."""

    where: str
    cells: Mapping[str, str]


def build_profile(path: Path, found: Found, ask: Ask) -> Profile:
    """The profile that says what was ``found`` at ``path``; what the user told goes before what the file says."""
    tp = ask.tp or found.tp or 1
    check_gpus(ask.gpus or tp, tp)
    if ask.gpus is not None and found.gpus and ask.gpus not in found.gpus:
        told = " or ".join(map(str, found.gpus))
        what = "--tp" if len(found.gpus) == 1 else "--tp or the ranks of --expert-parallel"
        raise SpecsimError(f"--gpus: expected {told}, {what}: the prices are those of so many GPUs, got {ask.gpus}")
    first = found.verify.range[0]
    if ask.max_num_tokens is not None and ask.max_num_tokens < first:
        raise SpecsimError(
            f"--max-num-tokens: expected at least {first}, the first size that {path} has a price for, "
            f"got {ask.max_num_tokens}"
        )
    notes = [*found.notes, *found.warnings]
    if ask.gpus is None and ask.tp is None and found.tp is None:
        notes.append("GPUs were not told: one is assumed.")
    data = {
        "schema": SCHEMA,
        "name": ask.name or found.name or path.stem,
        "kind": "imported",
        "model": ask.model or found.model or "unknown",
        "device": ask.device or found.device or "unknown",
        "gpus": ask.gpus or tp,
        "tp": tp,
        "engine": ask.engine or found.engine,
        "kv_tokens": ask.kv_tokens or found.kv_tokens,
        "kv_bytes_per_token": found.kv_bytes_per_token,
        "max_num_tokens": ask.max_num_tokens or found.max_num_tokens,
        "verify": found.verify,
        "draft": found.draft,
        "host_seconds": found.host_seconds if ask.host_seconds is None else ask.host_seconds,
        "provenance": Provenance(
            source=f"imported: {found.source}, {path.name}",
            command=ask.command,
            date=ask.date or found.date,
            versions=found.versions,
            notes=" ".join(notes) or None,
        ),
    }
    return part(path, Profile, data)


def part(path: str | Path, model: type[PartType], data: dict[str, Any]) -> PartType:
    """``data`` as a part of a profile; what is wrong with it is a SpecsimError that names the file."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise SpecsimError(f"{path}: {first_error(error)}") from error


def whole(where: str, value: Any, least: int = 1) -> int:
    """A whole number of at least ``least``, from JSON or CSV text."""
    number = _number(value)
    if number is None or number != int(number) or number < least:
        raise SpecsimError(f"{where}: expected a whole number of at least {least}, got {shown(value)}")
    return int(number)


def positive(where: str, value: Any, what: str = "a time") -> float:
    """A number above 0, from JSON or CSV text."""
    number = _number(value)
    if number is None or number <= 0:
        raise SpecsimError(f"{where}: expected {what} above 0, got {shown(value)}")
    return number


def finite(where: str, value: Any) -> float:
    """A number, from JSON or CSV text."""
    number = _number(value)
    if number is None:
        raise SpecsimError(f"{where}: expected a number, got {shown(value)}")
    return number


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def shown(value: Any) -> str:
    """A value for an error's line, cut short where it is long."""
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def json_kind(data: Any) -> str:
    """What JSON calls a value of this type."""
    names = {type(None): "null", bool: "a truth value", int: "a number", float: "a number", str: "a string"}
    return names.get(type(data), "a list" if isinstance(data, list) else "an object")


def in_order(path: str | Path, points: Sequence[Point], what: str = "tokens") -> list[Point]:
    """The points by size; SpecsimError where a size stands twice, or where the unit seems to change."""
    points = sorted(points, key=lambda point: point.size)
    for a, b in itertools.pairwise(points):
        if a.size == b.size:
            raise SpecsimError(f"{path}: {b.where}: {b.size} {what} stand there and at {a.where}, expected each once")
        if leaps(a.size, a.seconds, b.size, b.seconds):
            leap = max(a.seconds, b.seconds) / min(a.seconds, b.seconds)
            times = f"{leap:,.0f}" if leap < 1e6 else f"{leap:.2g}" if leap < math.inf else "over 1e308"
            raise SpecsimError(
                f"{path}: {b.where}: expected one unit, got {b.seconds:.4g} s at {b.size} {what} after "
                f"{a.seconds:.4g} s at {a.size}: a jump of {times} times looks like mixed units"
            )
    return points


def leaps(size: int, seconds: float, next_size: int, next_seconds: float) -> bool:
    """Whether a price changes so much from one size to the next that its unit must have: up, more than work may."""
    rise = next_seconds / seconds
    return rise > max(LEAP, 10 * (next_size or 1) / (size or 1)) or rise < 1 / LEAP


def note_of_falls(points: Sequence[Point], what: str = "tokens", monotone: bool = False, name: int = 6) -> str | None:
    """What a profile's notes say where more costs less: how often, and the worst with their rows.

    ``points`` are those of one curve, or of several one after another: a size below the one before starts the next.
    """
    pairs = [(a, b) for a, b in itertools.pairwise(points) if a.size < b.size]
    falls = [(b.seconds / a.seconds - 1, a, b) for a, b in pairs]
    falls = sorted((fall for fall in falls if fall[0] < 0), key=lambda fall: fall[0])
    if not falls:
        return None
    named = [f"{a.size} to {b.size} {what} ({b.where}, {drop:.1%})" for drop, a, b in falls[:name]]
    rest = f" and {len(falls) - name} more" if len(falls) > name else ""
    kept = "prices are their running maximum" if monotone else "kept as measured"
    return f"Times fall at {len(falls)} of {len(points)} sizes, {kept}: {', '.join(named)}{rest}."


def read_table(path: Path, columns: Sequence[str], optional: Sequence[str] = ()) -> list[Row]:
    """The rows of a CSV file that has these columns, perhaps the ``optional`` ones, and no others."""
    lines = csv_rows(path, read_text(path).splitlines())
    heads = [cell.strip() for cell in next(lines, (0, []))[1]]
    strange = [head for head in heads if head not in (*columns, *optional)]
    missing = [name for name in columns if name not in heads]
    if strange or missing or len(set(heads)) != len(heads):
        raise SpecsimError(f"{path}: expected the columns {', '.join(columns)}, got {', '.join(heads) or 'none'}")
    rows = []
    for line, cells in lines:
        if not cells:
            continue
        if len(cells) != len(heads):
            raise SpecsimError(f"{path}: line {line}: expected {len(heads)} columns, got {len(cells)}")
        rows.append(Row(f"line {line}", dict(zip(heads, cells, strict=True))))
    if not rows:
        raise SpecsimError(f"{path}: expected rows below the header, got none")
    return rows
