"""How a prediction compares with what was published: points, gains and the bars it has to hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from figures import MTP, Figures, published
from model import POLICY

from specsim.pareto import Front, interactivity_at, pareto, throughput_at

# What the prediction must hold, set before it was made: relative errors, tokens, percentage points.
WORST_THROUGHPUT, MEAN_THROUGHPUT, WORST_VERIFIED, GAIN_POINTS = 0.04, 0.025, 0.6, 8.0


@dataclass(frozen=True)
class Gain:
    """A relative gain over the published MTP-1 curve (0.5 is 50 % more); NaN where it cannot be read."""

    predicted: float
    interval: float
    published: float

    @property
    def points(self) -> float:
        """Percentage points that the prediction lies above what was published."""
        return 100 * (self.predicted - self.published)


@dataclass(frozen=True)
class Bar:
    """A number that must not exceed its limit; a number that could not be read (NaN) does not hold."""

    name: str
    value: float
    limit: float
    unit: str

    @property
    def holds(self) -> bool:
        """Whether the bar is held."""
        return abs(self.value) <= self.limit


@dataclass(frozen=True, eq=False)
class Verdict:
    """Predicted beside published.

    ``points``: a row a load with ``concurrency``, ``throughput`` (tok/s per GPU), ``throughput_ci``,
    ``throughput_published``, ``throughput_error`` (relative), ``verified_tokens``,
    ``verified_tokens_ci``, ``verified_tokens_published``, ``tau`` and ``extrapolated`` (share of steps
    beyond the published step times); intervals are half-widths at 95 % over the seeds, and NaN stands
    where nothing was published.
    """

    points: pd.DataFrame
    throughput_gain: Gain
    speed_gain: Gain

    @property
    def bars(self) -> list[Bar]:
        """The bars, in the order of the question."""
        error = self.points["throughput_error"].abs()
        verified = (self.points["verified_tokens"] - self.points["verified_tokens_published"]).abs()
        return [
            Bar("throughput, worst load", 100 * error.max(), 100 * WORST_THROUGHPUT, "%"),
            Bar("throughput, mean", 100 * error.mean(), 100 * MEAN_THROUGHPUT, "%"),
            Bar("verified tokens, worst load", verified.max(), WORST_VERIFIED, "tokens"),
            Bar("throughput gain", self.throughput_gain.points, GAIN_POINTS, "points"),
            Bar("speed gain", self.speed_gain.points, GAIN_POINTS, "points"),
        ]

    @property
    def holds(self) -> bool:
        """Whether every bar is held."""
        return all(bar.holds for bar in self.bars)

    def objective(self, loads: Sequence[int]) -> float:
        """Sum of squared relative errors of throughput and verified tokens at ``loads``: what the fit minimises."""
        at = self.points[self.points["concurrency"].isin(loads)]
        verified = at["verified_tokens"] / at["verified_tokens_published"] - 1
        return float((at["throughput_error"] ** 2 + verified**2).sum())


def judge(figures: Figures, runs: pd.DataFrame, floor: float, matched: float) -> Verdict:
    """Compare the ``runs`` of a model with ``figures``.

    ``floor`` (tok/s/user) is where the gain in throughput is read, ``matched`` (tok/s per GPU) where
    the gain in speed is.
    """
    # Every front is linear between adjacent loads, in (tps_per_request, throughput), and nothing beyond.
    front = pareto(
        pd.concat([figures.rows(), runs], ignore_index=True, join="inner"), x="tps_per_request", y="throughput"
    )
    means = pareto(runs, x="tps_per_request", y="throughput").points
    load = means["load"].to_numpy()
    true = np.array([[figures.throughput.at(c), figures.verified.at(c)] for c in load])
    points = pd.DataFrame(
        {
            "concurrency": load.astype(int),
            "throughput": means["throughput"],
            "throughput_ci": means["throughput_ci"],
            "throughput_published": true[:, 0],
            "throughput_error": means["throughput"] / true[:, 0] - 1,
            "verified_tokens": means["verified_tokens"],
            "verified_tokens_ci": means["verified_tokens_ci"],
            "verified_tokens_published": true[:, 1],
            "tau": means["tau"],
            "extrapolated": means["extrapolated_steps"] / means["steps"],
        }
    )
    return Verdict(
        points,
        _gain(figures, front, throughput_at, floor),
        _gain(figures, front, interactivity_at, matched),
    )


def _gain(figures: Figures, front: Front, read: Any, at: float) -> Gain:
    base = read(front, published(MTP), at).value
    predicted, true = (read(front, policy, at) for policy in (POLICY, published(figures.method)))
    return Gain(predicted.value / base - 1, predicted.ci / base, true.value / base - 1)
