"""Step-cost tables of SGLang and vLLM, and plain columns of (tokens, time), as verify and draft costs."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from specsim.files import parse_json, read_text
from specsim.hardware import Additive, DraftCost, Table1D, Table2D
from specsim.importers.columns import Row, read_rows
from specsim.importers.profile_parts import (
    Ask,
    Found,
    Point,
    finite,
    in_order,
    json_kind,
    note_of_falls,
    part,
    positive,
    whole,
)
from specsim.importers.units import believable, in_seconds, odd_steps, read_name, told_unit
from specsim.types import SpecsimError

SPS = ("sample_batch_tokens", "sample_steps_per_sec", "max_batch_tokens")
ADDITIVE = ("bias_seconds", "bs_probes", "alpha_seconds", "m_probes", "theta_seconds")
_TABLE = re.compile(r"(verify|draft)(?:_(\w+))?")

FREE_TOKENS = (
    "As the engine reads the table: tokens past the last probe ({last}) look free{rest}. A scheduler that plans by it "
    "sees what the engine sees; the steps themselves last longer."
)
IN_SECONDS = "are these times, in the unit that is told?"
WHOLE_STEP = "Steps hold the drafting of the engine that was measured, so the draft cost here is zero."
TWICE = (
    "The table's steps hold the drafting of the engine that was measured, and the draft cost of --draft comes on top: "
    "drafting may be counted twice."
)


def read_sps(path: Path, text: str, ask: Ask) -> Found:
    """SGLang's steps per second by tokens in the batch."""
    data = _object(path, text, SPS)
    tokens, rates = _list(path, data, SPS[0]), _list(path, data, SPS[1], SPS[0])
    points = []
    for i, (size, rate) in enumerate(zip(tokens, rates, strict=True)):
        at = f"{path}: {SPS[1]}[{i}]"
        seconds = believable(at, 1 / positive(at, rate, "steps per second"), rate)
        points.append(Point(f"{SPS[0]}[{i}]", whole(f"{path}: {SPS[0]}[{i}]", size), seconds))
    _increasing(path, points)
    points = in_order(path, points)
    if len(points) < 2:
        raise SpecsimError(f"{path}: {SPS[0]}: expected at least two probes, got {len(points)}: a flat placeholder")
    most = whole(f"{path}: {SPS[2]}", data[SPS[2]], points[-1].size)
    notes = [f"The table's max_batch_tokens is {most}.", note_of_falls(points, monotone=ask.monotone)]
    warnings = _odd(points, "are these rates, steps per second, and not seconds?")
    if ask.as_engine:
        rest = ", and a size between two probes costs what the smaller one does, which underprices it"
        warnings.append(FREE_TOKENS.format(last=points[-1].size, rest=rest))
    else:
        notes.append("Linear between probes; the engine takes the probe below (--as-engine).")
    table = _table(points, ask, "floor" if ask.as_engine else "linear")
    return Found(
        part(path, Table1D, table), "SGLang steps per second by tokens", engine="SGLang", holds_drafting=True,
        notes=_notes(notes), warnings=tuple(warnings),
    )  # fmt: skip


def read_additive(path: Path, text: str, ask: Ask) -> Found:
    """SGLang's sum of a constant, seconds by requests (alpha) and seconds by tokens (theta)."""
    data = _object(path, text, ADDITIVE)
    bias = positive(f"{path}: {ADDITIVE[0]}", data[ADDITIVE[0]])
    alpha = _parts(path, data, "bs_probes", "alpha_seconds")
    theta = _parts(path, data, "m_probes", "theta_seconds")
    # Only the sum is meant, so the parts may be negative; ours are not: the least of alpha goes to the constant.
    low = min(0.0, *(point.seconds for point in alpha))
    for where, size, seconds in theta:
        if bias + low + seconds <= 0:
            raise SpecsimError(f"{path}: {where}: expected a sum above 0, got {bias + low + seconds:.4g} s at {size}")
    points = in_order(path, [Point(where, size, bias + low + seconds) for where, size, seconds in theta])
    # What a request adds is told of a step of as few tokens as there are: alone it may be nothing, or less.
    first = bias + theta[0].seconds
    by_requests = [Point(where, size, first + seconds) for where, size, seconds in alpha]
    notes = [note_of_falls(points, monotone=ask.monotone), note_of_falls(by_requests, "requests")]
    most = points[-1].seconds + alpha[-1].seconds - low
    warnings = odd_steps(min(point.seconds for point in points), most, IN_SECONDS)
    if ask.as_engine:
        warnings.append(FREE_TOKENS.format(last=points[-1].size, rest=", and so do requests"))
    else:
        notes.append("Linear between probes and not beyond them; the engine clamps at both ends (--as-engine).")
    table = _table(points, ask, "linear") | {
        "num_seqs": [point.size for point in alpha],
        "seqs_seconds": [point.seconds - low for point in alpha],
    }
    return Found(
        part(path, Additive, table), "SGLang additive step times", engine="SGLang", holds_drafting=True,
        notes=_notes(notes), warnings=tuple(warnings),
    )  # fmt: skip


