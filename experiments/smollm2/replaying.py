"""Replay of a dense trace beside real speculative decoding: what both comparisons here need."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from scipy.stats import norm

from specsim.blocktrace import Trace
from specsim.drafters.speculate import HISTORY, Speculated
from specsim.views import StepRecord, StepView


@dataclass
class Cycles:
    """One entry a cycle: ``request``, ``position`` of its anchor, ``draft_len`` verified, ``accepted`` of them."""

    request: np.ndarray
    position: np.ndarray
    draft_len: np.ndarray
    accepted: np.ndarray

    def select(self, mask: np.ndarray) -> Cycles:
        return Cycles(self.request[mask], self.position[mask], self.draft_len[mask], self.accepted[mask])


def from_real(run: Speculated, ends: Sequence[int], most: int, gamma: int) -> Cycles:
    """The cycles that a recorder would have had a row for: the block ends before the answer does."""
    lengths = [len(o) - (o[-1] in ends) for o in run.outputs]
    rows = [(c.request, c.position, c.draft_len, c.accepted) for c in run.cycles]
    cycles = Cycles(*(np.array(column) for column in zip(*rows, strict=True)))
    limit = np.minimum(np.array(lengths) - gamma, most)
    return cycles.select(cycles.position < limit[cycles.request])


def replay(
    trace: Trace,
    names: Sequence[str],
    scheduler: Any,
    most: int,
    step_seconds: Callable[[Any], Any] = lambda tokens: np.ones(np.shape(tokens)),
    engines: int = 1,
) -> Cycles:
    """Walk the responses ``names`` of a dense trace under ``scheduler``, request i on engine i mod engines.

    Every response starts at its first row, all at once, and stops at its last or at position ``most``.
    """
    spans = {}
    for code, name in enumerate(trace.request_ids):
        rows = np.flatnonzero(trace.request_id == code)
        spans[name] = (rows[0], min(len(rows), most))
    start = np.array([spans[name][0] if name in spans else 0 for name in names])
    length = np.array([spans[name][1] if name in spans else 0 for name in names])
    confidences = trace.confidence
    survivals = None if confidences is None else confidences.astype(np.float64).cumprod(1)
    policies = [scheduler.start() if hasattr(scheduler, "start") else scheduler for _ in range(engines)]
    previous = [deque(maxlen=HISTORY) for _ in range(engines)]
    position = np.zeros(len(names), dtype=np.int64)
    found = []
    while (going := np.flatnonzero(position < length)).size:
        for engine in range(engines):
            requests = going[going % engines == engine]
            if not requests.size:
                continue
            rows = start[requests] + position[requests]
            cost = partial(lambda count, k: step_seconds(count + np.asarray(k)), len(requests))
            view = StepView(
                requests,
                survivals[rows],
                cost,
                gamma=trace.gamma,
                previous=tuple(previous[engine]),
            )
            lens = np.minimum(policies[engine](view), trace.proposed[rows])
            accepted = np.minimum(trace.accepted[rows], lens)
            previous[engine].append(StepRecord(view, lens, accepted + 1))
            found.append((requests, position[requests], lens, accepted))
            position[requests] += accepted + 1
    return Cycles(*(np.concatenate(column) for column in zip(*found, strict=True)))


def ratio(cycles: Cycles, top: np.ndarray, bottom: np.ndarray) -> tuple[float, float]:
    """Σ top / Σ bottom and its standard error, clustered by request (delta method)."""
    count = int(cycles.request.max()) + 1
    tops, bottoms = (np.bincount(cycles.request, weights=x, minlength=count) for x in (top, bottom))
    seen = np.bincount(cycles.request, minlength=count) > 0
    tops, bottoms = tops[seen], bottoms[seen]
    mean = tops.sum() / bottoms.sum()
    n = len(tops)
    error = math.sqrt(n / (n - 1) * ((tops - mean * bottoms) ** 2).sum()) / bottoms.sum()
    return float(mean), error


def statistics(cycles: Cycles, gamma: int) -> dict[str, tuple[float, float]]:
    """τ, and conditional acceptance at each position that was verified, with standard errors."""
    found = {"tau": ratio(cycles, cycles.accepted + 1.0, np.ones(len(cycles.accepted)))}
    for k in range(gamma):
        reached = (cycles.accepted >= k) & (cycles.draft_len > k)
        if reached.sum() >= 30:
            found[f"position {k + 1}"] = ratio(cycles, reached & (cycles.accepted > k), reached)
    return found


def z_of(a: tuple[float, float], b: tuple[float, float]) -> float:
    return (a[0] - b[0]) / math.hypot(a[1], b[1])


def bound(comparisons: int, level: float = 0.99) -> float:
    """The |z| that so many comparisons together exceed with probability 1 - level at most (Bonferroni)."""
    return float(norm.ppf(1 - (1 - level) / (2 * comparisons)))
