"""A recorded engine run: what each request met, what the engine was told, and where its step prices are.

A run is a folder: requests.jsonl (a line a request), meta.json (the engine's settings), config.json (the model's),
profile/ (a bundle of kernel times) and, where it was kept, timeseries.csv (the engine's own counts).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specsim.files import first_error, parse_json, read_json, read_text
from specsim.importers.profile_parts import finite, read_table, whole
from specsim.types import Floats, Ints, SpecsimError

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Seconds = Annotated[float, Field(allow_inf_nan=False, gt=-(2**63), lt=2**63)]

TIMES = ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")
"""The engine's moments of a request, in the order in which they happen."""
SIMULATED = {"pipeline_parallel_size": 1, "enable_chunked_prefill": True, "scheduling_policy": "fcfs"}
"""Settings of the engine that can have one value alone in a replay."""
SERIES = ("t", "running", "waiting")
MORE_SERIES = ("prompt_throughput", "gen_throughput", "kv_cache_pct")


@dataclass(frozen=True)
class Timings:
    """What each request met, [n] in order of arrival: seconds on one clock whose zero is the first arrival."""

    arrival_s: Floats
    queued_s: Floats
    scheduled_s: Floats
    first_token_s: Floats
    finish_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def ttft(self) -> Floats:
        """Seconds [n] from the moment the engine sees a request, at a step's boundary, to its first token."""
        return self.first_token_s - self.queued_s

    @property
    def e2e(self) -> Floats:
        """Seconds [n] from the moment the engine sees a request to its last token."""
        return self.finish_s - self.queued_s

    @property
    def tpot(self) -> Floats:
        """Seconds an output token after the first, of the requests that have more than one: [n] or fewer."""
        many = self.output_tokens > 1
        return (self.finish_s - self.first_token_s)[many] / (self.output_tokens[many] - 1)


@dataclass(frozen=True)
class Load:
    """An engine's requests and KV at the times ``t`` (s, [m], on the clock of the run's Timings).

    ``kv_share`` is the used share of the KV cache, 0 to 1, or None where it was not recorded.
    """

    t: Floats
    running: Floats
    waiting: Floats
    kv_share: Floats | None


@dataclass(frozen=True)
class Settings:
    """What meta.json says of the engine; None where it is silent."""

    model: str
    engine: str | None
    tp: int
    dp: int
    expert_parallel: bool
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    block_size: int
    num_blocks: int | None
    utilisation: float | None
    prefix_caching: bool | None
    dtype: str
    quantization: str | None
    kv_dtype: str
    device: str | None
    device_memory: float | None
    speculation: Any


@dataclass(frozen=True)
class RecordedRun:
    """One run's folder, read. ``config`` and ``profile`` are paths inside it, None where there is none."""

    path: Path
    settings: Settings
    requests: Timings
    load: Load | None
    config: Path | None
    profile: Path | None

    @property
    def name(self) -> str:
        return self.path.resolve().name


class _Part(BaseModel):
    """A part of meta.json; fields that say nothing of the schedule may stand beside those read."""

    model_config = ConfigDict(extra="allow", strict=True)


class _Engine(_Part):
    tensor_parallel_size: Count | None = None
    data_parallel_size: Count | None = None
    pipeline_parallel_size: Count | None = None
    enable_expert_parallel: bool | None = None
    enable_prefix_caching: bool | None = None
    enable_chunked_prefill: bool | None = None
    scheduling_policy: str | None = None
    max_num_seqs: Count | None = None
    max_num_batched_tokens: Count | None = None
    block_size: Count | None = None
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    dtype: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    speculative_config: Any = None


class _Cache(_Part):
    num_gpu_blocks: Annotated[int, Field(ge=2, le=2**31)] | None = None
    block_size: Count | None = None
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    enable_prefix_caching: bool | None = None


class _Hardware(_Part):
    device_name: str | None = None
    device_total_memory_bytes: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