def read_vllm(path: Path, text: str, ask: Ask) -> Found:
    """vLLM's cost tables: verify by tokens and draft by requests, as JSON or as rows with a ``part``."""
    unit = IN_SECONDS
    if text.lstrip().startswith("{"):
        data = _object(path, text, ())
        tables = _json_tables(path, data, ask)
        if "verify" in data and ask.unit is None:
            unit = "are these ms, as a table verify without a unit is read (verify_us, or --unit)?"
    else:
        rows = read_rows(path, text, ask)
        tables = {name: [r.point(path, "tokens") for r in rows if r.part == name] for name in ("verify", "draft")}
    if not tables.get("verify"):
        raise SpecsimError(f"{path}: verify: expected a table of times by tokens, got none")
    verify = in_order(path, tables["verify"])
    _check_sizes(path, [point.size for point in verify])
    notes = [note_of_falls(verify, monotone=ask.monotone)]
    warnings = _odd(verify, unit)
    draft, falls = _draft(path, tables["draft"], ask.monotone) if tables.get("draft") else (None, None)
    warnings += _beyond(verify[-1].size, ask)
    if ask.capture_limit is None:
        warnings.append(
            "The largest CUDA graph was not told (--capture-limit): every size is read as captured, so a step costs "
            "the next size up, above the graphs too."
        )
    if draft:
        notes += [falls, "The draft table is that of the engine's own drafter, for its whole block."]
    return Found(
        part(path, Table1D, _table(verify, ask, "next_size")), "vLLM cost tables", draft,
        engine="vLLM", notes=_notes(notes), warnings=tuple(warnings),
    )  # fmt: skip


def read_columns(path: Path, text: str, ask: Ask) -> Found:
    """Columns of tokens and time, and of sequences or KV tokens where the file has them."""
    rows = read_rows(path, text, ask)
    below = "linear" if ask.capture_limit is None else "next_size"
    notes: list[str | None] = []
    warnings = _beyond(max(row.sizes["tokens"] for row in rows), ask)
    warnings += _odd(rows, IN_SECONDS)
    if ask.capture_limit is None:
        notes.append("Linear between the sizes measured (--capture-limit pads to the next).")
    for row in rows:
        if row.part == "draft":
            raise SpecsimError(f"{path}: {row.where}: part: a draft table has no place in the format csv, but in vllm")
    reads = {row.sizes.get("kv_tokens") for row in rows}
    if len(reads) > 1:
        found: Table1D | Table2D = _by_kv(path, rows, ask, below)
        notes.append("Prices by tokens and by KV tokens in all.")
        ordered = sorted(rows, key=lambda row: (row.sizes["kv_tokens"], row.sizes["tokens"]))
        notes.append(note_of_falls([row.point(path, "tokens") for row in ordered], monotone=ask.monotone))
    else:
        seen: dict[int, Row] = {}
        for row in rows:
            other = seen.setdefault(row.sizes["tokens"], row)
            if other.sizes != row.sizes:
                raise SpecsimError(
                    f"{path}: {row.where}: expected one time for {row.sizes['tokens']} tokens, got another with "
                    f"other num_seqs at {other.where}: a table by tokens holds one"
                )
        points = in_order(path, [row.point(path, "tokens") for row in rows])
        notes.append(note_of_falls(points, monotone=ask.monotone))
        notes += [f"All were measured with {kv} KV tokens." for kv in reads if kv is not None]
        found = part(path, Table1D, _table(points, ask, below))
    _check_sizes(path, [row.sizes["tokens"] for row in rows])
    if any("num_seqs" in row.sizes for row in rows):
        notes.append("The file's num_seqs are not in the price: steps of as many tokens cost the same.")
    return Found(found, "step times by tokens", notes=_notes(notes), warnings=tuple(warnings))


