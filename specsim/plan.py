"""The capacity planner: which scheduler, and how many GPUs, keep the promises of each tier under a demand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pandas as pd

from specsim.asking import scheduler_name, several, told_twice
from specsim.capacity import Ask, Case, Trials, find
from specsim.engine import Policy, Scenario
from specsim.hardware import Profile
from specsim.leaders import Leader, leaders
from specsim.metrics import QUANTILES
from specsim.offers import Offer, replicas_for
from specsim.plan_answer import Plan
from specsim.schedulers import MTP1, DSparkAsync, DSparkGreedy, NoSpec, StaticGamma
from specsim.sensitivity import SENSITIVITY, check_memory, memory_caveats, memory_lines, sensitivity_table
from specsim.steady import check_steady
from specsim.tiers import Tier, merged, parse_tier, tier_of, with_shares
from specsim.trial import at_load, demanded, grid, most_users
from specsim.types import SLO, BeyondProfile, SpecsimError

MOST_HEADROOM = 10.0
"""Headroom above which percents were taken for shares."""
MOST_DEMAND = 1e12
FEW = 5
"""Requests beyond a percentile, or under a mean, below which a note says that it rests on few."""


def plan(
    base: Scenario,
    policy: Sequence[Any] | None = None,
    tiers: Sequence[Tier | str] = (),
    *,
    slo: SLO | None = None,
    rate: float | None = None,
    users: float | None = None,
    profiles: Sequence[Profile] | None = None,
    gpu_price: float | Sequence[float] | None = None,
    headroom: float = 0.2,
    shared: bool = False,
    seeds: Iterable[int] = range(3),
    sensitivity: bool = True,
    start: float | None = None,
    jobs: int = -1,
    progress: Callable[[int, int], None] | None = None,
) -> Plan:
    """Plan for ``rate`` requests/s, or ``users`` in a closed loop, served by whole replicas of ``base``.

    ``policy``: schedulers or Policy pairs to compare (None: NoSpec, MTP1 on a block of one, StaticGamma(γ),
    DSparkGreedy, DSparkAsync, as far as the drafter allows, and the base's own). ``tiers``: Tier objects or texts for
    ``parse_tier``; or one ``slo``, each bound of which nine of ten requests must meet. Tiers have pools of their own,
    or one ``shared``.
    ``profiles`` (None: the base's) with ``gpu_price`` dollars for a GPU-hour, one or one for each; of different models
    they compete too, and a note says so. Replicas hold the demand and ``headroom`` times as much on top. A replica of
    an open loop meets the same kind of arrivals as a whole, thinned: where a router spreads them more evenly, it
    sustains a little more. ``sensitivity=False`` leaves out how the answer moves. ``start``: the load of a replica at
    which searches begin, which does not change what they find.

    Raises SpecsimError for what cannot be planned: no demand, several replicas in ``base``, ramps, unknown words,
    demand above MOST_DEMAND, headroom above MOST_HEADROOM (1,000 %), a drafter that leaves no KV cache, a scheduler
    that answers otherwise when the same seed is run again.
    """
    seeds = several("plan: seeds", seeds)
    tiers = several("plan: tiers", tiers)
    asked = _check(base, tiers, slo, rate, users, headroom, seeds)
    closed, demand = users is not None, float(users if users is not None else rate or 0)
    given = [base.profile] if profiles is None else several("plan: profiles", profiles)
    prices = _prices(gpu_price, given)
    workload = demanded(base.workload, closed)
    trials = Trials(grid(closed, most_users(replace(base, workload=workload))), jobs, progress)
    begin = trials.grid.near(start) if start else trials.grid.near(16 if closed else 4)
    pools = (merged(asked),) if shared else asked
    policies = default_policies(base) if policy is None else several("plan: policy", policy)
    for profile in given:
        check_memory(base, profile)
    cases = [_cases(replace(base, profile=profile, workload=workload), policies) for profile in given]
    flat = [(p, label, case) for p, of in enumerate(cases) for label, case in of]
    first = at_load(workload, trials.grid.loads[begin])
    for case in (case for of in cases for _, case in of):
        with suppress(BeyondProfile):  # what the profile cannot price, the search meets too
            check_steady(replace(case.scenario, workload=first), seeds[0])
    found = trials.drive([find(trials, case, tier, seeds, begin) for tier in pools for _, _, case in flat])
    offers = []
    for (tier, (p, label, case)), capacity in zip(((tier, one) for tier in pools for one in flat), found, strict=True):
        part, profile = (tier.share or 1.0) * demand, case.scenario.profile
        replicas = replicas_for(capacity, part, headroom)
        offers.append(Offer(profile.name, label, capacity, part, profile.gpus, prices[p], replicas))
    offers = _with_tokens(trials, offers, seeds[0])
    walks = {}
    for profile, of in zip(given, cases, strict=True):
        names = {case.name for _, case in of}
        own = [c for c in found if c.feasible and c.case.name in names]
        if own and len(of) > 1:
            walks[profile.name] = tuple(leaders(trials, of, own, seeds))
    notes = [*model_caveat(given), *memory_caveats(base, given)]
    notes += _notes(offers, [case for _, _, case in flat], len(given) > 1) + _few(trials, offers)
    notes += _less_than_a_turn(trials, walks) if closed and walks else []
    answer = Plan(
        pools, tuple(offers), "users" if closed else "requests/s", demand, headroom, shared,
        walks,
        pd.DataFrame(columns=SENSITIVITY),
        caveats=tuple(profile.caveat for profile in given if profile.caveat),
        several_profiles=len(given) > 1,
    )  # fmt: skip
    if sensitivity:
        table, left_out = sensitivity_table(trials, answer, seeds[0])
        answer = replace(answer, sensitivity=table)
        notes += left_out + memory_lines(trials, answer, seeds[0])
    if progress is not None:
        progress(len(trials.done), len(trials.done))
    return replace(answer, notes=tuple(dict.fromkeys(notes)))


def default_policies(base: Scenario) -> list[Any]:
    """The schedulers that are compared where none are named: those that ``base``'s drafter allows, and its own."""
    drafter = base.drafter
    policies: list[Any] = [NoSpec()]
    if drafter is not None:
        if drafter.gamma == 1:
            policies.append(MTP1())
        else:  # the first token of its blocks alone
            policies.append(Policy(MTP1(), replace(drafter, gamma=1, name=f"{drafter.name}:1")))
            policies.append(StaticGamma(drafter.gamma))
        if drafter.has_confidence:
            policies += [DSparkGreedy(), DSparkAsync()]
    if scheduler_name(base.scheduler) not in {scheduler_name(p) for p in policies}:
        policies.append(base.scheduler)
    return policies


def _check(
    base: Scenario, tiers: Sequence[Tier | str], slo: SLO | None, rate: float | None, users: float | None,
    headroom: float, seeds: list[int],
) -> tuple[Tier, ...]:  # fmt: skip
    if (rate is None) == (users is None):
        raise SpecsimError("plan: expected either rate (requests/s) or users")
    for name, value in (("rate", rate), ("users", users)):
        if value is not None and not 0 < value <= MOST_DEMAND:
            value = min(value, 1e300)  # a whole number may have no float
            raise SpecsimError(f"plan: {name}: expected a number above 0, at most {MOST_DEMAND:g}, got {value:g}")
    if not 0 <= headroom <= MOST_HEADROOM:
        raise SpecsimError(f"plan: headroom: expected a share of 0 to {MOST_HEADROOM:g}, like 0.2, got {headroom:g}")
    if base.replicas != 1:
        raise SpecsimError(f"plan: replicas: expected 1, of which the plan says how many, got {base.replicas}")
    if not seeds:
        raise SpecsimError("plan: seeds: expected at least one")
    if slo is not None and tiers:
        raise SpecsimError("plan: expected tiers or slo, not both")
    given = [tier_of(slo)] if slo is not None else [parse_tier(t) if isinstance(t, str) else t for t in tiers]
    return with_shares(given)


def _prices(given: float | Sequence[float] | None, profiles: list[Profile]) -> list[float | None]:
    names = [profile.name for profile in profiles]
    if len(set(names)) < len(names):
        raise SpecsimError("plan: profiles: expected different names")
    if given is None:
        return [None] * len(profiles)
    prices = [float(given)] if isinstance(given, int | float) else [float(p) for p in given]
    prices = prices * len(profiles) if len(prices) == 1 else prices
    if len(prices) != len(profiles):
        raise SpecsimError(f"plan: gpu_price: expected one, or one a profile, got {len(prices)} for {len(profiles)}")
    for price in prices:
        if not 0 < price < math.inf:
            raise SpecsimError(f"plan: gpu_price: expected dollars above 0, got {price:g}")
    return list(prices)


def _cases(base: Scenario, policies: Sequence[Any]) -> list[tuple[str, Case]]:
    pairs = [p if isinstance(p, Policy) else Policy(p) for p in policies]
    labels = [repr(p) for p in pairs]
    for label in labels:
        if labels.count(label) > 1:
            raise SpecsimError(f"plan: {told_twice(label, [p.scheduler for p in pairs if repr(p) == label])}")
    return [
        (label, Case(f"{label} on {base.profile.name}", base.with_policy(p)))
        for label, p in zip(labels, policies, strict=True)
    ]


def _with_tokens(trials: Trials, offers: list[Offer], seed: int) -> list[Offer]:
    """The offers with the output tokens/s of their demand.

    At a rate all sell the same: what requests ask for. Of users what they get at the load that replicas really have, in
    a trial at the load nearest to it.
    """
    able = [offer for offer in offers if offer.capacity.feasible]
    if not able:
        return offers
    if not able[0].capacity.case.scenario.workload.closed:
        answer = sum(offer.capacity.answer for offer in able) / len(able)
        return [replace(o, tokens=o.demand * answer) if o.capacity.feasible else o for o in offers]
    asks = {}
    for offer in able:
        found, each = offer.capacity, offer.demand / (offer.replicas or 1)
        # Where nothing is held on top, the load nearest may be one that this seed does not sustain.
        at = min(trials.grid.near(max(each, 1.0)), found.brackets[0].low or 0)
        asks[id(offer)] = Ask(found.case, at, seed)
    trials.run(list(asks.values()))
    told = []
    for offer in offers:
        if id(offer) in asks:
            trial = trials(asks[id(offer)])
            offer = replace(offer, tokens=offer.demand * trial.tokens / trial.load)
        told.append(offer)
    return told


def _few(trials: Trials, offers: list[Offer]) -> list[str]:
    """A line where statistics that bounds are on rest on fewer than FEW requests in some trial that decided."""
    told, fewest = [], math.inf
    for offer in offers:
        found = offer.capacity
        for at, seed in ((b.high if b.low is None else b.low, b.seed) for b in found.brackets):
            trial = trials(Ask(found.case, at or 0, seed))
            for bound in found.tier.bounds if trial.requests else ():
                level = QUANTILES.get(bound.statistic, 1.0)
                requests = int(trial.statistics[f"{bound.metric}_requests"])
                if not requests:
                    raise SpecsimError(
                        f"tier {found.tier.name!r}: {bound.metric}: no request has any where answers are of one token"
                    )
                if requests * (min(level, 1 - level) or 1.0) < FEW - 1e-9:
                    told.append(f"{bound.metric} {bound.statistic}")
                    fewest = min(fewest, requests)
    if not told:
        return []
    names = ", ".join(dict.fromkeys(told))
    return [f"fewer than {FEW} requests decide on {names} in a trial of {fewest:,}: --num-requests has more"]


def _less_than_a_turn(trials: Trials, walks: Mapping[str, Sequence[Leader]]) -> list[str]:
    """A line where users outnumber the requests that a trial measures, at loads that schedulers are compared at."""
    most = max(leader.high for walk in walks.values() for leader in walk)
    short = [t for t in trials.done.values() if 0 < t.requests < t.load <= most]
    if not short:
        return []
    worst = min(short, key=lambda trial: trial.requests / trial.load)
    return [
        f"trials of as few as {worst.requests:,} requests of {worst.load:,.0f} users: their tok/s, and so who has most "
        "at which load, hang on where a trial begins and ends: --num-requests has more"
    ]


def model_caveat(profiles: Sequence[Profile]) -> list[str]:
    """A line where profiles are of different models, so that what is ranked is not the same service."""
    models = list(dict.fromkeys(profile.model for profile in profiles if profile.model))
    if len({model.casefold() for model in models}) < 2:
        return []
    return [f"the profiles are of different models ({', '.join(models)}), whose answers are not the same"]


def _notes(offers: list[Offer], cases: list[Case], several: bool) -> list[str]:
    whom: dict[tuple[str, str], list[str]] = {}  # what is told of several schedulers is told once
    for offer in offers:
        for line in offer.capacity.notes:
            name = offer.policy + f" on {offer.profile}" * several
            whom.setdefault((offer.capacity.tier.name, line), []).append(name)
    notes = [f"{', '.join(names)} in {tier}: {line}" for (tier, line), names in whom.items()]
    for case in cases:
        drafter = case.scenario.drafter
        if drafter is not None and isinstance(case.scenario.scheduler, MTP1) and drafter.acceptance.gamma > 1:
            notes.append(f"{case.name}: the first token of longer blocks, at their drafting cost, is no MTP module")
    return notes
