"""Who wins where: the built-in and the published schedulers on shipped profiles and traces, with what is noise said.

    python experiments/zoo/rank.py [--quick] [--seeds N] [--jobs N] [--out DIR]

Closed loops of few to many users on shipped pairs of hardware and drafter. Every policy runs on the same seeds:
arrivals, lengths and drafted blocks are shared, differences are paired. Ratios are of throughput, geometric means over
seeds with 95 % intervals (t). A difference is called one only if a paired t test says so after Holm's correction over
all pairs of policies of all columns, at a family-wise 5 %. Writes results.csv, tables.md and ranking.png to DIR.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from heatmap import draw, signed
from scipy import stats

from specsim.acceptance import Drafter, load_drafter
from specsim.blocktrace import Trace
from specsim.engine import Policy, Scenario
from specsim.files import write_text
from specsim.hardware import Profile, load_profile
from specsim.marginal import decode_seconds
from specsim.plots import save_figure
from specsim.schedulers import (
    BatchSizeTable,
    DSparkAsync,
    DSparkGreedy,
    GlobalArgmax,
    LoadBlind,
    NoSpec,
    Oracle,
    StaticGamma,
    Threshold,
)
from specsim.sweep import sweep
from specsim.workload import ClosedLoop
from specsim.zoo import TETRIS, DCut, GammaBandit, SmartSpec, SpecDecPP, WrongCost

ROOT = Path(__file__).resolve().parents[2]
LEVEL = 0.05
REFERENCE = "DSparkAsync"

GROUPS = {
    "one length, told": ("NoSpec", "StaticGamma(1)", "StaticGamma(3)", "StaticGamma(γ)", "BatchSizeTable"),
    "one length, learned": ("SmartSpec", "GammaBandit"),
    "confidence, no price": ("Threshold(0.5)", "SpecDecPP", "LoadBlind(next step)", "TETRIS(64)"),
    "confidence and price": ("DSparkGreedy", "DSparkAsync(1)", REFERENCE),
    "not lossless": ("GlobalArgmax", "LoadBlind", "DCut"),
    "DSparkAsync, misled": ("flat price", "drafts at half price", "drafts at twice", "stale price", "no calibration"),
    "bound": ("Oracle",),
}
CONTENDERS = [name for group in list(GROUPS)[:4] for name in GROUPS[group]]
"""Those that serve the target's distribution with what an engine knows."""


@dataclass(frozen=True)
class Setting:
    """A pair of hardware and drafter; ``stale``: the profile that an old table of step times came from."""

    name: str
    profile: str
    trace: str
    gamma: int
    users: tuple[int, ...]
    budget: int
    stale: str | None
    prompt: int = 512
    output: int = 256
    prefill: Literal["chunked", "free"] = "chunked"


SETTINGS = (
    Setting("B300×4, DSpark", "dsv4-flash-b300-tp4", "qwen3-4b-dspark.json", 5, (8, 64, 160), 1024,
            "dsv4-flash-production"),
    Setting("H200, DSpark", "h200-qwen3-8b-tp1-vllm", "qwen3-4b-dspark.json", 7, (8, 64, 256), 4096,
            "h100-qwen3-8b-tp1-vllm"),
    Setting("H200, small DSpark", "h200-qwen3-8b-tp1-vllm", "smollm2-dspark-t1.parquet", 7, (8, 64, 256), 4096,
            "h100-qwen3-8b-tp1-vllm"),
    Setting("B300×4, small DFlash", "dsv4-flash-b300-tp4", "smollm2-dflash-t1.parquet", 7, (8, 64, 120), 1024,
            "dsv4-flash-production"),
    Setting("H200, DSpark, no prompts", "h200-qwen3-8b-tp1-vllm", "qwen3-4b-dspark.json", 7, (256,), 4096,
            "h100-qwen3-8b-tp1-vllm", prefill="free"),
    Setting("two CPU cores, small DSpark", "cpu-2core-smollm2-135m", "smollm2-dspark-t1.parquet", 7, (1, 16), 256,
            None, 32, 48),
)  # fmt: skip


