"""What a plan says: the best offer to each tier, all of them together, and a paragraph in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import pandas as pd

from specsim.leaders import Leader
from specsim.offers import Offer, choose
from specsim.plan_words import amount, compared, counted, hourly, interval, lightest, moved_by, number, up_to
from specsim.tiers import Tier

CLEARLY = 0.2
"""Share of its GPUs that the plan's choice must need on top, where an input is 10 % off, for the words to say so."""


@dataclass(frozen=True, eq=False)
class Plan:
    """The answer of :func:`specsim.plan.plan`; ``str`` of it is for people, ``to_dict`` for programs.

    ``unit``: users or requests/s; ``demand``: of all tiers together. ``leaders``, by profile: from which load of a
    replica to which a scheduler is best: in tok/s of as many users, or in tok/s/user (p50) at a rate. ``sensitivity``:
    a row a tier and change: ``profile`` and ``policy`` (the best then: the plan's choice wherever it is level with it;
    "none" where the tier cannot be kept), ``load`` of a replica, ``gpus`` and ``gpus_kept`` (of the plan's own choice),
    ``noise``: whether the choice stays and its load within the plan's own interval, so that the move may be noise.
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
        return pd.DataFrame(rows).astype({"replicas": "Int64", "gpus": "Int64"})

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
                {
                    "name": t.name, "share": t.share, "bounds": [str(b) for b in t.bounds],
                    "decision": self.decision(t), "words": self.words(t),
                }
                for t in self.tiers
            ],
            "offers": self.table().astype(object).where(lambda d: d.notna(), None).to_dict("records"),
            "leaders": {name: [asdict(x) for x in walk] for name, walk in self.leaders.items()},
            "leaders_words": self.leaders_words(),
            "sensitivity": self.sensitivity.astype(object).where(lambda d: d.notna(), None).to_dict("records"),
            "notes": list(self.notes), "caveats": list(self.caveats),
        }  # fmt: skip

    def decision(self, tier: Tier) -> str:
        """What to do for ``tier``, in a line."""
        best = self.best(tier)
        if best is None:
            return f"{tier.name}: no scheduler keeps this tier, not even {self._lightest(tier).rstrip(',')}"
        pool = f"{counted(best.gpus or 0, 'GPU')}, {counted(best.replicas or 0, 'replica')} of {best.gpus_each}"
        return f"{tier.name}: buy {pool}{hourly(best.dollars_per_hour)}, with {self._name(best)}"

    def words(self, tier: Tier) -> str:
        """The decision for ``tier``, then why, then what could change it: a line each; no more than intervals claim."""
        best, offers = self.best(tier), self.of(tier)
        lines = [self.decision(tier)]
        unable = [o for o in offers if not o.capacity.feasible]
        if best is None:
            told = (f"{self._name(o)} offers {o.capacity.nearest}{self._tried(o)}" for o in unable)
            lines.append(f"{'; '.join(told)}.")
        else:
            found = best.capacity
            more = f" and {100 * self.headroom:g} % more" if self.headroom else ""
            if found.at_least:
                most = f"the most that was asked about{moved_by(found.case.scenario)}"
                load = f"at least {amount(found.value, self.unit)}, {most}"
            else:
                load = f"{interval(found)} {self.unit}; what ends it is {found.binding}"
            because = [f"For {amount(best.demand, self.unit)}{more}: a replica sustains {load}."]
            able = [o for o in offers if o is not best and o.capacity.feasible]
            because += compared(best, able, self._name, self._less())
            if unable:
                told = (f"{self._name(o)} ({o.capacity.nearest}{self._tried(o)})" for o in unable)
                because.append(f"Not even {self._lightest(tier)} gets the tier from {', '.join(told)}.")
            lines.append(" ".join(because))
        return "\n".join(lines + self._where_off(tier, best))

    def _where_off(self, tier: Tier, best: Offer | None) -> list[str]:
        """What a reader of the sensitivity table must not miss, in a sentence; nothing where there is no such thing."""
        rows = self.sensitivity[self.sensitivity["tier"] == tier.name]
        told = []
        for row in rows.to_dict("records"):
            then = f"{row['policy']} on {row['profile']}" if self.several_profiles else row["policy"]
            enough = None if pd.isna(row["gpus"]) else counted(int(row["gpus"]), "GPU")
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
                dear = ", but dearer" if more <= 0 else ""
                end = f"{more:,} too many" if more > 0 else "as many" if more == 0 else "fewer"
                told.append(
                    f"with {row['change']}, {then} becomes best with {enough}, where {mine} needs {kept:,}: {end}{dear}"
                )
            elif kept > (best.gpus or 0) and best.capacity.value > (1 + CLEARLY) * row["load"]:
                told.append(f"with {row['change']}, {mine} needs {counted(kept, 'GPU')} instead of {best.gpus:,}")
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
        return f"In total: {counted(gpus, 'GPU')}{hourly(dollars)}{left}."

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
                parts.append(f"{leader.policy}{level} up to {up_to(leader, walk[0].low, last)}")
            best = "Most tok/s" if self.unit == "users" else "Best tok/s/user (p50)"
            start = amount(walk[0].low, self.unit)
            lines.append(
                f"{best} at equal load of a replica{on}, whatever the tiers' bounds, from {start}: "
                f"{', then '.join(parts)}, the most that was compared."
            )
        return lines

    def __str__(self) -> str:
        shown = self.table()[
            ["tier", "profile", "policy", "load", "binding", "replicas", "gpus", "dollars_per_million"]
        ]
        parts = [_printed(shown)]
        parts += [f"{tier}\n{self.words(tier)}" for tier in self.tiers] + [self.total_words(), *self.leaders_words()]
        if len(moves := self.shown_sensitivity()):
            parts.append(_printed(moves))
        return "\n\n".join([*parts, *(f"note: {line}" for line in (*self.notes, *self.caveats))])

    def _name(self, offer: Offer) -> str:
        return f"{offer.policy} on {offer.profile}" if self.several_profiles else offer.policy

    def _less(self) -> str:
        return "fewer GPUs" if len({offer.price for offer in self.offers}) == 1 else "less cost"

    def _lightest(self, tier: Tier) -> str:
        return lightest(self.of(tier))

    def _tried(self, offer: Offer) -> str:
        """At which load of a replica an offer was found to miss the tier; nothing of users, who were one."""
        return "" if self.unit == "users" else f" at {number(offer.capacity.lightest)} {self.unit}"


def _printed(table: pd.DataFrame) -> str:
    """A table for people: a dash for what is not there, whole numbers with their thousands apart."""
    marks = {True: "≈", False: ""}
    table = table.copy()
    for column in table.select_dtypes("Int64"):
        table[column] = table[column].map(lambda v: "–" if pd.isna(v) else f"{v:,}")
    for column in table.select_dtypes(bool):
        table[column] = table[column].map(marks)
    return table.to_string(index=False, na_rep="–", float_format=lambda v: f"{v:.4g}")
