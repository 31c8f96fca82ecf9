"""Small speculative decoders that can be worked out to the last text: their tables, and what verification does.

A text of n tokens is one number, its tokens read as digits; a state is what a request has put out so far, and states
are numbered by length, then by text. All tables are exact: no sampling, no logits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specsim.audit.sizes import MOST_WHOLE, Size

Array = NDArray[np.floating[Any]]
Tables = tuple[Array, ...]
Confidence = Literal["head", "draft_prob"]
CONFIDENCES = ("head", "draft_prob")
TABLES = ("target", "drafter", "confidence")
PROMPT_TOKENS = 2000
"""Prompt tokens that last as long as a step of one token."""
CHUNKS = (1, 3, 8, 64, 200, 512, 2048, 8192)
IDS = ((0, 1), (0, 1), (1, 0), (3, 8), (12, 5), (4000, 4001))
"""Names of the requests, in the order of the batch: that of joining it, which need not be that of arrival."""


@dataclass(frozen=True)
class Decoder:
    """One request's target and drafter, vocabulary V, blocks of γ, and the first N tokens of its output.

    ``target[n]`` [V^n, V]: the next token after n tokens of output, n = 0..N-1. ``drafter[k]`` [A, V^k, V]: draft token
    k + 1 after k of them. ``confidence[k]`` [A, V^(k+1)]: what the scheduler is told of draft token k + 1 of a block
    that begins with these k + 1; a head's is the same whatever the last of them is. A = V: drafter and confidence also
    depend on the last token put out; A = 1: they do not.
    """

    target: Tables
    drafter: Tables
    confidence: Tables

    @property
    def vocabulary(self) -> int:
        """V."""
        return int(self.target[0].shape[1])

    @property
    def gamma(self) -> int:
        """γ."""
        return len(self.drafter)

    @property
    def length(self) -> int:
        """N."""
        return len(self.target)

    @cached_property
    def first(self) -> list[int]:
        """Number of the first state of each length 0..N, and the number of states."""
        return [0, *itertools.accumulate(self.vocabulary**n for n in range(self.length + 1))]

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens put out in each state."""
        return np.repeat(np.arange(self.length + 1), np.diff(self.first))

    @cached_property
    def anchors(self) -> NDArray[np.int64]:
        """For each state the row of the drafter's tables: 0 at the start, -1 where all N tokens are out."""
        text = np.arange(self.first[-1]) - np.array(self.first)[self.lengths]
        rows = text % self.vocabulary if len(self.drafter[0]) > 1 else np.zeros_like(text)
        return np.where(self.lengths == self.length, -1, rows)

    @cached_property
    def chances(self) -> Array:
        """The chance [A, V^γ] of each block of γ drafts."""
        chance = np.ones((len(self.drafter[0]), 1))
        for table in self.drafter:
            chance = (chance[:, :, None] * table).reshape(len(chance), -1)
        return chance

    @cached_property
    def shown(self) -> Array:
        """The confidences [A, V^γ, γ] that go with each block."""
        blocks = np.arange(self.vocabulary**self.gamma)
        shown = [table[:, blocks // self.vocabulary ** (self.gamma - k - 1)] for k, table in enumerate(self.confidence)]
        return np.ascontiguousarray(np.stack(shown, axis=2))

    @cached_property
    def kinds(self) -> list[dict[bytes, list[int]]]:
        """For each anchor the blocks that may be drafted, by the confidences (as bytes) that go with them."""
        found: list[dict[bytes, list[int]]] = []
        for chance, shown in zip(self.chances, self.shown, strict=True):
            blocks: dict[bytes, list[int]] = {}
            for block in np.flatnonzero(chance).tolist():
                blocks.setdefault(shown[block].tobytes(), []).append(block)
            found.append(blocks)
        return found

    @cached_property
    def _verified(self) -> dict[int, Array]:
        return {}

    def verified(self, state: int) -> Array:
        """Where ``state`` goes if a block of kind u is drafted and l tokens verified: chances [kinds, γ + 1, below].

        What lies below a state, itself included, is numbered as states are, from it on (``below`` has their numbers).
        The chances of the blocks of a kind, each times the chance that it is drafted, are added up: a scheduler that
        sees confidences alone cannot tell them apart.
        """
        if state not in self._verified:
            kinds = self.kinds[self.anchors[state]]
            each = self.verify(state)
            member = np.zeros((len(kinds), len(each)))
            for kind, blocks in enumerate(kinds.values()):
                member[kind, blocks] = 1.0
            self._verified[state] = (member @ each.reshape(len(each), -1)).reshape(-1, *each.shape[1:])
        return self._verified[state]

    def below(self, state: int) -> NDArray[np.int64]:
        """The states that ``state`` may go to in a step, as ``verified`` numbers them."""
        v, n = self.vocabulary, int(self.lengths[state])
        text = state - self.first[n]
        depths = range(min(self.gamma + 1, self.length - n) + 1)
        return np.concatenate([self.first[n + d] + text * v**d + np.arange(v**d) for d in depths])

    def verify(self, state: int) -> Array:
        """Where ``state`` goes if block d is drafted and l of its tokens verified: chances [V^γ, γ + 1, below].

        Rejection sampling: draft token x is kept with min(1, p(x)/q(x)); in the place of the first that is not, a token
        is drawn from (p - q)+, and after the last if all are kept, from p. Multiplied by the chance that d is drafted.
        """
        v, gamma, n = self.vocabulary, self.gamma, int(self.lengths[state])
        anchor, text = int(self.anchors[state]), state - self.first[n]
        blocks = np.arange(v**gamma)
        rows, tokens = blocks[:, None], np.arange(v)
        below = self.first[min(gamma + 1, self.length - n) + 1]
        out = np.zeros((len(blocks), gamma + 1, below))
        ended = np.zeros((len(blocks), below))  # by a rejection before the last verified token
        reach = self.chances[anchor].copy()  # that the block is drafted and all its tokens so far are kept
        for k in range(gamma + 1):
            before = blocks // v ** (gamma - k)  # the first k drafts
            if n + k == self.length:  # all N tokens are out: what is verified beyond makes no difference
                ended[blocks, self.first[k] + before] += reach
                out[:, k:] = ended[:, None]
                break
            p = self.target[n + k][text * v**k + before]
            to = (self.first[k + 1] + before * v)[:, None] + tokens
            out[:, k] = ended
            out[rows, k, to] += reach[:, None] * p
            if k < gamma:
                q = self.drafter[k][anchor][before]
                x = blocks // v ** (gamma - k - 1) % v
                px, qx = p[blocks, x], q[blocks, x]
                keep = np.minimum(np.divide(px, qx, out=np.ones_like(px), where=qx > 0), 1.0)
                rest = np.maximum(p - q, 0.0)
                total = rest.sum(axis=1, keepdims=True)
                rest = np.divide(rest, total, out=np.zeros_like(rest), where=total > 0)
                ended[rows, to] += (reach * (1 - keep))[:, None] * rest
                reach = reach * keep
        return out

    def finished(self, mass: Array) -> Array:
        """The law [V^N, ...] of the first N tokens if the target goes on alone from ``mass`` [states, ...]."""
        going = mass[:1]
        for n, table in enumerate(self.target):
            shape = (-1,) + (1,) * (mass.ndim - 1)
            going = np.repeat(going, self.vocabulary, axis=0) * table.reshape(shape)
            going = going + mass[self.first[n + 1] : self.first[n + 2]]
        return going


class Prompts(NamedTuple):
    """Prompts beside the decodes of a step: ``tokens`` of them, with ``ending`` chunks that end theirs, 0..tokens.

    ``before``: whether some were computed in steps without decodes since the last view.
    """

    tokens: int = 0
    ending: int = 0
    before: bool = False


@dataclass(frozen=True)
class Instance:
    """What a scheduler is put into: one or two decoders, and what it is told besides.

    ``seconds[b - 1]`` is what a step of b tokens lasts, b = 1..R(γ+1). ``present`` bool [steps][R]: who decodes in
    which step, if it is not done. ``prompts`` [steps]: those in each step. ``ids`` [2]: the requests' names.
    """

    decoders: tuple[Decoder, ...]
    seconds: Array
    present: tuple[tuple[bool, ...], ...]
    prompts: tuple[Prompts, ...]
    confidence: Confidence
    ids: tuple[int, int] = (0, 1)

    @property
    def steps(self) -> int:
        """Steps before the target goes on alone."""
        return len(self.present)

    def price(self, requests: int, prompt_tokens: int) -> Array:
        """Seconds of a step of ``requests`` with 0, 1, .. Rγ drafts, float [Rγ + 1]; prompts make it dearer."""
        plain: Array = self.seconds[requests - 1 : requests * (self.decoders[0].gamma + 1)]
        return np.asarray(plain + self.seconds[0] * prompt_tokens / PROMPT_TOKENS)


def from_drafter(decoder: Decoder, confidence: Confidence) -> Decoder:
    """``decoder`` as it stands, or with the drafter's chance of each draft token as its confidence."""
    if confidence == "head":
        return decoder
    return replace(decoder, confidence=tuple(table.reshape(len(table), -1) for table in decoder.drafter))


def of_head(tables: Sequence[Array], vocabulary: int) -> Tables:
    """Confidences [A, V^(k+1)] from a head's [A, V^k]: they do not depend on the token that they are about."""
    return tuple(np.repeat(table, vocabulary, axis=1) for table in tables)


# Instances of plain numbers: what a counterexample should look like

TARGETS = {2: (0.7, 0.3), 3: (0.5, 0.3, 0.2)}
HEADS = (0.9, 0.0, 0.5, 1.0, 0.7, 0.3, 0.8, 0.2, 0.1)
DRAFTS = (0.8, 0.5, 0.2, 0.9, 0.6, 0.4, 0.95, 0.7, 0.3, 0.99, 1.0)
FIRST_HEADS = (0.8, 0.5, 0.9, 0.2, 1.0, 0.0, 0.6, 0.95, 0.1)


def sps_shapes(requests: int, gamma: int) -> list[Array]:
    """Step seconds [R(γ+1)] of plain curves: a cliff, flat, a line, stairs, a steeper line."""
    free, drafts = [1.0] * (requests - 1), np.arange(requests * gamma + 1)
    shapes = (
        np.r_[1.0, 2.0 / 0.9 ** np.arange(requests * gamma)],  # the first draft halves SPS, others take a tenth each
        np.ones(len(drafts)),
        1 + 0.25 * drafts,
        np.where(drafts > 0, np.ceil((drafts + 1) / 2), 1.0),
        1 + 1.0 * drafts,
    )
    return [np.r_[free, shape] for shape in shapes]


def plain(size: Size, confidence: Confidence) -> Iterator[Instance]:
    """Instances of round numbers: the same target everywhere, and tables of a few levels in all combinations."""
    v, gamma = size.vocabulary, size.gamma
    target = tuple(np.tile(TARGETS[v], (v**n, 1)) for n in range(size.length))
    entries = [v**k for k in range(gamma)] * size.requests
    levels = [DRAFTS if confidence == "draft_prob" else HEADS if n > 1 else FIRST_HEADS for n in entries]
    each = [chosen for chosen, n in zip(levels, entries, strict=True) for _ in range(n)]
    for values in _plainest_first(each):
        parts = iter(values)
        decoders = []
        for _ in range(size.requests):
            tables = [np.array([[next(parts) for _ in range(v**k)]]) for k in range(gamma)]
            if confidence == "draft_prob":
                drafter = tuple(_towards_first(table, v) for table in tables)
                decoders.append(from_drafter(Decoder(target, drafter, drafter), confidence))
            else:
                drafter = tuple(np.full((1, v**k, v), 1 / v) for k in range(gamma))
                decoders.append(Decoder(target, drafter, of_head(tables, v)))
        everyone = ((True,) * size.requests,) * size.steps
        for seconds in sps_shapes(size.requests, gamma):
            yield Instance(tuple(decoders), seconds, everyone, (Prompts(),) * size.steps, confidence)


def _plainest_first(levels: Sequence[Sequence[float]]) -> Iterator[tuple[float, ...]]:
    """All combinations, those of early levels before those of late ones; the last entry moves first."""

    def adding(entry: int, total: int) -> Iterator[tuple[float, ...]]:
        most = len(levels[entry]) - 1
        if entry == len(levels) - 1:
            if total <= most:
                yield (levels[entry][total],)
            return
        for at in range(min(total, most) + 1):
            for rest in adding(entry + 1, total - at):
                yield (levels[entry][at], *rest)

    for total in range(sum(len(chosen) - 1 for chosen in levels) + 1):
        yield from adding(0, total)


def _towards_first(chance: Array, vocabulary: int) -> Array:
    """Laws [.., V] that give the first token ``chance`` [..] and share the rest evenly."""
    rest = np.repeat((1 - chance)[..., None] / (vocabulary - 1), vocabulary - 1, axis=-1)
    return np.concatenate([chance[..., None], rest], axis=-1)


# Instances drawn at random


def drawn(size: Size, confidence: Confidence, rng: np.random.Generator) -> Instance:
    """A random instance: laws and confidences of many kinds, zeros, ones and ties among them, and any step times."""
    # With whole blocks, or many steps, tables by the last token would make more histories than can be told apart.
    fits = size.requests * size.gamma < (4 if size.steps <= 4 else 2)
    anchored = size.steps > 1 and fits and rng.random() < 0.7
    decoders = tuple(_decoder(size, size.vocabulary if anchored else 1, confidence, rng) for _ in range(size.requests))
    present, prompts = _attendance(size, rng)
    return Instance(decoders, _step_times(size, rng), present, prompts, confidence, IDS[rng.integers(len(IDS))])


def _decoder(size: Size, anchors: int, confidence: Confidence, rng: np.random.Generator) -> Decoder:
    v = size.vocabulary
    target = tuple(_laws((v**n,), v, rng) for n in range(size.length))
    if rng.random() < 0.2:  # a drafter that is nearly right, or right
        near = rng.choice([0.0, 0.1])
        drafter = tuple(
            (1 - near) * np.broadcast_to(target[k], (anchors, v**k, v)) + near * _laws((anchors, v**k), v, rng)
            for k in range(size.gamma)
        )
    else:
        drafter = tuple(_laws((anchors, v**k), v, rng) for k in range(size.gamma))
    kind = rng.choice(["any", "extreme", "levels", "sure", "true"])
    tables = []
    for k in range(size.gamma):
        shape = (anchors, v**k)
        if kind == "true":
            tables.append(np.minimum(drafter[k], target[k][None]).sum(axis=2).clip(0.0, 1.0))
        elif kind == "levels":  # many ties, exact zeros and ones
            tables.append(rng.choice([0.0, 0.25, 0.5, 0.75, 0.9, 1.0], shape))
        elif kind == "extreme":
            tables.append(rng.beta(0.3, 0.3, shape))
        else:
            tables.append(1 - rng.random(shape) ** (3 if kind == "sure" else 1))
    if size.gamma > MOST_WHOLE and rng.random() < 0.7:  # or no survival at the end of a long block were of any size
        tables = [table ** (1 / size.gamma) for table in tables]
    if size.telling < size.gamma:
        telling = set(rng.choice(size.gamma - (confidence == "head"), size.telling, replace=False).tolist())
        tables = [_by_few(table, telling, v) for table in tables]
        if confidence == "draft_prob":  # the others are drafted evenly or for sure: their probability tells nothing
            rest = np.eye(v)[0] if rng.random() < 0.5 else np.full(v, 1 / v)
            drafter = tuple(
                _by_few(table, telling, v) if k in telling else np.tile(rest, (*table.shape[:2], 1))
                for k, table in enumerate(drafter)
            )
    return from_drafter(Decoder(target, drafter, of_head(tables, v)), confidence)


def _by_few(table: Array, telling: set[int], vocabulary: int) -> Array:
    """``table`` [A, V^k, ..] made to depend on those tokens alone whose places in the block are ``telling``."""
    codes = np.arange(table.shape[1])
    length = round(np.log(len(codes)) / np.log(vocabulary))
    places = [vocabulary ** (length - 1 - j) for j in range(length) if j in telling]
    return np.asarray(table[:, sum((codes // at % vocabulary * at for at in places), np.zeros_like(codes))])


def _laws(shape: tuple[int, ...], vocabulary: int, rng: np.random.Generator) -> Array:
    """Random laws [shape, V], some with tokens that never come."""
    laws = rng.standard_gamma(rng.choice([0.3, 1.0, 5.0]), (*shape, vocabulary)) + 1e-9
    if rng.random() < 0.2:
        never = rng.random(laws.shape) < 0.3
        never[..., 0] &= ~never.all(axis=-1)
        laws[never] = 0.0
    return np.asarray(laws / laws.sum(axis=-1, keepdims=True))


def _step_times(size: Size, rng: np.random.Generator) -> Array:
    tokens = np.arange(1, size.requests * (size.gamma + 1) + 1)
    kind = rng.choice(["flat", "line", "stairs", "cliff", "rising", "any"])
    seconds: Array = np.ones(len(tokens))
    if kind == "line":
        seconds = 1 + rng.choice([0.05, 0.2, 0.6, 1.5]) * tokens
    elif kind == "stairs":
        seconds = 1 + rng.uniform(0.1, 2.0) * (tokens // rng.integers(2, 4))
    elif kind == "cliff":
        seconds = 1 + 0.05 * tokens + rng.uniform(0.2, 2.0) * (tokens > size.requests + rng.integers(0, 3))
    elif kind == "rising":
        seconds = 1 + np.cumsum(rng.exponential(rng.choice([0.1, 0.4]), len(tokens)))
    elif kind == "any":
        seconds = rng.uniform(0.5, 2.0, len(tokens))
    return np.asarray(seconds * rng.choice([1.0, 0.01]))


def _attendance(size: Size, rng: np.random.Generator) -> tuple[tuple[tuple[bool, ...], ...], tuple[Prompts, ...]]:
    """Who decodes in which step, and the prompts beside them: a second request may join, or be put out for a while."""
    present = np.ones((size.steps, size.requests), dtype=bool)
    # Before the first decodes there were prompts alone, unless an engine takes them for free.
    prompts = [_prompts(rng, before=bool(rng.random() < (0.15 if step else 0.5))) for step in range(size.steps)]
    if size.requests > 1 and size.steps > 1 and rng.random() < 0.6:
        if rng.random() < 0.6:  # joins at some step, its prompt ending in the one before, or in a step of its own
            joins = int(rng.integers(1, size.steps))
            present[:joins, 1] = False
            if rng.random() < 0.3:
                prompts[joins] = prompts[joins]._replace(before=True)
            else:
                tokens, ending, before = prompts[joins - 1]
                prompts[joins - 1] = Prompts(max(tokens, 4), max(ending, 1), before)
        else:
            present[int(rng.integers(1, size.steps)), 1] = False
    return tuple(tuple(row) for row in present.tolist()), tuple(prompts)


def _prompts(rng: np.random.Generator, *, before: bool) -> Prompts:
    tokens = int(rng.choice(CHUNKS)) if rng.random() < 0.3 else 0
    return Prompts(tokens, min(int(rng.integers(0, 4)), tokens), before)
