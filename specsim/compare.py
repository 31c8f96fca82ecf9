"""Did the front move? Two baselines, number by number, with a test that noise alone seldom fails.

Every number is read off each seed's own front (linear between adjacent loads, nothing beyond, as in
:mod:`specsim.pareto`): throughput at floors of interactivity, interactivity at shares of BASE's greatest throughput,
the dominated area; and τ and verified tokens, averaged over loads. Only loads that both files hold take part.
Where even the highest load lies above a floor, its throughput is compared: neither file tells what more would sell.

The test is Student's t on the means over seeds: on the differences seed by seed where enough seeds are in both files
(chosen by the seeds alone, never by the numbers), Welch's where not. With m numbers in all, each is tested at level/m
(Bonferroni), so that a comparison of equals fails with at most the probability ``level``, however the numbers hang
together. A number is a regression if its loss is beyond its tolerance and beyond that noise. Numbers without any noise
(NoSpec of fixed lengths) are compared as they are: equal to one part in 10⁹, or changed. A number that fell beyond its
tolerance while its noise hides a tenth or more leaves the comparison undecided: it does not pass, it asks for seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from specsim.baseline import Baseline, Runs, spans
from specsim.likeness import inputs
from specsim.pareto import CONFIDENCE, best_where, dominated
from specsim.types import SpecsimError

TOLERANCES: Mapping[str, float | None] = {
    "throughput": 0.01, "interactivity": 0.01, "hypervolume": 0.01, "tau": 0.02, "verified_tokens": None,
}  # fmt: skip
"""The loss that is nobody's concern, by metric. None: told, but never a failure."""
LEVEL = 0.01
LEAST_LEVEL = 1e-6
"""Below this hardly any loss could fail: no gate."""
HIDDEN = 0.1
"""A noise beyond which a number tells too little: fallen beyond its tolerance it is undecided, else it is warned of."""
PAIRS = 4
"""Seeds in both files that are enough to pair by them; with fewer, of few degrees of freedom, all seeds tell more."""
SHARES = (0.5, 0.8)
"""Shares of BASE's greatest throughput at which interactivity is compared."""
DUST = 1e-9
"""Relative differences that are rounding, not change."""

LOSS, GAIN, MOVED, SMALL, NOISE, SAME, UNREAD = "regression", "gain", "moved", "small", "noise", "same", "unread"
UNDECIDED, GONE = "undecided", "gone"

Array = NDArray[np.float64]
NAN = math.nan


@dataclass(frozen=True)
class Change:
    """One number of one policy, before and after.

    ``base`` and ``new`` are means over seeds, in the metric's units; ``change`` is relative to ``base`` (-0.03: 3 %
    less), ``half`` the half-width of its 95 % interval, ``noise`` the smallest change that noise does not explain at
    the family's level (both relative, 0 without noise), ``p`` the probability of such a loss (of a metric of no
    direction: such a change) without any. ``verdict``: "regression"; "gain"; "moved" (beyond noise, of a metric of no
    direction); "small" (beyond noise, not beyond tolerance); "undecided" (beyond tolerance, within a noise of more than
    HIDDEN); "noise"; "same"; "gone" (BASE has the number, NEW does not) or "unread", both with the ``reason``; the mean
    of a side of which not every run has the number is NaN then.
    """

    policy: str
    metric: str
    label: str
    tolerance: float | None
    base: float = NAN
    new: float = NAN
    change: float = NAN
    half: float = NAN
    noise: float = NAN
    p: float = NAN
    verdict: str = UNREAD
    reason: str = ""


@dataclass(frozen=True)
class Comparison:
    """What came of it. ``gone``: a line for each policy that NEW lacks, or lacks loads of.

    ``notes``: what else differs or was left out.
    ``inputs``: a line for each thing that the two were made from and that differs; ``unlike``: those of them by which
    the two are not like with like ("--profile", "--gamma", "the workload"), not the content of a file of one name;
    ``added``: whether NEW has policies or loads that BASE lacks.
    ``tests`` numbers were tested, each at ``level / tests``; ``paired``: seed by seed; ``seeds``: of BASE and of NEW.
    """

    changes: list[Change]
    gone: list[str]
    notes: list[str]
    level: float
    tests: int
    paired: bool
    seeds: tuple[int, int]
    floors: list[float]
    inputs: list[str] = field(default_factory=list)
    unlike: list[str] = field(default_factory=list)
    added: bool = False

    @property
    def regressions(self) -> list[Change]:
        """The changes that fail the comparison by what they are."""
        return [c for c in self.changes if c.verdict == LOSS]

    @property
    def lost(self) -> list[Change]:
        """The numbers that NEW lacks: they fail it too."""
        return [c for c in self.changes if c.verdict == GONE]

    @property
    def undecided(self) -> list[Change]:
        """The numbers that fell beyond their tolerance within a noise that hides too much."""
        return [c for c in self.changes if c.verdict == UNDECIDED]

    @property
    def hidden(self) -> list[Change]:
        """The numbers that did not fail while losses of more than HIDDEN would not have been seen in them."""
        seen = (LOSS, UNDECIDED, SAME, GONE, UNREAD)
        return [c for c in self.changes if c.tolerance is not None and c.noise > HIDDEN and c.verdict not in seen]

    @property
    def failed(self) -> bool:
        """Whether there is a regression, or a policy, a load or a number is gone."""
        return bool(self.gone or self.lost or self.regressions)

    @property
    def passed(self) -> bool:
        """Whether it neither failed nor is undecided."""
        return not self.failed and not self.undecided

    @property
    def identical(self) -> bool:
        """Whether nothing is gone, and every number is the same or was read on neither side."""
        others = [c for c in self.changes if c.verdict != SAME]
        return not self.gone and all(c.verdict == UNREAD and math.isnan(c.base) and math.isnan(c.new) for c in others)


