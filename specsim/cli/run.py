"""simulate, sweep and pareto."""

from __future__ import annotations

import shlex
import sys
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from specsim.baseline import note_floors, note_made_of, read_results
from specsim.cli import show
from specsim.cli.base import base_of
from specsim.cli.inputs import is_said, parse_numbers
from specsim.cli.made_of import check_counted, check_results
from specsim.cli.options import MOST_SEEDS, RUN, Options, option, with_options
from specsim.cli.tables import gain_tables, sold_tables, summary_table
from specsim.crossovers import crossover_lines, crossovers
from specsim.engine import Policy, Scenario
from specsim.engine import simulate as simulate_once
from specsim.files import check_apart, check_folder, check_output, write_atomic
from specsim.metrics import summarize, window_warning
from specsim.pareto import caveats, sla_table
from specsim.pareto import pareto as make_front
from specsim.sweep import sweep as run_sweep
from specsim.types import SLO, SpecsimError
from specsim.workload import Workload

Out = Annotated[Path | None, option("--out", help="Folder for result files.", panel=RUN)]
Json = Annotated[Path | None, option("--json", help="Also write the results as JSON here.", panel=RUN)]
Seeds = Annotated[
    int,
    option("--seeds", help="Repetitions, seeds 0, 1, ...: they make the intervals.", min=1, max=MOST_SEEDS, panel=RUN),
]
Jobs = Annotated[int, option("--jobs", help="Processes (-1: one a core).", panel=RUN)]
Ttft = Annotated[
    float | None,
    option("--slo-ttft", help="Goodput counts requests with at most these seconds to the first token.", panel=RUN),
]
Speed = Annotated[
    float | None,
    option("--slo-interactivity", help="Goodput counts requests with at least these tok/s.", panel=RUN),
]

RESULTS = ["results.parquet", "results.csv"]

SHOWN = {
    "throughput": "tok/s/GPU",
    "interactivity_p50": "tok/s/user p50",
    "interactivity_p10": "p10",
    "tau": "tau",
    "verified_tokens": "verified/req",
    "acceptance_rate": "accepted",
}


@with_options
def simulate(
    options: Options,
    seed: Annotated[int, option("--seed", help="Seed of all random streams.", panel=RUN)] = 0,
    steps: Annotated[bool, option("--steps", help="With --out: keep the step table too.", panel=RUN)] = False,
    all: Annotated[bool, option("--all", help="Print every metric, not the main ones alone.", panel=RUN)] = False,
    out: Out = None,
    json: Json = None,
    slo_ttft: Ttft = None,
    slo_interactivity: Speed = None,
) -> None:
    """Run one scenario once and print what it was worth.

    Example: specsim simulate --profile hw_profiles/dsv4-flash-b300-tp4.json
    --trace traces/qwen3-4b-dspark.json -s 'DSparkAsync(staleness=2)' --closed 64
    """
    if steps and out is None:
        raise SpecsimError("--steps: has no meaning without --out, the folder that the step table goes to")
    _check_outputs(out, ["requests.parquet", *["steps.parquet"] * steps], json, options.files())
    slo = slo_of(slo_ttft, slo_interactivity)
    base, policies, workloads = options.build()
    if len(policies) > 1 or len(workloads) > 1:
        raise SpecsimError("simulate: expected one scheduler and one load; sweep and pareto take several")
    with show.progress("requests simulated") as report:
        result = simulate_once(base.with_policy(policies[0]), seed, steps=steps, progress=report)
    summary = summarize(result, slo)
    title = f"{result.label}, {base.workload.label}, seed {seed}"
    show.console().print(summary_table(title, summary, all))
    notes = [base.profile.caveat] if base.profile.caveat else []
    print_caveats(notes)
    warn_window(summary)
    warn_extrapolated(result.extrapolated_steps)
    if out is not None:
        write_atomic(out / "requests.parquet", result.requests.to_parquet)
        if result.steps is not None:
            write_atomic(out / "steps.parquet", result.steps.to_parquet)
    if json is not None:
        data = {"policy": result.label, "seed": seed, "caveats": notes, "metrics": summary.to_dict("records")}
        show.write_json_file(json, data)


