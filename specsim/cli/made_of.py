"""Whether an earlier sweep's table was made from the options of this call, by what the table keeps of it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pandas as pd
import typer

from specsim.baseline import Input, MadeOf, noted_made_of
from specsim.cli.inputs import is_said, is_typed
from specsim.cli.options import LOADS, Options
from specsim.engine import Policy, Scenario
from specsim.types import SpecsimError
from specsim.workload import Workload

BY_LABEL = (*LOADS, "rate")
"""Options that the table's workloads tell, however they were typed."""


def check_results(
    frame: pd.DataFrame,
    path: Path,
    context: typer.Context,
    options: Options,
    built: tuple[Scenario, list[Policy], list[Workload]],
    seeds: int,
) -> bool:
    """Return whether ``frame``, read from ``path``, tells what it was made from, which is then what this call says.

    ``built``: what ``options`` make; ``seeds``: how many are asked for, if that was said. Raises SpecsimError, a line
    that names what differs.
    """
    check_counted(context)
    _check_same(frame, path, *built)
    return _check_made_of(frame, path, options, seeds if is_said(context, "seeds") else None)


def check_counted(context: typer.Context) -> None:
    """SpecsimError for what was typed of goodput, which --results counted when its runs were made.

    A scenario file may say it: the runs were made from the same file.
    """
    for name in ("slo_ttft", "slo_interactivity"):
        if is_typed(context, name):
            raise SpecsimError(
                f"--{name.replace('_', '-')}: has no meaning with --results, whose goodput is counted already"
            )


def _check_same(
    frame: pd.DataFrame, path: Path, scenario: Scenario, policies: list[Policy], workloads: list[Workload]
) -> None:
    """See that a results.parquet has the policies, workloads and profile of these options, as far as it tells them."""
    expected = {
        "policy": {repr(policy) for policy in policies},
        "workload": {workload.label for workload in workloads},
        "profile": {scenario.profile.name},
    }
    for column in (*expected, "seed", "domain", "request_rate", "ttft_p50", "ttft_p90", "gpus", "extrapolated_steps"):
        if column not in frame.columns:
            raise SpecsimError(f"{path}: no column {column!r}, expected the results.parquet of specsim sweep or pareto")
    for column, names in expected.items():
        found = {str(name) for name in frame[column].unique()}
        if found != names:
            raise SpecsimError(
                f"{path}: column {column!r}: expected {', '.join(sorted(names))}, as the options say, "
                f"got {', '.join(sorted(found))}"
            )


def _check_made_of(frame: pd.DataFrame, path: Path, options: Options, seeds: int | None) -> bool:
    """Return whether ``frame`` notes what it was made from; SpecsimError names every option that differs from it."""
    unlike = []
    made = set(frame["seed"])
    if seeds is not None and made != set(range(seeds)):
        unlike.append(f"--seeds {len(made)}, not {seeds}")
    was = noted_made_of(frame)
    if was is not None:
        now = options.made_of()
        unlike += _settings(was, now) + _files(was, now, options)
    if unlike:
        raise SpecsimError(f"{path}: made with other options: {'; '.join(unlike)}")
    return was is not None


def _settings(was: MadeOf, now: MadeOf) -> list[str]:
    usual = {f.name: f.default for f in fields(Options)}
    found = []
    for name in sorted(was.settings.keys() | now.settings.keys()):
        before, after = (side.get(name, usual.get(name)) for side in (was.settings, now.settings))
        if before != after and name not in BY_LABEL:
            told = ["its default" if value is None else str(value) for value in (before, after)]
            found.append(f"--{name.replace('_', '-')} {told[0]}, not {told[1]}")
    return found


def _files(was: MadeOf, now: MadeOf, options: Options) -> list[str]:
    piped = {name for name, paths in options.files().items() if any(not path.is_file() for path in paths)}
    found = []
    for option in sorted({i.option for i in (*was.inputs, *now.inputs)} - piped):
        before, after = ([i for i in side if i.option == option] for side in (was.inputs, now.inputs))
        if {i.sha256 for i in before} != {i.sha256 for i in after}:
            found.append(f"{option} {_named(before)}, not {_named(after)}")
    return found


def _named(inputs: list[Input]) -> str:
    """Files by name and the beginning of their hash: a name alone may be that of both."""
    return ", ".join(f"{i.name} (sha256 {i.sha256[:8]})" for i in inputs) or "none"
