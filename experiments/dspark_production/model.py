"""The model of a deployment: two fitted acceptance parameters on top of its step-time curve.

A Model says what is assumed, a Simulator runs it, and ``fit`` finds its parameters from the published
throughput and verified tokens at a few loads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
from figures import Figures
from fit_profile import TAU_MTP, step_profile
from numpy.typing import NDArray

from specsim import MTP1, ClosedLoop, DSparkAsync, Scenario, sweep, synthetic
from specsim.acceptance import Drafter
from specsim.hardware import DraftCost, Profile

POLICY = "predicted"
# The fit moves the log-odds of the acceptance, the log of the concentration and, where asked, the
# draft cost of a request in verified tokens: bounds, and steps that are large against the runs' noise.
LOW, HIGH = (-3.0, np.log(0.05), 0.0), (5.0, np.log(200.0), 5.0)
STEPS = (0.05, 0.12, 0.1)
ROUNDS = 6
GRID = [(p, k) for p in (0.65, 0.8, 0.9) for k in (1.0, 4.0)]


@dataclass(frozen=True)
class Model:
    """What a prediction assumes, and its two parameters.

    ``acceptance``: mean chance that a draft position survives given that those before it did, the
    same at each of γ positions (``position_slope`` adds to its log-odds from one position to the next,
    the middle one kept). ``concentration``: a + b of the Beta law by which that chance varies
    from block to block. ``draft_seconds``: what drafting costs a step, for each request, beyond what
    the MTP-1 steps hold. ``slope_factor``: slope of the step time beyond the published curve, in
    units of its last slope.
    """

    acceptance: float = 0.8
    concentration: float = 2.0
    draft_seconds: float = 0.0
    tau_mtp: float = TAU_MTP
    slope_factor: float = 1.0
    block_correlation: float = 0.0
    autocorrelation: float = 0.0
    overconfidence: float = 1.0
    position_slope: float = 0.0
    scheduler: Any = field(default_factory=DSparkAsync)
    output_tokens: int = 512

    def profile(self, figures: Figures) -> Profile:
        """The hardware profile that the MTP-1 curve gives."""
        profile = step_profile(figures.mtp_throughput, figures.target, self.tau_mtp)
        if self.slope_factor == 1.0:
            return profile
        (a, b), (s, t) = profile.verify.tokens[-2:], profile.verify.seconds[-2:]
        far = b + 8192
        beyond = t + self.slope_factor * (t - s) / (b - a) * (far - b)
        longer = {"tokens": (*profile.verify.tokens, far), "seconds": (*profile.verify.seconds, beyond)}
        return profile.model_copy(update={"verify": profile.verify.model_copy(update=longer)})

    def drafter(self, gamma: int) -> Drafter:
        """Its drafter: synthetic blocks of ``gamma`` positions."""
        odds = self.acceptance / (1 - self.acceptance)
        tilt = [np.exp(-self.position_slope * (k - (gamma - 1) / 2)) for k in range(gamma)]
        drafter = synthetic(
            tuple(float(odds / (odds + t)) for t in tilt),
            concentration=self.concentration,
            overconfidence=self.overconfidence,
            block_correlation=self.block_correlation,
            autocorrelation=self.autocorrelation,
        )
        if not self.draft_seconds:
            return drafter
        cost = DraftCost(type="parallel", num_seqs=(1, 1024), seconds=(self.draft_seconds, 1024 * self.draft_seconds))
        return replace(drafter, cost=cost)


@dataclass(frozen=True)
class Simulator:
    """Runs models of one deployment, decode-only, in ``jobs`` processes."""

    figures: Figures
    jobs: int = 1

    def runs(self, model: Model, loads: Sequence[int], seeds: Sequence[int]) -> pd.DataFrame:
        """Simulate ``model`` at each of ``loads`` (concurrency); a sweep's table, one row a load and seed."""
        return self._sweep(model, model.drafter(self.figures.gamma), model.scheduler, loads, seeds)

    def mtp1_error(self, model: Model, loads: Sequence[int], seed: int = 0) -> float:
        """Largest relative error of MTP-1, simulated on the curve that its own throughput gave."""
        table = self._sweep(model, synthetic(model.tau_mtp - 1, gamma=1), MTP1(), loads, [seed])
        true = np.array([self.figures.mtp_throughput.at(c) for c in loads])
        return float(np.abs(table["throughput"].to_numpy() / true - 1).max())

    def errors(self, model: Model, loads: Sequence[int], seeds: Sequence[int]) -> NDArray[np.float64]:
        """Relative errors [seeds, 2 · loads] of throughput, then of verified tokens."""
        table = self.runs(model, loads, seeds).set_index(["seed", "load"])
        columns = []
        for metric, curve in (("throughput", self.figures.throughput), ("verified_tokens", self.figures.verified)):
            columns += [table[metric].xs(c, level="load").loc[list(seeds)] / curve.at(c) - 1 for c in loads]
        return np.column_stack(columns)

    def _sweep(
        self, model: Model, drafter: Drafter, scheduler: Any, loads: Sequence[int], seeds: Sequence[int]
    ) -> pd.DataFrame:
        # Free prefill: prompts take no tokens and no time, so their length does not matter.
        loops = [ClosedLoop(c, prompt_tokens=16, output_tokens=model.output_tokens) for c in loads]
        base = Scenario(
            profile=model.profile(self.figures),
            workload=loops[0],
            drafter=drafter,
            scheduler=scheduler,
            prefill="free",
            extrapolate=True,
        )
        return sweep(base, workload=loops, seeds=seeds, jobs=self.jobs).assign(policy=POLICY)


