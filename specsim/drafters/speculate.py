"""Speculative decoding for real: draft, verify what a scheduler asks for, keep what rejection sampling keeps.

The reference that replay is checked against. Any scheduler of specsim drives it: it sees the
confidences of this step's drafts and answers with draft lengths.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specsim.drafters.draft import Draft, Drafter, draft, over_target, pick, probabilities, sampler
from specsim.drafters.responses import stream_seed
from specsim.drafters.target import KVCache, Target
from specsim.types import SpecsimError
from specsim.views import StepRecord, StepView

Scheduler = Callable[[StepView], NDArray[np.int64]]

HISTORY = 8
"""Past steps that a scheduler can look back on."""


@dataclass
class Cycle:
    """One draft-verify cycle of one request.

    ``request`` its index, ``position`` of the anchor among the output tokens, ``draft_len`` verified,
    ``accepted`` of them; ``confidence`` float[γ] or None. ``expected``: the chances of survival Σ min(p, q) at
    the positions reached, added up: on average it is ``accepted``, with less luck in it.
    """

    request: int
    position: int
    draft_len: int
    accepted: int
    expected: float
    confidence: NDArray[np.float32] | None


@dataclass
class Speculated:
    """``outputs``: the tokens of each request, end token included; ``cycles`` in the order they ran."""

    outputs: list[list[int]]
    cycles: list[Cycle] = field(default_factory=list)


def speculate(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    scheduler: Scheduler,
    *,
    max_tokens: int,
    temperature: float = 1.0,
    seed: int = 0,
    step_seconds: Callable[[Any], Any] = lambda tokens: np.ones(np.shape(tokens)),
    ends: Sequence[int] | None = None,
    engines: int = 1,
) -> Speculated:
    """Answer ``prompts`` (token ids each) in one batch by speculative decoding.

    ``scheduler`` is asked once a step (one with ``start()`` is started first); ``step_seconds`` tells it
    what a forward of so many tokens lasts. The outputs have the target's own distribution at
    ``temperature`` if the scheduler is lossless. A request stops after ``max_tokens`` or at one of
    ``ends`` (the target's, if None); what a cycle yields beyond is cut off, though its Cycle counts it.
    ``engines``: request i belongs to engine i mod engines, and each has a scheduler of its own that
    sees only its requests: many small runs for the price of one.
    """
    policies = [scheduler.start() if hasattr(scheduler, "start") else scheduler for _ in range(engines)]
    previous: list[deque[StepRecord]] = [deque(maxlen=HISTORY) for _ in range(engines)]
    batch = Batch(target, drafter, prompts, max_tokens, temperature, stream_seed(seed, 4))
    stops = set(target.end_tokens if ends is None else ends)
    done = Speculated([[int(token)] for token in batch.anchors])
    while going := [r for r in batch.requests if not _over(done.outputs[r], stops, max_tokens)]:
        batch.select(going)
        made = batch.draft()
        lens = np.zeros(len(going), dtype=np.int64)
        views = {}
        for engine in range(engines):
            rows = np.flatnonzero(np.array(going) % engines == engine)
            if rows.size:
                views[engine] = rows, _view(batch, made, rows, step_seconds, previous[engine])
                lens[rows] = policies[engine](views[engine][1])
        lens = np.minimum(lens, made.proposed[:, 0].cpu().numpy())
        asked = torch.as_tensor(lens, device=target.device)
        kept, expected, tokens = (t.cpu().numpy() for t in batch.verify(made, asked))
        for engine, (rows, view) in views.items():
            previous[engine].append(StepRecord(view, lens[rows], kept[rows] + 1))
        for i, request in enumerate(going):
            output = done.outputs[request]
            confidence = None if made.confidence is None else made.confidence[i, 0].cpu().numpy()
            counts = int(lens[i]), int(kept[i]), float(expected[i])
            done.cycles.append(Cycle(request, len(output) - 1, *counts, confidence))
            _extend(output, tokens[i, : kept[i] + 1].tolist(), stops, max_tokens)
    return done


class Batch:
    """R requests in step: the target's cache, the drafter's context, and each one's anchor."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        prompts: Sequence[Sequence[int]],
        most: int,
        temperature: float,
        seed: int,
    ) -> None:
        self.target, self.drafter, self.temperature = target, drafter, temperature
        self.generator = torch.Generator(device=target.device).manual_seed(seed)
        self.requests = list(range(len(prompts)))
        lengths = torch.tensor([len(p) for p in prompts], device=target.device)
        padded = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.long, device=target.device)
        for row, prompt in enumerate(prompts):
            padded[row, : len(prompt)] = torch.tensor(prompt)
        size = padded.shape[1] + most + drafter.gamma + 2
        self.cache, self.context = KVCache(target, len(prompts), size), drafter.context(len(prompts), size)
        last, hidden = target.forward(padded, self.cache, drafter.target_layers)
        slots = torch.arange(padded.shape[1], device=target.device).expand(len(prompts), -1)
        rows = torch.arange(len(prompts), device=target.device)
        self.anchors = pick(self._target(last[rows, lengths - 1]), self.generator)
        follow = torch.cat((padded, padded[:, :1]), 1)
        follow[rows, lengths] = self.anchors
        drafter.read(self.context, follow, hidden, slots)
        self.cache.keep(lengths)

    def draft(self) -> Draft:
        """Draft a block after every anchor."""
        anchors, positions = self.anchors[:, None], self.cache.lengths[:, None]
        return draft(self.drafter, self.context, anchors, positions, self.temperature, sampler(self.generator))

    def verify(self, made: Draft, lens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Verify the first ``lens`` int[R] tokens of each block by rejection sampling.

        Returns how many of them are kept int[R], how many were to be expected [R] (see Cycle), and the tokens
        int[R, longest + 1] with the target's own token after the kept ones.
        """
        rows = torch.arange(len(lens), device=lens.device)
        longest = int(lens.max())
        drafted = made.tokens[:, 0, :longest]
        fed = torch.cat((self.anchors[:, None], drafted), 1)
        last, hidden = self.target.forward(fed, self.cache, self.drafter.target_layers)
        kept, expected = torch.zeros_like(lens), torch.zeros(len(lens), device=lens.device)
        for k in range(longest):
            going = ((kept == k) & (k < lens)).nonzero()[:, 0]
            p = self._target(last[going, k])
            p_x = p.gather(1, drafted[going, k, None])[:, 0]
            common = p if self.drafter.vocabulary is None else p[:, self.drafter.vocabulary]
            expected[going] += torch.minimum(common, made.q[k][going, 0]).sum(-1)
            draws = torch.rand(len(going), generator=self.generator, device=lens.device)
            kept[going] += draws * made.draft_prob[going, 0, k] < p_x
        # Refused at its place: what the target has beyond the drafter. All kept: the target's own.
        rest = self._target(last[rows, kept])
        refused = (kept < lens).nonzero()[:, 0]
        if len(refused):
            rest[refused] = (rest[refused] - self._drafter(made, refused, kept[refused])).clamp(min=0)
        token = pick(rest, self.generator)
        tokens = torch.cat((drafted, token[:, None]), 1)
        tokens[rows, kept] = token
        slots = self.cache.lengths[:, None] + torch.arange(longest + 1, device=lens.device)
        follow = torch.cat((self.anchors[:, None], tokens), 1)
        self.drafter.read(self.context, follow, hidden, slots)
        self.cache.keep(kept + 1)
        self.anchors = token
        return kept, expected, tokens

    def select(self, requests: Sequence[int]) -> None:
        """Go on with these ``requests`` only."""
        if list(requests) == self.requests:
            return
        rows = torch.tensor([self.requests.index(r) for r in requests], device=self.anchors.device)
        self.requests = list(requests)
        self.cache.select(rows)
        self.context.select(rows)
        self.anchors = self.anchors[rows]

    def _target(self, states: Tensor) -> Tensor:
        """The target's probabilities [.., V] from its final states [.., d]."""
        return probabilities(states @ self.target.head.T, self.temperature)

    def _drafter(self, made: Draft, rows: Tensor, places: Tensor) -> Tensor:
        """The drafter's probabilities [n, V] of block ``rows`` int[n] at position ``places`` int[n] (0-based)."""
        q = [made.q[k][i, 0] for i, k in zip(rows.tolist(), places.tolist(), strict=True)]
        return over_target(torch.stack(q), self.drafter.vocabulary, self.target.vocab_size)


def _view(
    batch: Batch,
    made: Draft,
    rows: NDArray[np.int64],
    step_seconds: Callable[[Any], Any],
    previous: Sequence[StepRecord],
) -> StepView:
    """What the scheduler of the engine with these ``rows`` of the batch sees of this step."""

    def survival() -> NDArray[np.float64]:
        if made.confidence is None:
            raise SpecsimError("its drafter gives no confidences")
        return made.confidence[rows, 0].cpu().numpy().astype(np.float64).cumprod(1)

    return StepView(
        np.array(batch.requests)[rows],
        survival,
        lambda k: step_seconds(len(rows) + np.asarray(k)),
        gamma=batch.drafter.gamma,
        previous=tuple(previous),
    )


def _over(output: list[int], stops: set[int], most: int) -> bool:
    return len(output) >= most or output[-1] in stops


def _extend(output: list[int], tokens: list[int], stops: set[int], most: int) -> None:
    """Append ``tokens`` up to the end of the response."""
    for token in tokens:
        if _over(output, stops, most):
            return
        output.append(token)
