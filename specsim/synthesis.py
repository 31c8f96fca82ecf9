"""Synthetic traces: the parameters of a drafter's blocks, and blocks drawn from them."""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from specsim import calibration
from specsim.blocktrace import TOTAL
from specsim.hardware import Provenance

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
    ``later``: the same means, [γ] each, from each of the trace's ``edges`` on.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    conditional_acceptance: tuple[Probability, ...] = Field(min_length=1)
    concentration: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    overconfidence: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    block_correlation: Probability = 0.0
    autocorrelation: Annotated[float, Field(ge=0, lt=1)] = 0.0
    later: tuple[tuple[Probability, ...], ...] = ()

    @property
    def variants(self) -> list[Domain]:
        """This domain before the first edge, and from each edge on."""
        means = (self.conditional_acceptance, *self.later)
        return [self.model_copy(update={"conditional_acceptance": mean, "later": ()}) for mean in means]

    @model_serializer(mode="wrap")
    def _write(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in handler(self).items() if name != "later" or value}


class Synthetic(BaseModel):
    """A synthetic trace: parameters, not rows (``traces/*.json``).

    ``domains`` maps a name to its Domain; the name ``*`` serves requests of any domain.
    ``confidence_source`` says what a scheduler sees: head (each block's own chance), position_mean
    (the mean of the position, no information about the block) or none. Acceptance changes at the ``edges``,
    tokens of context (prompt and answer) or ``by`` position in the answer alone: see Domain.later.
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
    by: Literal["context", "position"] = "context"
    edges: tuple[Annotated[int, Field(ge=1, le=1 << 40)], ...] = ()
    domains: dict[str, Domain] = Field(min_length=1)
    provenance: Provenance

    @model_validator(mode="after")
    def _check(self) -> Synthetic:
        if TOTAL in self.domains:
            raise ValueError(f"domains: {TOTAL!r} is the name of the total, expected another")
        if any(b <= a for a, b in itertools.pairwise(self.edges)):
            raise ValueError(f"edges: expected increasing numbers of tokens, got {list(self.edges)}")
        for name, domain in self.domains.items():
            if len(domain.later) != len(self.edges):
                raise ValueError(
                    f"domains.{name}.later: expected {len(self.edges)} lists, one for each of edges, "
                    f"got {len(domain.later)}"
                )
            if any(len(mean) != self.gamma for mean in domain.later):
                raise ValueError(f"domains.{name}.later: expected gamma = {self.gamma} numbers in each list")
            if len(domain.conditional_acceptance) != self.gamma:
                raise ValueError(
                    f"domains.{name}.conditional_acceptance: expected gamma = {self.gamma} numbers, "
                    f"got {len(domain.conditional_acceptance)}"
                )
        if self.sts is not None and len(self.sts) != self.gamma:
            raise ValueError(f"sts: expected gamma = {self.gamma} temperatures, got {len(self.sts)}")
        return self

    @model_serializer(mode="wrap")
    def _write(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in handler(self).items() if name not in ("by", "edges") or self.edges}


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
