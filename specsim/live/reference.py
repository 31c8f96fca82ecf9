"""The reference engine: a real target and a real drafter under the scheduler that was simulated.

A step is what a step of the simulator is (without splitting prompts): waiting requests are admitted first come, first
served, the drafter proposes a block for each decoding request, the scheduler says how much of each is verified, and
one forward runs those tokens and the prompts of the newcomers. Outputs have the target's own distribution.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from specsim.asking import ask, fresh, scheduler_name
from specsim.drafters.draft import Draft, Drafter
from specsim.drafters.load import has_confidence
from specsim.drafters.lookup import NoDrafter
from specsim.drafters.responses import stream_seed
from specsim.drafters.speculate import HISTORY, Batch, Verified, step_view
from specsim.drafters.target import Target
from specsim.engine import check_fit
from specsim.hardware import Profile, Shape, step_cost
from specsim.schedulers import NoSpec
from specsim.types import SpecsimError
from specsim.views import StepRecord

STREAM = 5
"""The engine's stream of the seed."""
LONGEST = 2048
"""Tokens of a request, unless told."""
COLDEST = 1e-5
"""Temperatures below are taken for 0, as vLLM does."""


@dataclass(eq=False)
class Request:
    """A request and what came of it: ``output`` tokens, end token included, and why it ended (``finish``)."""

    number: int
    prompt: list[int]
    max_tokens: int
    temperature: float
    ignore_eos: bool
    output: list[int] = field(default_factory=list)
    finish: Literal["stop", "length", "cancelled"] | None = None
    cancelled: bool = False


@dataclass
class Counts:
    """What was done since the start.

    ``cycles`` of decoding requests, ``drafts`` those with verified tokens, ``accepted`` of the ``draft_tokens``
    verified, ``accepted_at`` [γ] by position; tokens accepted past a request's end count, as in vLLM.
    """

    steps: int = 0
    cycles: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    accepted_at: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    prompt_tokens: int = 0
    generated: int = 0

    @property
    def tau(self) -> float:
        """Tokens a cycle."""
        return 1 + self.accepted / self.cycles if self.cycles else 1.0

    def copy(self) -> Counts:
        """As they stand, whatever comes."""
        return replace(self, accepted_at=self.accepted_at.copy())


