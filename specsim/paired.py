"""A against B, seed by seed: runs of one seed share arrivals, lengths and blocks, so that most of the noise cancels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from specsim.engine import Policy
from specsim.pareto import half_width, pareto
from specsim.types import SpecsimError


def paired(frame: pd.DataFrame, metric: str, policy: Any, against: Any, *, domain: str = "all") -> pd.DataFrame:
    """Return how ``policy`` does beside ``against`` in ``metric``, at each load of a sweep's table that both have.

    Policies are labels (``"StaticGamma(3)"``), schedulers or Policy pairs. One row a load: ``load``; ``seeds``, the
    number that both have; the means over them, ``value`` and ``value_against`` (in the metric's units); the mean over
    seeds of ``difference`` (value − against) and ``ratio`` (value / against), with the half-widths of their 95 %
    intervals, ``difference_ci`` and ``ratio_ci``: where that of the difference holds 0, it may be noise. Intervals are
    NaN with one seed, or where a seed lacks the metric; the ratio where a seed of ``against`` has 0.

    Raises SpecsimError for a table that ``pareto`` refuses, an unknown policy, metric or domain, and no common load and
    seed.
    """
    front = pareto(frame, domain, y=metric)
    labels = [p if isinstance(p, str) else repr(p if isinstance(p, Policy) else Policy(p)) for p in (policy, against)]
    for label in labels:
        if label not in front.policies:
            raise SpecsimError(f"policy: {label!r} is not in the sweep, expected one of {', '.join(front.policies)}")
    columns = ["load", "seed", metric]
    one, other = (front.runs.loc[front.runs["policy"] == label, columns] for label in labels)
    sides = one.merge(other, on=["load", "seed"], suffixes=("", "_against")).sort_values(["load", "seed"])
    if sides.empty:
        raise SpecsimError(f"sweep: {labels[0]} and {labels[1]} have no load and seed in common")
    rows = []
    for load, part in sides.groupby("load"):
        a, b = part[[metric, f"{metric}_against"]].to_numpy(dtype=np.float64).T
        ratio = np.divide(a, b, out=np.full(len(a), np.nan), where=b != 0)
        row = {"load": load, "seeds": len(part), "value": a.mean(), "value_against": b.mean()}
        for name, values in (("difference", a - b), ("ratio", ratio)):
            row |= {name: values.mean(), f"{name}_ci": half_width(values)}
        rows.append(row)
    return pd.DataFrame(rows)
