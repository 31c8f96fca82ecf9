"""Step costs from a benchmark: what throughput at several loads, with and without drafts, says about a step.

At a concurrency of which R requests decode, a request that shows I tokens a second gets τ tokens a step, so
a step lasts τ / I. With γ draft tokens a request the forward holds B = R·(1 + γ) tokens (and, on average,
the prompt tokens that arrive meanwhile). The steps of all rows are then explained by

    T(B, R) = f(B) + g(R) + [γ > 0]·d(R)

with f and g piecewise linear and never falling, d a constant plus a slope for drafting, and an unknown τ for
each method whose rows tell none. Everything is linear, so it is one bounded least-squares problem: the rows,
weighted by their relative noise, and two weak priors, both in units of the step time: f and g keep their
slope from one doubling to the next within ``smoothness``, and what tokens can explain is not charged to
sequences (``shrink``). Repeating it with the rows' noise and the unknown τ drawn anew gives intervals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specsim.hardware import Additive, DraftCost
from specsim.hardware.shape import last_slope
from specsim.types import SpecsimError, stream

Array = NDArray[np.float64]
ROUNDS = 4
"""Rounds in which the mean prompt tokens a step, which depend on τ, settle."""


@dataclass(frozen=True)
class Row:
    """One load of a benchmark.

    ``method`` labels rows of one γ that share a τ; ``gamma`` draft tokens are verified for every request.
    ``throughput`` in tokens/s of all GPUs, ``interactivity`` in tokens/s a user; one may be missing. ``tau``:
    tokens a request and step, or None within ``tau_range``. ``prompt_tokens`` and ``output_tokens`` are the
    requests' means (0: prompts are left out). A ``check`` row is predicted, not fitted.
    """

    method: str
    gamma: int
    concurrency: float
    throughput: float | None = None
    interactivity: float | None = None
    tau: float | None = None
    tau_range: tuple[float, float] | None = None
    running: float | None = None
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    check: bool = False

    @property
    def told_tau(self) -> float | tuple[float, float] | None:
        """What the row says of τ: a number (1 without drafts), a range, or nothing."""
        if not self.gamma:
            return 1.0
        return self.tau_range if self.tau is None else self.tau

    @property
    def decoding(self) -> float:
        """Requests that decode at a time: as told, or throughput / interactivity, or all."""
        if self.running is not None:
            return self.running
        if self.throughput is not None and self.interactivity is not None:
            return min(self.throughput / self.interactivity, self.concurrency)
        return self.concurrency

    @property
    def speed(self) -> float:
        """Tokens a second of one decoding request."""
        if self.interactivity is not None:
            return self.interactivity
        assert self.throughput is not None
        return self.throughput / self.decoding

    def tokens(self, tau: float) -> float:
        """Mean tokens in the forward, prompts included."""
        prompts = tau * self.prompt_tokens / self.output_tokens if self.output_tokens else 0.0
        return self.decoding * (1 + self.gamma + prompts)


@dataclass(frozen=True)
class Solution:
    """One set of curves: f by ``tokens``, g by ``seqs`` (0 at one), the two numbers of d, and τ by method; seconds."""

    tokens: Array
    token_seconds: Array
    seqs: Array
    seq_seconds: Array
    draft: tuple[float, float]
    tau: dict[str, float]

    def step(self, row: Row) -> float:
        """Seconds of a step of ``row``, at the last slopes beyond what was fitted."""
        tokens = _line(row.tokens(self.tau[row.method]), self.tokens, self.token_seconds)
        draft = self.draft[0] + self.draft[1] * (row.decoding - 1) if row.gamma else 0.0
        return tokens + _line(row.decoding, self.seqs, self.seq_seconds) + draft

    def speed(self, row: Row) -> float:
        """Tokens a second of one request of ``row``."""
        return self.tau[row.method] / self.step(row)


@dataclass(frozen=True)
class StepFit:
    """The fitted curves, ``best``, and ``draws`` of what else the rows allow."""

    rows: tuple[Row, ...]
    best: Solution
    draws: tuple[Solution, ...]

    @property
    def last_tokens(self) -> float:
        """The largest step that was fitted; beyond it the last slope goes on."""
        return float(self.best.tokens[-1])

    @property
    def first_tokens(self) -> float:
        """The smallest step that was fitted; below it the first slope goes on, which the rows do not tell."""
        return min(row.tokens(self.best.tau[row.method]) for row in self.rows if not row.check)

    def verify(self, solution: Solution | None = None) -> Additive:
        """The step cost, from 1 token on; bounded by the 2.5 and 97.5 % quantiles of the draws if of the best.

        It begins below ``first_tokens`` though nothing was measured there: runs that drain go there, and a table
        that began later would have no price, or with extrapolation its first one flat.

        Raises SpecsimError where the rows leave no time for the smallest step.
        """
        s = solution or self.best
        if not _rounded(s.token_seconds)[0]:
            fewest = min(row.decoding for row in self.rows if not row.check and not row.gamma)
            raise SpecsimError(
                "rows: steps grow so steeply that one of 1 token would last no time, expected a load without drafts "
                f"at fewer than {fewest:.4g} users"
            )
        low, high = np.quantile([d.token_seconds for d in self.draws], [0.025, 0.975], axis=0)
        return Additive(
            tokens=tuple(int(b) for b in s.tokens),
            seconds=_rounded(s.token_seconds),
            low=_rounded(np.minimum(low, s.token_seconds)) if solution is None else None,
            high=_rounded(np.maximum(high, s.token_seconds)) if solution is None else None,
            below="linear",
            num_seqs=tuple(int(r) for r in s.seqs),
            seqs_seconds=_rounded(s.seq_seconds),
        )

    def draft(self, solution: Solution | None = None) -> DraftCost | None:
        """The cost of drafting, where any fitted row drafts."""
        s = solution or self.best
        if not any(row.gamma and not row.check for row in self.rows):
            return None
        last = int(s.seqs[-1])
        first, slope = s.draft
        points = {1: first, last: first + slope * (last - 1)}
        return DraftCost(type="parallel", num_seqs=tuple(points), seconds=_rounded(np.array(list(points.values()))))

    def interval(self, row: Row, share: float = 0.9) -> tuple[float, float]:
        """The interval of ``row``'s speed over the draws."""
        return _middle([d.speed(row) for d in self.draws], share)

    def tau_interval(self, method: str, share: float = 0.9) -> tuple[float, float]:
        """The interval of a method's τ over the draws."""
        return _middle([d.tau[method] for d in self.draws], share)

    @property
    def fitted_taus(self) -> dict[str, tuple[float, float, float]]:
        """τ of the methods whose rows do not tell it, each with its 90 % interval."""
        taus = {method: (tau, *self.tau_interval(method)) for method, tau in self.best.tau.items()}
        return {method: found for method, found in taus.items() if found[2] > found[1]}


