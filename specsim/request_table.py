"""Tables of requests: checking, our own parquet form, and what a table looks like in numbers.

The parquet columns are arrival_s (seconds, not falling), prompt_tokens, output_tokens (whole, at
least 1), domain (text), and where they are known session_id (whole) and prefix_hashes (a list of
whole numbers a request). Rows in messages are counted from 0.
"""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from specsim.files import write_atomic
from specsim.lengths import MAX_TOKENS
from specsim.types import Bools, Floats, Ints, Requests, SpecsimError

SCHEMA = "specsim.requests/1"
_REQUIRED = ("arrival_s", "prompt_tokens", "output_tokens", "domain")
_OPTIONAL = ("session_id", "prefix_hashes")


def check_requests(requests: Requests, where: str = "requests") -> None:
    """Raise a SpecsimError, naming ``where``, row and column, unless ``requests`` is a sound table.

    Sound: at least one request; columns of one length; arrivals finite, not negative and not
    falling; 1 to 2^31 − 1 tokens each way; domain codes that ``domains`` has a name for.
    """
    n = len(requests.arrival_s)
    if n == 0:
        raise SpecsimError(f"{where}: expected at least one request, got none")
    for name in (*_REQUIRED[1:], *_OPTIONAL):
        column = getattr(requests, name)
        if column is not None and len(column) != n:
            raise SpecsimError(f"{where}: {name}: expected {n} entries, one an arrival, got {len(column)}")
    arrival = requests.arrival_s
    _first_bad(where, "arrival_s", ~np.isfinite(arrival), arrival, "a finite number of seconds")
    _first_bad(where, "arrival_s", arrival < 0, arrival, "seconds of at least 0")
    falls = np.concatenate(([False], np.diff(arrival) < 0))
    _first_bad(where, "arrival_s", falls, arrival, "no earlier than the row before")
    for name in ("prompt_tokens", "output_tokens"):
        tokens = getattr(requests, name)
        outside = (tokens < 1) | (tokens > MAX_TOKENS)
        _first_bad(where, name, outside, tokens, f"1 to {MAX_TOKENS} tokens")
    codes = requests.domain
    outside = (codes < 0) | (codes >= len(requests.domains))
    _first_bad(where, "domain", outside, codes, f"a code below {len(requests.domains)}, the number of domains")


def _first_bad(where: str, column: str, bad: Bools, values: Floats | Ints, expected: str) -> None:
    if bad.any():
        row = int(np.argmax(bad))
        raise SpecsimError(f"{where}: row {row} (from 0): {column}: expected {expected}, got {values[row]}")


def write_requests(path: str | Path, requests: Requests) -> Path:
    """Write ``requests`` to ``path`` as parquet, atomically; the counts of rejected rows go along.

    Raises a SpecsimError where the table is not sound or the file cannot be written.
    """
    check_requests(requests)
    names = np.asarray(requests.domains, dtype=object)[requests.domain]
    columns = {
        "arrival_s": pa.array(requests.arrival_s, pa.float64()),
        "prompt_tokens": pa.array(requests.prompt_tokens, pa.int64()),
        "output_tokens": pa.array(requests.output_tokens, pa.int64()),
        "domain": pa.array(names, pa.string()).dictionary_encode(),
    }
    if requests.session_id is not None:
        columns["session_id"] = pa.array(requests.session_id, pa.int64())
    if requests.prefix_hashes is not None:
        columns["prefix_hashes"] = pa.array(requests.prefix_hashes, pa.list_(pa.int64()))
    metadata = {"specsim": json.dumps({"schema": SCHEMA, "rejected": dict(requests.rejected)})}
    table = pa.table(columns).replace_schema_metadata(metadata)
    return write_atomic(path, lambda p: pq.write_table(table, p))


def read_requests(path: str | Path) -> Requests:
    """Read a parquet file of requests (see the module's text for its columns).

    Domains are numbered in order of first appearance. A missing, unknown or repeated column, a null,
    a value out of bounds, an empty file or one that is no parquet is a SpecsimError that names file,
    column and row.
    """
    table = _read_table(path)
    names = table.column_names
    for name in names:
        if name not in (*_REQUIRED, *_OPTIONAL):
            known = ", ".join((*_REQUIRED, *_OPTIONAL))
            raise SpecsimError(f"{path}: column {name}: unknown; expected {known}")
        if names.count(name) > 1:
            raise SpecsimError(f"{path}: column {name}: expected once, got {names.count(name)} times")
    for name in _REQUIRED:
        if name not in names:
            raise SpecsimError(f"{path}: column {name}: missing; got {', '.join(names) or 'no columns'}")

    domain, domains = pd.factorize(_column(path, table, "domain").to_numpy(zero_copy_only=False))
    hashes = None
    if "prefix_hashes" in names:
        hashes = tuple(tuple(row) for row in _column(path, table, "prefix_hashes").to_pylist())
    requests = Requests(
        arrival_s=_column(path, table, "arrival_s").to_numpy(),
        prompt_tokens=_column(path, table, "prompt_tokens").to_numpy(),
        output_tokens=_column(path, table, "output_tokens").to_numpy(),
        domain=domain.astype(np.int64),
        domains=tuple(str(name) for name in domains),
        session_id=_column(path, table, "session_id").to_numpy() if "session_id" in names else None,
        prefix_hashes=hashes,
        rejected=_rejected(path, table),
    )
    check_requests(requests, str(path))
    return requests


