"""LLMServingSim's bundles of measured kernels as layered profiles.

A bundle is a folder of CSV files, each with the microseconds of one layer on one shard: dense.csv by tokens,
per_sequence.csv by rows of logits, attention.csv by the attention's shape, moe.csv by tokens and distinct
experts, skew_fit.csv for batches of unequal lengths, and meta.yaml. How often each layer runs comes from the
model's Hugging Face config.json (``model_shape``). A kernel that a forward runs but that was not measured, or
one that was measured and has no place in a forward, is refused: either would be time silently lost.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specsim.files import read_text
from specsim.hardware import Layered
from specsim.importers.experts import expert_seconds
from specsim.importers.kernels import SKEW, note_falls, read_attention, read_skew
from specsim.importers.model_shape import ModelShape, check_known, check_shards, other_name, read_config
from specsim.importers.profile_parts import (
    Ask,
    Found,
    Point,
    in_order,
    part,
    read_table,
    shown,
    whole,
)
from specsim.importers.units import in_seconds
from specsim.types import SpecsimError

MOE = ("tokens", "activated_experts", "time_us")
RAW = ("skew.csv", "step.csv", "mtp.csv")
"""Raw measurements behind others, whole steps for checking, and a drafter's kernels: no part of the target's step."""

WIDTHS = {"bf16": 2.0, "bfloat16": 2.0, "fp16": 2.0, "float16": 2.0, "fp32": 4.0, "float32": 4.0}
"""Bytes of a number by the first word of meta.yaml's variant; weights of 8 bits say nothing of the rest."""


@dataclass(frozen=True)
class _Place:
    """Where a bundle's parts are: its tables, the folder that holds all shards, and meta.yaml's content."""

    tables: Path
    root: Path
    meta: Mapping[str, Any]
    tp: int
    doubt: str | None = None


def read_bundle(path: Path, ask: Ask) -> Found:
    """A bundle's folder, or the folder above its tp1/, tp2/, .. as one layered profile."""
    place = _find(path, ask)
    config = _config_path(place, ask)
    shape = read_config(config)
    warning = _check_model(place, config, shape, ask)
    _check_files(place)
    notes = [
        f"{shape.layers} layers, by {config}, of kernels measured on one shard of tensor parallel {place.tp}.",
        "Kernel times alone: what the host takes to schedule, launch and sample comes on top (host_seconds).",
    ]
    tokens = _tokens(place, shape, ask, notes)
    rows = _rows_of_logits(place, notes)
    shards = {str(tp): shard for tp, shard in _skew_shards(place.meta).items()}
    verify: dict[str, Any] = {
        "tokens": tokens,
        "rows": rows,
        "attention": read_attention(place.tables / "attention.csv", shape.layers, notes),
        "kv_reads": ask.kv_reads or "once",
        "skew": None if ask.no_skew else read_skew(place.tables / "skew_fit.csv", shards.get(str(place.tp)), notes),
    }
    meta = place.meta
    versions = {name.removesuffix("_version"): str(meta[name]) for name in
                ("vllm_version", "cuda_version", "profiler_version") if meta.get(name)}  # fmt: skip
    model = meta.get("model")
    stem = "-".join(str(meta[key]).rsplit("/", 1)[-1] for key in ("model", "hardware") if meta.get(key))
    return Found(
        part(path, Layered, verify),
        "LLMServingSim bundle of kernel times",
        name=f"{stem}-tp{place.tp}".lower() if stem else None,
        model=str(model) if model else None,
        device=str(meta["gpu"]) if meta.get("gpu") else None,
        engine="vLLM" if meta.get("vllm_version") else None,
        tp=place.tp,
        gpus=_gpus(place.tp, ask.expert_parallel or 1),
        kv_bytes_per_token=shape.kv_bytes_per_token,
        date=str(meta["profiled_at"]) if meta.get("profiled_at") else None,
        versions=versions,
        notes=tuple(notes),
        warnings=tuple(text for text in (warning, _other_format(place, config, shape), place.doubt) if text),
    )


def _gpus(tp: int, ranks: int) -> tuple[int, ...]:
    """GPUs that one replica may have: those of a shard, or of all the ranks that share the experts.

    With experts shared by data-parallel ranks either may be the replica: one rank, of ``tp`` GPUs, or all of them.
    """
    return (tp, ranks) if ranks > tp and ranks % tp == 0 else (tp,)