def fit_steps(
    rows: Sequence[Row],
    *,
    noise: float = 0.02,
    smoothness: float = 0.1,
    shrink: float = 0.1,
    draws: int = 200,
    seed: int = 0,
) -> StepFit:
    """Fit step costs to the rows that are not ``check``; see the module for the model.

    ``noise``: relative standard deviation of a row. Raises SpecsimError where the rows cannot tell: no row
    without drafts, fewer than two loads, a checked method that no fitted row gives a τ; and where the rows of a
    method contradict each other (two γ, two τ, a τ that only checked rows tell), naming them by number from 1.
    """
    _check(rows)
    problem = _Problem(rows, noise, smoothness, shrink)
    best = problem.solve()
    rng = stream(seed, "fit")
    others = tuple(problem.solve(best, rng) for _ in range(draws))
    return StepFit(tuple(rows), best, others)


class _Problem:
    """The least-squares problem, set up once and solved for any draw of the noise."""

    def __init__(self, rows: Sequence[Row], noise: float, smoothness: float, shrink: float) -> None:
        self.rows = [row for row in rows if not row.check]
        self.noise, self.smoothness, self.shrink = noise, smoothness, shrink
        told = {row.method: row.told_tau for row in rows if row.told_tau is not None}  # one a method: see _check
        self.fixed = {method: tau for method, tau in told.items() if not isinstance(tau, tuple)}
        ranges = {method: tau for method, tau in told.items() if isinstance(tau, tuple)}
        self.ranges = {
            row.method: ranges.get(row.method, (1.0, 1.0 + row.gamma))
            for row in self.rows
            if row.method not in self.fixed
        }
        self.methods = list(self.ranges)
        self.told = set(ranges)  # not just the widest range
        self.start = self.fixed | {m: (low + high) / 2 for m, (low, high) in self.ranges.items()}
        self.seqs = _doublings(max(row.decoding for row in self.rows))

    def solve(self, at: Solution | None = None, rng: np.random.Generator | None = None) -> Solution:
        """The best curves, or with ``rng`` those of one draw of the noise and of the unknown τ."""
        factors = np.exp(self.noise * rng.standard_normal(len(self.rows))) if rng else np.ones(len(self.rows))
        wanted = {m: (rng.uniform(*r) if rng else sum(r) / 2) for m, r in self.ranges.items() if m in self.told}
        tau = dict(at.tau) if at else self.start
        for _ in range(1 if at else ROUNDS):
            solution = self._solve(tau, factors, wanted, is_draw=rng is not None)
            tau = solution.tau
        return solution

    def _solve(self, tau: dict[str, float], factors: Array, wanted: dict[str, float], is_draw: bool) -> Solution:
        from scipy.optimize import lsq_linear  # here: loading it would be a quarter of every start

        rows, methods = self.rows, self.methods
        held = np.array([row.tokens(tau[row.method]) for row in rows])
        tokens, seqs = _doublings(held.max()), self.seqs
        nf, ng = len(tokens), len(seqs) - 1
        width = nf + ng + 2 + len(methods)
        equations: list[tuple[Array, float]] = []

        def equation(terms: dict[int, float] | Array, value: float, sigma: float) -> None:
            row = np.zeros(width)
            if isinstance(terms, dict):
                for place, factor in terms.items():
                    row[place] = factor
            else:
                row[: len(terms)] = terms
            equations.append((row / sigma, value / sigma))

        steps = np.array([tau[row.method] / row.speed for row in rows])
        for row, b, factor, step in zip(rows, held, factors, steps, strict=True):
            drafts = [1.0, row.decoding - 1] if row.gamma else [0.0, 0.0]
            terms = np.concatenate([_increments(b, tokens), _increments(row.decoding, seqs)[1:], drafts])
            per_token = factor / row.speed
            if row.method in methods:
                terms = np.append(terms, np.zeros(len(methods)))
                terms[nf + ng + 2 + methods.index(row.method)] = -per_token
                equation(terms, 0.0, self.noise * step)
            else:
                equation(terms, self.fixed[row.method] * per_token, self.noise * step)
        typical_b = np.interp(tokens, *_sorted(held, steps))
        typical_r = np.interp(seqs, *_sorted([row.decoding for row in rows], steps))
        for at, first, typical in ((tokens, 1, typical_b), (seqs, nf, typical_r)):
            for i in range(1, len(at) - 1):
                ratio = (at[i + 1] - at[i]) / (at[i] - at[i - 1])
                equation({first + i: 1.0, first + i - 1: -ratio}, 0.0, self.smoothness * typical[i + 1])
        for i in range(ng):
            equation({nf + i: 1.0}, 0.0, self.shrink * typical_r[i + 1])
        equation({nf + ng + 1: max(seqs[-1] - 1, 1.0)}, 0.0, self.shrink * typical_r[-1])
        for method, value in wanted.items():
            low, high = self.ranges[method]
            sigma = 1e-3 if is_draw else (high - low) / np.sqrt(12) + 1e-6  # a draw holds the τ that it drew
            equation({nf + ng + 2 + methods.index(method): 1.0}, value, sigma)
        lower, upper = np.zeros(width), np.full(width, np.inf)
        for i, method in enumerate(methods):
            lower[nf + ng + 2 + i], upper[nf + ng + 2 + i] = self.ranges[method]
        matrix, values = np.array([e[0] for e in equations]), np.array([e[1] for e in equations])
        x = lsq_linear(matrix, values, (lower, np.maximum(upper, lower + 1e-9))).x
        found = dict(zip(methods, x[nf + ng + 2 :].tolist(), strict=True))
        return Solution(
            tokens=tokens,
            token_seconds=np.cumsum(x[:nf]),
            seqs=seqs,
            seq_seconds=np.append(0.0, np.cumsum(x[nf : nf + ng])),
            draft=(float(x[nf + ng]), float(x[nf + ng + 1])),
            tau=self.fixed | found,
        )


