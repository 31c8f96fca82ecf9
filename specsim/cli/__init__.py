"""The specsim command: each verb parses, calls the library and prints."""

from __future__ import annotations

import re
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from specsim.cli import (
    auditing,
    drafting,
    fitting,
    gating,
    importing,
    living,
    look,
    measuring,
    planning,
    profile_show,
    profiling,
    reporting,
    roofline,
    run,
    serving,
    traces,
    validating,
)
from specsim.files import check_no_empty
from specsim.types import SpecsimError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Simulate LLM serving with speculative decoding: what throughput does each verification scheduler sell "
    "at which interactivity?",
)
app.command()(run.simulate)
app.command()(run.sweep)
app.command()(run.pareto)
app.command()(auditing.audit)
app.command()(planning.plan)
app.command()(gating.baseline)
app.command()(gating.compare)
app.command()(reporting.report)
app.command()(traces.calibrate)
app.command()(drafting.record)
app.command("train-drafter")(drafting.train_drafter)
app.command()(measuring.measure)
app.command("serve-reference")(serving.serve_reference)
trace = typer.Typer(no_args_is_help=True, help="Look into arrivals and drafters' traces.")
trace.command("inspect")(look.inspect)
trace.command("compare")(traces.compare)
trace.command("import")(importing.import_trace)
app.add_typer(trace, name="trace")
profile = typer.Typer(no_args_is_help=True, help="Look into hardware profiles, import, fit or work out one.")
profile.command("show")(profile_show.profile_show)
profile.command("import")(profiling.import_profile)
profile.command("fit")(fitting.profile_fit)
profile.command("roofline")(roofline.roofline)
app.add_typer(profile, name="profile")
validate = typer.Typer(no_args_is_help=True, help="Replay what an engine did, or load one: measured beside simulated.")
validate.command("recorded")(validating.recorded)
validate.command("live")(living.live)
app.add_typer(validate, name="validate")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"specsim {version('specsim')}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; exit codes: 0, 1 (a check failed), 2 (bad input), 130 (interrupted)."""
    try:
        check_no_empty(sys.argv[1:] if arguments is None else arguments)
        code = app(arguments, standalone_mode=False, prog_name="specsim")
    except SpecsimError as error:
        code = _fail(str(error))
    except typer.TyperException as error:  # usage: unknown option, missing value
        code = _fail(_in_our_words(error.format_message()))
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except BrokenPipeError:
        sys.stderr.close()
        code = 0
    sys.exit(code if isinstance(code, int) else 0)


def _in_our_words(usage: str) -> str:
    """What is wrong with an option, without the words of the library that checks it: nan is no number up to 1."""
    for theirs, ours in (
        ("Input should be less than or equal to", "expected a number, at most"),
        ("Input should be greater than or equal to", "expected a number, at least"),
        ("Input should be a valid integer, unable to parse string as an integer", "expected a whole number"),
        ("Input should be a valid number, unable to parse string as a number", "expected a number"),
        ("Input should be", "expected"),
    ):
        usage = usage.replace(theirs, ours)
    return usage


def _fail(message: str) -> int:
    if message:
        # Numbers of hundreds of digits say no more than their first.
        message = re.sub(r"\d{40,}", lambda digits: f"{digits[0][:20]}...", " ".join(message.split()))
        typer.echo(f"error: {message}", err=True)
    return 2
