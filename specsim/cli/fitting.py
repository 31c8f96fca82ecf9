"""profile fit: a step-cost curve from a benchmark's throughput."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from specsim.cli import show
from specsim.cli.inputs import check_filled, typed_command
from specsim.files import check_apart, check_output
from specsim.hardware import Profile, Provenance, save_profile
from specsim.importers.profile_parts import check_gpus
from specsim.importers.step_rows import doubtful_throughputs, read_step_rows
from specsim.step_fit import Row, StepFit, fit_steps
from specsim.types import SpecsimError

OFF = 0.15
"""A fitted row that is further off is told of: the rows contradict each other, or steps are not such a sum."""
BEYOND = 3
"""So is one that lies this many times the noise outside its own interval."""
FEW = 2
"""Tokens: one user's step, with the prompts in it, is smaller; what it does not reach is not worth a warning."""


def profile_fit(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="CSV of loads: concurrency, gamma, throughput and/or interactivity, ..")],
    out: Annotated[Path, typer.Option("--out", help="Where the profile goes.")],
    name: Annotated[str | None, typer.Option("--name", help="Name of the profile (default: that of --out).")] = None,
    model: Annotated[str, typer.Option("--model", help="The model that was served.")] = "not told",
    device: Annotated[str, typer.Option("--device", help="The GPU.")] = "not told",
    gpus: Annotated[int, typer.Option("--gpus", help="GPUs that the throughput is of.", min=1, max=100_000)] = 1,
    tp: Annotated[int, typer.Option("--tp", help="Tensor parallelism.", min=1, max=1024)] = 1,
    engine: Annotated[str | None, typer.Option("--engine", help="Engine and version.")] = None,
    source: Annotated[str | None, typer.Option("--source", help="Where the rows come from (default: FILE).")] = None,
    noise: Annotated[float, typer.Option("--noise", help="Relative noise of a row.", min=1e-4, max=0.5)] = 0.02,
    draws: Annotated[int, typer.Option("--draws", help="Draws for the intervals.", min=20, max=10_000)] = 200,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the draws.", min=0)] = 0,
    json: Annotated[Path | None, typer.Option("--json", help="Also write what is printed as JSON here.")] = None,
) -> None:
    """Fit a step-cost profile to a benchmark: throughput at several loads, without speculation and with drafts.

    A row says concurrency, gamma (draft tokens verified for every request; 0: none) and throughput (tokens/s),
    interactivity (tokens/s a user) or both. Rows with drafts also tell tau, or tau_low and tau_high, or
    survival_1, survival_2, ..; where they do not, tau is fitted too, one for each method. With prompt_tokens and
    output_tokens the prompts in the steps are accounted for. Rows of role "check" are predicted and not fitted.
    Intervals hold the noise of the rows and the unknown taus. A row whose throughput is over 5 % above concurrency x
    interactivity is refused, as is one that leaves less than one request and may be of one GPU; fitted rows that the
    fit misses are told of, on stderr and in the profile's notes, as are small steps that no load reaches.

    Example: specsim profile fit experiments/dsv4_pro_b300/rows.csv --gpus 8 --tp 8 --out out/dsv4-pro.json
    """
    from specsim import __version__

    check_filled(name=name, model=model, device=device, engine=engine, source=source)
    check_gpus(gpus, tp)
    outputs = {"--out": out, "--json": json}
    check_apart(outputs, {"FILE": file})
    for option, path in outputs.items():
        check_output(option, path)
    rows = read_step_rows(file)
    try:
        fit = fit_steps(rows, noise=noise, draws=draws, seed=seed)
        verify = fit.verify()
    except SpecsimError as error:
        raise SpecsimError(f"{file}: {error}") from error
    table = [_entry(fit, row) for row in rows]
    missed = _missed(table, noise)
    profile = Profile(
        schema="specsim.profile/1",
        name=name or out.stem,
        kind="fitted",
        model=model,
        device=device,
        gpus=gpus,
        tp=tp,
        engine=engine,
        verify=verify,
        draft=fit.draft(),
        provenance=Provenance(
            source=source or str(file),
            command=typed_command(context),
            versions={"specsim": __version__},
            notes=_notes(fit, noise, missed),
        ),
    )
    save_profile(profile, out)
    for line in [*doubtful_throughputs(rows), *_unmeasured(fit), *missed]:
        typer.echo(f"warning: {line}", err=True)
    _print(fit, table, out)
    if json is not None:
        taus = {m: {"tau": t, "interval": fit.tau_interval(m)} for m, t in fit.best.tau.items()}
        show.write_json_file(
            json,
            {
                "rows": table,
                "tau": taus,
                "profile": str(out),
                "fitted_from_tokens": fit.first_tokens,
                "fitted_to_tokens": fit.last_tokens,
            },
        )


