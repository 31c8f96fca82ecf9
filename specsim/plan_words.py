"""Numbers and sentences of a plan: what its choice is held against, and what decides, without saying too much."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from specsim.capacity import Capacity
from specsim.engine import Scenario
from specsim.leaders import Leader
from specsim.offers import Offer, costs_no_more, sells_no_less
from specsim.trial import MOST_USERS, most_users
from specsim.workload import Arrivals, Gamma


def interval(found: Capacity) -> str:
    """A load and its 95 % interval."""
    return f"{number(found.value)} ({number(found.low)} to {number(found.high)})"


def number(value: float, digits: int = 3) -> str:
    """About ``digits`` figures, thousands apart."""
    return f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"


def counted(count: int, noun: str) -> str:
    """``1 GPU``, ``2 GPUs``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def amount(load: float, unit: str) -> str:
    """``1 user``, ``2 users``, ``1 request/s``."""
    one = {"users": "user", "requests/s": "request/s"}
    return f"{number(load)} {one[unit] if number(load) == '1' else unit}"


def hourly(dollars: float) -> str:
    """``, $24 an hour``; nothing where that is not known."""
    return f", ${number(dollars)} an hour" if math.isfinite(dollars) else ""


def saving(best: Offer, other: Offer) -> str:
    """The percentage that ``best`` saves; of loads that nothing ended only a bound is known, or what they do alike."""
    share, ci = best.saving(other)
    open_ended = (best.capacity.at_least, other.capacity.at_least)
    told = f"{100 * share:.1f}" + (f" ± {100 * ci:.1f}" if math.isfinite(ci) and not any(open_ended) else "")
    return {(True, False): "at least ", (False, True): "at most "}.get(open_ended, "") + told


def compared(best: Offer, others: Sequence[Offer], name: Callable[[Offer], str], less: str) -> list[str]:
    """Sentences on what ``others``, which keep the tier too, need against ``best``, the choice of all of them.

    Savings before replicas are rounded are told only where they are some, beyond noise; ``less``: of what they are.
    """
    alike = [other for other in others if costs_no_more(other, best)]
    dearer = [other for other in others if not costs_no_more(other, best)]
    level = [other for other in dearer if best.is_level(other) and other.is_level(best)]
    text = []
    if clear := [other for other in dearer if not best.is_level(other)]:
        sure = "" if len(best.capacity.by_seed) > 1 else " (one seed: how much of it is noise is not known)"
        told = (f"{saving(best, o)} % {less} than {name(o)} ({counted(o.gpus or 0, 'GPU')})" for o in clear)
        text.append(f"Before replicas are rounded to whole ones that is {', '.join(told)}{sure}.")
    if level:
        told = (f"{name(o)} ({_level(best, o)}{counted(o.gpus or 0, 'GPU')})" for o in level)
        unit, priced = ("GPUs", False) if best.price is None else ("dollars an hour", True)
        costs = _against(best.hourly, min(o.hourly for o in level), "$" * priced)
        more = " or more" if len(level) > 1 else ""
        text.append(f"Level with it within the noise: {', '.join(told)}. Between them {unit} in whole replicas decide: "
                    f"{costs}{more}.")  # fmt: skip
    for other in dearer:
        if best.is_level(other) and other not in level:  # few large replicas, of which the last is hardly used
            costs = _against(other.hourly, best.hourly, "" if best.price is None else "$")
            text.append(f"{name(other)} would need less than that before replicas are rounded, but not in whole ones: "
                        f"{costs}.")  # fmt: skip
    same = []
    for other in alike:
        much = "needs as many GPUs" if other.gpus == best.gpus else "costs as much an hour"
        if not sells_no_less(other, (best, *alike)):
            room = "and" if other.is_level(best) else "and would have room for more load, but"
            text.append(f"{name(other)} {much} {room} sells fewer tokens: {_sold(best, other)}.")
        elif not best.is_level(other):
            text.append(f"{name(other)} {much}, with less room for more load.")
        else:
            same.append(other)
    if same:
        names = ", ".join(map(name, same))
        what = "GPUs" if best.price is None else "cost"
        text.append(f"Level with it in {what} and tokens: {names}. {_nothing_decides(best, same)}")
    return text


def _level(best: Offer, other: Offer) -> str:
    return f"{saving(best, other)} %, " if best.saving(other)[0] > 0 else ""


def _sold(best: Offer, other: Offer) -> str:
    if best.price is None:
        return f"{_against(other.tokens, best.tokens)} tok/s"
    return f"{_against(other.dollars_per_million, best.dollars_per_million, '$')} a million"


def _against(one: float, other: float, unit: str = "") -> str:
    """Two numbers with as many figures, three or more, as tell them apart."""
    digits = next((d for d in range(3, 9) if number(one, d) != number(other, d)), 3)
    return f"{unit}{number(one, digits)} against {unit}{number(other, digits)}"


def _nothing_decides(best: Offer, same: Sequence[Offer]) -> str:
    if not all(offer.capacity.at_least for offer in (best, *same)):
        return "Between them nothing decides: take either."
    told = f"No load that was asked about{moved_by(best.capacity.case.scenario)} ends any of them"
    if {bound.metric for bound in best.capacity.tier.bounds} & {"ttft", "e2e", "queue"}:
        return f"{told}: take either."
    return f"{told}: a bound on ttft, e2e or queue would tell them apart."


def moved_by(scenario: Scenario) -> str:
    """Which option sets the most load that is asked about, in brackets; nothing where none does."""
    by_seats = scenario.workload.closed and most_users(scenario) < MOST_USERS
    return " (--max-num-seqs sets it)" if by_seats else ""


def lightest(offers: Sequence[Offer]) -> str:
    """The least load of a replica that was tried, in words."""
    workload = offers[0].capacity.case.scenario.workload
    if workload.closed:
        return "one user a replica"
    bursty = isinstance(workload, Arrivals) or (isinstance(workload, Gamma) and workload.cv > 1)
    return "the lightest load tried" + ", whose arrivals come in bursts," * bursty


def up_to(leader: Leader, lowest: float, last: bool) -> str:
    """Up to which load a leader leads: a load and its interval, or what is known of it where that says too little."""
    if last or (math.isfinite(leader.ci) and leader.high - leader.ci > lowest):
        return number(leader.high) + ("" if last else f" ± {number(leader.ci)}")
    if math.isfinite(leader.ci):  # the interval reaches below the lightest load that was compared
        return f"somewhere below {number(leader.high + leader.ci)}"
    return f"about {number(leader.high)}"
