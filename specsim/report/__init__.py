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
from specsim.report.sections import MOST_USERS, latency_section, load_section, made_section, read_off, sources_section
from specsim.report.sources import drafters, sources
from specsim.types import SpecsimError
from specsim.workload import Workload
from specsim.workload_file import WorkloadFile

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {}"


def make_report(
    frame: pd.DataFrame,
    scenario: Scenario,
    policies: Sequence[Policy],
    workloads: Sequence[Workload],
    *,
    floors: Iterable[float] = (50.0, 80.0, 120.0),
    base_policy: str | None = None,
    users: int = 1000,
    command: str = "",
    versions: Mapping[str, str] | None = None,
    files: Mapping[str, Path | None] | None = None,
    arrivals: WorkloadFile | None = None,
    notes: Sequence[str] = (),
) -> str:
    """Return the HTML page of ``frame``, the sweep of ``policies`` × ``workloads`` on ``scenario``.

    ``floors`` (tok/s/user) are read off in a table and offered beside the slider, which starts at the middle one;
    gains are over ``base_policy`` (default: the first). ``users`` is the demand that the page first asks GPUs for.
    ``command``, ``versions``, ``files`` (paths by option), ``arrivals`` and ``notes`` are told as they are.

    Raises SpecsimError for a sweep that ``pareto`` refuses, an unknown ``base_policy``, no floor or one that is not
    above 0, ``users`` outside 1 to a thousand million, and where the extra ``report`` is not installed.
    """
    floors = list(floors)
    if not floors or not all(math.isfinite(f) and f > 0 for f in floors):
        raise SpecsimError(f"report: floors: expected numbers above 0, got {floors}")
    if not 1 <= users <= MOST_USERS:
        raise SpecsimError(f"report: users: expected a whole number from 1 to {MOST_USERS:,}, got {users}")
    frame = frame.assign(users=_users(frame))
    fronts = {str(domain): pareto(frame, str(domain)) for domain in frame["domain"].unique()}
    front = fronts[TOTAL]
    tables = {domain: sla_table(part, floors, base_policy) for domain, part in fronts.items()}
    slider = _slider(front, floors)
    specs: dict[str, charts.Spec] = {"front": charts.front_chart(front, slider["value"])}
    sections = [
        read_off(front, tables, floors, slider, users, base_policy or front.policies[0]),
        load_section(front, specs),
        latency_section(front, specs),
    ]
    drafts = drafters(scenario, policies)
    if drafts:
        bodies = "".join(drafter_section(i, d, scenario.calibrated, specs) for i, d in enumerate(drafts))
        sections.append(html.section("drafters", "What the drafters' blocks are worth", bodies))
    found = sources(scenario, policies, workloads, files or {}, arrivals)
    sections.append(sources_section(found))
    sections.append(made_section(frame, command, {**(versions or {}), **html.library_versions()}))
    scripts = {"library": html.library(), "readings": html.page_file("readings.js"), "page": html.page_file("page.js")}
    profile = scenario.profile
    return html.fill(
        "template.html",
        policy=POLICY.format(" ".join(html.hash_of(script) for script in scripts.values())),
        version=html.text((versions or {}).get("specsim", "")),
        title=html.text(f"{profile.model} on {profile.gpus}\u00a0×\u00a0{profile.device}"),
        lead=html.text(_lead(front)),
        style=charts.palette() + html.page_file("page.css"),
        caveats=_caveats(front, frame, notes),
        drafter_link='<li><a href="#drafters">Drafters</a></li>' if drafts else "",
        sections="\n".join(sections),
        data=html.script_json({"front": _curves(front, scenario, base_policy), "charts": specs}),
        notices=html.page_file("notices.txt"),
        **scripts,
    )


def _users(frame: pd.DataFrame) -> Any:
    """Users per GPU of every run: those of a closed loop, else the requests in flight, by Little's law."""
    closed = frame["workload"].astype(str).str.startswith("closed")
    in_flight = frame["request_rate"] * frame["e2e_mean"]
    return np.where(closed, frame["load"], in_flight) / frame["gpus"]


def _lead(front: Front) -> str:
    loads = np.unique(front.points["load"])
    what = "users" if front.workload == "closed" else "requests/s"
    span = (
        f"{loads[0]:g} {what}" if len(loads) == 1 else f"{len(loads)} loads from {loads[0]:g} to {loads[-1]:g} {what}"
    )
    seeds = int(front.points["seeds"].max())
    lines = "one seed, so no intervals" if seeds == 1 else f"{seeds} seeds each; bands and ± are 95 % intervals"
    count = len(front.policies)
    return f"What {count} scheduler{'s' if count > 1 else ''} of speculative decoding sell at {span}, {lines}."


def _caveats(front: Front, frame: pd.DataFrame, notes: Sequence[str]) -> str:
    lines = [*front.caveats, *notes]
    if steps := int(frame.loc[frame["domain"] == TOTAL, "extrapolated_steps"].sum()):
        lines.append(f"{steps:,} steps were priced outside what the profile measured (extrapolated)")
    if not lines:
        return ""
    return '<div class="note" role="note">' + "".join(f"<p>{html.text(line)}</p>" for line in lines) + "</div>"


def _slider(front: Front, floors: list[float]) -> dict[str, float]:
    """Where the slider ends, what its steps are (every floor is one) and where it starts."""
    top = float(front.points[front.x].max())
    decimals = max(0, 2 - math.floor(math.log10(top))) if top > 0 else 0
    while decimals < 6 and any(abs(f * 10**decimals - round(f * 10**decimals)) > 1e-6 for f in floors):
        decimals += 1
    step = 10.0**-decimals
    middle = sorted(floors)[(len(floors) - 1) // 2]
    value = middle if middle <= top else round(top / 2, decimals)
    return {"max": math.ceil(max(top, *floors) / step) * step, "step": step, "value": value}


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
            "users": points["users"].tolist(), "load": points["load"].tolist(),
            "seeds": {str(s): {"x": r[front.x].tolist(), "y": r[front.y].tolist()} for s, r in seeds.items()},
        })  # fmt: skip
    most = front.runs["seed"].nunique()
    # t/√n by n: the half-width of any n values over their deviation.
    factors = {n: half_width(np.arange(n)) / float(np.std(np.arange(n), ddof=1)) for n in range(2, most + 1)}
    base = front.policies.index(base_policy) if base_policy is not None else 0
    gpus = scenario.profile.gpus * (scenario.replicas if scenario.lockstep else 1)
    return {"policies": policies, "factors": factors, "base": base, "gpus": gpus}
