"""What of a model its step time depends on: widths, layers, heads, experts; from a config.json or a preset."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)  # fmt: skip

from specsim.files import first_error, read_json
from specsim.hardware.shape import Part
from specsim.types import SpecsimError

Width = Annotated[int, Field(ge=1, le=1 << 24)]
Some = Annotated[int, Field(ge=0, le=1 << 24)]
Dtype = Literal["bf16", "fp8"]
BYTES: dict[Dtype, int] = {"bf16": 2, "fp8": 1}
MAX_POSITION = 32768


class ModelShape(Part):
    """A decoder of grouped-query attention and SwiGLU feed-forwards, dense or with experts.

    ``hidden`` is the width of the residual stream, ``intermediate`` that of a dense feed-forward (0: no layer
    has one). Of ``layers``, ``moe_layers`` have ``experts`` of width ``expert_intermediate`` instead, of which
    a token takes ``experts_per_token``, beside shared ones of width ``shared_intermediate`` in all. ``tied``:
    embedding and head are one matrix. ``qk_norm``: the heads of queries and keys are normed; ``max_position``:
    the longest sequence in tokens. These two matter to ``specsim measure`` alone, so a file may lack them.
    """

    name: str = Field(min_length=1)
    hidden: Width
    layers: Width
    heads: Width
    kv_heads: Width
    head_dim: Width
    intermediate: Some
    vocab: Width
    tied: bool = False
    moe_layers: Some = 0
    experts: Some = 0
    experts_per_token: Some = 0
    expert_intermediate: Some = 0
    shared_intermediate: Some = 0
    qk_norm: bool = False
    max_position: Width = MAX_POSITION

    @model_serializer(mode="wrap")
    def _without_defaults(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """What only a measurement needs is left out of the file where it is as usual."""
        usual = {"qk_norm": False, "max_position": MAX_POSITION}
        return {key: value for key, value in write(self).items() if key not in usual or value != usual[key]}

    @model_validator(mode="after")
    def _check(self) -> ModelShape:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads: expected a multiple of the {self.kv_heads} kv_heads, got {self.heads}")
        if self.moe_layers > self.layers:
            raise ValueError(f"moe_layers: expected at most the {self.layers} layers, got {self.moe_layers}")
        if self.moe_layers < self.layers and not self.intermediate:
            raise ValueError("intermediate: expected 1 or more, since some layers have a dense feed-forward")
        if self.moe_layers and not 1 <= self.experts_per_token <= self.experts:
            raise ValueError(
                f"experts_per_token: expected 1 to the {self.experts} experts, got {self.experts_per_token}"
            )
        if self.moe_layers and not self.expert_intermediate:
            raise ValueError("expert_intermediate: expected 1 or more, since some layers have experts")
        return self

    @property
    def layer_parameters(self) -> int:
        """Weights of all layers, norms left out (they are a millionth)."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        moe = self.experts * (3 * self.hidden * self.expert_intermediate + self.hidden)
        moe += 3 * self.hidden * self.shared_intermediate
        dense = 3 * self.hidden * self.intermediate
        return self.layers * attention + self.moe_layers * moe + (self.layers - self.moe_layers) * dense

    @property
    def parameters(self) -> int:
        """Weights of the model, norms left out."""
        return self.layer_parameters + (1 if self.tied else 2) * self.vocab * self.hidden

    def weight_bytes(self, dtype: Dtype = "bf16") -> int:
        """Bytes of all weights; embedding and head stay bf16, as in published FP8 checkpoints."""
        return self.layer_parameters * BYTES[dtype] + (self.parameters - self.layer_parameters) * BYTES["bf16"]

    def kv_bytes_per_token(self, width: int = 2) -> int:
        """Bytes of KV cache that one token takes in all layers, with numbers of ``width`` bytes."""
        return 2 * self.layers * self.kv_heads * self.head_dim * width

    def cut(self, layers: int) -> ModelShape:
        """The same widths in ``layers`` layers, dense ones where the model has any: a drafter's backbone."""
        moe = 0 if self.intermediate else layers
        return self.model_copy(update={"name": f"{self.name}-{layers}-layers", "layers": layers, "moe_layers": moe})

    def describe(self) -> str:
        """The shape in one line."""
        text = f"{self.layers} layers of width {self.hidden}, {self.heads}/{self.kv_heads} heads of {self.head_dim}"
        if self.moe_layers:
            text += f", {self.moe_layers} of them with {self.experts_per_token} of {self.experts} experts a token"
        return f"{text}, {self.parameters / 1e9:.3g} G weights"


