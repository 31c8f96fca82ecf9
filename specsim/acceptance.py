"""What a drafter's blocks look like: synthetic generation, replay, and the Drafter.

A run reads blocks from a :class:`Tape`: rows laid end to end, domain by domain. Simulated request i
starts at a row of its domain drawn from the acceptance stream keyed by i, and after a cycle that
produced m tokens reads the row m further on (the next one for a sequential trace), so every
scheduler sees the same blocks. A recorded trace is its own tape; a synthetic one is generated
from its parameters, anew for every seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from specsim import calibration
from specsim.blocktrace import TOTAL, Trace, read_trace
from specsim.files import first_error, read_json, read_start
from specsim.hardware import DraftCost, Provenance
from specsim.types import SpecsimError, stream

TAPE_ROWS = 1 << 16
"""Positions a domain that a synthetic tape holds: τ is off by about 0.2 % at one seed."""

Probability = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class Domain(BaseModel):
    """How blocks of one domain are accepted.

    ``conditional_acceptance`` [γ]: mean chance that position k survives given that 1..k-1 did.
    The chance itself varies from block to block as Beta(mean, ``concentration`` = a + b); null: no
    spread. A drafter's head reports it with its logit times ``overconfidence`` (1: calibrated).
    ``block_correlation`` ties the positions of a block (0: independent, 1: one shared score) and
    ``autocorrelation`` the blocks at adjacent positions of a request (lag 1), both as correlations
    of the Gaussian score behind the Beta (a Gaussian copula). With tied positions the survivors
    are the easier blocks, and acceptance given survival lies above ``conditional_acceptance``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    conditional_acceptance: tuple[Probability, ...] = Field(min_length=1)
    concentration: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    overconfidence: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    block_correlation: Probability = 0.0
    autocorrelation: Annotated[float, Field(ge=0, lt=1)] = 0.0


class Synthetic(BaseModel):
    """A synthetic trace: parameters, not rows (``traces/*.json``).

    ``domains`` maps a name to its Domain; the name ``*`` serves requests of any domain.
    ``confidence_source`` says what a scheduler sees: head (each block's own chance), position_mean
    (the mean of the position, no information about the block) or none.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_: Literal["specsim.synthetic/1"] = Field(alias="schema", default="specsim.synthetic/1")
    kind: Literal["synthetic"] = "synthetic"
    drafter: str
    target: str
    gamma: Annotated[int, Field(ge=1, le=64)]
    temperature: Annotated[float, Field(ge=0)] | None = None
    confidence_source: Literal["head", "position_mean", "none"] = "head"
    sts: tuple[Annotated[float, Field(gt=0)], ...] | None = None
    domains: dict[str, Domain] = Field(min_length=1)
    provenance: Provenance

    @model_validator(mode="after")
    def _check(self) -> Synthetic:
        if TOTAL in self.domains:
            raise ValueError(f"domains: {TOTAL!r} is the name of the total, expected another")
        for name, domain in self.domains.items():
            if len(domain.conditional_acceptance) != self.gamma:
                raise ValueError(
                    f"domains.{name}.conditional_acceptance: expected gamma = {self.gamma} numbers, "
                    f"got {len(domain.conditional_acceptance)}"
                )
        if self.sts is not None and len(self.sts) != self.gamma:
            raise ValueError(f"sts: expected gamma = {self.gamma} temperatures, got {len(self.sts)}")
        return self


@dataclass(frozen=True)
class Tape:
    """The blocks that a run reads, [n] rows; domain d holds rows ``first[d]`` .. ``first[d] + size[d]`` - 1.

    ``confidence`` and ``survival`` are float32 [n, γ], calibrated where the trace has temperatures
    (None: the drafter gives no confidence); ``accepted`` int64 [n]; ``proposed`` int64 [n], or None
    where every block is full. ``by_cycle``: a cycle moves one row on, whatever it produced.
    """

    gamma: int
    confidence: NDArray[np.float32] | None
    survival: NDArray[np.float32] | None
    accepted: NDArray[np.int64]
    proposed: NDArray[np.int64] | None
    domains: tuple[str, ...]
    first: NDArray[np.int64]
    size: NDArray[np.int64]
    by_cycle: bool = False

    def __post_init__(self) -> None:
        for array in (self.confidence, self.survival, self.accepted, self.proposed):
            if array is not None:
                array.flags.writeable = False  # runs share a tape


@dataclass(frozen=True)
class Drafter:
    """A drafter: what it proposes (a trace) and what that costs.

    ``gamma``: its block length, at most the trace's. ``cost=None`` takes the profile's ``draft``.
    ``weight_bytes`` and ``kv_bytes_per_token`` take memory from the KV pool. ``name`` labels results.
    """

    acceptance: Trace | Synthetic
    gamma: int
    cost: DraftCost | None = None
    weight_bytes: float = 0.0
    kv_bytes_per_token: float = 0.0
    name: str = ""

    def __post_init__(self) -> None:
        most = self.acceptance.gamma
        if not 1 <= self.gamma <= most:
            raise SpecsimError(
                f"drafter {self.name!r}: gamma: expected 1..{most}, its trace's block length, got {self.gamma}"
            )

    @property
    def domains(self) -> tuple[str, ...]:
        """The names of the domains it has blocks for; ``("*",)`` serves any."""
        return tuple(self.acceptance.domains)

    @property
    def has_confidence(self) -> bool:
        """Whether its trace tells a confidence for every position."""
        if isinstance(self.acceptance, Synthetic):
            return self.acceptance.confidence_source != "none"
        return self.acceptance.confidence is not None

    def tape(self, seed: int = 0, calibrated: bool = True) -> Tape:
        """The blocks that a run of ``seed`` reads, cut to this drafter's γ."""
        if isinstance(self.acceptance, Synthetic):
            return _synthetic_tape(self.acceptance.model_dump_json(by_alias=True), self.gamma, seed, calibrated)
        return trace_tape(self.acceptance, self.gamma, calibrated)