@dataclass(frozen=True)
class Fit:
    """A fitted model: the sum of squared relative errors, the errors, and the parameters' noise.

    ``errors`` [2 · loads]: of throughput, then of verified tokens, at the fitted parameters.
    ``acceptance_se`` and ``concentration_se``: standard errors that the runs' random blocks leave.
    ``trail``: the (acceptance, concentration) from which each round set out, and where the last
    arrived; ``converged``: that last move was small.
    """

    model: Model
    objective: float
    errors: NDArray[np.float64]
    acceptance_se: float
    concentration_se: float
    trail: tuple[tuple[float, float], ...]
    converged: bool


def fit(
    simulator: Simulator,
    model: Model,
    loads: Sequence[int],
    seeds: Sequence[int],
    *,
    grid: bool = False,
    free_draft: bool = False,
) -> Fit:
    """Fit acceptance and concentration to throughput and verified tokens at ``loads``, jointly.

    Least sum of squared relative errors of the means over ``seeds``, which every run shares (common
    random numbers). Gauss-Newton, with the errors and their slopes at a point regressed on runs there
    and a step to either side along each parameter, so that noise averages out; until a round moves
    less than half a step. Starts from ``model``, or with ``grid`` from the best of GRID;
    ``free_draft`` fits ``draft_seconds`` too.
    """
    if grid:
        starts = [replace(model, acceptance=p, concentration=k) for p, k in GRID]
        model = min(starts, key=lambda m: float((simulator.errors(m, loads, seeds[:1]) ** 2).sum()))
    steps = np.array(STEPS[: 3 if free_draft else 2])
    low, high = np.array(LOW[: len(steps)]), np.array(HIGH[: len(steps)])
    odds = model.acceptance / (1 - model.acceptance)
    token_seconds = _token_seconds(model.profile(simulator.figures))
    start = (np.log(odds), np.log(model.concentration), max(model.draft_seconds / token_seconds, STEPS[2]))
    z, trail = np.array(start[: len(steps)]), []

    def at(z: NDArray[np.float64]) -> Model:
        there = replace(model, acceptance=float(1 / (1 + np.exp(-z[0]))), concentration=float(np.exp(z[1])))
        return replace(there, draft_seconds=max(float(z[2]), 0.0) * token_seconds) if len(z) > 2 else there

    design = np.vstack([np.zeros(len(steps)), np.diag(steps), -np.diag(steps)])
    for _ in range(ROUNDS):
        trail.append(at(z))
        runs = np.stack([simulator.errors(at(z + d), loads, seeds) for d in design])
        line = np.column_stack([np.ones(len(design)), design])
        here, *slopes = np.linalg.lstsq(line, runs.mean(axis=1), rcond=None)[0]
        jacobian = np.column_stack(slopes)
        move = np.clip(-np.linalg.pinv(jacobian) @ here, -4 * steps, 4 * steps)
        move = np.clip(z + move, low, high) - z
        z = z + move
        if (np.abs(move) < 0.5 * steps).all():
            break
    best, errors = at(z), here + jacobian @ move
    # Each seed's own optimum, to first order, tells how far noise moves the common one.
    own = np.linalg.lstsq(line, runs.reshape(len(design), -1), rcond=None)[0][0].reshape(runs.shape[1:])
    se = np.full(2, np.nan)
    if len(seeds) > 1:
        se = (own @ np.linalg.pinv(jacobian).T).std(axis=0, ddof=1) / np.sqrt(len(seeds))
    return Fit(
        model=best,
        objective=float((errors**2).sum()),
        errors=errors,
        acceptance_se=float(se[0] * best.acceptance * (1 - best.acceptance)),
        concentration_se=float(se[1] * best.concentration),
        trail=tuple((m.acceptance, m.concentration) for m in (*trail, best)),
        converged=bool((np.abs(move) < 0.5 * steps).all()),
    )


def _token_seconds(profile: Profile) -> float:
    """Seconds that a step lasts longer for each token in it, over the whole published curve."""
    tokens, seconds = profile.verify.tokens, profile.verify.seconds
    return abs(seconds[-1] - seconds[0]) / (tokens[-1] - tokens[0])
