"""Verification schedulers: how many draft tokens of each request the target verifies in a step.

A scheduler is any callable that takes a :class:`StepView` and returns the draft lengths, int [R],
each within 0..γ. A researcher's own is a few lines::

    def half(view):                      # verify the first half of every block
        return np.full(view.num_seqs, view.gamma // 2)

Optional attributes: ``synchronous`` (True: the step waits for this step's confidences and pays the
profile's sync_seconds), ``needs_confidence`` (True: refused on a trace without them), ``gamma``
(the least block length it needs), ``uses_previous`` (True: fill ``view.previous``), ``start()`` (returns
a fresh callable for each replica: for schedulers with memory).
"""

from __future__ import annotations

from collections import deque
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from specsim.asking import Scheduler, scheduler_name
from specsim.types import SpecsimError
from specsim.views import Array, Lens, StepView


def top_k(survival: Array, k: int) -> Lens:
    """Draft lengths [R] that admit the ``k`` largest of ``survival`` [R, γ].

    Ties go to the smaller position, then to the earlier request, whatever the values: since
    survival never increases along a block, what is admitted is a prefix of each block.
    """
    requests, gamma = survival.shape
    if k <= 0:
        return np.zeros(requests, dtype=np.int64)
    if k >= survival.size:
        return np.full(requests, gamma)
    flat = survival.ravel()
    return _admit(survival, float(np.partition(flat, flat.size - k)[flat.size - k]), k)


def _admit(survival: Array, cut: float, k: int) -> Lens:
    """Draft lengths that admit ``k`` positions with survival at or above ``cut``, the k-th largest."""
    admitted = survival >= cut
    lens = row_counts(admitted)
    excess = np.count_nonzero(admitted) - k
    if excess > 0:
        tied = np.flatnonzero((survival == cut).T)[-excess:]  # position-major: the last are left out
        lens -= np.bincount(tied % len(survival), minlength=len(survival))
    return lens


def row_counts(mask: NDArray[np.bool_]) -> Lens:
    """True entries a row; many rows are counted by a product of small integers, several times faster than a sum."""
    if mask.size < 400:
        return cast(Lens, np.add.reduce(mask, axis=1))
    return (mask.view(np.int8) @ _ONES8[: mask.shape[1]]).astype(np.int64)


def throughput_curve(view: StepView, ranked: Array) -> Array:
    """Θ(K) for K = 0..len(ranked): expected tokens a second with the K best draft tokens verified.

    ``ranked`` holds survivals in descending order. The numerator starts at E0: one token for each
    decoding request and each prefill that ends in this step. (arXiv 2607.05147, Algorithm 1.)
    """
    expected = np.empty(len(ranked) + 1)
    expected[0] = view.num_seqs + view.finishing_prefills
    expected[1:] = ranked
    np.add.accumulate(expected, out=expected)
    expected /= view.step_curve(len(ranked))
    return expected


def _descending(survival: Array) -> Array:
    ranked = survival.flatten()
    ranked.sort()
    return ranked[::-1]


_ONES8 = np.ones(64, dtype=np.int8)


class BuiltIn:
    """Labels: the class name and the arguments that differ from their defaults, as one would type them."""

    synchronous = False
    needs_confidence = False
    uses_previous = False
    replay: Literal["exact", "approximate"] = "exact"

    def __repr__(self) -> str:
        shown = []
        for f in fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            if isinstance(value, np.generic):
                value = value.item()
            text = scheduler_name(value) if callable(value) else repr(value)
            if f.default is MISSING:
                shown.append(text)
            elif value != f.default:
                shown.append(f"{f.name}={text}")
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, repr=False)
class NoSpec(BuiltIn):
    """No speculation: no drafter runs, and a decode takes one token."""

    def __call__(self, view: StepView) -> Lens:
        return np.zeros(view.num_seqs, dtype=np.int64)


@dataclass(frozen=True, repr=False)
class StaticGamma(BuiltIn):
    """Verify the first γ tokens of every block (``gamma``), always."""

    gamma: int

    def __post_init__(self) -> None:
        at_least("StaticGamma", "gamma", self.gamma, 0)

    def __call__(self, view: StepView) -> Lens:
        return np.full(view.num_seqs, self.gamma)


@dataclass(frozen=True, repr=False)
class MTP1(BuiltIn):
    """One token from a multi-token-prediction module, always verified. Wants a drafter of γ = 1."""

    exact_gamma = 1

    def __call__(self, view: StepView) -> Lens:
        return np.ones(view.num_seqs, dtype=np.int64)