def load_drafter(
    path: str | Path,
    gamma: int | None = None,
    cost: DraftCost | None = None,
    weight_bytes: float = 0.0,
    kv_bytes_per_token: float = 0.0,
) -> Drafter:
    """A Drafter from a trace file: block trace (parquet) or synthetic (JSON).

    ``gamma=None`` takes the trace's block length. Raises SpecsimError, naming file and field.
    """
    acceptance = load_trace(path)
    gamma = acceptance.gamma if gamma is None else gamma
    return Drafter(acceptance, gamma, cost, weight_bytes, kv_bytes_per_token, name=Path(path).stem)


def load_trace(path: str | Path) -> Trace | Synthetic:
    """Read a trace file of either form, told apart by its first byte."""
    start = read_start(path)
    return read_json(path, Synthetic) if start.startswith(b"{") else read_trace(path)


def synthetic(
    conditional_acceptance: float | tuple[float, ...],
    gamma: int | None = None,
    *,
    concentration: float | None = None,
    overconfidence: float = 1.0,
    block_correlation: float = 0.0,
    autocorrelation: float = 0.0,
    name: str = "synthetic",
) -> Drafter:
    """A synthetic Drafter for any domain; a single number is repeated ``gamma`` times. See Domain."""
    if isinstance(conditional_acceptance, int | float):
        conditional_acceptance = (float(conditional_acceptance),) * (1 if gamma is None else gamma)
    try:
        domain = Domain(
            conditional_acceptance=conditional_acceptance,
            concentration=concentration,
            overconfidence=overconfidence,
            block_correlation=block_correlation,
            autocorrelation=autocorrelation,
        )
    except ValidationError as error:
        raise SpecsimError(f"synthetic: {first_error(error)}") from error
    length = len(conditional_acceptance)
    source = Provenance(source="parameters")
    trace = Synthetic(drafter=name, target="any", gamma=length, domains={"*": domain}, provenance=source)
    return Drafter(trace, length if gamma is None else gamma, name=name)


def trace_tape(trace: Trace, gamma: int, calibrated: bool = True) -> Tape:
    """The rows of a recorded trace as a tape, cut to blocks of ``gamma``."""
    size = np.bincount(trace.domain, minlength=len(trace.domains))
    confidence = trace.confidence
    if confidence is not None and calibrated and trace.meta.sts is not None:
        confidence = calibration.apply_sts(confidence, np.array(trace.meta.sts))
    full = bool((trace.proposed >= gamma).all())
    return Tape(
        gamma=gamma,
        confidence=None if confidence is None else confidence[:, :gamma],
        survival=None if confidence is None else np.cumprod(confidence[:, :gamma], axis=1),
        accepted=np.minimum(trace.accepted, gamma),
        proposed=None if full else np.minimum(trace.proposed, gamma),
        domains=trace.domains,
        first=np.cumsum(size) - size,
        size=size,
        by_cycle=trace.meta.kind == "sequential",
    )