@with_options
def sweep(
    options: Options,
    seeds: Seeds = 3,
    jobs: Jobs = -1,
    out: Out = None,
    json: Json = None,
    slo_ttft: Ttft = None,
    slo_interactivity: Speed = None,
) -> None:
    """Run every scheduler at every load and seed; one row each, to a table and to files.

    Example: specsim sweep --profile hw_profiles/dsv4-flash-b300-tp4.json
    --trace traces/qwen3-4b-dspark.json -s NoSpec -s DSparkGreedy --closed 1,8,64 --out out/sweep
    """
    _check_outputs(out, RESULTS, json, options.files())
    frame = _sweep(options, options.build(), seeds, jobs, slo_of(slo_ttft, slo_interactivity))
    warn_window(frame)
    overall = frame[frame["domain"] == "all"]
    mean = overall.groupby(["policy", "load"], sort=False)[list(SHOWN)].mean().reset_index()
    rows = [[r["policy"], *(r[c] for c in ("load", *SHOWN))] for _, r in mean.iterrows()]
    show.console().print(show.table("Means over seeds", ["policy", "load", *SHOWN.values()], rows))
    print_caveats(caveats(frame))
    warn_extrapolated(int(frame["extrapolated_steps"].sum()))
    if out is not None:
        _write_results(frame, out)
    if json is not None:
        show.write_json_file(
            json, {"command": command_line(), "caveats": caveats(frame), "rows": frame.to_dict("records")}
        )


@with_options
def pareto(
    options: Options,
    context: typer.Context,
    results: Annotated[
        Path | None,
        option(
            "--results",
            help="Draw the results.parquet of an earlier sweep instead of simulating (other options than its are "
            "refused).",
            panel=RUN,
        ),
    ] = None,
    sla: Annotated[str, option("--sla", help="Interactivity floors to read off, tok/s/user.", panel=RUN)] = "50,80,120",
    base: Annotated[
        str | None,
        option("--base", help="Policy that gains are over, by -s or label (default: the first).", panel=RUN),
    ] = None,
    seeds: Seeds = 3,
    jobs: Jobs = -1,
    out: Out = Path("out"),
    format: Annotated[str, option("--format", help="png or svg.", panel=RUN)] = "png",
    json: Json = None,
    slo_ttft: Ttft = None,
    slo_interactivity: Speed = None,
) -> None:
    """Draw the throughput-versus-interactivity fronts and read them off at SLA floors.

    Writes results.parquet, results.csv, sla.csv and three pictures to --out: pareto, verified_tokens
    (verified tokens per request against load) and throughput (against load).

    Example: specsim pareto --profile hw_profiles/dsv4-flash-b300-tp4.json
    --trace traces/qwen3-4b-dspark.json -s NoSpec -s 'StaticGamma(3)' -s DSparkAsync --closed 1,4,16,64,256
    """
    from specsim import plots

    floors = parse_numbers("--sla", sla)
    if format not in ("png", "svg"):
        raise SpecsimError(f"--format: expected png or svg, got {format!r}")
    names = [*RESULTS, "sla.csv", *(f"{name}.{format}" for name in ("pareto", "throughput", "verified_tokens"))]
    check_apart({"--json": json}, {"--results": results})  # --out may be its folder: the same is written there
    _check_outputs(out, names, json, options.files())
    if results is not None:
        frame = read_results(results)
        _check_drawn(frame, results, context, options, seeds)
        base = base_of(base, make_front(frame).policies, options)
    else:
        built = options.build()
        base = base_of(base, [repr(policy) for policy in built[1]], options)  # before the runs, which may take long
        frame = _sweep(options, built, seeds, jobs, slo_of(slo_ttft, slo_interactivity))
    warn_window(frame, needed=True)
    if is_said(context, "sla"):
        note_floors(frame, floors)
    front = make_front(frame)
    over = base or front.policies[0]
    sold = {"all": sla_table(front, floors, base)}
    for domain in map(str, dict.fromkeys(frame["domain"])):
        if domain not in sold:
            sold[domain] = sla_table(make_front(frame, domain), floors, base)
    width = show.console().width
    gains = gain_tables(sold["all"], over, width)
    for table in (*sold_tables(front, sold["all"], width), *gains):
        show.console().print(table)
    if len(front.policies) > 1 and not gains:
        told = f"what {over} sells at these floors is not known (≥: heavier loads would tell) or nothing (–)"
        show.console().print(f"note: no gains: {told}; --base takes them over another")
    tables = pd.concat(table.assign(domain=domain) for domain, table in sold.items())
    crossed = crossovers(front)
    for line in crossover_lines(front):
        show.console().print(line)
    print_caveats(front.caveats)
    warn_extrapolated(int(frame["extrapolated_steps"].sum()))
    if out is not None:
        _write_results(frame, out)
        write_atomic(out / "sla.csv", lambda p: tables.to_csv(p, index=False))
        written = [
            plots.save_figure(plots.plot_pareto(front, floors), out / f"pareto.{format}"),
            plots.save_figure(plots.plot_load(front, "throughput"), out / f"throughput.{format}"),
        ]
        if frame["verified_tokens"].notna().any():
            figure = plots.plot_load(front, "verified_tokens")
            written.append(plots.save_figure(figure, out / f"verified_tokens.{format}"))
        pictures = ", ".join(path.name for path in written)
        tell = "sla.csv (the tables, of every domain)" if len(sold) > 1 else "sla.csv (the tables)"
        show.console().print(f"Wrote to {out}/: {pictures}, {tell}, results.csv and results.parquet")
    if json is not None:
        data = {"command": command_line(), "caveats": front.caveats, "sla": tables.to_dict("records")}
        data["crossovers"] = crossed.to_dict("records")
        show.write_json_file(json, {**data, "points": front.points.to_dict("records")})


