"""One replica at one load: a simulated trial, what it measured, and the grid of loads that trials are made at.

Loads lie on a grid that does not depend on where a search begins: every whole number of users, or requests per second,
up to where steps of 3 % are wider, and those steps from there on.

An open loop has to last: its queue may grow without end while the requests that were measured still look well.
A trial is steady where the mean number of requests in the system over the last third of the arrivals exceeds that
over the middle third by at most GROWTH of a third's arrivals: where no more than 3 % of what arrives piles up.
Where requests come and go by themselves, that share swings by about 2·T/(D·√n), for mean response times T and n
arrivals in D seconds, a third of the time. A trial is run again with twice the requests, up to LONGEST of them or four
times what was asked for, while its swings exceed a third of the bound or its arrivals last less than LASTING response
times, unless it has ENOUGH requests and more than four times the bound piles up anyway.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import pandas as pd

from specsim.engine import Scenario, simulate
from specsim.metrics import QUANTILES, request_metrics
from specsim.tiers import METRICS
from specsim.types import BeyondProfile, Result, SpecsimError
from specsim.workload import Arrivals, ClosedLoop, Gamma, Poisson, Ramp, Workload

GROWTH = 0.03
"""Share of an open loop's arrivals that may pile up in a trial that counts as steady."""
LASTING = 15
"""Mean response times that the arrivals of an open loop should last."""
LONGEST = 8000
"""Requests up to which an open loop that is too short to tell is made longer, or four times what was asked for."""
ENOUGH = 2000
"""Requests of which many do not pile up by chance: near saturation hundreds swing by more than the formula says."""

STEP = 2 ** (1 / 24)
"""Ratio of neighbouring loads, where they are not whole numbers of users: 2.9 %."""
RUNG = 4
"""Ratio of the loads that a search strides over, and that schedulers are compared at."""
LEAST_RATE, MOST_RATE = RUNG**-7, RUNG**9
THINKING = 16
"""Users that are asked about for each seat of a replica, where they think: a user who thinks holds none."""
MOST_USERS = 1 << 16


@dataclass(frozen=True)
class Trial:
    """What one replica did at ``load`` (users, or requests/s) under the random streams of ``seed``.

    ``statistics`` has the entries ``<metric>_<statistic>`` of tiers.Bound (seconds, tok/s), and ``<metric>_requests``,
    those of the ``requests`` that have the metric. ``tokens`` are output tokens/s of the replica, ``answer`` the mean
    output tokens of a request, ``in_system`` the mean number of requests waiting or running, ``growth`` the share of
    arrivals that piled up (0 in a closed loop), ``short``: whether an open loop lasted less than it should to tell.
    ``beyond``: why the load could not be simulated (no price for a step).
    """

    load: float
    seed: int
    statistics: Mapping[str, float] = field(default_factory=dict)
    requests: int = 0
    tokens: float = 0.0
    answer: float = 0.0
    in_system: float = 0.0
    growth: float = 0.0
    tau: float = float("nan")
    steps: int = 0
    extrapolated_steps: int = 0
    short: bool = False
    beyond: str = ""


@dataclass(frozen=True)
class Grid:
    """Rising loads that trials are made at; ``rungs`` are the indices of powers of RUNG (and of the last load)."""

    loads: tuple[float, ...]
    rungs: tuple[int, ...]

    def near(self, load: float) -> int:
        """The index of the load nearest to ``load``, by ratio."""
        return int(np.abs(np.log(np.array(self.loads) / load)).argmin())

    def rung(self, index: int) -> int:
        """The rung nearest to ``index``."""
        return min(self.rungs, key=lambda r: abs(r - index))


@lru_cache(maxsize=8)
def grid(closed: bool, most_users: int = 1024) -> Grid:
    """The loads of a closed loop, 1 .. ``most_users``, or of an open one, in requests/s."""
    if closed:
        users = [1]
        while users[-1] < most_users:
            users.append(min(max(users[-1] + 1, round(users[-1] * STEP)), most_users))
        powers = [RUNG**k for k in range(16) if RUNG**k < most_users] + [most_users]
        loads = sorted({*users, *powers})
        return Grid(tuple(map(float, loads)), tuple(loads.index(p) for p in powers))
    low, high = (round(np.log(r) / np.log(STEP)) for r in (LEAST_RATE, MOST_RATE))
    stride = round(np.log(RUNG) / np.log(STEP))
    rates = tuple(float(STEP**k) for k in range(low, high + 1))
    return Grid(rates, tuple(range(0, len(rates), stride)))


def most_users(scenario: Scenario) -> int:
    """The most users of a replica that are asked about: one a seat (max_num_seqs), or THINKING if they think."""
    workload = scenario.workload
    thinks = isinstance(workload, ClosedLoop) and workload.think_s > 0
    return min(scenario.max_num_seqs * (THINKING if thinks else 1), MOST_USERS)