def _qwen3(name: str, hidden: int, layers: int, heads: int, intermediate: int, tied: bool = False) -> ModelShape:
    return ModelShape(
        name=name, hidden=hidden, layers=layers, heads=heads, kv_heads=8, head_dim=128, intermediate=intermediate,
        vocab=151936, tied=tied, qk_norm=True, max_position=40960,
    )  # fmt: skip


def _llama3(name: str, hidden: int, layers: int, heads: int, intermediate: int) -> ModelShape:
    return ModelShape(
        name=name, hidden=hidden, layers=layers, heads=heads, kv_heads=8, head_dim=128, intermediate=intermediate,
        vocab=128256, max_position=131072,
    )  # fmt: skip


def _qwen3_moe(name: str, hidden: int, layers: int, heads: int, kv_heads: int, expert: int) -> ModelShape:
    return ModelShape(
        name=name, hidden=hidden, layers=layers, heads=heads, kv_heads=kv_heads, head_dim=128, intermediate=0,
        vocab=151936, moe_layers=layers, experts=128, experts_per_token=8, expert_intermediate=expert,
        qk_norm=True, max_position=40960,
    )  # fmt: skip


# From each model's public config.json (Qwen/Qwen3-*, meta-llama/Llama-3.1-*, mistralai/Mixtral-8x7B-v0.1,
# HuggingFaceTB/SmolLM2-135M).
PRESETS = {
    shape.name: shape
    for shape in (
        _qwen3("qwen3-4b", 2560, 36, 32, 9728, tied=True),
        _qwen3("qwen3-8b", 4096, 36, 32, 12288),
        _qwen3("qwen3-14b", 5120, 40, 40, 17408),
        _qwen3("qwen3-32b", 5120, 64, 64, 25600),
        _qwen3_moe("qwen3-30b-a3b", 2048, 48, 32, 4, 768),
        _qwen3_moe("qwen3-235b-a22b", 4096, 94, 64, 4, 1536),
        _llama3("llama-3.1-8b", 4096, 32, 32, 14336),
        _llama3("llama-3.1-70b", 8192, 80, 64, 28672),
        ModelShape(
            name="mixtral-8x7b", hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, intermediate=0,
            vocab=32000, moe_layers=32, experts=8, experts_per_token=2, expert_intermediate=14336,
        ),
        ModelShape(
            name="smollm2-135m", hidden=576, layers=30, heads=9, kv_heads=3, head_dim=64, intermediate=1536,
            vocab=49152, tied=True, max_position=8192,
        ),
    )
}  # fmt: skip

DENSE_PRESETS = tuple(name for name, shape in PRESETS.items() if not shape.moe_layers)
"""Those that can be measured, too."""

DENSE = ("llama", "mistral", "qwen2", "qwen3")
QK_NORM = ("qwen3", "qwen3_moe")
MOE = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "glm4_moe")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
UNLIKE = {
    "kv_lora_rank": "latent attention (MLA)",
    "text_config": "a multimodal model",
    "full_attention_interval": "a hybrid of full and linear attention",
    "hybrid_override_pattern": "a hybrid of attention and state-space layers",
    "mamba_d_state": "state-space layers",
    "attn_layer_period": "a hybrid of attention and state-space layers",
    "is_encoder_decoder": "an encoder and a decoder",
}
"""Keys that name what this shape does not describe."""