@lru_cache(maxsize=8)
def _synthetic_tape(parameters: str, gamma: int, seed: int, calibrated: bool) -> Tape:
    trace = Synthetic.model_validate_json(parameters)
    rng = stream(seed, "blocks")
    # Whole blocks are drawn and then cut, so that drafters of different γ share their positions.
    parts = [generate(domain, TAPE_ROWS, rng) for domain in trace.domains.values()]
    accepted = np.concatenate([a for _, a in parts])
    confidence = None
    if trace.confidence_source == "head":
        confidence = np.concatenate([c for c, _ in parts])
    elif trace.confidence_source == "position_mean":
        means = np.array([d.conditional_acceptance for d in trace.domains.values()], dtype=np.float32)
        confidence = np.repeat(means, TAPE_ROWS, axis=0)
    if confidence is not None:
        if calibrated and trace.sts is not None:
            confidence = calibration.apply_sts(confidence, np.array(trace.sts))
        confidence = np.ascontiguousarray(confidence[:, :gamma])
    size = np.full(len(parts), TAPE_ROWS)
    return Tape(
        gamma=gamma,
        confidence=confidence,
        survival=None if confidence is None else np.cumprod(confidence, axis=1),
        accepted=np.minimum(accepted, gamma),
        proposed=None,
        domains=tuple(trace.domains),
        first=np.cumsum(size) - size,
        size=size,
    )


def generate(domain: Domain, rows: int, rng: np.random.Generator) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Draw ``rows`` consecutive blocks: reported confidence [rows, γ] and accepted [rows]."""
    gamma = len(domain.conditional_acceptance)
    if domain.concentration is None:
        chance = np.tile(np.array(domain.conditional_acceptance), (rows, 1))
    else:
        score = _scores(domain, rows, gamma, rng)
        chance = np.empty((rows, gamma))
        for k, mean in enumerate(domain.conditional_acceptance):
            chance[:, k] = _beta_quantile(score[:, k], mean, domain.concentration)
    # One uniform a block: position k survives where it lies below the product of the chances.
    accepted = (np.cumprod(chance, axis=1) > rng.random(rows)[:, None]).sum(axis=1)
    reported = chance
    if domain.overconfidence != 1.0:
        reported = calibration.apply_sts(chance, np.full(gamma, 1.0 / domain.overconfidence))
    return reported.astype(np.float32), accepted


def _scores(domain: Domain, rows: int, gamma: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Standard normal scores [rows, γ] with the domain's correlations."""
    shared, lag = domain.block_correlation, domain.autocorrelation
    if shared == 0 and lag == 0:
        from scipy.special import ndtri

        return np.asarray(ndtri(rng.random((rows, gamma))), dtype=np.float64)
    normal = np.sqrt(1 - shared) * rng.standard_normal((rows, gamma))
    normal += np.sqrt(shared) * rng.standard_normal((rows, 1))
    if lag > 0:
        from scipy.signal import lfilter

        normal[1:] *= np.sqrt(1 - lag * lag)  # keeps the variance at 1 from the first row on
        normal = lfilter([1.0], [1.0, -lag], normal, axis=0)
    return np.asarray(normal, dtype=np.float64)


def _beta_quantile(score: NDArray[np.float64], mean: float, concentration: float) -> NDArray[np.float64]:
    """The quantile of Beta(mean · concentration, (1 − mean) · concentration) at each standard normal ``score``."""
    if mean in (0.0, 1.0):
        return np.full_like(score, mean)
    table = _beta_table(mean, concentration)
    at = (np.clip(score, -_FAR, _FAR) + _FAR) * ((len(table) - 1) / (2 * _FAR))
    low = np.minimum(at.astype(np.int64), len(table) - 2)
    share = at - low
    return np.asarray((1 - share) * table[low] + share * table[low + 1])


_FAR = 6.0  # standard deviations that the table below covers


@lru_cache(maxsize=256)
def _beta_table(mean: float, concentration: float) -> NDArray[np.float64]:
    """Quantiles at evenly spaced scores: evenly spaced probabilities would blur the tails."""
    from scipy.special import betaincinv, ndtr

    grid = ndtr(np.linspace(-_FAR, _FAR, 4097))
    return np.asarray(betaincinv(mean * concentration, (1 - mean) * concentration, grid), dtype=np.float64)
