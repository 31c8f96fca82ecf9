"""When one more draft token pays, from a profile's step times; and what schedulers make of them.

A step with K draft tokens lasts T(K) and is expected to produce E(K) tokens: Θ(K) = E(K)/T(K). A token of
survival a raises Θ if (E(K) + a)/T(K+1) > E(K)/T(K), that is if

    a > E(K) · (T(K+1) − T(K)) / T(K),

the expected tokens times the slope of ln T. This is the :func:`next_threshold`, at which Algorithm 1 (DSparkGreedy)
stops. On a staircase it is 0 on a stair and large before the next one. Who sees all K at once (GlobalArgmax,
DSparkAsync) pays a whole stair for all tokens that fit on it: m tokens of survival a raise Θ if

    a > E(K) · (T(K+m) − T(K)) / (m · T(K)),

least over m: the :func:`look_ahead_threshold`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specsim.asking import scheduler_name
from specsim.hardware import Additive, Prices, Profile, Shape, step_cost
from specsim.schedulers import DSparkAsync, DSparkGreedy, NoSpec, StaticGamma
from specsim.views import StepView

WARM_UP = 4
"""Steps before a scheduler's choice counts: more than DSparkAsync remembers."""


def shape_of(num_seqs: int, context: float) -> Shape:
    """A step of ``num_seqs`` decoding sequences with ``context`` KV tokens each."""
    return Shape(num_seqs, num_seqs * context, shortest=context, longest=context)


def fits(profile: Profile, num_seqs: int, context: float) -> bool:
    """Whether the profile's KV cache holds ``num_seqs`` sequences of ``context`` KV tokens each."""
    return profile.kv_tokens is None or num_seqs * context <= profile.kv_tokens


def reads_kv(profile: Profile) -> bool:
    """Whether step times depend on the KV that sequences hold: a curve by tokens alone knows nothing of it."""
    verify = profile.verify
    return verify.type != "table1d" and not (isinstance(verify, Additive) and verify.kv_tokens is None)


def held(profiles: Iterable[Profile], context: int) -> str:
    """What a title says of the KV: ``context`` tokens a sequence, unless no profile's step times depend on it."""
    return f"{context:,} KV tokens a sequence" if any(map(reads_kv, profiles)) else "whatever KV they hold"


def decode_seconds(
    profile: Profile, tokens: Sequence[int], context: float, num_seqs: int | None = None, *, extrapolate: bool = False
) -> Prices:
    """Seconds [n] of decode steps of ``tokens``, host time included and drafting not.

    ``num_seqs`` sequences (None: one a token) hold ``context`` KV tokens each, the tokens beyond one each are drafts.
    Infinite outside the range, and where the sequences do not fit in the profile's KV cache.
    """
    most = max(tokens)
    cost = step_cost(profile, most, most if num_seqs is None else num_seqs, 0, extrapolate=extrapolate)
    seconds = []
    for count in tokens:
        n = count if num_seqs is None else min(num_seqs, count)
        there = fits(profile, n, context)
        seconds.append(float(cost.curve(shape_of(n, context), count - n)[count - n]) if there else np.inf)
    return np.array(seconds)


def draft_curve(profile: Profile, num_seqs: int, gamma: int, context: float, *, extrapolate: bool = False) -> Prices:
    """T(K): seconds [num_seqs · γ + 1] of a step with K = 0.. draft tokens, host and drafting included.

    Without a draft cost in the profile drafting is free. Infinite outside the range, and where the sequences do
    not fit in the profile's KV cache.
    """
    most = num_seqs * gamma
    if not fits(profile, num_seqs, context):
        return np.full(most + 1, np.inf)
    drafts = gamma if profile.draft is not None else 0
    cost = step_cost(profile, num_seqs + most, num_seqs, drafts, extrapolate=extrapolate)
    return cost.curve(shape_of(num_seqs, context), most) + float(cost.draft[num_seqs])


