"""What a plan says: offers of schedulers to tiers, the best of each, and a paragraph in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from specsim.capacity import Capacity
from specsim.leaders import Leader
from specsim.pareto import half_width
from specsim.tiers import Tier

RESOLUTION = 0.01
"""Relative difference of two capacities below which they count as equal: the grid's steps are 3 %, interpolated."""


@dataclass(frozen=True)
class Offer:
    """What one scheduler on one profile needs to serve one tier's ``demand`` (users, or requests/s).

    ``replicas`` and ``gpus`` hold demand and headroom (None: the tier cannot be kept); ``dollars_per_million`` output
    tokens of the demand, NaN without a price. ``gpus_each``: of one replica; ``price``: dollars an hour for a GPU.
    """

    profile: str
    policy: str
    capacity: Capacity
    demand: float
    gpus_each: int
    price: float | None
    replicas: int | None
    dollars_per_million: float = math.nan

    @property
    def gpus(self) -> int | None:
        """GPUs of all replicas."""
        return None if self.replicas is None else self.replicas * self.gpus_each

    @property
    def burden(self) -> float:
        """GPUs, or dollars an hour where there is a price, for one user or request/s; replicas not rounded."""
        if not self.capacity.feasible:
            return math.inf
        return self.gpus_each * (1.0 if self.price is None else self.price) / self.capacity.value

    def saving(self, other: Offer) -> tuple[float, float]:
        """Share of GPUs (or dollars) that this offer saves against ``other``, and half its interval, paired by seed."""
        weight = self.burden * self.capacity.value / (other.burden * other.capacity.value)
        pairs = zip(self.capacity.by_seed, other.capacity.by_seed, strict=True)
        return 1 - self.burden / other.burden, half_width(weight * theirs / mine for mine, theirs in pairs)


