"""Rows of a benchmark for ``profile fit``: one CSV row a load."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from specsim.files import csv_rows, read_text
from specsim.step_fit import Row
from specsim.types import SpecsimError

COLUMNS = (
    "method", "gamma", "concurrency", "throughput", "interactivity", "tau", "tau_low", "tau_high", "running",
    "prompt_tokens", "output_tokens", "role", "source", "note",
)  # fmt: skip
"""Columns that a file may have (the last two are not read), besides ``survival_1`` .. ``survival_γ``."""

MAX_GAMMA, MAX_CONCURRENCY, MAX_LENGTH, MAX_TOKENS = 64, 1e6, 1e7, 1 << 20
SPEEDS = (1e-3, 1e6)
"""Tokens/s of a request. Like those above, these only catch slips: nobody serves beyond them."""
ROUNDING = 0.05
"""By how much a throughput may exceed requests × interactivity. Figures are read off pictures, and one is a mean
where the other is a median: vLLM's for DeepSeek-V4-Pro (experiments/dsv4_pro_b300) disagree by up to 3.0 %."""
TAU_ROUNDING = 0.02
"""By how much a told τ may differ from that of the survivals beside it: both are rounded."""


def read_step_rows(path: str | Path) -> list[Row]:
    """Read the loads of a benchmark from a CSV file; lines that start with ``#`` are comments.

    Needed: ``concurrency`` and ``gamma`` (draft tokens verified for every request, 0 without speculation), and
    ``throughput`` (tokens/s of all GPUs), ``interactivity`` (tokens/s a user) or both. Optional: ``method`` (rows
    of one method share a τ, unknown or told; default ``gamma=K``), ``tau``, or ``tau_low`` and ``tau_high``, or
    ``survival_1`` .. (unconditional, by position; a ``tau`` beside them must be theirs); ``running`` (requests that
    decode at a time); mean ``prompt_tokens`` and ``output_tokens``; ``role``: fit (default) or check (predicted only).
    Raises SpecsimError naming file, row (1: the first below the header) and column, also where a throughput is
    more than its requests can read, or so little (less than one request, of half the requests at most) that it may
    be that of one GPU, unless ``running`` is told.
    """
    lines = ["" if line.startswith("#") else line.strip() for line in read_text(path).splitlines()]
    table = (cells for _, cells in csv_rows(path, lines, skipinitialspace=True) if cells)
    heads = [name.strip() for name in next(table, [])]
    for i, name in enumerate(heads):
        if name in heads[:i]:
            raise SpecsimError(f"{path}: column {name!r}: stands twice in the header, expected each column once")
        if name not in COLUMNS and not re.fullmatch(r"survival_[1-9]\d*", name):
            raise SpecsimError(
                f"{path}: column {name!r}: expected one of {', '.join(COLUMNS)}, survival_1, survival_2, .."
            )
    for name in ("concurrency", "gamma"):
        if name not in heads:
            raise SpecsimError(f"{path}: expected a column {name}")
    rows = []
    for i, cells in enumerate(table, start=1):
        if len(cells) != len(heads):
            raise SpecsimError(f"{path}: row {i}: expected {len(heads)} cells, as in the header")
        rows.append(_row(f"{path}: row {i}", dict(zip(heads, (cell.strip() for cell in cells), strict=True))))
    if not rows:
        raise SpecsimError(f"{path}: expected at least one row below the header")
    return rows