class _Config(BaseModel):
    """What is read of a Hugging Face config.json; the rest is in ``model_extra``."""

    model_config = ConfigDict(extra="allow", strict=True)

    model_type: str
    hidden_size: Width
    num_hidden_layers: Width
    num_attention_heads: Width
    num_key_value_heads: Width | None = None
    head_dim: Width | None = None
    intermediate_size: Width
    vocab_size: Width
    tie_word_embeddings: bool = False
    moe_intermediate_size: Width | None = None
    num_experts: Width | None = None
    num_local_experts: Width | None = None
    n_routed_experts: Width | None = None
    num_experts_per_tok: Width | None = None
    shared_expert_intermediate_size: Some | None = None
    n_shared_experts: Some | None = None
    decoder_sparse_step: Width = 1
    first_k_dense_replace: Some = 0
    mlp_only_layers: list[int] | None = None
    max_position_embeddings: Width = MAX_POSITION


def find_model(model: str, weights: Dtype | None = None, presets: Sequence[str] = tuple(PRESETS)) -> ModelShape:
    """The shape of ``model``: a preset's name, a config.json or a folder with one.

    Raises SpecsimError for an unknown name (it lists ``presets``), a missing field, a model that the shape does not
    describe (latent attention, sliding windows, hybrids, several modalities), and, with ``weights``, a config.json
    of quantized weights of another format.
    """
    if preset := PRESETS.get(model.lower()):
        return preset
    path = Path(model)
    if path.is_dir():
        path /= "config.json"
        if not path.exists():
            raise SpecsimError(f"--model: the folder {model!r} holds no config.json")
    if not path.exists() and path.suffix != ".json":
        near = difflib.get_close_matches(model.lower(), presets, 1)
        hint = f", did you mean {near[0]}?" if near else ""
        raise SpecsimError(f"--model: {model!r}: expected one of {', '.join(presets)} or a config.json{hint}")
    shape = read_model(path)
    if weights is not None:
        _check_weights(path, weights)
    return shape


def read_model(path: Path) -> ModelShape:
    """The shape in a Hugging Face config.json; SpecsimError says what in it is missing or not described."""
    config = read_json(path, _Config)
    more = config.model_extra or {}
    _refuse_unlike(path, config, more)
    hidden, heads = config.hidden_size, config.num_attention_heads
    if config.head_dim is None and hidden % heads:
        raise SpecsimError(f"{path}: num_attention_heads: expected a divisor of {hidden}, got {heads}")
    own_name = str(more.get("_name_or_path") or "").rstrip("/").rpartition("/")[2]
    key, experts = next(((key, count) for key in EXPERTS if (count := getattr(config, key))), (EXPERTS[0], 0))
    if experts > 1 and config.model_type in DENSE:
        raise SpecsimError(f"{path}: {key}: expected none with model_type {config.model_type!r}, got {experts}")
    if not experts and config.model_type in MOE:
        raise SpecsimError(f"{path}: {key}: is missing, expected it with model_type {config.model_type!r}")
    moe_layers = _moe_layers(config) if config.model_type in MOE else 0
    if moe_layers and config.num_experts_per_tok is None:
        raise SpecsimError(f"{path}: num_experts_per_tok: is missing")
    # Where experts have no width of their own in the file, intermediate_size is theirs.
    width = config.moe_intermediate_size or config.intermediate_size
    shared = config.shared_expert_intermediate_size or (config.n_shared_experts or 0) * width
    fields: dict[str, Any] = {
        "name": own_name or (path.absolute().parent.name if path.name == "config.json" else path.stem),
        "hidden": hidden,
        "layers": config.num_hidden_layers,
        "heads": heads,
        "kv_heads": config.num_key_value_heads or heads,
        "head_dim": config.head_dim or hidden // heads,
        "intermediate": config.intermediate_size if moe_layers < config.num_hidden_layers else 0,
        "vocab": config.vocab_size,
        "tied": config.tie_word_embeddings,
        "qk_norm": config.model_type in QK_NORM,
        "max_position": config.max_position_embeddings,
    }
    if moe_layers:
        fields |= {
            "moe_layers": moe_layers,
            "experts": experts,
            "experts_per_token": config.num_experts_per_tok,
            "expert_intermediate": width,
            "shared_intermediate": shared,
        }
    try:
        return ModelShape(**fields)
    except ValidationError as error:
        raise SpecsimError(f"{path}: {first_error(error)}") from error


