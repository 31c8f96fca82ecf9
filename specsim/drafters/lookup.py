"""Drafters without weights of their own: prompt lookup, and a small language model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specsim.drafters.target import KVCache, Target
from specsim.types import SpecsimError


@dataclass
class PromptLookup:
    """Propose what followed the last occurrence of the last tokens (prompt lookup, as vLLM's ngram method).

    Of the suffixes of ``longest`` down to ``shortest`` tokens the first that occurs before is
    continued, from its latest occurrence; where none does, nothing is proposed.
    """

    vocab_size: int
    gamma: int = 7
    longest: int = 4
    shortest: int = 2
    target_layers: tuple[int, ...] = ()
    vocabulary: Tensor | None = None

    def context(self, rows: int, size: int) -> Text:
        """The tokens of ``rows`` sequences."""
        return Text(torch.full((rows, size + 1), -1))

    def read(self, context: Text, tokens: Tensor, hidden: Tensor | None, slots: Tensor) -> None:
        """Take in tokens; no states are needed."""
        rows = torch.arange(len(slots))[:, None]
        context.tokens[rows, slots.cpu()] = tokens[:, :-1].cpu()
        context.tokens[rows, slots.cpu() + 1] = tokens[:, 1:].cpu()

    def block(self, context: Text, anchors: Tensor, positions: Tensor) -> LookupBlocks:
        """Look up each anchor's suffix."""
        found = torch.full((*anchors.shape, self.gamma), -1)
        for row in range(len(anchors)):
            text = context.tokens[row].tolist()
            for a, (anchor, position) in enumerate(zip(anchors[row].tolist(), positions[row].tolist(), strict=True)):
                continued = self._continuation([*text[:position], anchor])
                found[row, a, : len(continued)] = torch.tensor(continued, dtype=torch.long)
        return LookupBlocks(found.to(anchors.device), self.vocab_size)

    def _continuation(self, text: list[int]) -> list[int]:
        for size in range(min(self.longest, len(text) - 1), self.shortest - 1, -1):
            suffix = text[-size:]
            for start in range(len(text) - size - 1, -1, -1):
                if text[start : start + size] == suffix:
                    return text[start + size : start + size + self.gamma]
        return []


@dataclass
class Text:
    """``tokens`` int[S, size + 1], -1 where nothing is known yet."""

    tokens: Tensor

    def part(self, first: int, last: int, size: int) -> Text:
        """Rows ``first`` to ``last`` - 1 and their first ``size`` tokens and the next; shares the storage."""
        return Text(self.tokens[first:last, : size + 1])

    def move(self, rows: Tensor, first: int, size: int) -> None:
        """Move ``rows`` to the rows from ``first`` on."""
        self.tokens[first : first + len(rows)] = self.tokens[rows.cpu()]


@dataclass
class LookupBlocks:
    """``found`` int[S, A, γ]: the tokens to propose, -1 past the last."""

    found: Tensor
    vocab_size: int
    k: int = 0

    def next(self, before: Tensor) -> tuple[Tensor, None]:
        """Logits: all the mass on the proposal; all -inf where there is none."""
        token = self.found[..., self.k]
        self.k += 1
        logits = torch.full((*token.shape, self.vocab_size), float("-inf"), device=token.device)
        logits.scatter_(-1, token.clamp(min=0)[..., None], torch.where(token >= 0, 0.0, float("-inf"))[..., None])
        return logits, None


@dataclass
class NoDrafter:
    """Drafts nothing, for targets without speculation: it is shown texts and never asked."""

    gamma: int = 0
    target_layers: tuple[int, ...] = ()
    vocabulary: Tensor | None = None

    def context(self, rows: int, size: int) -> NoDrafter:
        """Nothing to remember."""
        return self

    def part(self, first: int, last: int, size: int) -> NoDrafter:
        """Nothing to share."""
        return self

    def move(self, rows: Tensor, first: int, size: int) -> None:
        """Nothing to move."""

    def read(self, context: NoDrafter, tokens: Tensor, hidden: Tensor | None, slots: Tensor) -> None:
        """Nothing to take in."""

    def block(self, context: NoDrafter, anchors: Tensor, positions: Tensor) -> LookupBlocks:
        """Blocks of no tokens."""
        return LookupBlocks(anchors[..., None][..., :0], 0)


@dataclass
class SmallModel:
    """A small causal LM of the same vocabulary as drafter."""

    model: Target
    gamma: int = 7
    target_layers: tuple[int, ...] = ()
    vocabulary: Tensor | None = None

    def context(self, rows: int, size: int) -> KVCache:
        """The small model's KV cache, with ``size`` slots a row."""
        return KVCache(self.model, rows, size)

    def read(self, context: KVCache, tokens: Tensor, hidden: Tensor | None, slots: Tensor) -> None:
        """Run the small model over ``tokens`` but the last."""
        context.lengths = slots[:, 0].clone()
        self.model.forward(tokens[:, :-1], context)

    def block(self, context: KVCache, anchors: Tensor, positions: Tensor) -> ModelBlocks:
        """Blocks of all anchors, side by side behind the context."""
        return ModelBlocks(self.model, context, positions)


@dataclass
class ModelBlocks:
    """Each step appends a token an anchor to a copy of the cache; an anchor sees the context before it and its own."""

    model: Target
    context: KVCache
    positions: Tensor
    cache: KVCache | None = None
    steps: list[Any] = field(default_factory=list)

    def next(self, before: Tensor) -> tuple[Tensor, None]:
        """Logits [S, A, V] after ``before`` int[S, A]."""
        s, a = before.shape
        size = self.context.store.shape[4]
        if self.cache is None:
            self.cache = self.context.widened(8 * a)
        k = len(self.steps)
        if (k + 1) * a + size > self.cache.store.shape[4]:
            self.cache = self.cache.widened(8 * a)
        slots = (size + k * a + torch.arange(a, device=before.device)).expand(s, a)
        far = torch.arange(size, device=before.device) < self.positions[..., None]
        own = torch.eye(a, dtype=torch.bool, device=before.device).repeat(1, k + 1).expand(s, a, -1)
        self.steps.append(before)
        hidden, _ = self.model.forward(
            before, self.cache, positions=self.positions + k, slots=slots, mask=torch.cat((far, own), -1)
        )
        return hidden @ self.model.head.T, None


def check_vocabulary(target: Target, model: Target) -> None:
    """Raise SpecsimError unless the two models have one vocabulary."""
    if target.vocab_size != model.vocab_size:
        raise SpecsimError(
            f"drafter {model.name}: vocab_size: expected {target.vocab_size} as target {target.name}, "
            f"got {model.vocab_size}"
        )
