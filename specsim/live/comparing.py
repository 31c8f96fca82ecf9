"""Predicted beside measured: the simulation of every load that was checked, with intervals and the engine's spread."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from specsim.acceptance import Drafter
from specsim.engine import Scenario, simulate
from specsim.hardware import DraftCost, Profile
from specsim.importers.evidence import Ask, Evidence, to_synthetic
from specsim.lengths import Empirical, Fixed, Lengths
from specsim.live.engines import Drafted, Engine
from specsim.live.experiment import Measured, Plan
from specsim.live.load import Drive, latencies, observed
from specsim.metrics import request_metrics
from specsim.pareto import half_width
from specsim.rules import VLLM
from specsim.schedulers import NoSpec, StaticGamma
from specsim.synthesis import Synthetic
from specsim.types import Ints, Requests, SpecsimError
from specsim.workload import Arrivals, Workload

METRICS = ("throughput", "tpot", "ttft", "speed", "tau", "verified_tokens")
"""Output tokens/s, seconds an output token after the first, seconds to the first, tokens/s of a user (1/tpot); of an
engine that speculates, tokens a cycle and tokens that a request has in a step."""
ROUNDS = 20
"""Rounds of all users that a closed loop is simulated for, at least."""
AT_ONCE = 1e-6
"""Seconds: the least time of a client between two requests of a user."""
NOISE = 2.0
"""An error below so many standard deviations of the engine's own runs is not told from noise."""

RULES_OF = {
    "sglang": VLLM.without("mixed"),
    # Prompts join whole, and all run in the one forward of the step; nothing is kept for the next that starts alike.
    "specsim": VLLM.without("split", "own_prefills", "prefix_caching"),
}
"""How an engine schedules, where it is not as vLLM does."""

Numbers = dict[str, float]


@dataclass(frozen=True)
class Row:
    """One metric of one load: ``measured`` and ``predicted`` by repetition, in the metric's unit.

    ``bound``: the largest share by which they may differ (None: no gate).
    """

    load: str
    users: float
    metric: str
    measured: tuple[float, ...]
    predicted: tuple[float, ...]
    gate: float | None = None

    @property
    def error(self) -> float:
        """predicted/measured − 1, of the means."""
        return float(np.mean(self.predicted) / np.mean(self.measured) - 1)

    @property
    def spread(self) -> float | None:
        """The engine's own run-to-run spread: standard deviation over mean, None of one repetition.

        That of the measurements, or of the predictions where that is larger: those differ by their calibrations
        alone, which are runs of the engine too.
        """
        found = [d for values in (self.measured, self.predicted) if (d := deviation(values)) is not None]
        return max(found, default=None)

    @property
    def bound(self) -> float | None:
        """The gate, or twice the engine's own spread where that is larger."""
        return None if self.gate is None else max(self.gate, NOISE * (self.spread or 0.0))

    @property
    def broken(self) -> bool:
        """Whether the error is beyond the bound."""
        return self.bound is not None and not abs(self.error) <= self.bound


def deviation(values: Sequence[float]) -> float | None:
    """Standard deviation over the mean; None of fewer than two."""
    return float(np.std(values, ddof=1) / np.mean(values)) if len(values) > 1 else None


def half_interval(values: Sequence[float]) -> float | None:
    """Half of the 95 % interval of the mean (Student's t); None of fewer than two."""
    return half_width(values) if len(values) > 1 else None


def measured_numbers(drive: Drive) -> Numbers | None:
    """The METRICS of a load that was driven; None where nothing of it was answered in full."""
    ttft, tpot = latencies(drive)
    seconds = drive.end - drive.start
    tokens = drive.tokens()
    if not len(ttft) or not (tpot > 0).any() or not seconds > 0 or not tokens:
        return None
    numbers = {
        "throughput": tokens / seconds,
        "tpot": float(tpot.mean()),
        "ttft": float(ttft.mean()),
        "speed": float((1 / tpot[tpot > 0]).mean()),
    }
    if drive.drafted is not None:
        numbers |= {"tau": drive.drafted.tau, "verified_tokens": drive.drafted.verified_tokens}
    return numbers


