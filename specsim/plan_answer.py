"""What a plan says: the best offer to each tier, all of them together, and a paragraph in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import pandas as pd

from specsim.capacity import Capacity
from specsim.leaders import Leader
from specsim.offers import Offer, choose, cost
from specsim.tiers import Tier

CLEARLY = 0.2
"""Share of its GPUs that the plan's choice must need on top, where an input is 10 % off, for the words to say so."""


@dataclass(frozen=True, eq=False)
class Plan:
    """The answer of :func:`specsim.plan.plan`; ``str`` of it is for people, ``to_dict`` for programs.

    ``unit``: users or requests/s; ``demand``: of all tiers together. ``leaders``, by profile: from which load of a
    replica to which a scheduler is best: in tok/s of as many users, or in tok/s/user (p50) at a rate. ``sensitivity``:
    a row a tier and change: ``profile`` and ``policy`` (the best then: the plan's choice wherever it is level with it;
    "none" where the tier cannot be kept), ``load`` of a replica, ``gpus`` and ``gpus_kept`` (of the plan's own choice).
    ``notes`` and ``caveats``: a line each.
    """

    tiers: tuple[Tier, ...]
    offers: tuple[Offer, ...]
    unit: str
    demand: float
    headroom: float
    shared: bool
    leaders: Mapping[str, Sequence[Leader]]
    sensitivity: pd.DataFrame
    notes: tuple[str, ...] = ()
    caveats: tuple[str, ...] = ()
    several_profiles: bool = field(default=False, repr=False)

    def of(self, tier: Tier | str) -> list[Offer]:
        """The offers to one tier, in the order of profiles and schedulers."""
        name = tier if isinstance(tier, str) else tier.name
        return [offer for offer in self.offers if offer.capacity.tier.name == name]

    def best(self, tier: Tier | str) -> Offer | None:
        """The offer that :func:`choose` takes; None where nothing keeps the tier."""
        return choose(self.of(tier))

    @property
    def infeasible(self) -> tuple[str, ...]:
        """Names of the tiers that no offer keeps."""
        return tuple(tier.name for tier in self.tiers if self.best(tier) is None)

    @property
    def gpus(self) -> int | None:
        """GPUs of the best offers to all tiers; None where a tier cannot be kept."""
        return None if self.infeasible else self.total()[0]

    def total(self) -> tuple[int, float]:
        """GPUs, and dollars an hour (NaN without a price), of the best offers to the tiers that can be kept."""
        chosen = [offer for offer in map(self.best, self.tiers) if offer is not None]
        dollars = sum(offer.dollars_per_hour for offer in chosen) if chosen else math.nan
        return sum(offer.gpus or 0 for offer in chosen), dollars

    def table(self) -> pd.DataFrame:
        """A row a tier, profile and scheduler, with everything that was found."""
        rows = []
        for offer in self.offers:
            found, best = offer.capacity, self.best(offer.capacity.tier)
            saving, ci = best.saving(offer) if best and found.feasible and best is not offer else (math.nan, math.nan)
            rows.append({
                "tier": found.tier.name, "profile": offer.profile, "policy": offer.policy, "feasible": found.feasible,
                "load": found.value, "load_low": found.low, "load_high": found.high, "at_least": found.at_least,
                "binding": found.binding, "nearest": found.nearest, "demand": offer.demand,
                "replicas": offer.replicas, "gpus": offer.gpus, "dollars_per_hour": offer.dollars_per_hour,
                "dollars_per_million": offer.dollars_per_million,
                "best_saves": saving, "best_saves_ci": ci, "tau": found.tau, "by_seed": list(found.by_seed),
            })  # fmt: skip
        return pd.DataFrame(rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        gpus, dollars = self.total()
        return {
            "schema": "specsim.plan/1",
            "unit": self.unit, "demand": self.demand, "headroom": self.headroom, "shared": self.shared,
            "gpus": self.gpus,
            "total": {
                "gpus": gpus, "dollars_per_hour": dollars if math.isfinite(dollars) else None,
                "left_out": list(self.infeasible), "words": self.total_words(),
            },
            "tiers": [
                {"name": t.name, "share": t.share, "bounds": [str(b) for b in t.bounds], "words": self.words(t)}
                for t in self.tiers
            ],
            "offers": self.table().astype(object).where(lambda d: d.notna(), None).to_dict("records"),
            "leaders": {name: [asdict(x) for x in walk] for name, walk in self.leaders.items()},
            "leaders_words": self.leaders_words(),
            "sensitivity": self.sensitivity.astype(object).where(lambda d: d.notna(), None).to_dict("records"),
            "notes": list(self.notes), "caveats": list(self.caveats),
        }  # fmt: skip

    def words(self, tier: Tier) -> str:
        """The recommendation for ``tier``: one paragraph, that claims no more than the intervals do."""
        best, offers = self.best(tier), self.of(tier)
        if best is None:
            told = "; ".join(f"{self._name(o)} offers {o.capacity.nearest}" for o in offers)
            text = [f"{tier}: no scheduler keeps this tier, not even {self._lightest()}.", _sentence(told)]
            return " ".join(text + self._where_off(tier, None))
        found = best.capacity
        pool = f"{_counted(best.gpus or 0, 'GPU')} ({_counted(best.replicas or 0, 'replica')} of {best.gpus_each})"
        text = [
            f"{tier}: {self._name(best)} serves {_number(best.demand)} {self.unit} and {100 * self.headroom:g} % more "
            f"with {pool}{_hourly(best.dollars_per_hour)}."
        ]
        if found.at_least:
            text.append(
                f"A replica sustains at least {_number(found.value)} {self.unit}, the most that was asked about."
            )
        else:
            text.append(f"A replica sustains {_interval(found)} {self.unit}; what ends it is {found.binding}.")
        clear, level, unable, rivals = [], [], [], []
        for other in offers:
            if other is best:
                continue
            gpus = _counted(other.gpus or 0, "GPU")
            if not other.capacity.feasible:
                unable.append(f"{self._name(other)} ({other.capacity.nearest})")
            elif best.is_level(other):
                rivals.append(other)
                level.append(f"{self._name(other)} ({_saving(best, other)} %, {gpus})")
            else:
                clear.append(f"{_saving(best, other)} % {self._less()} than {self._name(other)} ({gpus})")
        if clear:
            sure = "" if len(found.by_seed) > 1 else " (one seed: how much of it is noise is not known)"
            text.append(f"Before replicas are rounded to whole ones that is {', '.join(clear)}{sure}.")
        if level:
            text.append(f"Level with it within the noise: {', '.join(level)}. {_decision(best, rivals)}")
        if unable:
            text.append(f"Not even {self._lightest()} gets the tier from {', '.join(unable)}.")
        return " ".join(text + self._where_off(tier, best))

    def _where_off(self, tier: Tier, best: Offer | None) -> list[str]:
        """What a reader of the sensitivity table must not miss, in a sentence; nothing where there is no such thing."""
        rows = self.sensitivity[self.sensitivity["tier"] == tier.name]
        told = []
        for row in rows.to_dict("records"):
            then = f"{row['policy']} on {row['profile']}" if self.several_profiles else row["policy"]
            enough = None if pd.isna(row["gpus"]) else _counted(int(row["gpus"]), "GPU")
            kept = None if pd.isna(row["gpus_kept"]) else int(row["gpus_kept"])
            if best is None:
                if enough:
                    told.append(f"with {row['change']}, {then} keeps it with {enough}")
                continue
            mine = self._name(best)
            if not enough:
                told.append(f"with {row['change']}, nothing keeps the tier")
            elif kept is None:
                told.append(f"with {row['change']}, {mine} no longer keeps the tier, {then} does with {enough}")
            elif then != mine:
                more = kept - int(row["gpus"])
                end = f"{more} too many" if more > 0 else "as many" if more == 0 else "fewer, but dearer"
                told.append(
                    f"with {row['change']}, {then} becomes best with {enough}, where {mine} needs {kept}: {end}"
                )
            elif kept > (best.gpus or 0) and best.capacity.value > (1 + CLEARLY) * row["load"]:
                told.append(f"with {row['change']}, {mine} needs {_counted(kept, 'GPU')} instead of {best.gpus}")
        if best is None and len(rows) and not told:
            return ["No change of 10 % that was tried makes it feasible."]
        return [f"If something is 10 % off (told by one seed): {'; '.join(told)}."] if told else []

    def total_words(self) -> str:
        """GPUs and dollars an hour over the tiers, and which tiers are left out of it, in a sentence."""
        gpus, dollars = self.total()
        out = self.infeasible
        if len(out) == len(self.tiers):
            return "In total: no tier can be kept."
        left = f", without {' and '.join(out)}, which no scheduler keeps" if out else ""
        return f"In total: {_counted(gpus, 'GPU')}{_hourly(dollars)}{left}."

    def shown_sensitivity(self) -> pd.DataFrame:
        """The rows of ``sensitivity`` that say something, with the profile only where there are several.

        Of a tier that cannot be kept those where it can.
        """
        table, out = self.sensitivity, self.infeasible
        table = table[~(table["tier"].isin(out) & (table["policy"] == "none"))]
        return table if self.several_profiles else table.drop(columns="profile")

    def leaders_words(self) -> list[str]:
        """A line a profile: who is best in tok/s/user at equal load, from which load to which."""
        lines = []
        for profile, walk in self.leaders.items():
            on = f" on {profile}" if self.several_profiles else ""
            parts = []
            for leader in walk:
                level = f" (level with it: {', '.join(leader.level)})" if leader.level else ""
                last = leader is walk[-1]
                parts.append(f"{leader.policy}{level} up to {_end(leader, walk[0].low, last)}")
            best = "Most tok/s" if self.unit == "users" else "Best tok/s/user (p50)"
            lines.append(
                f"{best} at equal load of a replica{on}, whatever the tiers' bounds, from {self._amount(walk[0].low)}: "
                f"{', then '.join(parts)}, the most that was compared."
            )
        return lines

    def __str__(self) -> str:
        shown = self.table()[
            ["tier", "profile", "policy", "load", "binding", "replicas", "gpus", "dollars_per_million"]
        ]
        parts = [shown.to_string(index=False, na_rep="–", float_format=lambda v: f"{v:.4g}")]
        parts += [self.words(tier) for tier in self.tiers] + [self.total_words(), *self.leaders_words()]
        if len(moves := self.shown_sensitivity()):
            parts.append(moves.to_string(index=False, na_rep="–", float_format=lambda v: f"{v:.4g}"))
        return "\n\n".join([*parts, *(f"note: {line}" for line in (*self.notes, *self.caveats))])

    def _name(self, offer: Offer) -> str:
        return f"{offer.policy} on {offer.profile}" if self.several_profiles else offer.policy

    def _amount(self, load: float) -> str:
        return f"{_number(load)} {self.unit.removesuffix('s') if self.unit == 'users' and load == 1 else self.unit}"

    def _less(self) -> str:
        return "fewer GPUs" if len({offer.price for offer in self.offers}) == 1 else "less cost"

    def _lightest(self) -> str:
        return "one user a replica" if self.unit == "users" else "a request alone"


def _interval(found: Capacity) -> str:
    return f"{_number(found.value)} ({_number(found.low)} to {_number(found.high)})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _hourly(dollars: float) -> str:
    return f", {_dollars(dollars)} an hour" if math.isfinite(dollars) else ""


def _dollars(value: float) -> str:
    return f"${_number(value)}"


def _saving(best: Offer, other: Offer) -> str:
    """The percentage that ``best`` saves; of loads that nothing ended only a bound is known, or what they do alike."""
    saving, ci = best.saving(other)
    open_ended = (best.capacity.at_least, other.capacity.at_least)
    told = f"{100 * saving:.1f}" + (f" ± {100 * ci:.1f}" if math.isfinite(ci) and not any(open_ended) else "")
    return {(True, False): "at least ", (False, True): "at most "}.get(open_ended, "") + told


def _decision(best: Offer, rivals: Sequence[Offer]) -> str:
    """What decides between offers that are level."""
    mine, theirs = cost(best), min(map(cost, rivals))
    priced = best.price is not None
    if mine[0] < theirs[0]:
        costs = [_dollars(c[0]) if priced else f"{c[0]:,.0f}" for c in (mine, theirs)]
        unit = "dollars an hour" if priced else "GPUs"
        return f"Between them {unit} in whole replicas decide: {costs[0]} against {costs[1]}{_or_more(rivals)}."
    if mine[0] == theirs[0] and mine[1] < theirs[1]:
        costs = [_dollars(c[1]) for c in (mine, theirs)]
        return f"Between them, at as much an hour, dollars per million tokens decide: {costs[0]} against {costs[1]}."
    if all(offer.capacity.at_least for offer in (best, *rivals)):
        return "No load that was asked about ends any of them: a bound on ttft, e2e or queue would tell them apart."
    return "Between them nothing decides: take either."


def _or_more(rivals: Sequence[Offer]) -> str:
    return " or more" if len(rivals) > 1 else ""


def _end(leader: Leader, lowest: float, last: bool) -> str:
    """Up to which load a leader leads: a load and its interval, or what is known of it where that says too little."""
    if last or (math.isfinite(leader.ci) and leader.high - leader.ci > lowest):
        return _number(leader.high) + ("" if last else f" ± {_number(leader.ci)}")
    if math.isfinite(leader.ci):  # the interval reaches below the lightest load that was compared
        return f"somewhere below {_number(leader.high + leader.ci)}"
    return f"about {_number(leader.high)}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."
