"""What a scheduler needs to keep a tier's promises: replicas, GPUs and dollars; and which of them to take."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from specsim.capacity import Capacity
from specsim.pareto import half_width

RESOLUTION = 0.01
"""Relative difference of two capacities, or of tokens sold, below which they count as equal."""


@dataclass(frozen=True)
class Offer:
    """What one scheduler on one profile needs to serve one tier's ``demand`` (users, or requests/s).

    ``replicas`` and ``gpus`` hold demand and headroom (None: the tier cannot be kept). ``tokens``: output tokens/s that
    the demand gets, without the headroom (NaN: not known). ``gpus_each``: of one replica; ``price``: dollars an hour
    for a GPU.
    """

    profile: str
    policy: str
    capacity: Capacity
    demand: float
    gpus_each: int
    price: float | None
    replicas: int | None
    tokens: float = math.nan

    @property
    def gpus(self) -> int | None:
        """GPUs of all replicas."""
        return None if self.replicas is None else self.replicas * self.gpus_each

    @property
    def dollars_per_hour(self) -> float:
        """Dollars an hour for the GPUs of all replicas; NaN without a price, and where the tier cannot be kept."""
        return math.nan if self.gpus is None or self.price is None else self.gpus * self.price

    @property
    def dollars_per_million(self) -> float:
        """Dollars for all replicas over a million output tokens of the demand; NaN without a price or tokens."""
        return self.dollars_per_hour / 3600 / self.tokens * 1e6

    @property
    def hourly(self) -> float:
        """What is paid: dollars an hour, or GPUs without a price, in whole replicas; infinite where there are none."""
        if self.gpus is None:
            return math.inf
        return self.gpus if self.price is None else self.dollars_per_hour

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

    def is_level(self, other: Offer) -> bool:
        """Whether this offer saves nothing against ``other`` beyond noise and RESOLUTION, replicas not rounded."""
        saving, ci = self.saving(other)
        return saving <= max(ci if math.isfinite(ci) else 0.0, RESOLUTION)


def choose(offers: Iterable[Offer], keep: Offer | None = None) -> Offer | None:
    """The offer that costs the least an hour (GPUs without a price) in whole replicas; None where none is feasible.

    Of those that cost as much, the ones that sell the most tokens, within RESOLUTION; of those, the least burden.
    ``keep``'s policy and profile are kept where they cost no more an hour, or are level with the least.
    """
    found = [offer for offer in offers if offer.capacity.feasible]
    if not found:
        return None
    cheapest = [offer for offer in found if costs_no_more(offer, min(found, key=lambda o: o.hourly))]
    best = min((o for o in cheapest if sells_no_less(o, cheapest)), key=lambda offer: offer.burden)
    for kept in found:
        if keep is not None and (kept.policy, kept.profile) == (keep.policy, keep.profile):
            level = best.is_level(kept) and kept.is_level(best)
            return kept if level or costs_no_more(kept, best) else best
    return best


def costs_no_more(offer: Offer, other: Offer) -> bool:
    """Whether ``offer`` costs as much an hour in whole replicas as ``other``, or less."""
    return offer.hourly <= other.hourly * (1 + 1e-9)


def sells_no_less(offer: Offer, others: Iterable[Offer]) -> bool:
    """Whether ``offer`` sells as many tokens as any of ``others``, within RESOLUTION."""
    most = max((o.tokens for o in others if math.isfinite(o.tokens)), default=math.nan)
    return not offer.tokens < (1 - RESOLUTION) * most


def replicas_for(capacity: Capacity, demand: float, headroom: float) -> int | None:
    """Whole replicas for ``demand`` and ``headroom`` more of it; None where the tier cannot be kept."""
    if not capacity.feasible:
        return None
    return max(1, math.ceil(demand * (1 + headroom) / capacity.value - 1e-9))
