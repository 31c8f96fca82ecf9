"""Predict vLLM's fixed and adaptive verification of DeepSeek-V4-Flash on 8 MI355X from a few of its own loads.

    python experiments/dsv4_flash_mi355x/predict.py --json out/dsv4-flash.json --picture out/dsv4-flash.png

Step costs come from the loads without speculation and from K = 7 at 4 and 128 users, acceptance from K = 7 at
4 users (rows.csv says which row plays which part). Adaptive verification (at most 7) is simulated: DSparkAsync
with vLLM's staleness of one step; what it costs a step is one constant, from 4 users. Exits 1 where the mean
absolute error exceeds 8 % or methods that differ by more than 5 % are predicted in the wrong order.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.optimize import brentq

import specsim as ss
from specsim.files import write_atomic
from specsim.hardware import Profile
from specsim.importers.step_rows import read_step_rows
from specsim.plots import GREY, plain_axes
from specsim.step_fit import Row, Solution, StepFit, fit_steps

HERE = Path(__file__).parent
ADAPTIVE = {4: 902.37, 8: 1616.77, 16: 2773.69, 32: 4501.11, 128: 10356.48}
"""Adaptive, at most 7: output tokens/s of the eight GPUs by users; source as in rows.csv. 4 users are fitted."""
GAMMA, OUTPUT, GPUS = 7, 512, 8
NOISE = 0.02
"""Relative standard deviation of a measured row, as in ``fit_steps``."""
BAR, GAP = 0.08, 0.05
STYLE = {
    "none": ("no speculation", GREY, "o", (4, 9), 1.0),
    "K=7": ("K = 7", "#D55E00", "s", (4, 9), 0.975),
    "adaptive": ("adaptive, at most 7", "#0072B2", "^", (4, -36), 1.025),
}
"""A method's title, colour, marker, the title's place and by what its points stand aside."""
LITTLE_SPREAD = 10.0
"""Concentration of confidences that hardly tell one block from another."""


@dataclass(frozen=True)
class Assumed:
    """What the rows do not tell."""

    concentration: float | None = 1.44
    """Spread of the chances of survival, as fitted to the DSpark paper's figure 8 (experiments/dspark_production)."""
    slope: float = 0.0
    """How much the log-odds of acceptance fall from one position to the next."""
    overconfidence: float = 1.0
    """What the head multiplies the log-odds by; vLLM takes its confidences as they are."""
    share: bool = False
    """The adaptive overhead is a share of the forward, not a constant number of seconds."""
    prompt: float = 0.0
    """Mean prompt tokens that are told apart; 0: prompts stay inside the fitted steps."""
    scheduler: Any = field(default_factory=lambda: ss.DSparkAsync(staleness=1))
    fit: dict[str, float] = field(default_factory=dict)
    """Of ``fit_steps``: smoothness, shrink."""
    tau: tuple[float, float] | None = None
    """In place of rows.csv's range of τ."""


def chances(tau: float, slope: float) -> tuple[float, ...]:
    """Chances [7] that a position survives, given the ones before, whose τ is ``tau``."""
    at = lambda level: 1 / (1 + np.exp(slope * np.arange(GAMMA) - level))  # noqa: E731
    level = brentq(lambda level: 1 + np.cumprod(at(level)).sum() - tau, -10, 20)
    return tuple(at(level).tolist())


def simulated(
    fit: StepFit, solution: Solution, users: int, overhead: float, assumed: Assumed, seeds: Iterable[int]
) -> tuple[float, float]:
    """Adaptive verification: tokens/s of all GPUs, and verified tokens a request and step; means over seeds."""
    verify = fit.verify(solution)
    if assumed.share:
        slower = {k: tuple((1 + overhead) * s for s in getattr(verify, k)) for k in ("seconds", "seqs_seconds")}
        verify = verify.model_copy(update=slower)
    profile = Profile(
        schema="specsim.profile/1", name="dsv4-flash-mi355x-fit", kind="fitted", model="DeepSeek-V4-Flash",
        device="MI355X", gpus=GPUS, tp=8, verify=verify, draft=fit.draft(solution),
        host_seconds=0.0 if assumed.share else overhead, provenance={"source": "rows.csv"},
    )  # fmt: skip
    drafter = ss.synthetic(
        chances(solution.tau["K=7"], assumed.slope),
        concentration=assumed.concentration,
        overconfidence=assumed.overconfidence,
    )
    scenario = ss.Scenario(
        profile=profile,
        drafter=drafter,
        workload=ss.ClosedLoop(users, round(assumed.prompt) or 1, OUTPUT, measured=max(60, 2 * users)),
        scheduler=assumed.scheduler,
        prefill="chunked" if assumed.prompt else "free",
        extrapolate=True,
    )
    runs = [ss.summarize(ss.simulate(scenario, seed)).iloc[-1] for seed in seeds]
    return tuple(float(np.mean([r[k] for r in runs])) * f for k, f in (("throughput", GPUS), ("verified_tokens", 1)))


