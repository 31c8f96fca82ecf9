"""Temperatures for a block trace: fitted on some of its responses, judged on the others.

Blocks of one response are alike, so whole responses are held out: temperatures that merely remember
their blocks would look good on the neighbours of those blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from specsim.blocktrace import Trace
from specsim.calibration import apply_sts, calibration_report, fit_sts
from specsim.types import Bools, Floats, SpecsimError, stream

JUDGED = ("predicted", "ece", "auc")


@dataclass(frozen=True)
class Calibrated:
    """What fitting left: the trace with its temperatures, and how they do on responses they never saw.

    ``trace`` holds the raw confidences and, in ``meta.sts``, the temperatures. ``before`` and
    ``after`` are the held-out rows' confidences, float32 [held-out rows, γ], NaN where no token was proposed;
    ``accepted`` int64 [held-out rows] goes with them. ``report`` is :func:`judge`'s table.
    ``responses`` counts those fitted on and those held out.
    """

    trace: Trace
    before: Floats
    after: Floats
    accepted: NDArray[np.int64]
    report: pd.DataFrame
    responses: tuple[int, int]


def calibrate(trace: Trace, fit_share: float = 0.5, seed: int = 0, where: str = "block trace") -> Calibrated:
    """Fit the temperatures of Sequential Temperature Scaling on ``fit_share`` of the responses of each domain.

    Temperatures that ``trace`` has are not looked at: both the fit and the "before" start from the raw
    confidences. Any source of confidence will do: a head's, the drafter's own probability of its token,
    or a position's mean, of which scaling sets the level alone.

    Raises SpecsimError naming ``where`` for a trace without confidences, and as :func:`split` does.
    """
    raw = trace.confidences(calibrated=False)
    if raw is None:
        raise SpecsimError(f"{where}: column 'confidence': null, expected confidences to calibrate")
    fit = split(trace, fit_share, seed, where)
    temperatures = fit_sts(raw[fit], trace.accepted[fit])
    after = apply_sts(raw[~fit], temperatures)
    count, total = len(np.unique(trace.responses()[fit])), int(trace.responses()[-1]) + 1
    said = f"STS: fitted on {count} of {total} responses (fit share {fit_share:g}, seed {seed})"
    notes = [line for line in (trace.meta.notes or "").splitlines() if not line.startswith("STS: ")]
    meta = trace.meta.model_copy(
        update={"sts": tuple(float(t) for t in temperatures), "notes": "\n".join([*notes, said])}
    )
    domain = np.array(trace.domains, dtype=object)[trace.domain[~fit]]
    return Calibrated(
        trace=replace(trace, meta=meta),
        before=raw[~fit],
        after=after,
        accepted=trace.accepted[~fit],
        report=judge(raw[~fit], after, trace.accepted[~fit], domain),
        responses=(count, total - count),
    )


def split(trace: Trace, fit_share: float = 0.5, seed: int = 0, where: str = "block trace") -> Bools:
    """Which rows, bool [n], belong to the ``fit_share`` of responses, domain by domain, drawn for fitting.

    The draw is keyed by ``seed`` and depends on the names of the responses, not on the order of the file.
    Each domain of two responses or more is on both sides; one with a single response is held out.

    Raises SpecsimError for a share outside (0, 1), and naming ``where`` if no domain has two responses.
    """
    if not 0 < fit_share < 1:
        raise SpecsimError(f"fit_share: {fit_share:g}, expected a number between 0 and 1")
    if seed < 0:
        raise SpecsimError(f"seed: {seed}, expected 0 or more")
    response = trace.responses()
    start = np.unique(response, return_index=True)[1]
    names = np.array(trace.request_ids, dtype=object)[trace.request_id[start]]
    rng = stream(seed, "split")
    chosen = np.zeros(len(start), dtype=bool)
    for code in np.argsort(np.array(trace.domains, dtype=object)):
        mine = np.flatnonzero(trace.domain[start] == code)
        mine = rng.permutation(mine[np.argsort(names[mine])])
        if len(mine) > 1:
            chosen[mine[: min(max(round(fit_share * len(mine)), 1), len(mine) - 1)]] = True
    if not chosen.any():
        raise SpecsimError(
            f"{where}: column 'request_id': one response a domain, expected two: one to fit, one to judge"
        )
    return chosen[response]


def judge(before: Floats, after: Floats, accepted: NDArray[np.int64], domain: NDArray[np.object_]) -> pd.DataFrame:
    """How two sets of confidences, float[n, γ], foretell the same ``accepted`` int[n]: a row a domain and position.

    ``domain`` [n] holds names; the domain "all" comes first. Columns: ``domain``, ``position``, ``count`` of
    blocks, ``observed`` survival, and ``predicted`` survival, its ``ece`` and its ``auc``, each with
    ``_before`` and ``_after``.
    """
    parts = {"all": np.ones(len(domain), dtype=bool)} | {str(name): domain == name for name in pd.unique(domain)}
    tables = []
    for name, rows in parts.items():
        old, new = (calibration_report(c[rows], accepted[rows]) for c in (before, after))
        table = old[["position", "count", "observed"]].copy()
        table.insert(0, "domain", name)
        for column in JUDGED:
            table[f"{column}_before"], table[f"{column}_after"] = old[column], new[column]
        tables.append(table)
    return pd.concat(tables, ignore_index=True)
