"""How an answer moves where acceptance, step seconds and traffic are 10 % off, and what a drafter's memory costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from specsim.acceptance import Drafter
from specsim.blocktrace import Trace
from specsim.calibration import apply_sts
from specsim.capacity import Capacity, Case, Search, Trials, find
from specsim.engine import Scenario, pool_tokens
from specsim.hardware import Profile
from specsim.offers import Offer, choose, replicas_for
from specsim.plan_answer import Plan
from specsim.schedulers import NoSpec
from specsim.synthesis import Domain, Synthetic
from specsim.types import SpecsimError
from specsim.workload import ClosedLoop

OFF = 0.1
"""How far acceptance, step seconds and traffic are off."""
SENSITIVITY = ["tier", "change", "profile", "policy", "load", "gpus", "gpus_kept", "noise"]


def scaled_acceptance(drafter: Drafter, factor: float, calibrated: bool = True) -> Drafter:
    """``drafter`` with conditional acceptance ``factor`` times as high at every position, and heads that know it.

    Of a synthetic trace the parameters are scaled, to at most 1. A recorded one is thinned: each accepted token is kept
    with chance ``factor``, drawn once for all, a rejected one ends its block, and confidences (at the trace's
    temperatures, if ``calibrated``) are scaled with it. It cannot be made better: what would have followed a rejected
    token was never seen. Raises SpecsimError for a
    ``factor`` above 1 of a recorded trace, and one of 0 or less.
    """
    if not 0 < factor < float("inf"):
        raise SpecsimError(f"scaled_acceptance: factor: expected above 0, got {factor}")
    trace = drafter.acceptance
    if isinstance(trace, Synthetic):
        domains = {name: _scaled(domain, factor) for name, domain in trace.domains.items()}
        return replace(drafter, acceptance=trace.model_copy(update={"domains": domains}))
    if factor > 1:
        raise SpecsimError(f"drafter {drafter.name!r}: a recorded trace can be thinned, not made better")
    return replace(drafter, acceptance=_thinned(trace, factor, calibrated))


def memory_note(profile: Profile, drafter: Drafter) -> str | None:
    """What the drafter's weights and KV take of the profile's KV cache, in a line; None where that is not told."""
    whole, left = pool_tokens(profile, None), pool_tokens(profile, drafter)
    if whole is None or left is None or whole == left:
        return None
    return f"its drafter takes {100 * (1 - left / whole):.3g} % of the KV cache: {left:,} tokens are left of {whole:,}"


def check_memory(base: Scenario, profile: Profile) -> None:
    """Raise SpecsimError where ``base``'s drafter leaves nothing of the profile's KV cache."""
    if base.kv_tokens is not None or base.drafter is None:
        return
    left = pool_tokens(profile, base.drafter)
    if left is not None and left <= 0:
        weights, cache = f"{base.drafter.weight_bytes:g} bytes", f"{profile.kv_tokens:,} tokens"
        raise SpecsimError(
            f"drafter {base.drafter.name}: weights of {weights} leave nothing of the KV cache of profile "
            f"{profile.name} ({cache} of {profile.kv_bytes_per_token:,.0f} bytes)"
        )


def memory_caveats(base: Scenario, profiles: Sequence[Profile]) -> list[str]:
    """A line for each profile on which the memory that ``base``'s drafter takes is not counted, and why."""
    drafter = base.drafter
    if drafter is None or not (drafter.weight_bytes or drafter.kv_bytes_per_token):
        return []
    lost = "the drafter's memory has no effect"
    if base.kv_tokens is not None:
        return [f"{lost}: the size of the KV cache is given ({base.kv_tokens:,} tokens), as what the drafter leaves"]
    unknown = [profile.name for profile in profiles if profile.kv_tokens is None]
    return [f"{lost} on {', '.join(unknown)}: how large the KV cache is there is not known"] if unknown else []


@dataclass(frozen=True)
class Change:
    """What is 10 % off: acceptance, or ``slow`` times the step seconds, or the traffic."""

    name: str
    acceptance: float = 1.0
    slow: float = 1.0
    traffic: float = 1.0


CHANGES = (
    Change(f"acceptance −{OFF:.0%}", acceptance=1 - OFF),
    Change(f"acceptance +{OFF:.0%}", acceptance=1 + OFF),
    Change(f"step seconds −{OFF:.0%}", slow=1 - OFF),
    Change(f"step seconds +{OFF:.0%}", slow=1 + OFF),
    Change(f"traffic −{OFF:.0%}", traffic=1 - OFF),
    Change(f"traffic +{OFF:.0%}", traffic=1 + OFF),
)


