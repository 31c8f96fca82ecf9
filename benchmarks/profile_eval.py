"""What pricing one step takes, in microseconds, once a profile is loaded.

    python benchmarks/profile_eval.py PROFILE.json [PROFILE.json ...]

Each step is priced for all of its candidate draft lengths at once, as the engine does: 64 sequences of about
1,000 KV tokens with up to seven draft tokens each, alone, beside one prefill, and beside three. Profiles that
tell equal lengths from unequal ones are asked for both. The best of many short runs counts.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import specsim as ss
from specsim.hardware import Shape, StepCost, step_cost

SEQS, GAMMA = 64, 7
EVEN = Shape(SEQS, SEQS * 1000.5)
STEPS = {
    "decode only": EVEN,
    "one prefill": EVEN._replace(chunks=[300], histories=[100]),
    "three prefills": EVEN._replace(chunks=[300, 400, 200], histories=[100, 3000, 0]),
}


def microseconds(cost: StepCost, shape: Shape, calls: int = 10, runs: int = 2000) -> float:
    best = float("inf")
    for _ in range(runs):
        start = time.perf_counter()
        for _ in range(calls):
            cost.curve(shape, SEQS * GAMMA)
        best = min(best, time.perf_counter() - start)
    return best / calls * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profiles", nargs="+", type=Path, metavar="PROFILE.json")
    try:
        profiles = [ss.load_profile(path) for path in parser.parse_args().profiles]
    except ss.SpecsimError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for profile in profiles:
        start = time.perf_counter()
        cost = step_cost(profile, 2048, 256, 0)
        print(f"{profile.name}: spread out for a run in {(time.perf_counter() - start) * 1e3:.0f} ms")
        for name, shape in STEPS.items():
            line = f"  {name:<15} {microseconds(cost, shape):6.1f} µs"
            if cost.surface.needs_lengths:
                line += f", unequal lengths {microseconds(cost, shape._replace(shortest=100, longest=4000)):6.1f} µs"
            print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