def policies(setting: Setting, users: int, profile: Profile, drafter: Drafter) -> dict[str, Policy]:
    """What is compared at one load, by the names in GROUPS; some ask for what a setting lacks and are left out."""
    gamma = drafter.gamma
    told = DSparkAsync()
    found: dict[str, Any] = {
        "NoSpec": NoSpec(),
        "StaticGamma(1)": StaticGamma(1),
        "StaticGamma(3)": StaticGamma(3),
        "StaticGamma(γ)": StaticGamma(gamma),
        "BatchSizeTable": BatchSizeTable(((1, 16, gamma), (17, 96, 3), (97, 1024, 1))),
        "SmartSpec": SmartSpec(),
        "GammaBandit": GammaBandit(),
        "Threshold(0.5)": Threshold(0.5),
        "SpecDecPP": SpecDecPP(),
        "LoadBlind(next step)": LoadBlind(at_once=False),
        "TETRIS(64)": TETRIS(64),
        "DSparkGreedy": DSparkGreedy(),
        "DSparkAsync(1)": DSparkAsync(staleness=1),
        REFERENCE: told,
        "GlobalArgmax": GlobalArgmax(),
        "LoadBlind": LoadBlind(),
        "flat price": WrongCost(told, "flat"),
        "drafts at half price": WrongCost(told, "scaled", 0.5),
        "drafts at twice": WrongCost(told, "scaled", 2.0),
        "Oracle": Oracle(),
    }
    if setting.stale is not None:
        found["stale price"] = WrongCost(told, "stale", table=old_table(setting, users, profile))
    made = {name: Policy(scheduler) for name, scheduler in found.items()}
    made["no calibration"] = Policy(told, uncalibrated(drafter))
    if isinstance(drafter.acceptance, Trace):
        made["DCut"] = Policy(DCut(), by_softmax(drafter))
    order = [name for names in GROUPS.values() for name in names]
    return {name: made[name] for name in order if name in made}


def uncalibrated(drafter: Drafter) -> Drafter:
    """The same blocks with confidences as the drafter tells them.

    A recorded trace loses its temperatures. A synthetic one has a calibrated head: it becomes twice as sure, logits
    times two, as temperatures of 2 would mend.
    """
    trace = drafter.acceptance
    if isinstance(trace, Trace):
        raw: Any = replace(trace, meta=trace.meta.model_copy(update={"sts": None}))
    else:
        sure = {name: domain.model_copy(update={"overconfidence": 2.0}) for name, domain in trace.domains.items()}
        raw = trace.model_copy(update={"domains": sure})
    return replace(drafter, acceptance=raw, name="uncalibrated")


def by_softmax(drafter: Drafter) -> Drafter:
    """The same recorded blocks with the drafter's probability of each drafted token as its confidence."""
    trace = drafter.acceptance
    assert isinstance(trace, Trace)
    meta = trace.meta.model_copy(update={"sts": None, "confidence_source": "draft_prob"})
    return replace(drafter, acceptance=replace(trace, confidence=trace.draft_prob, meta=meta), name="softmax")


def old_table(setting: Setting, users: int, profile: Profile) -> tuple[tuple[int, float], ...]:
    """Step seconds by tokens as measured on the old machine, with this one's drafting."""
    old = load_profile(ROOT / f"hw_profiles/{setting.stale}.json")
    tokens = [t for t in (9, 16, 32, 64, 96, 128, 192, 256, 384, 512, 700, 1024, 2048) if t <= setting.budget]
    context = setting.prompt + setting.output // 2
    seconds = decode_seconds(old, tokens, context, users)
    assert profile.draft is not None
    drafting = profile.draft.spread(users, setting.gamma, extrapolate=True)[users]
    return tuple((t, round(float(s + drafting), 6)) for t, s in zip(tokens, seconds, strict=True) if np.isfinite(s))


