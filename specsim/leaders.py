"""Who is best at which load: a walk up the loads that changes the leader only where another is better beyond noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from specsim.capacity import Ask, Capacity, Case, Trials
from specsim.pareto import half_width

Array = NDArray[np.float64]

LIGHT = 16
"""Schedulers are compared from this share of the smallest capacity on, up to the largest."""
LEVEL = 0.01
"""Relative difference in tok/s or tok/s/user below which two schedulers count as level, whatever the seeds say."""
ROUNDS = 2
"""How often the loads around a change are halved."""


@dataclass(frozen=True)
class Leader:
    """``policy`` leads (in tok/s of as many users, tok/s/user at a rate) or is level with who does, at loads ``low`` to
    ``high`` of a replica.

    ``ci``: half the 95 % interval of ``high``, the load from which the next leader is better; NaN where the seeds do
    not each show that change, and for the last leader. ``level``: others that were level with it all the way.
    """

    policy: str
    low: float
    high: float
    ci: float
    level: tuple[str, ...]


def leaders(
    trials: Trials, of: Sequence[tuple[str, Case]], found: Sequence[Capacity], seeds: Sequence[int]
) -> list[Leader]:
    """Compare the policies ``of`` (label, case) at equal loads, about those that were ``found`` to be sustained.

    By output tokens/s of as many users, who may wait for a seat; at a rate, where all sell the same, by
    interactivity_p50.

    A leader stays until another is better by more than LEVEL and than the half-width of their paired difference over
    the seeds; of several that could stay, the one that stays longest leads.
    """
    loads, rungs = trials.grid.loads, trials.grid.rungs
    low, high = min(c.value for c in found) / LIGHT, max(c.value for c in found)
    lowest = max((r for r in rungs if loads[r] <= low), default=rungs[0])
    at = sorted({*(r for r in rungs if r >= lowest and loads[r] <= high), lowest, trials.grid.near(high)})
    labels = [label for label, _ in of]
    for round_ in range(ROUNDS + 1):
        trials.run([Ask(case, index, seed) for _, case in of for index in at for seed in seeds])
        speed = np.array([[[_speed(trials, Ask(case, i, seed)) for seed in seeds] for i in at] for _, case in of])
        usable = np.isfinite(speed).all(axis=2).any(axis=0)
        at, speed = [i for i, is_usable in zip(at, usable, strict=True) if is_usable], speed[:, usable]
        walk = _walk(speed)
        ends = [end for _, end in walk[:-1]]
        pairs = [pair for end in ends for pair in pairwise(at[max(end - 1, 0) : end + 2])]
        between = {(a + b) // 2 for a, b in pairs} - set(at)
        if not between or round_ == ROUNDS:
            break
        at = sorted({*at, *between})
    where = np.log([loads[i] for i in at])
    segments, start = [], 0
    changes = [_change(where, speed, walk[k][0], walk[k + 1][0], walk[k][1]) for k in range(len(walk) - 1)]
    edges = [loads[at[0]], *(load for load, _ in changes), loads[at[-1]]]
    for k, (leader, end) in enumerate(walk):
        level = tuple(labels[p] for p in range(len(of)) if p != leader and _is_level(speed, p, range(start, end + 1)))
        ci = changes[k][1] if k < len(changes) else math.nan
        segments.append(Leader(labels[leader], edges[k], edges[k + 1], ci, level))
        start = end + 1
    return segments


def _speed(trials: Trials, ask: Ask) -> float:
    trial = trials(ask)
    if trial.beyond:
        return math.nan
    return trial.tokens if ask.case.scenario.workload.closed else trial.statistics["interactivity_p50"]


def _beaten(speed: Array, policy: int, load: int) -> bool:
    """Whether another policy is better than ``policy`` at a load, beyond noise; ``speed`` [policies, loads, seeds]."""
    own = speed[policy, load]
    if not np.isfinite(own).all():
        return True
    means = speed[:, load].mean(axis=1)
    best = int(np.nanargmax(np.where(np.isfinite(means), means, -np.inf)))
    gain = speed[best, load] / own - 1
    noise = half_width(gain)
    return bool(gain.mean() > max(LEVEL, noise if math.isfinite(noise) else 0.0))


def _is_level(speed: Array, policy: int, span: range) -> bool:
    return not any(_beaten(speed, policy, load) for load in span)


def _walk(speed: Array) -> list[tuple[int, int]]:
    """Leaders and the last load (index) of each: as few as can be."""
    policies, loads, _ = speed.shape
    walk, start = [], 0
    while start < loads:
        ends = []
        for policy in range(policies):
            end = start
            while end < loads and not _beaten(speed, policy, end):
                end += 1
            ends.append(end)
        # Of those that last equally long the faster one leads.
        total = [float(np.nansum(np.log(speed[p, start : max(end, start + 1)]))) for p, end in enumerate(ends)]
        leader = max(range(policies), key=lambda p: (ends[p], total[p]))
        walk.append((leader, ends[leader] - 1))
        start = ends[leader]
    return walk


def _change(where: Array, speed: Array, before: int, after: int, end: int) -> tuple[float, float]:
    """The load at which ``after`` draws level with ``before``, about the load ``end`` (index), and its half-width.

    A straight line through the logarithms of speed and load, the last crossing up to the load after ``end``.
    """

    def crossing(gap: Array) -> float:
        for i in range(min(end + 1, len(gap) - 1), 0, -1):
            if gap[i] > 0 >= gap[i - 1]:
                return float(np.exp(where[i - 1] - gap[i - 1] * (where[i] - where[i - 1]) / (gap[i] - gap[i - 1])))
        return math.nan

    gaps = np.log(speed[after]) - np.log(speed[before])  # [loads, seeds]
    load = crossing(gaps.mean(axis=1))
    by_seed = [crossing(gaps[:, s]) for s in range(gaps.shape[1])]
    ci = half_width(by_seed) if np.isfinite(by_seed).all() else math.nan
    # Where the new leader was ahead all along within noise, or the old one's range ends, they change at that load.
    return (load if math.isfinite(load) else float(np.exp(where[min(end + 1, len(where) - 1)]))), ci
