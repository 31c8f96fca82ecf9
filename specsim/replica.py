"""One engine replica: continuous batching, chunked prefill, paged KV with preemption, and the step.

The order inside a step is the contract: running requests first, then admissions, then the scheduler,
then the step lasts its cost and emits. The state of the decoding requests is one int64 matrix with a
column a request, in running order, so that a step is a handful of array operations.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
import simpy
from numpy.typing import NDArray

from specsim.acceptance import Tape
from specsim.hardware import StepCost
from specsim.ledger import Ledger
from specsim.schedulers import OracleView, StepRecord, StepView, scheduler_name
from specsim.types import SpecsimError

BLOCK = 16
"""Tokens in one KV block."""
PREVIOUS = 8
"""Steps that ``view.previous`` goes back."""

# Rows of the decode state. ROW (on the tape), KV and OVER (tokens past the output length: negative
# while a request runs) all advance by what a cycle produces, so they stand together. JOINED is the
# number of the first cycle; what was accepted follows from tokens and cycles when a request leaves.
_ID, _ROW, _KV, _OVER, _JOINED, _VERIFIED, _END = range(7)
_ONES = np.ones(1 << 16, dtype=np.int64)


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
        self.schedule = scheduler.start() if hasattr(scheduler, "start") else scheduler
        self.steps: list[tuple[float, ...]] | None = [] if record_steps else None
        self.num_steps = self.extrapolated_steps = 0
        self.waiting: deque[int] = deque()
        self.prefills: list[Prefill] = []
        self.gamma = tape.gamma if tape else 0
        self.width = 1 + self.gamma  # tokens that a decode reserves
        self.sync_seconds = cost.profile.sync_seconds if getattr(scheduler, "synchronous", False) else 0.0
        self.view_type = OracleView if getattr(scheduler, "oracle", False) else StepView
        self.previous: deque[StepRecord] = deque(maxlen=PREVIOUS)
        self.uses_previous = getattr(scheduler, "uses_previous", True)
        self.trusted = type(scheduler).__module__ == "specsim.schedulers"  # what others return is checked
        self.state = np.zeros((7, limits.max_num_seqs), dtype=np.int64)
        self.cycle = 0
        self.num_seqs = 0
        self.kv_total = 0  # KV tokens of the decoding requests
        self.slack = 0  # each request may read at least this many more rows before its tape ends
        self._bind()
        self._wake = env.event()
        env.process(self.run())

    # The process: a step in three lines.

    def run(self) -> Generator[simpy.Event, None, None]:
        """Step while there is work; sleep until a request arrives otherwise."""
        while True:
            if not self.load:
                self._wake = self.env.event()
                yield self._wake
            self.reserve_running()
            self.admit_waiting()
            if self.num_seqs or self.prefills:
                yield self.env.timeout(self.begin_step())
                self.end_step()

    @property
    def load(self) -> int:
        """Requests running or waiting here."""
        return self.num_seqs + len(self.prefills) + len(self.waiting)

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
        self.scheduled = min(self.num_seqs, budget // self.width)
        budget -= self.scheduled * self.width
        for p in self.prefills:
            p.chunk = min(p.tokens - p.done, budget)
            budget -= p.chunk
        self.budget, self.preempted, self.counted = budget, False, False
        # A bound on the blocks needed, without a look at each request; counted only where it matters.
        most = (self.kv_total + self.num_seqs * (self.width + BLOCK - 1)) // BLOCK
        most += sum(_blocks(p.done + p.chunk) for p in self.prefills)
        self.free_blocks = self.limits.kv_blocks - most
        if self.free_blocks < 0:
            self._count_blocks()

    def _count_blocks(self) -> None:
        """Count blocks request by request; on shortage preempt the tail of the running list."""
        kv_blocks, self.counted = self.limits.kv_blocks, True
        reserve = np.where(np.arange(self.num_seqs) < self.scheduled, self.width, 0)
        needed = np.cumsum(_blocks(self.kv + reserve))
        used = int(needed[-1]) if self.num_seqs else 0
        chunks = sum(_blocks(p.done + p.chunk) for p in self.prefills)
        while self.prefills and used + chunks > kv_blocks:
            p = self.prefills.pop()
            chunks -= _blocks(p.done + p.chunk)
            self._requeue([p.request])
        if used > kv_blocks:
            kept = int(np.searchsorted(needed, kv_blocks, side="right"))
            self._requeue(self._leave(np.arange(self.num_seqs) >= kept))
            self.scheduled = min(self.scheduled, kept)
            used = int(needed[kept - 1])
        self.free_blocks = kv_blocks - used - chunks

    def _requeue(self, requests: list[int]) -> None:
        self.preempted = True
        self.ledger.preemptions[requests] += 1
        self.waiting.extendleft(reversed(requests))

    # 2. Admissions.

    def admit_waiting(self) -> None:
        """Admit waiting requests, first come first served, unless this step preempted one."""
        limits, ledger = self.limits, self.ledger
        while self.waiting and not self.preempted and self.num_seqs + len(self.prefills) < limits.max_num_seqs:
            request = self.waiting[0]
            tokens = int(ledger.prompt_tokens[request] + ledger.emitted[request])
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
            if ledger.scheduled[request] != ledger.scheduled[request]:  # NaN: not a preempted one
                ledger.scheduled[request] = self.env.now
            if limits.prefill_free:
                self.on_finish(self._first_tokens([request]))
                self.scheduled = self.num_seqs
            else:
                self.prefills.append(Prefill(request, tokens, chunk=chunk))

    # 3. The scheduler, and 4. what the step costs and emits.

    def begin_step(self) -> float:
        """Ask the scheduler for draft lengths and return how long the step lasts, in seconds."""
        n, history, prefill_tokens, finishing, draft_tokens, fixed = self.scheduled, 0, 0, 0, 0, 0.0
        for p in self.prefills:
            history += p.done
            prefill_tokens += p.chunk
            finishing += p.done + p.chunk == p.tokens
        kv_tokens = self.kv_total + history
        column = self.cost.column(kv_tokens)
        if n and self.tape is not None:
            fixed = float(self.cost.draft[n]) + self.sync_seconds
            self.draft_lens = self._schedule(n, column, fixed, prefill_tokens, finishing)
            draft_tokens = int(np.add.reduce(self.draft_lens))
        num_tokens = n + prefill_tokens + draft_tokens
        seconds = float(column[num_tokens]) + fixed
        if seconds == np.inf:
            raise self.cost.outside(num_tokens, n, kv_tokens)
        if self.cost.extrapolate and self.cost.is_outside(num_tokens, n, kv_tokens):
            self.extrapolated_steps += 1
        self.num_steps += 1
        if self.steps is not None:
            row = (self.index, self.env.now, seconds, n, num_tokens, prefill_tokens, draft_tokens)
            self.steps.append((*row, kv_tokens, len(self.waiting)))
        return seconds

    def _schedule(
        self, n: int, column: NDArray[np.float64], fixed: float, prefill_tokens: int, finishing: int
    ) -> NDArray[np.int64]:
        tape = self.tape
        assert tape is not None
        # History keeps the rows, so they must not be the ones that move on below.
        rows = self.row[:n].copy() if self.uses_previous else self.row[:n]
        base = n + prefill_tokens

        def survival() -> NDArray[np.float32]:
            if tape.survival is None:
                raise SpecsimError(
                    f"scheduler {scheduler_name(self.scheduler)}: its drafter's trace has no confidences"
                )
            return np.asarray(tape.survival.take(rows, axis=0))

        def confidence() -> NDArray[np.float32]:
            if tape.confidence is None:
                raise SpecsimError(
                    f"scheduler {scheduler_name(self.scheduler)}: its drafter's trace has no confidences"
                )
            return np.asarray(tape.confidence.take(rows, axis=0))

        def step_seconds(draft_tokens: Any) -> Any:
            return column.take(base + draft_tokens, mode="clip") + fixed

        view = self.view_type(
            self.ids if n == self.num_seqs else self.ids[:n],
            survival,
            step_seconds,
            gamma=self.gamma,
            confidence=confidence,
            prefill_tokens=prefill_tokens,
            finishing_prefills=finishing,
            previous=self.previous,
        )
        if isinstance(view, OracleView):
            view.accepted = tape.accepted.take(rows)
        lens: NDArray[np.int64] = self.schedule(view) if self.trusted else self._ask(view, n)
        self.survival = survival
        return lens if tape.proposed is None else np.minimum(lens, tape.proposed.take(rows))

    def _ask(self, view: StepView, n: int) -> NDArray[np.int64]:
        """Call a user's scheduler and check what it returns; its own exceptions are told in one line."""
        try:
            lens = np.asarray(self.schedule(view))
        except SpecsimError:
            raise
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
        tape, over = self.tape, self.over
        if n < self.num_seqs:  # the budget did not reach the tail: it has no cycle in this step
            self.state[_JOINED, n : self.num_seqs] += 1
        if tape is None:
            made = _ONES[:n]
        else:
            made = np.minimum(tape.accepted.take(self.row[:n]), self.draft_lens)
            made += 1
            verified = self.verified[:n]
            verified += self.draft_lens
            if self.uses_previous:
                emit = np.minimum(made, -over[:n])
                self.previous.append(StepRecord(self.ids[:n], self.survival, self.draft_lens, emit))
        moving = self.moving[:, :n]
        moving += made
        if tape is not None and tape.by_cycle:
            row = self.row[:n]
            row += 1 - made
        emitted = int(made.dot(_ONES[:n]))
        self.kv_total += emitted
        self.cycle += 1
        self.slack -= self.width
        finished: list[int] = []
        if over.max() >= 0:
            done = over >= 0
            emitted -= int(np.add.reduce(over[done]))
            finished = self._leave(done)
            self.ledger.finish[finished] = self.env.now
        if self.slack <= 0 and tape is not None:
            self._wrap(tape)
        return emitted, finished

    def _first_tokens(self, requests: list[int]) -> list[int]:
        """Their prompts are done: emit a token each, and decode on unless that was the last one."""
        ledger, now = self.ledger, self.env.now
        ids = np.array(requests)
        ledger.emitted[ids] += 1
        fresh = ids[np.isnan(ledger.first_token[ids])]  # not the preempted ones
        ledger.first_token[fresh] = now
        ended = ledger.emitted[ids] == ledger.output_tokens[ids]
        if ended.any():
            ledger.finish[ids[ended]] = now
            self._join(ids[~ended])
            return ids[ended].tolist()  # type: ignore[no-any-return]
        self._join(ids)
        return []

    # The decode state.

    def _join(self, ids: NDArray[np.int64]) -> None:
        """Append requests [m] that have their first token to the running decodes."""
        ledger, tape, n, m = self.ledger, self.tape, self.num_seqs, len(ids)
        emitted = ledger.emitted[ids]
        new = self.state[:, n : n + m]
        new[_ID] = ids
        new[_KV] = ledger.prompt_tokens[ids] + emitted - 1
        new[_OVER] = emitted - ledger.output_tokens[ids]
        new[_JOINED] = self.cycle
        new[_VERIFIED] = 0
        if tape is not None and m:
            part = ledger.part[ids]
            read = ledger.cycles[ids] if tape.by_cycle else emitted - 1
            size, first = tape.size[part], tape.first[part]
            new[_ROW] = first + (ledger.offset[ids] + read) % size
            new[_END] = first + size
            slack = int((new[_END] - new[_ROW]).min())
            self.slack = min(self.slack, slack) if n else slack
        self.num_seqs += m
        self.kv_total += int(np.add.reduce(new[_KV]))
        self._bind()

    def _leave(self, gone: NDArray[np.bool_]) -> list[int]:
        """Take the requests marked in ``gone`` [num_seqs] out of the state and return them, in order."""
        n, ledger = self.num_seqs, self.ledger
        out = self.state[:, :n].compress(gone, axis=1)
        ids, over = out[_ID], out[_OVER]
        before, cycles = ledger.emitted[ids], self.cycle - out[_JOINED]
        made = ledger.output_tokens[ids] + over - before  # before the output length clips
        ledger.emitted[ids] = before + made - np.maximum(over, 0)
        ledger.cycles[ids] += cycles
        ledger.verified[ids] += out[_VERIFIED]
        ledger.accepted[ids] += made - cycles
        self.kv_total -= int(np.add.reduce(out[_KV]))
        self.num_seqs = n - len(ids)
        self.state[:, : self.num_seqs] = self.state[:, :n].compress(~gone, axis=1)
        self._bind()
        return ids.tolist()  # type: ignore[no-any-return]

    def close(self) -> None:
        """The run is over: enter what requests still decoding here have done."""
        self._leave(np.ones(self.num_seqs, dtype=bool))

    def emitted_by(self, domains: int) -> NDArray[np.int64]:
        """Tokens [domains] that requests decoding here have emitted since they joined."""
        ids = self.ids
        made = self.ledger.output_tokens[ids] + self.over - self.ledger.emitted[ids]
        return np.bincount(self.ledger.domain[ids], weights=made, minlength=domains).astype(np.int64)

    def _wrap(self, tape: Tape) -> None:
        """Send requests that have read to the end of their domain's rows back to its start."""
        size = tape.size[self.ledger.part[self.ids]]
        end = self.state[_END, : self.num_seqs]
        self.row[:] = end - size + (self.row - end) % size  # a block may be longer than the whole domain
        self.slack = int((end - self.row).min(initial=1 << 62))

    def _bind(self) -> None:
        """Name the rows of the state after its width changed; ids are frozen, for schedulers keep them."""
        live = self.state[:, : self.num_seqs]
        self.moving = live[_ROW : _OVER + 1]
        self.row, self.kv, self.over, self.verified = live[_ROW], live[_KV], live[_OVER], live[_VERIFIED]
        self.ids = live[_ID].copy()
        self.ids.flags.writeable = False


def _blocks(tokens: Any) -> Any:
    """KV blocks that hold ``tokens`` tokens."""
    return (tokens + BLOCK - 1) // BLOCK
