"""One engine replica: continuous batching, chunked prefill, paged KV with preemption, and the step.

The order inside a step is the contract: running requests first, then admissions, then the scheduler,
then the step lasts its cost and emits.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from math import isnan
from typing import Any

import numpy as np
import simpy
from numpy.typing import NDArray

from specsim.acceptance import Tape
from specsim.batch import ONES, Batch
from specsim.hardware import Shape, StepCost
from specsim.ledger import Ledger
from specsim.schedulers import scheduler_name
from specsim.types import SpecsimError
from specsim.views import StepRecord, StepView, TapeOracleView, TapeView

BLOCK = 16
"""Tokens in one KV block."""
PREVIOUS = 8
"""Steps that ``view.previous`` goes back."""


@dataclass(frozen=True)
class Limits:
    """What bounds a step: sequences, tokens, KV blocks, and whether prefill is free."""

    max_num_seqs: int
    max_num_batched_tokens: int
    kv_blocks: int
    prefill_free: bool


@dataclass
class Prefill:
    """A request whose prompt is being processed: ``done`` of ``tokens``, and ``chunk`` more in this step."""

    request: int
    tokens: int
    done: int = 0
    chunk: int = 0


class Replica:
    """A SimPy process that steps one engine.

    Requests are admitted first come first served and a chunk takes all the budget that is left, so
    unfinished prefills are always the tail of the running list: decodes first, then ``prefills``.
    """

    def __init__(
        self,
        index: int,
        env: simpy.Environment,
        ledger: Ledger,
        limits: Limits,
        cost: StepCost,
        tape: Tape | None,
        scheduler: Any,
        on_finish: Callable[[list[int]], None],
        record_steps: bool = False,
    ) -> None:
        self.index, self.env, self.ledger, self.limits = index, env, ledger, limits
        self.cost, self.tape, self.on_finish = cost, tape, on_finish
        self.scheduler = scheduler
        self.schedule = _fresh(scheduler)
        self.steps: list[tuple[float, ...]] | None = [] if record_steps else None
        self.num_steps = self.extrapolated_steps = 0
        self.waiting: deque[int] = deque()
        self.prefills: list[Prefill] = []
        self.gamma = tape.gamma if tape else 0
        self.width = 1 + self.gamma  # tokens that a decode reserves
        self.needs_lengths = cost.surface.needs_lengths
        self.sync_seconds = cost.profile.sync_seconds if getattr(scheduler, "synchronous", False) else 0.0
        self.view_type = TapeOracleView if getattr(scheduler, "oracle", False) else TapeView
        self.previous: deque[StepRecord] = deque(maxlen=PREVIOUS)
        self.uses_previous = getattr(scheduler, "uses_previous", True)
        self.trusted = type(scheduler).__module__ == "specsim.schedulers"  # what others return is checked
        self.batch = Batch(limits.max_num_seqs, ledger, tape)
        self._wake = env.event()
        env.process(self.run())

    # The process: a step in three lines.

    def run(self) -> Generator[simpy.Event, None, None]:
        """Step while there is work; sleep until a request arrives otherwise."""
        while True:
            if not (self.batch.n or self.prefills or self.waiting):
                self._wake = self.env.event()
                yield self._wake
            self.reserve_running()
            if self.waiting and not self.preempted:
                self.admit_waiting()
            if self.batch.n or self.prefills:
                yield self.env.timeout(self.begin_step())
                self.end_step()

    @property
    def load(self) -> int:
        """Requests running or waiting here."""
        return self.batch.n + len(self.prefills) + len(self.waiting)

    def submit(self, request: int) -> None:
        """Queue a request; it is seen at the next step boundary."""
        self.ledger.replica[request] = self.index
        self.waiting.append(request)
        if not self._wake.triggered:
            self._wake.succeed()

    # 1. Running requests first.

    def reserve_running(self) -> None:
        """Give each running decode its 1+γ tokens, the unfinished prefill a chunk, and both their KV."""
        budget = self.limits.max_num_batched_tokens
        self.scheduled = min(self.batch.n, budget // self.width)
        budget -= self.scheduled * self.width
        for p in self.prefills:
            p.chunk = min(p.tokens - p.done, budget)
            budget -= p.chunk
        self.budget, self.preempted, self.counted = budget, False, False
        # A bound on the blocks needed, without a look at each request; counted only where it matters.
        most = (self.batch.kv_total + self.batch.n * (self.width + BLOCK - 1)) // BLOCK
        most += sum(_blocks(p.done + p.chunk) for p in self.prefills)
        self.free_blocks = self.limits.kv_blocks - most
        if self.free_blocks < 0:
            self._count_blocks()

    def _count_blocks(self) -> None:
        """Count blocks request by request; on shortage preempt the tail of the running list."""
        kv_blocks, self.counted = self.limits.kv_blocks, True
        place = np.arange(self.batch.n)
        reserve = np.where(place < self.scheduled, self.width, 0)
        needed = np.cumsum(_blocks(self.batch.kv_tokens() + reserve))
        used = int(needed[-1]) if self.batch.n else 0
        chunks = sum(_blocks(p.done + p.chunk) for p in self.prefills)
        while self.prefills and used + chunks > kv_blocks:
            p = self.prefills.pop()
            chunks -= _blocks(p.done + p.chunk)
            self._requeue([p.request])
        if used > kv_blocks:
            kept = int(np.searchsorted(needed, kv_blocks, side="right"))
            self._requeue(self.batch.leave(place >= kept))
            self.scheduled = min(self.scheduled, kept)
            used = int(needed[kept - 1])
        self.free_blocks = kv_blocks - used - chunks

    def _requeue(self, requests: list[int]) -> None:
        self.preempted = True
        for request in requests:
            self.ledger.preemptions[request] += 1
        self.waiting.extendleft(reversed(requests))

    # 2. Admissions.

    def admit_waiting(self) -> None:
        """Admit waiting requests, first come first served; not called in a step that preempted one."""
        limits, ledger = self.limits, self.ledger
        while self.waiting and self.batch.n + len(self.prefills) < limits.max_num_seqs:
            request = self.waiting[0]
            tokens = ledger.prompt_tokens[request] + ledger.emitted[request]
            if limits.prefill_free:
                # The prompt takes KV alone; the first token is there at once, and it decodes in this step.
                chunk, blocks = self.width, _blocks(tokens + self.width)
            else:
                chunk = max(min(tokens, self.budget), 1)
                blocks = _blocks(chunk)
            if blocks > self.free_blocks and not self.counted:
                self._count_blocks()
            if chunk > self.budget or blocks > self.free_blocks:
                return
            self.waiting.popleft()
            self.budget -= chunk
            self.free_blocks -= blocks
            if isnan(ledger.scheduled[request]):  # not a preempted one
                ledger.scheduled[request] = self.env.now
            if limits.prefill_free:
                self.on_finish(self._first_tokens([request]))
                self.scheduled = self.batch.n
            else:
                self.prefills.append(Prefill(request, tokens, chunk=chunk))

    # 3. The scheduler, and 4. what the step costs and emits.

    def begin_step(self) -> float:
        """Ask the scheduler for draft lengths and return how long the step lasts, in seconds."""
        n, prefill_tokens, finishing, draft_tokens, fixed = self.scheduled, 0, 0, 0, 0.0
        shape = self._shape(n)
        for p in self.prefills:
            prefill_tokens += p.chunk
            finishing += p.done + p.chunk == p.tokens
        curve = self.cost.curve(shape, n * self.gamma)
        if n and self.tape is not None:
            fixed = self.cost.draft.item(n) + self.sync_seconds
            self.draft_lens = self._schedule(self.tape, n, curve, fixed, prefill_tokens, finishing)
            draft_tokens = int(self.draft_lens.dot(ONES[:n]))
        seconds = curve.item(draft_tokens) + fixed
        if seconds == np.inf:
            raise self.cost.outside(shape, draft_tokens)
        if self.cost.extrapolate and self.cost.is_outside(shape, draft_tokens):
            self.extrapolated_steps += 1
        self.num_steps += 1
        if self.steps is not None:
            num_tokens, kv_tokens = n + prefill_tokens + draft_tokens, shape.kv_tokens + sum(shape.histories)
            row = (self.index, self.env.now, seconds, n, num_tokens, prefill_tokens, draft_tokens)
            self.steps.append((*row, kv_tokens, len(self.waiting)))
        return seconds

    def _shape(self, n: int) -> Shape:
        """What this step's forward holds, drafts left out."""
        if not self.prefills:
            shape = Shape(n, self.batch.kv_total)
        else:
            chunks = [p.chunk for p in self.prefills if p.chunk]
            shape = Shape(n, self.batch.kv_total, chunks, [p.done for p in self.prefills if p.chunk])
        if self.needs_lengths and n:
            lengths = self.batch.kv_tokens()
            shape = shape._replace(shortest=int(lengths.min()), longest=int(lengths.max()))
        return shape

    def _schedule(
        self, tape: Tape, n: int, curve: NDArray[np.float64], fixed: float, prefill_tokens: int, finishing: int
    ) -> NDArray[np.int64]:
        batch = self.batch
        self.rows = rows = batch.rows(n)
        ids = batch.ids if n == batch.n else batch.ids[:n]
        self.view = view = self.view_type(tape, rows, ids, curve, fixed, prefill_tokens, finishing, self.previous)
        if isinstance(view, TapeOracleView):
            view.accepted = tape.accepted.take(rows)
        lens: NDArray[np.int64] = self.schedule(view) if self.trusted else self._ask(view, n)
        return lens if tape.proposed is None else np.minimum(lens, tape.proposed.take(rows))

    def _ask(self, view: StepView, n: int) -> NDArray[np.int64]:
        """Call a user's scheduler and check what it returns; its own exceptions are told in one line."""
        try:
            lens = np.asarray(self.schedule(view))
        except SpecsimError as error:
            raise SpecsimError(f"scheduler {scheduler_name(self.scheduler)}: {error}") from error
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            raise SpecsimError(
                f"scheduler {scheduler_name(self.scheduler)}: {type(error).__name__}: {error} "
                f"(in {frame.name}, line {frame.lineno})"
            ) from error
        whole = lens.dtype.kind in "iu" and lens.shape == (n,)
        if not whole or lens.min() < 0 or lens.max() > self.gamma:
            raise SpecsimError(
                f"scheduler {scheduler_name(self.scheduler)}: expected {n} whole draft lengths within 0..{self.gamma}, "
                f"got {lens.dtype} {lens.shape}: {lens.ravel()[:8]}"
            )
        return lens.astype(np.int64)  # a copy: history keeps it, and a scheduler may fill its array again

    def end_step(self) -> None:
        """Emit what the step produced; let finished requests go and finished prompts start to decode."""
        emitted = 0
        finished: list[int] = []
        if self.scheduled:
            emitted, finished = self._emit(self.scheduled)
        if self.prefills:
            first = []
            for p in self.prefills:
                p.done += p.chunk
                if p.done == p.tokens:
                    first.append(p.request)
            if first:
                self.prefills = [p for p in self.prefills if p.done < p.tokens]
                emitted += len(first)
                finished += self._first_tokens(first)
        if self.steps is not None:
            self.steps[-1] += (emitted,)
        if finished:
            self.on_finish(finished)

    def _emit(self, n: int) -> tuple[int, list[int]]:
        """Decodes emit min(accepted, draft_len) + 1 tokens, clipped at their output length."""
        batch, tape = self.batch, self.tape
        if tape is None:
            emitted, done = batch.advance(n, ONES[:n], None)
        else:
            made = np.minimum(tape.accepted.take(self.rows), self.draft_lens)
            made += 1
            if self.uses_previous:
                emit = np.minimum(made, batch.need[:n] - batch.tokens[:n])
                self.previous.append(StepRecord(self.view, self.draft_lens, emit))
            emitted, done = batch.advance(n, made, self.draft_lens)
        if done is None:
            return emitted, []
        finished = batch.leave(done)
        for request in finished:
            self.ledger.finish[request] = self.env.now
        return emitted, finished

    def _first_tokens(self, requests: list[int]) -> list[int]:
        """Their prompts are done: emit a token each, and decode on unless that was the last one."""
        ledger, finished, going_on = self.ledger, [], []
        for request in requests:
            ledger.emitted[request] += 1
            if isnan(ledger.first_token[request]):  # not a preempted one
                ledger.first_token[request] = self.env.now
            if ledger.emitted[request] < ledger.output_tokens[request]:
                going_on.append(request)
            else:
                ledger.finish[request] = self.env.now
                finished.append(request)
        self.batch.join(going_on)
        return finished

    def close(self) -> None:
        """The run is over: enter what requests still decoding here have done."""
        self.batch.leave(np.ones(self.batch.n, dtype=bool))


def _fresh(scheduler: Any) -> Any:
    """What to call: what start() returns, or the scheduler itself, which all replicas and runs then share."""
    try:
        return scheduler.start() if hasattr(scheduler, "start") else scheduler
    except Exception as error:
        raise SpecsimError(f"scheduler {scheduler_name(scheduler)}: start: {type(error).__name__}: {error}") from error


def _blocks(tokens: Any) -> Any:
    """KV blocks that hold ``tokens`` tokens."""
    return (tokens + BLOCK - 1) // BLOCK
