"""What validate live prints, writes and ends with."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import typer

from specsim.cli import show
from specsim.hardware import Profile
from specsim.importers.evidence import ONE_MEAN
from specsim.types import SpecsimError

if TYPE_CHECKING:
    from specsim.live.comparing import Model, Row, Told
    from specsim.live.experiment import Measured, Plan
    from specsim.live.load import Drive

UNITS = {
    "throughput": ("throughput (tok/s)", 1.0),
    "tpot": ("tpot (ms)", 1e3),
    "ttft": ("ttft (ms)", 1e3),
    "speed": ("tok/s/user", 1.0),
    "tau": ("tau (tok/cycle)", 1.0),
    "verified_tokens": ("verified (tok/cycle)", 1.0),
}
INTERRUPTED = 130
SHORT_DRAFTS = "Drafts held"
"""How the note of drafts begins that are shorter than whole blocks."""


@dataclass(frozen=True)
class Report:
    """All that there is to say of a run."""

    measured: Measured
    plan: Plan
    models: Mapping[int, Model]
    rows: Sequence[Row]
    notes: Sequence[str]
    gates: Mapping[str, float]


def last_whole(models: Mapping[int, Model]) -> Model:
    """The last repetition's model of those that know the most sizes: the last one may have been cut short."""
    return models[max(models, key=lambda n: (len(getattr(models[n].profile.verify, "tokens", ())), n))]


def caveats(measured: Measured, plan: Plan, outside: int, known: Profile | None, gamma: int | None = None) -> list[str]:
    """What must stand beside the predictions."""
    notes = [known.caveat] if known is not None and known.caveat else []
    notes += measured.engine.notes
    counted = sum(a.counted for drive in measured.drives for a in drive.answers if a.done)
    if counted:
        notes.append(f"{counted} answers told no usage: their chunks were counted as tokens")
    if outside:
        notes.append(f"{outside:,} simulated steps were priced beyond what was measured, along the last slope")
    lengths = [d.drafted.verified_tokens - 1 for r in measured.repeats for d in r.checks.values() if d.drafted]
    if gamma is not None and lengths and max(lengths) > gamma + 0.01:
        notes.append(f"{max(lengths):.3g} tokens of a block were verified on average, --trace has blocks of {gamma}")
    told = [r.acceptance for r in measured.repeats if r.acceptance is not None]
    notes += dict.fromkeys(note for e in told for note in e.notes if note == ONE_MEAN or note.startswith(SHORT_DRAFTS))
    if known is None:
        most = max(plan.calibrate)
        for name in dict.fromkeys(name for repeat in measured.repeats for name in repeat.checks):
            running = max(r.checks[name].most_running() for r in measured.repeats if name in r.checks)
            if running > most:
                notes.append(
                    f"{name}: up to {running} requests decoded together, steps of more than {most} were not learned"
                )
    return notes


def show_all(report: Report) -> None:
    """Print the comparison, what it rests on, and what became of all requests; faults go to stderr."""
    measured, console = report.measured, show.console()
    title = f"{measured.engine.name}, {measured.engine.model}"
    if report.rows:
        console.print(_table(title, report.rows))
    else:
        console.print(f"{title}: no load was measured and predicted to its end")
    for line in [*_learned(report), *(f"note: {note}" for note in report.notes)]:
        console.print(line, soft_wrap=True)
    counts = measured.counts()
    fates = [f"{count:,} {name}" for name, count in counts.items() if name != "sent"]
    console.print(f"requests: {counts.get('sent', 0):,} sent = {' + '.join(fates) or '0'}", soft_wrap=True)
    if measured.stopped is not None:
        typer.echo(f"stopped: {measured.stopped}; what was measured until then is kept", err=True)
    for line in measured.faults:
        typer.echo(f"fault: {line}", err=True)


