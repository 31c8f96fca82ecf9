"""One engine replica: continuous batching, chunked prefill, paged KV with preemption, and the step.

The order inside a step is the contract: running requests first, then admissions, then the scheduler,
then the step lasts its cost and emits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from math import isnan
from typing import Any

import numpy as np
import simpy
from numpy.typing import NDArray

from specsim.acceptance import Tape
from specsim.asking import ask, fresh
from specsim.batch import ONES, Batch, Gone
from specsim.hardware import Shape, StepCost
from specsim.kv import Match, Pool
from specsim.ledger import Ledger
from specsim.rules import Limits, Rules
from specsim.stepping import StepEnd
from specsim.views import StepRecord, TapeOracleView, TapeView

NOTHING_FOUND = Match()
PREVIOUS = 8
"""Steps that ``view.previous`` goes back."""


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
        rules: Rules,
        cost: StepCost,
        tape: Tape | None,
        scheduler: Any,
        on_finish: Callable[[list[int]], None],
        record_steps: bool = False,
    ) -> None:
        self.index, self.env, self.ledger, self.limits, self.rules = index, env, ledger, limits, rules
        self.cost, self.tape, self.on_finish = cost, tape, on_finish
        self.scheduler = scheduler
        self.schedule = fresh(scheduler)
        self.steps: list[tuple[float, ...]] | None = [] if record_steps else None
        self.num_steps = self.extrapolated_steps = 0
        self.prefilled = False  # whether prompts were computed since a scheduler was last asked
        self.arrived: list[int] = []  # since the last step boundary
        self.seen: list[int] = []  # at the last one, by an engine that schedules a step ahead
        self.waiting: deque[int] = deque()
        self.prefills: list[Prefill] = []
        self.gamma = tape.gamma if tape else 0
        self.width = 1 + self.gamma  # tokens of the budget that a decode reserves
        self.block = limits.block_size
        self.reserve = self.width if rules.lookahead else 1  # tokens that it reserves KV for
        self.pool = Pool(limits.kv_blocks, limits.block_size, rules.prefix_caching, ledger.shares_prefixes)
        self.needs_lengths = cost.surface.needs_lengths
        self.sync_seconds = cost.profile.sync_seconds if getattr(scheduler, "synchronous", False) else 0.0
        self.view_type = TapeOracleView if getattr(scheduler, "oracle", False) else TapeView
        self.previous: deque[StepRecord] = deque(maxlen=PREVIOUS)
        self.uses_previous = getattr(scheduler, "uses_previous", True)
        self.trusted = type(scheduler).__module__ == "specsim.schedulers"  # what others return is checked
        self.batch = Batch(limits.max_num_seqs, ledger, tape, self.reserve)
        self.wake = env.event()

    # The process: a step in three lines.

    def run(self) -> Generator[simpy.Event, None, None]:
        """Step while there is work; sleep until a request arrives otherwise."""
        while True:
            if not self.busy:
                self.wake = self.env.event()
                yield self.wake
            self.plan_step()
            if self.batch.n or self.prefills:
                seconds = self.begin_step()
                yield StepEnd(self.env, seconds)
                self.end_step(seconds)

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.batch.n or self.prefills or self.waiting or self.arrived or self.seen)

    @property
    def running(self) -> int:
        """Requests that have been admitted."""
        return self.batch.n + len(self.prefills)

    @property
    def queued(self) -> int:
        """Requests that have not, or not again."""
        return len(self.waiting) + len(self.arrived) + len(self.seen)

    @property
    def load(self) -> int:
        """Requests running or waiting here."""
        return self.running + self.queued

    def submit(self, request: int) -> None:
        """Take a request in; it is seen at the next step boundary."""
        self.ledger.replica[request] = self.index
        self.arrived.append(request)
        if not self.wake.triggered:
            self.wake.succeed()

    def plan_step(self) -> None:
        """Decide what is in the step: running requests first, then those that wait."""
        if self.arrived or self.seen:
            self._see_arrivals()
        if not self.rules.mixed and (self.prefills or self.waiting):
            self.reserve_running(0)
            # A prompt that was put out would else come back at once, again and again, and hold up the decodes for good.
            if not self.preempted:
                self.admit_waiting()
            if not self.prefills:
                self.reserve_running(self.batch.n)
            return
        self.reserve_running(self.batch.n)
        self.admit_waiting()

    def _see_arrivals(self) -> None:
        for request in self.arrived:
            self.ledger.queued[request] = self.env.now
        # Scheduling ahead, a step was planned while the one before it ran: it knows nothing of what came meanwhile.
        idle = not (self.batch.n or self.prefills or self.waiting or self.seen)
        self.waiting.extend(self.seen)
        self.seen, self.arrived = self.arrived, self.seen
        self.arrived.clear()
        if idle or not self.limits.ahead:
            self.waiting.extend(self.seen)
            self.seen.clear()

    # 1. Running requests first.

    def reserve_running(self, decodes: int) -> None:
        """Give ``decodes`` running decodes their 1+γ tokens, unfinished prefills a chunk, and all their KV."""
        budget = self.limits.max_num_batched_tokens
        self.scheduled, self.last_width = min(decodes, budget // self.width), self.width
        budget -= self.scheduled * self.width
        if self.scheduled < decodes and budget:  # what is left of it is the next one's, which then has fewer drafts
            self.scheduled, self.last_width, budget = self.scheduled + 1, budget, 0
        for p in self.prefills:
            p.chunk = min(p.tokens - p.done, budget)
            budget -= p.chunk
        self.budget, self.preempted, self.counted = budget, False, False
        # A bound on the blocks needed, without a look at each request; counted only where it matters.
        most = (self.batch.kv_total + self.batch.n * (self.reserve + self.block - 1)) // self.block
        most += sum(self._blocks(p.done + p.chunk) for p in self.prefills)
        self.free_blocks = self.limits.kv_blocks - most
        if self.free_blocks < 0 or self.pool.tracking:
            self._count_blocks()
        if self.pool.sharing:
            for p in self.prefills:
                self.pool.fill(p.request, p.done + p.chunk)

    def _count_blocks(self) -> None:
        """Count blocks request by request; on shortage preempt the tail of the running list."""
        self.counted = True
        reserve = np.where(np.arange(self.batch.n) < self.scheduled, self.reserve, 0)
        if self.scheduled:
            reserve[self.scheduled - 1] = min(self.reserve, self.last_width)
        needed = self._blocks(self.batch.kv_tokens() + reserve)
        used = int(needed.sum()) + sum(self._blocks(p.done + p.chunk) for p in self.prefills) + self.pool.shared
        if used > self.limits.kv_blocks:
            used = self._preempt(needed, used)
        if self.pool.tracking:
            self.pool.settle(used)
        self.free_blocks = self.limits.kv_blocks - used

    def _preempt(self, needed: NDArray[np.int64], used: int) -> int:
        """Send the running list's last ones back to wait until the others' blocks fit; blocks then used."""
        pool, ledger, n = self.pool, self.ledger, self.batch.n
        if not pool.tracking:  # what was free until now holds nothing that anybody looks for
            pool.settle(
                int(self._blocks(self.batch.kv_tokens()).sum()) + sum(self._blocks(p.done) for p in self.prefills)
            )
        while used > self.limits.kv_blocks:
            shared = pool.shared
            if self.prefills:
                p = self.prefills.pop()
                request, named, held, blocks = p.request, p.done, p.done, self._blocks(p.done + p.chunk)
            else:
                n -= 1
                [(request, named, held)] = self.batch.leave(np.arange(n + 1) == n)
                blocks = int(needed[n])
            pool.release(request, ledger.content(request), named, held, findable=True)
            used += pool.shared - shared - blocks
            ledger.preemptions[request] += 1
            self.waiting.appendleft(request)
        if n < self.scheduled:
            self.scheduled, self.last_width = n, self.width
        self.preempted = True
        self.budget = self.limits.max_num_batched_tokens - (self.scheduled - 1) * self.width - self.last_width
        self.budget -= sum(p.chunk for p in self.prefills)
        return used

    def _blocks(self, tokens: Any) -> Any:
        """KV blocks that hold ``tokens`` tokens."""
        return (tokens + self.block - 1) // self.block

    # 2. Admissions.

    def admit_waiting(self) -> None:
        """Admit waiting requests, first come first served."""
        limits, rules, ledger, pool = self.limits, self.rules, self.ledger, self.pool
        if self.preempted and rules.pause:
            return
        while self.waiting and self.batch.n + len(self.prefills) < limits.max_num_seqs:
            request = self.waiting[0]
            tokens = ledger.prompt_tokens[request] + ledger.emitted[request]
            match = pool.find(ledger.content(request), tokens, self._named) if pool.tracking else NOTHING_FOUND
            done = match.hit * self.block
            if limits.prefill_free:
                # The prompt takes KV alone; the first token is there at once, and it decodes in this step.
                chunk, held, known = self.width, tokens + self.reserve, tokens + self.reserve
            else:
                chunk = max(min(tokens - done, self.budget), 1)
                held, known = done + chunk, tokens if rules.whole_prompt else done + chunk
            if self._blocks(known) - match.in_use > self.free_blocks and not self.counted:
                self._count_blocks()
            if chunk > self.budget or self._blocks(known) - match.in_use > self.free_blocks:
                return
            if self.prefills and not rules.split and chunk < tokens - done:
                return
            self.waiting.popleft()
            self.budget -= chunk
            self.free_blocks -= self._blocks(held) - match.in_use
            if pool.tracking:
                pool.take(request, ledger.content(request), match)
                pool.fill(request, held)
                pool.settle(limits.kv_blocks - self.free_blocks)
            ledger.cached[request] += done
            if isnan(ledger.scheduled[request]):  # not a preempted one
                ledger.scheduled[request] = self.env.now
            if limits.prefill_free:
                self._leave_behind(self._first_tokens([request]))
                self.scheduled = self.batch.n
            else:
                self.prefills.append(Prefill(request, tokens, done, chunk))

    def _named(self, request: int) -> int:
        """Tokens of a running request whose blocks can be found: they get their names as they are given out."""
        place = np.flatnonzero(self.batch.ids == request)
        if not len(place):
            return next(p.done + p.chunk for p in self.prefills if p.request == request)
        kv, last = int(self.batch.kv_tokens()[place[0]]), int(self.batch.last[place[0]])
        return kv + 1 if place[0] < self.scheduled else kv - last + 1

    def _leave_behind(self, finished: list[Gone]) -> None:
        """Requests finished: give their blocks back, and tell."""
        if self.pool.tracking:
            for request, named, held in finished:
                self.pool.release(request, self.ledger.content(request), named, held, findable=False)
        self.on_finish([request for request, _, _ in finished])

    # 3. The scheduler, and 4. what the step costs and emits.

    def begin_step(self) -> float:
        """Ask the scheduler for draft lengths and return how long the step lasts, in seconds."""
        n, prefill_tokens, finishing, draft_tokens, fixed = self.scheduled, 0, 0, 0, 0.0
        shape = self._shape(n)
        for p in self.prefills:
            prefill_tokens += p.chunk
            finishing += p.done + p.chunk == p.tokens
        self.prefilled |= prefill_tokens > 0
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
            if not self.counted:
                self._count_blocks()
            held = self.limits.kv_blocks - self.free_blocks
            load = self.running, len(self.waiting)
            self.row = (self.env.now, n, num_tokens, prefill_tokens, draft_tokens, kv_tokens, held, *load)
        return seconds

    def _shape(self, n: int) -> Shape:
        """What this step's forward holds, drafts left out."""
        if not self.prefills:
            shape = Shape(n, self.batch.kv_total)
        else:
            chunks = [p.chunk for p in self.prefills if p.chunk]
            histories = [p.done for p in self.prefills if p.chunk]
            if chunks and not self.rules.own_prefills:
                chunks, histories = [sum(chunks)], [max(histories)]
            shape = Shape(n, self.batch.kv_total, chunks, histories)
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
        prefilled, self.prefilled = self.prefilled, False
        self.view = view = self.view_type(
            tape, rows, ids, curve, fixed, prefill_tokens, finishing, prefilled, self.previous
        )
        if isinstance(view, TapeOracleView):
            view.accepted = tape.accepted.take(rows)
        lens: NDArray[np.int64] = self.schedule(view) if self.trusted else ask(self.scheduler, self.schedule, view)
        if tape.proposed is not None:
            lens = np.minimum(lens, tape.proposed.take(rows))
        if self.last_width < self.width:
            lens = lens.copy()
            lens[n - 1] = min(lens[n - 1], self.last_width - 1)
        return lens

    def end_step(self, seconds: float) -> None:
        """Emit what a step of ``seconds`` produced; let finished requests go and finished prompts decode."""
        emitted = 0
        finished: list[Gone] = []
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
            start, *held = self.row
            self.steps.append((self.index, start, seconds, *held, emitted))
        if finished:
            self._leave_behind(finished)

    def _emit(self, n: int) -> tuple[int, list[Gone]]:
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
        for request, _, _ in finished:
            self.ledger.finish[request] = self.env.now
        return emitted, finished

    def _first_tokens(self, requests: list[int]) -> list[Gone]:
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
                kv = ledger.prompt_tokens[request] + ledger.emitted[request] - 1
                finished.append(Gone(request, kv, kv))
        self.batch.join(going_on)
        return finished

    def close(self) -> None:
        """The run is over: enter what requests still decoding here have done."""
        self.batch.leave(np.ones(self.batch.n, dtype=bool))
