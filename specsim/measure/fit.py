"""From the measured grid to prices: a sum of a curve by tokens, one by sequences and one by KV tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from specsim.measure.grid import Grid
from specsim.measure.timing import Measured
from specsim.types import Bools, Floats, Ints, SpecsimError

LEAST_SECONDS = 1e-9
"""A size always costs something; the fit alone could put all of a price into sequences and KV tokens."""


@dataclass(frozen=True)
class Sum:
    """Seconds by ``tokens``, plus by ``num_seqs``, plus by ``kv_tokens``; the latter two linear between points.

    ``low`` and ``high`` are ``seconds`` less and plus what the quartiles of that size lie below and above their
    medians. ``predicted`` (seconds) and ``fitted`` are by measured point, in their order.
    """

    tokens: Ints
    seconds: Floats
    low: Floats
    high: Floats
    num_seqs: Ints
    seqs_seconds: Floats
    kv_tokens: Ints
    kv_seconds: Floats
    predicted: Floats
    fitted: Bools


SLIGHT = 1e-3
"""How much a part's size counts against it, beside how far the sum is from the medians."""


def decompose(measured: Sequence[Measured], grid: Grid) -> Sum:
    """The sum that is nearest to the medians of the verifying and prefilling points, in relative terms.

    By tokens any curve is taken (real ones are jagged), by sequences and KV tokens it never falls. Up to the
    grid's verify limit the points of verification are fitted, above it the prefill chunks; the others are only
    compared. A size that is padded to a graph counts as that graph's.
    """
    if not measured:
        raise SpecsimError("measured: expected at least one verifying point")
    points = [m.point for m in measured]
    tokens = np.array([grid.padded(p.tokens) for p in points])
    seqs = np.array([p.num_seqs for p in points])
    kv = np.array([p.kv_tokens for p in points])
    medians = np.array([m.quartiles[1] for m in measured])
    priced = ["verify" if t <= grid.verify_limit else "chunk" for t in tokens]
    fitted = np.array([p.kind == kind for p, kind in zip(points, priced, strict=True)])
    fitted |= ~np.isin(tokens, tokens[fitted])  # a size that has only the other kind is priced by that
    sizes = np.unique(tokens)
    seq_at, kv_at = _knots(seqs[fitted], 1), _knots(kv[fitted], 0)
    design = np.hstack([(tokens[:, None] == sizes).astype(float), _steps(seqs, seq_at), _steps(kv, kv_at)])
    weighted = design[fitted] / medians[fitted, None]
    # Where sequences and KV tokens hardly differ (one context, say), what could be either is put into tokens.
    slight = SLIGHT / np.median(medians) * np.eye(design.shape[1])[len(sizes) :]
    parts, _ = nnls(np.vstack([weighted, slight]), np.append(np.ones(len(weighted)), np.zeros(len(slight))))
    n, m = len(sizes), len(sizes) + len(seq_at) - 1
    seconds = np.maximum(parts[:n], LEAST_SECONDS)
    below, above = np.empty(n), np.empty(n)
    for i, size in enumerate(sizes):
        own = [m for m, f, t in zip(measured, fitted, tokens, strict=True) if f and t == size]
        below[i] = np.median([q[1] - q[0] for q in (m.quartiles for m in own)])
        above[i] = np.median([q[2] - q[1] for q in (m.quartiles for m in own)])
    return Sum(
        tokens=sizes,
        seconds=seconds,
        low=np.maximum(seconds - below, 0.0),
        high=seconds + above,
        num_seqs=seq_at,
        seqs_seconds=np.append(0.0, np.cumsum(parts[n:m])),
        kv_tokens=kv_at,
        kv_seconds=np.append(0.0, np.cumsum(parts[m:])),
        predicted=design @ np.concatenate([seconds, parts[n:]]),
        fitted=fitted,
    )


def relative_error(measured: Sequence[Measured], sum_: Sum) -> Floats:
    """Predicted over measured median, less one, by point."""
    return np.asarray(sum_.predicted / np.array([m.quartiles[1] for m in measured]) - 1)


def _knots(values: Ints, first: int) -> Ints:
    """``first``, the largest value, and a quarter and a sixteenth of that, if it is twice the smallest.

    Few, and from 0 straight on: reading KV takes time in proportion, and a knot at the smallest batch would
    let the fit move what every step costs into it.
    """
    least, most = int(values.min()), int(values.max())
    between = (n for n in (most // 16, most // 4) if n > first and n >= 2 * least)
    return np.array([first, *between, *([most] if most > first else [])])


def _steps(values: Ints, knots: Ints) -> Floats:
    """How far each value has come between each pair of neighbouring knots, [values, knots - 1], from 0 to 1."""
    return np.clip((values[:, None] - knots[:-1]) / np.diff(knots), 0.0, 1.0)