def overhead_of(throughput_at: Callable[[float], float], measured: float, unit: float) -> float:
    """The overhead, 0 or more, at which ``throughput_at`` it is the measured one; ``unit`` is a first guess.

    Planned lengths move with it in whole tokens, so a few steps of the secant rule are as good as it gets.
    """
    pace = lambda overhead: 1 / throughput_at(overhead) - 1 / measured  # noqa: E731  seconds a token: nearly linear
    last, at = 0.0, unit
    lack, now = pace(last), pace(at)
    for _ in range(3):
        if now == lack:
            break
        last, at, lack = at, max(0.0, at - now * (at - last) / (now - lack)), now
        now = pace(at)
    return at


def predict(
    draws: int = 0, seeds: int = 3, assumed: Assumed | None = None
) -> tuple[StepFit, float, list[dict[str, Any]]]:
    """The fit, the adaptive overhead (seconds, or as ``Assumed.share`` says), and every load measured and predicted."""
    assumed = assumed or Assumed()
    changes: dict[str, Any] = {"prompt_tokens": assumed.prompt, "output_tokens": OUTPUT if assumed.prompt else 0}
    rows = [replace(row, **changes) for row in read_step_rows(HERE / "rows.csv")]
    if assumed.tau:
        rows = [replace(row, tau_range=assumed.tau) if row.gamma else row for row in rows]
    fit = fit_steps(rows, noise=NOISE, draws=max(draws, 2), **assumed.fit)
    table: list[dict[str, Any]] = []
    for row in rows:
        low, high = (x * row.decoding for x in fit.interval(row)) if draws else (np.nan, np.nan)
        found = fit.best.speed(row) * row.decoding
        table.append(entry(row.method, row, found, low, high, row.tokens(fit.best.tau[row.method]), row.check))

    def adaptive(solution: Solution, measured: float, seeds: Iterable[int]) -> tuple[float, dict[int, Any]]:
        first = min(ADAPTIVE)
        run = lambda users, overhead: simulated(fit, solution, users, overhead, assumed, seeds)  # noqa: E731
        overhead = overhead_of(lambda s: run(first, s)[0], measured, unit=0.1 if assumed.share else 1e-3)
        return overhead, {users: run(users, overhead) for users in ADAPTIVE}

    overhead, best = adaptive(fit.best, ADAPTIVE[4], range(seeds))
    noise = np.exp(NOISE * np.random.default_rng(0).standard_normal(draws))
    others = [adaptive(d, ADAPTIVE[4] * e, [0])[1] for d, e in zip(fit.draws[:draws], noise, strict=True)]
    for users, throughput in ADAPTIVE.items():
        low, high = np.quantile([o[users][0] for o in others], [0.05, 0.95]) if others else (np.nan, np.nan)
        found, verified = best[users]
        row = Row("adaptive", GAMMA, users, throughput)
        table.append(entry("adaptive", row, found, low, high, users * verified, users != min(ADAPTIVE)))
    return fit, overhead, table


def entry(
    method: str, row: Row, found: float, low: float, high: float, tokens: float, predicted: bool
) -> dict[str, Any]:
    """One load: output tokens/s of all GPUs measured and predicted, and whether it counts as predicted."""
    return {
        "method": method, "users": int(row.concurrency), "tokens": tokens, "measured": row.throughput,
        "predicted": found, "low": low, "high": high, "error": found / row.throughput - 1, "counts": predicted,
    }  # fmt: skip


def order_wrong(table: list[dict[str, Any]]) -> list[str]:
    """Pairs of methods at a load whose measured throughput differs by more than 5 % but is predicted the other way."""
    return [
        f"{a['method']} and {b['method']} at {a['users']} users"
        for a, b in combinations(table, 2)
        if a["users"] == b["users"]
        and abs(np.log(a["measured"] / b["measured"])) > np.log1p(GAP)
        and (a["measured"] > b["measured"]) != (a["predicted"] > b["predicted"])
    ]