def read_draft(ask: Ask) -> tuple[DraftCost, tuple[str, ...]] | None:
    """The draft cost in the file of --draft, and notes on it; None without one."""
    if ask.draft is None:
        return None
    rows = read_rows(ask.draft, read_text(ask.draft), ask, "num_seqs")
    for row in rows:
        if row.part != "draft":
            raise SpecsimError(f"{ask.draft}: {row.where}: part: expected draft in the file of --draft, got {row.part}")
    cost, falls = _draft(ask.draft, [row.point(ask.draft, "num_seqs") for row in rows], ask.monotone)
    return cost, _notes([f"The draft cost is that of {ask.draft.name}, for the drafter's whole block.", falls])


def with_draft(path: Path, found: Found, told: tuple[DraftCost, tuple[str, ...]] | None) -> Found:
    """What was ``found`` at ``path``, with the draft cost that the user ``told`` or that its steps hold already."""
    if told is None:
        if not found.holds_drafting:
            return found
        free = part(path, DraftCost, {"type": "parallel", "num_seqs": [1, 1 << 20], "seconds": [0.0, 0.0]})
        return replace(found, draft=free, notes=(WHOLE_STEP, *found.notes))
    if found.draft is not None:
        raise SpecsimError(f"--draft: {path} holds a draft table of its own, expected one")
    draft, notes = told
    warnings = (*found.warnings, TWICE) if found.holds_drafting else found.warnings
    return replace(found, draft=draft, notes=(*found.notes, *notes), warnings=warnings)


# Reading


def _json_tables(path: Path, data: Mapping[str, Any], ask: Ask) -> dict[str, list[Point]]:
    """The points of "verify" and "draft": {size: time} or [[size, time], ..], in ms unless the key says otherwise."""
    tables: dict[str, list[Point]] = {}
    for key, table in data.items():
        known = _TABLE.fullmatch(key)
        said = read_name(key)
        if said.kind == "rate":
            raise SpecsimError(
                f"{path}: {key}: is a rate, not a time: expected times of steps, verify or verify_us, .."
            )
        unit = said.unit if known and known[2] else "ms"
        if not known or unit is None or known[1] in tables:
            raise SpecsimError(f"{path}: {key}: expected one table verify and at most one draft (or verify_us, ..)")
        if ask.unit is not None:
            told = told_unit(ask.unit)
            if known[2] and unit != told:
                raise SpecsimError(f"{path}: --unit: {key} is in {unit}, got {ask.unit}")
            unit = told
        if isinstance(table, dict):
            pairs = [(f"{key}.{size}", size, time) for size, time in table.items()]
        elif isinstance(table, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in table):
            pairs = [(f"{key}[{i}]", size, time) for i, (size, time) in enumerate(table)]
        else:
            raise SpecsimError(f"{path}: {key}: expected {{size: time}} or [[size, time], ..]")
        tables[known[1]] = [
            Point(where, whole(f"{path}: {where}: size", size), in_seconds(f"{path}: {where}", time, unit))
            for where, size, time in pairs
        ]
    return tables


def _check_sizes(path: Path, tokens: list[int]) -> None:
    """Refuse a table of one size: it says nothing of any other, and a linear one would be flat."""
    if len(set(tokens)) < 2:
        raise SpecsimError(f"{path}: expected at least two sizes of tokens, got one, {tokens[0]}")


def _by_kv(path: Path, rows: list[Row], ask: Ask, below: str) -> Table2D:
    """A table by tokens and KV tokens; every pair must be there."""
    prices: dict[tuple[int, int], Row] = {}
    for row in rows:
        key = row.sizes["tokens"], row.sizes["kv_tokens"]
        if key in prices:
            raise SpecsimError(
                f"{path}: {row.where}: {key[0]} tokens with {key[1]} KV tokens stand there and at "
                f"{prices[key].where}, expected each pair once"
            )
        prices[key] = row
    tokens, kv = (sorted({key[i] for key in prices}) for i in (0, 1))
    for t in tokens:
        for k in kv:
            if (t, k) not in prices:
                raise SpecsimError(f"{path}: expected a time for each pair, got none at {t} tokens with {k} KV tokens")
    for k in kv:
        in_order(path, [prices[t, k].point(path, "tokens") for t in tokens])
    table = {
        "tokens": tokens,
        "kv_tokens": kv,
        "seconds": [[prices[t, k].seconds for k in kv] for t in tokens],
        "capture_limit": ask.capture_limit,
        "below": below,
        "monotone": ask.monotone,
    }
    return part(path, Table2D, table)


