"""What is measured: the points of the grid, and for each of them several sets of inputs."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from specsim.types import Ints, SpecsimError

MOST = 1 << 24
"""The largest size, in tokens."""
SPREAD = 0.25
"""Contexts of a batch lie within this share of their mean."""

Kind = Literal["verify", "chunk", "draft", "sync"]


@dataclass(frozen=True, order=True)
class Point:
    """One size: a ``verify`` of ``tokens`` in ``num_seqs`` sequences that hold ``context`` tokens of KV each.

    ``chunk``: one prefill of ``tokens`` tokens, nothing before it. ``draft``: drafting for ``num_seqs``
    sequences; ``sync``: bringing their confidences to the host (tokens 0 in both).
    """

    kind: Kind
    tokens: int
    num_seqs: int
    context: int

    @property
    def kv_tokens(self) -> int:
        """Tokens of KV cache the step reads."""
        return self.num_seqs * self.context


@dataclass(frozen=True)
class Grid:
    """The sizes that are asked for.

    ``tokens`` in the forward; ``contexts``, of which the first is the reference; ``capture``: sizes of CUDA
    graphs (none: no graphs); ``gamma``: most draft tokens a sequence; ``max_seqs``: most sequences.
    """

    tokens: tuple[int, ...]
    contexts: tuple[int, ...]
    capture: tuple[int, ...]
    gamma: int
    max_seqs: int

    def __post_init__(self) -> None:
        for name in ("tokens", "contexts"):
            if not getattr(self, name):
                raise SpecsimError(f"--{name}: expected at least one size")
        for name in ("tokens", "contexts", "capture"):
            for value in getattr(self, name):
                if not 1 <= value <= MOST:
                    raise SpecsimError(f"--{name}: expected sizes of 1 to {MOST:,}, got {value}")
        for name, most in (("gamma", 64), ("max_seqs", 1 << 16)):
            if not 1 <= getattr(self, name) <= most:
                option = name.replace("_", "-")
                raise SpecsimError(f"--{option}: expected 1 to {most}, got {getattr(self, name)}")

    def padded(self, tokens: int) -> int:
        """Tokens in the forward after padding to the next graph; above the largest as they are."""
        i = bisect_left(self.capture, tokens)
        return self.capture[i] if i < len(self.capture) else tokens

    @property
    def verify_limit(self) -> int:
        """Up to this many tokens a step's price is that of verification, above it that of a prefill's chunk."""
        most = self.max_seqs * (1 + self.gamma)
        return min(most, self.capture[-1]) if self.capture else most

    def points(self) -> list[Point]:
        """All points: the shapes of each size, drafting and the hand-over of confidences.

        A size is verified with blocks of γ + 1 tokens and with single tokens, at every context, and with ragged
        blocks of a length between at the reference context. Above the verify limit, and at the two sizes below it,
        there is also one prefill chunk; above it verification is only checked, with full blocks. Drafting is for as
        many sequences as the largest size holds, at most.
        """
        found: list[Point] = []
        below = [t for t in self.tokens if t <= self.verify_limit][-2:]
        for tokens in self.tokens:
            fewest = -(-tokens // (1 + self.gamma))
            most = min(tokens, self.max_seqs)
            if fewest <= most:
                shapes = {fewest, most} if tokens <= self.verify_limit else {fewest}
                for r in sorted(shapes):
                    # Short of single tokens there are only so many sequences as fit: once is enough.
                    once = r == most < tokens and r != fewest
                    found += [Point("verify", tokens, r, c) for c in self.contexts[: 1 if once else None]]
                middle = round((fewest * most) ** 0.5)
                if middle not in shapes and len(shapes) > 1:
                    found.append(Point("verify", tokens, middle, self.contexts[0]))
            if tokens > self.verify_limit or tokens in below:
                found.append(Point("chunk", tokens, 1, 0))
        most = min(self.max_seqs, max(self.tokens))
        found += [Point("draft", 0, r, self.contexts[0]) for r in sizes_to(most)]
        found.append(Point("sync", 0, min(64, most), 0))
        return found


def sizes_to(most: int) -> list[int]:
    """1, 2, 4, 8, ... and ``most``."""
    powers = itertools.takewhile(lambda n: n < most, (1 << i for i in range(32)))
    return [*powers, most]


def query_lengths(tokens: int, num_seqs: int, gamma: int, rng: np.random.Generator) -> list[int]:
    """Ragged queries: 1 + ℓ tokens a sequence, ℓ from 0 to γ, ``tokens`` in all."""
    drafts = rng.multivariate_hypergeometric([gamma] * num_seqs, tokens - num_seqs, method="marginals")
    return [1 + int(n) for n in drafts]


def context_lengths(num_seqs: int, mean: int, rng: np.random.Generator) -> list[int]:
    """Ragged contexts around ``mean``, at least 1, which they have as their mean exactly."""
    reach = int(SPREAD * mean)
    drawn = rng.integers(-reach, reach + 1, num_seqs)
    # Pairs of opposite offsets keep the total; the odd one out has the mean.
    half = drawn[: num_seqs // 2]
    offsets: Ints = np.concatenate([half, -half, np.zeros(num_seqs % 2, dtype=np.int64)])
    return [mean + int(n) for n in rng.permutation(offsets)]


def longest(point: Point, gamma: int) -> int:
    """Tokens of cache that a sequence of the point may need."""
    if point.kind == "chunk":
        return point.tokens
    return point.context + int(SPREAD * point.context) + 1 + gamma


def check_contexts(points: Sequence[Point], gamma: int, limit: int, name: str) -> None:
    """Raise SpecsimError where a sequence would be longer than the model takes."""
    for point in points:
        if (size := longest(point, gamma)) > limit:
            option, what = ("--tokens", "a chunk") if point.kind == "chunk" else ("--contexts", "a context")
            value = point.tokens if point.kind == "chunk" else point.context
            more = "" if size == value else f" (up to {size} with its spread and queries)"
            raise SpecsimError(f"{option}: {what} of {value} tokens{more} is beyond the {limit} that {name} takes")
