"""Are the drafter's confidences probabilities? Reliability, ECE, AUC and temperatures that repair them.

A drafter's ``confidence`` is float[n, γ]: the conditional probability that draft token k survives
given that 1..k-1 did. ``accepted`` is int[n]: how many leading draft tokens survived, 0..γ. What a
scheduler acts on is the survival a_k = c_1·…·c_k, so that is what is judged here, at every position k
against the event accepted ≥ k and over all blocks (figure 6 of the DSpark paper, arXiv 2607.05147).
A NaN confidence is a token that was not proposed: it and what follows it in the block are left out.
Positions are counted from 1 wherever a person reads them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from specsim.types import Bools, Floats, Ints, SpecsimError

BINS = 15
GRID: NDArray[np.float64] = np.logspace(-1.0, 1.0, 41)


def survival(confidence: Floats) -> Floats:
    """Return a_k = ∏_{i≤k} c_i, float[n, γ] of the same type, from ``confidence`` float[n, γ]."""
    confidence = np.asarray(confidence)
    product: Floats = np.cumprod(confidence, axis=-1, dtype=np.float64).astype(confidence.dtype)
    return product


def ece(probability: ArrayLike, outcome: ArrayLike, bins: int = BINS) -> float:
    """Return the expected calibration error of ``probability`` float[n] for the event ``outcome`` bool[n].

    Over ``bins`` bins of equal width, [i/bins, (i+1)/bins) with 1 in the last, the mean of
    |mean probability - observed frequency| weighted by the bin's share of the entries. NaN when
    nothing is left after dropping NaN probabilities; SpecsimError for values outside 0..1.
    """
    p, o = _pairs(probability, outcome)
    if np.any((p < 0) | (p > 1)):
        raise SpecsimError("probability: expected values in 0..1")
    return _ece(p, o.astype(np.float64), bins) if len(p) else float("nan")


def roc_auc(score: ArrayLike, outcome: ArrayLike) -> float:
    """Return the area under the ROC curve of ``score`` float[n] for the event ``outcome`` bool[n].

    It is the chance that an entry with the event outscores one without it, a tie counting half
    (the Mann-Whitney statistic). NaN when the event always or never happened.
    """
    s, o = _pairs(score, outcome)
    positives = int(o.sum())
    negatives = len(o) - positives
    if not positives or not negatives:
        return float("nan")
    _, place, count = np.unique(s, return_inverse=True, return_counts=True)
    rank = np.cumsum(count) - (count - 1) / 2  # equal scores share the mean of their ranks
    u = float(rank[place[o]].sum()) - positives * (positives + 1) / 2
    return u / (positives * negatives)


def reliability_table(confidence: Floats, accepted: Ints, bins: int = BINS) -> pd.DataFrame:
    """Return what a reliability diagram shows, for ``confidence`` float[n, γ] and ``accepted`` int[n].

    One row a position (1..γ) and non-empty bin (0..bins-1, of equal width): ``position``, ``bin``,
    ``count`` of blocks, ``predicted`` (their mean survival) and ``observed`` (share that survived).
    """
    confidence, accepted = _checked(confidence, accepted)
    product = survival(confidence.astype(np.float64))
    tables = []
    for k in range(confidence.shape[1]):
        p, o = _pairs(product[:, k], accepted > k)
        place = _bin(p, bins)
        count = np.bincount(place, minlength=bins)
        full = np.flatnonzero(count)
        predicted = np.bincount(place, weights=p, minlength=bins)[full] / count[full]
        observed = np.bincount(place, weights=o, minlength=bins)[full] / count[full]
        columns = {"position": k + 1, "bin": full, "count": count[full]}
        tables.append(pd.DataFrame(columns | {"predicted": predicted, "observed": observed}))
    return pd.concat(tables, ignore_index=True)


def calibration_report(confidence: Floats, accepted: Ints, bins: int = BINS) -> pd.DataFrame:
    """Return one row a position (1..γ) on how ``confidence`` float[n, γ] foretells ``accepted`` int[n].

    Columns: ``position``, ``count`` of blocks, ``predicted`` (mean survival), ``observed`` (share
    of blocks with accepted ≥ position), ``ece`` and ``auc`` of the survival.
    """
    confidence, accepted = _checked(confidence, accepted)
    product = survival(confidence.astype(np.float64))
    rows = []
    for k in range(confidence.shape[1]):
        p, o = _pairs(product[:, k], accepted > k)
        mean = (float(p.mean()), float(o.mean())) if len(p) else (float("nan"), float("nan"))
        rows.append((k + 1, len(p), *mean, ece(p, o, bins), roc_auc(p, o)))
    return pd.DataFrame(rows, columns=["position", "count", "predicted", "observed", "ece", "auc"])


def fit_sts(confidence: Floats, accepted: Ints, grid: ArrayLike = GRID, bins: int = BINS) -> Floats:
    """Return the temperatures float[γ] of Sequential Temperature Scaling (STS, of the DSpark paper).

    From left to right: with positions < k calibrated already, T_k is the entry of ``grid`` that
    makes the ECE of the survival a_k = a_{k-1}·sigmoid(logit(c_k)/T_k) smallest; of equals, the one
    nearest 1. ``confidence`` is float[n, γ] and raw, ``accepted`` int[n].

    Raises SpecsimError for shapes or values out of range and for a grid that is not positive.
    """
    confidence, accepted = _checked(confidence, accepted)
    if not len(accepted):
        raise SpecsimError("confidence: no blocks, expected at least one to fit temperatures on")
    grid = np.asarray(grid, dtype=np.float64).ravel()
    if not grid.size or not np.all(np.isfinite(grid) & (grid > 0)):
        raise SpecsimError("grid: expected one or more temperatures above 0")
    temperatures = np.ones(confidence.shape[1])
    before = np.ones(len(accepted))
    for k in range(confidence.shape[1]):
        there = np.flatnonzero(~np.isnan(before * confidence[:, k]))
        if there.size:
            logit = _logit(confidence[there, k])
            event = (accepted[there] > k).astype(np.float64)
            errors = np.array([_ece(before[there] * _sigmoid(logit, t), event, bins) for t in grid])
            # Sums in another order may differ in the last digits: those are equals, too.
            best = grid[errors <= errors.min() + 1e-12]
            temperatures[k] = best[np.argmin(np.abs(np.log(best)))]
        before *= apply_sts(confidence[:, k : k + 1].astype(np.float64), temperatures[k : k + 1])[:, 0]
    return temperatures


def apply_sts(confidence: Floats, temperatures: ArrayLike) -> Floats:
    """Return sigmoid(logit(c_k)/T_k), of the type and shape of ``confidence`` float[..., γ].

    The map rises strictly with c_k, so the order of blocks at one position is kept (not the order of
    a_k), save that a small T_k rounds the nearest to 1 up to 1 (at 0.1 in float64: above 0.97). 0
    stays 0, 1 stays 1, NaN stays NaN, and T_k = 1 changes nothing. ``temperatures`` is float[γ], all
    above 0, else SpecsimError.
    """
    confidence = np.asarray(confidence)
    t = np.asarray(temperatures, dtype=np.float64)
    if t.ndim != 1 or confidence.shape[-1:] != t.shape:
        raise SpecsimError(
            f"temperatures: shape {t.shape}, expected one for each position of confidence {confidence.shape}"
        )
    if not np.all(np.isfinite(t) & (t > 0)):
        raise SpecsimError(f"temperatures: {t.tolist()}, expected finite numbers above 0")
    scaled = _sigmoid(_logit(confidence.astype(np.float64)), t).astype(confidence.dtype)
    # Going to logits and back costs a rounding; at T = 1 there is nothing to pay it for.
    result: Floats = np.where(t == 1.0, confidence, scaled)
    return result


def _logit(c: NDArray[np.float64]) -> NDArray[np.float64]:
    with np.errstate(divide="ignore"):  # 0 and 1 become -inf and inf, and come back as 0 and 1
        return np.log(c) - np.log1p(-c)


def _sigmoid(logit: NDArray[np.float64], temperature: float | NDArray[np.float64]) -> NDArray[np.float64]:
    with np.errstate(over="ignore"):
        result: NDArray[np.float64] = 1.0 / (1.0 + np.exp(-logit / temperature))
    return result


def _bin(p: NDArray[np.float64], bins: int) -> NDArray[np.int64]:
    if bins < 1:
        raise SpecsimError(f"bins: {bins}, expected at least 1")
    return np.minimum((p * bins).astype(np.int64), bins - 1)


def _ece(p: NDArray[np.float64], event: NDArray[np.float64], bins: int) -> float:
    # count·|mean p - mean event| of a bin is |Σ (p - event)| over it.
    gaps = np.bincount(_bin(p, bins), weights=p - event, minlength=bins)
    return float(np.abs(gaps).sum()) / len(p)


def _pairs(value: ArrayLike, outcome: ArrayLike) -> tuple[NDArray[np.float64], Bools]:
    v = np.asarray(value, dtype=np.float64)
    o = np.asarray(outcome).astype(bool)
    if v.ndim != 1 or v.shape != o.shape:
        raise SpecsimError(f"expected two arrays of one length, got shapes {v.shape} and {o.shape}")
    known = ~np.isnan(v)
    return v[known], o[known]


def _checked(confidence: Any, accepted: Any) -> tuple[Floats, Ints]:
    c, a = np.asarray(confidence), np.asarray(accepted)
    if c.ndim != 2 or not c.shape[1] or not np.issubdtype(c.dtype, np.floating):
        raise SpecsimError(f"confidence: {c.dtype} of shape {c.shape}, expected floats [blocks, gamma]")
    if a.shape != c.shape[:1] or not np.issubdtype(a.dtype, np.integer):
        raise SpecsimError(f"accepted: {a.dtype} of shape {a.shape}, expected integers [{len(c)}]")
    if np.any((c < 0) | (c > 1)):
        raise SpecsimError("confidence: expected probabilities in 0..1")
    if np.any((a < 0) | (a > c.shape[1])):
        raise SpecsimError(f"accepted: expected 0..{c.shape[1]} (gamma)")
    return c, a
