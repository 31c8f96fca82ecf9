"""How often does `specsim compare` fail without cause, and how often does it miss a 3 % loss?

python experiments/gate_power/study.py --work out/gate_power      # 20 minutes on one core; goes on where it stopped
python experiments/gate_power/study.py --work out/quick --quick   # 5 minutes

Simulates the scenario of `make gate` under many seeds, as it is and with verify seconds × 1.031, and compares groups of
seeds that have none in common: equals (A/A) and a loss of 3 %; and the loss with the same seeds on both sides. Seeds
are simulated once and dealt into groups again and again: runs share seeds across deals, never within a comparison.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from specsim.baseline import METRICS, Baseline, make_baseline, read_baseline, write_baseline
from specsim.cli.inputs import parse_domains, parse_policies, read_scenario
from specsim.cli.loads import parse_workloads
from specsim.compare import TOLERANCES, Comparison, compare
from specsim.engine import Scenario
from specsim.hardware import load_profile
from specsim.sweep import sweep

HERE = Path(__file__).parent
GATE = HERE.parent / "gate.toml"
SLOWER = 1.031
CHUNK = 20
"""Seeds that are simulated and kept at a time."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for what was simulated, and figures.json")
    parser.add_argument("--seeds", type=int, default=400, help="seeds that are simulated; half as many slower")
    parser.add_argument("--quick", action="store_true", help="60 seeds, and 40 comparisons instead of 200")
    parser.add_argument("--jobs", type=int, default=1, help="processes (-1: one a core)")
    given = parser.parse_args()
    many, runs = (60, 40) if given.quick else (given.seeds, 200)
    same = simulated(given.work, "same", 1.0, many, given.jobs)
    slow = simulated(given.work, "slow", SLOWER, many // 2, given.jobs)
    figures = {}
    strict = dict.fromkeys(TOLERANCES, 0.0)
    for seeds in (3, 5, 8):
        equal = [(part(same, a), part(same, b)) for a, b in pairs(many, seeds, runs)]
        groups = list(pairs(many // 2, seeds, runs))
        figures[f"{seeds} seeds"] = {
            "A/A": told([compare(a, b) for a, b in equal]),
            "A/A without tolerances": told([compare(a, b, tolerances=strict) for a, b in equal]),
            "3 % slower, other seeds": told([compare(part(same, a), part(slow, b)) for a, b in groups]),
            "3 % slower, same seeds": told([compare(part(same, a), part(slow, a)) for a, _ in groups]),
        }
        for name, found in figures[f"{seeds} seeds"].items():
            alarms = f"{found['failed']} of {found['runs']} fail, {found['undecided']} undecided"
            print(f"{seeds} seeds, {name}: {alarms}; by policy {found['policies']}")
    (given.work / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")


def told(found: list[Comparison]) -> dict[str, object]:
    """How many comparisons failed, in how many each policy did, and how many are undecided."""
    by_policy = Counter(p for c in found for p in {r.policy for r in c.regressions})
    tests = sorted({c.tests for c in found})
    unsure = sum(not c.failed and not c.passed for c in found)
    return {"runs": len(found), "failed": sum(c.failed for c in found), "undecided": unsure,
            "policies": dict(sorted(by_policy.items())), "numbers": [tests[0], tests[-1]]}  # fmt: skip


def pairs(many: int, seeds: int, runs: int) -> Iterator[tuple[list[int], list[int]]]:
    """``runs`` pairs of groups of ``seeds`` seeds out of ``many``, no seed twice in a pair."""

    def deal() -> Iterator[tuple[list[int], list[int]]]:
        rng = np.random.default_rng(seeds)
        while True:
            order = rng.permutation(many)
            for start in range(0, many - 2 * seeds + 1, 2 * seeds):
                group = order[start : start + 2 * seeds].tolist()
                yield group[:seeds], group[seeds:]

    return islice(deal(), runs)


def part(whole: Baseline, seeds: list[int]) -> Baseline:
    """The baseline that these seeds alone would have made."""
    at = [whole.seeds.index(s) for s in seeds]
    runs = [run.model_copy(update={m: [getattr(run, m)[i] for i in at] for m in METRICS}) for run in whole.runs]
    return whole.model_copy(update={"seeds": seeds, "runs": runs})


def simulated(work: Path, name: str, slower: float, many: int, jobs: int) -> Baseline:
    """The gate's sweep under ``many`` seeds from 0 on, verify seconds times ``slower``; chunks there are read."""
    parts = []
    for first in range(0, many, CHUNK):
        path = work / f"{name}-{first}.json"
        if not path.exists():
            base, policies, workloads, floors = scenario(slower)
            frame = sweep(base, policies, workloads, range(first, first + CHUNK), jobs=jobs)
            write_baseline(path, make_baseline(frame, floors=floors))
            print(f"{name}: {first + CHUNK} of {many} seeds", flush=True)
        parts.append(read_baseline(path))
    runs = [
        run.model_copy(update={m: [v for part in parts for v in getattr(part.runs[i], m)] for m in METRICS})
        for i, run in enumerate(parts[0].runs)
    ]
    return parts[0].model_copy(update={"seeds": [s for part in parts for s in part.seeds], "runs": runs})


def scenario(slower: float) -> tuple[Scenario, list, list, list[float]]:
    """What gate.toml says, on a profile whose verify steps last ``slower`` times as long."""
    told = read_scenario(GATE)
    profile = load_profile(told["profile"])
    verify = profile.verify.model_copy(update={"seconds": [slower * s for s in profile.verify.seconds]})
    drafter, policies = parse_policies(told["scheduler"], Path(told["trace"]), told["gamma"])
    workloads = parse_workloads(told["closed"], None, 1.0, None, None, None, told["num_requests"],
                                str(told["prompt_tokens"]), str(told["output_tokens"]), 0.0)  # fmt: skip
    base = Scenario(
        profile=profile.model_copy(update={"verify": verify}),
        workload=workloads[0],
        drafter=drafter,
        domains=parse_domains(told["domains"]),
        max_num_batched_tokens=told["max_num_batched_tokens"],
    )
    return base, policies, workloads, [float(f) for f in told["sla"].split(",")]


if __name__ == "__main__":
    main()
