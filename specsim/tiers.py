"""Service tiers: what is promised, as bounds on statistics over requests, and each tier's share of the traffic."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from specsim.types import SLO, SpecsimError

STATISTICS = ("mean", "p10", "p50", "p90", "p95", "p99")
METRICS = ("interactivity", "ttft", "tpot", "e2e", "queue")
USUAL = {metric: "p10" if metric == "interactivity" else "p90" for metric in METRICS}
"""The statistic of a bound that names none: nine requests of ten keep it."""

_EXAMPLE = "'pro: interactivity>=80@p10, ttft<=1s@p95, share=0.3'"
_BOUND = re.compile(r"([a-z0-9]+)\s*(>=|<=)\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*(ms|s)?\s*(?:@\s*([a-z0-9]+))?")


@dataclass(frozen=True)
class Bound:
    """A promise: ``statistic`` (mean, p10 .. p99) of ``metric`` over a tier's requests keeps to ``limit``.

    ``metric``: interactivity (tok/s/user, at least the limit), or ttft, tpot, e2e or queue (seconds, at most).
    """

    metric: str
    statistic: str
    limit: float

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise SpecsimError(f"bound: metric: expected {_listed(METRICS)}, got {self.metric!r}")
        if self.statistic not in STATISTICS:
            raise SpecsimError(f"bound: {self.metric}: expected @{_listed(STATISTICS)}, got {self.statistic!r}")
        if not 0 < self.limit < math.inf:
            raise SpecsimError(f"bound: {self.metric}: expected a limit above 0, got {self.limit:g}")

    @property
    def column(self) -> str:
        """Where the statistic stands among a run's."""
        return f"{self.metric}_{self.statistic}"

    @property
    def at_least(self) -> bool:
        """Whether more is better."""
        return self.metric == "interactivity"

    def use(self, value: float) -> float:
        """How much of the promise a measured ``value`` takes up: 1 just keeps it, more breaks it."""
        if math.isnan(value):
            return 0.0  # answers of one token have no speed to miss
        if not self.at_least:
            return value / self.limit
        return self.limit / value if value > 0 else math.inf

    def slower(self, factor: float) -> Bound:
        """What must hold where every step is ``factor`` times as fast, for this to hold where it is not."""
        return replace(self, limit=self.limit * factor if self.at_least else self.limit / factor)

    def shown(self, value: float) -> str:
        """A measured ``value`` with its unit."""
        if self.at_least:
            return f"{value:.4g} tok/s"
        return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"

    def __str__(self) -> str:
        return f"{self.metric} {self.statistic} {'≥' if self.at_least else '≤'} {self.shown(self.limit)}"


@dataclass(frozen=True)
class Tier:
    """A class of service: its ``bounds`` and its ``share`` of the demand (None: an equal part of what others leave)."""

    name: str
    bounds: tuple[Bound, ...]
    share: float | None = None

    def __post_init__(self) -> None:
        if not self.bounds:
            raise SpecsimError(f"tier {self.name!r}: expected at least one bound, such as interactivity>=80@p10")
        columns = [bound.column for bound in self.bounds]
        if len(set(columns)) < len(columns):
            twice = next(b for b in self.bounds if columns.count(b.column) > 1)
            raise SpecsimError(f"tier {self.name!r}: {twice.metric}@{twice.statistic} is given twice")
        if self.share is not None and not 0 < self.share <= 1:
            raise SpecsimError(f"tier {self.name!r}: share: expected above 0 and at most 1, got {self.share:g}")

    def slower(self, factor: float) -> Tier:
        """The tier whose bounds hold in a run where this one's do when every step lasts ``factor`` times as long."""
        return replace(self, bounds=tuple(bound.slower(factor) for bound in self.bounds))

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(map(str, self.bounds))})"


def parse_tier(text: str) -> Tier:
    """A Tier from ``NAME: BOUND, BOUND, share=0.3``; a BOUND is ``interactivity>=80@p10`` or ``ttft<=250ms@p95``.

    The statistic after @ may be left out (p10 of interactivity, p90 of the others: nine of ten requests); a share may
    be told as ``30%``. Raises SpecsimError, in one line, for anything else.
    """
    name, colon, rest = (part.strip() for part in text.partition(":"))
    if not (name and colon and rest):
        raise SpecsimError(f"tier {text!r}: expected NAME: BOUNDS, such as {_EXAMPLE}")
    bounds, share = [], None
    for item in (part.strip() for part in rest.split(",")):
        if re.match(r"share\s*=", item):
            if share is not None:
                raise SpecsimError(f"tier {name!r}: share is given twice")
            share = _share(name, item.partition("=")[2].strip())
        else:
            bounds.append(_bound(name, item))
    return Tier(name, tuple(bounds), share)


