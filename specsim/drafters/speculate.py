"""Speculative decoding for real: draft, verify what a scheduler asks for, keep what rejection sampling keeps.

The reference that replay is checked against. Any scheduler of specsim drives it: it sees the
confidences of this step's drafts and answers with draft lengths.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specsim.drafters.draft import Draft, Drafter, draft, over_target, pick, probabilities, sampler
from specsim.drafters.packed import Piece
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
    size = max(map(len, prompts)) + max_tokens + drafter.gamma + 2
    batch = Batch(target, drafter, len(prompts), size, stream_seed(seed, 4))
    stops = set(target.end_tokens if ends is None else ends)
    first = batch.verify(None, batch.no_lens, [(prompt, temperature) for prompt in prompts]).first
    done = Speculated([[token] for token in first.tolist()])
    going = list(range(len(prompts)))
    while True:
        over = [row for row, r in enumerate(going) if _over(done.outputs[r], stops, max_tokens)]
        batch.leave(over)
        going = [r for row, r in enumerate(going) if row not in set(over)]
        if not going:
            return done
        made = batch.draft()
        lens = np.zeros(len(going), dtype=np.int64)
        views = {}
        for engine in range(engines):
            rows = np.flatnonzero(np.array(going) % engines == engine)
            if rows.size:
                cost = _cost(step_seconds, len(rows))
                view = step_view(np.array(going)[rows], made, rows, cost, previous=tuple(previous[engine]))
                views[engine] = rows, view
                lens[rows] = policies[engine](view)
        lens = np.minimum(lens, made.proposed[:, 0].cpu().numpy())
        seen = batch.verify(made, torch.as_tensor(lens, device=target.device), expect=True)
        kept, expected, tokens = (t.cpu().numpy() for t in (seen.kept, seen.expected, seen.tokens))
        for engine, (rows, view) in views.items():
            previous[engine].append(StepRecord(view, lens[rows], kept[rows] + 1))
        for i, request in enumerate(going):
            output = done.outputs[request]
            confidence = None if made.confidence is None else made.confidence[i, 0].cpu().numpy()
            counts = int(lens[i]), int(kept[i]), float(expected[i])
            done.cycles.append(Cycle(request, len(output) - 1, *counts, confidence))
            _extend(output, tokens[i, : kept[i] + 1].tolist(), stops, max_tokens)


@dataclass(frozen=True)
class Verified:
    """What a forward gave n decoding requests and m prompts.

    ``kept`` int[n] of the drafts verified, ``expected`` [n] how many were to be expected (see Cycle; 0 unless asked),
    ``tokens`` int[n, longest + 1] with the target's own token after the kept ones; ``first`` int[m] those after the
    prompts.
    """

    kept: Tensor
    expected: Tensor
    tokens: Tensor
    first: Tensor


class Batch:
    """Up to ``rows`` requests of up to ``size`` tokens in step: the target's cache, the drafter's memory, the anchors.

    The n decoding ones have rows 0 to n - 1 in the order they joined: a prompt joins behind them as it is computed, and
    where requests leave, those behind move up. ``anchors`` int[n] are their last tokens.
    """

    def __init__(self, target: Target, drafter: Drafter, rows: int, size: int, seed: int) -> None:
        self.target, self.drafter = target, drafter
        self.generator = torch.Generator(device=target.device).manual_seed(seed)
        self.cache, self.context = KVCache(target, rows, size), drafter.context(rows, size)
        self.no_lens = torch.zeros(0, dtype=torch.long, device=target.device)
        self.anchors, self.temperatures = self.no_lens, np.zeros(0)

    @property
    def n(self) -> int:
        """Requests that decode."""
        return len(self.anchors)

    @torch.inference_mode()
    def draft(self) -> Draft:
        """Draft a block after every anchor."""
        anchors, positions = self.anchors[:, None], self.cache.lengths[: self.n, None]
        context = self.context.part(0, self.n, int(positions.max()))
        heat = self._heat(self.temperatures, torch.arange(self.n, device=anchors.device)[:, None])
        return draft(self.drafter, context, anchors, positions, heat, sampler(self.generator))

    @torch.inference_mode()
    def verify(
        self,
        made: Draft | None,
        lens: Tensor,
        prompts: Sequence[tuple[Sequence[int], float]] = (),
        expect: bool = False,
    ) -> Verified:
        """Verify the first ``lens`` int[n] tokens of each block by rejection sampling, and let ``prompts`` join.

        One forward runs 1 + lens tokens of each decoding request (1 each where ``made`` is None) and all tokens of the
        prompts, given with the temperature of their answers. ``expect``: also how many were to be expected.
        """
        n, longest = self.n, int(lens.max()) if self.n else 0
        drafted = self.anchors[:, None][:, :0] if made is None else made.tokens[:, 0, :longest]
        pieces = [Piece(0, torch.cat((self.anchors[:, None], drafted), 1), lens + 1)] if n else []
        pieces += self._joining([prompt for prompt, _ in prompts])
        results = self.target.forward_packed(pieces, self.cache, self.drafter.target_layers)
        temperatures = np.append(self.temperatures, [temperature for _, temperature in prompts])
        # The target's distributions after every token of the decoding ones, row after row, and after each prompt.
        offsets = torch.arange(longest + 1, device=lens.device)
        rows, places = (offsets <= lens[:, None]).nonzero(as_tuple=True)
        behind = torch.arange(n, len(temperatures), device=lens.device)
        states = [last[rows, places] if piece.counts is not None else last[:, -1]
                  for piece, (last, _) in zip(pieces, results, strict=True)]  # fmt: skip
        p = self._target(torch.cat(states), self._heat(temperatures, torch.cat((rows, behind))))
        checked = (places < lens[rows]).nonzero()[:, 0]
        accepted, chances = torch.zeros_like(drafted, dtype=torch.bool), torch.zeros(drafted.shape, device=lens.device)
        if made is not None and len(checked):
            at = rows[checked], places[checked]
            draws = torch.rand(len(checked), generator=self.generator, device=lens.device)
            accepted[at] = draws * made.draft_prob[:, 0][at] < p[checked, drafted[at]]
            if expect:
                chances[at] = torch.minimum(p[checked], self._drafter(made, *at)).sum(-1)
        kept = accepted.cumprod(1).sum(1)
        expected = (chances * (offsets[:-1] <= kept[:, None])).sum(1)
        # Refused at its place: what the target has beyond the drafter. All kept: the target's own.
        starts = (lens + 1).cumsum(0) - lens - 1
        rest = p[torch.cat((starts + kept, len(rows) - n + behind))]
        refused = (kept < lens).nonzero()[:, 0]
        if made is not None and len(refused):
            rest[refused] = (rest[refused] - self._drafter(made, refused, kept[refused])).clamp(min=0)
        token = pick(rest, self.generator)
        tokens = torch.cat((drafted, token[:n, None]), 1)
        tokens[torch.arange(n, device=lens.device), kept] = token[:n]
        for piece, (_, hidden) in zip(pieces, results, strict=True):
            after = tokens if n and piece is pieces[0] else token[piece.first : piece.first + len(piece.tokens), None]
            follow = torch.cat((piece.tokens[:, : 1 if after is tokens else None], after), 1)
            last_slot = int(piece.slots[:, -1].max())
            context = self.context.part(piece.first, piece.first + len(piece.tokens), last_slot + 1)
            self.drafter.read(context, follow, hidden, piece.slots)
        self.cache.lengths[:n] += kept + 1
        for piece in pieces[bool(n) :]:
            self.cache.lengths[piece.first : piece.first + len(piece.tokens)] = piece.tokens.shape[1]
        self.anchors, self.temperatures = token, temperatures
        return Verified(kept, expected, tokens, token[n:])

    def leave(self, gone: Collection[int]) -> None:
        """The requests in rows ``gone`` are done: those behind them move up."""
        if not gone:
            return
        first, device = min(gone), self.anchors.device
        stay = [row for row in range(self.n) if row not in set(gone)]
        up = torch.tensor([row for row in stay if row > first], dtype=torch.long, device=device)
        if len(up):
            used = int(self.cache.lengths[up].max())
            self.cache.move(up, first, used)
            self.context.move(up, first, used)
        self.anchors, self.temperatures = (
            self.anchors[torch.tensor(stay, device=device).long()],
            self.temperatures[stay],
        )

    def _joining(self, prompts: Sequence[Sequence[int]]) -> list[Piece]:
        """The prompts on the rows behind the decoding ones; neighbours of one length are one piece."""
        pieces, first = [], self.n
        for _, group in groupby(prompts, key=len):
            tokens = torch.tensor(list(group), device=self.anchors.device)
            pieces.append(Piece(first, tokens))
            first += len(tokens)
        self.cache.lengths[self.n : first] = 0
        return pieces

    def _heat(self, temperatures: NDArray[np.float64], rows: Tensor) -> float | Tensor:
        """One temperature where all are equal, a tensor of those of ``rows`` int[R] otherwise."""
        if len(set(temperatures.tolist())) == 1:
            return float(temperatures[0])
        return torch.tensor(temperatures, dtype=torch.float32, device=self.anchors.device)[rows]

    def _target(self, states: Tensor, temperature: float | Tensor) -> Tensor:
        """The target's probabilities [R, V] from its final states [R, d]."""
        return probabilities(states @ self.target.head.T, temperature)

    def _drafter(self, made: Draft, rows: Tensor, places: Tensor) -> Tensor:
        """The drafter's probabilities [n, V] of block ``rows`` int[n] at position ``places`` int[n] (0-based)."""
        q = [made.q[k][i, 0] for i, k in zip(rows.tolist(), places.tolist(), strict=True)]
        return over_target(torch.stack(q), self.drafter.vocabulary, self.target.vocab_size)


