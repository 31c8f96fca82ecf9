"""Whether an earlier sweep's table was made from the options of this call, by what the table keeps of it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pandas as pd

from specsim.baseline import Input, MadeOf, noted_made_of
from specsim.cli.options import LOADS, Options
from specsim.types import SpecsimError

BY_LABEL = (*LOADS, "rate")
"""Options that the table's workloads tell, however they were typed."""


def check_made_of(frame: pd.DataFrame, path: Path, options: Options, seeds: int | None = None) -> bool:
    """Return whether ``frame``, read from ``path``, tells what it was made from, which is then ``options``.

    ``seeds``: how many were asked for, None if not said. Raises SpecsimError, a line that names every option that
    differs: one of another value, or one whose files have other contents.
    """
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