@dataclass(frozen=True)
class _Sample:
    """A number's value in every seed of both sides (NaN or −∞: has none), or the reason why it is not compared."""

    policy: str
    metric: str
    label: str
    base: Array = field(default_factory=lambda: np.empty(0))
    new: Array = field(default_factory=lambda: np.empty(0))
    reason: str = ""
    is_gone: bool = False

    @property
    def is_read(self) -> bool:
        return not self.reason and bool(np.isfinite(self.base).all() and np.isfinite(self.new).all())


@dataclass(frozen=True)
class _Seeds:
    """Whether seeds are paired, and the columns of each side that take part.

    ``twins``: where in them the seeds of one side that the other has too stand, if those are all that it has: where
    they agree, the two are the same, though too few to be paired.
    """

    paired: bool
    columns: tuple[list[int], list[int]]
    twins: tuple[list[int], list[int]] | None = None


def compare(
    base: Baseline,
    new: Baseline,
    *,
    floors: Iterable[float] | None = None,
    tolerances: Mapping[str, float | None] | None = None,
    level: float = LEVEL,
    x: str = "interactivity_p50",
) -> Comparison:
    """Compare ``new`` with ``base``, policy by policy.

    ``floors``: of interactivity, tok/s/user (None: those that BASE names); ``tolerances`` replace those of TOLERANCES,
    by metric; ``level``: the probability that two runs of the same thing fail; ``x``: "interactivity_p50" or "_p10".

    Raises SpecsimError for unknown metrics, workloads of different kinds, fewer than two seeds on a side, and where
    no number can be compared though nothing is gone.
    """
    allowed = {**TOLERANCES, **(tolerances or {})}
    _check(base, new, allowed, level)
    chosen = base.floors if floors is None else list(floors)
    seeds = _seeds(base, new)
    gone, added, notes = [], [], _notes(base, new, seeds)
    samples: list[_Sample] = []
    for policy in base.policies:
        before, after = _by_load(base, policy), _by_load(new, policy)
        common = sorted(before.keys() & after.keys())
        if not after:
            gone.append(f"{policy} is in BASE and not in NEW")
        elif not common:
            gone.append(f"{policy}: no load in NEW that BASE has ({_loads(before)} in BASE, {_loads(after)} in NEW)")
        else:
            if lost := before.keys() - after.keys():
                gone.append(f"{policy}: in BASE and not in NEW: load{'s' * (len(lost) > 1)} {_loads(lost)}")
            if more := after.keys() - before.keys():
                added.append(f"{policy}: loads in NEW alone, left out: {_loads(more)}")
            sides = [
                {m: np.array([runs[load].values(m)[at] for load in common]) for m in (x, "throughput", *_MEANS)}
                for runs, at in zip((before, after), seeds.columns, strict=True)
            ]
            samples += _samples(policy, sides[0], sides[1], chosen, x)
    added += [f"{policy} is new: nothing to compare it with" for policy in new.policies if policy not in base.policies]
    tests = sum(s.is_read for s in samples)
    changes = [_judge(s, allowed[s.metric], level / max(tests, 1), seeds) for s in samples]
    counts = (len(seeds.columns[0]), len(seeds.columns[1]))
    told = [*notes, *added]
    found = Comparison(changes, gone, told, level, tests, seeds.paired, counts, chosen, *inputs(base, new), bool(added))
    if not tests and not found.failed:
        raise SpecsimError("runs: no number to compare: expected one that every run of a policy has in BASE and in NEW")
    return found


_MEANS = ("tau", "verified_tokens")


