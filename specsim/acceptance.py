"""What a drafter's blocks look like to a run: the tape they are read from, and the Drafter.

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
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from specsim import calibration
from specsim.blocktrace import Trace, read_trace
from specsim.files import first_error, read_json, read_start
from specsim.hardware import DraftCost, Provenance
from specsim.synthesis import Domain, Synthetic, generate
from specsim.types import SpecsimError, stream

TAPE_ROWS = 1 << 16
"""Positions a domain that a synthetic tape holds: τ is off by about 0.2 % at one seed."""

By = Literal["context", "position"]
WHAT: dict[By, str] = {"context": "context", "position": "answer"}


@dataclass(frozen=True)
class Tape:
    """The blocks that a run reads, [n] rows; part p holds rows ``first[p]`` .. ``first[p] + size[p]`` - 1.

    A domain has one part, or, where acceptance changes along the way, one before the first of ``edges`` and one
    from each of them on: tokens of context (prompt and answer), or of the answer alone where ``by`` is position.

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
    by: By = "context"
    edges: tuple[int, ...] = ()

    @property
    def parts(self) -> list[str]:
        """The names of the parts: each domain's, with the tokens that it begins at."""
        later = [f" from {edge:,} tokens of {WHAT[self.by]}" for edge in self.edges]
        return [name + where for name in self.domains for where in ("", *later)]

    def __post_init__(self) -> None:
        for array in (self.confidence, self.survival, self.accepted, self.proposed):
            if array is not None:
                array.flags.writeable = False  # runs share a tape


@dataclass(frozen=True)
class Drafter:
    """A drafter: what it proposes (a trace) and what that costs.

    ``gamma``: its block length, at most the trace's. ``cost=None`` takes the profile's ``draft``.
    ``weight_bytes`` and ``kv_bytes_per_token`` take memory from the KV pool. ``name`` labels results.
    ``edges``: tokens of context (prompt and answer), or ``by`` position in the answer alone, between which a
    recorded trace's rows serve requests that have come as far; synthetic traces have their own. Without, a
    request reads its domain from anywhere.
    """

    acceptance: Trace | Synthetic
    gamma: int
    cost: DraftCost | None = None
    weight_bytes: float = 0.0
    kv_bytes_per_token: float = 0.0
    name: str = ""
    by: By = "context"
    edges: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.by not in WHAT:
            raise SpecsimError(f"drafter {self.name!r}: by: expected context or position, got {self.by!r}")
        if any(not isinstance(e, int) or e < 1 for e in self.edges) or list(self.edges) != sorted(set(self.edges)):
            raise SpecsimError(f"drafter {self.name!r}: edges: expected increasing tokens, got {list(self.edges)}")
        if self.edges and isinstance(self.acceptance, Synthetic):
            raise SpecsimError(f"drafter {self.name!r}: edges: a synthetic trace has its own, expected none")
        if self.edges and self.by == "context" and getattr(self.acceptance, "prompt_tokens", None) is None:
            raise SpecsimError(f"drafter {self.name!r}: by context: expected a trace that has prompt_tokens")
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
        return trace_tape(self.acceptance, self.gamma, calibrated, self.by, self.edges)


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


def trace_tape(
    trace: Trace, gamma: int, calibrated: bool = True, by: By = "context", edges: tuple[int, ...] = ()
) -> Tape:
    """The rows of a recorded trace as a tape, cut to blocks of ``gamma``, in parts between the ``edges``.

    A part that no row falls in is the nearest one of its domain that has some, the earlier of two.
    """
    part, rows = trace.domain * (len(edges) + 1), np.arange(len(trace))
    if edges:
        before = trace.prompt_tokens if by == "context" and trace.prompt_tokens is not None else 0
        part = part + np.searchsorted(edges, trace.position + before, side="right")
        rows = np.argsort(part, kind="stable")
    size = np.bincount(part, minlength=len(trace.domains) * (len(edges) + 1))
    first = np.cumsum(size) - size
    there = np.flatnonzero(size)
    for p in np.flatnonzero(size == 0).tolist():
        mine = there[there // (len(edges) + 1) == p // (len(edges) + 1)]
        if len(mine):  # a domain may have no rows at all
            near = mine[np.abs(mine - p).argmin()]
            first[p], size[p] = first[near], size[near]
    confidence = trace.confidence
    if confidence is not None and calibrated and trace.meta.sts is not None:
        confidence = calibration.apply_sts(confidence, np.array(trace.meta.sts))
    confidence = None if confidence is None else confidence[rows, :gamma]
    full = bool((trace.proposed >= gamma).all())
    return Tape(
        gamma=gamma,
        confidence=confidence,
        survival=None if confidence is None else np.cumprod(confidence, axis=1),
        accepted=np.minimum(trace.accepted, gamma)[rows],
        proposed=None if full else np.minimum(trace.proposed, gamma)[rows],
        domains=trace.domains,
        first=first,
        size=size,
        by_cycle=trace.meta.kind == "sequential",
        by=by,
        edges=edges,
    )


@lru_cache(maxsize=8)
def _synthetic_tape(parameters: str, gamma: int, seed: int, calibrated: bool) -> Tape:
    trace = Synthetic.model_validate_json(parameters)
    rng = stream(seed, "blocks")
    # Whole blocks are drawn and then cut, so that drafters of different γ share their positions.
    variants = [variant for domain in trace.domains.values() for variant in domain.variants]
    parts = [generate(variant, TAPE_ROWS, rng) for variant in variants]
    accepted = np.concatenate([a for _, a in parts])
    confidence = None
    if trace.confidence_source == "head":
        confidence = np.concatenate([c for c, _ in parts])
    elif trace.confidence_source == "position_mean":
        means = np.array([variant.conditional_acceptance for variant in variants], dtype=np.float32)
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
        by=trace.by,
        edges=trace.edges,
    )
