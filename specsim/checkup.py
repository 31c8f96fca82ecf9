"""Two questions about a drafter in service: is its acceptance normal, and is γ right for the load?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from specsim.asking import several
from specsim.blocktrace import TOTAL, Trace
from specsim.engine import Policy, Scenario
from specsim.metrics import window_warning
from specsim.pareto import ROUNDING, half_width
from specsim.schedulers import NoSpec, StaticGamma
from specsim.sweep import sweep
from specsim.synthesis import Synthetic
from specsim.trace_stats import acceptance_table, sample, tau_table
from specsim.trial import at_load
from specsim.types import SpecsimError
from specsim.workload import ClosedLoop, Workload

KEEPS_UP = 0.9
"""Share of the tokens that open arrivals ask for, below which a length does not keep up with them."""


@dataclass(frozen=True)
class Published:
    """Conditional acceptance by position that was published for a kind of drafter, by domain."""

    kind: str
    target: str
    source: str
    domains: dict[str, tuple[float, ...]]


_FIGURE = "arXiv 2607.05147, figure 2"
PUBLISHED = (
    Published("DSpark", "Qwen3-4B", _FIGURE, {
        "math": (0.9053, 0.8899, 0.8878, 0.8854, 0.8872, 0.8906, 0.8824),
        "code": (0.8857, 0.8719, 0.8598, 0.8608, 0.8579, 0.8594, 0.851),
        "chat": (0.7353, 0.7376, 0.7402, 0.7441, 0.7583, 0.7656, 0.7609)}),
    Published("DFlash", "Qwen3-4B", _FIGURE, {
        "math": (0.885, 0.827, 0.8198, 0.8338, 0.8414, 0.839, 0.8277),
        "code": (0.8654, 0.8145, 0.7971, 0.8013, 0.8098, 0.8014, 0.777),
        "chat": (0.7181, 0.6479, 0.6382, 0.6606, 0.682, 0.6919, 0.6877)}),
    Published("Eagle3", "Qwen3-4B", _FIGURE, {
        "math": (0.8106, 0.8231, 0.8382, 0.8442, 0.8508, 0.8557, 0.8502),
        "code": (0.771, 0.7737, 0.7812, 0.7913, 0.787, 0.7939, 0.784),
        "chat": (0.5336, 0.5894, 0.6421, 0.6782, 0.7086, 0.7289, 0.7325)}),
    Published("MTP", "DeepSeek-V3", "arXiv 2412.19437: 85 to 90 %", {"lowest": (0.85,), "highest": (0.9,)}),
)  # fmt: skip
"""What traces/*.json hold, so that it is at hand where the package is installed alone (a test keeps the two equal)."""


FEW = 20
"""Blocks that got as far as a position, below which its acceptance is not judged."""
ALWAYS = 0.99
"""Share of blocks that propose something, above which a drafter counts as one that always does."""
TOO_FEW = "too few blocks to tell"


@dataclass(frozen=True, eq=False)
class AcceptanceCheck:
    """``positions``: a row a position with ``yours``, ``low`` and ``high`` (its 95 % interval, NaN where the trace is
    parameters), ``published_low`` and ``published_high`` over the domains, ``verdict`` (below, within, above or
    TOO_FEW; "" where nothing was published) and ``blocks`` that got as far (NaN for parameters). ``tau``: tokens a
    block of ``gamma`` tokens, as many of its own as something was published for, with the published range; it is the
    product of ``yours``: over all blocks, as if each were drafted whole, as what was published is. ``proposing``: share
    of the blocks that propose a token or more; ``tau_blocks``: tokens a block as proposed, those without a proposal
    included. ``tau_cycles``: tokens a cycle of a replay of blocks cut to ``gamma``, which is ``tau_table``'s τ, where
    stretches that drafts get through quickly have fewer cycles; NaN where the two are the same (parameters of one
    domain). All count the bonus token.
    """

    drafter: str
    kinds: tuple[str, ...]
    sources: tuple[str, ...]
    positions: pd.DataFrame
    gamma: int
    tau: float
    tau_published: tuple[float, float]
    tau_cycles: float = math.nan
    proposing: float = 1.0
    tau_blocks: float = math.nan

    def words(self) -> str:
        """The answer in a sentence or two."""
        low, high = self.tau_published
        if (blocks := float(self.positions["blocks"].iloc[0])) < FEW:
            return f"{self.drafter}: {TOO_FEW} whether acceptance is normal: {blocks:.0f}, expected {FEW} or more."
        always = self.proposing > ALWAYS
        tau = self.tau if always else self.tau_blocks
        where = "below" if tau < low else "above" if tau > high else "within"
        published = f"{low:.2f} to {high:.2f} published for {' or '.join(self.kinds)} ({'; '.join(self.sources)})"
        if always:
            text = (
                f"{self.drafter}: {tau:.2f} tokens a block of {self.gamma} drafted whole, bonus token included, "
                f"{where} the {published}."
            )
        else:
            text = (
                f"{self.drafter}: only {100 * self.proposing:.3g} % of its blocks propose anything. As they are, "
                f"blocks of up to {self.gamma} give {tau:.2f} tokens, bonus token included, {where} the {published}, "
                "whose drafters propose every time. The table is of what was proposed: drafts as good and always "
                f"whole would give {self.tau:.2f}."
            )
        if f"{self.tau_cycles:.2f}" not in (f"{tau:.2f}", "nan"):
            text += (
                f" Over the cycles of a replay, as trace compare counts, τ is {self.tau_cycles:.2f}: where drafts get "
                "far there are fewer cycles, and short drafts count as they are."
            )
        for verdict in ("below", "above", TOO_FEW):
            at = self.positions.loc[self.positions["verdict"] == verdict, "position"].tolist()
            named = verdict.capitalize() if verdict == TOO_FEW else f"{verdict.capitalize()} every published domain"
            if at:
                text += f" {named}: position {', '.join(map(str, at))}."
        if (self.positions["verdict"] == "below").any():
            text += " Look for another target, chat template or temperature than the drafter was trained for."
        return text


def acceptance_check(trace: Trace | Synthetic, name: str = "") -> AcceptanceCheck:
    """Hold a trace's acceptance, all domains together, against what was published for its kind of drafter.

    The kind is read from the drafter's name; a name that tells none is held against all of them. A drafter that the
    trace does not know goes by ``name``. Acceptance depends on target, text and temperature: being outside the range is
    a reason to look, being inside it is no proof.

    Intervals of recorded traces are the wider of two: clustered by response, and Wilson's for independent blocks, which
    holds where few or none were accepted. Parameters have their exact acceptance where the positions of a block are
    independent (counters always are), and that of blocks drawn from them otherwise.
    """
    synthetic = isinstance(trace, Synthetic)
    drafter = trace.drafter if isinstance(trace, Synthetic) else trace.meta.drafter
    letters = "".join(c for c in drafter.lower() if c.isalnum())
    kinds = [p for p in PUBLISHED if p.kind.lower() in letters] or list(PUBLISHED)
    exact = _survival(trace) if isinstance(trace, Synthetic) else None
    blocks = sample(trace) if isinstance(trace, Synthetic) else trace
    table = acceptance_table(blocks)
    own = table[table["domain"] == TOTAL]
    rows = []
    for at, (_, row) in enumerate(own.iterrows()):
        mine, reached = float(row["conditional"]), float(row["reached"])
        ends = (math.nan, math.nan)
        if not synthetic:
            ends = _interval(mine, reached, (float(row["conditional_low"]), float(row["conditional_high"])))
        if exact is not None:
            whole = np.concatenate(([1.0], exact.mean(axis=0)))
            mine = float(whole[at + 1] / whole[at]) if whole[at] > 0 else math.nan
        told = [means[at] for p in kinds for means in p.domains.values() if len(means) > at]
        low, high = (min(told), max(told)) if told else (math.nan, math.nan)
        lowest, highest = (mine if math.isnan(end) else end for end in ends)
        lowest, highest = lowest - ROUNDING, highest + ROUNDING
        verdict = "" if not told else "below" if highest < low else "above" if lowest > high else "within"
        if told and not synthetic and reached < FEW:
            verdict = TOO_FEW
        rows.append((at + 1, mine, *ends, low, high, verdict, math.nan if synthetic else reached))
    columns = ["position", "yours", "low", "high", "published_low", "published_high", "verdict", "blocks"]
    positions = pd.DataFrame(rows, columns=columns)
    gamma = min(len(positions), max(len(means) for p in kinds for means in p.domains.values()))
    taus = [_tau(means[:gamma]) for p in kinds for means in p.domains.values() if len(means) >= gamma]
    return AcceptanceCheck(
        name if drafter == "unknown" and name else drafter,
        tuple(p.kind for p in kinds),
        tuple(dict.fromkeys(f"{p.target}, {p.source}" for p in kinds)),
        positions,
        gamma,
        _tau(positions["yours"].fillna(0.0).tolist()[:gamma]),
        (min(taus), max(taus)),
        _tau_cycles(trace, blocks, exact, gamma),
        float((blocks.proposed >= 1).mean()),
        1 + float(np.minimum(blocks.accepted, gamma).mean()),
    )


def _survival(trace: Synthetic) -> NDArray[np.float64] | None:
    """Exact survival of positions 1..γ, [domains, γ]; None where positions of a block are tied."""
    domains = trace.domains.values()
    if any(d.block_correlation and d.concentration is not None for d in domains):
        return None
    return np.cumprod(np.array([d.conditional_acceptance for d in domains]), axis=1)


def _tau_cycles(trace: Trace | Synthetic, blocks: Trace, exact: NDArray[np.float64] | None, gamma: int) -> float:
    if isinstance(trace, Synthetic) and len(trace.domains) == 1:
        return math.nan
    if (
        isinstance(trace, Synthetic)
        and exact is not None
        and not any(d.autocorrelation and d.concentration is not None for d in trace.domains.values())
    ):
        # Each domain has as many tokens: as many fewer cycles as its blocks are longer.
        return len(exact) / float((1 / (1 + exact[:, :gamma].sum(axis=1))).sum())
    whole = tau_table(blocks)
    return float(whole.loc[(whole["domain"] == TOTAL) & (whole["gamma"] == gamma), "tau"].iloc[0])


def _interval(share: float, n: float, clustered: tuple[float, float]) -> tuple[float, float]:
    """Ends that hold Wilson's 95 % interval of a ``share`` of ``n`` blocks and the ``clustered`` one, if any."""
    if not n:
        return math.nan, math.nan
    z = 1.959964
    middle = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    low, high = max(0.0, middle - half), min(1.0, middle + half)
    return (low, high) if math.isnan(clustered[0]) else (min(low, clustered[0]), max(high, clustered[1]))


def sells_at_will(workload: Workload) -> bool:
    """Whether the throughput tells schedulers apart: neither arrivals nor thinking users decide it."""
    return isinstance(workload, ClosedLoop) and not workload.think_s


def gamma_check(base: Scenario, load: float, seeds: Iterable[int] = range(3), jobs: int = -1) -> pd.DataFrame:
    """Simulate blocks of 0, 1, .. γ tokens, always verified whole, at ``load`` users or requests/s of one replica.

    A row a ``gamma`` (0: no drafter): ``throughput`` (tok/s per GPU), ``interactivity_p50``, ``tau`` (tokens a cycle;
    means over ``seeds``), ``served`` (share of the tokens that open arrivals ask for; 1 for a closed loop), ``value``
    and ``behind``: the share of it that is lost against the best, with ``behind_ci``, paired by seed. ``value`` is the
    throughput of a closed loop, or interactivity_p50 where arrivals or thinking decide the throughput: then lengths
    that serve less than KEEPS_UP have none; if all do, their throughputs are compared. Drafting is paid for that many
    tokens. Raises SpecsimError without a drafter, and where a run is too short to have a throughput.
    """
    drafter = base.drafter
    if drafter is None:
        raise SpecsimError("gamma_check: expected a scenario with a drafter (--trace)")
    lengths = range(1, drafter.gamma + 1)
    policies = [Policy(NoSpec()), *(Policy(StaticGamma(k), replace(drafter, gamma=k, name="")) for k in lengths)]
    seeds = several("seeds", seeds)
    workload = at_load(base.workload, load)
    frame = sweep(replace(base, workload=workload), policies, seeds=seeds, jobs=jobs)
    frame = frame[frame["domain"] == TOTAL]
    if frame["throughput"].isna().any():
        raise SpecsimError(f"gamma_check: {window_warning(frame) or 'some runs have no throughput'}")

    def by_length(column: str) -> NDArray[np.float64]:  # [γ + 1, seeds]
        return np.array([frame.loc[frame["policy"] == repr(p), column].to_numpy() for p in policies], dtype=np.float64)

    tokens, served = by_length("throughput"), np.ones(len(policies))
    if not isinstance(workload, ClosedLoop):
        asked = load * np.mean([workload.requests(seed).output_tokens.mean() for seed in seeds])
        served = tokens.mean(axis=1) * base.profile.gpus / asked
    if sells_at_will(workload) or (served < KEEPS_UP).all():
        runs = tokens
    else:
        runs = np.where(served[:, None] < KEEPS_UP, np.nan, by_length("interactivity_p50"))
    best = int(np.nanargmax(runs.mean(axis=1)))
    rows = []
    for gamma, policy in enumerate(policies):
        own = frame[frame["policy"] == repr(policy)]
        behind = 1 - runs[gamma] / runs[best]
        means = [float(own[c].mean()) for c in ("throughput", "interactivity_p50", "tau")]
        rows.append(
            (gamma, *means, float(served[gamma]), float(runs[gamma].mean()), float(behind.mean()), half_width(behind))
        )
    names = ["gamma", "throughput", "interactivity_p50", "tau", "served", "value", "behind", "behind_ci"]
    return pd.DataFrame(rows, columns=names)


def gamma_words(table: pd.DataFrame, load: str, gamma: int, value: str, available: int | None = None) -> str:
    """Whether ``gamma`` is right at ``load``, in a sentence; ``value``: what is lost otherwise.

    ``available``: the longest blocks that the trace has (None: ``gamma``).
    """
    best = int(table["gamma"].to_numpy()[np.nanargmax(table["value"].to_numpy())])
    row = table[table["gamma"] == gamma].iloc[0]
    lost, ci = float(row["behind"]), float(row["behind_ci"])
    if (table["served"] < KEEPS_UP).all():
        value = "the throughput"
        load = f"{load} no length keeps up with the arrivals ({table['served'].max():.0%} at most); by throughput"
    elif row["served"] < KEEPS_UP:
        return f"At {load}, γ = {gamma} does not keep up with the arrivals: γ = {best} is the best length that does."
    if best == gamma:
        longest = ""
        if gamma == int(table["gamma"].max()):
            cut = available is not None and available > gamma
            longest = f"--gamma allows; the trace has {available}" if cut else "the trace has"
            longest = f" (the longest that {longest})"
        level = table.loc[(table["gamma"] != gamma) & (table["behind"] <= table["behind_ci"]), "gamma"].tolist()
        noise = f" Within the noise of it: γ = {', '.join(map(str, level))}." if level else ""
        return f"At {load}, γ = {gamma} is the best fixed length: it is right{longest}.{noise}"
    told = f"{100 * lost:.1f}" + (f" ± {100 * ci:.1f}" if math.isfinite(ci) else "")
    if lost <= (ci if math.isfinite(ci) else 0.0):
        return f"At {load}, γ = {best} is the best fixed length, within the noise of γ = {gamma} ({told} % of {value})."
    return f"At {load}, γ = {best} is the best fixed length: γ = {gamma} costs {told} % of {value}."


def _tau(conditional: Sequence[float]) -> float:
    return 1.0 + float(np.cumprod(conditional).sum())
