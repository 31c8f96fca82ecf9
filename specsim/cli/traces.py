"""calibrate and trace compare: what drafters' recorded blocks are worth."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer

from specsim.blocktrace import Trace, TraceMeta, lossless_dtypes, read_trace, write_trace
from specsim.calibration import reliability_table
from specsim.cli import show
from specsim.files import check_apart, check_folder, check_output, read_json, read_start, write_atomic
from specsim.synthesis import Synthetic
from specsim.trace_calibration import Calibrated
from specsim.trace_calibration import calibrate as fit
from specsim.trace_stats import (
    THRESHOLDS,
    acceptance_table,
    calibration_table,
    sample,
    tau_table,
    threshold_sweep,
)
from specsim.types import SpecsimError

Json = Annotated[Path | None, typer.Option("--json", help="Also write what is printed as JSON here.")]

Tables = dict[str, dict[str, pd.DataFrame]]
"""Of each of trace_stats' tables, one a drafter's label."""

DEFAULT_THRESHOLDS = ",".join(f"{c:g}" for c in THRESHOLDS)

PER_POSITION = {
    "observed": "observed",
    "predicted_before": "raw",
    "predicted_after": "calibrated",
    "ece_before": "ECE raw",
    "ece_after": "calibrated",
    "auc_before": "AUC raw",
    "auc_after": "calibrated",
}


def calibrate(
    trace: Annotated[Path, typer.Argument(help="Block trace (parquet) with confidences.")],
    out: Annotated[Path, typer.Option("--out", help="Where the trace with its temperatures goes; may be TRACE.")],
    picture: Annotated[Path | None, typer.Option("--picture", help="Reliability diagrams, .png or .svg.")] = None,
    fit_share: Annotated[float, typer.Option("--fit-share", help="Share of each domain's responses to fit on.")] = 0.5,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the draw of those responses.", min=0)] = 0,
    json: Json = None,
) -> None:
    """Fit calibration temperatures on some responses and show what they do on the others.

    Writes the whole trace with its raw confidences and, beside them, the temperatures, which every
    scheduler then sees applied (--raw-confidence turns them off). The tables are of held-out responses.

    Example: specsim calibrate recorded.parquet --out calibrated.parquet --picture reliability.png
    """
    outputs = {"--out": out, "--picture": picture, "--json": json}
    check_apart(outputs, {})
    check_apart({**outputs, "--out": None}, {"TRACE": trace})
    for name, path in outputs.items():
        check_output(name, path)
    if picture is not None and picture.suffix.lower() not in (".png", ".svg"):
        raise SpecsimError(f"--picture: {picture}: expected a name that ends in .png or .svg")
    if not 0 < fit_share < 1:
        raise SpecsimError(f"--fit-share: expected a number between 0 and 1, got {fit_share:g}")
    source = _read(trace)
    done = fit(source, fit_share, seed, str(trace))
    _print_calibrated(done, trace)
    write_trace(done.trace, out, dtype=lossless_dtypes(source))
    written = [str(out)]
    before, after = (reliability_table(c, done.accepted) for c in (done.before, done.after))
    if picture is not None:
        from specsim import plots, plots_trace

        meta = done.trace.meta
        figure = plots_trace.plot_reliability(before, after, f"{meta.drafter} for {meta.target}, held-out responses")
        written.append(str(plots.save_figure(figure, picture)))
    show.console().print("Wrote " + ", ".join(written))
    if json is not None:
        show.write_json_file(
            json,
            {
                "trace": str(trace),
                "out": str(out),
                "temperatures": done.trace.meta.sts,
                "fit_share": fit_share,
                "seed": seed,
                "responses": dict(zip(("fitted", "held_out"), done.responses, strict=True)),
                "held_out_blocks": len(done.accepted),
                "report": done.report.to_dict("records"),
                "reliability": {"before": before.to_dict("records"), "after": after.to_dict("records")},
            },
        )


def compare(
    traces: Annotated[list[Path], typer.Argument(help="Drafters' traces: block traces or synthetic ones.")],
    thresholds: Annotated[
        str, typer.Option("--thresholds", help="Confidence thresholds to replay: 0,0.5,0.9.")
    ] = DEFAULT_THRESHOLDS,
    raw_confidence: Annotated[
        bool, typer.Option("--raw-confidence", help="Ignore the traces' calibration temperatures.")
    ] = False,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for two pictures and the tables.")] = None,
    format: Annotated[str, typer.Option("--format", help="png or svg.")] = "png",
    json: Json = None,
) -> None:
    """Compare drafters by their traces: τ, acceptance by position, calibration, what a threshold would do.

    Intervals are 95 %, clustered by response. Writes acceptance.csv, tau.csv, threshold.csv,
    calibration.csv and the pictures acceptance and threshold to --out; the former leaves out positions that
    fewer than 30 blocks reached. A synthetic trace is drawn with seed 0.

    Example: specsim trace compare traces/qwen3-4b-dspark.json traces/qwen3-4b-eagle3.json --out out/compare
    """
    if format not in ("png", "svg"):
        raise SpecsimError(f"--format: expected png or svg, got {format!r}")
    levels = _thresholds(thresholds)
    pictures = [f"{name}.{format}" for name in ("acceptance", "threshold")]
    names = [*(f"{name}.csv" for name in ("acceptance", "tau", "threshold", "calibration")), *pictures]
    check_apart({"--out": [out, *(out / name for name in names)] if out else None, "--json": json}, {"TRACES": traces})
    if out is not None:
        check_folder(out, "--out")
    check_output("--json", json)
    drafters = _labelled(traces)
    tables = _measure(drafters, levels, not raw_confidence)
    for table in (
        tau_summary(drafters, tables["tau"]),
        _tau_by_gamma(tables["tau"]),
        conditional_summary(tables["acceptance"]),
    ):
        show.console().print(table)
    if tables["calibration"]:
        show.console().print(_judged(drafters, tables["calibration"], raw_confidence))
    joined = {name: _joined(parts) for name, parts in tables.items() if parts}
    if out is not None:
        for name, frame in joined.items():
            write_atomic(out / f"{name}.csv", partial(frame.to_csv, index=False))
        written = _draw(tables, drafters, out, format)
        show.console().print("Wrote " + ", ".join(map(str, written)) + f" and the tables in {out}/")
    if json is not None:
        facts = {label: trace.meta.model_dump(mode="json", by_alias=True) for label, trace in drafters.items()}
        rows = {name: frame.to_dict("records") for name, frame in joined.items()}
        show.write_json_file(json, {"drafters": facts, "calibrated": not raw_confidence, **rows})


def _measure(drafters: dict[str, Trace], thresholds: list[float], calibrated: bool) -> Tables:
    tables: Tables = {"acceptance": {}, "tau": {}, "threshold": {}, "calibration": {}}
    with show.progress("traces measured") as report:
        for done, (label, trace) in enumerate(drafters.items(), start=1):
            tables["acceptance"][label] = acceptance_table(trace)
            tables["tau"][label] = tau_table(trace)
            if trace.confidence is not None:
                tables["threshold"][label] = threshold_sweep(trace, thresholds, calibrated)
                tables["calibration"][label] = calibration_table(trace, calibrated)
            report(done, len(drafters))
    return tables


def _labelled(paths: list[Path]) -> dict[str, Trace]:
    """The traces by labels that tell them apart: the drafter, the target and T where these differ, or the file."""
    real = [os.path.realpath(path) for path in paths]
    if twice := [path for i, path in enumerate(paths) if real[i] in real[:i]]:
        raise SpecsimError(f"{twice[0]}: given twice, expected different traces to compare")
    traces = [_read(path, synthetic=True) for path in paths]
    targets, temperatures = ({getattr(trace.meta, name) for trace in traces} for name in ("target", "temperature"))
    labels = [_label(trace.meta, len(targets) > 1, len(temperatures) > 1) for trace in traces]
    if len(set(labels)) < len(labels):
        labels = [f"{label} ({path.stem})" for label, path in zip(labels, paths, strict=True)]
    if len(set(labels)) < len(labels):
        labels = [f"{label} ({path})" for label, path in zip(labels, paths, strict=True)]
    return dict(zip(labels, traces, strict=True))


def _label(meta: TraceMeta, with_target: bool, with_temperature: bool) -> str:
    name = f"{meta.drafter} for {meta.target}" if with_target else meta.drafter
    return f"{name}, T = {meta.temperature:g}" if with_temperature and meta.temperature is not None else name


def _thresholds(text: str) -> list[float]:
    numbers = []
    for part in text.split(","):
        try:
            number = float(part)
        except ValueError:
            number = float("nan")
        if not 0 <= number <= 1:
            raise SpecsimError(f"--thresholds: expected numbers in 0..1, separated by commas, got {part.strip()!r}")
        numbers.append(number)
    return sorted(set(numbers))


def _draw(tables: dict[str, dict[str, pd.DataFrame]], drafters: dict[str, Trace], out: Path, format: str) -> list[Path]:
    from specsim import plots, plots_trace

    title = ", ".join(dict.fromkeys(trace.meta.target for trace in drafters.values()))
    temperatures = {trace.meta.temperature for trace in drafters.values()}
    if len(temperatures) == 1 and (only := temperatures.pop()) is not None:
        title += f", T = {only:g}"
    figures = {"acceptance": plots_trace.plot_acceptance(tables["acceptance"], tables["tau"], title)}
    if tables["threshold"]:
        # Drafters without confidences keep their place: a drafter has one colour in both pictures.
        nothing = next(iter(tables["threshold"].values())).iloc[:0]
        parts = {label: tables["threshold"].get(label, nothing) for label in drafters}
        figures["threshold"] = plots_trace.plot_thresholds(parts, title)
    return [plots.save_figure(figure, out / f"{name}.{format}") for name, figure in figures.items()]


def _joined(parts: dict[str, pd.DataFrame]) -> pd.DataFrame:
    frame = pd.concat(parts, names=["drafter"]).reset_index(level="drafter")
    return frame.reset_index(drop=True)


def _domains(parts: dict[str, pd.DataFrame]) -> list[str]:
    """The domains of any table, "all" last: the sum stands under (or right of) what it sums up."""
    names = list(dict.fromkeys(name for table in parts.values() for name in table["domain"] if name != "all"))
    return [*names, "all"] if len(names) > 1 else names


def tau_summary(drafters: dict[str, Trace], parts: dict[str, pd.DataFrame]) -> Any:
    """A printable table of τ by domain, of traces and their ``tau_table`` by label."""
    domains = _domains(parts)
    rows: list[list[Any]] = []
    for label, table in parts.items():
        trace = drafters[label]
        full = table[table["gamma"] == trace.gamma]
        found = {name: _with_half(*pair) for name, *pair in full[["domain", "tau", "tau_high"]].to_numpy().tolist()}
        cells = [found.get(domain, "–") for domain in domains]
        rows.append([label, trace.gamma, int(trace.responses()[-1]) + 1, len(trace), *cells])
    title = "Tokens a cycle (τ, bonus included) when every block is verified whole, replayed"
    return show.table(title, ["drafter", "γ", "responses", "rows", *domains], rows)


def _tau_by_gamma(parts: dict[str, pd.DataFrame]) -> Any:
    most = max(len(table[table["domain"] == "all"]) for table in parts.values())
    rows = []
    for label, table in parts.items():
        tau = table.loc[table["domain"] == "all", "tau"].tolist()
        rows.append([label, *tau, *[None] * (most - len(tau))])
    return show.table("τ of blocks cut to γ tokens, all domains", ["drafter", *map(str, range(1, most + 1))], rows)


def conditional_summary(parts: dict[str, pd.DataFrame]) -> Any:
    """A printable table of conditional acceptance by domain and position, of ``acceptance_table`` by label."""
    most = max(int(table["position"].max()) for table in parts.values())
    rows = []
    for domain in _domains(parts):
        for label, table in parts.items():
            values = table.loc[table["domain"] == domain, "conditional"].tolist()
            if values:
                rows.append([label, domain, *values, *[None] * (most - len(values))])
    title = "Conditional acceptance by position, over all anchors"
    return show.table(title, ["drafter", "domain", *map(str, range(1, most + 1))], rows)


def _judged(drafters: dict[str, Trace], parts: dict[str, pd.DataFrame], raw: bool) -> Any:
    rows: list[list[Any]] = []
    for label, table in parts.items():
        state = "raw" if raw or drafters[label].meta.sts is None else "calibrated"
        means = table.groupby("domain", sort=False)[["ece", "auc"]].mean()
        for domain in (d for d in _domains(parts) if d in means.index):
            first = table[(table["domain"] == domain) & (table["position"] == 1)].iloc[0]
            mean = means.loc[domain]
            rows.append([label, domain, state, *map(float, (mean["ece"], mean["auc"], first["ece"], first["auc"]))])
    title = "Survival as the confidences foretell it: means over the positions, and position 1"
    heads = ["drafter", "domain", "confidence", "ECE", "AUC", "ECE k=1", "AUC k=1"]
    fitted = any(state == "calibrated" for _, _, state, *_ in rows)
    caption = "over all rows, those that temperatures were fitted on among them" if fitted else None
    return show.table(title, heads, rows, caption)


def _with_half(tau: float, tau_high: float) -> str:
    return f"{tau:.3f}" + (f" ± {tau_high - tau:.3f}" if tau_high == tau_high else "")


def _print_calibrated(done: Calibrated, file: Path) -> None:
    meta, console = done.trace.meta, show.console()
    fitted, held = done.responses
    console.print(
        f"{file}: {meta.drafter} for {meta.target}, γ = {meta.gamma}, confidence: {meta.confidence_source}; "
        f"temperatures fitted on {fitted:,} responses, judged on {held:,} others"
    )
    assert meta.sts is not None
    overall = done.report[done.report["domain"] == "all"]
    rows: list[list[Any]] = [
        [int(r["position"]), t, int(r["count"]), *(float(r[c]) for c in PER_POSITION)]
        for t, (_, r) in zip(meta.sts, overall.iterrows(), strict=True)
    ]
    rows.append(["mean", None, None, *(float(overall[c].mean()) for c in PER_POSITION)])
    title = "\nSurvival of the first k tokens: observed, and predicted raw and calibrated"
    console.print(show.table(title, ["k", "T", "blocks", *PER_POSITION.values()], rows))
    judged = ["ece_before", "ece_after", "auc_before", "auc_after"]
    means = done.report.groupby("domain", sort=False)[judged].mean()
    blocks = done.report[done.report["position"] == 1].set_index("domain")["count"]
    rows = [
        [str(name), int(blocks[name]), *(float(v) for v in row)]
        for name, row in zip(means.index, means.to_numpy(), strict=True)
    ]
    heads = ["domain", "blocks", *(PER_POSITION[c] for c in judged)]
    console.print(show.table("Means over the positions, by domain", heads, rows if len(rows) > 2 else rows[:1]))


def _read(path: Path, synthetic: bool = False) -> Trace:
    """A recorded trace, or, where ``synthetic`` ones are welcome, rows drawn from their parameters."""
    if not read_start(path).startswith(b"{"):
        return read_trace(path)
    if not synthetic:
        raise SpecsimError(f"{path}: expected a block trace (parquet), got JSON")
    return sample(read_json(path, Synthetic))
