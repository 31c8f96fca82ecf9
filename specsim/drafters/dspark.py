"""DSpark and DFlash: one parallel forward drafts the block, a light sequential head ties its tokens.

Source: DSpark, arXiv 2607.05147; DFlash is the same backbone without the heads (markov_rank 0).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specsim.drafters.config import DraftConfig
from specsim.drafters.layers import Attention, Context, FeedForward, Norm, Trunk


class Layer(nn.Module):
    """A decoder layer whose attention reads the context first and the block's own positions, both ways."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, config.hidden_size)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, positions: Tensor, context: tuple[Tensor, Tensor], visible: Tensor) -> Tensor:
        normed = self.input_layernorm(x)
        block = self.self_attn.keys_values(normed, positions)
        x = x + self.self_attn(normed, positions, context, visible, block)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class MarkovHead(nn.Module):
    """A bias on the logits of position k from the token before it: vanilla, gated by h_k, or an RNN over the block."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        rank, d = config.markov_rank, config.hidden_size
        self.kind = config.markov_head_type
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.out_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(d + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + d, 3 * rank)

    def forward(self, before: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Step once. ``before`` int[..] is the token before, ``hidden`` [.., d] of this position.

        Returns the bias [.., V'], the embedding [.., r] of the token before, and the RNN's next state.
        """
        token = self.markov_w1(before)
        if self.kind == "vanilla":
            return self.markov_w2(token), token, None
        if self.kind == "gated":
            gate = self.gate_proj(torch.cat((hidden, token), -1)).sigmoid()
            return self.markov_w2(gate * token), token, None
        state = torch.zeros_like(token) if state is None else state
        gate, candidate, output = self.joint_proj(torch.cat((state, token, hidden), -1)).chunk(3, -1)
        gate = gate.sigmoid()
        state = gate * state + (1 - gate) * candidate.tanh()
        return self.markov_w2(output.tanh()), token, state


class ConfidenceHead(nn.Module):
    """The logit of a position's chance to survive."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.proj = nn.Linear(inputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.proj(x)[..., 0]
        return out


class DSpark(Trunk):
    """The drafter. See :mod:`specsim.drafters.draft` for how it is asked to draft."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config, Layer)
        c = config
        self.hidden_norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.markov_head = MarkovHead(c) if c.markov_rank else None
        self.confidence_head = None
        if c.enable_confidence_head:
            with_markov = c.markov_rank if c.confidence_head_with_markov else 0
            self.confidence_head = ConfidenceHead(c.hidden_size + with_markov)

    def read(self, context: Context, tokens: Tensor, hidden: Tensor, slots: Tensor) -> None:
        """Take in the target's states ``hidden`` [S, n, m, d] at ``slots`` [S, n]; ``tokens`` are not needed."""
        features = self.hidden_norm(self.fc(hidden.to(self.fc.weight.dtype).flatten(-2)))
        for i, layer in enumerate(self.layers):
            context.write(i, slots, *layer.self_attn.keys_values(features, slots))

    def block(self, context: Context, anchors: Tensor, positions: Tensor) -> Block:
        """Start blocks after ``anchors`` int[S, A] at ``positions`` [S, A], reading the context before them."""
        c = self.config
        # As long as it was trained for, whatever γ is asked of it: masks further on are seen by those before.
        offsets = torch.arange(c.gamma, device=anchors.device)
        tokens = anchors[..., None].expand(*anchors.shape, c.gamma).clone()
        tokens[..., 1:] = c.mask_token_id
        visible = torch.arange(context.size, device=anchors.device) < positions[..., None]
        x = self.embed_tokens(tokens)
        for i, layer in enumerate(self.layers):
            x = layer(x, positions[..., None] + offsets, context.keys_values(i), visible)
        hidden = self.norm(x)
        return Block(self, hidden, self.lm_head(hidden))


@dataclass
class Block:
    """Blocks in the making: ``hidden`` [S, A, γ, d] and ``base`` logits [S, A, γ, V'] of all positions at once."""

    drafter: DSpark
    hidden: Tensor
    base: Tensor
    k: int = 0
    state: Tensor | None = None

    def next(self, before: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits [S, A, V'] of the next position after the token ``before`` int[S, A], and its confidence's logit."""
        hidden, logits = self.hidden[:, :, self.k], self.base[:, :, self.k]
        features = hidden
        if (head := self.drafter.markov_head) is not None:
            bias, token, self.state = head(before, hidden, self.state)
            logits = logits + bias
            if self.drafter.config.confidence_head_with_markov:
                features = torch.cat((hidden, token), -1)
        self.k += 1
        confidence = self.drafter.confidence_head
        return logits, None if confidence is None else confidence(features)
