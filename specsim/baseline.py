"""Baselines (``*.json``): the results of a sweep, small enough to keep beside the code, for :mod:`specsim.compare`.

{"schema": "specsim.baseline/1", "specsim": "0.1.0", "command": "specsim baseline ...", "floors": [50.0, 80.0],
 "settings": {"gamma": 5, ...}, "inputs": [{"option": "--profile", "name": "p.json", "sha256": "..."}],
 "profiles": ["p"], "caveats": [],
 "seeds": [0, 1],
 "runs": [{"policy": "NoSpec()", "workload": "closed 8", "load": 8.0, "throughput": [1020.1, 1019.8], ...}]}

Each list of METRICS has a number a seed, in the order of ``seeds``, null where a run has none. Numbers are rounded to
ten digits, so that what is read and written again has the same bytes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from specsim.files import as_model, parse_json, read_text, write_json
from specsim.pareto import KEYS, caveats, pareto
from specsim.types import SpecsimError

SCHEMA = "specsim.baseline/1"
METRICS = ("throughput", "interactivity_p50", "interactivity_p10", "tau", "verified_tokens")
FLOORS = (30.0, 50.0, 80.0, 120.0)
"""Floors of interactivity (tok/s/user) that are compared where none are told."""
DIGITS = 10
LARGEST = 1e15
RESULTS = "results.parquet"
NOTED, FLOORED = "specsim", "specsim floors"
WANTED = f"what specsim baseline wrote, or the {RESULTS} of specsim sweep --out or pareto --out"

Numbers = list[float | None]
Settings = dict[str, bool | int | float | str]
Array = NDArray[np.float64]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Input(_Strict):
    """A file that the runs read: which option named it, its name without folders, and the hash of its bytes."""

    option: str
    name: str
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class MadeOf(_Strict):
    """What a run was made from: its options but for its files, and these. A sweep's table keeps it in its attrs."""

    settings: Settings
    inputs: list[Input]


class Runs(_Strict):
    """A policy at one load; each metric has a number a seed (throughput tok/s per GPU, interactivity tok/s/user)."""

    policy: str = Field(min_length=1)
    workload: str
    load: float = Field(gt=0)
    throughput: Numbers
    interactivity_p50: Numbers
    interactivity_p10: Numbers
    tau: Numbers
    verified_tokens: Numbers

    def values(self, metric: str) -> Array:
        """The numbers of ``metric`` (one of METRICS), one a seed; NaN for those that are missing."""
        return np.array([math.nan if v is None else v for v in getattr(self, metric)], dtype=np.float64)


class Baseline(_Strict):
    """The file's form. ``settings`` are the options of the run but for its files; ``floors`` are tok/s/user.

    ``profiles`` are the names that the hardware profiles of the runs give themselves.
    """

    schema_: Literal["specsim.baseline/1"] = Field(alias="schema")
    specsim: str
    command: str
    floors: list[float]
    settings: Settings
    inputs: list[Input]
    profiles: list[str] = []
    caveats: list[str]
    seeds: list[int] = Field(min_length=1)
    runs: list[Runs] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> Baseline:
        if len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0:
            raise ValueError("seeds: expected whole numbers, 0 or more, each once")
        if not all(floor > 0 for floor in self.floors):
            raise ValueError("floors: expected numbers above 0")
        seen = set()
        for i, run in enumerate(self.runs):
            for metric in METRICS:
                numbers = getattr(run, metric)
                if len(numbers) != len(self.seeds):
                    raise ValueError(f"runs.{i}.{metric}: expected {len(self.seeds)} numbers, one a seed")
                if any(v is not None and not 0 <= v <= LARGEST for v in numbers):
                    raise ValueError(f"runs.{i}.{metric}: expected numbers, 0 or more and {LARGEST:g} at most")
            if (run.policy, run.load) in seen:
                raise ValueError(f"runs.{i}: {run.policy} at load {run.load:g} stands here twice, expected once")
            seen.add((run.policy, run.load))
        if len(kinds := {self.kind(run) for run in self.runs}) > 1:
            raise ValueError(f"runs: workloads of several kinds, {' and '.join(sorted(kinds))}, expected one")
        return self

    @staticmethod
    def kind(run: Runs) -> str:
        """The kind of a run's workload: the first word of its label."""
        return run.workload.partition(" ")[0]

    @property
    def policies(self) -> list[str]:
        """The policies' labels, in the order of the file."""
        return list(dict.fromkeys(run.policy for run in self.runs))

    def frame(self) -> pd.DataFrame:
        """The runs as a sweep's table, which ``pareto`` takes: a row a policy, load and seed."""
        rows = []
        for run in self.runs:
            values = {metric: run.values(metric) for metric in METRICS}
            head = {"policy": run.policy, "workload": run.workload, "load": run.load, "domain": "all"}
            rows += [head | {"seed": s} | {m: v[i] for m, v in values.items()} for i, s in enumerate(self.seeds)]
        return pd.DataFrame(rows)