def measure(setting: Setting, users: int, seeds: int, jobs: int, quick: bool) -> pd.DataFrame:
    """Throughput and speed of every policy and seed at one load."""
    profile = load_profile(ROOT / f"hw_profiles/{setting.profile}.json")
    drafter = load_drafter(ROOT / "traces" / setting.trace, setting.gamma)
    output, requests = (setting.output // 4, 20) if quick else (setting.output, max(300, 4 * users))
    base = Scenario(
        profile,
        ClosedLoop(users, setting.prompt, output, measured=requests),
        drafter,
        max_num_batched_tokens=setting.budget,
        prefill=setting.prefill,
        extrapolate=True,
    )
    made = policies(setting, users, profile, drafter)
    table = sweep(base, policy=list(made.values()), seeds=range(seeds), jobs=jobs)
    names = {repr(policy): name for name, policy in made.items()}
    table = table[table["domain"] == "all"].assign(setting=setting.name, users=users)
    table["policy"] = table["policy"].map(names)
    return table[["setting", "users", "policy", "seed", "throughput", "interactivity_p50", "verified_tokens", "tau"]]


def paired(differences: np.ndarray) -> tuple[float, float, float]:
    """Mean, half of its 95 % interval and p of the paired t test; equal runs differ by nothing, for sure."""
    mean, n = float(differences.mean()), len(differences)
    error = float(stats.sem(differences))
    if error <= 1e-12:
        return mean, 0.0, float(abs(mean) <= 1e-9)
    return mean, float(stats.t.ppf(0.975, n - 1)) * error, float(2 * stats.t.sf(abs(mean / error), n - 1))


def holm(p: np.ndarray) -> np.ndarray:
    """Holm's adjusted p values [n]: reject where they are at most the family-wise level."""
    order = np.argsort(p, kind="stable")
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)), 1.0)
    return adjusted


def compare(runs: pd.DataFrame) -> pd.DataFrame:
    """Every pair of policies in every column: ln of the ratio of throughputs, half-width, p after Holm."""
    rows: list[dict[str, Any]] = []
    for (setting, users), cell in runs.groupby(["setting", "users"], sort=False):
        wide = np.log(cell.pivot_table(index="seed", columns="policy", values="throughput"))
        for a, b in combinations(cell["policy"].unique(), 2):
            mean, half, p = paired((wide[a] - wide[b]).to_numpy())
            rows.append({"setting": setting, "users": users, "a": a, "b": b, "ln_ratio": mean, "half": half, "p": p})
    pairs = pd.DataFrame(rows)
    pairs["p_holm"] = holm(pairs["p"].to_numpy())
    return pairs


def against(pairs: pd.DataFrame, cell: tuple[str, int], other: str) -> pd.DataFrame:
    """Every policy of a column against ``other``: ln ratio, half-width and p after Holm, by policy."""
    here = pairs[(pairs["setting"] == cell[0]) & (pairs["users"] == cell[1])]
    as_a, as_b = here[here["b"] == other].set_index("a"), here[here["a"] == other].set_index("b")
    both = pd.concat([as_a, as_b.assign(ln_ratio=-as_b["ln_ratio"])])[["ln_ratio", "half", "p_holm"]]
    both.loc[other] = (0.0, 0.0, 1.0)
    return both


def ranking(runs: pd.DataFrame, pairs: pd.DataFrame) -> pd.DataFrame:
    """One row a column and policy: gain over the reference in %, whether that is noise, whether it may be the best."""
    rows: list[dict[str, Any]] = []
    for cell, part in runs.groupby(["setting", "users"], sort=False):
        assert isinstance(cell, tuple)
        means = part.groupby("policy", sort=False)[["throughput", "interactivity_p50", "verified_tokens"]].mean()
        vs = against(pairs, cell, REFERENCE)
        best = str(vs.loc[[n for n in CONTENDERS if n in vs.index], "ln_ratio"].idxmax())
        vs_best = against(pairs, cell, best)
        for name in means.index:
            gain, half = vs.loc[name, "ln_ratio"], vs.loc[name, "half"]
            rows.append(
                {
                    "setting": cell[0], "users": cell[1], "policy": name, **means.loc[name].round(4).to_dict(),
                    "gain_percent": round(100 * np.expm1(gain), 3), "half_percent": round(100 * half * np.exp(gain), 3),
                    "noise": bool(vs.loc[name, "p_holm"] > LEVEL), "best": name == best,
                    "ties_with_best": name in CONTENDERS and bool(vs_best.loc[name, "p_holm"] > LEVEL),
                    "behind_best_percent": round(-100 * np.expm1(vs_best.loc[name, "ln_ratio"]), 3),
                }
            )  # fmt: skip
    return pd.DataFrame(rows)