def mean_error(table: list[dict[str, Any]]) -> float:
    """Mean absolute error of the loads that are predicted."""
    return float(np.mean([abs(e["error"]) for e in table if e["counts"]]))


ALTERNATIVES = {
    "both priors of the fit halved": Assumed(fit={"smoothness": 0.05, "shrink": 0.05}),
    "both doubled": Assumed(fit={"smoothness": 0.2, "shrink": 0.2}),
    "slopes may change by 5 %": Assumed(fit={"smoothness": 0.05}),
    "slopes may change by 20 %": Assumed(fit={"smoothness": 0.2}),
    "sequences may add 5 %": Assumed(fit={"shrink": 0.05}),
    "sequences may add 20 %": Assumed(fit={"shrink": 0.2}),
    "tau 2.5": Assumed(tau=(2.499, 2.501)),
    "tau 3.35": Assumed(tau=(3.349, 3.351)),
    "tau anywhere in 1 .. 8": Assumed(tau=(1.0, 8.0)),
    "acceptance falls by 0.2 a position": Assumed(slope=0.2),
    "confidence: twice the spread (0.72)": Assumed(concentration=0.72),
    "confidence: half the spread (2.88)": Assumed(concentration=2.88),
    "confidence: little spread (10)": Assumed(concentration=LITTLE_SPREAD),
    "confidence: no spread": Assumed(concentration=None),
    "head too sure (log-odds x 1.4)": Assumed(overconfidence=1.4),
    "plans on current confidences": Assumed(scheduler=ss.GlobalArgmax()),
    "newcomers at the mean": Assumed(scheduler=ss.DSparkAsync(staleness=1, newcomer="mean")),
    "220 prompt tokens told apart": Assumed(prompt=220),
    "overhead a share of the forward": Assumed(share=True),
    "that, and 220 prompt tokens": Assumed(share=True, prompt=220),
}
"""One assumption changed at a time; nothing here was chosen by what it does to the predicted rows."""


def draw(table: list[dict[str, Any]], tight: list[dict[str, Any]]) -> Figure:
    """Speed a user by users, and what adaptive verification gains over K = 7: measured lines, predicted points.

    ``tight`` is the table with confidences that hardly differ from block to block.
    """
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    figure.get_layout_engine().set(wspace=0.06)  # type: ignore[union-attr]
    left, right = figure.subplots(1, 2)
    for method, (title, colour, marker, place, shift) in STYLE.items():
        rows = [e for e in table if e["method"] == method]
        users = np.array([e["users"] for e in rows])
        speed = {k: np.array([e[k] for e in rows]) / users for k in ("measured", "predicted", "low", "high")}
        left.plot(users, speed["measured"], color=colour, linewidth=1.4)
        left.annotate(title, (users[0], speed["measured"][0]), xytext=place, textcoords="offset points", color=colour)
        told = np.array([e["counts"] for e in rows])
        for mask, face in ((~told, "white"), (told, colour)):
            reach = np.abs(np.array([speed["low"], speed["high"]]) - speed["predicted"])[:, mask]
            left.errorbar(
                users[mask] * shift, speed["predicted"][mask], reach, fmt=marker, markersize=6.5, color=colour,
                markerfacecolor=face, linewidth=1.2, capsize=2,
            )  # fmt: skip
    left.set_title("tokens/s a user", loc="left", fontsize=11)
    left.set(yscale="log", ylim=(42, 330))
    left.set_yticks([50, 100, 200], ["50", "100", "200"])
    users, blue = list(ADAPTIVE), STYLE["adaptive"][1]
    predicted = gain(table, "predicted")
    right.axhline(0, color=GREY, linewidth=0.9)
    right.plot(users, gain(table, "measured"), "-", color="black", linewidth=1.4, label="measured")
    right.plot(users[:1], predicted[:1], "^", markersize=7, color=blue, markerfacecolor="white", label="fitted")
    right.plot(users[1:], predicted[1:], "^", markersize=7, color=blue, label="predicted")
    label = "the same, confidences of little spread"
    right.plot(
        users[1:], gain(tight, "predicted")[1:], "D", markersize=5, color=GREY, markerfacecolor="none", label=label
    )
    for u, value in list(zip(users, predicted, strict=True))[1:]:
        text = f"{100 * value:+.0f} %".replace("-", "\u2212")
        right.annotate(text, (u, value), xytext=(0, 9), textcoords="offset points", ha="center", color=blue)
    right.set_title("throughput of adaptive against K = 7", loc="left", fontsize=11)
    right.set_ylim(-0.15, 0.36)
    right.set_yticks([-0.1, 0, 0.1, 0.2, 0.3], ["\u221210 %", "equal", "+10 %", "+20 %", "+30 %"])
    right.legend(frameon=False, loc="upper left")
    for axis in (left, right):
        _look(axis)
    handles = [
        left.plot([], [], color=GREY, linewidth=1.4, label="measured")[0],
        left.plot([], [], "o", color=GREY, markerfacecolor="white", label="fitted")[0],
        left.plot([], [], "o", color=GREY, label="predicted")[0],
    ]
    left.legend(handles=handles, frameon=False, loc="lower left")
    return figure


