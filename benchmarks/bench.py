"""Speed of the simulator: a table, and one JSON line a benchmark (name, value, unit).

    python benchmarks/bench.py [--repeat N]

The best of N repetitions counts, since other work on the machine only ever slows a run down. The bare
loops at the end are yardsticks for the machine, to compare by ratio: NumPy and SimPy doing the least that a step needs
(gather, sort, argmax, accept), without requests, prefill, KV or books.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import simpy

import specsim as ss

ROOT = Path(__file__).parents[1]
PROFILE = ROOT / "hw_profiles/dsv4-flash-b300-tp4.json"
TRACE = ROOT / "traces/qwen3-4b-dspark.json"
CLOSED = ss.ClosedLoop(256, 512, 256, measured=10_000)
POISSON = ss.Poisson(13, 500, 512, 256)


def scenario(workload: ss.ClosedLoop | ss.Poisson, kv_tokens: int | None = None) -> ss.Scenario:
    return ss.Scenario(
        ss.load_profile(PROFILE), workload, ss.load_drafter(TRACE, gamma=5), ss.DSparkGreedy(), kv_tokens=kv_tokens
    )


def closed_loop() -> tuple[float, str]:
    start = time.perf_counter()
    result = ss.simulate(scenario(CLOSED))
    return float(result.requests["emitted"].sum()) / (time.perf_counter() - start), "output tokens/s"


def poisson() -> tuple[float, str]:
    start = time.perf_counter()
    result = ss.simulate(scenario(POISSON, kv_tokens=2_000_000))
    seconds = time.perf_counter() - start
    table = result.requests
    in_flight = (table["finish"] - table["arrival"]).sum() / (table["finish"].max() - table["arrival"].min())
    poisson.__doc__ = f"{in_flight:.1f} in flight"
    return result.num_steps / seconds, "steps/s"


def command() -> tuple[float, str]:
    arguments = ["simulate", "--profile", PROFILE, "--trace", TRACE, "--gamma", "5", "-s", "DSparkGreedy"]
    arguments += ["--closed", "256", "--num-requests", "10000", "--prompt-tokens", "512", "--output-tokens", "256"]
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "specsim", *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start, "s"


def bare(num_seqs: int, steps: int) -> Callable[[], tuple[float, str]]:
    def loop() -> tuple[float, str]:
        rng = np.random.default_rng(0)
        rows, gamma = 1 << 16, 5
        survival = np.cumprod(rng.beta(5, 1, (rows, gamma)), axis=1).astype(np.float32)
        accepted = rng.integers(0, gamma + 1, rows)
        seconds = np.linspace(0.005, 0.02, num_seqs * (gamma + 1) + 1)
        env = simpy.Environment()

        def process():  # type: ignore[no-untyped-def]
            row = rng.integers(0, rows, num_seqs)
            for _ in range(steps):
                block = survival.take(row, axis=0)
                ranked = np.sort(block, axis=None)[::-1]
                theta = (num_seqs + np.cumsum(ranked)) / seconds[num_seqs + 1 :]
                lens = (block >= ranked[theta.argmax()]).sum(axis=1)
                row = (row + np.minimum(accepted.take(row), lens) + 1) % rows
                yield env.timeout(float(seconds[num_seqs + int(lens.sum())]))

        env.process(process())
        start = time.perf_counter()
        env.run()
        return steps / (time.perf_counter() - start), "steps/s"

    return loop


BENCHMARKS: dict[str, Callable[[], tuple[float, str]]] = {
    "closed_256_greedy": closed_loop,
    "poisson_24_greedy_kv": poisson,
    "closed_256_command": command,
    "yardstick_bare_24": bare(24, 5_000),
    "yardstick_bare_256": bare(256, 1_500),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    repeat = parser.parse_args().repeat
    if repeat < 1:
        parser.error(f"--repeat: expected 1 or more, got {repeat}")
    lines = []
    for name, benchmark in BENCHMARKS.items():
        values = [
            benchmark() for _ in range(repeat * (1 if name.startswith("closed") else 10))
        ]  # short ones more often
        unit = values[0][1]
        best = (min if unit == "s" else max)(value for value, _ in values)
        print(f"{name:24} {best:>14,.{2 if unit == 's' else 0}f} {unit}", benchmark.__doc__ or "")
        lines.append(json.dumps({"name": name, "value": round(best, 3), "unit": unit}))
    print(*lines, sep="\n")


if __name__ == "__main__":
    main()