def make_baseline(
    frame: pd.DataFrame,
    *,
    floors: Iterable[float] | None = None,
    made_of: MadeOf | None = None,
    command: str = "",
    version: str = "",
) -> Baseline:
    """Return the baseline of a sweep's table (all domains together), numbers rounded.

    ``floors``: tok/s/user (None: those that the table keeps, see ``note_floors``, or FLOORS); ``made_of``: what it was
    made from (None: what it tells itself, see ``note_made_of``, or nothing).

    Raises SpecsimError for a table that ``pareto`` refuses, a missing column, and a policy that lacks a seed at a load.
    """
    for column in (*METRICS, "seed"):
        if column not in frame.columns:
            raise SpecsimError(f"sweep: no column {column!r}, expected {', '.join((*KEYS, *METRICS))}")
        if not pd.api.types.is_numeric_dtype(frame[column]):
            raise SpecsimError(f"sweep: column {column!r} is {frame[column].dtype}, expected numbers")
    if not pd.api.types.is_integer_dtype(frame["seed"]):
        raise SpecsimError(f"sweep: column 'seed' is {frame['seed'].dtype}, expected whole numbers")
    overall = pareto(frame).runs
    seeds = sorted({int(s) for s in overall["seed"]})
    runs = []
    for _, rows in overall.groupby(["policy", "load"], sort=False):
        policy, load = str(rows["policy"].iloc[0]), float(rows["load"].iloc[0])
        if sorted(rows["seed"]) != seeds:
            raise SpecsimError(f"sweep: {policy} at load {load:g}: expected each of the seeds {spans(seeds)} once")
        rows = rows.sort_values("seed")
        numbers = {metric: [_rounded(v) for v in rows[metric].tolist()] for metric in METRICS}
        head = {"policy": policy, "workload": str(rows["workload"].iloc[0]), "load": load}
        runs.append(Runs.model_validate(head | numbers))
    made_of = made_of or noted_made_of(frame) or MadeOf(settings={}, inputs=[])
    return Baseline(
        schema="specsim.baseline/1",
        specsim=version,
        command=command,
        floors=_noted_floors(frame) if floors is None else [float(f) for f in floors],
        settings=made_of.settings,
        inputs=made_of.inputs,
        profiles=[str(name) for name in overall["profile"].unique()] if "profile" in overall.columns else [],
        caveats=caveats(overall),
        seeds=seeds,
        runs=runs,
    )


def fingerprint(option: str, path: Path) -> Input:
    """What tells the file ``path``, which ``option`` named, from another; SpecsimError if it cannot be read."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SpecsimError(f"{path}: cannot read: {error.strerror or error}") from error
    return Input(option=option, name=path.name, sha256=hashlib.sha256(content).hexdigest())


def note_made_of(frame: pd.DataFrame, made_of: MadeOf) -> None:
    """Keep with a sweep's table what it was made from: parquet files hold it too."""
    frame.attrs[NOTED] = made_of.model_dump(mode="json")


def note_floors(frame: pd.DataFrame, floors: Iterable[float]) -> None:
    """Keep with a sweep's table at which floors of interactivity, tok/s/user, it is read off."""
    frame.attrs[FLOORED] = [float(floor) for floor in floors]


def _noted_floors(frame: pd.DataFrame) -> list[float]:
    """The floors that a table keeps; FLOORS where it keeps none, or not in our words."""
    floors = frame.attrs.get(FLOORED)
    if isinstance(floors, list) and floors and all(isinstance(f, float) and 0 < f < np.inf for f in floors):
        return floors
    return list(FLOORS)


def noted_made_of(frame: pd.DataFrame) -> MadeOf | None:
    """What a sweep's table tells of how it was made; None if nothing, or not in our words."""
    try:
        return MadeOf.model_validate(frame.attrs.get(NOTED), strict=True)
    except ValidationError:
        return None


def write_baseline(path: str | Path, baseline: Baseline) -> Path:
    """Write ``baseline`` as JSON, a list of numbers a line; the same baseline gives the same bytes."""
    return write_json(path, baseline)


def read_baseline(path: str | Path) -> Baseline:
    """Read a baseline; or the results.parquet of a sweep, or the folder that holds it.

    What specsim sweep and pareto write tells what it was made from, other tables do not.
    Whatever is wrong with the file, or its being of another schema, is a SpecsimError that names it.
    """
    path = Path(path)
    if path.is_dir():
        if not (path / RESULTS).is_file():
            raise SpecsimError(f"{path}: is a folder without {RESULTS}, expected {WANTED}")
        path = path / RESULTS
    if path.suffix == ".parquet":
        try:
            return make_baseline(read_results(path))
        except SpecsimError as error:
            raise SpecsimError(str(error).replace("sweep:", f"{path}:", 1)) from error
    text = read_text(path)  # once: it may be a pipe
    try:
        data = parse_json(text)
    except ValueError as error:
        if isinstance(error, SpecsimError):
            raise
        raise SpecsimError(f"{path}: expected JSON: {error}: not {WANTED}") from error
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        if isinstance(schema, str) and schema.startswith("specsim.baseline/"):
            raise SpecsimError(
                f"{path}: schema: {schema!r:.60} is of another version of specsim, expected {SCHEMA!r}: "
                "run the file's command again with this one"
            )
        raise SpecsimError(f"{path}: schema: expected {SCHEMA!r}, got {schema!r:.60}: not {WANTED}")
    return as_model(path, text, data, Baseline)


def read_results(path: Path) -> pd.DataFrame:
    """Return the table of a sweep's results.parquet; SpecsimError if ``path`` is none."""
    try:
        with open(path, "rb") as file:  # ours: pandas' own error has no reason, only the path again
            return pd.read_parquet(file)
    except OSError as error:
        raise SpecsimError(f"{path}: cannot read: {error.strerror or error}") from error
    except ValueError as error:
        raise SpecsimError(f"{path}: expected a {RESULTS}: {error}") from error


def spans(numbers: Iterable[int]) -> str:
    """Whole numbers for people: ``0-7, 9``."""
    parts: list[list[int]] = []
    for n in sorted(numbers):
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ", ".join(f"{a}-{b}" if b > a else f"{a}" for a, b in parts)


def _rounded(value: Any) -> float | None:
    return float(f"{value:.{DIGITS}g}") if np.isfinite(value) else None
