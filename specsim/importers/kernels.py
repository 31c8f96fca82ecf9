"""A bundle's tables of attention: its measured points, and the correction for batches of unequal lengths."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specsim.files import read_text
from specsim.importers.profile_parts import finite, leaps, read_table, whole
from specsim.importers.units import in_seconds
from specsim.types import SpecsimError

ATTENTION = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
NEWER_ATTENTION = ("layer", "prefill_chunk", "prefill_key", "n_decode", "kv_decode", "decode_q_len", "time_us")
SKEW = ("pc", "n_label", "skew_rate_label", "kv_big_label", "kp_label", "alpha", "n_samples")
SKEW_LABELS = {
    "n_decode": ("n_label", "n"),
    "skew_rate": ("skew_rate_label", "sr"),
    "kv_longest": ("kv_big_label", "kvB"),
    "kv_prefill": ("kp_label", "kp"),
}
SKEW_COLUMNS = ("prefill_chunk", *SKEW_LABELS, "alpha")
BEYOND = 1 << 31
"""The upper edge of a bucket that has none."""


def read_attention(path: Path, layers: int, notes: list[str]) -> dict[str, Any]:
    """Attention of all layers at the measured points, s."""
    points: dict[tuple[int, ...], tuple[str, float]] = {}
    heads = read_text(path).partition("\n")[0]
    newer = "prefill_key" in heads.replace(" ", "").split(",")
    columns = NEWER_ATTENTION if newer else (*ATTENTION, "time_us")
    longer = 0
    for where, row in read_table(path, columns):
        cells = _as_before(f"{path}: {where}", row) if newer else row
        if cells is None:
            longer += 1
            continue
        key = tuple(whole(f"{path}: {where}: {name}", cells[name], 0) for name in ATTENTION)
        if key in points:
            raise SpecsimError(f"{path}: {where}: the same point as {points[key][0]}, expected each once")
        seconds = in_seconds(f"{path}: {where}: time_us", row["time_us"], "us")
        points[key] = where, seconds * layers
    falls = []
    for axis, name in enumerate(ATTENTION):
        # Along one axis, from each point to the next with the other three sizes the same.
        ordered = sorted(points, key=lambda key: (*key[:axis], *key[axis + 1 :], key[axis]))
        for a, b in itertools.pairwise(ordered):
            if a[axis] < b[axis] and (*a[:axis], *a[axis + 1 :]) == (*b[:axis], *b[axis + 1 :]):
                (_, low), (where, high) = points[a], points[b]
                if leaps(a[axis], low, b[axis], high):
                    raise SpecsimError(f"{path}: {where}: expected one unit, got a jump of {high / low:,.4g} times")
                falls.append((high / low - 1, f"{name} {a[axis]} to {b[axis]}, {where}"))
    notes += note_falls(path, falls, "work")
    notes += note_holes(path, list(points))
    if longer:
        notes.append(f"{longer} points of decodes with several queries each are left out of attention.csv.")
    found: dict[str, Any] = dict(zip(ATTENTION, map(list, zip(*points, strict=True)), strict=True))
    return found | {"seconds": [seconds for _, seconds in points.values()]}


def _as_before(where: str, row: Mapping[str, str]) -> dict[str, str] | None:
    """A row of a newer attention.csv in the columns of an older one; None for decodes of several queries each.

    Newer tables give the keys that a prefill's tokens see on average, its history and half of its chunk.
    """
    if row["layer"].strip() != "attention":
        raise SpecsimError(f"{where}: layer: expected attention, got {row['layer']!r}: a kernel that cannot be priced")
    if whole(f"{where}: decode_q_len", row["decode_q_len"]) != 1:
        return None
    chunk, keys = (
        whole(f"{where}: prefill_chunk", row["prefill_chunk"], 0),
        finite(f"{where}: prefill_key", row["prefill_key"]),
    )
    if keys < chunk / 2:
        raise SpecsimError(
            f"{where}: prefill_key: expected half of the {chunk} tokens or more, got {row['prefill_key']}"
        )
    return {**row, "kv_prefill": str(round(keys - chunk / 2))}


def note_falls(path: Path, changes: list[tuple[float, str]], what: str) -> list[str]:
    """A note on the places where more work takes less time; real curves are jagged."""
    falls = sorted(change for change in changes if change[0] < 0)
    if not falls:
        return []
    named = "; ".join(f"{where}, {drop:.0%}" for drop, where in falls[:3])
    return [f"{path.name}: times fall with more {what} at {len(falls)} of {len(changes)} places, kept ({named})."]


def note_holes(path: Path, points: Sequence[tuple[int, ...]]) -> list[str]:
    """Notes on what of attention was not measured: whole kinds of steps, and points of the grids that the others span.

    ``points``: chunk, history, sequences and context of each. Real tables end where the GPU's memory did.
    """
    notes, holes = [], []
    for what, axes, kind in (
        ("decodes", (2, 3), (False, True)),
        ("prefills", (0, 1), (True, False)),
        ("prefills beside decodes", (0, 1, 2, 3), (True, True)),
    ):
        found = {tuple(point[a] for a in axes) for point in points if (point[0] > 0, point[2] > 0) == kind}
        if not found:
            notes.append(f"{path.name}: no {what} were measured.")
            continue
        grid = math.prod(len(set(column)) for column in zip(*found, strict=True))
        if len(found) < grid:
            holes.append(f"{grid - len(found):,} of {grid:,} of {what}")
    if holes:
        notes.append(
            f"{path.name}: points missing in the grids that its sizes span: {'; '.join(holes)}. What lies between "
            "others is interpolated, the rest has no price."
        )
    return notes


def read_skew(path: Path, shard: Any, notes: list[str]) -> dict[str, Any] | None:
    """The correction for sequences of unequal lengths; None where it was not measured.

    ``shard`` is what meta.yaml says of it.
    """
    if not path.exists():
        return None
    columns: dict[str, list[Any]] = {name: [] for name in SKEW_COLUMNS}
    for where, row in read_table(path, SKEW):
        at = f"{path}: {where}"
        columns["prefill_chunk"].append(whole(f"{at}: pc", row["pc"], 0))
        for name, (label, sign) in SKEW_LABELS.items():
            columns[name].append(_edge(f"{at}: {label}", row[label], sign))
        columns["alpha"].append(finite(f"{at}: alpha", row["alpha"]))
    noisy = sum(not 0 <= alpha <= 1 for alpha in columns["alpha"])
    default = shard.get("alpha_default") if isinstance(shard, dict) else None
    notes.append(
        f"Unequal lengths: {len(columns['alpha'])} fitted corrections (skew_fit.csv), {noisy} of them outside 0..1."
    )
    where = f"{path.parent}: meta.yaml: skew_fit: alpha_default"
    return columns | {"default": 0.0 if default is None else finite(where, default)}


def _edge(where: str, text: str, sign: str) -> float:
    """The upper edge of a bucket's label: 128 of "n<=128", 0.15 of "sr<=15%", 16384 of "kvB<=16k"."""
    label = re.fullmatch(rf"{sign}(<=|=|>)(\d+)(k|%|)", text.strip())
    if label is None or (label[3] == "%") != (sign == "sr"):
        raise SpecsimError(f"{where}: expected a bucket such as {sign}<=8{'%' if sign == 'sr' else ''}, got {text!r}")
    if sign == "sr":
        return 1.0 if label[1] == ">" else int(label[2]) / 100
    return BEYOND if label[1] == ">" else int(label[2]) * (1024 if label[3] == "k" else 1)
