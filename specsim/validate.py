"""Measured beside simulated: what a replay got right, by metric and statistic, and whether that is good enough."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from specsim.importers.recorded import Load, RecordedRun, Timings
from specsim.types import Floats, Result, SpecsimError

LATENCIES = ("ttft", "tpot", "e2e")
QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
STATISTICS = ("mean", *QUANTILES)
LOADS = ("running", "waiting", "kv_occupancy")
WHOLE = ("makespan", "throughput")
GATED = ("mean", "p99")
"""What a gate on a whole latency holds of it."""


@dataclass(frozen=True)
class Pair:
    """One number, ``measured`` (None where it was not) and ``simulated``."""

    measured: float | None
    simulated: float

    @property
    def error(self) -> float | None:
        """simulated/measured − 1; infinite where nothing was measured to be something, None without both."""
        if self.measured is None or math.isnan(self.measured) or math.isnan(self.simulated):
            return None
        if self.measured == 0:
            return 0.0 if self.simulated == 0 else math.inf
        return self.simulated / self.measured - 1


@dataclass(frozen=True)
class Comparison:
    """A recorded run and its replay.

    ``metrics``: ttft, tpot and e2e (seconds) by mean, p50, p90, p95 and p99; running and waiting (requests) and
    kv_occupancy (share) by mean and peak over the recorded ticks. ``makespan``: seconds from the first arrival to
    the last token; ``throughput``: output tokens a second over it. ``correlation``: Pearson's, of the requests'
    ttft, None where one side does not vary. ``single_token``: requests of one output token, which have no tpot.
    """

    measured: Timings
    simulated: Timings
    measured_load: Load | None
    simulated_load: Load
    metrics: Mapping[str, Mapping[str, Pair]]
    makespan: Pair
    throughput: Pair
    correlation: float | None
    single_token: int

    @property
    def pairs(self) -> dict[str, Pair]:
        """Every pair by the name that a gate calls it: tpot.p90, running.peak, makespan."""
        inside = {f"{metric}.{stat}": pair for metric, stats in self.metrics.items() for stat, pair in stats.items()}
        return inside | {"makespan": self.makespan, "throughput": self.throughput}


def compare(run: RecordedRun, result: Result, kv_blocks: int) -> Comparison:
    """Compare a run with the ``result`` of its replay, which must have kept its steps.

    ``kv_blocks``: those of one simulated replica's KV cache.
    """
    measured, simulated = run.requests, simulated_timings(result)
    metrics: dict[str, dict[str, Pair]] = {}
    for name in LATENCIES:
        ours, theirs = _spread(getattr(simulated, name)), _spread(getattr(measured, name))
        metrics[name] = {stat: Pair(theirs[stat], ours[stat]) for stat in STATISTICS}
    end = float(simulated.finish_s.max())
    ticks = run.load.t if run.load is not None else np.arange(1.0, max(end, 1.0) + 1)
    at_ticks = simulated_load(result, kv_blocks, ticks)
    for name, field in zip(LOADS, ("running", "waiting", "kv_share"), strict=True):
        counted = getattr(run.load, field, None)
        found = getattr(at_ticks, field)
        metrics[name] = {
            "mean": Pair(None if counted is None else float(counted.mean()), float(found.mean())),
            "peak": Pair(None if counted is None else float(counted.max()), float(found.max())),
        }
    spans, tokens = (float(measured.finish_s.max()), end), int(measured.output_tokens.sum())
    return Comparison(
        measured=measured,
        simulated=simulated,
        measured_load=run.load,
        simulated_load=simulated_load(result, kv_blocks, np.linspace(0, max(end, ticks[-1]), 1000)),
        metrics=metrics,
        makespan=Pair(*spans),
        throughput=Pair(*(tokens / span for span in spans)),
        correlation=_pearson(measured.ttft, simulated.ttft),
        single_token=int((measured.output_tokens == 1).sum()),
    )


def simulated_timings(result: Result) -> Timings:
    """What the requests of a simulated run met, as a recording would tell it."""
    table = result.requests
    return Timings(
        arrival_s=table["arrival"].to_numpy(),
        queued_s=table["queued"].to_numpy(),
        scheduled_s=table["scheduled"].to_numpy(),
        first_token_s=table["first_token"].to_numpy(),
        finish_s=table["finish"].to_numpy(),
        prompt_tokens=table["prompt_tokens"].to_numpy(),
        output_tokens=table["output_tokens"].to_numpy(),
    )


def simulated_load(result: Result, kv_blocks: int, times: Floats) -> Load:
    """What an engine would report at ``times``: the counts of the step under way, summed over the replicas.

    The KV share is that of the ``kv_blocks`` blocks of a replica that the step holds; over several the mean.
    """
    if result.steps is None:
        raise SpecsimError("simulate: expected a run with steps=True, to count requests over time")
    running, waiting, kv = (np.zeros(len(times)) for _ in range(3))
    names = result.requests["replica"].unique()
    for replica in names:
        steps = result.steps[result.steps["replica"] == replica]
        start = steps["start"].to_numpy()
        step = np.searchsorted(start, times, side="right") - 1
        busy = (step >= 0) & (times < (start + steps["duration"].to_numpy())[step])
        running += np.where(busy, steps["running"].to_numpy()[step], 0)
        waiting += np.where(busy, steps["waiting"].to_numpy()[step], 0)
        kv += np.where(busy, steps["kv_blocks"].to_numpy()[step] / kv_blocks, 0) / len(names)
    return Load(times, running, waiting, kv)


def _spread(values: Floats) -> dict[str, float]:
    """The statistics of ``values``, in seconds; NaN without any."""
    if not len(values):
        return dict.fromkeys(STATISTICS, math.nan)
    quantiles = {stat: float(np.quantile(values, share)) for stat, share in QUANTILES.items()}
    return {"mean": float(values.mean())} | quantiles


def _pearson(one: Floats, other: Floats) -> float | None:
    if len(one) < 2 or not (np.ptp(one) > 0 and np.ptp(other) > 0):
        return None
    return float(np.corrcoef(one, other)[0, 1])


# Gates


def parse_gates(latencies: Mapping[str, str | None], texts: Iterable[str]) -> tuple[dict[str, float], dict[str, str]]:
    """The largest error that each pair may have, and the option that says so, by the pair's name.

    ``latencies`` bounds the mean and the p99 of ttft, tpot or e2e, by "3%" or "0.03"; each of ``texts`` one
    statistic, by "tpot.p90=3%", and goes before it. Raises SpecsimError for a gate that is malformed.
    """
    gates: dict[str, float] = {}
    options: dict[str, str] = {}
    for metric, text in latencies.items():
        if text is not None:
            bound = parse_share(f"--max-{metric}-error", text)
            gates |= {f"{metric}.{stat}": bound for stat in GATED}
            options |= {f"{metric}.{stat}": f"--max-{metric}-error" for stat in GATED}
    known = [f"{metric}.{stat}" for metric in LATENCIES for stat in STATISTICS]
    known += [f"{name}.{stat}" for name in LOADS for stat in ("mean", "peak")] + list(WHOLE)
    for text in texts:
        name, equals, bound_text = text.partition("=")
        name = name.strip()
        if not equals:
            raise SpecsimError(f"--max-error: expected METRIC.STAT=SHARE such as tpot.p90=3%, got {text!r}")
        if name not in known:
            raise SpecsimError(f"--max-error: {name!r} is not one of {', '.join(known)}")
        gates[name] = parse_share(f"--max-error {name}", bound_text)
        options[name] = "--max-error"
    return gates, options


def parse_share(option: str, text: str) -> float:
    """A share from "3%" or "0.03"; SpecsimError, in the option's name, for anything else."""
    percent = text.strip().endswith("%")
    try:
        share = float(text.strip().removesuffix("%")) / (100 if percent else 1)
    except ValueError:
        share = math.nan
    # A bare 3 would mean 300 %, which nobody wants of a gate.
    if not 0 <= share < (math.inf if percent else 1):
        raise SpecsimError(f"{option}: expected a share such as 3% or 0.03, got {text!r}")
    return share


def broken_gates(comparison: Comparison, gates: Mapping[str, float], options: Mapping[str, str]) -> list[str]:
    """A line for each gate whose pair is further off than it allows; SpecsimError for one that has no error.

    ``gates`` and ``options`` as ``parse_gates`` returns them.
    """
    pairs = comparison.pairs
    lines: list[str] = []
    for name, bound in gates.items():
        error = pairs[name].error
        if error is None:
            raise SpecsimError(f"{options[name]}: {name}: this run has nothing measured to compare with")
        if abs(error) > bound:
            lines.append(f"{name}: {100 * error:+.2f} % off, at most {100 * bound:g} % allowed")
    return lines