class Engine:
    """Serves ``target`` with ``drafter`` (None: no speculation) under ``scheduler``; :meth:`step` until not busy.

    ``max_num_seqs`` requests at once, each of at most ``max_model_len`` tokens, prompt and answer (None: 2048, or what
    the target was made for); prompts join whole, together at most ``max_num_batched_tokens`` a step with the decodes,
    a larger one as the only prompt of its step. ``temperature`` is that of requests
    that name none. The scheduler is told the step times of ``profile`` (its last slope continues beyond what was
    measured), or that all steps last the same. ``log`` gets a row a step: ``start`` and ``seconds`` (of which
    ``draft_seconds`` until the scheduler answered), ``num_seqs``, ``kv_tokens``, ``draft_tokens``, ``prefills``,
    ``prefill_tokens``, ``emitted``, ``waiting``. Requests that join at the same steps get the same tokens for the same
    ``seed``. Raises SpecsimError where scheduler, drafter and profile do not fit each other.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        scheduler: Any,
        *,
        max_num_seqs: int = 16,
        max_model_len: int | None = None,
        max_num_batched_tokens: int = 8192,
        temperature: float = 1.0,
        seed: int = 0,
        profile: Profile | None = None,
        log: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        known = None if drafter is None else type(drafter).__name__
        if getattr(scheduler, "oracle", False):
            raise SpecsimError(f"scheduler {scheduler_name(scheduler)}: knows what will be accepted: only simulated")
        check_fit(
            scheduler, known, 0 if drafter is None else drafter.gamma, drafter is not None and has_confidence(drafter)
        )
        if drafter is None or isinstance(scheduler, NoSpec):
            drafter = NoDrafter()
        most = target.max_positions or max_model_len or LONGEST
        max_model_len = min(LONGEST, most) if max_model_len is None else max_model_len
        if max_model_len > most:
            raise SpecsimError(f"max_model_len: expected at most {most}, as target {target.name}, got {max_model_len}")
        self.target, self.scheduler, self.gamma = target, scheduler, drafter.gamma
        self.max_num_seqs, self.max_model_len, self.temperature = max_num_seqs, max_model_len, temperature
        self.max_num_batched_tokens = max_num_batched_tokens
        self.schedule = fresh(scheduler)
        self.remembers = getattr(scheduler, "uses_previous", True)
        self.cost, self.sync = None, 0.0
        if profile is not None:
            most = max(max_num_batched_tokens, max_model_len) + max_num_seqs * (1 + self.gamma)
            self.cost = step_cost(profile, most, max_num_seqs, self.gamma, extrapolate=True)
            self.sync = profile.sync_seconds if getattr(scheduler, "synchronous", False) else 0.0
        size = max_model_len + self.gamma + 2
        try:
            self.batch = Batch(target, drafter, max_num_seqs, size, stream_seed(seed, STREAM))
        except RuntimeError as error:  # torch's word for too little memory
            raise SpecsimError(
                f"KV of {max_num_seqs} rows (max_num_seqs) of {size} tokens (max_model_len) on {target.device}: "
                "expected less, it cannot be had"
            ) from error
        self.log = log
        self.numbers, self.began = count(), time.perf_counter()
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in the batch's order
        self.previous: deque[StepRecord] = deque(maxlen=HISTORY)
        self.prefilled = False
        self.counts = Counts(accepted_at=np.zeros(self.gamma, dtype=np.int64))

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.running or self.waiting)

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int | None = None,
        temperature: float | None = None,
        ignore_eos: bool = False,
    ) -> Request:
        """Let a request of token ids wait for its turn; it answers up to ``max_tokens`` (None: what there is room for).

        May be called while a step runs in another thread. Raises SpecsimError where it can never be served.
        """
        room = self.max_model_len - len(prompt)
        if not prompt:
            raise SpecsimError("prompt: expected at least one token")
        if room < 1:
            raise SpecsimError(
                f"prompt: expected fewer than {self.max_model_len} tokens (max_model_len), got {len(prompt)}"
            )
        if wrong := next((t for t in prompt if not 0 <= t < self.target.vocab_size), None):
            raise SpecsimError(f"prompt: expected token ids within 0..{self.target.vocab_size - 1}, got {wrong}")
        if max_tokens is not None and not 1 <= max_tokens <= room:
            raise SpecsimError(
                f"max_tokens: expected 1..{room} after a prompt of {len(prompt)} tokens (max_model_len "
                f"{self.max_model_len}), got {max_tokens}"
            )
        heat = self.temperature if temperature is None else temperature
        heat = heat if heat >= COLDEST else 0.0
        request = Request(next(self.numbers), list(prompt), max_tokens or room, heat, ignore_eos)
        self.waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """Let ``request`` go at the next step boundary; may be called while a step runs in another thread."""
        request.cancelled = True

    def step(self) -> list[Request]:
        """Run one step and return the requests that got tokens or ended.

        Raises SpecsimError for a scheduler that fails or answers what it must not; the engine is then of no more use.
        """
        cancelled = self._let_go()
        joining = self._admit()
        n, m = len(self.running), len(joining)
        if not n and not m:
            return cancelled
        start = time.perf_counter()
        made, lens = None, np.zeros(n, dtype=np.int64)
        self.prefilled |= bool(m)
        if n and self.gamma:
            made, lens = self._plan(joining)
        planned = time.perf_counter()
        asked = torch.as_tensor(lens, device=self.target.device)
        seen = self.batch.verify(made, asked, [(r.prompt, r.temperature) for r in joining])
        kv_tokens = self._kv_tokens()
        emitted = self._emit(joining, lens, seen)
        if self.log is not None:
            seconds = time.perf_counter() - start
            row = {"start": start - self.began, "seconds": seconds, "draft_seconds": planned - start, "num_seqs": n,
                   "kv_tokens": sum(kv_tokens), "draft_tokens": int(lens.sum()), "prefills": m,
                   "prefill_tokens": sum(len(r.prompt) for r in joining), "emitted": emitted,
                   "waiting": len(self.waiting)}  # fmt: skip
            self.log(row)
        return cancelled + self._settle(joining)

    def _let_go(self) -> list[Request]:
        """Cancelled requests leave: the row of one that runs is free for the next."""
        rows = [row for row, request in enumerate(self.running) if request.cancelled]
        gone = [self.running[row] for row in rows] + [r for r in list(self.waiting) if r.cancelled]
        for request in gone:
            request.finish = "cancelled"
            if request in self.waiting:
                self.waiting.remove(request)
        self.batch.leave(rows)
        self.running = [r for r in self.running if r.finish is None]
        return gone

    def _admit(self) -> list[Request]:
        """Waiting requests that join in this step, first come, first served."""
        joining: list[Request] = []
        budget = self.max_num_batched_tokens - len(self.running) * (1 + self.gamma)
        while self.waiting and len(self.running) + len(joining) < self.max_num_seqs:
            tokens = len(self.waiting[0].prompt)
            if tokens > budget and joining:
                break
            joining.append(self.waiting.popleft())
            budget -= tokens
        return joining

    def _kv_tokens(self) -> list[int]:
        """KV tokens that each running request holds."""
        return [len(r.prompt) + len(r.output) - 1 for r in self.running]

    def _plan(self, joining: list[Request]) -> tuple[Draft, NDArray[np.int64]]:
        """Draft, and ask the scheduler how much is verified."""
        n = len(self.running)
        made = self.batch.draft()
        chunks = [len(r.prompt) for r in joining]
        self.view = step_view(
            np.array([r.number for r in self.running]), made, np.arange(n), self._prices(chunks),
            prefill_tokens=sum(chunks), finishing_prefills=len(chunks), prefilled=self.prefilled,
            previous=tuple(self.previous),
        )  # fmt: skip
        self.prefilled = False
        lens = ask(self.scheduler, self.schedule, self.view)
        return made, np.minimum(lens, made.proposed[:, 0].cpu().numpy())

    def _prices(self, chunks: list[int]) -> Callable[[Any], Any]:
        """Seconds of this step by draft tokens."""
        n = len(self.running)
        most = n * self.gamma
        if self.cost is None:
            curve, fixed = np.ones(most + 1), 0.0
        else:
            kv = self._kv_tokens()
            shape = Shape(n, sum(kv), chunks, [0] * len(chunks), min(kv), max(kv))
            curve, fixed = self.cost.curve(shape, most), float(self.cost.draft[n]) + self.sync
        return lambda k: np.where(np.asarray(k) > most, np.inf, curve.take(k, mode="clip")) + fixed

    def _emit(self, joining: list[Request], lens: NDArray[np.int64], seen: Verified) -> int:
        """Give each request its tokens, up to its end; how many those are."""
        kept, tokens, first = seen.kept.cpu().numpy(), seen.tokens.tolist(), seen.first.tolist()
        counts, made = self.counts, np.zeros(len(self.running), dtype=np.int64)
        for i, request in enumerate(self.running):
            made[i] = self._extend(request, tokens[i][: kept[i] + 1])
        for request, token in zip(joining, first, strict=True):
            counts.prompt_tokens += len(request.prompt)
            self._extend(request, [token])
        if self.gamma and len(kept) and self.remembers:
            self.previous.append(StepRecord(self.view, lens, made))
        counts.steps += 1
        counts.cycles += len(kept)
        counts.drafts += int((lens > 0).sum())
        counts.draft_tokens += int(lens.sum())
        counts.accepted += int(kept.sum())
        counts.accepted_at += (kept[:, None] > np.arange(self.gamma)).sum(0)
        emitted = int(made.sum()) + len(joining)
        counts.generated += emitted
        return emitted

    def _extend(self, request: Request, tokens: list[int]) -> int:
        """Append ``tokens`` up to the request's end; how many."""
        for i, token in enumerate(tokens, start=1):
            request.output.append(token)
            if not request.ignore_eos and token in self.target.end_tokens:
                request.finish = "stop"
            elif len(request.output) == request.max_tokens:
                request.finish = "length"
            if request.finish:
                return i
        return len(tokens)

    def _settle(self, joining: list[Request]) -> list[Request]:
        """Those who ended leave; everybody who was in the step."""
        everybody = self.running + joining
        self.batch.leave([row for row, request in enumerate(everybody) if request.finish])
        self.running = [request for request in everybody if request.finish is None]
        return everybody