def _row(where: str, cells: dict[str, str]) -> Row:
    def number(name: str, low: float, high: float = math.inf, *, least: bool = False) -> float | None:
        text = cells.get(name, "")
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (value >= low if least else value > low) or not value <= high or math.isinf(value):
            bound = f"{low:g} or more" if least else f"above {low:g}"
            bound += f", {high:,.0f} at most" if value > high else ""
            raise SpecsimError(f"{where}: {name}: expected a number {bound}, got {text!r}")
        return value

    gamma, concurrency = number("gamma", 0, MAX_GAMMA, least=True), number("concurrency", 0, MAX_CONCURRENCY)
    if gamma is None or gamma != int(gamma):
        raise SpecsimError(
            f"{where}: gamma: expected a whole number of draft tokens, 0 or more, got {cells['gamma']!r}"
        )
    if concurrency is None:
        raise SpecsimError(f"{where}: concurrency: expected a number above 0, got nothing")
    throughput, interactivity = number("throughput", 0), number("interactivity", *SPEEDS, least=True)
    if throughput is None and interactivity is None:
        raise SpecsimError(f"{where}: expected a throughput or an interactivity")
    role = cells.get("role") or "fit"
    if role not in ("fit", "check"):
        raise SpecsimError(f"{where}: role: expected fit or check, got {role!r}")
    tau, tau_range = _tau(where, int(gamma), number, [name for name in cells if name.startswith("survival_")])
    running = number("running", 0)
    if running is not None and running > concurrency:
        raise SpecsimError(f"{where}: running: expected at most the concurrency {concurrency:g}, got {running:g}")
    prompt = number("prompt_tokens", 0, MAX_LENGTH, least=True) or 0.0
    output = number("output_tokens", 1, MAX_LENGTH, least=True) or 0.0
    if prompt and not output:
        raise SpecsimError(f"{where}: output_tokens: expected a number of 1 or more beside prompt_tokens")
    row = Row(
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
    _check(where, row)
    return row


def _check(where: str, row: Row) -> None:
    """SpecsimError where the numbers of a row cannot be true together."""
    requests = row.concurrency if row.running is None else row.running
    if row.throughput is not None and row.interactivity is not None:
        most = requests * row.interactivity
        if row.throughput > most * (1 + ROUNDING):
            raise SpecsimError(
                f"{where}: throughput, interactivity: {requests:g} requests that read {row.interactivity:g} tokens/s "
                f"each make at most {most:g}, got a throughput of {row.throughput:g}"
            )
        if row.throughput < row.interactivity and _may_be_per_gpu(row):
            raise SpecsimError(
                f"{where}: throughput, interactivity: {row.throughput:g} tokens/s are {row.decoding:.3g} requests that "
                f"read {row.interactivity:g} each, of {row.concurrency:g}: is the throughput per GPU? expected "
                "tokens/s of all GPUs, or a running that says so"
            )
    low, high = SPEEDS
    if not low <= row.speed <= high:
        raise SpecsimError(
            f"{where}: throughput: expected {low:g} to {high:,.0f} tokens/s for each of {requests:g} requests, "
            f"got {row.speed:g}"
        )
    tokens = row.tokens(1.0 + row.gamma)
    if tokens > MAX_TOKENS:
        raise SpecsimError(
            f"{where}: concurrency, gamma and prompt_tokens: expected at most {MAX_TOKENS:,} tokens in a step, got "
            f"{tokens:,.0f}"
        )


def _may_be_per_gpu(row: Row) -> bool:
    """Whether at most half of the requests decode, going by the two figures alone: what 2 GPUs or more divide by.

    One user whose prompts take a third of the time stays above: 0.67 of a request decodes.
    """
    if row.throughput is None or row.interactivity is None or row.running is not None:
        return False
    return row.throughput <= row.concurrency * row.interactivity / 2 * (1 + ROUNDING)


def doubtful_throughputs(rows: Sequence[Row]) -> list[str]:
    """A line for each row of the least load at which half the requests or fewer decode: they hardly queue there."""
    pairs = [(i, r) for i, r in enumerate(rows, 1) if r.throughput is not None and r.interactivity is not None]
    least = min((row.concurrency for _, row in pairs), default=0)
    return [
        f"row {i} ({row.method} at concurrency {row.concurrency:g}): throughput / interactivity are "
        f"{row.decoding:.3g} requests: is the throughput per GPU? expected tokens/s of all GPUs"
        for i, row in pairs
        if row.concurrency == least and _may_be_per_gpu(row)
    ]


def _tau(
    where: str, gamma: int, number: Callable[..., float | None], survivals: list[str]
) -> tuple[float | None, tuple[float, float] | None]:
    """The τ of a row, or the range it lies in."""
    tau, low, high = number("tau", 1, least=True), number("tau_low", 1, least=True), number("tau_high", 1, least=True)
    rates = [number(name, 0, least=True) for name in sorted(survivals, key=lambda n: int(n.removeprefix("survival_")))]
    told = [rate for rate in rates if rate is not None]
    ends = {name: value for name, value in (("tau_low", low), ("tau_high", high)) if value is not None}
    if ends and (tau is not None or told):
        raise SpecsimError(
            f"{where}: {', '.join(['survival_1' if tau is None else 'tau', *ends])}: expected tau, or survival_1, .., "
            f"or tau_low and tau_high, not two of them"
        )
    if told:
        if len(told) != gamma or any(b > a for a, b in zip([1.0, *told], told, strict=False)):
            raise SpecsimError(f"{where}: survival_K: expected {gamma} shares that do not increase, got {told}")
        total = 1 + sum(told)
        if tau is not None and abs(tau / total - 1) > TAU_ROUNDING:
            raise SpecsimError(
                f"{where}: tau, survival_1, ..: expected a tau of 1 + the survivals = {total:g}, got {tau:g}"
            )
        tau = total if tau is None else tau
    for name, value in (("tau", tau), ("tau_high", high)):
        if value is not None and value > 1 + gamma:
            raise SpecsimError(f"{where}: {name}: expected at most 1 + gamma = {1 + gamma}, got {value:g}")
    if tau is not None or (low is None and high is None):
        return tau, None
    low, high = low or 1.0, high or 1.0 + gamma
    if high < low:
        raise SpecsimError(f"{where}: tau_high: expected at least tau_low = {low:g}, got {high:g}")
    return None, (low, high)
