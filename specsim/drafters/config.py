"""A drafter's config.json: DeepSpec's keys, and the two that it lacks."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(ge=1, le=2**24)]
AboveZero = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Gamma = Annotated[int, Field(ge=1, le=64)]

DSPARK = "Qwen3DSparkModel"
EAGLE3 = "Qwen3Eagle3Model"


class DraftConfig(BaseModel):
    """The keys of config.json that a drafter is built from; what else stands there is the target's.

    As DeepSpec writes them: ``block_size`` is γ of a DSpark (or DFlash: markov_rank 0) drafter,
    ``ttt_length`` that of an Eagle3; ``target_layer_ids`` count from 0. Two keys are ours:
    ``draft_vocab_size``: the drafter proposes only so many tokens, and the tensor
    ``draft_vocabulary`` int32[draft_vocab_size] says which; ``from_target``: tensors that are left
    out of the file because they are the target's own (embed_tokens, lm_head).
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    architectures: tuple[Literal["Qwen3DSparkModel", "Qwen3Eagle3Model"]]
    hidden_size: Positive
    intermediate_size: Positive
    num_attention_heads: Positive
    num_key_value_heads: Positive
    head_dim: Positive
    num_hidden_layers: Positive
    vocab_size: Positive
    rms_norm_eps: AboveZero = 1e-6
    rope_theta: AboveZero = 10000.0
    num_target_layers: Positive
    target_layer_ids: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]
    block_size: Gamma = 7
    ttt_length: Gamma = 7
    mask_token_id: Annotated[int, Field(ge=0)] = 0
    markov_rank: Annotated[int, Field(ge=0)] = 0
    markov_head_type: Literal["vanilla", "gated", "rnn"] = "vanilla"
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = True
    draft_vocab_size: Positive | None = None
    from_target: tuple[Literal["embed_tokens", "lm_head"], ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _rope(cls, data: Any) -> Any:
        """Old configs have rope_theta at the top, new ones in rope_parameters."""
        if not isinstance(data, dict):
            return data
        rope = data.get("rope_parameters") or data.get("rope_scaling") or {}
        if isinstance(rope, dict):
            kind = rope.get("rope_type", rope.get("type", "default"))
            if kind != "default":
                raise ValueError(f"rope_parameters: rope_type: expected 'default', got {kind!r}")
            if rope.get("rope_theta") is not None:
                data = {**data, "rope_theta": rope["rope_theta"]}
        return data

    @model_validator(mode="after")
    def _consistent(self) -> DraftConfig:
        if max(self.target_layer_ids) >= self.num_target_layers:
            raise ValueError(f"target_layer_ids: expected below num_target_layers = {self.num_target_layers}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads: expected a multiple of num_key_value_heads")
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(f"mask_token_id: expected below vocab_size = {self.vocab_size}")
        return self

    @property
    def gamma(self) -> int:
        """Block length."""
        return self.block_size if self.architectures == (DSPARK,) else self.ttt_length

    @property
    def out_size(self) -> int:
        """How many tokens the drafter can propose."""
        return self.draft_vocab_size or self.vocab_size
