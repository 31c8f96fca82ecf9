"""baseline and compare: did this commit move the front?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specsim import baseline as files
from specsim import compare as comparing
from specsim.cli import gating_report, show
from specsim.cli.inputs import one_of, parse_numbers
from specsim.cli.options import MOST_SEEDS, RUN, Options, option, with_options
from specsim.cli.run import Jobs, command_line, warn_extrapolated, warn_window
from specsim.files import check_apart, check_output, write_text
from specsim.sweep import sweep
from specsim.types import SpecsimError
from specsim.validate import parse_share

FLOORS = ",".join(f"{floor:g}" for floor in files.FLOORS)


@with_options
def baseline(
    options: Options,
    out: Annotated[Path, option("--out", help="The file to write, JSON.", panel=RUN, show_default=False)],
    sla: Annotated[
        str, option("--sla", help="Interactivity floors that compare reads, tok/s/user.", panel=RUN)
    ] = FLOORS,
    seeds: Annotated[
        int, option("--seeds", help="Repetitions: they tell the noise.", min=2, max=MOST_SEEDS, panel=RUN)
    ] = 8,
    first_seed: Annotated[
        int,
        option(
            "--first-seed",
            help="The first of the seeds; others than BASE's compare unpaired.",
            min=0,
            max=10**9,
            panel=RUN,
        ),
    ] = 0,
    jobs: Jobs = -1,
) -> None:
    """Run every scheduler at every load and seed and write one small file to compare later results with.

    The same sweep as pareto's. The file holds the command, the hashes of the files read and each seed's numbers.

    Example: specsim baseline --profile hw_profiles/dsv4-flash-b300-tp4.json
    --trace traces/qwen3-4b-dspark.json -s NoSpec -s DSparkAsync --closed 4,32,128 --out baseline.json
    """
    floors = parse_numbers("--sla", sla)
    check_apart({"--out": out}, options.files())
    check_output("--out", out)
    base, policies, workloads = options.build()
    made_of = options.made_of()
    with show.progress("runs simulated") as report:
        chosen = range(first_seed, first_seed + seeds)
        frame = sweep(base, policies, workloads, chosen, jobs=jobs, progress=report)
    warn_window(frame, needed=True)
    from specsim import __version__

    made = files.make_baseline(
        frame,
        floors=floors,
        made_of=made_of,
        command=command_line(),
        version=__version__,
    )
    files.write_baseline(out, made)
    for line in made.caveats:
        show.console().print(f"note: {line}")
    warn_extrapolated(int(frame["extrapolated_steps"].sum()))
    loads = sorted({run.load for run in made.runs})
    held = f"{len(made.policies)} polic{'y' if len(made.policies) == 1 else 'ies'}"
    told = ", ".join(f"{load:g}" for load in loads)
    show.console().print(f"Wrote {out}: {held}, loads {told}, seeds {files.spans(made.seeds)}")


def compare(
    base: Annotated[
        Path,
        typer.Argument(metavar="BASE", help="What specsim baseline wrote, or a sweep's results.parquet or its folder."),
    ],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="The same, of the code or the inputs to be judged.")],
    sla: Annotated[
        str | None, typer.Option("--sla", help="Interactivity floors, tok/s/user (default: those of BASE).")
    ] = None,
    interactivity: Annotated[
        str, typer.Option("--interactivity", help="Of which user: p50, or p10, which 90 % of users have.")
    ] = "p50",
    tolerance: Annotated[
        list[str] | None,
        typer.Option(
            "--tolerance",
            help="METRIC=SHARE, the loss that is nobody's concern; METRIC=off: told, no failure. Repeatable. Default: "
            "throughput=1%, interactivity=1%, hypervolume=1%, tau=2%, verified_tokens=off.",
        ),
    ] = None,
    level: Annotated[
        str, typer.Option("--level", help="The probability that equals fail, over all numbers together.")
    ] = "1%",
    markdown: Annotated[
        Path | None,
        typer.Option("--markdown", help="Also write a summary here; appended if it is $GITHUB_STEP_SUMMARY."),
    ] = None,
    junit: Annotated[Path | None, typer.Option("--junit", help="Also write JUnit XML here.")] = None,
    picture: Annotated[Path | None, typer.Option("--picture", help="Both fronts in one picture, .png or .svg.")] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Also write the results as JSON here.")] = None,
) -> None:
    """Say whether NEW is worse than BASE, beyond tolerance and noise; exit code 1 if it is, or is within much noise.

    Compares throughput at SLA floors, interactivity at matched throughput, the area under the front, tau and verified
    tokens of every scheduler; seed by seed where both have the same seeds.

    Example: specsim compare baseline.json new.json --tolerance throughput=2% --markdown summary.md
    """
    outputs = {"--markdown": markdown, "--junit": junit, "--picture": picture, "--json": json}
    check_apart(outputs, {"BASE": _table(base), "NEW": _table(new)})
    for name, path in outputs.items():
        check_output(name, path)
    if picture is not None:
        one_of("--picture", picture.suffix.lower(), (".png", ".svg"))
    one_of("--interactivity", interactivity, ("p50", "p10"))
    share = parse_share("--level", level)
    if not comparing.LEAST_LEVEL <= share < 1:
        least = f"{comparing.LEAST_LEVEL:g}"
        raise SpecsimError(f"--level: expected a probability of {least} or more, below 1, got {level!r}")
    floors = parse_numbers("--sla", sla) if sla is not None else None
    tolerances = _tolerances(tolerance or [])
    before, after = files.read_baseline(base), files.read_baseline(new)
    x = f"interactivity_{interactivity}"
    found = comparing.compare(before, after, floors=floors, tolerances=tolerances, level=share, x=x)
    caveats = list(dict.fromkeys([*before.caveats, *after.caveats]))
    gating_report.print_comparison(found, caveats)
    if markdown is not None:
        gating_report.write_markdown(markdown, found, caveats, before.command)
    if junit is not None:
        write_text(junit, gating_report.junit(found))
    if picture is not None:
        from specsim import plots, plots_compare

        marks = {c.policy: c.verdict for c in (*found.undecided, *found.lost, *found.regressions)}
        notes = [*found.gone, *gating_report.warnings(found), *caveats]
        title = gating_report.head(found)
        figure = plots_compare.plot_compare(before, after, found.floors, marks, x=x, title=title, notes=notes)
        plots.save_figure(figure, picture)
    if json is not None:
        show.write_json_file(json, gating_report.plain(found, caveats))
    if not found.passed:
        raise typer.Exit(1)


def _table(path: Path) -> Path:
    """The file that is read at ``path``."""
    return path / files.RESULTS if path.is_dir() else path


def _tolerances(texts: list[str]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for text in texts:
        name, equals, share = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or name not in comparing.TOLERANCES:
            known = ", ".join(comparing.TOLERANCES)
            raise SpecsimError(f"--tolerance: expected METRIC=SHARE, METRIC one of {known}, got {text!r}")
        if name in found:
            raise SpecsimError(f"--tolerance: {name} is given twice")
        found[name] = None if share.strip() == "off" else parse_share(f"--tolerance {name}", share)
        if (found[name] or 0) >= 1:
            raise SpecsimError(f"--tolerance {name}: expected less than 100%, all that there is, got {share.strip()}")
    if found.keys() == comparing.TOLERANCES.keys() and not any(v is not None for v in found.values()):
        raise SpecsimError("--tolerance: expected a metric that is not off: nothing could fail")
    return found