@dataclass(frozen=True, repr=False)
class BatchSizeTable(BuiltIn):
    """Draft length by decoding requests: ((lo, hi, K), ...), both ends included, the first row from 1.

    vLLM's ``num_speculative_tokens_per_batch_size`` (vllm-project/vllm#32374, ``v1/spec_decode/dynamic/utils.py``): a
    number between two rows or beyond the last has the K of the row before, and no K is more than γ. A K of 0 wants a
    row that says so. vLLM counts the requests whose prompts are in the step too; here only those that decode count.
    SpecsimError: no rows, a first one that does not begin at 1, rows that overlap, K below 0.
    """

    table: tuple[tuple[int, int, int], ...]

    def __post_init__(self) -> None:
        try:
            rows = tuple(sorted((int(lo), int(hi), int(k)) for lo, hi, k in self.table))
        except (TypeError, ValueError) as error:
            raise SpecsimError(f"BatchSizeTable: expected rows (lo, hi, K), got {self.table!r}") from error
        if not rows or rows[0][0] != 1:
            told = rows[0] if rows else self.table
            raise SpecsimError(f"BatchSizeTable: expected rows (lo, hi, K), the first of them from 1, got {told!r}")
        last = 0
        for lo, hi, k in rows:
            if not last < lo <= hi or k < 0:
                expected = "expected rows (lo, hi, K) with 1 <= lo <= hi that do not overlap"
                raise SpecsimError(f"BatchSizeTable: {expected}, got {(lo, hi, k)}")
            last = hi
        object.__setattr__(self, "table", rows)

    def __call__(self, view: StepView) -> Lens:
        n = view.num_seqs
        return np.full(n, min(next(k for lo, _, k in reversed(self.table) if lo <= n), view.gamma))


@dataclass(frozen=True, repr=False)
class Threshold(BuiltIn):
    """Verify each block up to the first position whose confidence lies below a threshold (``confidence``)."""

    confidence: float
    synchronous = True
    needs_confidence = True

    def __post_init__(self) -> None:
        chance("Threshold", "confidence", self.confidence)

    def __call__(self, view: StepView) -> Lens:
        return row_counts(np.logical_and.accumulate(view.confidence >= self.confidence, axis=1))


@dataclass(frozen=True, repr=False)
class DSparkGreedy(BuiltIn):
    """Algorithm 1 of arXiv 2607.05147: admit in descending survival while Θ, expected tokens a second, rises.

    It stops at the first admission that does not raise Θ, which keeps it lossless.
    """

    synchronous = True
    needs_confidence = True

    def __call__(self, view: StepView) -> Lens:
        ranked = _descending(view.survival)
        theta = throughput_curve(view, ranked)
        falls = theta[1:] <= theta[:-1]
        k = int(falls.argmax())
        if not falls[k]:
            return np.full(view.num_seqs, view.gamma)
        return _admit(view.survival, float(ranked[k - 1]), k) if k else np.zeros(view.num_seqs, dtype=np.int64)


@dataclass(frozen=True, repr=False)
class GlobalArgmax(BuiltIn):
    """The most expected tokens a second on this step's own confidences. Not lossless (the paper's Appendix A)."""

    synchronous = True
    needs_confidence = True
    replay = "approximate"

    def __call__(self, view: StepView) -> Lens:
        theta = throughput_curve(view, _descending(view.survival))
        return top_k(view.survival, int(theta.argmax()))


@dataclass(frozen=True, repr=False)
class DSparkAsync(BuiltIn):
    """The production variant (arXiv 2607.05147, §5.2): plan on stale survivals, admit on current ones.

    The number of draft tokens K is the unconstrained argmax of Θ over the survivals of ``staleness``
    steps ago, with the current batch and prefill tokens; requests younger than that count with
    survival ``newcomer``, or with the mean of the others ("mean"). The K largest current survivals are
    then verified. Staleness 1 is vLLM's, 2 DeepSeek's and SGLang's.

    What engines add to that: survivals below ``floor`` are never verified (SGLang: 1e-6); ``least`` drafts a
    request are, at least; ``fill`` verifies as many more as cost nothing, up to the next CUDA-graph size
    (SGLang's optional filling of the padding); ``reset`` forgets the past wherever prompts were computed since
    the last step (SGLang's extend steps).
    """

    staleness: int = 2
    newcomer: float | Literal["mean"] = 1.0
    floor: float = 0.0
    least: int = 0
    fill: bool = False
    reset: bool = False
    needs_confidence = True
    replay = "approximate"

    def __post_init__(self) -> None:
        at_least("DSparkAsync", "staleness", self.staleness, 1)
        at_least("DSparkAsync", "least", self.least, 0)
        if self.newcomer != "mean":
            chance("DSparkAsync", "newcomer", self.newcomer, "0..1 or 'mean'")
        chance("DSparkAsync", "floor", self.floor, "a survival, 0 or more and below 1", below=1)
        truth("DSparkAsync", "fill", self.fill)
        truth("DSparkAsync", "reset", self.reset)

    def start(self) -> Scheduler:
        """A fresh scheduler that remembers the survivals of the last steps."""
        memory: deque[tuple[Array, Array]] = deque(maxlen=self.staleness)

        def schedule(view: StepView) -> Lens:
            current = view.survival
            if self.reset and view.prefilled:
                memory.clear()
            if len(memory) == self.staleness:
                stale = self._recall(*memory[0], view)
            else:
                stale = np.full(current.shape, 1.0 if self.newcomer == "mean" else self.newcomer)
            memory.append((view.request_ids, current))
            k = int(throughput_curve(view, _descending(stale)).argmax())
            return top_k(current, k) if self._plain else self._bounded(view, current, k)

        return schedule

    @property
    def _plain(self) -> bool:
        return not (self.floor or self.least or self.fill)

    def _bounded(self, view: StepView, survival: Array, k: int) -> Lens:
        """The ``k`` largest survivals within what engines add: ``least`` of every block go first."""
        least = min(self.least, view.gamma)
        k = max(k, least * view.num_seqs)
        if self.fill:
            price = view.step_curve(survival.size)
            k += int((price[k:] <= price[k]).cumprod().sum()) - 1
        lens = (
            least + top_k(survival[:, least:], k - least * view.num_seqs)
            if least < view.gamma
            else np.full(len(survival), least)
        )
        return np.maximum(np.minimum(lens, row_counts(survival >= self.floor)), least) if self.floor else lens

    def _recall(self, ids: Array, survival: Array, view: StepView) -> Array:
        """Survivals [R, γ] planned with: the remembered rows of the requests still here."""
        if ids is view.request_ids:  # the batch has not changed since
            return survival
        order = np.argsort(ids)
        at = order.take(np.searchsorted(ids, view.request_ids, sorter=order), mode="clip")
        found = ids[at] == view.request_ids
        known = survival[at]
        if not found.all():
            new: Any = self.newcomer
            if new == "mean":
                new = known[found].mean(axis=0) if found.any() else 1.0
            known[~found] = new
        return known

    def __call__(self, view: StepView) -> Lens:
        raise TypeError("DSparkAsync remembers past steps: call start() and use what it returns")