def _read_table(path: str | Path) -> pa.Table:
    try:
        if Path(path).stat().st_size == 0:
            raise SpecsimError(f"{path}: expected a parquet file, got an empty file")
        # ParquetFile, because read_table would take a folder for a data set.
        with pq.ParquetFile(path) as file:
            return file.read()
    except pa.ArrowException as error:
        raise SpecsimError(f"{path}: expected a parquet file, got something else or a damaged one") from error
    except OSError as error:
        raise SpecsimError(f"{path}: cannot read: {error.strerror or error}") from error


def _column(path: str | Path, table: pa.Table, name: str) -> pa.Array:
    """Return a column as one array of our type for it, the absence of nulls checked."""
    column = table.column(name).combine_chunks()
    if name == "domain" and pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = column.type
    null = column.is_null().to_numpy(zero_copy_only=False)
    expected, ours, fits = "whole numbers", pa.int64(), pa.types.is_integer(kind)
    if name == "arrival_s":
        expected, ours, fits = "numbers", pa.float64(), fits or pa.types.is_floating(kind)
    elif name == "domain":
        expected, ours = "text", pa.string()
        fits = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    elif name == "prefix_hashes":
        expected, ours = "lists of whole numbers", pa.list_(pa.int64())
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        fits = is_list and pa.types.is_integer(kind.value_type)
        if fits and column.flatten().null_count:
            null = null | np.array([row is not None and None in row for row in column.to_pylist()], dtype=bool)
    if null.any():
        raise SpecsimError(f"{path}: row {int(np.argmax(null))} (from 0): {name}: expected a value, got null")
    if not fits:
        raise SpecsimError(f"{path}: column {name}: expected {expected}, got {kind}")
    try:
        return column.cast(ours)
    except pa.ArrowInvalid as error:  # a uint64 past int64, an integer past what float64 holds
        raise SpecsimError(f"{path}: column {name}: expected {expected} that fit {ours}: {error}") from error


def _rejected(path: str | Path, table: pa.Table) -> dict[str, int]:
    text = (table.schema.metadata or {}).get(b"specsim")
    if text is None:
        return {}
    try:
        metadata = json.loads(text)
        found, rejected = metadata["schema"], metadata.get("rejected", {})
        counts = {str(reason): int(count) for reason, count in rejected.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SpecsimError(f"{path}: metadata specsim: expected JSON with schema {SCHEMA}, got {text!r}") from error
    if found != SCHEMA:
        raise SpecsimError(f"{path}: metadata specsim.schema: expected {SCHEMA}, got {found!r}")
    return counts


def mean_rate(arrival_s: Floats) -> float:
    """Return requests per second, one over the mean gap; infinite where all arrive at one time."""
    span = float(arrival_s[-1] - arrival_s[0])
    return (len(arrival_s) - 1) / span if span > 0 else float("inf")


def inspect_requests(requests: Requests) -> dict[str, object]:
    """Describe a table of requests in plain numbers, ready for JSON.

    Keys: ``requests``, ``rejected`` (by reason), ``duration_s`` (first to last arrival),
    ``mean_rate`` (per second), ``gap_cv`` (deviation of the gaps over their mean),
    ``dispersion_1s`` (variance over mean of the arrivals counted in each whole 1 s window from the
    first arrival; 1 for Poisson), ``zero_gap_share``, ``prompt_tokens`` and ``output_tokens`` (mean, p10,
    p50, p90, p99, max), ``domains`` (requests of each), ``sessions`` and ``prefix_reuse_share`` (the
    share of prefix blocks whose hash appeared earlier in the table: what a cache without bound would
    hold). What the table does not determine (one request has no gaps) is None.
    """
    check_requests(requests)
    arrival = requests.arrival_s
    gaps = np.diff(arrival)
    duration = float(arrival[-1] - arrival[0])
    spread = duration > 0
    windows = int(duration)  # a last, partial window would bias the variance
    hashes = None
    if requests.prefix_hashes is not None:
        hashes = np.fromiter(chain.from_iterable(requests.prefix_hashes), dtype=np.int64)
    tally = np.bincount(requests.domain, minlength=len(requests.domains))
    return {
        "requests": len(requests),
        "rejected": dict(requests.rejected),
        "duration_s": duration,
        "mean_rate": mean_rate(arrival) if spread else None,
        "gap_cv": float(gaps.std() / gaps.mean()) if spread else None,
        "dispersion_1s": _dispersion(arrival - arrival[0], windows) if windows > 1 else None,
        "zero_gap_share": float((gaps == 0).mean()) if len(gaps) else None,
        "prompt_tokens": _quantiles(requests.prompt_tokens),
        "output_tokens": _quantiles(requests.output_tokens),
        "domains": {name: int(count) for name, count in zip(requests.domains, tally, strict=True)},
        "sessions": None if requests.session_id is None else len(np.unique(requests.session_id)),
        "prefix_reuse_share": None if hashes is None or not hashes.size else 1 - len(np.unique(hashes)) / hashes.size,
    }


def _dispersion(time_s: Floats, windows: int) -> float:
    """Return variance over mean of the counts in the first ``windows`` seconds, empty ones included."""
    second = time_s.astype(np.int64)
    _, counts = np.unique(second[second < windows], return_counts=True)
    mean = counts.sum() / windows
    return float(((counts**2).sum() / windows - mean**2) / mean)


def _quantiles(tokens: Ints) -> dict[str, float]:
    shares = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {"mean": float(tokens.mean())} | {k: float(np.quantile(tokens, q)) for k, q in shares.items()}
