"""Drafters on disk: config.json beside safetensors, as DeepSpec writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from specsim.drafters.config import DSPARK, EAGLE3, DraftConfig
from specsim.drafters.dspark import DSpark
from specsim.drafters.eagle3 import Eagle3
from specsim.drafters.store import write_tensors
from specsim.drafters.target import Target
from specsim.files import first_error, read_text, write_text
from specsim.types import SpecsimError

SHARD_BYTES = 9_000_000
VOCABULARY = "draft_vocabulary"


def build(config: DraftConfig) -> DSpark | Eagle3:
    """A drafter of ``config`` with weights drawn anew."""
    return DSpark(config) if config.architectures == (DSPARK,) else Eagle3(config)


def load_checkpoint(
    folder: str | Path, target: Target | None = None, dtype: torch.dtype | None = None
) -> DSpark | Eagle3:
    """Load a DSpark, DFlash or Eagle3 drafter from a DeepSpec checkpoint folder, or one of ours.

    ``target`` fills in what the checkpoint leaves out and is checked against it. ``dtype``: the
    target's, else float32. Raises SpecsimError naming the folder, and the key or tensor: another
    architecture, a tensor missing, unknown or of another shape, a file cut short, a vocabulary or
    width that is not the target's.
    """
    folder = Path(folder)
    config = read_config(folder)
    if target is not None:
        _fits(folder, config, target)
    tensors = _read_tensors(folder)
    vocabulary = tensors.pop(VOCABULARY, None)
    for name in config.from_target:
        if target is None:
            raise SpecsimError(f"{folder}: {name} is left to the target: expected a target")
        tensors[f"{name}.weight"] = target.embedding if name == "embed_tokens" else target.head
    vocabulary = _check_vocabulary(folder, config, vocabulary)
    if vocabulary is not None and "lm_head" in config.from_target:
        tensors["lm_head.weight"] = tensors["lm_head.weight"][vocabulary.to(tensors["lm_head.weight"].device)]
    with torch.device("meta"):
        model = build(config)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    for name, shape in shapes.items():
        if name not in tensors:
            raise SpecsimError(f"{folder}: tensor {name} is missing: expected {list(shape)}")
        if tuple(tensors[name].shape) != shape:
            raise SpecsimError(f"{folder}: tensor {name}: expected {list(shape)}, got {list(tensors[name].shape)}")
        if not tensors[name].isfinite().all():
            raise SpecsimError(f"{folder}: tensor {name}: expected numbers, got NaN or infinity in it")
    if unknown := sorted(set(tensors) - set(shapes)):
        raise SpecsimError(f"{folder}: tensor {unknown[0]} is not known for this architecture")
    dtype = dtype or (target.embedding.dtype if target else torch.float32)
    device = target.device if target else torch.device("cpu")
    model.load_state_dict({name: tensors[name].to(device, dtype) for name in shapes}, assign=True)
    model.vocabulary = None if vocabulary is None else vocabulary.to(device)
    return model.eval().requires_grad_(False)


def read_config(folder: Path) -> DraftConfig:
    """Read config.json of a drafter; SpecsimError names the architecture that is not known, or the key."""
    path = folder / "config.json"
    try:
        data = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise SpecsimError(f"{path}: expected JSON: {error}") from error
    names = data.get("architectures") if isinstance(data, dict) else None
    if names not in ([DSPARK], [EAGLE3]):
        raise SpecsimError(f"{path}: architectures: expected [{DSPARK!r}] or [{EAGLE3!r}], got {names!r}")
    try:
        return DraftConfig.model_validate(data)
    except ValidationError as error:
        raise SpecsimError(f"{path}: {first_error(error, data)}") from error


def save_checkpoint(model: DSpark | Eagle3, folder: str | Path, extra: dict[str, Any] | None = None) -> Path:
    """Write config.json and bfloat16 shards of under 10 MB, without the tensors that are the target's.

    ``extra`` keys go into config.json beside the drafter's own (how it was trained, by whom).
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    left = {f"{name}.weight" for name in model.config.from_target}
    tensors = {
        k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in model.state_dict().items() if k not in left
    }
    if model.vocabulary is not None:
        tensors[VOCABULARY] = model.vocabulary.to("cpu", torch.int32)
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in sorted(tensors.items()):
        if shards[-1] and size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    paths = [folder / f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    for path, shard in zip(paths, shards, strict=True):
        write_tensors(path, lambda p, shard=shard: save_file(shard, p))  # type: ignore[misc]
    for path in set(folder.glob("model*.safetensors")) - set(paths):  # an older drafter's, once ours is there
        path.unlink()
    config = model.config.model_dump(mode="json") | {"tie_word_embeddings": False, "dtype": "bfloat16"} | (extra or {})
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
    return folder


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise SpecsimError(f"{folder}: expected *.safetensors, found none")
    tensors: dict[str, Tensor] = {}
    for path in paths:
        try:
            with safe_open(path, "pt") as file:
                tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        except (SafetensorError, OSError) as error:
            raise SpecsimError(f"{path}: cannot read, is it whole? {error}") from error
    return tensors


def _fits(folder: Path, config: DraftConfig, target: Target) -> None:
    for name, expected, got in (
        ("vocab_size", target.vocab_size, config.vocab_size),
        ("hidden_size", target.hidden_size, config.hidden_size),
        ("num_target_layers", target.num_layers, config.num_target_layers),
    ):
        if expected != got:
            raise SpecsimError(
                f"{folder / 'config.json'}: {name}: expected {expected} as target {target.name}, got {got}"
            )


def _check_vocabulary(folder: Path, config: DraftConfig, vocabulary: Tensor | None) -> Tensor | None:
    """The draft vocabulary int64[V'], sorted by no rule; None where the drafter proposes any token."""
    if config.draft_vocab_size is None:
        return None
    if vocabulary is None or vocabulary.shape != (config.draft_vocab_size,):
        got = "none" if vocabulary is None else list(vocabulary.shape)
        raise SpecsimError(f"{folder}: tensor {VOCABULARY}: expected [{config.draft_vocab_size}] token ids, got {got}")
    ids = vocabulary.long()
    if ids.unique().numel() < ids.numel() or ids.min() < 0 or ids.max() >= config.vocab_size:
        raise SpecsimError(f"{folder}: tensor {VOCABULARY}: expected different ids from 0 to {config.vocab_size - 1}")
    return ids
