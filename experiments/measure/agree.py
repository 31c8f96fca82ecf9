"""Do two measurements agree? Compares the logs of two runs of ``specsim measure`` size by size.

    python experiments/measure/agree.py FIRST.log.jsonl SECOND.log.jsonl

Two runs agree at a size where their interquartile ranges overlap. Prints how many sizes do, how many medians lie
within the other run's quartiles, how far medians are apart, and the sizes that do not agree. Exits with 1 unless
most sizes agree, and with 2 for logs that cannot be compared.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specsim.measure.grid import Point
from specsim.measure.records import named, read_log
from specsim.measure.timing import Measured
from specsim.types import SpecsimError


@dataclass(frozen=True)
class Pair:
    """A size measured twice."""

    first: Measured
    second: Measured

    @property
    def overlap(self) -> bool:
        """Whether the interquartile ranges have a time in common."""
        (low, _, high), (low_, _, high_) = self.first.quartiles, self.second.quartiles
        return low <= high_ and low_ <= high

    @property
    def inside(self) -> bool:
        """Whether each median lies within the other's quartiles."""
        (low, median, high), (low_, median_, high_) = self.first.quartiles, self.second.quartiles
        return low <= median_ <= high and low_ <= median <= high_

    @property
    def apart(self) -> float:
        """The second median over the first, less one."""
        return self.second.quartiles[1] / self.first.quartiles[1] - 1


def pairs(first: Sequence[Measured], second: Sequence[Measured]) -> dict[Point, Pair]:
    """The sizes that both have."""
    others = {m.point: m for m in second}
    return {m.point: Pair(m, others[m.point]) for m in first if m.point in others}


def main(arguments: Sequence[str]) -> int:
    """Compare two logs; the exit code."""
    if len(arguments) != 2:
        print("usage: agree.py FIRST.log.jsonl SECOND.log.jsonl", file=sys.stderr)
        return 2
    try:
        (header, first), (header_, second) = (read_log(path) for path in arguments)
        found = pairs(first, second)
        if header["model"] != header_["model"] or not found:
            what = "the same model" if found else "sizes in common"
            raise SpecsimError(f"{arguments[1]}: expected {what}, as in {arguments[0]}")
    except SpecsimError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    apart = np.array([pair.apart for pair in found.values()])
    agree = sum(pair.overlap for pair in found.values())
    inside = sum(pair.inside for pair in found.values())
    spread = [
        (q3 - q1) / median
        for pair in found.values()
        for q1, median, q3 in (pair.first.quartiles, pair.second.quartiles)
    ]
    print(f"{header['model']['name']} on {header['device']} and on {header_['device']}: {len(found)} sizes")
    print(f"quartile ranges overlap at {agree} of {len(found)} ({agree / len(found):.0%})")
    print(f"each median lies within the other's quartiles at {inside} of {len(found)} ({inside / len(found):.0%})")
    print(
        f"medians differ by {np.median(np.abs(apart)):.1%} in the median, {np.abs(apart).max():.1%} at most, "
        f"{np.median(apart):+.1%} with sign; the median interquartile range is {np.median(spread):.1%}"
    )
    for point, pair in found.items():
        if not pair.overlap:
            one, other = (f"{m.quartiles[1] * 1e3:.4g}" for m in (pair.first, pair.second))
            print(f"  apart: {named(point)}: {one} and {other} ms")
    return 0 if 2 * agree > len(found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