def _check(rows: Sequence[Row]) -> None:
    _check_methods(rows)
    fitted = [row for row in rows if not row.check]
    plain = {row.decoding for row in fitted if not row.gamma}
    if len(plain) < 2:
        raise SpecsimError("rows: expected at least two loads without drafts (gamma 0) to fit: they set the scale")
    known = {row.method for row in fitted} | {row.method for row in rows if row.tau is not None or not row.gamma}
    for row in rows:
        if row.method not in known:
            raise SpecsimError(
                f"rows: method {row.method!r} is only checked: expected a tau, or a row of it to fit (at one user, say)"
            )


def _check_methods(rows: Sequence[Row]) -> None:
    """SpecsimError unless the rows of each method have one γ and tell at most one τ, the fitted ones too."""
    first: dict[str, tuple[int, Row]] = {}  # by method, and the first that tells a τ
    telling: dict[str, tuple[int, Row]] = {}
    for i, row in enumerate(rows, 1):
        j, other = first.setdefault(row.method, (i, row))
        if row.gamma != other.gamma:
            raise SpecsimError(
                f"rows {j} and {i}: method {row.method!r} with gamma {other.gamma} and {row.gamma}, "
                "expected one gamma in all rows of a method: they share a tau"
            )
        if row.told_tau is None:
            continue
        j, other = telling.setdefault(row.method, (i, row))
        if not np.allclose(_span(row), _span(other), rtol=1e-9, atol=0):  # sums of survivals differ by their order
            raise SpecsimError(
                f"rows {j} and {i}: method {row.method!r} with {_words(other)} and {_words(row)}, "
                "expected one tau or range in all rows of a method, or another method for each tau"
            )
    for method, (i, row) in telling.items():
        fitted = [(j, other) for j, other in enumerate(rows, 1) if other.method == method and not other.check]
        if fitted and all(other.told_tau is None for _, other in fitted):
            raise SpecsimError(
                f"rows {i} and {fitted[0][0]}: method {method!r} with {_words(row)} where it is only checked and none "
                "where it is fitted, expected it in the fitted rows too"
            )