def _check(base: Baseline, new: Baseline, allowed: Mapping[str, float | None], level: float) -> None:
    for metric, tolerance in allowed.items():
        if metric not in TOLERANCES:
            raise SpecsimError(f"tolerance: {metric!r} is not one of {', '.join(TOLERANCES)}")
        if tolerance is not None and not tolerance >= 0:
            raise SpecsimError(f"tolerance: {metric}: expected a share, 0 or more, got {tolerance}")
    if not LEAST_LEVEL <= level < 1:
        raise SpecsimError(f"level: expected a probability of {LEAST_LEVEL:g} or more, below 1, got {level}")
    kinds = [side.kind(side.runs[0]) for side in (base, new)]
    if kinds[0] != kinds[1]:
        raise SpecsimError(f"workload: {kinds[0]} in BASE, {kinds[1]} in NEW, expected one kind: loads do not compare")


def _seeds(base: Baseline, new: Baseline) -> _Seeds:
    """Which seeds take part, and how: by the seeds alone. Choosing by the numbers would raise the rate of alarms."""
    common = [s for s in base.seeds if s in new.seeds]
    least, most = sorted((len(base.seeds), len(new.seeds)))
    for name, side in (("BASE", base), ("NEW", new)):
        if len(side.seeds) < 2:
            raise SpecsimError(
                f"seeds: {len(side.seeds)} in {name}, expected two or more: one tells nothing of the noise"
            )
    twins = ([base.seeds.index(s) for s in common], [new.seeds.index(s) for s in common])
    if len(common) == most or (len(common) >= PAIRS and 2 * len(common) >= least):
        return _Seeds(True, twins)
    everyone = (list(range(len(base.seeds))), list(range(len(new.seeds))))
    return _Seeds(False, everyone, twins if len(common) == least else None)


def _by_load(side: Baseline, policy: str) -> dict[float, Runs]:
    return {run.load: run for run in side.runs if run.policy == policy}


def _loads(loads: Iterable[float]) -> str:
    return ", ".join(f"{load:g}" for load in sorted(loads))


def _samples(
    policy: str, base: Mapping[str, Array], new: Mapping[str, Array], floors: Iterable[float], x: str
) -> list[_Sample]:
    """All numbers of one policy; ``base`` and ``new`` hold arrays [loads, seeds] by metric."""
    y = "throughput"
    found = []
    for floor in floors:
        label = f"throughput at ≥ {floor:g} tok/s/user"
        found.append(_reach(_Sample(policy, y, label), base, new, (x, y), floor, "its fastest point, tok/s/user"))
    peak, limit = (float(base[metric].mean(axis=1).max()) for metric in (y, x))
    for share in SHARES:
        label = f"interactivity at {100 * share:g} % of BASE's greatest throughput"
        sample = _Sample(policy, "interactivity", label)
        found.append(_reach(sample, base, new, (y, x), share * peak, "its greatest throughput, tok/s/GPU"))
    areas = (_each(side, x, y, lambda u, v: dominated(u, v, limit) if limit == limit else NAN) for side in (base, new))
    found.append(_Sample(policy, "hypervolume", "hypervolume", next(areas), next(areas)))
    for metric in _MEANS:
        label = {"tau": "τ", "verified_tokens": "verified tokens"}[metric]
        found.append(_Sample(policy, metric, label, base[metric].mean(axis=0), new[metric].mean(axis=0)))
    return [s if s.is_read or s.reason else _missing(s) for s in found]


def _missing(sample: _Sample) -> _Sample:
    """Why a number is not read; it is gone where fewer of NEW's runs have it than of BASE's."""
    base, new = (np.isfinite(side).mean() for side in (sample.base, sample.new))
    if new < base:
        return replace(sample, reason=f"{'not every' if new else 'no'} run of NEW has the number", is_gone=True)
    whose = " of BASE" if new == 1 else ""
    return replace(sample, reason=f"not every run{whose} has the number")


def _each(side: Mapping[str, Array], u: str, v: str, read: Callable[[Array, Array], float]) -> Array:
    """``read(u, v)`` of every seed's own curve; NaN where the curve has gaps."""
    pairs = [(side[u][:, i], side[v][:, i]) for i in range(side[u].shape[1])]
    return np.array([read(a, b) if np.isfinite(a).all() and np.isfinite(b).all() else NAN for a, b in pairs])