def step_view(
    ids: NDArray[np.int64],
    made: Draft,
    rows: NDArray[np.int64],
    step_seconds: Callable[[Any], Any],
    **more: Any,
) -> StepView:
    """What a scheduler sees of a step: the requests ``ids`` int[R] with the blocks ``rows`` int[R] of those ``made``.

    ``step_seconds`` and ``more`` are the StepView's.
    """

    confidence = made.confidence  # what the view holds on to: the distributions are large, and not its business

    def survival() -> NDArray[np.float64]:
        if confidence is None:
            raise SpecsimError("its drafter gives no confidences")
        return confidence[rows, 0].cpu().numpy().astype(np.float64).cumprod(1)

    return StepView(ids, survival, step_seconds, gamma=made.tokens.shape[-1], **more)


def _cost(step_seconds: Callable[[Any], Any], requests: int) -> Callable[[Any], Any]:
    """Step seconds by draft tokens, from those by tokens."""
    return lambda k: step_seconds(requests + np.asarray(k))


def _over(output: list[int], stops: set[int], most: int) -> bool:
    return len(output) >= most or output[-1] in stops


def _extend(output: list[int], tokens: list[int], stops: set[int], most: int) -> None:
    """Append ``tokens`` up to the end of the response."""
    for token in tokens:
        if _over(output, stops, most):
            return
        output.append(token)