def _table(points: list[Point], ask: Ask, below: str) -> dict[str, Any]:
    """A table by tokens; as SGLang reads it, the first and last prices go on beyond the ends."""
    tokens, seconds = [point.size for point in points], [point.seconds for point in points]
    if ask.as_engine and tokens[0] > 1:
        tokens, seconds = [1, *tokens], [seconds[0], *seconds]
    return {
        "tokens": tokens,
        "seconds": seconds,
        "capture_limit": ask.capture_limit,
        "below": below,
        "above": "flat" if ask.as_engine else "linear",
        "monotone": ask.monotone,
    }


def _odd(points: Sequence[Point] | Sequence[Row], else_is: str) -> list[str]:
    """Warnings where the shortest or the longest of some steps must be something ``else``."""
    seconds = [point.seconds for point in points]
    return odd_steps(min(seconds), max(seconds), else_is)


def _beyond(last: int, ask: Ask) -> list[str]:
    """A warning of a largest CUDA graph beyond the ``last`` size of the table."""
    if ask.capture_limit is None or ask.capture_limit <= last:
        return []
    return [
        f"The largest CUDA graph (--capture-limit {ask.capture_limit}) is beyond the table's last size, {last} tokens: "
        "every size is read as captured."
    ]


def _draft(path: Path, points: list[Point], monotone: bool) -> tuple[DraftCost, str | None]:
    """Drafting by sequences, and what is to be said of it."""
    points = in_order(path, points, "sequences")
    seconds = [point.seconds for point in points]
    if monotone:
        seconds = [max(seconds[: i + 1]) for i in range(len(seconds))]
    table = {"type": "parallel", "num_seqs": [point.size for point in points], "seconds": seconds}
    return part(path, DraftCost, table), note_of_falls(points, "drafting sequences", monotone)


def _parts(path: Path, data: Mapping[str, Any], probes: str, seconds: str) -> list[Point]:
    """One part of SGLang's sum, of either sign."""
    sizes, values = _list(path, data, probes), _list(path, data, seconds, probes)
    points = [
        Point(f"{seconds}[{i}]", whole(f"{path}: {probes}[{i}]", size), finite(f"{path}: {seconds}[{i}]", value))
        for i, (size, value) in enumerate(zip(sizes, values, strict=True))
    ]
    _increasing(path, points)
    return points


def _increasing(path: Path, points: list[Point]) -> None:
    for a, b in itertools.pairwise(points):
        if b.size <= a.size:
            raise SpecsimError(f"{path}: {b.where}: expected a probe above {a.size}, got {b.size}: probes increase")


def _object(path: Path, text: str, fields: tuple[str, ...]) -> dict[str, Any]:
    """A JSON object with exactly these fields (any, if none are named)."""
    try:
        data = parse_json(text)
    except ValueError as error:
        raise SpecsimError(f"{path}: expected JSON: {error}") from error
    if not isinstance(data, dict):
        raise SpecsimError(f"{path}: expected a JSON object, got {json_kind(data)}")
    for name in fields:
        if name not in data:
            raise SpecsimError(f"{path}: {name}: is missing")
    for name in data:
        if fields and name not in fields:
            raise SpecsimError(f"{path}: {name}: is not a known field")
    return data


def _list(path: Path, data: Mapping[str, Any], name: str, like: str | None = None) -> list[Any]:
    values = data[name]
    if not isinstance(values, list) or not values:
        raise SpecsimError(f"{path}: {name}: expected a list of numbers, got {values!r:.40}")
    if like is not None and len(values) != len(data[like]):
        raise SpecsimError(f"{path}: {name}: expected {len(data[like])} entries, one a {like}, got {len(values)}")
    return values


def _notes(notes: list[str | None]) -> tuple[str, ...]:
    return tuple(note for note in notes if note)