def _unmeasured(fit: StepFit) -> list[str]:
    """A line where small steps were not measured; one user with its prompts is as small as steps get."""
    if fit.first_tokens < FEW:
        return []
    return [f"nothing below {fit.first_tokens:,.0f} tokens was measured: the curve there is the fit's first slope"]


def _missed(table: list[dict[str, Any]], noise: float) -> list[str]:
    """The fitted rows that the fit does not explain, each with its number in the file, in a line."""
    lines = []
    for i, e in enumerate(table, 1):
        low, high = e["low"] * (1 - BEYOND * noise), e["high"] * (1 + BEYOND * noise)
        if e["role"] == "fit" and (abs(e["error"]) > OFF or not low <= e["measured"] <= high):
            lines.append(
                f"row {i} ({e['method']} at concurrency {e['concurrency']:g}): measured {show.number(e['measured'])} "
                f"tokens/s a user, the fit says {show.number(e['fitted'])} ({e['error']:+.1%})"
            )
    return lines


def _notes(fit: StepFit, noise: float, missed: list[str]) -> str:
    fitted = [row for row in fit.rows if not row.check]
    errors = [abs(fit.best.speed(row) / row.speed - 1) for row in fitted]
    taus = [f"{method} {tau:.2f} ({low:.2f}..{high:.2f})" for method, (tau, low, high) in fit.fitted_taus.items()]
    return (
        "".join(f"{line[0].upper()}{line[1:]}. " for line in _unmeasured(fit))
        + f"Seconds by tokens, by sequences and for drafting, fitted to {len(fitted)} loads of relative noise "
        f"{noise:g} (worst row {max(errors):.1%} off); prompts in the steps and the engine's host time are inside. "
        f"low and high: 95 % of the draws. "
        + (f"Tokens a step that were fitted too, with 90 % intervals: {', '.join(taus)}. " if taus else "")
        + (f"Rows that the fit misses: {'; '.join(missed)}. " if missed else "")
        + f"Nothing beyond {fit.last_tokens:.0f} tokens and {fit.best.seqs[-1]:.0f} sequences was measured."
    )


def _entry(fit: StepFit, row: Row) -> dict[str, Any]:
    """What is told of a row: speeds in tokens/s a user, and how far off the fit is."""
    low, high = fit.interval(row)
    fitted, tau = fit.best.speed(row), fit.best.tau[row.method]
    tokens = row.tokens(tau)
    return {
        "method": row.method,
        "concurrency": row.concurrency,
        "running": row.decoding,
        "tokens": tokens,
        "tau": tau,
        "step_ms": fit.best.step(row) * 1e3,
        "measured": row.speed,
        "fitted": fitted,
        "low": low,
        "high": high,
        "error": fitted / row.speed - 1,
        "role": "check" if row.check else "fit",
        "extrapolated": tokens > fit.last_tokens * (1 + 1e-9),
    }


def _print(fit: StepFit, table: list[dict[str, Any]], out: Path) -> None:
    console = show.console()
    rows = [
        [
            e["method"],
            e["concurrency"],
            f"{e['tokens']:,.0f}" + (" *" if e["extrapolated"] else ""),
            e["tau"],
            show.number(e["step_ms"], 3),
            e["measured"],
            e["fitted"],
            f"{e['error']:+.1%}",
            f"{show.number(e['low'], 3)} – {show.number(e['high'], 3)}",
            "predicted" if e["role"] == "check" else "fitted",
        ]
        for e in table
    ]
    heads = ["method", "users", "tokens", "tau", "step ms", "measured", "fit", "error", "90 % interval", ""]
    captions = _unmeasured(fit)
    if any(e["extrapolated"] for e in table):
        captions.append(f"* beyond the {fit.last_tokens:,.0f} tokens that were fitted: the last slope goes on")
    caption = "\n".join(captions) or None
    console.print(show.table("Tokens a second and user", heads, rows, caption))
    for method, (tau, low, high) in fit.fitted_taus.items():
        console.print(f"tau of {method}: {tau:.2f}, 90 % interval {low:.2f} – {high:.2f}")
    checked = [abs(e["error"]) for e in table if e["role"] == "check"]
    if checked:
        mean, worst = sum(checked) / len(checked), max(checked)
        console.print(f"{len(checked)} predicted rows: {mean:.1%} off on average, {worst:.1%} at worst")
    console.print(f"Wrote {out}", soft_wrap=True)