def tier_of(slo: SLO, name: str = "all") -> Tier:
    """The tier in which nine of ten requests meet each bound of ``slo``; SpecsimError for one without bounds."""
    bounds = [(m, getattr(slo, m)) for m in ("interactivity", "ttft", "e2e")]
    found = tuple(Bound(m, USUAL[m], limit) for m, limit in bounds if limit is not None)
    if not found:
        raise SpecsimError("plan: slo: expected at least one bound, got none")
    return Tier(name, found)


def with_shares(tiers: Sequence[Tier]) -> tuple[Tier, ...]:
    """The tiers with every share told: those without one divide what the others leave, equally.

    Raises SpecsimError for no tiers, a name given twice, and shares that do not add up to 1.
    """
    if not tiers:
        raise SpecsimError(f"plan: tiers: expected at least one, such as {_EXAMPLE}")
    names = [tier.name for tier in tiers]
    for name in names:
        if names.count(name) > 1:
            raise SpecsimError(f"tier {name!r} is given twice")
    told = sum(tier.share for tier in tiers if tier.share is not None)
    untold = sum(tier.share is None for tier in tiers)
    if abs(told - 1) > 1e-9 and (not untold or told > 1):
        raise SpecsimError(f"tiers: shares: expected a sum of 1, got {told:g}")
    if untold and told > 1 - 1e-9:
        raise SpecsimError(f"tiers: shares: nothing is left for {', '.join(t.name for t in tiers if t.share is None)}")
    return tuple(tier if tier.share is not None else replace(tier, share=(1 - told) / untold) for tier in tiers)


def merged(tiers: Sequence[Tier]) -> Tier:
    """One tier that stands for all ``tiers`` on a shared pool: it keeps every promise, the strictest of each kind.

    Schedulers know nothing of tiers, so that each tier's requests are a random part of the pool's and have the
    pool's percentiles: each tier's promises are kept where the pool keeps them all.
    """
    strictest: dict[str, Bound] = {}
    for bound in (bound for tier in tiers for bound in tier.bounds):
        known = strictest.get(bound.column)
        if known is None or bound.use(known.limit) > 1:
            strictest[bound.column] = bound
    return Tier(" + ".join(tier.name for tier in tiers), tuple(strictest.values()), 1.0)


def _bound(name: str, item: str) -> Bound:
    match = _BOUND.fullmatch(item)
    if match is None:
        raise SpecsimError(
            f"tier {name!r}: {item!r}: expected a bound such as interactivity>=80@p10 or ttft<=1s@p95, or share=0.3"
        )
    metric, sign, number, unit, statistic = match.groups()
    if metric not in METRICS:
        raise SpecsimError(f"tier {name!r}: {item!r}: expected {_listed(METRICS)}, got {metric!r}")
    faster = metric == "interactivity"
    if sign != (">=" if faster else "<="):
        raise SpecsimError(f"tier {name!r}: {item!r}: expected {metric}{'>=' if faster else '<='}")
    if faster == (unit is not None):
        expected = "tokens/s without a unit" if faster else "a unit, s or ms"
        raise SpecsimError(f"tier {name!r}: {item!r}: expected {expected}")
    if statistic is not None and statistic not in STATISTICS:
        raise SpecsimError(f"tier {name!r}: {item!r}: expected @{_listed(STATISTICS)}")
    limit = float(number) / (1000 if unit == "ms" else 1)
    if not 0 < limit < math.inf:
        raise SpecsimError(f"tier {name!r}: {item!r}: expected a number above 0")
    return Bound(metric, statistic or USUAL[metric], limit)


def _share(name: str, text: str) -> float:
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = math.nan
    if not 0 < share <= 1:
        raise SpecsimError(f"tier {name!r}: share: expected above 0 and at most 1, such as 0.3 or 30%, got {text!r}")
    return share


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
