"""Timing: device events on CUDA, the process clock elsewhere; sizes interleaved so that drift spreads evenly."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from specsim.measure.grid import Point
from specsim.types import Floats

LEAST_ROUNDS = 3
"""Quartiles of fewer samples say nothing."""


@dataclass
class Runner:
    """A point ready to run: ``load`` puts an input set in place (not timed), ``step`` is what is timed.

    ``on_host`` times it with the process clock, waiting for the device, instead of with device events.
    """

    point: Point
    load: Callable[[int], None]
    step: Callable[[], object]
    on_host: bool = False
    seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Measured:
    """What timing gave for a point: all samples in seconds, in the order they were taken."""

    point: Point
    seconds: Floats

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """Lower quartile, median, upper quartile."""
        q1, median, q3 = np.percentile(self.seconds, [25, 50, 75])
        return float(q1), float(median), float(q3)


def elapsed(step: Callable[[], object], repeats: int, device: torch.device, on_host: bool = False) -> float:
    """Seconds of one ``step``, as the mean of ``repeats`` in a row."""
    if device.type == "cuda" and not on_host:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            step()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / repeats
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begun = time.perf_counter()
    for _ in range(repeats):
        step()
    return (time.perf_counter() - begun) / repeats


def take(
    runners: Sequence[Runner],
    device: torch.device,
    *,
    rounds: int,
    until: float,
    sets: int,
    sample_seconds: float,
    rng: np.random.Generator,
    report: Callable[[int, int], None],
) -> list[Measured]:
    """Time every runner ``rounds`` times, each round in a new random order, after one round of warm-up.

    Stops before a round that would end after ``until`` (time.monotonic), but takes LEAST_ROUNDS in any case.
    A sample is so many steps in a row as fill ``sample_seconds``; round i takes input set i modulo ``sets``.
    """
    repeats = []
    for done, runner in enumerate(runners):
        runner.load(0)
        first = elapsed(runner.step, 1, device, runner.on_host)
        # The very first call may compile, allocate, or find caches cold: only the second tells how long one takes.
        second = elapsed(runner.step, 1, device, runner.on_host) if first < 10 * sample_seconds else first
        repeats.append(max(1, min(200, math.ceil(sample_seconds / max(second, 1e-7)))))
        report(done + 1, len(runners) * (rounds + 1))
    longest = 0.0
    for done in range(rounds):
        begun = time.monotonic()
        if done >= LEAST_ROUNDS and begun + longest > until:
            break
        for i, at in enumerate(rng.permutation(len(runners))):
            runner = runners[at]
            runner.load(done % sets)
            runner.seconds.append(elapsed(runner.step, repeats[at], device, runner.on_host))
            report(len(runners) * (done + 1) + i + 1, len(runners) * (rounds + 1))
        longest = max(longest, time.monotonic() - begun)
    return [Measured(runner.point, np.array(runner.seconds)) for runner in runners]