def _table(title: str, rows: Sequence[Row]) -> Any:
    from specsim.live.comparing import half_interval

    heads = ["load", "metric", "measured", "± 95 %", "predicted", "± 95 %", "error %", "own spread %", "allowed %"]
    lines: list[list[Any]] = []
    load = None
    for row in rows:
        name, unit = UNITS[row.metric]
        cells: list[Any] = [row.load if row.load != load else "", name]
        for values in (row.measured, row.predicted):
            half = half_interval(values)
            half = 0.0 if half is not None and half < 1e-9 * float(np.mean(values)) else half
            cells += [unit * float(np.mean(values)), None if half is None else show.number(unit * half, 2)]
        cells += [f"{round(100 * row.error, 1) + 0.0:+.1f}", *(_percent(share) for share in (row.spread, row.bound))]
        lines.append([cell if cell is not None else "–" for cell in cells])
        load = row.load
    return show.table(title, heads, lines)


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}"


def _learned(report: Report) -> list[str]:
    """What the predictions rest on, in lines."""
    lines = []
    if report.models:
        model = last_whole(report.models)
        verify: Any = model.profile.verify
        if not report.plan.known_steps:
            most = max(report.plan.calibrate)
            points = list(zip(verify.tokens, verify.seconds, strict=True))
            steps = ", ".join(f"{n}: {1e3 * s:.3g}" for n, s in points if n <= most)
            prompts = ", ".join(f"{n}: {1e3 * s:.3g}" for n, s in points if n > most)
            lines.append(f"step ms by running requests: {steps}; by tokens of a prompt: {prompts}")
        else:
            lines.append(f"steps: profile {model.profile.name} ({model.profile.kind})")
        if model.drafter is not None:
            survival = [r.acceptance.survival["*"] for r in report.measured.repeats if r.acceptance is not None]
            shares = ", ".join(f"{a:.3f}" for a in survival[-1]) if survival else f"trace {model.drafter.name}"
            lines.append(f"acceptance by position: {shares}; verification: {model.scheduler!r}")
    return lines


def write(report: Report, picture: Path | None, record: Path | None, json: Path | None) -> None:
    """Write what was asked for, also of a run that was cut short."""
    measured = report.measured
    if picture is not None and report.rows:
        draw(report.rows, picture, f"{measured.engine.name}, {measured.engine.model}", report.notes)
    if record is not None:
        from specsim.live.results import write_recorded

        for number, repeat in enumerate(measured.repeats, 1):
            for name, drive in repeat.checks.items():
                if any(a.done for a in drive.answers):
                    folder = record / f"{re.sub(r'[^0-9a-z.]+', '-', name).strip('-')}-r{number}"
                    show.console().print(f"Wrote {write_recorded(folder, drive, measured.engine)}", soft_wrap=True)
    if json is not None:
        show.write_json_file(json, plain(report))


def draw(rows: Sequence[Row], picture: Path, title: str, notes: Sequence[str]) -> None:
    """Write the picture and say so."""
    from specsim import plots, plots_live

    figure = plots_live.plot_live(rows, title, notes)
    show.console().print(f"Wrote {plots.save_figure(figure, picture)}", soft_wrap=True)


def end(report: Report) -> None:
    """Leave with 130 where somebody interrupted, with 1 where the engine failed or a gate is broken."""
    broken = _gates(report.rows, report.gates)
    measured = report.measured
    if measured.stopped is not None and measured.stopped.endswith("interrupted"):
        raise typer.Exit(INTERRUPTED)
    if broken or measured.faults or measured.stopped is not None or not report.rows:
        raise typer.Exit(1)


def _gates(rows: Sequence[Row], gates: Mapping[str, float]) -> bool:
    """Say which gates are broken; one that nothing was measured for is."""
    broken = False
    for row in rows:
        if row.broken:
            broken = True
            typer.echo(
                f"gate broken: {row.load} {row.metric}: {100 * row.error:+.2f} % off, at most "
                f"{_percent(row.bound)} % allowed",
                err=True,
            )
    if gates and not rows:
        broken = True
        typer.echo("gate broken: nothing was measured and predicted to its end", err=True)
    return broken


