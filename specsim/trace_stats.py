"""What a drafter's blocks are worth, read off its trace: acceptance, τ and what a threshold would do.

Rows of one response are alike, so intervals are clustered by response: a figure is a ratio of sums
Σy/Σx over responses, and its variance is that of the responses' residuals y − (Σy/Σx)·x, domain by domain
(the delta method, with Student's t on responses − domains degrees of freedom). Intervals are 95 %,
NaN where a domain has a single response.

Tables have a row a domain (and position, γ or threshold), the domain "all" first. Counted are either
all anchors of the trace or those that a replay visits: from the first anchor of each response on,
min(accepted, ℓ) + 1 positions a cycle. The two differ, since a cycle that goes far skips the anchors it passes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from specsim.acceptance import Drafter
from specsim.blocktrace import Trace, TraceMeta, make_trace
from specsim.calibration import calibration_report
from specsim.synthesis import Synthetic
from specsim.types import Bools, Ints, SpecsimError

LEVEL = 0.95
THRESHOLDS = tuple(i / 20 for i in range(20))
SAMPLE = (64, 256)
"""Responses a domain, and rows a response, that stand for a synthetic trace."""

Array = NDArray[np.float64]


def acceptance_table(trace: Trace) -> pd.DataFrame:
    """Return how far blocks survive, over all anchors: a row a domain and position 1..γ.

    Columns: ``domain``, ``position``, ``responses``, ``count`` of blocks that proposed the position,
    ``survival`` (share of those with accepted ≥ position), ``reached`` (those with accepted ≥
    position − 1) and ``conditional`` (share of those with accepted ≥ position) with ``conditional_low``
    and ``conditional_high``. Where there is nothing to take a share of, it is NaN.
    """
    sums = []
    for k in range(1, trace.gamma + 1):
        offered = trace.proposed >= k
        events = (offered, offered & (trace.accepted >= k - 1), trace.accepted >= k)
        sums.append([_sum_by_response(trace, event) for event in events])
    rows, domain = [], _domain_of_responses(trace)
    for name, part in _parts(trace).items():
        for k, columns in enumerate(sums, start=1):
            count, reached, survived = (column[part] for column in columns)
            survival, _, _ = clustered_ratio(survived, count)
            conditional = np.clip(clustered_ratio(survived, reached, domain[part]), 0, 1)
            rows.append((name, k, len(count), int(count.sum()), survival, int(reached.sum()), *conditional))
    heads = ["domain", "position", "responses", "count", "survival", "reached"]
    return pd.DataFrame(rows, columns=[*heads, *_interval("conditional")])


def tau_table(trace: Trace) -> pd.DataFrame:
    """Return tokens a cycle, bonus included, of blocks cut to 1..γ tokens: a row a domain and ``gamma``.

    Columns: ``domain``, ``gamma``, ``cycles`` of the replay, ``tau`` over them with ``tau_low`` and
    ``tau_high``, and ``tau_anchors`` over all anchors. Every cycle verifies the whole (cut) block; the last of a
    response counts in full, as τ does before a length clips it. Of a sequential trace every row is a cycle.
    """
    sums = []
    for gamma in range(1, trace.gamma + 1):
        progress = np.minimum(trace.accepted, gamma) + 1
        seen = visited(trace, progress)
        columns = (seen, progress * seen, np.ones(len(trace)), progress)
        sums.append([_sum_by_response(trace, column) for column in columns])
    rows, domain = [], _domain_of_responses(trace)
    for name, part in _parts(trace).items():
        for gamma, (cycles, tokens, anchors, all_tokens) in enumerate(sums, start=1):
            tau = clustered_ratio(tokens[part], cycles[part], domain[part])
            rows.append((name, gamma, int(cycles[part].sum()), *tau, all_tokens[part].sum() / anchors[part].sum()))
    return pd.DataFrame(rows, columns=["domain", "gamma", "cycles", *_interval("tau"), "tau_anchors"])


def threshold_sweep(trace: Trace, thresholds: Sequence[float] = THRESHOLDS, calibrated: bool = True) -> pd.DataFrame:
    """Return what Threshold(c) would do for each c of ``thresholds``, replayed: a row a domain and ``threshold``.

    Threshold(c) verifies up to the first position whose confidence lies below c. Columns: ``domain``,
    ``threshold``, ``cycles``, ``verified_tokens`` (1 + ℓ a cycle), ``tau`` (tokens a cycle, bonus included)
    and ``token_acceptance_rate`` (their ratio, (accepted + 1)/(ℓ + 1), as in figure 5 of the DSpark paper,
    arXiv 2607.05147), the last two with ``_low`` and ``_high``. ``calibrated`` applies the trace's
    temperatures, where it has them.

    Raises SpecsimError for a trace without confidences and for thresholds outside 0..1.
    """
    confidence = trace.confidences(calibrated)
    if confidence is None:
        raise SpecsimError("threshold_sweep: confidence: none in this trace, expected some to hold against a threshold")
    sums = []
    for threshold in thresholds:
        if not 0 <= threshold <= 1:
            raise SpecsimError(f"threshold_sweep: threshold: {threshold:g}, expected 0..1")
        # A token that was not proposed is NaN, which no threshold lets pass.
        lengths = np.logical_and.accumulate(confidence >= threshold, axis=1).sum(axis=1)
        progress = np.minimum(trace.accepted, lengths) + 1
        seen = visited(trace, progress)
        columns = (seen, progress * seen, (lengths + 1) * seen)
        sums.append([_sum_by_response(trace, column) for column in columns])
    rows, domain = [], _domain_of_responses(trace)
    for name, part in _parts(trace).items():
        for threshold, (cycles, tokens, verified) in zip(thresholds, sums, strict=True):
            tau = clustered_ratio(tokens[part], cycles[part], domain[part])
            rate = np.clip(clustered_ratio(tokens[part], verified[part], domain[part]), 0, 1)
            count = int(cycles[part].sum())
            rows.append((name, threshold, count, verified[part].sum() / count, *tau, *rate))
    heads = ["domain", "threshold", "cycles", "verified_tokens", *_interval("tau"), *_interval("token_acceptance_rate")]
    return pd.DataFrame(rows, columns=heads)


def calibration_table(trace: Trace, calibrated: bool = True) -> pd.DataFrame:
    """Return ``calibration.calibration_report`` by domain: a row a domain and position; empty without confidences.

    Where temperatures were fitted on this very trace, the blocks they were fitted on are among those judged.
    """
    confidence = trace.confidences(calibrated)
    tables = []
    if confidence is not None:
        for name, part in _parts(trace).items():
            rows = part[trace.responses()]
            report = calibration_report(confidence[rows], trace.accepted[rows])
            report.insert(0, "domain", name)
            tables.append(report)
    empty = pd.DataFrame(columns=["domain", "position", "count", "predicted", "observed", "ece", "auc"])
    return pd.concat(tables, ignore_index=True) if tables else empty


def sample(trace: Synthetic, seed: int = 0) -> Trace:
    """A block trace drawn from synthetic parameters, so that it can stand beside recorded ones.

    Its "responses" are SAMPLE's: 64 a domain, of 256 rows; intervals tell how exact the draw is, nothing else.
    Where acceptance changes along the way, it is that before the first edge.
    """
    count, length = SAMPLE
    tape = Drafter(trace, trace.gamma).tape(seed, calibrated=False)
    rows = (tape.first[:: len(tape.edges) + 1, None] + np.arange(count * length)).ravel()
    domain = np.repeat(np.array(tape.domains, dtype=object), count * length)
    meta = TraceMeta(
        drafter=trace.drafter, target=trace.target, gamma=trace.gamma, kind="dense", temperature=trace.temperature,
        confidence_source=trace.confidence_source, sts=trace.sts, notes="drawn from synthetic parameters",
    )  # fmt: skip
    columns = {
        "request_id": [f"{name}-{i // length % count}" for i, name in enumerate(domain)],
        "domain": domain,
        "position": np.tile(np.arange(length), len(rows) // length),
        "confidence": None if tape.confidence is None else tape.confidence[rows],
        "accepted": tape.accepted[rows],
        "proposed": np.full(len(rows), trace.gamma),
    }
    return make_trace(meta, columns, trace.drafter)


def visited(trace: Trace, progress: Ints) -> Bools:
    """Which rows, bool [n], a replay from each response's first anchor reads when row i leads ``progress[i]`` ≥ 1 on.

    Rows of a sequential trace are cycles that happened, each leads to the next: all are read.
    """
    if trace.meta.kind == "sequential":
        return np.ones(len(trace), dtype=bool)
    seen = np.zeros(len(trace), dtype=bool)
    _, at, size = np.unique(trace.responses(), return_index=True, return_counts=True)
    end = at + size
    while len(at):  # one cycle of every response that has not ended
        seen[at] = True
        at = at + progress[at]
        at, end = at[at < end], end[at < end]
    return seen


def clustered_ratio(y: Array, x: Array, stratum: Ints | None = None) -> tuple[float, float, float]:
    """Return Σy/Σx with the ends of its interval, for sums ``y`` and ``x`` float[clusters] of independent clusters.

    Clusters are compared with others of their ``stratum`` (int[clusters], one if None): how far strata lie apart
    is no uncertainty, since each has the share it was given. NaN for Σx = 0, and ends of NaN where a
    stratum has a single cluster.
    """
    from scipy.special import stdtrit  # the t quantile without the second that scipy.stats takes to load

    stratum = np.zeros(len(x), dtype=np.int64) if stratum is None else stratum
    if x.sum() == 0:
        return float("nan"), float("nan"), float("nan")
    ratio = float(y.sum() / x.sum())
    residual = y - ratio * x
    variance, freedom = 0.0, 0
    for code in np.unique(stratum):
        own = residual[stratum == code]
        if len(own) < 2:
            return ratio, float("nan"), float("nan")
        variance += len(own) * float(np.var(own, ddof=1))
        freedom += len(own) - 1
    half = float(stdtrit(freedom, (1 + LEVEL) / 2)) * variance**0.5 / float(x.sum())
    return ratio, ratio - half, ratio + half


def _domain_of_responses(trace: Trace) -> NDArray[np.int64]:
    """The domain's code of each response, int64 [responses]."""
    return trace.domain[np.unique(trace.responses(), return_index=True)[1]]


def _parts(trace: Trace) -> dict[str, Bools]:
    """Which responses, bool [responses], are of each domain; all of them first."""
    domain = _domain_of_responses(trace)
    return {"all": np.ones(len(domain), dtype=bool)} | {name: domain == code for code, name in enumerate(trace.domains)}


def _sum_by_response(trace: Trace, column: ArrayLike) -> Array:
    """The sums of ``column`` [n] over the rows of each response, float [responses]."""
    return np.bincount(trace.responses(), weights=np.asarray(column, dtype=np.float64)).astype(np.float64)


def _interval(name: str) -> tuple[str, str, str]:
    return name, f"{name}_low", f"{name}_high"