# Finding the parts


def _find(path: Path, ask: Ask) -> _Place:
    try:
        shards = {int(m[1]): p for p in path.iterdir() if p.is_dir() and (m := re.fullmatch(r"tp(\d+)", p.name))}
    except OSError as error:
        raise SpecsimError(f"{path}: cannot read: {error.strerror or error}") from error
    here = (path / "dense.csv").exists()
    if here == bool(shards):
        got = "both" if here else "neither"
        raise SpecsimError(f"{path}: expected a bundle, a folder with dense.csv or with tp1/, tp2/, .., got {got}")
    if here:
        return _flat(path, ask)
    if ask.tp is None and len(shards) > 1:
        raise SpecsimError(f"{path}: expected --tp, one of {', '.join(map(str, sorted(shards)))}")
    tp = ask.tp or min(shards)
    if tp not in shards:
        raise SpecsimError(f"{path}: --tp: expected one of {', '.join(map(str, sorted(shards)))}, got {tp}")
    return _Place(shards[tp], path, bundle_meta(shards[tp], path), tp)


def _flat(path: Path, ask: Ask) -> _Place:
    """A folder with the tables of one shard: of the degree that its name or meta.yaml tells, or the user, or else 1.

    Nothing in the tables themselves tells it, so that what only the user says gets a warning.
    """
    named = re.fullmatch(r"tp(\d+)", path.name)
    root = path.parent if named else path
    meta = bundle_meta(path, root)
    degrees = _degrees(meta)
    told, said = int(named[1]) if named else None, _degree_by_samples(path, meta)
    tp = told or (degrees[0] if len(degrees) == 1 else said) or 1
    if degrees and (ask.tp or tp) not in degrees:
        raise SpecsimError(f"--tp: expected one of meta.yaml's tp_degrees {degrees}, got {ask.tp or tp}")
    if said not in (None, tp):
        raise SpecsimError(f"{path}: is the shard of {tp}, but by meta.yaml's n_samples skew_fit.csv is that of {said}")
    if ask.tp not in (None, tp):
        if told or said or len(degrees) == 1:
            raise SpecsimError(f"--tp: {path} is the shard of {tp}, got {ask.tp}")
        doubt = f"{path} does not say of which shard its tables are: those of tensor parallel {ask.tp}, as told."
        return _Place(path, root, meta, ask.tp, doubt)
    doubt = f"Tensor parallelism was not told and meta.yaml names several: {tp} is assumed."
    return _Place(path, root, meta, tp, doubt if len(degrees) > 1 and not (ask.tp or told or said) else None)


def _degree_by_samples(path: Path, meta: Mapping[str, Any]) -> int | None:
    """The tensor-parallel degree whose samples in meta.yaml are as many as skew_fit.csv has; None where none is.

    Nothing else tells: the profiler runs every shard alone, as an engine of tensor_parallel_size 1, and the shard in
    hf_overrides is that of the degree it ran last.
    """
    known = {int(tp): shard.get("n_samples") for tp, shard in _skew_shards(meta).items()
             if isinstance(shard, dict) and str(tp).isdecimal()}  # fmt: skip
    if not known or not (path / "skew_fit.csv").exists():
        return None
    try:
        samples = sum(whole("n_samples", row["n_samples"], 0) for _, row in read_table(path / "skew_fit.csv", SKEW))
    except SpecsimError:  # what is wrong with the table is told where it is read for its prices, if it is
        return None
    found = [tp for tp, count in known.items() if count == samples]
    return found[0] if len(found) == 1 else None


def _skew_shards(meta: Mapping[str, Any]) -> Mapping[Any, Any]:
    """What meta.yaml says of the corrections for unequal lengths, by tensor-parallel degree."""
    fit = meta.get("skew_fit")
    shards = fit.get("per_tp") if isinstance(fit, dict) else None
    return shards if isinstance(shards, dict) else {}