def expected_tokens(
    num_seqs: int, gamma: int, tau: float | None = None, survival: Sequence[float] | None = None
) -> Prices:
    """E(K) [num_seqs · γ + 1]: tokens that a step with K draft tokens is expected to produce.

    ``survival`` [γ] (by position): drafts are spread evenly over the sequences. Otherwise every draft counts in
    full up to ``tau`` tokens a sequence, R · min(1 + K/R, τ); with None the most there can be, so that a token
    above the threshold pays whatever came before it.
    """
    drafts = np.arange(num_seqs * gamma + 1) / num_seqs
    if survival is not None:
        each = 1 + np.interp(drafts, np.arange(gamma + 1), np.append(0.0, np.cumsum(survival)))
    else:
        each = np.minimum(1 + drafts, np.inf if tau is None else tau)
    return np.asarray(num_seqs * each)


def next_threshold(seconds: Prices, expected: Prices) -> Prices:
    """The survival [n − 1] above which draft token K + 1 raises Θ, for T(K) and E(K) [n].

    Negative where the step gets shorter (any token pays), above 1 where none can, NaN outside the range.
    """
    with np.errstate(invalid="ignore"):
        return np.asarray(expected[:-1] * (seconds[1:] - seconds[:-1]) / seconds[:-1])


def look_ahead_threshold(seconds: Prices, expected: Prices) -> Prices:
    """The survival [n − 1] above which some number of further draft tokens raises Θ, if all of them have it."""
    out = np.full(len(seconds) - 1, np.inf)
    out[~np.isfinite(seconds[:-1])] = np.nan
    # The least slope from K on is that to the next corner of the lower convex hull of all points from K on.
    at, times = np.flatnonzero(np.isfinite(seconds)).tolist(), seconds.tolist()
    hull: list[int] = []
    for k in reversed(at):
        while len(hull) > 1 and _slope(times, k, hull[-1]) >= _slope(times, k, hull[-2]):
            hull.pop()
        if hull:
            out[k] = expected[k] * _slope(times, k, hull[-1]) / times[k]
        hull.append(k)
    return out


def _slope(times: list[float], k: int, m: int) -> float:
    return (times[m] - times[k]) / (m - k)


@dataclass(frozen=True)
class Choice:
    """What a scheduler does with ``num_seqs`` sequences: draft tokens verified a sequence, tok/s of the replica."""

    scheduler: str
    num_seqs: int
    draft_tokens: float
    throughput: float


def choices(
    profile: Profile,
    survival: NDArray[Any],
    num_seqs: int,
    context: float,
    *,
    steps: int = 64,
    seed: int = 0,
    extrapolate: bool = False,
) -> list[Choice]:
    """What NoSpec, StaticGamma(γ), DSparkGreedy and DSparkAsync do with blocks drawn from ``survival`` [n, γ].

    Means over ``steps`` steps of as many sequences, each holding ``context`` KV tokens, without arrivals or
    prefills. Throughput counts a draft token at its survival, and is NaN where the step of some choice has no price.
    Empty where so many sequences do not fit in the profile's KV cache.
    """
    if not fits(profile, num_seqs, context):
        return []
    gamma = survival.shape[1]
    curve = draft_curve(profile, num_seqs, gamma, context, extrapolate=extrapolate)
    plain = decode_seconds(profile, [num_seqs], context, extrapolate=extrapolate)[0]
    ids, found = np.arange(num_seqs), []
    for scheduler in (NoSpec(), StaticGamma(gamma), DSparkGreedy(), DSparkAsync()):
        ask = scheduler.start() if hasattr(scheduler, "start") else scheduler
        waits = profile.sync_seconds if getattr(scheduler, "synchronous", False) else 0.0
        rng = np.random.default_rng(seed)
        drafts = produced = seconds = 0.0
        prices = curve + waits
        for step in range(WARM_UP + steps):
            blocks = survival[rng.integers(len(survival), size=num_seqs)]
            view = StepView(ids, blocks, prices.take)
            lens = np.asarray(ask(view))
            if step >= WARM_UP:
                drafts += float(lens.sum())
                produced += num_seqs + float(blocks[np.arange(gamma) < lens[:, None]].sum())
                seconds += float(plain if isinstance(scheduler, NoSpec) else prices[int(lens.sum())])
        rate = produced / seconds if np.isfinite(seconds) else np.nan
        found.append(Choice(scheduler_name(scheduler), num_seqs, drafts / (steps * num_seqs), rate))
    return found
