"""The words every other module shares: errors, requests, objectives, results.

Units inside specsim are seconds and tokens; milliseconds appear only where a person reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from numpy.typing import NDArray

Floats = NDArray[np.floating]
Ints = NDArray[np.integer]
Bools = NDArray[np.bool_]


class SpecsimError(ValueError):
    """A user's mistake, told in one line: which file, which field, what was expected.

    The command line prints the message alone and exits with code 2.
    """


class BeyondProfile(SpecsimError):
    """A step larger than any that the hardware profile prices: as much load as the profile can tell about."""


@dataclass(frozen=True)
class Requests:
    """A workload as a table: who arrives when, asking for what.

    ``arrival_s`` (float64, seconds from the start, non-decreasing), ``prompt_tokens`` and
    ``output_tokens`` (int64, at least 1) and ``domain`` (int64 codes into ``domains``) all have one
    entry a request. ``rejected`` counts, by reason, the rows a loader left out.
    """

    arrival_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    domain: Ints
    domains: tuple[str, ...]
    session_id: Ints | None = None
    prefix_hashes: tuple[tuple[int, ...], ...] | None = None
    rejected: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.arrival_s)


@dataclass(frozen=True)
class SLO:
    """Service-level objective of one request; ``None`` leaves a bound out.

    ``interactivity`` is the least tok/s/user (1/tpot), ``ttft`` the most seconds to the first
    token, ``e2e`` the most seconds from arrival to finish.
    """

    interactivity: float | None = None
    ttft: float | None = None
    e2e: float | None = None

    def __post_init__(self) -> None:
        for name in ("interactivity", "ttft", "e2e"):
            bound = getattr(self, name)
            if bound is not None and not 0 < bound < float("inf"):
                raise SpecsimError(f"SLO: {name}: expected a number above 0, got {bound}")


@dataclass(frozen=True)
class Window:
    """The part of a run that is measured.

    Requests ``first`` to ``last`` - 1 are measured; ``start`` and ``end`` (seconds) bound the time
    over which tokens are counted, and ``tokens[d]`` is what domain ``d`` emitted between them.
    """

    first: int
    last: int
    start: float
    end: float
    tokens: Ints


@dataclass(frozen=True)
class Result:
    """What one simulated run left behind.

    ``requests`` has a row a request that arrived (design: request_id, domain, replica, arrival,
    scheduled, first_token, finish, prompt_tokens, output_tokens, cycles, verified, accepted,
    emitted, preemptions); ``steps`` has a row a step when it was asked for (first tokens of free prefills
    belong to no step). ``extrapolated_steps`` counts the
    steps priced outside the profile's measured range.
    """

    requests: pd.DataFrame
    steps: pd.DataFrame | None
    window: Window
    domains: tuple[str, ...]
    gpus: int
    num_steps: int
    extrapolated_steps: int
    label: str


STREAMS = ("arrivals", "lengths", "domains", "acceptance", "routing", "blocks", "split", "fit", "turns", "think")


def stream(seed: int, name: str) -> np.random.Generator:
    """Return the random stream ``name`` (one of STREAMS) of a run's ``seed``.

    Each use of randomness has a stream of its own, so that changing one (another scheduler,
    another arrival law) leaves the draws of the others as they were: common random numbers.
    """
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(STREAMS.index(name),)))


def to_install(extra: str) -> str:
    """How to get an optional part of the package, in words that end a sentence."""
    return f"pip install 'specsim[{extra}]' (in a checkout: pip install -e '.[{extra}]')"