def winners(table: pd.DataFrame) -> str:
    """Markdown: the best contender of every column, who ties with it, and how far behind others are."""
    shown = ("NoSpec", "StaticGamma(γ)", "SmartSpec", "LoadBlind(next step)", REFERENCE)
    lines = ["| setting | users | best | no different | " + " | ".join(f"{n} behind" for n in shown) + " |"]
    lines.append("|" + "---|" * (4 + len(shown)))
    for (setting, users), cell in table.groupby(["setting", "users"], sort=False):
        by = cell.set_index("policy")
        best = str(by.index[by["best"]][0])
        ties = ", ".join(n for n in by.index[by["ties_with_best"]] if n != best) or "–"
        behind = [
            "–" if n == best else f"{by.loc[n, 'behind_best_percent']:.1f}" + " ≈" * bool(by.loc[n, "ties_with_best"])
            for n in shown
        ]
        lines.append(f"| {setting} | {users} | {best} | {ties} | " + " | ".join(behind) + " |")
    return "\n".join(lines)


def costs(table: pd.DataFrame) -> str:
    """Markdown: what each way to mislead DSparkAsync costs in %, a column a setting, its loads in order."""
    settings = list(table["setting"].unique())
    lines = ["| % of throughput | " + " | ".join(settings) + " |", "|" + "---|" * (1 + len(settings))]
    for name in (*GROUPS["DSparkAsync, misled"], "DCut"):
        cells = []
        for setting in settings:
            rows = table[(table["policy"] == name) & (table["setting"] == setting)]
            cells.append(" / ".join(_cell(row) for _, row in rows.iterrows()) or "–")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(row: Mapping[str, Any]) -> str:
    return signed(row["gain_percent"], 1) + " ≈" * bool(row["noise"])


def main() -> None:
    """Run every setting and load; write the tables and the picture, print what the README shows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few short runs: a smoke test, not a result")
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--jobs", type=int, default=-1, help="processes (-1: one a core)")
    parser.add_argument("--out", type=Path, default=ROOT / "out/zoo")
    args = parser.parse_args()
    if args.seeds < 2:
        parser.error("--seeds: expected 2 or more: differences need an interval")
    if args.quick:
        seeds, loads = 2, [(setting, setting.users[0]) for setting in (SETTINGS[0], SETTINGS[-1])]
    else:
        seeds, loads = args.seeds, [(setting, users) for setting in SETTINGS for users in setting.users]
    runs = pd.concat([measure(setting, users, seeds, args.jobs, args.quick) for setting, users in loads])
    pairs = compare(runs)
    table = ranking(runs, pairs)
    noise = f"{100 * (pairs['p_holm'] > LEVEL).mean():.0f} % of {len(pairs):,} pairs are no different"
    head = f"{len(runs):,} runs, {seeds} seeds; {noise} (Holm, {100 * LEVEL:.0f} %)."
    text = f"{head}\n\n{winners(table)}\n\n{costs(table)}\n"
    write_text(args.out / "results.csv", table.to_csv(index=False, lineterminator="\n"))
    write_text(args.out / "tables.md", text)
    save_figure(draw(table, GROUPS, REFERENCE, seeds), args.out / "ranking.png")
    print(text)


if __name__ == "__main__":
    main()