def sensitivity_table(trials: Trials, answer: Plan, seed: int) -> tuple[pd.DataFrame, list[str]]:
    """The best scheduler and the GPUs under each change; capacities move as they do under the first seed."""
    notes: list[str] = []
    jobs: list[tuple[Change, Offer]] = []
    searches: list[Search[Capacity]] = []
    for change in CHANGES:
        for offer in answer.offers:
            case, tier = offer.capacity.case, offer.capacity.tier
            try:
                altered = _altered(case, change)
            except SpecsimError as error:
                notes.append(f"{change.name} is left out: {error}")
                continue
            # Steps that last ``slow`` times as long stretch a whole trial: the tier is asked about in its time.
            jobs.append((change, offer))
            searches.append(find(trials, altered, tier.slower(change.slow), [seed], _near(trials, offer), close=True))
    rows, count = [], max(len(offer.capacity.by_seed) for offer in answer.offers)
    changed: dict[tuple[str, str], list[Offer]] = {}
    for (change, offer), capacity in zip(jobs, trials.drive(searches), strict=True):
        before, closed = offer.capacity, offer.capacity.case.scenario.workload.closed
        ratio = capacity.value / before.by_seed[0] if before.feasible else 1.0
        value = before.value * ratio if before.feasible else capacity.value
        value /= 1.0 if closed else change.slow
        # The seeds move together, so that the noise of the plan's comparisons stays what it was.
        seeds = [one / before.value * value for one in before.by_seed] if before.feasible else [value] * count
        moved = replace(before, value=value, by_seed=tuple(seeds))
        demand = offer.demand * change.traffic
        there = replace(offer, capacity=moved, replicas=replicas_for(moved, demand, answer.headroom))
        changed.setdefault((before.tier.name, change.name), []).append(there)
    for tier in answer.tiers:
        chosen = answer.best(tier)
        for change in CHANGES:
            offers = changed.get((tier.name, change.name), [])
            best = choose(offers, chosen)  # a change within the noise does not unseat the plan's choice
            same = [o for o in offers if chosen and (o.policy, o.profile) == (chosen.policy, chosen.profile)]
            noise = bool(chosen and same and best is same[0] and change.traffic == 1 and _within(best, chosen))
            if offers and len(offers) == len(answer.of(tier)):
                rows.append((tier.name, change.name, best.profile if best else "none", best.policy if best else "none",
                             best.capacity.value if best else math.nan, best.gpus if best else None,
                             same[0].gpus if same else None, noise))  # fmt: skip
    table = pd.DataFrame(rows, columns=SENSITIVITY)
    table[["gpus", "gpus_kept"]] = table[["gpus", "gpus_kept"]].astype("Int64")
    return table, list(dict.fromkeys(notes))


def _within(offer: Offer, chosen: Offer) -> bool:
    if offer.capacity.value == chosen.capacity.value:
        return False  # nothing moved: acceptance does not concern who drafts nothing
    return chosen.capacity.low <= offer.capacity.value <= chosen.capacity.high


def _near(trials: Trials, offer: Offer) -> int:
    """Where a search for nearly the same offer begins: at its capacity, or, without one, where its search ended."""
    bracket = offer.capacity.brackets[0]
    return next(i for i in (bracket.low, bracket.high) if i is not None)


def _altered(case: Case, change: Change) -> Case:
    scenario, name = case.scenario, case.name
    if change.acceptance != 1 and scenario.drafter is not None and not isinstance(scenario.scheduler, NoSpec):
        drafter = scaled_acceptance(scenario.drafter, change.acceptance, scenario.calibrated)
        scenario, name = replace(scenario, drafter=drafter), f"{name}, {change.name}"
    workload = scenario.workload
    if change.slow != 1 and isinstance(workload, ClosedLoop) and workload.think_s:
        workload = replace(workload, think_s=workload.think_s / change.slow)
        scenario, name = replace(scenario, workload=workload), f"{name}, {change.name}"
    return Case(name, scenario)


def memory_lines(trials: Trials, answer: Plan, seed: int) -> list[str]:
    """A line a tier and scheduler whose drafter takes KV memory: how much, and what load that costs."""
    searches, told = [], []
    for offer in answer.offers:
        case = offer.capacity.case
        drafter = case.scenario.drafter
        if drafter is None or isinstance(case.scenario.scheduler, NoSpec) or case.scenario.kv_tokens is not None:
            continue
        note = memory_note(case.scenario.profile, drafter)
        if note is None or not offer.capacity.feasible:
            continue
        free = replace(case.scenario, drafter=replace(drafter, weight_bytes=0.0, kv_bytes_per_token=0.0))
        case = Case(f"{case.name}, its drafter's memory free", free)
        searches.append(find(trials, case, offer.capacity.tier, [seed], _near(trials, offer), close=True))
        told.append((offer, note))
    lines = []
    for (offer, note), capacity in zip(told, trials.drive(searches), strict=True):
        lost = 1 - offer.capacity.by_seed[0] / capacity.value if capacity.feasible else 0.0
        cost = f"which costs {100 * lost:.2g} % of the load" if lost > 0.005 else "which costs no load"
        where = f" on {offer.profile}" if answer.several_profiles else ""
        lines.append(f"{offer.policy}{where} in {offer.capacity.tier.name}: {note}, {cost}")
    return lines


def _scaled(domain: Domain, factor: float) -> Domain:
    def times(means: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(min(factor * mean, 1.0) for mean in means)

    later = tuple(times(means) for means in domain.later)
    return domain.model_copy(update={"conditional_acceptance": times(domain.conditional_acceptance), "later": later})


def _thinned(trace: Trace, factor: float, calibrated: bool) -> Trace:
    # One stream, whatever the run's seed: the thinned trace is one trace, as the recorded one is.
    kept = np.random.default_rng(0).random((len(trace), trace.gamma)) < factor
    accepted = np.minimum(trace.accepted, np.logical_and.accumulate(kept, axis=1).sum(axis=1))
    confidence, meta = trace.confidence, trace.meta
    if confidence is not None:
        if calibrated and meta.sts is not None:
            confidence = apply_sts(confidence, np.array(meta.sts))
            meta = meta.model_copy(update={"sts": None})
        confidence = (confidence * factor).astype(np.float32)
    return replace(trace, accepted=accepted, confidence=confidence, meta=meta)
