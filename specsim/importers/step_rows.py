"""Rows of a benchmark for ``profile fit``: one CSV row a load."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable
from pathlib import Path

from specsim.files import read_text
from specsim.step_fit import Row
from specsim.types import SpecsimError

COLUMNS = (
    "method", "gamma", "concurrency", "throughput", "interactivity", "tau", "tau_low", "tau_high", "running",
    "prompt_tokens", "output_tokens", "role", "source", "note",
)  # fmt: skip
"""Columns that a file may have (the last two are not read), besides ``survival_1`` .. ``survival_γ``."""


def read_step_rows(path: str | Path) -> list[Row]:
    """Read the loads of a benchmark from a CSV file; lines that start with ``#`` are comments.

    Needed: ``concurrency`` and ``gamma`` (draft tokens verified for every request, 0 without speculation), and
    ``throughput`` (tokens/s of all GPUs), ``interactivity`` (tokens/s a user) or both. Optional: ``method`` (rows
    of one method share an unknown τ; default ``gamma=K``), ``tau``, or ``tau_low`` and ``tau_high``, or
    ``survival_1`` .. (unconditional, by position); ``running`` (requests that decode at a time); mean
    ``prompt_tokens`` and ``output_tokens``; ``role``: fit (default) or check (predicted only).
    Raises SpecsimError naming file, row (1: the first below the header) and column.
    """
    lines = [line for line in read_text(path).splitlines() if line.strip() and not line.startswith("#")]
    table = csv.DictReader(lines, skipinitialspace=True)
    heads = [name.strip() for name in table.fieldnames or ()]
    table.fieldnames = heads
    for name in heads:
        if name not in COLUMNS and not re.fullmatch(r"survival_[1-9]\d*", name):
            raise SpecsimError(
                f"{path}: column {name!r}: expected one of {', '.join(COLUMNS)}, survival_1, survival_2, .."
            )
    for name in ("concurrency", "gamma"):
        if name not in heads:
            raise SpecsimError(f"{path}: expected a column {name}")
    rows = []
    for i, cells in enumerate(table, start=1):
        if None in cells or None in cells.values():
            raise SpecsimError(f"{path}: row {i}: expected {len(heads)} cells, as in the header")
        rows.append(_row(f"{path}: row {i}", {name: cell.strip() for name, cell in cells.items()}))
    if not rows:
        raise SpecsimError(f"{path}: expected at least one row below the header")
    return rows


def _row(where: str, cells: dict[str, str]) -> Row:
    def number(name: str, low: float, *, least: bool = False) -> float | None:
        text = cells.get(name, "")
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (value >= low if least else value > low) or math.isinf(value):
            bound = f"{low:g} or more" if least else f"above {low:g}"
            raise SpecsimError(f"{where}: {name}: expected a number {bound}, got {text!r}")
        return value

    gamma, concurrency = number("gamma", 0, least=True), number("concurrency", 0)
    if gamma is None or gamma != int(gamma):
        raise SpecsimError(
            f"{where}: gamma: expected a whole number of draft tokens, 0 or more, got {cells['gamma']!r}"
        )
    if concurrency is None:
        raise SpecsimError(f"{where}: concurrency: expected a number above 0, got nothing")
    throughput, interactivity = number("throughput", 0), number("interactivity", 0)
    if throughput is None and interactivity is None:
        raise SpecsimError(f"{where}: expected a throughput or an interactivity")
    role = cells.get("role") or "fit"
    if role not in ("fit", "check"):
        raise SpecsimError(f"{where}: role: expected fit or check, got {role!r}")
    tau, tau_range = _tau(where, int(gamma), number, [name for name in cells if name.startswith("survival_")])
    running = number("running", 0)
    if running is not None and running > concurrency:
        raise SpecsimError(f"{where}: running: expected at most the concurrency {concurrency:g}, got {running:g}")
    prompt, output = number("prompt_tokens", 0, least=True) or 0.0, number("output_tokens", 0) or 0.0
    if prompt and not output:
        raise SpecsimError(f"{where}: output_tokens: expected a number above 0 beside prompt_tokens")
    return Row(
        method=cells.get("method") or f"gamma={int(gamma)}",
        gamma=int(gamma),
        concurrency=concurrency,
        throughput=throughput,
        interactivity=interactivity,
        tau=tau,
        tau_range=tau_range,
        running=running,
        prompt_tokens=prompt,
        output_tokens=output,
        check=role == "check",
    )


def _tau(
    where: str, gamma: int, number: Callable[..., float | None], survivals: list[str]
) -> tuple[float | None, tuple[float, float] | None]:
    """The τ of a row, or the range it lies in."""
    tau, low, high = number("tau", 1, least=True), number("tau_low", 1, least=True), number("tau_high", 1, least=True)
    rates = [number(name, 0, least=True) for name in sorted(survivals, key=lambda n: int(n.removeprefix("survival_")))]
    told = [rate for rate in rates if rate is not None]
    if told:
        if len(told) != gamma or any(b > a for a, b in zip([1.0, *told], told, strict=False)):
            raise SpecsimError(f"{where}: survival_K: expected {gamma} shares that do not increase, got {told}")
        tau = 1 + sum(told) if tau is None else tau
    for name, value in (("tau", tau), ("tau_high", high)):
        if value is not None and value > 1 + gamma:
            raise SpecsimError(f"{where}: {name}: expected at most 1 + gamma = {1 + gamma}, got {value:g}")
    if tau is not None or (low is None and high is None):
        return tau, None
    low, high = low or 1.0, high or 1.0 + gamma
    if high < low:
        raise SpecsimError(f"{where}: tau_high: expected at least tau_low = {low:g}, got {high:g}")
    return None, (low, high)
