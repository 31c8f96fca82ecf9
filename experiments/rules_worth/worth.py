"""What each assumption about speculation is worth: throughput and speed a user with it left out or changed.

    python experiments/rules_worth/worth.py [--seeds N] [--json OUT.json] [--markdown]

DeepSeek-V4-Flash on four B300 (published step costs, CUDA graphs up to 1,024 tokens), the DSpark drafter's synthetic
trace at γ = 5, prompts of 512 and answers of 256 tokens, 64 users and 128; KV for 80,000 tokens where memory is the
question. Every change is run on the same seeds as the baseline: differences are paired, with 95 % intervals.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from specsim.acceptance import load_drafter
from specsim.cli import show
from specsim.engine import Scenario, simulate
from specsim.hardware import Profile, load_profile
from specsim.metrics import summarize
from specsim.rules import Rules
from specsim.schedulers import DSparkAsync, GlobalArgmax, LoadBlind, StaticGamma
from specsim.workload import ClosedLoop

ROOT = Path(__file__).resolve().parents[2]
USERS = (64, 128)


def changed(profile: Profile, **verify: Any) -> Profile:
    """The profile with fields of its verify cost changed."""
    return profile.model_copy(update={"verify": profile.verify.model_copy(update=verify)})


def variants(base: Scenario) -> dict[str, tuple[Scenario, Scenario]]:
    """By what is changed: the scenario without and with the change."""
    profile = base.profile
    assert profile.draft is not None
    free = profile.model_copy(
        update={"draft": profile.draft.model_copy(update={"seconds": tuple(0.0 for _ in profile.draft.seconds)})}
    )
    host = replace(base, profile=profile.model_copy(update={"host_seconds": 2e-3}))
    tight = replace(base, kv_tokens=30_000)
    fixed = replace(base, scheduler=StaticGamma(5))

    def planned(**fields: Any) -> Scenario:
        return replace(base, scheduler=DSparkAsync(**fields))

    return {
        "drafting costs nothing": (base, replace(base, profile=free)),
        "no padding to captured sizes": (base, replace(base, profile=changed(profile, below="linear"))),
        "steps of up to 8,192 tokens, past the graphs": (base, replace(base, max_num_batched_tokens=8192)),
        "the same, with γ = 5 always verified": (fixed, replace(fixed, max_num_batched_tokens=8192)),
        "confidences of this step (not lossless)": (base, replace(base, scheduler=GlobalArgmax())),
        "confidences one step old, not two": (base, planned(staleness=1)),
        "newcomers at the mean, not at 1": (base, planned(newcomer="mean")),
        "prompts make it forget": (base, planned(reset=True)),
        "padding filled with drafts": (base, planned(fill=True)),
        "survivals below 1e-6 dropped": (base, planned(floor=1e-6)),
        "one draft a request at least": (base, planned(least=1)),
        "budget blind to load (vllm-ascend)": (base, replace(base, scheduler=LoadBlind())),
        "prompts and decodes in steps of their own": (base, replace(base, rules=Rules(mixed=False))),
        "KV for 30,000 tokens": (base, tight),
        "the same, drafts reserve no blocks": (tight, replace(tight, rules=Rules(lookahead=False))),
        "the same, no prefix caching": (tight, replace(tight, rules=Rules(prefix_caching=False))),
        "host time of 2 ms a step": (base, host),
        "the same, hidden behind the forward": (host, replace(host, async_scheduling=True)),
    }


def measure(scenario: Scenario, seeds: int) -> np.ndarray:
    """Throughput and median speed a user [seeds, 2]."""
    rows = []
    for seed in range(seeds):
        summary = summarize(simulate(scenario, seed)).iloc[0]
        rows.append([summary["throughput"], summary["interactivity_p50"]])
    return np.array(rows)


def main() -> None:
    """Run every variant, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", action="store_true", help="print rows for a README")
    args = parser.parse_args()
    profile = load_profile(ROOT / "hw_profiles/dsv4-flash-b300-tp4.json")
    drafter = load_drafter(ROOT / "traces/qwen3-4b-dspark.json", 5)
    known: dict[int, np.ndarray] = {}
    table: list[dict[str, Any]] = []
    for users in USERS:
        base = Scenario(
            profile, ClosedLoop(users, 512, 256), drafter, DSparkAsync(), max_num_batched_tokens=1024, extrapolate=True
        )
        for name, (without, with_) in variants(base).items():
            if id(without) not in known:
                known[id(without)] = measure(without, args.seeds)
            change = measure(with_, args.seeds) / known[id(without)] - 1
            half = stats.t.ppf(0.975, args.seeds - 1) * stats.sem(change, axis=0)
            mean = change.mean(axis=0)
            table.append(
                {
                    "change": name,
                    "users": users,
                    "throughput": mean[0],
                    "throughput_half": half[0],
                    "interactivity": mean[1],
                    "interactivity_half": half[1],
                }
            )
        known.clear()
    names = list(dict.fromkeys(row["change"] for row in table))
    rows = []
    for name in names:
        cells = [row for row in table if row["change"] == name]
        rows.append([name, *(cell(row, key) for row in cells for key in ("throughput", "interactivity"))])
    heads = ["change", *(f"{what}, {users} users" for users in USERS for what in ("throughput", "speed"))]
    if args.markdown:
        print("\n".join("| " + " | ".join(row) + " |" for row in [heads, ["---"] * len(heads), *rows]))
    else:
        show.console().print(show.table("What each assumption is worth, %", heads, rows))
    if args.json is not None:
        show.write_json_file(args.json, {"seeds": args.seeds, "rows": table})


def cell(row: dict[str, Any], key: str) -> str:
    """A difference in per cent, with half of its interval."""
    return f"{100 * row[key]:+.1f} ± {100 * row[key + '_half']:.1f}"


if __name__ == "__main__":
    main()