def _refuse_unlike(path: Path, config: _Config, more: dict[str, Any]) -> None:
    for key, what in UNLIKE.items():
        if more.get(key):
            raise SpecsimError(f"{path}: {key}: {what} is not described, expected grouped-query attention throughout")
    listed = [] if more.get("layer_types") is None else more["layer_types"]
    if not isinstance(listed, list):
        raise SpecsimError(f"{path}: layer_types: expected a list of each layer's attention, got {listed!r:.40}")
    kinds = {str(kind) for kind in listed} - {"full_attention"}
    if kinds:
        raise SpecsimError(
            f"{path}: layer_types: expected full_attention throughout, got {', '.join(sorted(kinds))} too"
        )
    window = more.get("sliding_window")
    if window and more.get("use_sliding_window", True):
        raise SpecsimError(f"{path}: sliding_window: expected none (attention over the whole context), got {window}")
    if config.model_type not in (*DENSE, *MOE):
        raise SpecsimError(
            f"{path}: model_type: expected one of {', '.join((*DENSE, *MOE))}, got {config.model_type!r}"
        )


def _check_weights(path: Path, weights: Dtype) -> None:
    """Refuse a config.json of quantized weights, unless they are fp8 and ``weights`` says so too."""
    more = read_json(path, _Config).model_extra or {}
    # compressed-tensors wrote the second name at first.
    field = next((name for name in ("quantization_config", "compression_config") if more.get(name)), None)
    if field is None:
        return
    given = more[field]
    told: dict[str, Any] = given if isinstance(given, dict) else {}
    method = str(told.get("quant_method") or "quantized")
    algorithm = str(told.get("quant_algo") or "")  # modelopt
    groups = told.get("config_groups")  # compressed-tensors
    parts = [g.get("weights") for g in groups.values() if isinstance(g, dict)] if isinstance(groups, dict) else []
    formats = {f"{p.get('num_bits')} bits, {p.get('type')}" for p in parts if isinstance(p, dict)}
    if method not in ("fp8", "fbgemm_fp8") and algorithm != "FP8" and formats != {"8 bits, float"}:
        bits = "4" if told.get("load_in_4bit") else told.get("bits")
        told_more = algorithm or "; ".join(sorted(formats)) or (f"{bits} bits" if bits else "")
        what = f"{method} ({told_more})" if told_more else method
        raise SpecsimError(f"{path}: {field}: {what} is not described, expected bf16 or fp8 weights")
    if weights != "fp8":
        raise SpecsimError(f"{path}: {field}: its weights are fp8, expected --dtype fp8, got {weights}")


def _moe_layers(config: _Config) -> int:
    """Layers with experts: every ``decoder_sparse_step``-th from ``first_k_dense_replace`` on, less those listed."""
    dense = set(config.mlp_only_layers or ())
    layers = range(config.first_k_dense_replace, config.num_hidden_layers)
    return sum((i + 1) % config.decoder_sparse_step == 0 for i in layers if i not in dense)


def kv_bytes_on_gpu(model: ModelShape, dtype: Dtype, tp: int) -> int:
    """KV bytes of a token on each of ``tp`` GPUs; with more GPUs than KV heads, each holds a whole head."""
    return model.kv_bytes_per_token(BYTES[dtype]) * math.ceil(model.kv_heads / tp) // model.kv_heads
