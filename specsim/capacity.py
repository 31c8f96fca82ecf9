"""The most load that one replica sustains within a tier's promises: a bracketing search on paired trials.

Each seed has its own search, and all schedulers meet the same requests and blocks under it. From a load on the grid the
search strides until one load keeps the promises and a higher one breaks them, then closes in on two neighbours of the
grid, guessing by a straight line through the logarithms of load and of the use of the worst promise. Where that line
crosses 1 between the two neighbours is the seed's capacity. Later seeds begin where the first one ended. With promises
that more load makes harder to keep, the two neighbours, and so the capacity, do not depend on where the search began.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import joblib
import numpy as np

from specsim.engine import Scenario
from specsim.parallel import side_by_side
from specsim.pareto import half_width, number
from specsim.tiers import Tier
from specsim.trial import GROWTH, Grid, Trial, run_trial
from specsim.types import SpecsimError

ALONE = 0.1
"""Mean requests in the system below which a request is as good as alone: lighter loads are no faster."""

T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    """What is asked about: a policy on a profile, one replica. ``name`` tells cases of one plan apart."""

    name: str
    scenario: Scenario


class Ask(NamedTuple):
    """A trial that a search waits for: of a case, at a load of the grid, under a seed."""

    case: Case
    at: int
    seed: int


Search = Generator[list[Ask], None, T]
"""A search yields the trials that it needs next, reads them off the Trials, and returns what it found."""


class Trials:
    """Runs trials, each once: searches share them. The same whatever ``jobs`` (processes; -1: one a core)."""

    def __init__(self, grid: Grid, jobs: int = 1, progress: Callable[[int, int], None] | None = None) -> None:
        if jobs == 0 or jobs < -1:
            raise SpecsimError(f"plan: jobs: expected -1 (one a core), or 1 or more, got {jobs}")
        self.grid, self.progress = grid, progress
        self.jobs = joblib.cpu_count() if jobs < 0 else jobs
        self.done: dict[tuple[str, int, int], Trial] = {}

    def __call__(self, ask: Ask) -> Trial:
        """The trial asked for, which must have been run."""
        return self.done[ask.case.name, ask.at, ask.seed]

    def of(self, case: Case, seed: int) -> list[tuple[int, Trial]]:
        """The trials of ``case`` under ``seed`` so far, by load."""
        found = [(index, t) for (name, index, s), t in self.done.items() if name == case.name and s == seed]
        return sorted(found, key=lambda pair: pair[0])

    def drive(self, searches: Sequence[Search[T]]) -> list[T]:
        """Run searches side by side, what they ask for in parallel; what each returned, in their order."""
        found: dict[int, T] = {}
        waiting: dict[int, list[Ask]] = {}
        going = dict(enumerate(searches))
        while going:
            for i, search in list(going.items()):
                try:
                    waiting[i] = next(search)
                except StopIteration as stop:
                    found[i] = stop.value
                    del going[i]
                    waiting.pop(i, None)
            self.run([ask for asks in waiting.values() for ask in asks])
        return [found[i] for i in range(len(searches))]

    def run(self, asks: Sequence[Ask]) -> None:
        """Run those of ``asks`` that have not been run."""
        new = {(a.case.name, a.at, a.seed): a for a in asks}
        new = {key: ask for key, ask in new.items() if key not in self.done}
        if not new:
            return
        # Few sequences make many steps: light loads come first, so that no core is left waiting.
        order = sorted(new.values(), key=lambda a: a.at)
        cases = ((a.case.scenario, self.grid.loads[a.at], a.seed) for a in order)
        trials = side_by_side(run_trial, cases, min(self.jobs, len(order)))
        total = len(self.done) + len(order) + 1  # at least one more: how many a search needs is not known
        for ask, trial in zip(order, trials, strict=True):
            self.done[ask.case.name, ask.at, ask.seed] = trial
            if self.progress is not None:
                self.progress(len(self.done), total)


def worst(trial: Trial, tier: Tier) -> tuple[float, str]:
    """Use of the promise that ``trial`` keeps worst (above 1: broken), and its name."""
    if trial.beyond:
        return math.inf, "the profile's range"
    uses = [(bound.use(trial.statistics[bound.column]), str(bound)) for bound in tier.bounds]
    return max([*uses, (trial.growth / GROWTH, "queue growth")], key=lambda pair: pair[0])


@dataclass(frozen=True)
class Bracket:
    """Two neighbours on the grid, ``low`` keeping the promises and ``high`` breaking them, and the crossing between.

    ``low=None``: already the lightest load breaks them (``value`` is 0); ``high=None``: all loads keep them.
    ``uneven``: another load tried contradicts that more load is harder.
    """

    seed: int
    low: int | None
    high: int | None
    value: float
    binding: str
    uneven: bool = False


@dataclass(frozen=True)
class Capacity:
    """The most load one replica sustains: users, or requests/s.

    ``value``: mean over the seeds' own (``by_seed``); ``low`` to ``high``: the 95 % interval over them, widened to what
    the grid leaves open. ``at_least``: the heaviest load that can be asked about still keeps the promises.
    ``binding``: the promise that breaks first. Where the tier is not ``feasible``, ``value`` is 0 and ``nearest`` says
    what the ``lightest`` load tried offers of each broken promise. ``tokens``: output tokens/s of the replica at
    capacity; ``answer``: a request's.
    """

    case: Case
    tier: Tier
    value: float
    low: float
    high: float
    by_seed: tuple[float, ...]
    binding: str
    at_least: bool = False
    nearest: str = ""
    lightest: float = float("nan")
    tokens: float = float("nan")
    answer: float = float("nan")
    tau: float = float("nan")
    notes: tuple[str, ...] = ()
    brackets: tuple[Bracket, ...] = field(default=(), repr=False)

    @property
    def feasible(self) -> bool:
        """Whether some load keeps the promises."""
        return self.value > 0


def find(
    trials: Trials, case: Case, tier: Tier, seeds: Sequence[int], start: int, close: bool = False
) -> Search[Capacity]:
    """Search the capacity of ``case`` in ``tier``, the first seed from the grid's rung nearest to ``start``.

    ``close``: it is expected near ``start``, so that the search begins there and with small strides.
    """
    begin = start if close else trials.grid.rung(start)
    first = yield from _bracket(trials, case, tier, seeds[0], begin, by_rungs=not close)
    brackets = [first]
    if first.low is not None:
        # The other seeds differ by little: they begin where the first one ended, all side by side.
        others = [_bracket(trials, case, tier, seed, first.low, by_rungs=False) for seed in seeds[1:]]
        brackets += yield from _side_by_side(others)
    return _capacity(trials, case, tier, brackets)


def _side_by_side(searches: Sequence[Search[T]]) -> Search[list[T]]:
    found: dict[int, T] = {}
    going = dict(enumerate(searches))
    while going:
        asks: list[Ask] = []
        for i, search in list(going.items()):
            try:
                asks += next(search)
            except StopIteration as stop:
                found[i] = stop.value
                del going[i]
        if going:
            yield asks
    return [found[i] for i in range(len(searches))]


def _bracket(trials: Trials, case: Case, tier: Tier, seed: int, start: int, by_rungs: bool) -> Search[Bracket]:
    grid, last = trials.grid, len(trials.grid.loads) - 1
    low: int | None = None
    high: int | None = None
    at, stride = start, 1
    binding = ""
    while low is None or high is None:
        ask = Ask(case, at, seed)
        yield [ask]
        use, name = worst(trials(ask), tier)
        if use <= 1:
            low = at
            if at == last:
                break
        else:
            high, binding = at, name
            if at == 0 or (trials(ask).in_system < ALONE and not trials(ask).beyond):
                break
        if low is not None and high is not None:
            break
        if by_rungs:
            beyond = [r for r in grid.rungs if (r > at if use <= 1 else r < at)]
            at = (min(beyond) if use <= 1 else max(beyond)) if beyond else (last if use <= 1 else 0)
        else:
            at, stride = min(max(at + (stride if use <= 1 else -stride), 0), last), 2 * stride
    if low is None or high is None:
        return Bracket(seed, low, high, 0.0 if low is None else grid.loads[low], binding)
    halve = False
    while high - low > 1:
        width = high - low
        at = low + width // 2 if halve else _guess(trials, case, tier, seed, low, high)
        ask = Ask(case, at, seed)
        yield [ask]
        use, name = worst(trials(ask), tier)
        if use <= 1:
            low = at
        else:
            high, binding = at, name
        halve = not halve and 2 * (high - low) > width  # a guess that helps little is followed by a halving
    tried = [(index, worst(trial, tier)[0]) for index, trial in trials.of(case, seed)]
    uneven = any((use > 1) == (index <= low) for index, use in tried)
    return Bracket(seed, low, high, _crossing(trials, case, tier, seed, low, high), binding, uneven)


def _share(trials: Trials, case: Case, tier: Tier, seed: int, low: int, high: int) -> float:
    """How far between the loads ``low`` and ``high``, by their logarithms, the worst use is 1: 0..1."""
    below, above = (worst(trials(Ask(case, i, seed)), tier)[0] for i in (low, high))
    if not math.isfinite(above):
        return 0.0
    below = max(below, 1e-3)  # a queue that does not grow has no logarithm
    return 0.0 if below >= 1 else -math.log(below) / (math.log(above) - math.log(below))


def _guess(trials: Trials, case: Case, tier: Tier, seed: int, low: int, high: int) -> int:
    loads = trials.grid.loads
    if math.isinf(worst(trials(Ask(case, high, seed)), tier)[0]):
        return (low + high) // 2
    share = _share(trials, case, tier, seed, low, high)
    target = loads[low] * (loads[high] / loads[low]) ** share
    below = int(np.searchsorted(loads, target, side="right")) - 1
    return min(max(below, low + 1), high - 1)


def _crossing(trials: Trials, case: Case, tier: Tier, seed: int, low: int, high: int) -> float:
    loads = trials.grid.loads
    return float(loads[low] * (loads[high] / loads[low]) ** _share(trials, case, tier, seed, low, high))


def _capacity(trials: Trials, case: Case, tier: Tier, brackets: list[Bracket]) -> Capacity:
    loads = trials.grid.loads
    first = brackets[0]
    if any(b.low is None for b in brackets):
        lightest = [trials(Ask(case, b.high, b.seed)) for b in brackets if b.low is None and b.high is not None]
        return Capacity(case, tier, 0.0, 0.0, 0.0, tuple(b.value for b in brackets), first.binding or "every load",
                        nearest=_nearest(lightest, tier), lightest=min(trial.load for trial in lightest),
                        brackets=tuple(brackets))  # fmt: skip
    by_seed = tuple(b.value for b in brackets)
    value, spread = float(np.mean(by_seed)), half_width(by_seed)
    edges = [(loads[b.low], loads[b.high if b.high is not None else b.low]) for b in brackets if b.low is not None]
    low, high = (float(np.mean(column)) for column in zip(*edges, strict=True))
    if math.isfinite(spread):
        low, high = min(low, value - spread), max(high, value + spread)
    kept = [trials(Ask(case, b.low, b.seed)) for b in brackets if b.low is not None]
    notes = []
    if any(b.uneven for b in brackets):
        notes.append("not every lighter load keeps the promises, or a heavier one does: the curve is jagged here")
    if any(trial.short for trial in kept):
        notes.append("more requests (--num-requests) would tell better whether the queue grows")
    if extrapolated := sum(trial.extrapolated_steps for trial in kept):
        share = extrapolated / max(sum(trial.steps for trial in kept), 1)
        notes.append(f"{100 * share:.2g} % of the steps at capacity are extrapolated beyond the profile")
    wait, whole = (float(np.mean([trial.statistics[name] for trial in kept])) for name in ("queue_p50", "e2e_p50"))
    low = max(low, 0.0)
    if high - low > value:
        notes.append(f"its load is hardly known ({number(low)} to {number(high)}): more seeds or requests tell it")
    if wait > 0.1 * whole and not {bound.metric for bound in tier.bounds} & {"ttft", "e2e", "queue"}:
        notes.append(
            f"half of the requests wait {number(wait)} s or more to be scheduled at capacity: no promise forbids it"
        )
    return Capacity(
        case, tier, value, low, high, by_seed,
        first.binding or "nothing",
        at_least=any(b.high is None for b in brackets),
        tokens=float(np.mean([trial.tokens for trial in kept])),
        answer=float(np.mean([trial.answer for trial in kept])),
        tau=float(np.mean([trial.tau for trial in kept])),
        notes=tuple(notes),
        brackets=tuple(brackets),
    )  # fmt: skip


def _nearest(lightest: Sequence[Trial], tier: Tier) -> str:
    """What the lightest load offers of the promises that it breaks."""
    beyond = next((trial.beyond for trial in lightest if trial.beyond), "")
    if beyond:
        return beyond
    told = []
    for bound in tier.bounds:
        value = float(np.mean([trial.statistics[bound.column] for trial in lightest]))
        if bound.use(value) > 1:
            told.append(f"{bound.metric} {bound.statistic} {bound.shown(value)}")
    return ", ".join(told) or "a queue that grows"
