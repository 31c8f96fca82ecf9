"""What a model's Hugging Face config.json says of the kernels that one forward runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specsim.files import parse_json, read_text
from specsim.hardware.model_shape import PRESETS
from specsim.importers.profile_parts import json_kind, whole
from specsim.types import SpecsimError

DTYPE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
SHARDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
"""Fields of which a tensor-parallel shard has its part; the others it has whole."""
FOREIGN = ("kv_lora_rank", "n_routed_experts", "linear_num_key_heads", "layer_types_linear", "ssm_cfg")
"""Fields of architectures whose forward holds kernels that a bundle's tables do not name."""


@dataclass(frozen=True)
class ModelShape:
    """A decoder of ``layers`` layers; ``name`` is what its config.json calls it ("" where it does not).

    ``sizes``: its widths and heads, by their fields in config.json. ``dense``: how often a forward runs each kernel
    that works token by token; ``optional`` are those of them that a model may lack. ``expert_layers`` hold
    ``experts`` experts of which a token takes ``experts_per_token``, in the place of a dense MLP.
    """

    name: str
    model_type: str
    layers: int
    sizes: Mapping[str, int]
    dtype_bytes: float
    kv_bytes_per_token: float
    dense: Mapping[str, int]
    optional: frozenset[str]
    expert_layers: int
    experts: int
    experts_per_token: int


def read_config(path: Path) -> ModelShape:
    """A config.json; SpecsimError names the field that is missing or that this import cannot price."""
    text = read_text(path)
    try:
        data = parse_json(text)
    except ValueError as error:
        raise SpecsimError(f"{path}: expected JSON: {error}") from error
    if isinstance(data, dict) and "num_hidden_layers" not in data and isinstance(data.get("text_config"), dict):
        data = data["text_config"]
    if not isinstance(data, dict):
        raise SpecsimError(f"{path}: expected a JSON object, got {json_kind(data)}")
    for field in FOREIGN:
        if data.get(field):
            raise SpecsimError(f"{path}: {field}: is of an architecture whose kernels this import does not know")

    def count(field: str, otherwise: int | None = None) -> int:
        value = data.get(field)
        if value is None and otherwise is not None:
            return otherwise
        return whole(f"{path}: {field}", value)

    layers, hidden, heads = count("num_hidden_layers"), count("hidden_size"), count("num_attention_heads")
    kv_heads, head_dim = count("num_key_value_heads", heads), count("head_dim", hidden // heads)
    dtype = data.get("dtype") or data.get("torch_dtype") or "bfloat16"
    if dtype not in DTYPE_BYTES:
        raise SpecsimError(f"{path}: torch_dtype: expected one of {', '.join(DTYPE_BYTES)}, got {dtype!r}")
    experts = count("num_experts", count("num_local_experts", 0))
    per_token, expert_layers = 0, 0
    if experts:
        per_token = count("num_experts_per_tok")
        step, dense_only = count("decoder_sparse_step", 1), data.get("mlp_only_layers") or []
        if not isinstance(dense_only, list):
            raise SpecsimError(f"{path}: mlp_only_layers: expected a list, got {dense_only!r:.40}")
        expert_layers = sum((i + 1) % step == 0 and i not in dense_only for i in range(layers))
        if per_token > experts:
            raise SpecsimError(f"{path}: num_experts_per_tok: expected at most {experts}, got {per_token}")
    model_type = str(data.get("model_type") or "")
    sizes = {"hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    sizes |= {field: count(field) for field in ("intermediate_size", "vocab_size") if data.get(field)}
    once = dict.fromkeys(("embedding", "final_layernorm"), 1)
    always = dict.fromkeys(("qkv_proj", "qk_norm", "rotary_emb", "o_proj"), layers)
    mlp = dict.fromkeys(("gate_up_proj", "act_fn", "down_proj"), layers - expert_layers)
    return ModelShape(
        name=str(data.get("_name_or_path") or ""),
        model_type=model_type,
        layers=layers,
        sizes=sizes,
        dtype_bytes=DTYPE_BYTES[dtype],
        kv_bytes_per_token=2 * layers * kv_heads * head_dim * DTYPE_BYTES[dtype],
        dense=once | {"layernorm": 2 * layers} | always | (mlp if layers > expert_layers else {}),
        optional=frozenset() if model_type.startswith("qwen3") else frozenset({"qk_norm"}),
        expert_layers=expert_layers,
        experts=experts,
        experts_per_token=per_token,
    )


def check_shards(path: Path, shape: ModelShape, shard: Mapping[str, Any], degrees: Sequence[int]) -> None:
    """Refuse a config with a size that is neither the measured ``shard``'s nor a tensor-parallel degree times it.

    A profiler that runs one shard tells its sizes, not all of which it need have split; two models of one family
    differ there and nowhere else. It tells the layers that it ran too, which say nothing of the model.
    """
    for field, size in shape.sizes.items():
        part = shard.get(field)
        if not isinstance(part, int) or (field == "intermediate_size" and shape.expert_layers):
            continue
        possible = [part * degree for degree in (degrees if field in SHARDED else [])] + [part]
        if size not in possible:
            expected = " or ".join(map(str, dict.fromkeys(possible)))
            raise SpecsimError(
                f"{path}: {field}: expected {expected}, by the shard in meta.yaml, got {size}: another model"
            )


def check_known(path: Path, shape: ModelShape, model: str) -> None:
    """Refuse a config of other layers or widths than ``model``, the one that was measured, is known to have."""
    known = PRESETS.get(_short(model))
    if known is None:
        return
    sizes = {"num_hidden_layers": known.layers, "hidden_size": known.hidden, "num_attention_heads": known.heads,
             "num_key_value_heads": known.kv_heads, "head_dim": known.head_dim}  # fmt: skip
    for field, size in sizes.items():
        got = shape.layers if field == "num_hidden_layers" else shape.sizes[field]
        if got != size:
            raise SpecsimError(f"{path}: {field}: expected {size}, as {model} has, got {got}: another model")


def other_name(path: Path, shape: ModelShape, model: str) -> str | None:
    """A warning where config.json and meta.yaml name two models; None where either names none."""
    if not shape.name or not model or _short(shape.name) == _short(model):
        return None
    return f"{path} names the model {shape.name}, meta.yaml {model}: layers and widths are those of the former."


def _short(model: str) -> str:
    return model.rstrip("/").rsplit("/", 1)[-1].lower()
