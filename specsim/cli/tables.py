"""The tables that ``specsim simulate`` and ``specsim pareto`` print."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from rich import box
from rich.table import Table

from specsim.cli import show
from specsim.pareto import Front

RATE, TIME, SHARE = "rate", "time", "share"
"""How a number shows: as it is, seconds in ms, a share in %."""

# What metrics.summarize tells, in groups, named and with units as the engines' own benchmarks print them.
GROUPS: dict[str, list[tuple[str, str, str, bool]]] = {
    "Throughput": [  # column, label, how it shows, whether it shows unasked
        ("requests", "Requests measured", RATE, True),
        ("request_rate", "Request throughput (req/s)", RATE, True),
        ("throughput", "Output token throughput (tok/s/GPU)", RATE, True),
        ("goodput", "Goodput: requests within the SLO (req/s)", RATE, True),
        ("window_s", "Measurement window (s)", RATE, False),
        ("preemptions", "Preemptions", RATE, True),
        ("single_token_requests", "Requests of one token, without a TPOT", RATE, True),
    ],
    "Interactivity: what a user gets, 1/TPOT": [
        ("interactivity_mean", "Mean interactivity (tok/s/user)", RATE, False),
        ("interactivity_p50", "Median interactivity (tok/s/user)", RATE, True),
        ("interactivity_p10", "P10 interactivity, 90 % get more (tok/s/user)", RATE, True),
    ],
    "Latency": [
        ("ttft_mean", "Mean TTFT, time to first token (ms)", TIME, False),
        ("ttft_p50", "Median TTFT, time to first token (ms)", TIME, True),
        ("ttft_p90", "P90 TTFT (ms)", TIME, False),
        ("ttft_p95", "P95 TTFT (ms)", TIME, False),
        ("ttft_p99", "P99 TTFT (ms)", TIME, True),
        ("tpot_mean", "Mean TPOT, time per output token (ms)", TIME, False),
        ("tpot_p50", "Median TPOT, time per output token (ms)", TIME, True),
        ("tpot_p90", "P90 TPOT (ms)", TIME, False),
        ("tpot_p95", "P95 TPOT (ms)", TIME, False),
        ("tpot_p99", "P99 TPOT (ms)", TIME, True),
        ("itl_mean", "Mean ITL, gap between emissions (ms)", TIME, True),
        ("e2e_mean", "Mean E2EL, end to end (ms)", TIME, False),
        ("e2e_p50", "Median E2EL, end to end (ms)", TIME, True),
        ("e2e_p90", "P90 E2EL (ms)", TIME, False),
        ("e2e_p95", "P95 E2EL (ms)", TIME, False),
        ("e2e_p99", "P99 E2EL (ms)", TIME, True),
        ("queue_mean", "Mean wait for a seat (ms)", TIME, False),
    ],
    "Speculation: per request and cycle": [
        ("tau", "Tokens produced, bonus included (tau, τ)", RATE, True),
        ("verified_tokens", "Tokens verified, bonus included", RATE, True),
        ("acceptance_rate", "Accepted of verified draft tokens (%)", SHARE, True),
        ("waste", "Rejected of verified draft tokens (%)", SHARE, False),
        ("token_acceptance_rate", "Accepted, bonus counted on both sides (%)", SHARE, False),
    ],
}  # fmt: skip

QUIET = ("preemptions", "single_token_requests")
"""Nothing to tell where they are 0."""
ALWAYS = ("request_rate", "throughput")
"""Told even without a number: the measurement window was too short for one."""


def summary_table(title: str, summary: pd.DataFrame, everything: bool = False) -> Table:
    """Return the table of ``summary`` (metrics.summarize's): a column a domain, rows in groups.

    Shown are the main metrics, less those without a number or with nothing to tell; all of them with ``everything``.
    """
    groups = []
    for group, metrics in GROUPS.items():
        rows = [
            [f"  {label}", *(_cell(kind, value) for value in summary[name])]
            for name, label, kind, main in metrics
            if everything or (main and _tells(name, summary[name]))
        ]
        groups.append((group, rows))
    # Not narrower than its title, or the title would wrap.
    out = Table(title=title, min_width=len(title), box=box.SIMPLE_HEAD, title_justify="left", caption_justify="left")
    out.add_column("", no_wrap=True)
    for domain in summary["domain"]:
        out.add_column(str(domain), justify="right", no_wrap=True)
    for group, rows in groups:
        if rows:
            out.add_row(group)
        for row in rows:
            out.add_row(*row)
    steps = int(summary["steps"].iloc[0])
    out.caption = f"{steps:,} steps" + ("" if everything else "; --all shows every metric")
    return out


def sold_tables(front: Front, sold: pd.DataFrame, width: int) -> list[Table]:
    """What each policy sells at each floor, from ``sold``, the front's sla_table: tables no wider than ``width``."""
    title = "tok/s/GPU at a floor of tok/s/user (p50)" + (", all domains" if front.domain == "all" else "")
    rows = [[str(policy), *map(str, part["text"])] for policy, part in sold.groupby("policy", sort=False)]
    return _within(width, title, ["policy", *_floors(sold)], rows)


def gain_tables(sold: pd.DataFrame, base: str, width: int) -> list[Table]:
    """The gains of sla_table's ``sold`` over ``base``, paired by seed; none where there is nothing to compare."""
    others = sold[sold["policy"] != base]
    at_base = sold[sold["policy"] == base].set_index("floor")
    floors = [f for f in at_base.index if at_base.loc[f, "throughput"] > 0]
    if others.empty or not floors:
        return []
    rows = [
        [str(policy), *map(_gain, part.to_dict("records"))] for policy, part in others.groupby("policy", sort=False)
    ]
    missing = any(cell == "–" for row in rows for cell in row)
    why = "–: no number to compare there" if missing else None
    return _within(width, f"The same against {base}, paired by seed", ["policy", *_floors(sold)], rows, why)


def _within(width: int, title: str, heads: list[str], rows: list[list[str]], caption: str | None = None) -> list[Table]:
    """A table as several of its first column and as many others as fit in ``width`` characters, one at least."""
    wide = [max(len(cell) for cell in column) + 3 for column in zip(heads, *rows, strict=True)]
    parts: list[list[int]] = [[]]
    for at in range(1, len(heads)):
        if parts[-1] and wide[0] + sum(wide[i] for i in parts[-1]) + wide[at] > width:
            parts.append([])
        parts[-1].append(at)
    return [
        show.table(title, [heads[i] for i in (0, *part)], [[row[i] for i in (0, *part)] for row in rows], caption)
        for part in parts
    ]


def _floors(sold: pd.DataFrame) -> list[str]:
    return [f"≥ {floor:g}" for floor in sold["floor"].unique()]


def _gain(row: dict[Any, Any]) -> str:
    """A gain such as "+50.4 ± 5.4 %"; a bound where the policy's own throughput is one; a dash for none."""
    if np.isfinite(row["gain"]):
        around = f" ± {100 * row['gain_ci']:.1f}" if np.isfinite(row["gain_ci"]) else ""
        return f"{_signed(row['gain'])}{around} %"
    if np.isfinite(row["gain_at_least"]):
        return f"≥ {_signed(row['gain_at_least'])} %"
    return "–"


def _signed(share: float) -> str:
    return f"{100 * share:+.1f}".replace("-", "−")


def _tells(name: str, values: pd.Series[Any]) -> bool:
    return name in ALWAYS or bool((values > 0).any() if name in QUIET else values.notna().any())


def _cell(kind: str, value: Any) -> str:
    if kind == TIME:
        return show.milliseconds(value) if value == value else "–"
    if kind == SHARE:
        return f"{100 * value:.1f}" if value == value else "–"
    return show.number(value)