@dataclass(frozen=True, eq=False)
class Plan:
    """The answer of :func:`specsim.plan.plan`; ``str`` of it is for people, ``to_dict`` for programs.

    ``unit``: users or requests/s; ``demand``: of all tiers together. ``leaders``, by profile: from which load of a
    replica to which a scheduler is best: in tok/s of as many users, or in tok/s/user (p50) at a rate. ``sensitivity``:
    a row a tier and change: ``policy`` (the best then), ``load`` of a replica, ``gpus`` and ``gpus_kept`` (of the
    plan's own choice). ``notes`` and ``caveats``: a line each.
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
        """The offer with the least burden; None where nothing keeps the tier."""
        found = [offer for offer in self.of(tier) if offer.capacity.feasible]
        return min(found, key=lambda offer: offer.burden, default=None)

    @property
    def gpus(self) -> int | None:
        """GPUs of the best offers to all tiers; None where a tier cannot be kept."""
        chosen = [self.best(tier) for tier in self.tiers]
        counts = [offer.gpus for offer in chosen if offer is not None and offer.gpus is not None]
        return sum(counts) if len(counts) == len(self.tiers) else None

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
                "replicas": offer.replicas, "gpus": offer.gpus, "dollars_per_million": offer.dollars_per_million,
                "best_saves": saving, "best_saves_ci": ci, "tau": found.tau, "by_seed": list(found.by_seed),
            })  # fmt: skip
        return pd.DataFrame(rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "schema": "specsim.plan/1",
            "unit": self.unit, "demand": self.demand, "headroom": self.headroom, "shared": self.shared,
            "gpus": self.gpus,
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
            return f"{tier}: no scheduler keeps this tier, not even {self._lightest()}. " + _sentence(
                "; ".join(f"{self._name(o)} offers {o.capacity.nearest}" for o in offers)
            )
        found = best.capacity
        pool = f"{best.gpus} GPUs ({_counted(best.replicas or 0, 'replica')} of {best.gpus_each})"
        text = [
            f"{tier}: {self._name(best)} serves {_number(best.demand)} {self.unit} and {100 * self.headroom:g} % more "
            f"with {pool}."
        ]
        if found.at_least:
            text.append(
                f"A replica sustains at least {_number(found.value)} {self.unit}, the most that was asked about."
            )
        else:
            text.append(f"A replica sustains {_interval(found)} {self.unit}; what ends it is {found.binding}.")
        clear, level, unable = [], [], []
        for other in offers:
            if other is best:
                continue
            if not other.capacity.feasible:
                unable.append(f"{self._name(other)} ({other.capacity.nearest})")
                continue
            saving, ci = best.saving(other)
            told = f"{100 * saving:.1f}" + (f" ± {100 * ci:.1f}" if math.isfinite(ci) and not found.at_least else "")
            told = f"at least {told}" if found.at_least else told
            if saving <= max(ci if math.isfinite(ci) else 0.0, RESOLUTION):
                level.append(f"{self._name(other)} ({told} %, {other.gpus} GPUs)")
            else:
                clear.append(f"{told} % {self._less()} than {self._name(other)} ({other.gpus} GPUs)")
        if clear:
            sure = "" if len(found.by_seed) > 1 else " (one seed: how much of it is noise is not known)"
            text.append(f"Before replicas are rounded to whole ones that is {', '.join(clear)}{sure}.")
        if level:
            text.append(f"Within the noise of it: {', '.join(level)}.")
        if unable:
            text.append(f"Not even {self._lightest()} gets the tier from {', '.join(unable)}.")
        return " ".join(text)

    def leaders_words(self) -> list[str]:
        """A line a profile: who is best in tok/s/user at equal load, from which load to which."""
        lines = []
        for profile, walk in self.leaders.items():
            on = f" on {profile}" if self.several_profiles else ""
            parts = []
            for leader in walk:
                level = f" (level with it: {', '.join(leader.level)})" if leader.level else ""
                ci = f" ± {_number(leader.ci)}" if math.isfinite(leader.ci) else ""
                parts.append(f"{leader.policy}{level} up to {_number(leader.high)}{ci}")
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
        parts += [self.words(tier) for tier in self.tiers] + self.leaders_words()
        if len(self.sensitivity):
            parts.append(self.sensitivity.to_string(index=False, na_rep="–", float_format=lambda v: f"{v:.4g}"))
        return "\n\n".join([*parts, *(f"note: {line}" for line in (*self.notes, *self.caveats))])

    def _name(self, offer: Offer) -> str:
        return f"{offer.policy} on {offer.profile}" if self.several_profiles else offer.policy

    def _amount(self, load: float) -> str:
        return f"{_number(load)} {self.unit.removesuffix('s') if self.unit == 'users' and load == 1 else self.unit}"

    def _less(self) -> str:
        return "fewer GPUs" if len({offer.price for offer in self.offers}) == 1 else "less cost"

    def _lightest(self) -> str:
        return "one user a replica" if self.unit == "users" else "a request alone"


def replicas_for(capacity: Capacity, demand: float, headroom: float) -> int | None:
    """Whole replicas for ``demand`` and ``headroom`` more of it; None where the tier cannot be kept."""
    if not capacity.feasible:
        return None
    return max(1, math.ceil(demand * (1 + headroom) / capacity.value - 1e-9))


def tokens_per_second(capacity: Capacity, demand: float, replicas: int, points: list[tuple[float, float]]) -> float:
    """Output tokens/s of ``demand`` requests/s, or of as many users spread over ``replicas``.

    Of users what they get at their load of a replica counts: ``points`` are (load, tokens/s) of trials, a straight line
    between them, and fewer users than in any of them get in proportion. An empty list: requests/s.
    """
    if not points:
        return demand * capacity.answer
    loads, tokens = np.array(sorted(points)).T
    each = demand / replicas
    return replicas * float(np.interp(each, [0.0, *loads], [0.0, *tokens]))


def _interval(found: Capacity) -> str:
    return f"{_number(found.value)} ({_number(found.low)} to {_number(found.high)})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."
