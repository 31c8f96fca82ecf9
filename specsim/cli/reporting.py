"""report: a sweep as one HTML file."""

from __future__ import annotations

import platform
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import typer

from specsim.baseline import read_results
from specsim.cli import show
from specsim.cli.base import base_of
from specsim.cli.inputs import parse_numbers, split_policy, typed_command
from specsim.cli.made_of import check_results
from specsim.cli.options import RUN, Options, option, with_options
from specsim.cli.run import Jobs, Seeds, Speed, Ttft, print_caveats, run_all, slo_of, warn_extrapolated, warn_window
from specsim.files import check_apart, check_output, read_json, read_start, write_text
from specsim.metrics import window_warning
from specsim.pareto import caveats
from specsim.pareto import pareto as make_front
from specsim.types import SpecsimError
from specsim.workload import ClosedLoop
from specsim.workload_file import WorkloadFile

UNCHECKED = (
    "does not tell what it was made from: the numbers are its own, the assumptions below are as told on the command "
    "line, not checked."
)


@with_options
def report(
    options: Options,
    context: typer.Context,
    out: Annotated[Path, option("--out", help="The HTML file.", panel=RUN)] = Path("out/report.html"),
    results: Annotated[
        Path | None,
        option(
            "--results",
            help="Show the results.parquet of an earlier sweep of the same options (others are refused).",
            panel=RUN,
        ),
    ] = None,
    sla: Annotated[
        str, option("--sla", help="Interactivity floors to offer and to read off, tok/s/user.", panel=RUN)
    ] = "50,80,120",
    base: Annotated[
        str | None, option("--base", help="Policy that gains are over, by -s or label (default: the first).", panel=RUN)
    ] = None,
    users: Annotated[
        int | None,
        option(
            "--users",
            help="Users that the page first asks GPUs for: closed loops (default: 1000).",
            min=1,
            max=1_000_000_000,
            panel=RUN,
        ),
    ] = None,
    demand_rate: Annotated[
        float | None,
        option(
            "--demand-rate", help="Requests/s that the page first asks GPUs for: open loops (default: 100).", panel=RUN
        ),
    ] = None,
    seeds: Seeds = 3,
    jobs: Jobs = -1,
    slo_ttft: Ttft = None,
    slo_interactivity: Speed = None,
) -> None:
    """Write a sweep as one HTML page: fronts with a slider that reads them off, load, latency, drafters, sources.

    The file needs no network and no other file. Needs pip install 'specsim\\[report]'.

    Example: specsim report --profile hw_profiles/dsv4-flash-b300-tp4.json
    --trace traces/qwen3-4b-dspark.json -s NoSpec -s 'StaticGamma(3)' -s DSparkAsync --closed 1,4,16,64,256
    --max-num-batched-tokens 1024 --out out/report.html
    """
    from specsim.report import html, make_report, too_fast

    floors = parse_numbers("--sla", sla)
    if out.suffix.lower() not in (".html", ".htm"):
        raise SpecsimError(f"--out: expected a file name that ends in .html, got {out}")
    inputs = options.files() | ({"--results": [results]} if results else {})
    check_apart({"--out": out}, inputs)
    check_output("--out", out)
    html.check_library()
    scenario, policies, workloads = options.build()
    demand = _demand(users, demand_rate, closed=isinstance(workloads[0], ClosedLoop))
    base = base_of(base, [repr(policy) for policy in policies], options)
    notes, read = [], ""
    if results is not None:
        frame = read_results(results)
        if check_results(frame, results, context, options, (scenario, policies, workloads), seeds):
            read = f"read from {results}, which these options and input files made"
        else:
            notes.append(f"{results} {UNCHECKED}")
    else:
        frame = run_all(scenario, policies, workloads, seeds, jobs, slo_of(slo_ttft, slo_interactivity))
    warn_window(frame, needed=True)
    if short := window_warning(frame):
        notes.append(f"{short[:1].upper()}{short[1:]}.")
    named = zip(policies, options.scheduler or (), strict=False)
    own = {repr(policy): trace for policy, text in named if (trace := split_policy(text)[1])}
    page = make_report(
        frame,
        scenario,
        policies,
        workloads,
        floors=floors,
        base_policy=base,
        demand=demand,
        command=typed_command(context),
        versions=_versions(),
        files={"--profile": options.profile, "--trace": options.trace, "--arrivals": options.arrivals, **own},
        arrivals=_workload_file(options.arrivals),
        notes=notes,
        read=read,
    )
    write_text(out, page)
    console = show.console()
    unsold = too_fast(make_front(frame), floors)
    print_caveats([*caveats(frame), *([unsold] if unsold else [])])
    warn_extrapolated(int(frame["extrapolated_steps"].sum()))
    console.print(f"Wrote {out} ({len(page.encode()) / 1e6:.1f} MB): open it in a browser")


def _demand(users: int | None, rate: float | None, closed: bool) -> float | None:
    """What the page first asks GPUs for; SpecsimError where the loads are not of its kind."""
    if closed and rate is not None:
        raise SpecsimError("--demand-rate: has no meaning with --closed, expected --users")
    if users is not None and not closed:
        raise SpecsimError("--users: has no meaning with open arrivals, expected --demand-rate")
    if rate is not None and not 0 < rate <= 1e9:
        raise SpecsimError(f"--demand-rate: expected requests/s above 0, 1,000,000,000 at most, got {rate:g}")
    return users if closed else rate


def _workload_file(path: Path | None) -> WorkloadFile | None:
    """What a fitted workload's file says of itself; None where arrivals are recorded, or there are none."""
    if path is None or not path.is_file() or not read_start(path).startswith(b"{"):
        return None
    try:
        return read_json(path, WorkloadFile)
    except SpecsimError:  # JSON lines of recorded requests, which were read already
        return None


def _versions() -> dict[str, str]:
    return {
        "specsim": version("specsim"),
        "Python": platform.python_version(),
        "numpy": np.__version__,
        "pandas": pd.__version__,
    }