def demanded(workload: Workload, closed: bool) -> Workload:
    """``workload`` as the kind of load that is demanded: users in a closed loop, or requests per second.

    Laws of lengths carry over. Raises SpecsimError where they cannot: users who ask recorded requests, conversations or
    think times without users, and ramps, which have no rate of their own.
    """
    if isinstance(workload, Ramp):
        raise SpecsimError("plan: workload: expected a steady load, got a ramp")
    if workload.closed == closed:
        return workload
    if isinstance(workload, ClosedLoop):
        if workload.has_turns or workload.think_s:
            raise SpecsimError("plan: rate: expected users, who alone hold conversations or think")
        return Poisson(1.0, 2000, workload.prompt_tokens, workload.output_tokens, workload.domain)
    if isinstance(workload, Arrivals):
        raise SpecsimError("plan: users: expected laws of lengths, got recorded arrivals: they need a rate")
    return ClosedLoop(1, workload.prompt_tokens, workload.output_tokens, domain=workload.domain)


def at_load(workload: Workload, load: float) -> Workload:
    """``workload`` with ``load`` users or requests per second."""
    if isinstance(workload, ClosedLoop):
        return replace(workload, concurrency=int(load))
    if isinstance(workload, Arrivals):
        return workload.scaled(load)
    assert isinstance(workload, Poisson | Gamma)
    return replace(workload, rate=load)


def run_trial(scenario: Scenario, load: float, seed: int) -> Trial:
    """Simulate the one replica of ``scenario`` at ``load``; a seed draws the same blocks and lengths at every load."""
    workload = at_load(scenario.workload, load)
    most = max(LONGEST, 4 * _requests(workload))
    try:
        while True:
            result = simulate(replace(scenario, workload=workload), seed)
            trial = _measure(result, workload, load, seed)
            if not trial.short or not isinstance(workload, Poisson | Gamma) or 2 * workload.num_requests > most:
                return trial
            if trial.growth > 4 * GROWTH and workload.num_requests >= ENOUGH:
                return trial
            workload = replace(workload, num_requests=2 * workload.num_requests)
    except BeyondProfile as error:
        return Trial(load, seed, beyond=str(error))


def _requests(workload: Workload) -> int:
    return workload.num_requests if isinstance(workload, Poisson | Gamma) else 0


def _measure(result: Result, workload: Workload, load: float, seed: int) -> Trial:
    table, window = request_metrics(result), result.window
    seconds = window.end - window.start
    cycles = int(table["cycles"].sum())
    growth, in_system, short = 0.0, load, False
    if not workload.closed:
        last = float(result.requests["arrival"].iloc[-1])
        growth, in_system = _growth(result.requests, last), _in_system(result.requests, window.start, window.end)
        response, third = float(table["e2e"].mean()), last / 3
        swings = 2 * response / (third * (len(result.requests) / 3) ** 0.5) if third > 0 else float("inf")
        short = swings > GROWTH / 3 or last < LASTING * response
    return Trial(
        load,
        seed,
        dict(_statistics(table)),
        requests=len(table),
        tokens=float(window.tokens.sum()) / seconds if seconds > 0 else float("nan"),
        answer=float(table["output_tokens"].mean()),
        in_system=in_system,
        growth=growth,
        tau=(int(table["accepted"].sum()) + cycles) / cycles if cycles else float("nan"),
        steps=result.num_steps,
        extrapolated_steps=result.extrapolated_steps,
        short=short,
    )


def _statistics(table: pd.DataFrame) -> dict[str, float]:
    found: dict[str, float] = {}
    for metric in METRICS:
        values = table[metric].dropna().to_numpy(dtype=np.float64)
        found[f"{metric}_requests"] = len(values)
        found[f"{metric}_mean"] = float(values.mean()) if len(values) else float("nan")
        for name, level in QUANTILES.items():
            found[f"{metric}_{name}"] = float(np.quantile(values, level)) if len(values) else float("nan")
    return found


def _growth(requests: pd.DataFrame, last: float) -> float:
    """Share of the arrivals that pile up: from the middle third of the time of arrivals to the last third."""
    third = last / 3
    if not third > 0:
        return 0.0
    middle, end = (_in_system(requests, third * k, third * (k + 1)) for k in (1, 2))
    return (end - middle) * 3 / len(requests)


def _in_system(requests: pd.DataFrame, start: float, end: float) -> float:
    """Mean number of requests that had arrived and not finished, between ``start`` and ``end`` seconds."""
    arrival, finish = requests["arrival"].to_numpy(), requests["finish"].to_numpy()
    there = np.minimum(finish, end) - np.maximum(arrival, start)
    return float(np.maximum(there, 0).sum()) / (end - start) if end > start else 0.0