@dataclass(frozen=True)
class Model:
    """What a prediction rests on: step prices, the engine's bounds, and how it speculates."""

    profile: Profile
    engine: Engine
    scheduler: Any = None
    drafter: Drafter | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None

    def predict(self, workload: Workload, seed: int = 0) -> tuple[Numbers, int]:
        """The METRICS of a simulated load, and the steps that were priced outside the profile."""
        engine = self.engine
        scenario = Scenario(
            profile=self.profile,
            workload=workload,
            drafter=self.drafter,
            scheduler=self.scheduler or NoSpec(),
            max_num_seqs=self.max_num_seqs or engine.max_num_seqs or 1024,
            max_num_batched_tokens=self.max_num_batched_tokens or engine.max_num_batched_tokens or 8192,
            kv_tokens=None if self.profile.kv_tokens else engine.kv_tokens,
            rules=RULES_OF.get(engine.kind, VLLM),
            extrapolate=True,
        )
        result = simulate(scenario, seed)
        table, window = request_metrics(result), result.window
        tpot = table["tpot"].dropna().to_numpy()
        seconds = window.end - window.start
        numbers = {
            "throughput": float(window.tokens.sum()) / seconds if seconds > 0 else math.nan,
            "tpot": float(tpot.mean()) if len(tpot) else math.nan,
            "ttft": float(table["ttft"].mean()),
            "speed": float((1 / tpot[tpot > 0]).mean()) if len(tpot) else math.nan,
        }
        if self.drafter is not None:
            cycles, verified, accepted = (float(table[name].sum()) for name in ("cycles", "verified", "accepted"))
            told = Drafted(max(1.0, cycles), verified, accepted)
            numbers |= {"tau": told.tau, "verified_tokens": told.verified_tokens}
        return numbers, result.extrapolated_steps


@dataclass(frozen=True)
class Told:
    """What is known before anything is measured; None where it is to be learned.

    ``profile``: step prices; ``cost``: of drafting; ``sending``: seconds that a step is longer for each token it sends,
    where its prices are of steps that send none; ``scheduler`` and ``drafter``: how the engine speculates;
    ``max_num_seqs`` and ``max_num_batched_tokens`` bound a step, before what the server says of them.
    """

    profile: Profile | None = None
    cost: DraftCost | None = None
    scheduler: Any = None
    drafter: Drafter | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    sending: float = 0.0


def model_of(measured: Measured, number: int, profile: Profile, told: Told) -> Model | None:
    """What predicts the loads of a repetition; None where its acceptance was to be counted and was not."""
    drafter, scheduler, kind = told.drafter, told.scheduler, measured.engine.kind
    if drafter is not None and told.cost is not None:
        drafter = replace(drafter, cost=as_drafted(told.cost, kind, drafter, told.sending))
    if drafter is None and measured.speculates:
        acceptance = measured.repeats[number].acceptance
        if acceptance is None:
            return None
        drafter = drafter_of([acceptance], told.cost, ("counted", measured.engine.model))
        if drafter.cost is not None:
            drafter = replace(drafter, cost=as_drafted(drafter.cost, kind, drafter, told.sending))
        scheduler = fixed_length(drafter, measured.repeats[number].draft_length)
    return Model(profile, measured.engine, scheduler, drafter, told.max_num_seqs, told.max_num_batched_tokens)


def as_drafted(cost: DraftCost, kind: str, drafter: Drafter, sending: float = 0.0) -> DraftCost:
    """What drafting, and sending what is kept of it, adds to a step of an engine, as the cost of a whole block.

    llama.cpp's draft model reads a verified block once more before it drafts, one forward more than γ.
    """
    forwards = 1 if cost.type == "parallel" else drafter.gamma + (kind == "llamacpp")
    tokens = mean_kept(drafter)
    seconds = (forwards * s + sending * tokens * n for n, s in zip(cost.num_seqs, cost.seconds, strict=True))
    return DraftCost(type="parallel", num_seqs=cost.num_seqs, seconds=tuple(seconds))


def mean_kept(drafter: Drafter) -> float:
    """τ of whole blocks: the mean tokens that a cycle keeps."""
    if isinstance(drafter.acceptance, Synthetic):
        chances = [d.conditional_acceptance[: drafter.gamma] for d in drafter.acceptance.domains.values()]
        return float(np.mean([1 + np.cumprod(c).sum() for c in chances]))
    return float(1 + np.minimum(drafter.acceptance.accepted, drafter.gamma).mean())


def drafter_of(evidence: Sequence[Evidence], cost: DraftCost | None, names: tuple[str, str]) -> Drafter:
    """The drafter whose acceptance was counted, the mean of several countings by position."""
    width = max(len(e.survival["*"]) for e in evidence)
    padded = np.array([[*e.survival["*"], *[0.0] * (width - len(e.survival["*"]))] for e in evidence])
    mean = replace(evidence[0], survival={"*": tuple(padded.mean(axis=0).tolist())})
    synthetic = to_synthetic("the running engine", mean, Ask(drafter=names[0], target=names[1]))
    return Drafter(synthetic, synthetic.gamma, cost, name=synthetic.drafter)