def plain(report: Report) -> dict[str, Any]:
    """Everything as plain data."""
    from specsim.live.comparing import measured_numbers

    measured, engine = report.measured, report.measured.engine

    def load(drive: Drive, role: str, number: int) -> dict[str, Any]:
        return {
            "name": drive.name,
            "role": role,
            "repetition": number,
            "measured": measured_numbers(drive) if role == "check" else None,
            "measured_requests": len(drive.measured),
            "counts": drive.counts(),
            "stopped": drive.stopped,
        }

    loads = [load(drive, "warm-up", 0) for drive in measured.warm_up]
    for number, repeat in enumerate(measured.repeats, 1):
        loads += [load(drive, "calibration", number) for drive in repeat.calibration]
        loads += [load(drive, "check", number) for drive in repeat.checks.values()]
    return {
        "engine": {
            "kind": engine.kind,
            "version": engine.version,
            "model": engine.model,
            "max_num_seqs": engine.max_num_seqs,
            "max_num_batched_tokens": engine.max_num_batched_tokens,
            "kv_tokens": engine.kv_tokens,
            "speculation": engine.speculation,
            "settings": dict(engine.settings),
        },
        "speculates": measured.speculates,
        "acceptance": [list(r.acceptance.survival["*"]) for r in measured.repeats if r.acceptance is not None],
        "rows": [plain_row(row) for row in report.rows],
        "profiles": [m.profile.model_dump(mode="json", by_alias=True) for m in report.models.values()],
        "loads": loads,
        "counts": measured.counts(),
        "faults": measured.faults,
        "stopped": measured.stopped,
        "notes": list(report.notes),
        "gates": dict(report.gates),
        "broken": [f"{row.load} {row.metric}" for row in report.rows if row.broken],
    }


def plain_row(row: Row) -> dict[str, Any]:
    """A row with its means, intervals and error."""
    from specsim.live.comparing import half_interval

    return {
        "load": row.load,
        "metric": row.metric,
        "measured": float(np.mean(row.measured)),
        "measured_ci": half_interval(row.measured),
        "measured_each": list(row.measured),
        "predicted": float(np.mean(row.predicted)),
        "predicted_ci": half_interval(row.predicted),
        "predicted_each": list(row.predicted),
        "error": row.error,
        "spread": row.spread,
        "allowed": row.bound,
        "broken": row.broken,
    }


def results(
    paths: Sequence[Path], told: Told, gates: Mapping[str, float], picture: Path | None, json: Path | None
) -> None:
    """Predict the loads that benchmark files tell of, and compare; files of one load are its repetitions."""
    from specsim.live.comparing import Model, rows_of
    from specsim.live.engines import Engine
    from specsim.live.results import read_results

    if told.profile is None:
        raise SpecsimError("--profile: expected the engine's step cost beside --from-results")
    published = [load for path in paths for load in read_results(path)]
    model = Model(
        told.profile,
        Engine("vllm", published[0].model or told.profile.model),
        told.scheduler,
        told.drafter,
        told.max_num_seqs,
        told.max_num_batched_tokens,
    )
    rows: list[Row] = []
    outside = 0
    for name in dict.fromkeys(p.load for p in published):
        loads = [p for p in published if p.load == name]
        found = [model.predict(p.workload) for p in loads]
        outside += sum(steps for _, steps in found)
        numbers = [dict(p.numbers) for p in loads]
        rows += rows_of(name, loads[0].users, numbers, [predicted for predicted, _ in found], gates)
    notes = [told.profile.caveat] if told.profile.caveat else []
    if outside:
        notes.append(f"{outside:,} simulated steps were priced beyond what was measured, along the last slope")
    title = f"{', '.join(dict.fromkeys(p.source for p in published))} on {told.profile.name}"
    console = show.console()
    console.print(_table(title, rows))
    for note in notes:
        console.print(f"note: {note}", soft_wrap=True)
    if picture is not None:
        draw(rows, picture, title, notes)
    if json is not None:
        show.write_json_file(
            json,
            {
                "sources": [p.source for p in published],
                "profile": told.profile.name,
                "rows": [plain_row(row) for row in rows],
                "notes": notes,
                "gates": dict(gates),
                "broken": [f"{row.load} {row.metric}" for row in rows if row.broken],
            },
        )
    if _gates(rows, gates):
        raise typer.Exit(1)
