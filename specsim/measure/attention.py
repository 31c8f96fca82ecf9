"""Attention of ragged batches over a KV cache: every sequence with its own number of queries and its own context.

Two ways, chosen by what the device can do: paged (flash attention over variable lengths, pages by a table) and
padded (scaled_dot_product_attention over the batch padded to its longest query and context, with a mask).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specsim.hardware import ModelShape

PAGES = (16, 256)
"""Page sizes to try, in tokens: engines use 16, FlashAttention-2 takes multiples of 256."""


class Lengths(NamedTuple):
    """Query tokens and context tokens of each sequence of a batch.

    ``capacity`` (at least the longest context and its queries) and ``most_queries`` are shared by all batches
    that must fit the same buffers. ``causal=False`` lets the queries of a sequence see each other both ways.
    """

    queries: Sequence[int]
    contexts: Sequence[int]
    capacity: int
    most_queries: int
    causal: bool = True


class PaddedPlan(NamedTuple):
    """Where the tokens of a batch go: ``row`` and ``column`` [B] in the padded queries, ``slot`` [B] in the cache.

    ``mask`` [R, 1, heads that share keys * padded queries, padded context] is added to the scores.
    """

    row: Tensor
    column: Tensor
    slot: Tensor
    mask: Tensor
    shape: tuple[int, int, int]
    """Sequences, padded queries, padded context."""


class PagedPlan(NamedTuple):
    """Where the tokens of a batch go: ``slots`` [layers, N] and ``tables`` [layers, R, pages] in the pool."""

    slots: Tensor
    tables: Tensor
    query_starts: Tensor
    key_starts: Tensor
    used: Tensor
    most_queries: int
    most_keys: int
    causal: bool


Plan = PaddedPlan | PagedPlan


@dataclass(frozen=True)
class PaddedCache:
    """A flat pool of keys and values; each layer of each batch has its own place in it as long as there is room.

    Where there is not, places are used again by later layers: far enough apart to be read from memory.
    """

    pool: Tensor
    heads: int
    kv_heads: int
    head_dim: int
    method = "scaled_dot_product_attention over padded batches, contiguous KV"

    def plan(self, layers: int, lengths: Lengths, padded_tokens: int) -> PaddedPlan:
        """The plan of a batch, on the pool's device. Padding tokens, after the batch's own, take no part."""
        queries, contexts = np.array(lengths.queries), np.array(lengths.contexts)
        row = np.repeat(np.arange(len(queries)), queries)
        column = np.concatenate([np.arange(q) for q in queries])
        at = np.arange(lengths.capacity)
        step = np.arange(lengths.most_queries)
        # A padded query must see something, or its softmax is not a number: it sees what the last one does.
        last = np.minimum(step, queries[:, None] - 1) if lengths.causal else np.broadcast_to(
            queries[:, None] - 1, (len(queries), len(step))
        )  # fmt: skip
        seen = at <= (contexts[:, None] + last)[..., None]
        mask = torch.where(torch.from_numpy(seen), 0.0, -math.inf).to(self.pool)
        device = self.pool.device
        return PaddedPlan(
            row=torch.from_numpy(row).to(device),
            column=torch.from_numpy(column).to(device),
            slot=torch.from_numpy(contexts[row] + column).to(device),
            mask=mask.repeat(1, self.heads // self.kv_heads, 1)[:, None],
            shape=(len(queries), lengths.most_queries, lengths.capacity),
        )

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, plan: PaddedPlan) -> Tensor:
        """Write ``k``, ``v`` [N, kv_heads, d] to the cache, attend from ``q`` [N, heads, d]; returns [N, heads * d]."""
        rows, steps, size = plan.shape
        tokens, heads, width = q.shape
        groups, per = self.kv_heads, heads // self.kv_heads
        keys, values = self._place(layer, rows, size)
        own = len(plan.row)
        keys[plan.row, :, plan.slot] = k[:own]
        values[plan.row, :, plan.slot] = v[:own]
        even = own == rows * steps == tokens
        padded = q if even else q.new_zeros(rows * steps, heads, width)
        if not even:
            padded[plan.row * steps + plan.column] = q[:own]
        # The heads that share keys are queries of one head: [R, groups, heads of a group * queries, d].
        grouped = padded.view(rows, steps, groups, per, width).permute(0, 2, 3, 1, 4).reshape(rows, groups, -1, width)
        out = torch.nn.functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=plan.mask)
        out = out.view(rows, groups, per, steps, width).permute(0, 3, 1, 2, 4).reshape(rows * steps, -1)
        if even:
            return out
        back = out.new_zeros(tokens, heads * width)
        back[:own] = out[plan.row * steps + plan.column]
        return back

    def _place(self, layer: int, rows: int, size: int) -> tuple[Tensor, Tensor]:
        each = rows * self.kv_heads * size * self.head_dim
        places = max(1, self.pool.numel() // (2 * each))
        start = layer % places * 2 * each
        shape = (rows, self.kv_heads, size, self.head_dim)
        part = self.pool[start : start + 2 * each]
        return part[:each].view(shape), part[each:].view(shape)


@dataclass(frozen=True)
class PagedCache:
    """Pages of keys and of values, [pages, page size, kv_heads, d] each; the last page takes what is padding.

    Each layer of a batch has its own pages as long as the pool lasts, and then goes round.
    """

    keys: Tensor
    values: Tensor
    flash: Any
    """torch.nn.attention.varlen.varlen_attn, or what stands for it."""

    @property
    def method(self) -> str:
        """The way attention is done, in words."""
        return f"variable-length flash attention over KV pages of {self.keys.shape[1]} tokens"

    def plan(self, layers: int, lengths: Lengths, padded_tokens: int) -> PagedPlan:
        """The plan of a batch, on the pool's device; ``padded_tokens`` counts the batch's tokens and the padding."""
        page = self.keys.shape[1]
        queries, contexts = np.array(lengths.queries), np.array(lengths.contexts)
        per = -(-lengths.capacity // page)
        usable = self.keys.shape[0] - 1
        table = np.arange(layers * len(queries) * per).reshape(layers, len(queries), per) % usable
        row = np.repeat(np.arange(len(queries)), queries)
        where = contexts[row] + np.concatenate([np.arange(q) for q in queries])
        slots = np.full((layers, padded_tokens), usable * page)
        slots[:, : len(row)] = table[:, row, where // page] * page + where % page
        used = contexts + queries
        device = self.keys.device

        def put(values: Any, dtype: Any = torch.int32) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).to(device, dtype)

        return PagedPlan(
            slots=put(slots, torch.int64),
            tables=put(table),
            query_starts=put(np.append(0, np.cumsum(queries))),
            key_starts=put(np.append(0, np.cumsum(used))),
            used=put(used),
            most_queries=lengths.most_queries,
            most_keys=lengths.capacity,
            causal=lengths.causal,
        )

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, plan: PagedPlan) -> Tensor:
        """Write ``k``, ``v`` [N, kv_heads, d] to the cache, attend from ``q`` [N, heads, d]; returns [N, heads * d]."""
        for pool, new in ((self.keys, k), (self.values, v)):
            pool.view(-1, *pool.shape[2:]).index_copy_(0, plan.slots[layer], new)
        out = self.flash(
            q, self.keys, self.values, plan.query_starts, plan.key_starts, plan.most_queries, plan.most_keys,
            window_size=(-1, 0) if plan.causal else (-1, -1), enable_gqa=True, seqused_k=plan.used,
            block_table=plan.tables[layer],
        )  # fmt: skip
        flat: Tensor = out.reshape(len(q), -1)
        return flat


Cache = PaddedCache | PagedCache


def cache_tokens(layers: int, sequences: int, capacity: int) -> int:
    """Tokens of one layer that a batch takes in all its layers, rounded up to the largest page."""
    page = PAGES[-1]
    return layers * sequences * -(-capacity // page) * page


def make_cache(shape: ModelShape, tokens: int, like: Tensor, generator: Any, method: str | None = None) -> Cache:
    """A cache of ``tokens`` tokens of one layer of ``shape``, of ``like``'s dtype and device, filled at random.

    ``method`` is "padded" or "paged"; None takes paged where it works on this device and agrees with padded.
    """
    size = (tokens, shape.kv_heads, shape.head_dim)
    if method == "padded":
        return PaddedCache(fill(like.new_empty(2 * math.prod(size)), 1.0, generator), *_heads(shape))
    for page in PAGES:
        if (flash := _flash()) is not None and (method == "paged" or _agrees(flash, page, shape, like)):
            pages = (-(-tokens // page) + 1, page, *size[1:])
            keys, values = (fill(like.new_empty(pages), 1.0, generator) for _ in range(2))
            return PagedCache(keys, values, flash)
    return make_cache(shape, tokens, like, generator, "padded")


def fill(tensor: Tensor, scale: float, generator: Any, block: int = 1 << 20) -> Tensor:
    """Fill a tensor, in place, with normal numbers of this scale; a large one repeats a block of them."""
    flat = tensor.view(-1)
    size = min(block, flat.numel())
    flat[:size].normal_(0.0, scale, generator=generator)
    while size < flat.numel():
        more = min(size, flat.numel() - size)
        flat[size : size + more] = flat[:more]
        size += more
    return tensor


def _heads(shape: ModelShape) -> tuple[int, int, int]:
    return shape.heads, shape.kv_heads, shape.head_dim


def _flash() -> Any:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


def _agrees(flash: Any, page: int, shape: ModelShape, like: Tensor) -> bool:
    """Whether paged attention runs on this device and gives what padded attention gives, for a small ragged batch."""
    if like.device.type != "cuda":
        return False
    generator = torch.Generator(like.device).manual_seed(0)
    for lengths in (Lengths((1, 3, 2), (5, 300, 17), 512, 3), Lengths((1, 1), (5, 300), 512, 1)):
        heads = (sum(lengths.queries), shape.heads, shape.head_dim)
        q, k, v = (
            fill(like.new_empty(heads[0], n, shape.head_dim), 1.0, generator)
            for n in (shape.heads, shape.kv_heads, shape.kv_heads)
        )
        pages = like.new_zeros(cache_tokens(1, 3, 512) // page + 1, page, shape.kv_heads, shape.head_dim)
        flat = like.new_zeros(2 * cache_tokens(1, 3, 512) * shape.kv_heads * shape.head_dim)
        paged = PagedCache(pages, pages.clone(), flash)
        padded = PaddedCache(flat, *_heads(shape))
        try:
            one = paged.attend(0, q, k, v, paged.plan(1, lengths, heads[0]))
        except (RuntimeError, TypeError, ValueError):  # this build, device, dtype or page size does not go
            return False
        other = padded.attend(0, q, k, v, padded.plan(1, lengths, heads[0]))
        if not torch.allclose(one.float(), other.float(), atol=0.05, rtol=0.05):
            return False
    return True
