"""Published curves of a deployment: throughput and verified tokens against concurrency.

The CSV has the columns figure, target, method, panel, x, y (others are ignored). Of the target, three
curves are read, all against concurrent requests per GPU:

- method MTP-1, panel throughput: output tok/s per GPU;
- method DSpark-<γ>, panel throughput;
- method DSpark-<γ>, panel budget: verified tokens per request and step, 1 + draft length.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from specsim.files import read_text
from specsim.types import SpecsimError

MTP = "MTP-1"
COLUMNS = ("figure", "target", "method", "panel", "x", "y")


@dataclass(frozen=True, eq=False)
class Curve:
    """A published curve: ``y`` at ``load`` (concurrent requests per GPU), linear between its vertices."""

    load: NDArray[np.float64]
    y: NDArray[np.float64]

    def at(self, load: float) -> float:
        """The curve at ``load``; NaN outside what was published."""
        return float(np.interp(load, self.load, self.y, left=np.nan, right=np.nan))

    def covers(self, load: float) -> bool:
        """Whether ``load`` lies within what was published."""
        return bool(self.load[0] <= load <= self.load[-1])


@dataclass(frozen=True, eq=False)
class Figures:
    """What was published of ``target``; its DSpark drafts blocks of ``gamma``."""

    target: str
    gamma: int
    mtp_throughput: Curve
    throughput: Curve
    verified: Curve

    @property
    def method(self) -> str:
        """The name of the method that is predicted."""
        return f"DSpark-{self.gamma}"

    def rows(self) -> pd.DataFrame:
        """Both throughput curves in the columns of a sweep, so that fronts are read off by one code.

        tps_per_request = throughput / concurrency, the interactivity (tok/s/user) of figures 7 and 8.
        """
        tables = []
        for method, curve in ((MTP, self.mtp_throughput), (self.method, self.throughput)):
            table = pd.DataFrame({"load": curve.load, "throughput": curve.y, "tps_per_request": curve.y / curve.load})
            tables.append(table.assign(policy=published(method), workload="closed", seed=0, domain="all"))
        return pd.concat(tables, ignore_index=True)


def published(method: str) -> str:
    """The label of the published curve of ``method``."""
    return f"{method} published"


def read_figures(path: str | Path, target: str) -> Figures:
    """Read the curves of ``target`` from the CSV ``path``.

    Raises SpecsimError, in one line that names the file, for a file that cannot be read, a missing
    column, an unknown target, a curve that is not there, and cells that are no numbers.
    """
    try:
        table = pd.read_csv(io.StringIO(read_text(path)), dtype=str, keep_default_na=False)
    except (pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        raise SpecsimError(f"{path}: expected a CSV table: {str(error).strip().splitlines()[-1]}") from error
    for column in COLUMNS:
        if column not in table.columns:
            raise SpecsimError(f"{path}: no column {column!r}, expected {', '.join(COLUMNS)}")
    table = table[table["panel"].isin(["throughput", "budget"])]
    known = list(dict.fromkeys(table.loc[table["panel"] == "throughput", "target"]))
    if target not in known:
        expected = f"one of {', '.join(known)}" if known else "rows with panel throughput, and there are none"
        raise SpecsimError(f"{path}: target: {target!r} has no throughput curve, expected {expected}")
    table = table[table["target"] == target]
    methods = [m for m in dict.fromkeys(table["method"]) if re.fullmatch(r"DSpark-[1-9][0-9]?", m)]
    if len(methods) != 1:
        found = ", ".join(methods) or "none"
        raise SpecsimError(f"{path}: target {target}: method: expected one DSpark-<block length>, found {found}")
    curves = [
        _curve(path, table, method, panel)
        for method, panel in ((MTP, "throughput"), (methods[0], "throughput"), (methods[0], "budget"))
    ]
    return Figures(target, int(methods[0].removeprefix("DSpark-")), *curves)


def _curve(path: str | Path, table: pd.DataFrame, method: str, panel: str) -> Curve:
    rows = table[(table["method"] == method) & (table["panel"] == panel)]
    where = f"{path}: {method}, panel {panel}"
    figures = list(dict.fromkeys(rows["figure"]))
    if len(figures) > 1:
        raise SpecsimError(f"{where}: expected the rows of one figure, found {', '.join(figures)}")
    cells = rows[["x", "y"]].to_numpy()
    values = pd.to_numeric(pd.Series(cells.ravel()), errors="coerce").to_numpy(dtype=np.float64).reshape(-1, 2)
    bad = ~np.isfinite(values)
    if bad.any():
        i, j = np.argwhere(bad)[0]
        # The header is line 1 of the file.
        raise SpecsimError(f"{where}: line {rows.index[i] + 2}: {'xy'[j]}: expected a number, got {cells[i, j]!r}")
    # At a concurrency of 0 nobody is served: that vertex has neither a step time nor a speed.
    values = values[values[:, 0] > 0]
    if len(values) < 2:
        raise SpecsimError(f"{where}: expected at least two points of concurrency above 0, found {len(values)}")
    load, y = values[np.argsort(values[:, 0], kind="stable")].T
    if (np.diff(load) == 0).any():
        twice = load[1:][np.diff(load) == 0][0]
        raise SpecsimError(f"{where}: x: {twice:g} is given twice, expected one point for each concurrency")
    if (y <= 0).any():
        raise SpecsimError(f"{where}: y: expected numbers above 0, got {y[y <= 0][0]:g} at x = {load[y <= 0][0]:g}")
    return Curve(load, y)
