"""validate: a recorded run replayed, and what was measured beside what is simulated."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from specsim.cli import show
from specsim.cli.inputs import one_of, parse_names, parse_policies, policy_files
from specsim.cli.options import option
from specsim.engine import Scenario, simulate
from specsim.files import check_apart, check_folder, check_output
from specsim.importers.recorded import RecordedRun, read_run
from specsim.replay import Replay, Told, ablations, make_replay
from specsim.rules import RULES
from specsim.types import Result, SpecsimError
from specsim.validate import LATENCIES, Comparison, Pair, broken_gates, compare, parse_gates

REPLAY = "What is replayed"
MEMORY = "KV cache, where the run did not record it"
GATES = "Gates: exit code 1 where one is broken"
RUN = "Run"

ABLATED = ("ttft.mean", "ttft.p50", "ttft.p99", "tpot.mean", "tpot.p50", "tpot.p90", "tpot.p99", "e2e.mean", "e2e.p99")
UNITS: dict[str, tuple[str, float]] = {
    "ttft": ("s", 1.0),
    "tpot": ("ms", 1e3),
    "e2e": ("s", 1.0),
    "running": ("requests", 1.0),
    "waiting": ("requests", 1.0),
    "kv_occupancy": ("%", 100.0),
}


def recorded(
    run_dir: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_DIR", help="Folder of requests.jsonl, meta.json, config.json, profile/ and timeseries.csv."
        ),
    ],
    profile: Annotated[
        Path | None, option("--profile", help="A profile (JSON) or another bundle instead of profile/.", panel=REPLAY)
    ] = None,
    host_ms: Annotated[
        float | None,
        option(
            "--host-ms",
            help="The engine's own ms a step, beside its kernels (default: 0, or the profile's).",
            panel=REPLAY,
        ),
    ] = None,
    skew: Annotated[bool, option("--skew", help="Bundle: use its skew_fit.csv.", panel=REPLAY)] = False,
    link_bandwidth: Annotated[
        float | None, option("--link-bandwidth", help="Bundle, tp > 1: bytes/s of all-reduces.", panel=REPLAY)
    ] = None,
    link_latency: Annotated[
        float | None, option("--link-latency", help="Bundle, tp > 1: seconds before one moves.", panel=REPLAY)
    ] = None,
    trace: Annotated[
        Path | None, option("--trace", help="The drafter's trace, where the run speculated.", panel=REPLAY)
    ] = None,
    scheduler: Annotated[
        str | None, option("--scheduler", "-s", help="Its verification, such as 'StaticGamma(3)'.", panel=REPLAY)
    ] = None,
    max_num_seqs: Annotated[
        int | None, option("--max-num-seqs", help="Most running requests (default: meta.json's).", panel=REPLAY)
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, option("--max-num-batched-tokens", help="Most tokens a step (default: meta.json's).", panel=REPLAY)
    ] = None,
    async_scheduling: Annotated[
        bool,
        option("--async-scheduling", help="Plan a step while the one before it runs: hides host time.", panel=REPLAY),
    ] = False,
    without: Annotated[
        str | None, option("--without", help=f"Rules of the engine to switch off: {', '.join(RULES)}.", panel=REPLAY)
    ] = None,
    extrapolate: Annotated[
        bool, option("--extrapolate", help="Continue the profile beyond what it measured.", panel=REPLAY)
    ] = False,
    kv_tokens: Annotated[int | None, option("--kv-tokens", help="Tokens that it holds.", panel=MEMORY)] = None,
    device_memory: Annotated[
        float | None, option("--device-memory", help="Bytes of a GPU, to work it out.", panel=MEMORY)
    ] = None,
    utilisation: Annotated[
        float | None,
        option("--utilisation", help="Share of them the engine took (default: meta.json's, or 0.9).", panel=MEMORY),
    ] = None,
    max_ttft_error: Annotated[
        str | None, option("--max-ttft-error", help="Of ttft's mean and of its p99, such as 3% or 0.03.", panel=GATES)
    ] = None,
    max_tpot_error: Annotated[
        str | None, option("--max-tpot-error", help="Of tpot's mean and of its p99.", panel=GATES)
    ] = None,
    max_e2e_error: Annotated[
        str | None, option("--max-e2e-error", help="Of e2e's mean and of its p99.", panel=GATES)
    ] = None,
    max_error: Annotated[
        list[str] | None,
        option(
            "--max-error",
            help="Of one number: tpot.p90=3%, running.peak=5%, makespan=2%. Repeatable; goes before the others.",
            panel=GATES,
        ),
    ] = None,
    ablate: Annotated[
        bool, option("--ablate", help="Also print the errors with each rule of the replay left out in turn.", panel=RUN)
    ] = False,
    out: Annotated[Path | None, option("--out", help="Folder for the picture.", panel=RUN)] = None,
    format: Annotated[str, option("--format", help="Of the picture: png or svg.", panel=RUN)] = "png",
    json: Annotated[
        Path | None, option("--json", help="Also write all errors, settings and assumptions as JSON here.", panel=RUN)
    ] = None,
) -> None:
    """Replay a recorded run of an engine and print what was measured beside what is simulated.

    Requests arrive as recorded, with their lengths; settings come from meta.json and step prices from the run's
    own kernel times. ttft and e2e count from the moment the engine sees a request, at a step's boundary, on both
    sides. The errors are simulated/measured − 1.

    Example: specsim validate recorded runs/RTX4090-Llama-3.1-8B --host-ms 1 --max-tpot-error 3% --out out/validation
    """
    one_of("--format", format, ("png", "svg"))
    picture = None if out is None else out / f"validation.{format}"
    _check_paths(run_dir, {"--profile": profile, "--trace": trace}, scheduler, out, picture, json)
    bounds = dict(zip(LATENCIES, (max_ttft_error, max_tpot_error, max_e2e_error), strict=True))
    gates, gate_options = parse_gates(bounds, max_error or [])
    if (trace is None) != (scheduler is None):
        raise SpecsimError("--trace and --scheduler: expected both, where the run speculated, or neither")
    run = read_run(run_dir)
    told = Told(
        profile=profile,
        host_seconds=None if host_ms is None else host_ms * 1e-3,
        skew=skew,
        link_bandwidth=link_bandwidth,
        link_latency=link_latency,
        kv_tokens=kv_tokens,
        device_memory=device_memory,
        utilisation=utilisation,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        async_scheduling=async_scheduling,
        without=tuple(parse_names(without)),
        extrapolate=extrapolate,
    )
    drafter, policies = parse_policies([scheduler], trace, None) if scheduler else (None, [])
    replay = make_replay(run, told, policies[0] if policies else None, drafter)
    with show.progress("requests simulated") as report:
        result = simulate(replay.scenario, 0, steps=True, progress=report)
    comparison = compare(run, result, _blocks(replay.scenario))
    broken = broken_gates(comparison, gates, gate_options)
    caveats = _caveats(replay, result.extrapolated_steps)
    _print(run, comparison, replay, caveats)
    rules = _ablate(run, replay, comparison, result) if ablate else None
    if picture is not None:
        from specsim import plots, plots_validate

        figure = plots_validate.plot_validation(comparison, _title(run, replay), caveats)
        show.console().print(f"Wrote {plots.save_figure(figure, picture)}", soft_wrap=True)
    if json is not None:
        show.write_json_file(json, _plain(run, comparison, replay, caveats, gates, broken, rules))
    for line in broken:
        typer.echo(f"gate broken: {line}", err=True)
    if broken:
        raise typer.Exit(1)


def _check_paths(
    run_dir: Path,
    named: dict[str, Path | None],
    scheduler: str | None,
    out: Path | None,
    picture: Path | None,
    json: Path | None,
) -> None:
    """See that the outputs can be written, and not over an input."""
    names = ("requests.jsonl", "meta.json", "config.json", "timeseries.csv")
    inputs: dict[str, Any] = {"RUN_DIR": [run_dir / name for name in names], **named}
    inputs["--scheduler"] = policy_files(scheduler) if scheduler else []
    check_apart({"--out": picture, "--json": json}, inputs)
    if out is not None:
        check_folder(out, "--out")
    check_output("--json", json)


def _caveats(replay: Replay, extrapolated: int) -> list[str]:
    caveats = [replay.scenario.profile.caveat] if replay.scenario.profile.caveat else []
    caveats += replay.caveats
    if extrapolated:
        caveats.append(f"{extrapolated:,} steps were priced outside what the profile measured (extrapolated)")
    return caveats


def _title(run: RecordedRun, replay: Replay) -> str:
    device = run.settings.device or replay.scenario.profile.device
    return f"{run.name}: {len(run.requests):,} requests, {run.settings.model} on {device}"


def _print(run: RecordedRun, comparison: Comparison, replay: Replay, caveats: list[str]) -> None:
    rows: list[list[Any]] = []
    for metric, stats in comparison.metrics.items():
        unit, scale = UNITS[metric]
        name = f"{metric.replace('kv_', 'KV ')} ({unit})"
        rows += [[name if i == 0 else "", stat, *_cells(pair, scale)] for i, (stat, pair) in enumerate(stats.items())]
    rows.append(["makespan (s)", "", *_cells(comparison.makespan)])
    rows.append(["throughput (output tok/s)", "", *_cells(comparison.throughput)])
    console = show.console()
    console.print(show.table(_title(run, replay), ["metric", "statistic", "measured", "simulated", "error %"], rows))
    lines = [f"ttft, request by request: correlation {show.number(comparison.correlation)}"]
    if comparison.single_token:
        lines.append(f"requests of one output token, which have no tpot: {comparison.single_token:,}")
    series = {"running": "requests over time", "kv_occupancy": "KV occupancy"}
    missing = [what for name, what in series.items() if comparison.metrics[name]["mean"].measured is None]
    if missing:
        lines.append(f"{' and '.join(missing)}: not recorded")
    lines += [f"{subject}: {text}" for subject, text in replay.assumptions.items()]
    lines += [f"note: {line}" for line in caveats]
    for line in lines:
        console.print(line, soft_wrap=True)


def _blocks(scenario: Scenario) -> int:
    return (scenario.kv_tokens or 0) // scenario.block_size


def _ablate(run: RecordedRun, replay: Replay, comparison: Comparison, result: Result) -> dict[str, Any]:
    """Print and return the errors of the replay, and of those that leave something out."""
    errors = {"as replayed": _errors(comparison, result)}
    for name, scenario in ablations(replay).items():
        changed = simulate(scenario, 0, steps=True)
        errors[name] = _errors(compare(run, changed, _blocks(scenario)), changed)
    rows = []
    for name, found in errors.items():
        cells = ["–" if found[key] is None else f"{100 * found[key]:+.1f}" for key in ABLATED]
        rows.append([name, *cells, f"{found['preemptions']:,}"])
    heads = ["error %", *(key.replace(".", " ") for key in ABLATED), "preemptions"]
    show.console().print(show.table("What each rule is worth", heads, rows))
    return errors


def _errors(comparison: Comparison, result: Result) -> dict[str, Any]:
    errors: dict[str, Any] = {key: comparison.pairs[key].error for key in ABLATED}
    return errors | {"preemptions": int(result.requests["preemptions"].sum())}


def _cells(pair: Pair, scale: float = 1.0) -> list[str]:
    measured = None if pair.measured is None else scale * pair.measured
    error = "–" if pair.error is None else f"{100 * pair.error:+.1f}"
    return [show.number(measured), show.number(scale * pair.simulated), error]


def _plain(
    run: RecordedRun,
    comparison: Comparison,
    replay: Replay,
    caveats: list[str],
    gates: dict[str, float],
    broken: list[str],
    rules: dict[str, Any] | None,
) -> dict[str, Any]:
    def pair(of: Pair) -> dict[str, Any]:
        return {**asdict(of), "error": of.error}

    return {
        "run": run.name,
        "requests": len(run.requests),
        "single_token_requests": comparison.single_token,
        "metrics": {
            metric: {stat: pair(of) for stat, of in stats.items()} for metric, stats in comparison.metrics.items()
        },
        "makespan": pair(comparison.makespan),
        "throughput": pair(comparison.throughput),
        "correlation": {"ttft": comparison.correlation},
        "settings": dict(replay.settings),
        "assumptions": dict(replay.assumptions),
        "caveats": caveats,
        "gates": gates,
        "broken": broken,
    } | ({"ablation": rules} if rules is not None else {})
