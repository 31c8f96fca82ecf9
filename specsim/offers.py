"""What a scheduler needs to keep a tier's promises: replicas, GPUs and dollars; and which of them to take."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from specsim.capacity import Capacity
from specsim.pareto import half_width

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
    def dollars_per_hour(self) -> float:
        """Dollars an hour for the GPUs of all replicas; NaN without a price, and where the tier cannot be kept."""
        return math.nan if self.gpus is None or self.price is None else self.gpus * self.price

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
    """The offer with the least burden; None where none is feasible.

    Of those that are level with it: ``keep``'s policy and profile, if among them, or else the one with the least
    dollars an hour (GPUs without a price) in whole replicas, then dollars per million tokens.
    """
    found = [offer for offer in offers if offer.capacity.feasible]
    if not found:
        return None
    least = min(found, key=lambda offer: offer.burden)
    level = [offer for offer in found if offer is least or least.is_level(offer)]
    kept = [o for o in level if keep is not None and (o.policy, o.profile) == (keep.policy, keep.profile)]
    return min(kept or level, key=cost)


def cost(offer: Offer) -> tuple[float, float, float]:
    hourly = offer.gpus if offer.price is None else offer.dollars_per_hour
    million = offer.dollars_per_million
    return hourly or 0.0, million if math.isfinite(million) else 0.0, offer.burden


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