class _Meta(_Part):
    model: str = Field(min_length=1)
    engine_kwargs: _Engine
    kv_cache: _Cache | None = None
    hardware: _Hardware | None = None
    vllm_version: str | None = None
    num_requests: int | None = None
    started_at: str | None = None


class _Row(_Part):
    """A line of requests.jsonl: ``arrival_time`` is the client's clock, the others the engine's; seconds."""

    request_id: str | None = None
    input_toks: Count
    output_toks: Count
    arrival_time: Seconds
    queued_ts: Seconds
    scheduled_ts: Seconds
    first_token_ts: Seconds
    last_token_ts: Seconds


def read_run(path: str | Path) -> RecordedRun:
    """Read the folder of a recorded run.

    A client's clock is brought to the engine's by the request that waited least to be seen: its arrival is
    when it was queued. Raises SpecsimError, naming file, line and field, for anything that is missing, of the
    wrong type or at odds with the rest.
    """
    path = Path(path)
    if not path.is_dir():
        raise SpecsimError(f"{path}: expected the folder of a recorded run, with requests.jsonl and meta.json")
    meta = read_json(path / "meta.json", _Meta)
    settings = _settings(path / "meta.json", meta)
    source = path / "requests.jsonl"
    lines, rows = _rows(source)
    if meta.num_requests is not None and meta.num_requests != len(rows):
        raise SpecsimError(f"{path / 'meta.json'}: num_requests: expected {len(rows)}, the lines of {source.name}, "
                           f"got {meta.num_requests}")  # fmt: skip
    requests, first_arrival = _timings(source, lines, rows)
    series = path / "timeseries.csv"
    config, profile = path / "config.json", path / "profile"
    return RecordedRun(
        path=path,
        settings=settings,
        requests=requests,
        load=_load(series, _start(path / "meta.json", meta, first_arrival)) if series.exists() else None,
        config=config if config.exists() else None,
        profile=profile if profile.exists() else None,
    )


def _settings(path: Path, meta: _Meta) -> Settings:
    engine, cache, hardware = meta.engine_kwargs, meta.kv_cache or _Cache(), meta.hardware or _Hardware()
    for field, usual in (
        ("pipeline_parallel_size", 1),
        ("enable_chunked_prefill", True),
        ("scheduling_policy", "fcfs"),
    ):
        value = getattr(engine, field)
        if value not in (None, usual):
            raise SpecsimError(f"{path}: engine_kwargs.{field}: expected {usual}, the only one simulated, got {value}")
    caching = cache.enable_prefix_caching if engine.enable_prefix_caching is None else engine.enable_prefix_caching
    return Settings(
        model=meta.model,
        engine=f"vLLM {meta.vllm_version}" if meta.vllm_version else None,
        tp=engine.tensor_parallel_size or 1,
        dp=engine.data_parallel_size or 1,
        expert_parallel=bool(engine.enable_expert_parallel),
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        block_size=cache.block_size or engine.block_size or 16,
        num_blocks=cache.num_gpu_blocks,
        utilisation=cache.gpu_memory_utilization or engine.gpu_memory_utilization,
        prefix_caching=caching,
        dtype=engine.dtype or "auto",
        quantization=engine.quantization,
        kv_dtype=engine.kv_cache_dtype or "auto",
        device=hardware.device_name,
        device_memory=hardware.device_total_memory_bytes,
        speculation=engine.speculative_config,
    )


def _rows(path: Path) -> tuple[list[int], list[_Row]]:
    """The requests with the numbers of their lines."""
    lines, rows = [], []
    for number, text in enumerate(read_text(path).splitlines(), 1):
        if text.strip():
            lines.append(number)
            rows.append(_row(f"{path}: line {number}", text))
    if not rows:
        raise SpecsimError(f"{path}: expected at least one request, got none")
    seen: dict[str, int] = {}
    for number, row in zip(lines, rows, strict=True):
        if row.request_id is not None and seen.setdefault(row.request_id, number) != number:
            raise SpecsimError(
                f"{path}: line {number}: request_id: {row.request_id!r} is also on line {seen[row.request_id]}"
            )
    return lines, rows


