"""The shape of a dense decoder: what its step time depends on, from a preset, a config.json or flags."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from pydantic import BaseModel, ConfigDict

from specsim.files import read_json
from specsim.hardware.model_shape import PRESETS as KNOWN
from specsim.hardware.model_shape import config_path, head_width, short_name
from specsim.types import SpecsimError

QK_NORM = {"llama": False, "mistral": False, "qwen2": False, "qwen3": True}
"""Model types that this decoder stands for, and whether they norm the heads of queries and keys."""


@dataclass(frozen=True)
class ModelShape:
    """A decoder of RMS norms, rotary positions, grouped-query attention and SwiGLU.

    ``hidden`` is the width, ``intermediate`` that of the feed-forward, ``max_position`` the longest sequence
    in tokens; ``tied`` means that embedding and head are one matrix. Raises SpecsimError where no such model is.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool = False
    qk_norm: bool = False
    max_position: int = 32768

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in ("name", "tied", "qk_norm") and not 1 <= value <= 1 << 24:
                raise SpecsimError(f"model {self.name}: {field.name}: expected 1 to {1 << 24}, got {value}")
        if self.heads % self.kv_heads:
            raise SpecsimError(
                f"model {self.name}: heads: expected a multiple of the {self.kv_heads} kv_heads, got {self.heads}"
            )
        if self.head_dim % 2:
            raise SpecsimError(f"model {self.name}: head_dim: expected an even number, got {self.head_dim}")

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer, norms left out."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def parameters(self) -> int:
        """Weights of the model, norms left out."""
        return self.layers * self.layer_parameters + (1 if self.tied else 2) * self.vocab * self.hidden

    def kv_bytes_per_token(self, width: int) -> int:
        """Bytes of KV cache a token takes, with numbers of ``width`` bytes."""
        return 2 * self.layers * self.kv_heads * self.head_dim * width


def _preset(name: str, qk_norm: bool, max_position: int) -> ModelShape:
    """A preset of the roofline's, with what its public config.json says besides."""
    m = KNOWN[name]
    return ModelShape(
        name, m.hidden, m.layers, m.heads, m.kv_heads, m.head_dim, m.intermediate, m.vocab, m.tied, qk_norm,
        max_position,
    )  # fmt: skip


PRESETS = {
    shape.name: shape
    for shape in (
        *(_preset(f"qwen3-{size}", True, 40960) for size in ("4b", "8b", "14b", "32b")),
        _preset("llama-3.1-8b", False, 131072),
        ModelShape("smollm2-135m", 576, 30, 9, 3, 64, 1536, 49152, True, False, 8192),
    )
}


class _Config(BaseModel):
    """What is read of a Hugging Face config.json."""

    model_config = ConfigDict(extra="allow", strict=True)

    model_type: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool = False
    max_position_embeddings: int


def find_shape(model: str | None, **given: int | bool | None) -> ModelShape:
    """The shape of ``model``: a preset, a config.json or a folder with one; None: of the ``given`` fields alone.

    Fields that are given (not None) replace the model's. Raises SpecsimError for an unknown model, one that is
    no dense decoder like Llama or Qwen3, a missing field or an impossible shape.
    """
    set_ = {name: value for name, value in given.items() if value is not None}
    if model is None:
        known = {field.name for field in fields(ModelShape) if field.name not in ("name", *_OPTIONAL)}
        if missing := sorted(known - set(set_)):
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
            raise SpecsimError(f"--model: expected a preset ({', '.join(PRESETS)}), a config.json, or also {flags}")
        return ModelShape(name="custom", **set_)  # type: ignore[arg-type]
    shape = PRESETS.get(model.lower()) or _read(model)
    return replace(shape, name=f"{shape.name}-changed", **set_) if set_ else shape  # type: ignore[arg-type]


_OPTIONAL = ("tied", "qk_norm", "max_position")


def describe(shape: ModelShape) -> dict[str, Any]:
    """The shape as plain data, for a log."""
    return asdict(shape) | {"parameters": shape.parameters}


def _read(model: str) -> ModelShape:
    path = config_path(model, PRESETS)
    config = read_json(path, _Config)
    more = config.model_extra or {}
    experts = next((k for k, v in more.items() if "expert" in k and isinstance(v, int) and v > 1), None)
    if experts or "moe" in config.model_type:
        what = f"{experts}: {more[experts]}" if experts else f"model_type: {config.model_type!r}"
        raise SpecsimError(f"{path}: {what}: a mixture of experts cannot be measured, expected a dense model")
    if config.model_type not in QK_NORM:
        raise SpecsimError(f"{path}: model_type: expected one of {', '.join(QK_NORM)}, got {config.model_type!r}")
    heads = config.num_attention_heads
    head_dim = config.head_dim or head_width(path, config.hidden_size, heads)
    return ModelShape(
        name=short_name(path, more.get("_name_or_path")),
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=config.num_key_value_heads or heads,
        head_dim=head_dim,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size,
        tied=config.tie_word_embeddings,
        qk_norm=QK_NORM[config.model_type],
        max_position=config.max_position_embeddings,
    )