def gain(table: list[dict[str, Any]], key: str) -> list[float]:
    """What adaptive verification sells more than K = 7, as a share, by load."""
    value = {(e["method"], e["users"]): e[key] for e in table}
    return [value["adaptive", u] / value["K=7", u] - 1 for u in ADAPTIVE]


def _look(axis: Axes) -> None:
    axis.set(xscale="log", xlabel="users", xlim=(3.2, 160))
    axis.set_xticks(list(ADAPTIVE), [str(u) for u in ADAPTIVE])
    axis.minorticks_off()
    plain_axes(axis)


def show(fit: StepFit, overhead: float, table: list[dict[str, Any]]) -> None:
    """Print the table and the verdict."""
    print("output tokens/s         users  tokens  measured  predicted   error   90 % interval")
    for e in table:
        role = "predicted" if e["counts"] else "fitted"
        interval = "" if np.isnan(e["low"]) else f"   {e['low']:,.0f} .. {e['high']:,.0f}"
        print(
            f"{e['method']:<10}{role:<10}{e['users']:9}{e['tokens']:8.0f}{e['measured']:10,.0f}{e['predicted']:11,.0f}"
            f"{e['error']:+8.1%}{interval}"
        )
    print(f"tau of K = 7: {fit.best.tau['K=7']:.2f}; adaptive verification adds {1e3 * overhead:.2f} ms a step")
    counted = [abs(e["error"]) for e in table if e["counts"]]
    mean, worst = np.mean(counted), max(counted)
    print(f"{len(counted)} predictions: {mean:.1%} off on average (aim {BAR:.0%}), {worst:.1%} at worst")
    print(
        f"order of methods where measured differ by more than 5 %: {'; '.join(order_wrong(table)) or 'kept everywhere'}"
    )


def show_alternatives() -> list[dict[str, Any]]:
    """Predict under each other assumption; one line each as they come."""
    print("\nassumption                            tau  mean error  worst  adaptive at 32, 128  order wrong")
    found = []
    for name, assumed in ALTERNATIVES.items():
        fit, overhead, table = predict(assumed=assumed)
        errors = {e["users"]: e["error"] for e in table if e["method"] == "adaptive"}
        worst = max(abs(e["error"]) for e in table if e["counts"])
        wrong = order_wrong(table)
        print(
            f"{name:<36}{fit.best.tau['K=7']:5.2f}{mean_error(table):12.1%}{worst:7.1%}"
            f"{errors[32]:+14.1%}{errors[128]:+7.1%}  {'; '.join(wrong) or 'nowhere'}",
            flush=True,
        )
        found.append({"assumption": name, "overhead": overhead, "rows": table, "order_wrong": wrong})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the table here")
    parser.add_argument("--picture", type=Path, help="draw it here")
    parser.add_argument("--draws", type=int, default=20, help="fits and simulations for the intervals; 0: none")
    parser.add_argument("--sensitivity", action="store_true", help="predict under other assumptions too")
    args = parser.parse_args()
    fit, overhead, table = predict(args.draws)
    show(fit, overhead, table)
    data = {"rows": table, "tau": fit.best.tau["K=7"], "overhead_s": overhead, "mean_error": mean_error(table)}
    data["order_wrong"] = order_wrong(table)
    if args.sensitivity:
        data["alternatives"] = show_alternatives()
    if args.json:
        text = json.dumps(data, indent=1, default=float).replace("NaN", "null") + "\n"
        write_atomic(args.json, lambda path: path.write_text(text, encoding="utf-8"))
    if args.picture:
        tight = predict(assumed=Assumed(concentration=LITTLE_SPREAD))[2]
        ss.save_figure(draw(table, tight), args.picture)
    return int(data["mean_error"] > BAR or bool(data["order_wrong"]))


if __name__ == "__main__":
    sys.exit(main())