@dataclass(frozen=True, repr=False)
class LoadBlind(BuiltIn):
    """vllm-ascend's budget, which knows nothing of load (vllm-project/vllm-ascend#13216, #13819).

    K drafts a request: ``least`` of each block, and of the others as many as are left, those that survive best. In
    every ``every``-th step K becomes the mean number of positions whose survival there reaches ``survival``, rounded
    up; an even one below γ goes up by one (an even number of tokens to verify ran faster on their chips). Before that
    K is ``first``; K is never more than γ. The rule and its numbers are those of ``DynamicSpecScheduler`` at commit
    c78aafe (earlier ones had 0.7 and 50 steps).

    The new K holds for the very blocks that it was counted on. Where drafts are sampled that is not lossless: whether
    a token is verified then depends on the confidences of those after it, and so on itself. (With argmax drafts, the
    default of that engine, nothing in a block is chance, and nothing leaks.) ``at_once=False`` lets K wait for the next
    step, which keeps the target's distribution.
    """

    survival: float = 0.3
    every: int = 16
    least: int = 1
    first: int = 5
    at_once: bool = True
    needs_confidence = True
    replay = "approximate"

    def __post_init__(self) -> None:
        chance("LoadBlind", "survival", self.survival)
        at_least("LoadBlind", "every", self.every, 1)
        at_least("LoadBlind", "least", self.least, 0)
        at_least("LoadBlind", "first", self.first, 0)
        truth("LoadBlind", "at_once", self.at_once)

    def start(self) -> Scheduler:
        """A fresh scheduler with its first budget."""
        steps, budget = 0, self.first

        def schedule(view: StepView) -> Lens:
            nonlocal steps, budget
            n, gamma, before = view.num_seqs, view.gamma, budget
            steps += 1
            if steps % self.every == 0:
                budget = -(-int(np.count_nonzero(view.survival >= self.survival)) // n)
                budget += budget % 2 == 0 and budget < gamma
            least, k = min(self.least, gamma), budget if self.at_once else before
            return least + top_k(view.survival[:, least:], n * (k - least))

        return schedule

    def __call__(self, view: StepView) -> Lens:
        raise TypeError("LoadBlind remembers past steps: call start() and use what it returns")


@dataclass(frozen=True, repr=False)
class Oracle(BuiltIn):
    """An upper bound that knows what will be accepted: verifies accepted tokens alone, while Θ rises most."""

    oracle = True

    def __call__(self, view: StepView) -> Lens:
        accepted: Lens = view.accepted  # type: ignore[attr-defined]
        survives = (np.arange(view.gamma) < accepted[:, None]).astype(np.float64)
        ranked = np.ones(int(accepted.sum()))
        return top_k(survives, int(throughput_curve(view, ranked).argmax()))


def at_least(policy: str, field: str, value: int, low: int) -> None:
    """SpecsimError unless the ``policy``'s ``field`` is a whole number, ``low`` or more."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or not low <= value <= 1 << 20:
        raise SpecsimError(f"{policy}: {field}: expected a whole number, {low} or more, got {value!r}")


def chance(policy: str, field: str, value: Any, expected: str = "0..1", below: float = np.inf) -> None:
    """SpecsimError unless the ``policy``'s ``field`` is a number within 0..1, and less than ``below``."""
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not (number and 0 <= value <= 1 and value < below):
        raise SpecsimError(f"{policy}: {field}: expected {expected}, got {value!r}")


def truth(policy: str, field: str, value: Any) -> None:
    """SpecsimError unless the ``policy``'s ``field`` is True or False."""
    if not isinstance(value, bool | np.bool_):
        raise SpecsimError(f"{policy}: {field}: expected True or False, got {value!r}")