def _reach(
    sample: _Sample, base: Mapping[str, Array], new: Mapping[str, Array], axes: tuple[str, str], floor: float, end: str
) -> _Sample:
    """The most of the second axis while the first is ``floor`` or more.

    Where NEW does not reach the floor in every seed and BASE does, what was the most of the first axis is compared in
    its stead (``end`` says so): how far it moved, not whether it happens to be on this side of the floor.
    """
    keep, give = axes
    before, after = (_each(side, keep, give, lambda u, v: best_where(u, v, floor)) for side in (base, new))
    if not math.isfinite(floor):  # a share of a throughput that BASE lacks
        return replace(sample, base=np.full_like(before, NAN), new=np.full_like(after, NAN))
    sample = replace(sample, base=before, new=after)
    if np.isnan(before).any():
        return sample
    if np.isneginf(before).any():
        some = "not every seed" if np.isfinite(before).any() else "no load measured"
        gains = " (NEW does)" if np.isfinite(after).all() else ""
        return replace(sample, reason=f"in BASE {some} has {floor:,.4g} or more{gains}")
    if np.isfinite(after).all() or np.isnan(after).any():
        return sample
    lost = f"{sample.label}: no longer reached; {end}"
    return replace(sample, label=lost, base=base[keep].max(axis=0), new=new[keep].max(axis=0))


def _judge(sample: _Sample, tolerance: float | None, level: float, seeds: _Seeds) -> Change:
    """Test one number at ``level``, one-sided against a loss unless its metric has no direction."""
    from scipy.special import stdtr, stdtrit  # Student's t without the second that scipy.stats takes to load

    out = Change(sample.policy, sample.metric, sample.label, tolerance, reason=sample.reason)
    if not sample.is_read:
        verdict = GONE if sample.is_gone else UNREAD
        return replace(out, base=_mean(sample.base), new=_mean(sample.new), verdict=verdict)
    befores, afters, paired = sample.base, sample.new, seeds.paired
    if seeds.twins is not None:
        twins = befores[seeds.twins[0]], afters[seeds.twins[1]]
        if np.allclose(*twins, rtol=DUST, atol=0.0):
            befores, afters, paired = *twins, True
    base, new = float(befores.mean()), float(afters.mean())
    delta, error, freedom = _difference(befores, afters, paired)
    scale = max(abs(base), abs(new))
    if scale == 0:
        return replace(out, base=base, new=new, change=0.0, half=0.0, noise=0.0, p=1.0, verdict=SAME)
    unit = abs(base) or scale
    both_ways = sample.metric == "verified_tokens"
    if error <= DUST * scale:  # no noise: it changed or it did not
        half = noise = 0.0
        loss, gain = (float(delta >= -DUST * scale), float(delta <= DUST * scale))
    else:
        half = float(stdtrit(freedom, (1 + CONFIDENCE) / 2)) * error / unit
        noise = float(stdtrit(freedom, 1 - (level / 2 if both_ways else level))) * error / unit
        loss, gain = float(stdtr(freedom, delta / error)), float(stdtr(freedom, -delta / error))
    p = min(1.0, 2 * min(loss, gain)) if both_ways else loss
    change = delta / unit
    is_real = (p if delta < 0 or both_ways else gain) < level
    beyond = tolerance is not None and abs(change) > tolerance
    if abs(delta) <= DUST * scale and error <= DUST * scale:
        verdict = SAME
    elif not is_real:
        fell = beyond and (both_ways or delta < 0)
        verdict = UNDECIDED if fell and noise > HIDDEN else NOISE
    elif tolerance is None:
        verdict = MOVED
    elif not beyond:
        verdict = SMALL
    else:
        verdict = LOSS if both_ways or delta < 0 else GAIN
    return replace(out, base=base, new=new, change=change, half=half, noise=noise, p=p, verdict=verdict)


def _mean(values: Array) -> float:
    """The mean, NaN where there is not a number for each seed."""
    return float(values.mean()) if np.isfinite(values).all() else NAN


def _difference(base: Array, new: Array, paired: bool) -> tuple[float, float, float]:
    """New less base on average, its standard error, and the degrees of freedom of that."""
    if paired:
        d = new - base
        return float(d.mean()), float(d.std(ddof=1) / math.sqrt(len(d))), float(len(d) - 1)
    parts = [float(v.var(ddof=1)) / len(v) for v in (base, new)]
    total = sum(parts)
    # Welch and Satterthwaite; a side without variance adds no doubt about it.
    doubt = sum(part**2 / (len(v) - 1) for part, v in zip(parts, (base, new), strict=True))
    return float(new.mean() - base.mean()), math.sqrt(total), total**2 / doubt if doubt > 0 else NAN


def _notes(base: Baseline, new: Baseline, seeds: _Seeds) -> list[str]:
    """What differs between the two files besides their numbers and what they were made from."""
    notes = []
    if base.seeds != new.seeds:
        some = any(s in new.seeds for s in base.seeds)
        how = "compared as independent samples" + ", those in both are too few to pair" * some
        how += " (numbers that agree in all of them are the same)" * (seeds.twins is not None)
        how = "paired by those in both" if seeds.paired else how
        notes.append(f"seeds {spans(base.seeds)} in BASE, {spans(new.seeds)} in NEW: {how}")
    if base.specsim != new.specsim and base.specsim and new.specsim:
        notes.append(f"specsim {base.specsim} in BASE, {new.specsim} in NEW")
    return notes
