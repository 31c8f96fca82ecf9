"""Steps that an engine logged, one by one, as prices by what they held: ``serve-reference --log``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specsim.files import parse_json
from specsim.hardware import Additive, DraftCost
from specsim.importers.profile_parts import Ask, Found, finite, part, shown, whole
from specsim.types import Floats, SpecsimError

COUNTS = ("num_seqs", "kv_tokens", "draft_tokens", "prefills", "prefill_tokens")
TIMES = ("start", "seconds", "draft_seconds")
FEW = 8
"""Steps that must have been near a size for it to have a price of its own."""
PAUSE = 10.0
"""A step of so many times what is usual is a pause of the machine: it is left out and told of."""
LEAST = 1e-9
"""Seconds: a price must be above nothing."""
APART = 1.25
"""Sizes with prices of their own are so many times apart, at least."""


def is_step_log(text: str) -> bool:
    """Whether the first line is a row of such a log."""
    try:
        row = parse_json(text.lstrip().partition("\n")[0])
    except ValueError:
        return False
    return isinstance(row, dict) and {"num_seqs", "draft_seconds"} <= set(row)


def read_steps(path: Path, text: str, ask: Ask) -> Found:
    """Least squares over all steps: a price by tokens, by sequences and by KV tokens, each linear between sizes.

    Errors count by their share of what is usual at a size. Drafting is the mean by decoding sequences, the host's time
    that between a step's end and the next one's start. Raises SpecsimError, naming the line, for what is no step of
    such a log.
    """
    from scipy.optimize import nnls  # here: loading it would be a quarter of every start

    rows = _rows(path, text)
    decoding, kv, drafts, prefills, prompts = (np.array([row[name] for row in rows]) for name in COUNTS)
    start, whole_step, drafting = (np.array([row[name] for row in rows]) for name in TIMES)
    tokens, seqs, seconds = decoding + drafts + prompts, decoding + prefills, whole_step - drafting
    if (seconds <= 0).any() or not (tokens > 0).all():
        at = int(np.flatnonzero((seconds <= 0) | (tokens == 0))[0]) + 1
        raise SpecsimError(f"{path}: line {at}: expected a step of some tokens that lasted longer than its drafting")
    usual = np.exp(np.interp(tokens, *_usual(tokens, np.log(seconds))))
    kept = seconds < PAUSE * usual
    sizes = _sizes(tokens[kept])
    if len(sizes) < 2:
        raise SpecsimError(f"{path}: expected steps of several sizes, {FEW} or more of each, got {len(rows)} steps")
    # The first sequence is in the tokens' price: it is never without a token.
    columns = [_hats(tokens, sizes), seqs[:, None] - 1.0, kv[:, None]]
    # By what is usual at its size: by its own seconds, a slow step would count less than a fast one, and prices be low.
    design, shares = np.hstack(columns)[kept] / usual[kept, None], (seconds / usual)[kept]
    scale = np.maximum(design.max(axis=0), np.finfo(float).tiny)
    prices = nnls(design / scale, shares)[0] / scale
    by_tokens, by_seq, by_kv = prices[: len(sizes)], prices[-2], prices[-1]
    missed = np.abs(np.hstack(columns)[kept] @ prices / seconds[kept] - 1)
    most_seqs, most_kv = max(2, int(seqs.max())), max(1, int(kv.max()))
    table = {
        "tokens": sizes,
        "seconds": [max(float(price), LEAST) for price in by_tokens],
        "num_seqs": [1, most_seqs],
        "seqs_seconds": [0.0, float(by_seq) * (most_seqs - 1)],
        "kv_tokens": [0, most_kv],
        "kv_seconds": [0.0, float(by_kv) * most_kv],
        "below": "linear",
    }
    host = _host(start, whole_step, decoding)
    notes = [
        f"Least squares over {int(kept.sum()):,} steps of {int(tokens.min())} to {int(tokens.max())} tokens: half of "
        f"them are missed by less than {100 * float(np.median(missed)):.1f} %.",
        "The host's time between two steps is their mean.",
    ]
    if not kept.all():
        notes.append(f"{int((~kept).sum())} steps of more than ten times the usual were left out (pauses).")
    return Found(
        part(path, Additive, table),
        "the steps that an engine logged",
        _draft(path, decoding, drafting, kept) if drafts.any() else None,
        engine="specsim serve-reference",
        host_seconds=host,
        notes=tuple(notes),
    )


def _rows(path: Path, text: str) -> list[dict[str, float]]:
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{path}: line {number}"
        if not line.strip():
            continue
        try:
            row: Any = parse_json(line)
        except ValueError:
            raise SpecsimError(f"{where}: expected a line of JSON, got {shown(line)}") from None
        if not isinstance(row, dict):
            raise SpecsimError(f"{where}: expected a JSON object, got {shown(row)}")
        if missing := next((name for name in (*COUNTS, *TIMES) if name not in row), None):
            raise SpecsimError(f"{where}: {missing}: is missing")
        counts = {name: float(whole(f"{where}: {name}", row[name], 0)) for name in COUNTS}
        times = {name: finite(f"{where}: {name}", row[name]) for name in TIMES}
        if low := next((name for name, value in times.items() if value < 0), None):
            raise SpecsimError(f"{where}: {low}: expected seconds, 0 or more, got {shown(row[low])}")
        rows.append(counts | times)
    if not rows:
        raise SpecsimError(f"{path}: expected at least one step, got none")
    return rows


def _usual(tokens: Floats, logs: Floats) -> tuple[Floats, Floats]:
    """Sizes, and the median log of a step's seconds at each."""
    sizes = np.unique(tokens)
    return sizes, np.array([np.median(logs[tokens == size]) for size in sizes])


def _sizes(tokens: Floats) -> list[int]:
    """The sizes that have prices: APART, the smallest and the largest among them, with FEW steps near each."""
    least, most = int(tokens.min()), int(tokens.max())
    found = [least]
    for size in np.unique(tokens).astype(int).tolist():
        near = (tokens > found[-1]) & (tokens <= size)
        if size >= APART * found[-1] and near.sum() >= FEW:
            found.append(size)
    if found[-1] != most:  # what is beyond the last has too few steps for a size of its own: it ends there
        found = [*found[:-1], most] if len(found) > 1 else [*found, most]
    return found


def _hats(tokens: Floats, sizes: Sequence[int]) -> Floats:
    """How much of each size's price a step pays [steps, sizes]: linear between two sizes."""
    return np.array([np.interp(tokens, sizes, unit) for unit in np.eye(len(sizes))]).T


def _draft(path: Path, decoding: Floats, drafting: Floats, kept: np.ndarray) -> DraftCost:
    counts = [n for n in np.unique(decoding[kept]).astype(int).tolist() if n > 0]
    means = {n: drafting[kept & (decoding == n)] for n in counts}
    known = {n: float(found.mean()) for n, found in means.items() if len(found) >= FEW}
    if not known:
        raise SpecsimError(f"{path}: expected {FEW} steps or more of as many decoding sequences, got fewer")
    return part(path, DraftCost, {"type": "parallel", "num_seqs": tuple(known), "seconds": tuple(known.values())})


def _host(start: Floats, seconds: Floats, decoding: Floats) -> float:
    """Mean time between the end of a step and the start of the next, where that goes on with its requests."""
    gaps = (start[1:] - start[:-1] - seconds[:-1])[decoding[1:] > 0]
    gaps = gaps[gaps >= 0]
    return float(gaps[gaps <= PAUSE * np.median(gaps)].mean()) if len(gaps) else 0.0
