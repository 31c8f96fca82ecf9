"""Who arrives when, asking for what: generated, recorded and fitted workloads.

Open-loop workloads (Poisson, Gamma, Ramp, Arrivals) have ``requests(seed)``, a whole table; ClosedLoop
has ``lengths(seed)``, because its arrivals are made by its departures. All have ``label``, ``load``
(requests per second, or concurrency) and ``closed``. Lengths come in blocks from a stream of their
own: request i has the same lengths whatever the rate, the number of requests or the concurrency.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import numpy as np

from specsim.lengths import (
    Empirical,
    Fixed,
    Lengths,
    LogNormal,
    Quantiles,
    as_lengths,
    check_number,
    parse_lengths,
)
from specsim.request_table import (
    check_requests,
    inspect_requests,
    mean_rate,
    read_requests,
    write_requests,
)
from specsim.types import Floats, Ints, Requests, SpecsimError, stream

__all__ = [
    "Arrivals",
    "ClosedLoop",
    "Empirical",
    "Fixed",
    "Gamma",
    "Lengths",
    "LogNormal",
    "OpenLoop",
    "Poisson",
    "Quantiles",
    "Ramp",
    "Workload",
    "as_lengths",
    "inspect_requests",
    "parse_lengths",
    "read_requests",
    "write_requests",
]

MOST_REQUESTS = 100_000_000
LEAST_RATE = 1e-6  # requests per second: one in eleven days
MOST_THINK_S = 1e6
LATEST_S = 1e10  # times beyond are not told apart to a microsecond
_BLOCK = 1024
_EVEN = 1e-6  # gaps with a smaller CV are as good as equal, and their gamma's shape would overflow


@dataclass(frozen=True)
class Poisson:
    """Arrivals at random: ``rate`` requests per second, exponential gaps.

    ``prompt_tokens`` and ``output_tokens`` are laws of lengths or plain ints; ``domain`` "" leaves the
    domains to the simulation. Bad values raise a SpecsimError.
    """

    rate: float
    num_requests: int = 2000
    prompt_tokens: Lengths | int = 512
    output_tokens: Lengths | int = 256
    domain: str = ""

    closed: ClassVar[Literal[False]] = False

    def __post_init__(self) -> None:
        check_number("Poisson.rate", self.rate, least=LEAST_RATE)
        check_number("Poisson.num_requests", self.num_requests, least=1, whole=True)
        _check_asked("Poisson", self.prompt_tokens, self.output_tokens, self.domain)

    @property
    def label(self) -> str:
        return f"poisson {self.rate:g}/s"

    @property
    def load(self) -> float:
        """Requests per second."""
        return float(self.rate)

    def requests(self, seed: int) -> Requests:
        """Return the ``num_requests`` requests of this ``seed``; time starts a gap before the first."""
        gaps = stream(seed, "arrivals").standard_exponential(self.num_requests)
        return _table(np.cumsum(gaps) / self.rate, self.prompt_tokens, self.output_tokens, self.domain, seed)


@dataclass(frozen=True)
class Gamma:
    """Bursty or regular arrivals: independent gamma-distributed gaps.

    ``cv`` is the gaps' deviation over their mean: 0 is even spacing, 1 is Poisson (the very same
    arrivals), more is bursts. ``rate`` (requests per second) is the law's own; n requests at CV c keep
    it to within about c/√n. The other fields are those of Poisson.
    """

    rate: float
    cv: float
    num_requests: int = 2000
    prompt_tokens: Lengths | int = 512
    output_tokens: Lengths | int = 256
    domain: str = ""

    closed: ClassVar[Literal[False]] = False

    def __post_init__(self) -> None:
        check_number("Gamma.rate", self.rate, least=LEAST_RATE)
        check_number("Gamma.cv", self.cv, least=0, most=1000)
        check_number("Gamma.num_requests", self.num_requests, least=1, whole=True)
        _check_asked("Gamma", self.prompt_tokens, self.output_tokens, self.domain)

    @property
    def label(self) -> str:
        return f"gamma {self.rate:g}/s cv {self.cv:g}"

    @property
    def load(self) -> float:
        """Requests per second."""
        return float(self.rate)

    def requests(self, seed: int) -> Requests:
        """Return the ``num_requests`` requests of this ``seed``; time starts a gap before the first."""
        gaps = _gamma(stream(seed, "arrivals"), self.cv, self.num_requests)
        return _table(np.cumsum(gaps) / self.rate, self.prompt_tokens, self.output_tokens, self.domain, seed)


@dataclass(frozen=True)
class Ramp:
    """A rate that changes linearly from ``start_rate`` to ``end_rate`` (per second) over ``duration_s``.

    Arrivals are Poisson with that rate, so how many there are is random, with mean
    ``load · duration_s``. The other fields are those of Poisson.
    """

    start_rate: float
    end_rate: float
    duration_s: float
    prompt_tokens: Lengths | int = 512
    output_tokens: Lengths | int = 256
    domain: str = ""

    closed: ClassVar[Literal[False]] = False

    def __post_init__(self) -> None:
        check_number("Ramp.start_rate", self.start_rate, least=0)
        check_number("Ramp.end_rate", self.end_rate, least=0)
        if self.start_rate == self.end_rate == 0:
            raise SpecsimError("Ramp.end_rate: expected a number above 0 where start_rate is 0, got 0")
        check_number("Ramp.duration_s", self.duration_s, above=0)
        if self.load * self.duration_s > MOST_REQUESTS:
            raise SpecsimError(
                f"Ramp: expected at most {MOST_REQUESTS:,} requests, got about {self.load * self.duration_s:.2g} "
                f"({self.load:g}/s on average for {self.duration_s:g} s)"
            )
        _check_asked("Ramp", self.prompt_tokens, self.output_tokens, self.domain)

    @property
    def label(self) -> str:
        return f"ramp {self.start_rate:g}-{self.end_rate:g}/s over {self.duration_s:g} s"

    @property
    def load(self) -> float:
        """Mean requests per second over the ramp."""
        return (self.start_rate + self.end_rate) / 2

    def requests(self, seed: int) -> Requests:
        """Return the requests of this ``seed``; a ramp so short that none arrives is a SpecsimError."""
        # A Poisson process of rate 1 in "expected arrivals so far", Λ(t) = at + kt²/2, mapped back to
        # time. This root of the quadratic stays exact for k near 0.
        rng, total = stream(seed, "arrivals"), self.load * self.duration_s
        passed = np.cumsum(rng.standard_exponential(_BLOCK))
        while passed[-1] <= total:
            passed = np.concatenate((passed, passed[-1] + np.cumsum(rng.standard_exponential(len(passed)))))
        passed = passed[passed <= total]
        if not len(passed):
            raise SpecsimError(
                f"Ramp.duration_s: expected time for at least one arrival, got {self.duration_s:g} s, "
                f"in which none arrived (seed {seed})"
            )
        slope = (self.end_rate - self.start_rate) / self.duration_s
        root = np.sqrt(np.maximum(self.start_rate**2 + 2 * slope * passed, 0))
        arrival = np.minimum(2 * passed / (self.start_rate + root), self.duration_s)
        return _table(arrival, self.prompt_tokens, self.output_tokens, self.domain, seed)


@dataclass(frozen=True, eq=False)
class Arrivals:
    """A recorded workload, replayed as it is; ``name`` opens its label."""

    table: Requests = field(repr=False)
    name: str = "trace"

    closed: ClassVar[Literal[False]] = False

    def __post_init__(self) -> None:
        if not isinstance(self.table, Requests):
            raise SpecsimError(f"Arrivals.table: expected Requests, got {type(self.table).__name__}")
        check_requests(self.table, "Arrivals.table")

    @property
    def label(self) -> str:
        return f"{self.name} {self.load:.4g}/s"

    @property
    def load(self) -> float:
        """Mean requests per second, one over the mean gap; infinite where all arrive at one time."""
        return mean_rate(self.table.arrival_s)

    def requests(self, seed: int) -> Requests:
        """Return the table; ``seed`` changes nothing."""
        return self.table

    def scaled(self, rate: float) -> Arrivals:
        """Return the same requests with time stretched so that ``rate`` arrive per second on average."""
        check_number("Arrivals.scaled rate", rate, least=LEAST_RATE)
        if not np.isfinite(self.load):
            raise SpecsimError("Arrivals.scaled: expected arrivals at different times, got all at one time")
        return replace(self, table=replace(self.table, arrival_s=self.table.arrival_s * (self.load / rate)))

    def head(self, n: int) -> Arrivals:
        """Return the first ``n`` requests (all, where there are fewer)."""
        check_number("Arrivals.head n", n, least=1, whole=True)
        old = self.table
        table = replace(
            old,
            arrival_s=old.arrival_s[:n],
            prompt_tokens=old.prompt_tokens[:n],
            output_tokens=old.output_tokens[:n],
            domain=old.domain[:n],
            session_id=None if old.session_id is None else old.session_id[:n],
            prefix_hashes=None if old.prefix_hashes is None else old.prefix_hashes[:n],
        )
        return replace(self, table=table)


@dataclass(frozen=True)
class ClosedLoop:
    """``concurrency`` users, each of whom asks again some ``think_s`` seconds after the last answer.

    Think times are drawn from a gamma law of mean ``think_s`` and deviation over mean ``think_cv``: 1, exponential,
    is the "think time Z" of interactive queueing networks and of benchmarks such as TPC-W, 0 is constant. Users who
    think are in the midst of it when the run begins, so that they do not come in waves: the first request of each lies
    anywhere, uniformly, in a think time under way. Without thinking all ask at 0 and at once again.

    ``measured`` requests are measured, after 5 · concurrency of warm-up (None: 10 · concurrency, at
    least 500). Lengths and ``domain`` are as in Poisson. With ``turns`` (a law or an int) above 1 users hold
    conversations of so many requests: each prompt is all that was said before and ``prompt_tokens`` more.
    """

    concurrency: int
    prompt_tokens: Lengths | int = 512
    output_tokens: Lengths | int = 256
    think_s: float = 0.0
    domain: str = ""
    measured: int | None = None
    turns: Lengths | int = 1
    think_cv: float = 1.0

    closed: ClassVar[Literal[True]] = True

    def __post_init__(self) -> None:
        check_number("ClosedLoop.concurrency", self.concurrency, least=1, whole=True)
        if self.concurrency > 1_000_000:
            raise SpecsimError(f"ClosedLoop.concurrency: expected at most 1000000, got {self.concurrency}")
        check_number("ClosedLoop.think_s", self.think_s, least=0, most=MOST_THINK_S)
        check_number("ClosedLoop.think_cv", self.think_cv, least=0, most=1000)
        if self.measured is not None:
            check_number("ClosedLoop.measured", self.measured, least=1, whole=True)
        _check_asked("ClosedLoop", self.prompt_tokens, self.output_tokens, self.domain)
        as_lengths(self.turns, "ClosedLoop.turns")

    @property
    def label(self) -> str:
        return f"closed {self.concurrency}"

    @property
    def has_turns(self) -> bool:
        """Whether users hold conversations of several requests."""
        return self.turns not in (1, Fixed(1))

    @property
    def load(self) -> float:
        """The concurrency."""
        return float(self.concurrency)

    @property
    def first_measured(self) -> int:
        """Number of the first request that is measured; those before it are warm-up."""
        return 5 * self.concurrency

    @property
    def num_measured(self) -> int:
        """How many requests are measured."""
        return max(500, 10 * self.concurrency) if self.measured is None else self.measured

    def lengths(self, seed: int) -> Iterator[tuple[Ints, Ints]]:
        """Yield, without end, (prompt, output) tokens of the next 1024 requests, int64[1024] each."""
        return _length_blocks(self.prompt_tokens, self.output_tokens, seed)

    def asked(self, seed: int) -> Iterator[tuple[int, int]]:
        """Yield, without end, what ``lengths`` does, one request at a time."""
        for prompts, outputs in self.lengths(seed):
            yield from zip(prompts.tolist(), outputs.tolist(), strict=True)

    def first_asks(self, seed: int) -> Floats:
        """Return when each user first asks, seconds, float64[concurrency]; all 0 without thinking."""
        rng = stream(seed, "think").spawn(2)[0]
        # What falls into a think time at random finds the long ones more often: by a gamma law of one more in shape.
        users, scale = self.concurrency, self.think_cv**2
        under_way = np.ones(users) if self.think_cv < _EVEN else rng.standard_gamma(1 / scale + 1, users) * scale
        return self.think_s * under_way * rng.random(users)

    def thinks(self, seed: int) -> Iterator[Floats]:
        """Yield, without end, the seconds thought after each of the next 1024 requests, float64[1024]."""
        rng = stream(seed, "think").spawn(2)[1]
        while True:
            yield self.think_s * _gamma(rng, self.think_cv, _BLOCK)

    def conversations(self, seed: int) -> Iterator[int]:
        """Yield, without end, the requests in each conversation, in the order in which they begin."""
        law, rng = as_lengths(self.turns), stream(seed, "turns")
        while True:
            yield from law.sample(rng, _BLOCK).tolist()


OpenLoop = Poisson | Gamma | Ramp | Arrivals
Workload = OpenLoop | ClosedLoop


def _gamma(rng: np.random.Generator, cv: float, n: int) -> Floats:
    """``n`` draws of mean 1 and deviation ``cv`` by a gamma law; ones, with nothing drawn, where that is nearly 0."""
    if cv < _EVEN:
        return np.ones(n)
    scale = cv**2
    return rng.standard_gamma(1 / scale, n) * scale


def _check_asked(owner: str, prompt: Lengths | int, output: Lengths | int, domain: str) -> None:
    as_lengths(prompt, f"{owner}.prompt_tokens")
    as_lengths(output, f"{owner}.output_tokens")
    if not isinstance(domain, str):
        raise SpecsimError(f"{owner}.domain: expected text, got {domain!r}")


def _length_blocks(prompt: Lengths | int, output: Lengths | int, seed: int) -> Iterator[tuple[Ints, Ints]]:
    # A stream each, so that another law of prompts leaves the outputs as they were.
    prompt_rng, output_rng = stream(seed, "lengths").spawn(2)
    prompt, output = as_lengths(prompt), as_lengths(output)
    while True:
        yield prompt.sample(prompt_rng, _BLOCK), output.sample(output_rng, _BLOCK)


def _table(arrival_s: Floats, prompt: Lengths | int, output: Lengths | int, domain: str, seed: int) -> Requests:
    n = len(arrival_s)
    draws = _length_blocks(prompt, output, seed)
    prompts, outputs = zip(*(next(draws) for _ in range(-(-n // _BLOCK))), strict=True)
    return Requests(
        arrival_s=arrival_s,
        prompt_tokens=np.concatenate(prompts)[:n],
        output_tokens=np.concatenate(outputs)[:n],
        domain=np.zeros(n, dtype=np.int64),
        domains=(domain,),
    )
