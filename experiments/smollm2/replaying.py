"""Replay of a dense trace beside real speculative decoding: what both comparisons here need."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import norm

from specsim.blocktrace import Trace
from specsim.drafters.prompts import Prompt, read_prompts
from specsim.drafters.speculate import HISTORY, Speculated
from specsim.views import StepRecord, StepView

FEW = 30
"""Positions that fewer cycles reached are not compared: a normal bound would not hold for them."""


@dataclass
class Cycles:
    """One entry a cycle: ``request``, ``position`` of its anchor, ``draft_len`` verified, ``accepted`` of them.

    ``expected``: the chances of survival at the positions reached, added up: on average ``accepted``, with less luck.
    """

    request: np.ndarray
    position: np.ndarray
    draft_len: np.ndarray
    accepted: np.ndarray
    expected: np.ndarray

    def select(self, mask: np.ndarray) -> Cycles:
        return Cycles(*(column[mask] for column in vars(self).values()))


def some_prompts(path: Path, trace: Trace, limit: int) -> list[Prompt]:
    """``limit`` prompts of the file that the trace has a response to, spread over it: every domain has its share."""
    known = set(trace.request_ids)
    prompts = [p for p in read_prompts(path) if p.id in known]
    chosen = np.linspace(0, len(prompts) - 1, min(limit, len(prompts))).round().astype(int)
    return [prompts[i] for i in chosen]


def from_real(run: Speculated, ends: Sequence[int], most: int, gamma: int) -> Cycles:
    """The cycles that a recorder would have had a row for: the block ends before the answer does."""
    lengths = [len(o) - (o[-1] in ends) for o in run.outputs]
    rows = [(c.request, c.position, c.draft_len, c.accepted, c.expected) for c in run.cycles]
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

    Every response starts at its first row, all at once. Cycles from position ``most`` on are not told, but walked
    for a block longer, as a real run does, which keeps the batch as full.
    """
    spans = {}
    for code, name in enumerate(trace.request_ids):
        rows = np.flatnonzero(trace.request_id == code)
        spans[name] = (rows[0], min(len(rows), most + trace.gamma))
    start = np.array([spans[name][0] if name in spans else 0 for name in names])
    length = np.array([spans[name][1] if name in spans else 0 for name in names])
    chances = np.nan_to_num(trace.accept_rate.astype(np.float64))  # NaN past the first rejection: not reached
    chances = np.pad(chances.cumsum(1), ((0, 0), (1, 0)))
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
            found.append((requests, position[requests], lens, accepted, chances[rows, lens]))
            position[requests] += accepted + 1
    walked = Cycles(*(np.concatenate(column) for column in zip(*found, strict=True)))
    return walked.select(walked.position < most)


@dataclass
class Compared:
    """A ratio of sums over cycles, in real decoding and replayed, and the standard error of their difference."""

    real: float
    replay: float
    error: float

    @property
    def z(self) -> float:
        return (self.replay - self.real) / self.error if self.replay != self.real else 0.0


def compare(real: Cycles, walked: Cycles, gamma: int) -> dict[str, Compared]:
    """τ (by what was accepted, and by what was to be expected), and conditional acceptance by position.

    Positions are compared that were verified often enough on both sides.
    """
    found = {
        name: compare_ratios(*((c, getattr(c, column) + 1.0, np.ones(len(c.request))) for c in (real, walked)))
        for name, column in (("tau", "accepted"), ("tau by chances", "expected"))
    }
    for k in range(gamma):
        sides = []
        for c in (real, walked):
            reached = (c.accepted >= k) & (c.draft_len > k)
            sides.append((c, reached & (c.accepted > k), reached))
        if all(reached.sum() >= FEW for _, _, reached in sides):
            found[f"position {k + 1}"] = compare_ratios(*sides)
    return found


def compare_ratios(
    real: tuple[Cycles, np.ndarray, np.ndarray], walked: tuple[Cycles, np.ndarray, np.ndarray]
) -> Compared:
    """Σ top / Σ bottom of either side's (cycles, top, bottom), and the error of their difference.

    Clustered by response (delta method). The sides answer the same prompts, so that their residuals are
    taken together, prompt by prompt: what makes a prompt easy for both is no difference.
    """
    count = max(int(c.request.max()) for c, _, _ in (real, walked)) + 1
    means, residual, seen = [], np.zeros(count), np.zeros(count, dtype=bool)
    for sign, (cycles, top, bottom) in zip((-1, 1), (real, walked), strict=True):
        tops, bottoms = (np.bincount(cycles.request, weights=x, minlength=count) for x in (top, bottom))
        means.append(float(tops.sum() / bottoms.sum()))
        residual += sign * (tops - means[-1] * bottoms) / bottoms.sum()
        seen |= np.bincount(cycles.request, minlength=count) > 0
    n = int(seen.sum())
    return Compared(*means, math.sqrt(n / (n - 1) * (residual**2).sum()))


def bound(comparisons: int, level: float = 0.99) -> float:
    """The |z| that so many comparisons together exceed with probability 1 - level at most (Bonferroni)."""
    return float(norm.ppf(1 - (1 - level) / (2 * comparisons)))