def fixed_length(drafter: Drafter, counted: float | None = None) -> StaticGamma:
    """The verification of an engine that says nothing else: as much of every block as was ``counted``, or all."""
    return StaticGamma(drafter.gamma if counted is None else min(drafter.gamma, max(1, round(counted))))


def workload_of(plan: Plan, name: str, drive: Drive) -> Workload:
    """What to simulate for a load that was driven: as it was, with the lengths that the server counted.

    A user's next request reaches the engine when the next step is under way: the client's own time decides that.
    """
    if name.startswith("closed "):
        loop = plan.closed(int(name.removeprefix("closed ")))
        prompt, output = observed(drive.measured)
        short = any(a.output_tokens != a.order.output_tokens for a in drive.measured)
        rounds = max(ROUNDS, loop.num_measured // loop.concurrency)
        return replace(
            loop,
            prompt_tokens=_law(prompt),
            output_tokens=_law(output) if short else loop.output_tokens,
            measured=rounds * loop.concurrency,
            think_s=turnaround(drive),
            think_cv=0.0,
        )
    requests = plan.arrivals if name == "arrivals" else plan.open()
    assert requests is not None
    return Arrivals(_as_counted(requests, drive), name)


def turnaround(drive: Drive) -> float:
    """Seconds (median) from an answer's end to its user's next request; more than none."""
    ends = np.sort([a.finish for a in drive.answers if a.finish is not None])
    sent = np.array([a.sent for a in drive.answers[drive.first :]])
    before = np.searchsorted(ends, sent, "right")
    gaps = sent[before > 0] - ends[before[before > 0] - 1]
    return max(AT_ONCE, float(np.median(gaps))) if len(gaps) else AT_ONCE


def _law(tokens: Ints) -> Lengths:
    return Fixed(int(tokens[0])) if len(set(tokens.tolist())) == 1 else Empirical(tuple(tokens.tolist()))


def _as_counted(requests: Requests, drive: Drive) -> Requests:
    """The table with the lengths that the server counted, where it answered."""
    prompt, output = requests.prompt_tokens.copy(), requests.output_tokens.copy()
    for answer in drive.answers:
        if answer.done:
            [prompt[answer.index]], [output[answer.index]] = observed([answer])
    return replace(requests, prompt_tokens=prompt, output_tokens=np.maximum(output, 1))


@dataclass
class Compared:
    """Rows of all loads, how many simulated steps were ``extrapolated``, and which loads could not be predicted."""

    rows: list[Row] = field(default_factory=list)
    extrapolated: int = 0
    problems: list[str] = field(default_factory=list)


def compare(measured: Measured, plan: Plan, models: Mapping[int, Model], gates: Mapping[str, float]) -> Compared:
    """A row for each metric of each load that was measured.

    ``models``: what predicts each repetition, by its number. Loads that were not measured to the end are left out; a
    load that cannot be simulated is told of, and takes nothing from the others.
    """
    compared = Compared()
    for name in dict.fromkeys(name for repeat in measured.repeats for name in repeat.checks):
        found: list[Numbers] = []
        ours: list[Numbers] = []
        for number, repeat in enumerate(measured.repeats):
            drive = repeat.checks.get(name)
            numbers = None if drive is None or drive.stopped is not None else measured_numbers(drive)
            if drive is None or numbers is None or number not in models:
                continue
            try:
                predicted, extrapolated = models[number].predict(workload_of(plan, name, drive), number)
            except SpecsimError as error:
                compared.problems.append(f"prediction of {name}: {error}")
                break
            found.append(numbers)
            ours.append(predicted)
            compared.extrapolated += extrapolated
        users = float(name.removeprefix("closed ")) if name.startswith("closed ") else math.nan
        compared.rows += rows_of(name, users, found, ours, gates)
    return compared


def rows_of(
    load: str, users: float, measured: Sequence[Numbers], predicted: Sequence[Numbers], gates: Mapping[str, float]
) -> list[Row]:
    """A row for each metric of a load that all tell, from one set of numbers a repetition; none without any."""
    if not measured:
        return []
    known = [metric for metric in METRICS if all(metric in numbers for numbers in (*measured, *predicted))]
    ours, theirs = ({m: tuple(n[m] for n in numbers) for m in known} for numbers in (predicted, measured))
    return [Row(load, users, metric, theirs[metric], ours[metric], gates.get(metric)) for metric in known]
