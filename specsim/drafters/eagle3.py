"""Eagle3: one decoder layer drafts token after token, fed with its own hidden state (arXiv 2503.01840).

An MTP head (DeepSeek-V3, arXiv 2412.19437) is the same machine that reads the target's final state
only and is asked for one token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from specsim.drafters.config import DraftConfig
from specsim.drafters.layers import Attention, Context, FeedForward, Norm, Trunk


class Layer(nn.Module):
    """A decoder layer that attends from [token embedding ; hidden state]."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = Norm(size, eps)
        self.hidden_norm = Norm(size, eps)
        self.self_attn = Attention(config, 2 * size)
        self.post_attention_layernorm = Norm(size, eps)
        self.mlp = FeedForward(config)

    def join(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """What attention reads [.., 2d]."""
        return torch.cat((self.input_layernorm(embedding), self.hidden_norm(hidden)), -1)


class Eagle3(Trunk):
    """The drafter. See :mod:`specsim.drafters.draft` for how it is asked to draft."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config, Layer)

    def context(self, rows: int, size: int) -> Context:
        """An empty context of ``rows`` sequences of up to ``size`` tokens."""
        context = super().context(rows, size)
        context.states = self.fc.weight.new_zeros(rows, size, self.config.hidden_size)
        return context

    def read(self, context: Context, tokens: Tensor, hidden: Tensor, slots: Tensor) -> None:
        """Take in the target's states ``hidden`` [S, n, m, d] at ``slots`` [S, n], each paired with the token after it.

        ``tokens`` int[S, n + 1] stand at the slots and the one after the last.
        """
        layer = self.layers[0]
        states = self.fc(hidden.to(self.fc.weight.dtype).flatten(-2))
        joined = layer.join(self.embed_tokens(tokens[:, 1:]), states)
        context.write(0, slots, *layer.self_attn.keys_values(joined, slots))
        assert context.states is not None
        context.states[torch.arange(len(slots), device=slots.device)[:, None], slots] = states

    def block(self, context: Context, anchors: Tensor, positions: Tensor) -> Block:
        """Start blocks after anchors at ``positions`` [S, A], from the state before each."""
        assert context.states is not None
        rows = torch.arange(len(positions), device=positions.device)[:, None]
        visible = torch.arange(context.size, device=positions.device) < positions[..., None] - 1
        return Block(self, context, visible, context.states[rows, positions - 1], positions - 1)


@dataclass
class Block:
    """Blocks in the making: the last ``hidden`` [S, A, d], its position, and keys and values of the block so far."""

    drafter: Eagle3
    context: Context
    visible: Tensor
    hidden: Tensor
    positions: Tensor
    own: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def next(self, before: Tensor) -> tuple[Tensor, None]:
        """Logits [S, A, V'] of the next position after the token ``before`` int[S, A]; no confidence."""
        layer = self.drafter.layers[0]
        joined = layer.join(self.drafter.embed_tokens(before), self.hidden)[:, :, None]
        positions = self.positions[..., None]
        self.own.append(layer.self_attn.keys_values(joined, positions))
        block = tuple(torch.cat(parts, 2) for parts in zip(*self.own, strict=True))
        x = self.hidden + layer.self_attn(joined, positions, self.context.keys_values(0), self.visible, block)[:, :, 0]
        self.hidden = x + layer.mlp(layer.post_attention_layernorm(x))
        self.positions = self.positions + 1
        return self.drafter.lm_head(self.drafter.norm(self.hidden)), None
