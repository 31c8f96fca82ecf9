"""meta.json of a recorded run: the engine's settings, and when the run began and ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from specsim.files import parse_json, read_json
from specsim.types import SpecsimError

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Blocks = Annotated[int, Field(ge=2, le=2**31)]
Bytes = Annotated[float, Field(gt=0, allow_inf_nan=False)]

SIMULATED = {
    "pipeline_parallel_size": 1,
    "enable_chunked_prefill": True,
    "scheduling_policy": "fcfs",
    "policy": "fcfs",
    "long_prefill_token_threshold": 0,
    "max_num_partial_prefills": 1,
    "num_scheduler_steps": 1,
}
"""Settings of the engine that can have one value alone in a replay."""
SAYS_NOTHING = (
    "model", "tokenizer", "tokenizer_mode", "served_model_name", "revision", "seed", "load_format", "download_dir",
    "trust_remote_code", "skip_tokenizer_init", "disable_log_stats",
)  # fmt: skip
"""Settings of the engine that change neither its schedule nor the price of a step."""


@dataclass(frozen=True)
class Settings:
    """What meta.json says of the engine; None where it is silent.

    ``ignored``: names of engine_kwargs that a replay knows nothing of. ``async_by``: the field that tells
    ``async_scheduling``. ``kv_memory``: bytes of each GPU set apart for KV. ``drafted``: tokens that the drafter
    proposes a request in a step.
    """

    model: str
    engine: str | None
    tp: int
    dp: int
    expert_parallel: bool
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    max_model_len: int | None
    block_size: int
    num_blocks: int | None
    kv_memory: float | None
    utilisation: float | None
    prefix_caching: bool | None
    async_scheduling: bool | None
    async_by: str | None
    dtype: str
    quantization: str | None
    kv_dtype: str
    device: str | None
    device_memory: float | None
    speculation: Any
    drafted: int | None
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class Meta:
    """meta.json, read: ``started_at`` and ``finished_at`` are seconds since 1970, None where they are not told."""

    settings: Settings
    num_requests: int | None
    started_at: float | None
    finished_at: float | None


class Part(BaseModel):
    """A part of a recording; fields that say nothing of the schedule may stand beside those read."""

    model_config = ConfigDict(extra="allow", strict=True)


class _Scheduler(Part):
    """Settings that an engine can also have decided by itself."""

    max_num_seqs: Count | None = None
    max_num_batched_tokens: Count | None = None
    enable_chunked_prefill: bool | None = None
    async_scheduling: bool | None = None
    long_prefill_token_threshold: int | None = None
    max_num_partial_prefills: int | None = None
    num_scheduler_steps: int | None = None


class _Engine(_Scheduler):
    tensor_parallel_size: Count | None = None
    data_parallel_size: Count | None = None
    pipeline_parallel_size: Count | None = None
    enable_expert_parallel: bool | None = None
    enable_prefix_caching: bool | None = None
    scheduling_policy: str | None = None
    max_model_len: int | str | None = None
    block_size: Count | None = None
    num_gpu_blocks_override: Blocks | None = None
    kv_cache_memory_bytes: Bytes | None = None
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    dtype: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    speculative_config: Any = None


class _Decided(_Scheduler):
    policy: str | None = None


class _Parallel(Part):
    pipeline_parallel_size: Count | None = None


class _Resolved(Part):
    scheduler_config: _Decided | None = None
    parallel_config: _Parallel | None = None


class _Cache(Part):
    num_gpu_blocks: Blocks | None = None
    num_gpu_blocks_override: Blocks | None = None
    num_kv_tokens: Count | None = None
    kv_cache_memory_bytes: Bytes | None = None
    block_size: Count | None = None
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    enable_prefix_caching: bool | None = None


class _Hardware(Part):
    device_name: str | None = None
    device_total_memory_bytes: Bytes | None = None


class _Meta(Part):
    model: str = Field(min_length=1)
    engine_kwargs: _Engine
    resolved_config: _Resolved | None = None
    kv_cache: _Cache | None = None
    hardware: _Hardware | None = None
    vllm_version: str | None = None
    num_requests: int | None = None
    started_at: str | None = None
    finished_at: str | None = None


def read_meta(path: Path) -> Meta:
    """Read meta.json; SpecsimError, naming the field, for what is malformed, contradicts itself or is not simulated."""
    meta = read_json(path, _Meta)
    return Meta(
        settings=_settings(path, meta),
        num_requests=meta.num_requests,
        started_at=_moment(path, "started_at", meta.started_at),
        finished_at=_moment(path, "finished_at", meta.finished_at),
    )


def _settings(path: Path, meta: _Meta) -> Settings:
    engine, cache, hardware = meta.engine_kwargs, meta.kv_cache or _Cache(), meta.hardware or _Hardware()
    # What the engine was told goes before what it says that it made of it.
    resolved = meta.resolved_config or _Resolved()
    decided = resolved.scheduler_config or _Decided()
    told: dict[str, _Scheduler] = {"engine_kwargs": engine, "resolved_config.scheduler_config": decided}
    cached: dict[str, Part] = {"engine_kwargs": engine, "kv_cache": cache}
    parts: dict[str, Part] = {**told, "resolved_config.parallel_config": resolved.parallel_config or _Parallel()}
    for field, usual in SIMULATED.items():
        for where, part in parts.items():
            value = getattr(part, field, None)
            if value not in (None, usual):
                raise SpecsimError(f"{path}: {where}.{field}: expected {usual}, the only one simulated, got {value}")
    if (engine.quantization or "").startswith("fp8") and engine.dtype == "float32":
        raise SpecsimError(
            f"{path}: engine_kwargs.dtype: expected auto, bfloat16 or float16 beside quantization "
            f"{engine.quantization}, got float32"
        )
    caching = cache.enable_prefix_caching if engine.enable_prefix_caching is None else engine.enable_prefix_caching
    asynchronous = {f"{where}.async_scheduling": scheduler.async_scheduling for where, scheduler in told.items()}
    by = next((name for name, value in asynchronous.items() if value is not None), None)
    length = engine.max_model_len  # a text, or -1, leaves it to the engine
    block_size = _agreed(path, cached, "block_size") or 16
    return Settings(
        model=meta.model,
        engine=f"vLLM {meta.vllm_version}" if meta.vllm_version else None,
        tp=engine.tensor_parallel_size or 1,
        dp=engine.data_parallel_size or 1,
        expert_parallel=bool(engine.enable_expert_parallel),
        max_num_seqs=_agreed(path, told, "max_num_seqs"),
        max_num_batched_tokens=_agreed(path, told, "max_num_batched_tokens"),
        max_model_len=length if isinstance(length, int) and length > 0 else None,
        block_size=block_size,
        num_blocks=_blocks(path, cached, block_size),
        kv_memory=_agreed(path, cached, "kv_cache_memory_bytes"),
        utilisation=cache.gpu_memory_utilization or engine.gpu_memory_utilization,
        prefix_caching=caching,
        async_scheduling=asynchronous[by] if by else None,
        async_by=by,
        dtype=engine.dtype or "auto",
        quantization=engine.quantization,
        kv_dtype=engine.kv_cache_dtype or "auto",
        device=hardware.device_name,
        device_memory=hardware.device_total_memory_bytes,
        # The reference engine tells its scheduler, in a word, also when it drafts nothing.
        speculation=None if engine.speculative_config == "NoSpec" else engine.speculative_config,
        drafted=_drafted(path, engine.speculative_config),
        ignored=tuple(
            name for name, value in (engine.model_extra or {}).items() if value is not None and name not in SAYS_NOTHING
        ),
    )


def _drafted(path: Path, speculation: Any) -> int | None:
    """num_speculative_tokens of the settings of a vLLM, JSON as text too; None where they do not tell, or in a word."""
    if isinstance(speculation, str):
        try:
            speculation = parse_json(speculation)
        except ValueError:
            return None
    drafted = speculation.get("num_speculative_tokens") if isinstance(speculation, dict) else None
    if drafted is not None and (type(drafted) is not int or drafted < 1):
        raise SpecsimError(
            f"{path}: engine_kwargs.speculative_config.num_speculative_tokens: expected a whole number, 1 or more, "
            f"got {drafted!r}"
        )
    return drafted


def _agreed(path: Path, parts: Mapping[str, Part], *fields: str) -> Any:
    """What the ``parts`` say of a setting, under one of its names; None where all are silent.

    SpecsimError, naming both, where two of them say different things.
    """
    told = {
        f"{where}.{field}": getattr(part, field)
        for field in fields
        for where, part in parts.items()
        if field in type(part).model_fields and getattr(part, field) is not None
    }
    if not told:
        return None
    first, value = next(iter(told.items()))
    for name, other in told.items():
        if other != value:
            raise SpecsimError(f"{path}: {name}: expected {value}, as {first} says, got {other}")
    return value


def _blocks(path: Path, parts: Mapping[str, Part], block_size: int) -> int | None:
    """The engine's KV blocks, counted, set by hand or from its tokens; None where it tells none of them."""
    blocks: int | None = _agreed(path, parts, "num_gpu_blocks_override", "num_gpu_blocks")
    tokens: int | None = _agreed(path, parts, "num_kv_tokens")
    if tokens is None:
        return blocks
    if blocks is None:
        if tokens < 2 * block_size:
            raise SpecsimError(f"{path}: kv_cache.num_kv_tokens: expected two blocks of {block_size}, got {tokens}")
        return tokens // block_size
    if blocks != tokens // block_size:
        raise SpecsimError(
            f"{path}: kv_cache.num_kv_tokens: expected {blocks * block_size}, num_gpu_blocks {blocks} of {block_size} "
            f"tokens, got {tokens}"
        )
    return blocks


def _moment(path: Path, field: str, text: str | None) -> float | None:
    """Seconds since 1970; a time without a zone is UTC."""
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise SpecsimError(f"{path}: {field}: expected a date and time (ISO 8601), got {text!r}") from None
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