def bundle_meta(*folders: Path) -> Mapping[str, Any]:
    """The content of meta.yaml in the first folder that has it; empty without one."""
    import yaml

    path = next((folder / "meta.yaml" for folder in folders if (folder / "meta.yaml").exists()), None)
    if path is None:
        return {}
    text = read_text(path)
    try:
        data = yaml.safe_load(text)
    except RecursionError as error:
        raise SpecsimError(f"{path}: expected YAML, got lists or mappings nested too deep") from error
    except (yaml.YAMLError, ValueError, LookupError, AttributeError) as error:
        # Values that its constructors cannot make, such as the day 2026-13-45, are errors of theirs and not YAMLErrors.
        raise SpecsimError(f"{path}: expected YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise SpecsimError(f"{path}: expected a mapping, got {type(data).__name__}")
    degrees = data.get("tp_degrees") or []
    if not isinstance(degrees, list):
        raise SpecsimError(f"{path}: tp_degrees: expected a list, got {shown(degrees)}")
    return data | {"tp_degrees": [whole(f"{path}: tp_degrees", degree) for degree in degrees]}


def _degrees(meta: Mapping[str, Any]) -> list[int]:
    degrees: list[int] = meta.get("tp_degrees", [])
    return degrees


def _config_path(place: _Place, ask: Ask) -> Path:
    if ask.config is not None:
        return ask.config
    tried = [folder / "config.json" for folder in (place.tables, place.root, place.root.parent)]
    found = next((path for path in tried if path.exists()), None)
    if found is None:
        raise SpecsimError(f"{place.root}: expected the model's config.json there or one folder up, or --config FILE")
    return found


def _check_model(place: _Place, config: Path, shape: ModelShape, ask: Ask) -> str | None:
    """Refuse a bundle of another model than the one asked for, or than the one config.json describes.

    A bundle does not hold the number of layers, and no widths but those of a shard. Returns a warning, or None.
    """
    model = str(place.meta.get("model") or "")
    if ask.model and model and ask.model.lower() not in (model.lower(), model.rsplit("/", 1)[-1].lower()):
        raise SpecsimError(f"{place.root}: model: expected {ask.model}, got a bundle of {model}")
    # Newer bundles name the family, whose name a mixture of experts shares.
    family = str(place.meta.get("architecture") or "")
    if family and shape.model_type and family not in (shape.model_type, re.sub("_(moe|text)$", "", shape.model_type)):
        raise SpecsimError(
            f"{config}: model_type: expected {family}, the architecture of the bundle's meta.yaml, "
            f"got {shape.model_type}: a bundle for another model"
        )
    engine = place.meta.get("engine_effective")
    overrides = engine.get("hf_overrides") if isinstance(engine, dict) else None
    check_shards(config, shape, overrides if isinstance(overrides, dict) else {}, _degrees(place.meta) or [place.tp])
    check_known(config, shape, model)
    return other_name(config, shape, model)


def _other_format(place: _Place, config: Path, shape: ModelShape) -> str | None:
    """A warning where config.json's numbers are not as wide as those that meta.yaml's variant tells were measured."""
    variant = str(place.meta.get("variant") or "")
    width = WIDTHS.get(variant.lower().partition("-")[0])
    if width in (None, shape.dtype_bytes):
        return None
    return (
        f"{config} has numbers of {shape.dtype_bytes:g} bytes (torch_dtype), meta.yaml's variant is {variant}: KV "
        f"and all-reduces are those of {shape.dtype_bytes:g} bytes, the kernel times of {width:g}."
    )


def _check_files(place: _Place) -> None:
    known = ("dense.csv", "per_sequence.csv", "attention.csv", "moe.csv", "skew_fit.csv", *RAW)
    for path in sorted(place.tables.glob("*.csv")):
        if path.name not in known:
            raise SpecsimError(f"{path}: is not a table of a bundle that can be priced, expected {', '.join(known)}")


# The tables


def _tokens(place: _Place, shape: ModelShape, ask: Ask, notes: list[str]) -> dict[str, Any]:
    """Everything priced by the tokens in the forward, s, at every size that any kernel was measured at."""
    curves = _by_layer(place.tables / "dense.csv", "tokens", shape.dense, shape.optional, notes)
    for name, given in (("--expert-parallel", ask.expert_parallel), ("moe.csv", (place.tables / "moe.csv").exists())):
        if given and not shape.expert_layers:
            raise SpecsimError(f"{place.tables}: {name}: has no place in a model without experts")
    sizes = {point.size for points, _ in curves for point in points}
    last = min(points[-1].size for points, _ in curves)
    experts: Callable[[np.ndarray], np.ndarray] | None = None
    if shape.expert_layers:
        ranks = ask.expert_parallel or 1
        table = place.tables / "moe.csv"
        if not table.exists() and ranks > 1:  # experts are whole on their rank, whatever the shard of the rest
            table = place.root / "tp1" / "moe.csv"
        at, experts, note = expert_seconds(table, read_table(table, MOE, ("ep",)), shape, ranks)
        sizes, last = sizes | set(at), min(last, max(at))
        notes.append(note)
    if any(points[-1].size != last for points, _ in curves):
        notes.append(f"Priced up to {last} tokens, where the first kernel's sizes end.")
    grid = np.array(sorted(size for size in sizes if size <= last))
    seconds = np.zeros(len(grid))
    for points, times in curves:
        seconds += times * np.interp(grid, [p.size for p in points], [p.seconds for p in points])
    if experts is not None:
        seconds += experts(grid)
    if place.tp > 1:
        seconds += _all_reduces(place, shape, ask, grid, notes)
    elif ask.link_bandwidth is not None or ask.link_latency is not None:
        raise SpecsimError("--link-bandwidth, --link-latency: have no meaning without tensor parallelism (--tp)")
    return {"at": grid.tolist(), "seconds": seconds.tolist()}


def _all_reduces(place: _Place, shape: ModelShape, ask: Ask, tokens: np.ndarray, notes: list[str]) -> np.ndarray:
    """Seconds of a ring's two all-reduces a layer, which the kernels of one shard do not hold."""
    if ask.link_bandwidth is None or ask.link_latency is None:
        raise SpecsimError(
            f"{place.tables}: expected --link-bandwidth (bytes/s) and --link-latency (s), since tp {place.tp} "
            "needs all-reduces, which a bundle does not measure"
        )
    width = shape.sizes["hidden_size"]
    sent = 2 * (place.tp - 1) / place.tp * tokens * width * shape.dtype_bytes
    notes.append(
        f"Two all-reduces a layer are added, computed and not measured: {ask.link_latency:g} s + "
        f"2(tp-1)/tp × tokens × {width} × {shape.dtype_bytes:g} bytes / {ask.link_bandwidth:g} bytes/s each."
    )
    return np.asarray(2 * shape.layers * (ask.link_latency + sent / ask.link_bandwidth))


def _rows_of_logits(place: _Place, notes: list[str]) -> dict[str, Any]:
    """Output head and sampler by rows of logits, s."""
    curves = _by_layer(place.tables / "per_sequence.csv", "sequences", {"lm_head": 1, "sampler": 1}, (), notes)
    last = min(points[-1].size for points, _ in curves)
    grid = np.array(sorted({p.size for points, _ in curves for p in points if p.size <= last}))
    seconds = sum(times * np.interp(grid, [p.size for p in ps], [p.seconds for p in ps]) for ps, times in curves)
    return {"at": grid.tolist(), "seconds": np.asarray(seconds).tolist()}


def _by_layer(
    path: Path, size: str, layers: Mapping[str, int], optional: Iterable[str], notes: list[str]
) -> list[tuple[list[Point], int]]:
    """The points of each layer and how often a forward runs it; SpecsimError unless just these were measured."""
    found: dict[str, list[Point]] = {}
    for where, row in read_table(path, ("layer", size, "time_us")):
        name = row["layer"].strip()
        if name not in layers:
            raise SpecsimError(
                f"{path}: {where}: layer {name!r} has no place in this model's forward: expected {', '.join(layers)}"
            )
        seconds = in_seconds(f"{path}: {where}: time_us", row["time_us"], "us")
        found.setdefault(name, []).append(Point(where, whole(f"{path}: {where}: {size}", row[size]), seconds))
    missing = [name for name in layers if name not in found and name not in optional]
    if missing:
        raise SpecsimError(f"{path}: missing layers: {', '.join(missing)}: this model's forward runs them")
    curves, falls = [], []
    for name, points in found.items():
        points = in_order(path, points, f"{size} of {name}")
        for a, b in itertools.pairwise(points):
            falls.append((b.seconds / a.seconds - 1, f"{name}, {a.size} to {b.size} {size}, {b.where}"))
        curves.append((points, layers[name]))
    notes += note_falls(path, falls, size)
    return curves
