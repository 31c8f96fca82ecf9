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
from specsim.cli.inputs import parse_numbers, typed_command
from specsim.cli.made_of import check_made_of
from specsim.cli.options import RUN, Options, option, with_options
from specsim.cli.run import Jobs, Seeds, Speed, Ttft, print_caveats, run_all, slo_of, warn_extrapolated
from specsim.engine import Policy, Scenario
from specsim.files import check_apart, check_output, read_json, read_start, write_text
from specsim.pareto import caveats
from specsim.types import SpecsimError
from specsim.workload import Workload
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
        int,
        option(
            "--users",
            help="Users that the page asks GPUs for, until another number is typed.",
            min=1,
            max=1_000_000_000,
            panel=RUN,
        ),
    ] = 1000,
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
    from specsim.report import html, make_report

    floors = parse_numbers("--sla", sla)
    if out.suffix.lower() not in (".html", ".htm"):
        raise SpecsimError(f"--out: expected a file name that ends in .html, got {out}")
    inputs = options.files() | ({"--results": [results]} if results else {})
    check_apart({"--out": out}, inputs)
    check_output("--out", out)
    html.check_library()
    scenario, policies, workloads = options.build()
    base = base_of(base, [repr(policy) for policy in policies], options)
    notes = []
    if results is not None:
        frame = read_results(results)
        _check_same(frame, results, scenario, policies, workloads)
        usual = str(context.get_parameter_source("seeds")).endswith(".DEFAULT")
        if check_made_of(frame, results, options, None if usual else seeds):
            notes.append(f"The numbers are read from {results}, which these options and input files made.")
        else:
            notes.append(f"{results} {UNCHECKED}")
    else:
        frame = run_all(scenario, policies, workloads, seeds, jobs, slo_of(slo_ttft, slo_interactivity))
    page = make_report(
        frame,
        scenario,
        policies,
        workloads,
        floors=floors,
        base_policy=base,
        users=users,
        command=typed_command(context),
        versions=_versions(),
        files={"--profile": options.profile, "--trace": options.trace, "--arrivals": options.arrivals},
        arrivals=_workload_file(options.arrivals),
        notes=notes,
    )
    write_text(out, page)
    console = show.console()
    print_caveats(caveats(frame))
    warn_extrapolated(int(frame["extrapolated_steps"].sum()))
    console.print(f"Wrote {out} ({len(page.encode()) / 1e6:.1f} MB): open it in a browser")


def _check_same(
    frame: pd.DataFrame, path: Path, scenario: Scenario, policies: list[Policy], workloads: list[Workload]
) -> None:
    """See that a results.parquet has the policies, workloads and profile of these options, as far as it tells them."""
    expected = {
        "policy": {repr(policy) for policy in policies},
        "workload": {workload.label for workload in workloads},
        "profile": {scenario.profile.name},
    }
    for column in (*expected, "seed", "domain", "request_rate", "e2e_mean", "gpus", "extrapolated_steps"):
        if column not in frame.columns:
            raise SpecsimError(f"{path}: no column {column!r}, expected the results.parquet of specsim sweep or pareto")
    for column, names in expected.items():
        found = {str(name) for name in frame[column].unique()}
        if found != names:
            raise SpecsimError(
                f"{path}: column {column!r}: expected {', '.join(sorted(names))}, as the options say, "
                f"got {', '.join(sorted(found))}"
            )


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