def _row(where: str, text: str) -> _Row:
    try:
        return _Row.model_validate_json(text)
    except ValidationError as error:
        try:
            data = parse_json(text)
        except ValueError as broken:
            raise SpecsimError(f"{where}: expected a JSON object: {broken}") from error
        raise SpecsimError(f"{where}: {first_error(error, data)}") from error


def _timings(path: Path, lines: Sequence[int], rows: Sequence[_Row]) -> tuple[Timings, float]:
    """The requests on the engine's clock, from the first arrival on; and that arrival on the client's clock."""
    for line, row in zip(lines, rows, strict=True):
        for before, after in itertools.pairwise(TIMES):
            if getattr(row, after) < getattr(row, before):
                raise SpecsimError(
                    f"{path}: line {line}: {after}: expected {before}, {getattr(row, before)}, or later, "
                    f"got {getattr(row, after)}"
                )
    sent = np.array([row.arrival_time for row in rows])
    queued, scheduled, first, last = (np.array([getattr(row, name) for row in rows]) for name in TIMES)
    arrival = sent + (queued - sent).min()
    # Clocks that run apart, or milliseconds beside seconds, make requests wait for longer than anything lasted.
    wait, whole_run = queued - arrival, float(last.max() - queued.min())
    worst = int(np.argmax(wait))
    if wait[worst] > whole_run:
        raise SpecsimError(
            f"{path}: line {lines[worst]}: arrival_time: expected seconds, as queued_ts: the request would have waited "
            f"{wait[worst]:.4g} s to be seen in a run of {whole_run:.4g} s"
        )
    zero, order = float(arrival.min()), np.argsort(arrival, kind="stable")
    timings = Timings(
        arrival_s=arrival[order] - zero,
        queued_s=queued[order] - zero,
        scheduled_s=scheduled[order] - zero,
        first_token_s=first[order] - zero,
        finish_s=last[order] - zero,
        prompt_tokens=np.array([row.input_toks for row in rows])[order],
        output_tokens=np.array([row.output_toks for row in rows])[order],
    )
    return timings, float(sent.min())


def _start(path: Path, meta: _Meta, first_arrival: float) -> float:
    """Seconds from the first arrival to the zero of timeseries.csv, which is started_at; 0 where it is not told."""
    if meta.started_at is None:
        return 0.0
    try:
        start = datetime.fromisoformat(meta.started_at)
    except ValueError:
        raise SpecsimError(
            f"{path}: started_at: expected a date and time (ISO 8601), got {meta.started_at!r}"
        ) from None
    if start.tzinfo is None:
        start = start.replace(tzinfo=UTC)
    return start.timestamp() - first_arrival


def _load(path: Path, start: float) -> Load:
    """timeseries.csv; ``kv_cache_pct`` that is zero throughout counts as not recorded."""
    rows = read_table(path, SERIES, MORE_SERIES)
    t = [finite(f"{path}: {where}: t", row["t"]) for where, row in rows]
    for (where, _), before, after in zip(rows[1:], t, t[1:], strict=False):
        if after <= before:
            raise SpecsimError(f"{path}: {where}: t: expected more than {before:g}, the row before, got {after:g}")
    running, waiting = ([whole(f"{path}: {where}: {name}", row[name], 0) for where, row in rows] for name in SERIES[1:])
    kv = [finite(f"{path}: {where}: kv_cache_pct", row.get("kv_cache_pct", "0")) for where, row in rows]
    for (where, _), share in zip(rows, kv, strict=True):
        if not 0 <= share <= 100:
            raise SpecsimError(f"{path}: {where}: kv_cache_pct: expected 0 to 100, got {share:g}")
    return Load(
        t=np.array(t) + start,
        running=np.array(running, dtype=np.float64),
        waiting=np.array(waiting, dtype=np.float64),
        kv_share=np.array(kv) / 100 if any(kv) else None,
    )
