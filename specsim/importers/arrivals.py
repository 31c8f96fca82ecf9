"""Request logs of others, read as they are: Azure 2023, BurstGPT, Mooncake, vLLM.

Each reader returns Requests whose ``arrival_s`` counts from the first request kept. Rows with no
tokens (failed requests) are left out and counted by reason in ``rejected``; a broken file is a
SpecsimError that names file, line (from 1, the header counted), field and what was expected.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from specsim.files import KeyTwiceError, parse_json, read_text
from specsim.request_table import read_requests
from specsim.types import Bools, Floats, Ints, Requests, SpecsimError
from specsim.workload import Arrivals, Gamma, Poisson
from specsim.workload_file import read_workload

Cells: TypeAlias = "Sequence[Any] | pd.Series[str]"

MOONCAKE_BLOCK = 512  # tokens behind each entry of hash_ids

_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_BURSTGPT = ("Timestamp", "Request tokens", "Response tokens", "Log Type")
_MOONCAKE = ("timestamp", "input_length", "output_length", "hash_ids")
_VLLM = ("queued_ts", "input_toks", "output_toks")
_BURSTGPT_DOMAINS = {"Conversation log": "chat", "API log": "api"}
_INT64 = 2**63


def read_azure_2023(path: str | Path, domain: str | None = None) -> Requests:
    """Read AzureLLMInferenceTrace_*.csv: TIMESTAMP (ISO 8601), ContextTokens, GeneratedTokens.

    ``domain`` None takes it from the file's name: chat for "conv", code for "code", else "".
    """
    lines, (stamps, prompts, outputs) = _read_csv(path, _AZURE)
    times = pd.to_datetime(stamps, format="ISO8601", errors="coerce", utc=True)
    _check(path, lines, "TIMESTAMP", times.isna().to_numpy(), stamps, "a date and time")
    seconds = (times - times[0]).dt.total_seconds().to_numpy()
    _check_sorted(path, lines, "TIMESTAMP", seconds, stamps)
    if domain is None:
        name = Path(path).name.lower()
        domain = "chat" if "conv" in name else "code" if "code" in name else ""
    prompt = _tokens(path, lines, "ContextTokens", prompts)
    output = _tokens(path, lines, "GeneratedTokens", outputs)
    return _keep(path, seconds, prompt, output, [domain] * len(lines))


def read_burstgpt(path: str | Path) -> Requests:
    """Read a BurstGPT CSV: Timestamp (seconds), Request tokens, Response tokens, Log Type.

    The domain is chat for "Conversation log", api for "API log", the text itself for another.
    """
    lines, (stamps, prompts, outputs, kinds) = _read_csv(path, _BURSTGPT)
    seconds = pd.to_numeric(stamps, errors="coerce").to_numpy(dtype=np.float64)
    _check(path, lines, "Timestamp", ~np.isfinite(seconds), stamps, "a number of seconds")
    _check_sorted(path, lines, "Timestamp", seconds, stamps)
    _check(path, lines, "Log Type", (kinds == "").to_numpy(), kinds, "a kind of log")
    prompt = _tokens(path, lines, "Request tokens", prompts)
    output = _tokens(path, lines, "Response tokens", outputs)
    domains = [_BURSTGPT_DOMAINS.get(kind, kind) for kind in kinds]
    return _keep(path, seconds, prompt, output, domains)


def read_mooncake(path: str | Path) -> Requests:
    """Read Mooncake JSON lines: timestamp (ms), input_length, output_length, hash_ids.

    ``hash_ids`` become prefix_hashes; each stands for a block of 512 prompt tokens, the last of which
    may be partly filled.
    """
    rows = _read_jsonl(path, _MOONCAKE)
    for line, row in rows:
        ids = row["hash_ids"]
        if not isinstance(ids, list) or not all(type(h) is int and -_INT64 <= h < _INT64 for h in ids):
            raise _problem(path, line, "hash_ids", "a list of whole numbers", ids)
    lines = np.array([line for line, _ in rows])
    stamps = _numbers(path, rows, "timestamp")
    _check_sorted(path, lines, "timestamp", stamps, stamps.tolist())
    prompt = _numbers(path, rows, "input_length", whole=True)
    output = _numbers(path, rows, "output_length", whole=True)
    hashes = [tuple(row["hash_ids"]) for _, row in rows]
    # A file with blocks of another size would otherwise pass and promise the wrong cache hits.
    blocks = np.array([len(h) for h in hashes])
    wrong = (blocks < prompt // MOONCAKE_BLOCK) | (blocks > np.ceil(prompt / MOONCAKE_BLOCK))
    got = [f"{b} for {p:.0f} tokens" for b, p in zip(blocks, prompt, strict=True)] if wrong.any() else []
    _check(path, lines, "hash_ids", wrong, got, f"a hash for each {MOONCAKE_BLOCK} tokens of input_length")
    return _keep(path, stamps / 1000, prompt, output, [""] * len(rows), hashes)


def read_vllm_requests(path: str | Path) -> Requests:
    """Read a vLLM run's JSON lines: queued_ts (seconds, any clock), input_toks, output_toks.

    Requests are sorted by ``queued_ts``; other fields are ignored.
    """
    rows = _read_jsonl(path, _VLLM)
    queued = _numbers(path, rows, "queued_ts")
    prompt = _numbers(path, rows, "input_toks", whole=True)
    output = _numbers(path, rows, "output_toks", whole=True)
    order = np.argsort(queued, kind="stable")
    return _keep(path, queued[order], prompt[order], output[order], [""] * len(rows))


def open_workload(path: str | Path) -> Arrivals | Gamma | Poisson:
    """Open any workload file, told apart by its content: a log of others, our parquet, our JSON.

    A log or a parquet gives Arrivals, named by the file; a workload file gives its Gamma or Poisson.
    """
    reader = _reader(path)
    if reader is None:
        return read_workload(path)
    return Arrivals(reader(path), name=Path(path).stem)


def load_arrivals(path: str | Path) -> Requests:
    """Load recorded requests from any format that ``open_workload`` knows but the fitted workload."""
    reader = _reader(path)
    if reader is None:
        raise SpecsimError(f"{path}: expected recorded arrivals, got a fitted workload (JSON with a schema)")
    return reader(path)


def _reader(path: str | Path) -> Callable[[str | Path], Requests] | None:
    """Return the reader for this content; None for a workload file."""
    try:
        with open(path, "rb") as file:
            line = next((line for line in file if line.strip()), b"")
    except OSError as error:
        raise SpecsimError(f"{path}: cannot read: {error.strerror or error}") from error
    if line.startswith(b"PAR1"):
        return read_requests
    first = line.decode("utf-8-sig", errors="replace").strip()
    if not first:
        raise SpecsimError(f"{path}: expected a log of requests or a workload, got an empty file")
    if first.startswith("{"):
        try:
            keys = parse_json(first).keys()
        except KeyTwiceError as error:
            raise SpecsimError(f"{path}: {error}") from error
        except ValueError:  # an object over several lines, or one that read_workload will name
            return None
        if set(_MOONCAKE) <= keys:
            return read_mooncake
        if set(_VLLM) <= keys:
            return read_vllm_requests
        if "schema" in keys:
            return None
    columns = {name.strip() for name in first.split(",")}
    if set(_AZURE) <= columns:
        return read_azure_2023
    if set(_BURSTGPT) <= columns:
        return read_burstgpt
    raise SpecsimError(
        f"{path}: line 1: expected parquet, a workload JSON, JSON lines of Mooncake ({', '.join(_MOONCAKE)}) "
        f"or vLLM ({', '.join(_VLLM)}), or a CSV header of Azure ({','.join(_AZURE)}) or BurstGPT "
        f"({','.join(_BURSTGPT)}), got {first[:60]!r}"
    )


def _read_csv(path: str | Path, columns: Sequence[str]) -> tuple[Ints, list[pd.Series[str]]]:
    """Return line numbers and, for each of ``columns``, its cells as text; blank lines are skipped."""
    text = read_text(path)
    header = [name.strip() for name in text.partition("\n")[0].split(",")]
    if not set(columns) <= set(header):
        raise _problem(path, 1, "header", f"the columns {', '.join(columns)}", ",".join(header))
    try:
        # header=None: with one, pandas takes a row that is too long for an index column.
        frame = pd.read_csv(io.StringIO(text), header=None, dtype=str, keep_default_na=False, skip_blank_lines=False)
    except pd.errors.ParserError as error:
        found = re.search(r"Expected (\d+) fields in line (\d+), saw (\d+)", str(error))
        if found is None:  # such as a quote that never closes
            raise SpecsimError(f"{path}: expected {len(header)} fields a line: {str(error).strip()}") from error
        expected, line, got = found.groups()
        raise SpecsimError(f"{path}: line {line}: expected {expected} fields, got {got}") from error
    frame = frame[(frame != "").any(axis="columns")].iloc[1:]  # cells that are not there are "" too
    if frame.empty:
        raise SpecsimError(f"{path}: expected at least one request below the header, got none")
    lines = frame.index.to_numpy(dtype=np.int64) + 1
    return lines, [frame[header.index(name)].reset_index(drop=True) for name in columns]


def _tokens(path: str | Path, lines: Ints, field: str, cells: pd.Series[str]) -> Floats:
    numbers = pd.to_numeric(cells, errors="coerce").to_numpy(dtype=np.float64)
    whole = (numbers >= 0) & (numbers < 2**31) & (np.floor(numbers) == numbers)
    _check(path, lines, field, ~whole, cells, "a whole number of tokens")
    return numbers


def _read_jsonl(path: str | Path, fields: Sequence[str]) -> list[tuple[int, dict[str, Any]]]:
    """Return (line number, object) for every line that is not blank; ``fields`` must be there."""
    rows = []
    for line, text in enumerate(read_text(path).split("\n"), start=1):
        if not text.strip():
            continue
        try:
            row = parse_json(text)
        except KeyTwiceError as error:
            raise SpecsimError(f"{path}: line {line}: {error}") from error
        except ValueError as error:  # not JSON, or a number of thousands of digits
            raise SpecsimError(f"{path}: line {line}: expected a JSON object, got {text[:60]!r}") from error
        if not isinstance(row, dict):
            raise SpecsimError(f"{path}: line {line}: expected a JSON object, got {text[:60]!r}")
        for field in fields:
            if field not in row:
                raise SpecsimError(f"{path}: line {line}: {field}: expected a value, got none")
        rows.append((line, row))
    if not rows:
        raise SpecsimError(f"{path}: expected at least one request, got none")
    return rows


def _numbers(path: str | Path, rows: list[tuple[int, dict[str, Any]]], field: str, whole: bool = False) -> Floats:
    """Return a field of JSON rows as float64; ``whole`` asks for token counts, 0 to 2^31 − 1."""
    for line, row in rows:
        value = row[field]
        if whole and not (type(value) is int and 0 <= value < 2**31):
            raise _problem(path, line, field, "a whole number of tokens", value)
        if type(value) not in (int, float) or not abs(value) < 2**63:  # NaN is not below either
            raise _problem(path, line, field, "a number", value)
    return np.array([row[field] for _, row in rows], dtype=np.float64)


def _problem(path: str | Path, line: int, field: str, expected: str, got: object) -> SpecsimError:
    text = repr(got)
    text = text if len(text) < 80 else f"{text[:77]}..."
    return SpecsimError(f"{path}: line {line}: {field}: expected {expected}, got {text}")


def _check(path: str | Path, lines: Ints, field: str, bad: Bools, got: Cells, expected: str) -> None:
    """Raise for the first row that is ``bad``; ``got[i]`` is what the file says there."""
    if bad.any():
        i = int(np.argmax(bad))
        raise _problem(path, int(lines[i]), field, expected, got[i])


def _check_sorted(path: str | Path, lines: Ints, field: str, times: Floats, got: Cells) -> None:
    falls = np.concatenate(([False], np.diff(times) < 0))
    _check(path, lines, field, falls, got, "no earlier than the line before")


def _keep(
    path: str | Path,
    times: Floats,
    prompt: Floats,
    output: Floats,
    domain: Sequence[str],
    hashes: Sequence[tuple[int, ...]] | None = None,
) -> Requests:
    """Leave out, and count by reason, the rows without tokens; arrivals count from the first kept.

    ``times`` are seconds, sorted; ``domain`` holds names, which are numbered as they first appear.
    """
    reasons = {
        "no tokens (failed request)": (prompt == 0) & (output == 0),
        "no prompt tokens": (prompt == 0) & (output > 0),
        "no output tokens": (prompt > 0) & (output == 0),
    }
    rejected = {reason: int(rows.sum()) for reason, rows in reasons.items() if rows.any()}
    kept = np.flatnonzero((prompt > 0) & (output > 0))
    if not len(kept):
        raise SpecsimError(f"{path}: expected at least one request with tokens, got {rejected}")
    codes, names = pd.factorize(np.array(domain, dtype=object)[kept])
    return Requests(
        arrival_s=times[kept] - times[kept[0]],
        prompt_tokens=prompt[kept].astype(np.int64),
        output_tokens=output[kept].astype(np.int64),
        domain=codes.astype(np.int64),
        domains=tuple(str(name) for name in names),
        prefix_hashes=None if hashes is None else tuple(hashes[i] for i in kept.tolist()),
        rejected=rejected,
    )