def _check_drawn(frame: pd.DataFrame, path: Path, context: typer.Context, options: Options, seeds: int) -> None:
    """See that what this call says of the runs, if anything, is what an earlier sweep's table was made from."""
    if options.profile is not None:
        if not check_results(frame, path, context, options, options.build(), seeds):
            typer.echo(f"note: {path} does not tell what it was made from: not all options are checked", err=True)
        return
    check_counted(context)
    for name in ("seeds", *(f.name for f in fields(options) if f.name != "scenario")):
        if is_said(context, name):
            raise SpecsimError(
                f"--{name.replace('_', '-')}: the runs of --results are made: expected none of their options, or all, "
                "to be checked (--profile ...)"
            )


def _check_outputs(out: Path | None, names: list[str], json: Path | None, inputs: dict[str, list[Path]]) -> None:
    """See to --json and to the files of these names in --out."""
    check_apart({"--out": [out, *(out / name for name in names)] if out else None, "--json": json}, inputs)
    if out is not None:
        check_folder(out, "--out")
    check_output("--json", json)


def _sweep(
    options: Options,
    built: tuple[Scenario, list[Policy], list[Workload]],
    seeds: int,
    jobs: int,
    slo: SLO | None,
) -> pd.DataFrame:
    made_of = options.made_of()
    frame = run_all(*built, seeds, jobs, slo)
    note_made_of(frame, made_of)
    return frame


def run_all(
    base: Scenario, policies: list[Policy], workloads: list[Workload], seeds: int, jobs: int, slo: SLO | None
) -> pd.DataFrame:
    """The sweep's table, its progress on stderr."""
    with show.progress("runs simulated") as report:
        return run_sweep(base, policies, workloads, range(seeds), slo=slo, jobs=jobs, progress=report)


def slo_of(ttft: float | None, interactivity: float | None) -> SLO | None:
    return None if ttft is None and interactivity is None else SLO(interactivity=interactivity, ttft=ttft)


def _write_results(frame: pd.DataFrame, out: Path) -> None:
    write_atomic(out / "results.parquet", lambda p: frame.to_parquet(p, index=False))
    write_atomic(out / "results.csv", lambda p: frame.to_csv(p, index=False))


def print_caveats(lines: list[str]) -> None:
    for line in lines:
        show.console().print(f"note: {line}")


def warn_window(frame: pd.DataFrame, needed: bool = False) -> None:
    """Say on stderr where the measurement windows of these runs are too short for rates.

    SpecsimError where throughputs are ``needed`` and there is none.
    """
    if not (text := window_warning(frame)):
        return
    if needed and frame["throughput"].isna().all():
        raise SpecsimError(text)
    typer.echo(f"note: {text}", err=True)


def warn_extrapolated(steps: int) -> None:
    """Say on stderr how many steps lay outside the profile, if any."""
    if steps:
        text = f"note: {steps:,} steps were priced outside what the profile measured (extrapolated)"
        typer.echo(text, err=True)


def command_line() -> str:
    """The command line as it was typed."""
    return shlex.join(["specsim", *sys.argv[1:]])
