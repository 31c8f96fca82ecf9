"""Profiles from AIConfigurator's silicon data: what its measured kernels say a step of an engine costs.

AIConfigurator (NVIDIA, Apache-2.0) prices a model's operations one by one from kernels measured on the GPU.
Its own price of a decode step takes every token for a sequence. A verification step is therefore composed
here from the operations: those that work token by token at the tokens in the forward, the output head at the
rows of logits, attention at the sequences. What is left open is how often the queries of one sequence read
its KV: once (the lower bound) or once a query (the upper bound); ``Layered.kv_reads`` says which.

``pip install 'specsim[silicon]'`` brings what it needs; nothing here is loaded before it is called.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.metadata
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from specsim.hardware import Profile
from specsim.importers.composed import KV_NOTE, PACKAGE, Deployment, compose
from specsim.importers.profile_parts import Ask, Found, check_bounds, option
from specsim.types import SpecsimError, to_install

BACKENDS = ("vllm", "sglang", "trtllm")


def load_silicon(
    model: str,
    system: str,
    backend: str = "vllm",
    tp: int = 1,
    *,
    version: str = "current",
    name: str | None = None,
    kv_reads: Literal["once", "per_query"] = "once",
    max_num_tokens: int = 8192,
    max_context: int | None = None,
    kv_tokens: int | None = None,
    utilisation: float = 0.9,
    draft_layers: int | None = None,
    draft_gamma: int | None = None,
    command: str | None = None,
) -> Profile:
    """Compose a profile of ``model`` on ``tp`` GPUs of ``system`` from AIConfigurator's data.

    ``model`` is a name that AIConfigurator knows or a folder with a config.json, ``system`` for example
    h200_sxm, ``version`` that of the engine (current, previous, next, or a number it has). Steps are priced
    up to ``max_num_tokens`` tokens and ``max_context`` tokens of KV a sequence (None: what the model allows).
    ``kv_tokens`` (None: by AIConfigurator's memory model with ``utilisation`` of the GPU's memory) is what the KV
    cache holds. ``draft_layers`` and ``draft_gamma`` add the price of a parallel drafter of so many of the
    model's layers that drafts so many tokens; without them the profile has no draft cost. Raises SpecsimError
    where the package is missing, has no such data, or prices the model in a way that cannot be taken apart, and for
    a context or a drafter's layers beyond the model's own; arguments are named as the command line's options.
    """
    _check(tp, backend, kv_reads, max_num_tokens, max_context, kv_tokens, utilisation, draft_layers, draft_gamma)
    with _quiet():
        handle, deployment = _open(model, system, backend, tp, version, max_num_tokens, kv_tokens, utilisation)
        try:
            return compose(
                handle, deployment, name=name, kv_reads=kv_reads, max_num_tokens=max_num_tokens,
                max_context=max_context, draft_layers=draft_layers, draft_gamma=draft_gamma, command=command,
            )  # fmt: skip
        except (RuntimeError, SpecsimError) as error:  # its PerfDataNotAvailableError is a RuntimeError
            raise SpecsimError(f"{_what(model, system, backend, tp)}: {error}") from error


def read_silicon(path: Path, text: str, ask: Ask) -> Found:
    """The answers of a user, of the model that ``path`` names, as load_silicon composes it (``text`` is empty).

    Raises SpecsimError where no system is told, and as load_silicon does.
    """
    if ask.system is None:
        raise SpecsimError(f"{path}: expected --system, the GPUs as AIConfigurator names them, such as h200_sxm")
    names = ("kv_reads", "kv_tokens", "utilisation", "max_num_tokens", "max_context", "draft_layers", "draft_gamma")
    answers = {name: value for name in names if (value := getattr(ask, name)) is not None}
    profile = load_silicon(
        str(path), ask.system, ask.backend or "vllm", ask.tp or 1, version=ask.engine_version or "current", **answers
    )
    said = profile.provenance
    return Found(
        verify=profile.verify, source=said.source, draft=profile.draft, name=profile.name, model=profile.model,
        device=profile.device, engine=profile.engine, tp=profile.tp, gpus=(profile.tp,), kv_tokens=profile.kv_tokens,
        kv_bytes_per_token=profile.kv_bytes_per_token, max_num_tokens=profile.max_num_tokens,
        versions=said.versions, notes=(said.notes or "",), warnings=tuple(_other_than_asked(path, ask, profile)),
    )  # fmt: skip


def _other_than_asked(path: Path, ask: Ask, profile: Profile) -> list[str]:
    """Warnings where model, GPU or KV format are not those that the user names, or not those that engines take."""
    warnings = []
    if ask.model and not path.is_dir() and _short(ask.model) != _short(profile.model):
        warnings.append(f"The model's name was told (--model {ask.model}): the prices are those of {profile.model}.")
    known, told = (re.findall("[a-z]*[0-9]+[a-z]*", text.lower()) for text in (profile.device, ask.device or ""))
    if ask.device and known and known[0] not in told:
        warnings.append(f"The GPU's name was told (--device {ask.device}): the prices are those of {profile.device}.")
    if KV_NOTE.format(1) in (profile.provenance.notes or ""):
        warnings.append(
            "KV numbers of 1 byte were not asked for: AIConfigurator takes them for weights of 8 bits, where engines "
            "keep KV as wide as the activations unless told. The KV capacity is about twice theirs (--kv-tokens), and "
            "attention reads half."
        )
    return warnings


def _short(model: str) -> str:
    return model.rstrip("/").rsplit("/", 1)[-1].lower()


def _what(model: str, system: str, backend: str, tp: int) -> str:
    return f"AIConfigurator's {model} on {system} with {backend}, tp {tp}"


def _check(
    tp: int, backend: str, kv_reads: str, max_num_tokens: int, max_context: int | None, kv_tokens: int | None,
    utilisation: float, draft_layers: int | None, draft_gamma: int | None,
) -> None:  # fmt: skip
    if backend not in BACKENDS:
        raise SpecsimError(f"--backend: expected one of {', '.join(BACKENDS)}, got {backend!r}")
    if kv_reads not in ("once", "per_query"):
        raise SpecsimError(f"--kv-reads: expected once or per_query, got {kv_reads!r}")
    check_bounds({
        "tp": tp, "max_num_tokens": max_num_tokens, "max_context": max_context, "kv_tokens": kv_tokens,
        "draft_layers": draft_layers, "draft_gamma": draft_gamma,
    }, option)  # fmt: skip
    for name, value in (("max_num_tokens", max_num_tokens), ("max_context", max_context)):
        if value is not None and value < 64:
            raise SpecsimError(f"{option(name)}: expected at least 64, got {value}")
    if not 0 < utilisation <= 1:
        raise SpecsimError(f"--utilisation: expected a share of the GPU's memory in 0..1, got {utilisation}")
    if (draft_layers is None) != (draft_gamma is None):
        raise SpecsimError("--draft-layers, --draft-gamma: expected both or neither")


def _open(
    model: str, system: str, backend: str, tp: int, version: str, max_num_tokens: int, kv_tokens: int | None,
    utilisation: float,
) -> tuple[Any, Deployment]:  # fmt: skip
    """Compile the engine and look up what is no time; SpecsimError says what AIConfigurator lacks."""
    try:
        from aiconfigurator_core.sdk import common, memory, perf_database, utils
        from aiconfigurator_core.sdk.engine import EngineHandle
    except ImportError as error:
        raise SpecsimError(f"AIConfigurator's data need {PACKAGE}: {to_install('silicon')}") from error
    # Any other name would be looked for on the internet.
    if model not in common.DefaultHFModels and not Path(model, "config.json").is_file():
        have = sorted(common.DefaultHFModels)
        near = difflib.get_close_matches(model, have, 3)
        hint = f"close to it are {', '.join(near)}" if near else f"such as {', '.join(have[:3])}"
        raise SpecsimError(
            f"{model}: expected a model that AIConfigurator has a config of ({hint}), or a folder with a config.json"
        )
    try:
        database = perf_database.resolve_query_version(system, backend, version)
    except ValueError as error:
        have = perf_database.get_supported_databases()
        known = ", ".join(sorted(name for name, backends in have.items() if backends.get(backend)))
        if system in have and have[system].get(backend):
            slots = perf_database.get_version_slots(system, backend) or {}
            listed = ", ".join(f"{name} ({number})" for name, number in slots.items())
            raise SpecsimError(f"--engine-version: expected one of {listed}, got {version!r}") from error
        raise SpecsimError(f"--system: expected one that has data of {backend} ({known}), got {system!r}") from error
    try:
        config: dict[str, Any] = utils.get_model_config_from_model_path(model)
        experts = {"moe_tp_size": tp} if config["num_experts"] else {}
        handle = EngineHandle.compile(model, system, backend, backend_version=database, tp_size=tp, **experts)
        room: dict[str, Any] = memory.estimate_kv_cache(
            model, system, backend, database, max_num_tokens=max_num_tokens, max_batch_size=1, tp_size=tp, **experts,
            memory_fraction_kind="of_free" if backend == "trtllm" else "of_total",
            memory_fraction_value=utilisation,
            # With KV tokens given only the bytes of one are wanted, whether or not the GPU has room for it.
            gpu_memory_capacity_bytes_override=1 << 50 if kv_tokens else None,
        )  # fmt: skip
    except Exception as error:  # whatever it raises: an assertion, its own errors, a ValueError
        raise SpecsimError(f"{_what(model, system, backend, tp)}: {error}") from error
    raw = config["raw_config"]
    return handle, Deployment(
        model=model,
        system=system,
        backend=backend,
        tp=tp,
        layers=config["layers"],
        context=config["context"],
        dtype=str((raw.get("quantization_config") or {}).get("quant_method") or raw.get("torch_dtype") or "unknown"),
        kv_tokens=kv_tokens or int(room["total_kv_size_tokens"]),
        kv_bytes_per_token=float(room["kv_size_per_token_bytes"] * tp),
        kv_number_bytes=_number_bytes(config, room["kv_size_per_token_bytes"], tp),
        memory="KV tokens as given." if kv_tokens else _memory(room, utilisation, backend),
        database=database,
        package=importlib.metadata.version(PACKAGE),
    )


def _number_bytes(config: dict[str, Any], on_gpu: float, tp: int) -> float | None:
    """Bytes of each number of KV, a token's being ``on_gpu`` bytes on each GPU; None where its shape is not told."""
    heads, width = config.get("n_kv"), config.get("d")
    if not (isinstance(heads, int) and isinstance(width, int) and heads > 0 and width > 0):
        return None
    return float(on_gpu / (2 * config["layers"] * -(-heads // tp) * width))


def _memory(room: dict[str, Any], utilisation: float, backend: str) -> str:
    """How the KV capacity was computed, in gibibytes of one GPU."""
    parts = room["memory_breakdown"]
    gib = {key: f"{parts[f'{key}_bytes'] / 2**30:.2f}" for key in ("weights", "activations", "runtime_overhead")}
    used = f"weights {gib['weights']}, activations {gib['activations']}, other {gib['runtime_overhead']}"
    used += f" and communication {parts['comm_overhead_bytes'] / 2**30:.2f}"
    total = f"{room['total_gpu_capacity_bytes'] / 2**30:.0f} GiB"
    rule = f"{utilisation} x ({total} less {used})" if backend == "trtllm" else f"{utilisation} x {total} less {used}"
    return f"KV tokens, GiB of a GPU by AIConfigurator's memory model: {rule}, by {room['kv_size_per_token_bytes']} B."


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """AIConfigurator's loggers held to errors: it reports every table it does not find."""
    logger = logging.getLogger("aiconfigurator_core")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