def _span(row: Row) -> tuple[float, float]:
    """The τ that a row tells, from and to."""
    told = row.told_tau
    assert told is not None
    return told if isinstance(told, tuple) else (told, told)


def _words(row: Row) -> str:
    """What a row tells of its τ, for an error."""
    low, high = _span(row)
    return f"tau {low:g}" if low == high else f"tau from {low:g} to {high:g}"


def _doublings(last: float) -> Array:
    """1, 2, 4, .. and ``last``, rounded up; at least two places."""
    most = max(int(np.ceil(last - 1e-9)), 2)
    return np.array([*(1 << k for k in range(most.bit_length()) if 1 << k < most), most], dtype=np.float64)


def _increments(x: float, at: Array) -> Array:
    """Weights [n] of the first value and the increments that make up a piecewise linear curve at ``x``."""
    shares = np.clip((x - at[:-1]) / np.diff(at), 0.0, 1.0)
    return np.append(1.0, shares)


def _line(x: float, at: Array, price: Array) -> float:
    """The piecewise linear curve at ``x``, at the last slope beyond its end."""
    if x <= at[-1]:
        return float(np.interp(x, at, price))
    return float(price[-1] + last_slope(at, price) * (x - at[-1]))


def _middle(values: Sequence[float], share: float) -> tuple[float, float]:
    """The interval that holds the middle ``share`` of the values."""
    low, high = np.quantile(values, [(1 - share) / 2, (1 + share) / 2])
    return float(low), float(high)


def _sorted(x: Sequence[float] | Array, y: Array) -> tuple[Array, Array]:
    order = np.argsort(x)
    return np.asarray(x, dtype=np.float64)[order], y[order]


def _rounded(seconds: Array) -> tuple[float, ...]:
    """To a tenth of a microsecond: what follows is noise."""
    return tuple(float(s) for s in np.round(seconds, 7))
