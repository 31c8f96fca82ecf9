"""A sweep as one HTML file that needs nothing else: charts, a slider that reads them off, and where all of it is from.

The file asks nothing of the network, and its Content-Security-Policy sees to it: only its own scripts run, by their
hashes. The same sweep and inputs give the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from specsim.blocktrace import TOTAL
from specsim.engine import Policy, Scenario
from specsim.pareto import Front, half_width, pareto, sla_table
from specsim.report import charts, html
from specsim.report.drafts import drafter_section
from specsim.report.looks import palette
from specsim.report.sections import (
    MOST,
    amount,
    latency_section,
    load_section,
    made_section,
    read_off,
    sources_section,
    too_fast,
)
from specsim.report.sources import drafters, sources
from specsim.types import SpecsimError
from specsim.workload import Workload
from specsim.workload_file import WorkloadFile

__all__ = ["make_report", "too_fast"]

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {}"


def make_report(
    frame: pd.DataFrame,
    scenario: Scenario,
    policies: Sequence[Policy],
    workloads: Sequence[Workload],
    *,
    floors: Iterable[float] = (50.0, 80.0, 120.0),
    base_policy: str | None = None,
    demand: float | None = None,
    command: str = "",
    versions: Mapping[str, str] | None = None,
    files: Mapping[str, Path | None] | None = None,
    arrivals: WorkloadFile | None = None,
    notes: Sequence[str] = (),
    read: str = "",
) -> str:
    """Return the HTML page of ``frame``, the sweep of ``policies`` × ``workloads`` on ``scenario``.

    ``floors`` (tok/s/user) are read off in a table and offered beside the slider, which starts at the middle one;
    gains are over ``base_policy`` (default: the first). ``demand`` is what the page first asks GPUs for: users of a
    closed loop (default: 1000), requests/s of an open one (default: 100).
    ``command``, ``versions``, ``files`` (paths by option, or by the policy whose drafter it is), ``arrivals``,
    ``notes`` and ``read`` (where the numbers are from, if from a file) are told as they are.

    Raises SpecsimError for a sweep that ``pareto`` refuses, an unknown ``base_policy``, no floor or one that is not
    above 0, ``demand`` that is none (users are whole) or above a thousand million, and where the extra ``report`` is
    not installed.
    """
    floors = list(floors)
    if not floors or not all(math.isfinite(f) and f > 0 for f in floors):
        raise SpecsimError(f"report: floors: expected numbers above 0, got {floors}")
    frame = frame.assign(served=_served(frame))
    fronts = {str(domain): pareto(frame, str(domain)) for domain in frame["domain"].unique()}
    front = fronts[TOTAL]
    demand = _demand(front, demand)
    tables = {domain: sla_table(part, floors, base_policy) for domain, part in fronts.items()}
    slider = _slider(front, floors)
    specs: dict[str, charts.Spec] = {"front": charts.front_chart(front, float(slider["value"]))}
    sections = [
        read_off(front, tables, floors, slider, demand, base_policy or front.policies[0]),
        load_section(front, specs),
        latency_section(front, specs),
    ]
    drafts = drafters(scenario, policies)
    if drafts:
        bodies = "".join(drafter_section(i, d, scenario.calibrated, specs) for i, d in enumerate(drafts))
        sections.append(html.section("drafters", "What the drafters' blocks are worth", bodies))
    found = sources(scenario, policies, workloads, files or {}, arrivals)
    sections.append(sources_section(found))
    sections.append(made_section(frame, command, read, {**(versions or {}), **html.library_versions()}))
    scripts = {"library": html.library(), "readings": html.page_file("readings.js"), "page": html.page_file("page.js")}
    profile = scenario.profile
    return html.fill(
        "template.html",
        policy=POLICY.format(" ".join(html.hash_of(script) for script in scripts.values())),
        version=html.text((versions or {}).get("specsim", "")),
        title=html.text(f"{profile.model} on {profile.gpus}\u00a0×\u00a0{profile.device}"),
        lead=html.text(_lead(front)),
        style=palette() + html.page_file("page.css"),
        caveats=_caveats(front, frame, notes),
        drafter_link='<li><a href="#drafters">Drafters</a></li>' if drafts else "",
        sections="\n".join(sections),
        data=html.script_json({"front": _curves(front, scenario, base_policy), "charts": specs}),
        notices=html.page_file("notices.txt"),
        **scripts,
    )


def _demand(front: Front, demand: float | None) -> float:
    closed = front.workload == "closed"
    if demand is None:
        return 1000 if closed else 100
    if not 0 < demand <= MOST or (closed and demand != int(demand)):
        what = "users: expected a whole number" if closed else "requests/s: expected a number"
        raise SpecsimError(f"report: {what} above 0, {MOST:,} at most, got {demand:g}")
    return demand


def _served(frame: pd.DataFrame) -> Any:
    """What a GPU serves in every run: users of a closed loop, else the requests/s that were answered."""
    closed = frame["workload"].astype(str).str.startswith("closed")
    return np.where(closed, frame["load"], frame["request_rate"]) / frame["gpus"]


def _lead(front: Front) -> str:
    loads = np.unique(front.points["load"])
    last = amount(loads[-1], front.workload == "closed")
    span = last if len(loads) == 1 else f"{len(loads)} loads from {loads[0]:g} to {last}"
    seeds = int(front.points["seeds"].max())
    lines = "one seed, so no intervals" if seeds == 1 else f"{seeds} seeds each; bands and ± are 95 % intervals"
    count = len(front.policies)
    who, sell = ("one scheduler", "sells") if count == 1 else (f"{count} schedulers", "sell")
    return f"What {who} of speculative decoding {sell} at {span}, {lines}."


def _caveats(front: Front, frame: pd.DataFrame, notes: Sequence[str]) -> str:
    lines = [*front.caveats, *notes]
    if steps := int(frame.loc[frame["domain"] == TOTAL, "extrapolated_steps"].sum()):
        lines.append(f"{steps:,} steps were priced outside what the profile measured (extrapolated)")
    if not lines:
        return ""
    return '<div class="note" role="note">' + "".join(f"<p>{html.text(line)}</p>" for line in lines) + "</div>"


def _slider(front: Front, floors: list[float]) -> dict[str, str]:
    """Where the slider ends, at the most that anybody sells; its steps (every floor is one); where it starts."""
    top = float(front.points[front.x].max())
    decimals = max(0, 2 - math.floor(math.log10(top))) if top > 0 else 0
    while decimals < 6 and any(abs(f * 10**decimals - round(f * 10**decimals)) > 1e-6 for f in floors):
        decimals += 1
    end = math.floor(top * 10**decimals) / 10**decimals
    sold = [f for f in sorted(floors) if f <= end]
    value = sold[min((len(floors) - 1) // 2, len(sold) - 1)] if sold else end / 2
    return {"max": f"{end:.{decimals}f}", "step": f"{10.0**-decimals:g}", "value": f"{round(value, decimals):g}"}


def _curves(front: Front, scenario: Scenario, base_policy: str | None) -> dict[str, Any]:
    """What the page reads off: every policy's points in the order of load, and those of each seed."""

    def finite(rows: pd.DataFrame) -> pd.DataFrame:
        return rows.dropna(subset=[front.x, front.y])

    policies = []
    for policy in front.policies:
        points = finite(front.points[front.points["policy"] == policy])
        runs = front.runs[front.runs["policy"] == policy]
        seeds = {seed: finite(rows) for seed, rows in runs.groupby("seed")}
        policies.append({
            "name": policy, "x": points[front.x].tolist(), "y": points[front.y].tolist(),
            "served": points["served"].tolist(), "load": points["load"].tolist(),
            "ttft": points["ttft_p50"].tolist(), "ttft_late": points["ttft_p90"].tolist(),
            "seeds": {str(s): {"x": r[front.x].tolist(), "y": r[front.y].tolist()} for s, r in seeds.items()},
        })  # fmt: skip
    most = front.runs["seed"].nunique()
    # t/√n by n: the half-width of any n values over their deviation.
    factors = {n: half_width(np.arange(n)) / float(np.std(np.arange(n), ddof=1)) for n in range(2, most + 1)}
    base = front.policies.index(base_policy) if base_policy is not None else 0
    gpus = scenario.profile.gpus * (scenario.replicas if scenario.lockstep else 1)
    closed = front.workload == "closed"
    return {"policies": policies, "factors": factors, "base": base, "gpus": gpus, "closed": closed}
