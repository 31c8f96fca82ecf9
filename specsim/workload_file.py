"""Workload files (``*.json``): a law of arrivals and lengths, with where it came from.

{"schema": "specsim.workload/1", "name": "...", "kind": "fitted", "domain": "chat",
 "arrivals": {"type": "gamma", "rate": 5.5, "cv": 1.1},
 "prompt_tokens": {"type": "quantiles", "probabilities": [0, 0.5, 1], "tokens": [2, 1020, 14050]},
 "output_tokens": {"type": "lognormal", "median": 129, "sigma": 0.9},
 "provenance": {"source": "...", "command": "...", "date": "2026-11-29", "notes": "..."}}
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from specsim.files import read_json
from specsim.lengths import Empirical, Fixed, Lengths, LogNormal, Quantiles
from specsim.types import SpecsimError
from specsim.workload import Gamma, Poisson

T = TypeVar("T")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _Fixed(_Strict):
    type: Literal["fixed"]
    tokens: int


class _LogNormal(_Strict):
    type: Literal["lognormal"]
    median: float
    sigma: float
    minimum: int = 1
    maximum: int | None = None


class _Empirical(_Strict):
    type: Literal["empirical"]
    values: list[int]


class _Quantiles(_Strict):
    type: Literal["quantiles"]
    probabilities: list[float]
    tokens: list[int]


class _Poisson(_Strict):
    type: Literal["poisson"]
    rate: float


class _Gamma(_Strict):
    type: Literal["gamma"]
    rate: float
    cv: float


_AnyLengths = Annotated[_Fixed | _LogNormal | _Empirical | _Quantiles, Field(discriminator="type")]
_AnyArrivals = Annotated[_Poisson | _Gamma, Field(discriminator="type")]


class _Provenance(_Strict):
    source: str
    command: str
    date: str = Field(pattern=r"^\d{4}-\d{2}-\d{2}$")
    notes: str


class WorkloadFile(_Strict):
    """The file's form; ``specsim.files.write_json`` writes one."""

    schema_: Literal["specsim.workload/1"] = Field(alias="schema")
    name: str
    kind: Literal["fitted"]
    domain: str
    arrivals: _AnyArrivals
    prompt_tokens: _AnyLengths
    output_tokens: _AnyLengths
    provenance: _Provenance


def read_workload(path: str | Path) -> Gamma | Poisson:
    """Read a workload file; ``dataclasses.replace`` changes its rate or number of requests.

    Whatever is wrong with the file is a SpecsimError that names file and field.
    """
    file = read_json(path, WorkloadFile)
    arrivals: Callable[..., Gamma | Poisson] = Gamma if isinstance(file.arrivals, _Gamma) else Poisson
    return _build(
        path,
        "arrivals",
        arrivals,
        **file.arrivals.model_dump(exclude={"type"}),
        prompt_tokens=_build_lengths(path, "prompt_tokens", file.prompt_tokens),
        output_tokens=_build_lengths(path, "output_tokens", file.output_tokens),
        domain=file.domain,
    )


def _build_lengths(path: str | Path, field: str, law: _Fixed | _LogNormal | _Empirical | _Quantiles) -> Lengths:
    laws: dict[str, Callable[..., Lengths]] = {
        "fixed": Fixed,
        "lognormal": LogNormal,
        "empirical": Empirical,
        "quantiles": Quantiles,
    }
    return _build(path, field, laws[law.type], **law.model_dump(exclude={"type"}))


def _build(path: str | Path, field: str, make: Callable[..., T], **values: object) -> T:
    """Call ``make``; its complaint "Class.field: ..." becomes "FILE: field.field: ..."."""
    try:
        return make(**values)
    except SpecsimError as error:
        raise SpecsimError(f"{path}: {field}.{str(error).partition('.')[2]}") from error
