"""What DSpark, DFlash and Eagle3 drafters are built of: Qwen3's decoder layer, over a context and a block.

Tensors of a batch of drafting positions are [S, A, ..]: S sequences with A anchors each.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from specsim.drafters.config import DraftConfig


class Norm(nn.Module):
    """RMS norm over the last axis."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding of ``x`` [.., heads, width] at ``positions`` [..], halves paired as in Llama."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = positions[..., None, None].float() * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    left, right = x[..., :half], x[..., half:]
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


class Attention(nn.Module):
    """Grouped-query attention with normed heads; ``inputs`` is the width of what it reads."""

    def __init__(self, config: DraftConfig, inputs: int) -> None:
        super().__init__()
        c, self.config = config, config
        queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = nn.Linear(inputs, queries, bias=False)
        self.k_proj = nn.Linear(inputs, keys, bias=False)
        self.v_proj = nn.Linear(inputs, keys, bias=False)
        self.o_proj = nn.Linear(queries, c.hidden_size, bias=False)
        self.q_norm = Norm(c.head_dim, c.rms_norm_eps)
        self.k_norm = Norm(c.head_dim, c.rms_norm_eps)

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [.., groups, width] of ``x`` [.., inputs] at ``positions`` [..]."""
        shape = (*x.shape[:-1], self.config.num_key_value_heads, self.config.head_dim)
        keys = rotate(self.k_norm(self.k_proj(x).view(shape)), positions, self.config.rope_theta)
        return keys, self.v_proj(x).view(shape)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        context: tuple[Tensor, Tensor],
        visible: Tensor,
        block: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Attend from ``x`` [S, A, n, inputs] at ``positions`` [S, A, n].

        ``context`` keys and values [S, groups, L, width], of which an anchor sees where ``visible``
        [S, A, L]; ``block`` keys and values [S, A, b, groups, width], seen whole by their anchor.
        """
        c = self.config
        s, a, n = positions.shape
        groups, width = c.num_key_value_heads, c.head_dim
        query = self.q_norm(self.q_proj(x).view(s, a, n, c.num_attention_heads, width))
        query = rotate(query, positions, c.rope_theta) * width**-0.5
        # [S, groups, heads of a group, A, n, width]
        query = query.view(s, a, n, groups, -1, width).permute(0, 3, 4, 1, 2, 5)
        per = query.shape[2]
        keys, values = context
        far = (query.reshape(s, groups, -1, width) @ keys.transpose(-1, -2)).view(s, groups, per, a, n, -1)
        far = far.masked_fill(~visible[:, None, None, :, None], float("-inf"))
        own_keys, own_values = (t.permute(0, 3, 1, 2, 4)[:, :, None] for t in block)
        near = query @ own_keys.transpose(-1, -2)
        weights = torch.cat((far, near), -1).softmax(-1, dtype=torch.float32).to(x.dtype)
        length = keys.shape[2]
        out = (weights[..., :length].reshape(s, groups, -1, length) @ values).view(s, groups, per, a, n, width)
        out = out + weights[..., length:] @ own_values
        return self.o_proj(out.permute(0, 3, 4, 1, 2, 5).reshape(s, a, n, -1))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Context:
    """What a drafter keeps of S sequences: for each layer the keys and values of up to ``size`` positions.

    Rows are written at given slots and read up to an anchor's position, so what a later write
    replaces needs no clearing.
    """

    def __init__(self, config: DraftConfig, rows: int, size: int, like: Tensor) -> None:
        shape = (2, rows, config.num_key_value_heads, size, config.head_dim)
        self.layers = [
            torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in range(config.num_hidden_layers)
        ]
        self.states: Tensor | None = None  # [S, size, d], for drafters that start from one
        self.size = size

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put ``keys`` and ``values`` [S, n, groups, width] at ``slots`` [S, n]."""
        store = self.layers[layer]
        rows, groups = (torch.arange(store.shape[i], device=slots.device) for i in (1, 2))
        where = (slice(None), rows[:, None, None], groups[None, :, None], slots[:, None])
        store[where] = torch.stack((keys, values)).transpose(2, 3)

    def keys_values(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [S, groups, size, width] of one layer."""
        return self.layers[layer][0], self.layers[layer][1]

    def part(self, first: int, last: int, size: int) -> Context:
        """Rows ``first`` to ``last`` - 1 and their first ``size`` positions; shares the storage."""
        part = object.__new__(type(self))
        part.layers = [store[:, first:last, :, :size] for store in self.layers]
        part.states = None if self.states is None else self.states[first:last, :size]
        part.size = size
        return part

    def move(self, rows: Tensor, first: int, size: int) -> None:
        """Move ``rows`` to the rows from ``first`` on, with their first ``size`` positions."""
        to = slice(first, first + len(rows))
        for store in self.layers:
            store[:, to, :, :size] = store[:, rows, :, :size]
        if self.states is not None:
            self.states[to, :size] = self.states[rows, :size]


class Trunk(nn.Module):
    """What DSpark and Eagle3 have in common: the target's tables, the way in, decoder layers of ``layer``, the way out.

    ``fc`` folds the states of the target's chosen layers into one; ``embed_tokens`` and ``lm_head`` are the target's.
    """

    def __init__(self, config: DraftConfig, layer: Callable[[DraftConfig], nn.Module]) -> None:
        super().__init__()
        c, self.config = config, config
        self.gamma, self.target_layers = c.gamma, c.target_layer_ids
        self.vocabulary: Tensor | None = None  # int[V'], the target tokens it can propose; None: all
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.lm_head = nn.Linear(c.hidden_size, c.out_size, bias=False)
        self.fc = nn.Linear(len(c.target_layer_ids) * c.hidden_size, c.hidden_size, bias=False)
        self.layers = nn.ModuleList(layer(c) for _ in range(c.num_hidden_layers))
        self.norm = Norm(c.hidden_size, c.rms_norm_eps)

    def context(self, rows: int, size: int) -> Context:
        """An empty context of ``rows`` sequences of up to ``size`` tokens."""
        return Context(self.config, rows, size, self.fc.weight)
