"""Predict vLLM's fixed and adaptive verification of DeepSeek-V4-Pro on 8 B300 from a few of its own loads.

    python experiments/dsv4_pro_b300/predict.py --json out/dsv4-pro.json --picture out/dsv4-pro.png

Step costs come from the loads without speculation and with K = 1, the acceptance of K = 1, 3 and 7 from one
user (rows.csv says which row plays which part). Fixed lengths are then predicted by the fitted curves alone;
adaptive verification (at most 7) is simulated: DSparkAsync with vLLM's staleness of one step, on blocks of
that acceptance. Exits 1 where the mean absolute error exceeds 8 %.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from scipy.optimize import brentq

import specsim as ss
from specsim.acceptance import Drafter, synthetic
from specsim.hardware import Profile
from specsim.importers.step_rows import read_step_rows
from specsim.step_fit import Row, Solution, StepFit, fit_steps

HERE = Path(__file__).parent
ADAPTIVE = {1: (269.0, 271.87), 16: (2037.3, 136.04), 64: (5197.3, 88.87), 256: (9719.3, 44.48)}
"""Adaptive, at most 7: throughput (tokens/s) and interactivity (tokens/s a user) by users; source as in rows.csv."""
CONCENTRATION = 1.44
"""Spread of the chances of survival, as fitted to the DSpark paper's figure 8 (experiments/dspark_production)."""
BAR = 0.08


def conditional(tau: dict[str, float]) -> tuple[float, ...]:
    """Chances [7] that a position survives, given the ones before: equal within 1, 2–3 and 4–7, with the three τ."""
    first = min(tau["K=1"] - 1, 0.99)
    middle = _root(first, tau["K=3"] - tau["K=1"], 2)
    last = _root(first * middle**2, tau["K=7"] - tau["K=3"], 4)
    return (first, middle, middle, last, last, last, last)


def _root(reach: float, gain: float, positions: int) -> float:
    """The chance x with reach·(x + .. + x^positions) = gain, within 0.01 .. 0.99."""
    total = lambda x: reach * sum(x**k for k in range(1, positions + 1)) - gain  # noqa: E731
    low, high = 0.01, 0.99
    return low if total(low) > 0 else high if total(high) < 0 else float(brentq(total, low, high))


def profile_of(fit: StepFit, solution: Solution | None = None) -> Profile:
    """The fitted step costs as a profile."""
    return Profile(
        schema="specsim.profile/1",
        name="dsv4-pro-b300-fit",
        kind="fitted",
        model="DeepSeek-V4-Pro",
        device="B300",
        gpus=8,
        tp=8,
        verify=fit.verify(solution),
        draft=fit.draft(solution),
        provenance={"source": "rows.csv"},
    )


def adaptive(
    fit: StepFit, users: float, solution: Solution | None = None, concentration: float | None = CONCENTRATION
) -> tuple[float, float]:
    """Simulated interactivity (tokens/s a user) and verified tokens a request of adaptive verification."""
    chances = conditional((solution or fit.best).tau)
    drafter: Drafter = synthetic(chances, concentration=concentration)
    scenario = ss.Scenario(
        profile=profile_of(fit, solution),
        drafter=drafter,
        workload=ss.ClosedLoop(max(1, round(users)), 1, 400, measured=max(40, 2 * round(users))),
        scheduler=ss.DSparkAsync(staleness=1),
        prefill="free",  # the prompts in the measured steps are inside the fitted step costs
        extrapolate=True,
    )
    summary = ss.summarize(ss.simulate(scenario, seed=0)).iloc[-1]
    return float(summary["interactivity_p50"]), float(summary["verified_tokens"])


def predict(draws: int) -> tuple[StepFit, list[dict[str, Any]]]:
    """The fit, and every predicted load beside the measured one."""
    rows = read_step_rows(HERE / "rows.csv")
    fit = fit_steps(rows)
    table: list[dict[str, Any]] = []
    for row in rows:
        low, high = fit.interval(row)
        table.append(entry(row.method, row, fit.best.speed(row), low, high, row.tokens(0), fit, row.check))
    for users, (throughput, speed) in ADAPTIVE.items():
        running = next(r for r in rows if r.method == "none" and r.concurrency == users).decoding
        found, verified = adaptive(fit, running)
        spread = [adaptive(fit, running, draw)[0] for draw in fit.draws[:draws]]
        low, high = np.quantile(spread, [0.05, 0.95]) if spread else (np.nan, np.nan)
        row = Row("adaptive", 7, users, throughput, speed, running=running)
        table.append(entry("adaptive", row, found, float(low), float(high), running * verified, fit, True))
    return fit, table


def entry(
    method: str, row: Row, speed: float, low: float, high: float, tokens: float, fit: StepFit, predicted: bool
) -> dict[str, Any]:
    """One load: interactivity measured and predicted, with its interval, and what throughput that makes."""
    return {
        "method": method, "users": row.concurrency, "tokens": tokens, "measured": row.interactivity,
        "predicted": speed, "low": low, "high": high, "error": speed / row.speed - 1,
        "measured_throughput": row.throughput, "predicted_throughput": speed * row.decoding,
        "counts": predicted, "extrapolated": tokens > fit.last_tokens * (1 + 1e-9),
    }  # fmt: skip


def draw(table: list[dict[str, Any]], path: Path) -> None:
    """Measured and predicted interactivity by users, a panel a method."""
    methods = ["none", "K=1", "K=3", "K=7", "adaptive"]
    titles = ["no speculation", "K = 1", "K = 3", "K = 7", "adaptive, at most 7"]
    figure, axes = plt.subplots(1, 5, figsize=(14, 3.6), sharey=True, layout="constrained")
    for axis, method, title in zip(axes, methods, titles, strict=True):
        rows = [e for e in table if e["method"] == method]
        users = np.array([e["users"] for e in rows], dtype=float)
        value = {k: np.array([e[k] for e in rows], dtype=float) for k in ("measured", "predicted", "low", "high")}
        axis.plot(users, value["measured"], color="#595959", linewidth=1.4, label="measured")
        fitted = np.array([not e["counts"] for e in rows])
        bars = np.abs(np.array([value["low"], value["high"]]) - value["predicted"])
        for mask, face, label in ((fitted, "white", "fitted"), (~fitted, "#0072B2", "predicted")):
            if mask.any():
                axis.errorbar(
                    users[mask], value["predicted"][mask], bars[:, mask], fmt="o", markersize=6, color="#0072B2",
                    markerfacecolor=face, linewidth=1.2, capsize=2, label=label,
                )  # fmt: skip
        for e, u, p in zip(rows, users, value["predicted"], strict=True):
            if e["counts"]:
                text = f"{e['error']:+.0%}"
                axis.annotate(text, (u, p), xytext=(-7, -11), textcoords="offset points", ha="right", fontsize=8)
        axis.set(title=title, xscale="log", yscale="log", xlabel="users", xlim=(0.35, 420), ylim=(22, 340))
        axis.set_xticks([1, 16, 64, 256], ["1", "16", "64", "256"])
        axis.set_yticks([25, 50, 100, 200], ["25", "50", "100", "200"])
        axis.minorticks_off()
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("tokens/s a user")
    axes[3].legend(frameon=False, fontsize=8, loc="lower left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def order_kept(table: list[dict[str, Any]], gap: float = 0.05) -> list[str]:
    """Pairs of methods at a load whose measured speeds differ by more than ``gap`` but are predicted the other way."""
    wrong = []
    for i, a in enumerate(table):
        for b in table[:i]:
            far = a["users"] == b["users"] and abs(np.log(a["measured"] / b["measured"])) > np.log1p(gap)
            if far and (a["measured"] > b["measured"]) != (a["predicted"] > b["predicted"]):
                wrong.append(f"{b['method']} and {a['method']} at {a['users']:.0f} users")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the table here")
    parser.add_argument("--picture", type=Path, help="draw it here")
    parser.add_argument("--draws", type=int, default=20, help="simulations for the interval of the adaptive loads")
    args = parser.parse_args()
    fit, table = predict(args.draws)
    print("tokens/s a user            users  tokens  measured  predicted   error   90 % interval")
    for e in table:
        mark = "*" if e["extrapolated"] else " "
        role = "predicted" if e["counts"] else "fitted"
        print(
            f"{e['method']:<12}{role:<12}"
            f"{e['users']:8.0f}{e['tokens']:8.0f}{mark}{e['measured']:9.1f}{e['predicted']:11.1f}{e['error']:+8.1%}"
            f"   {e['low']:.1f} .. {e['high']:.1f}"
        )
    print(f"* beyond the {fit.last_tokens:.0f} tokens that were fitted: the last slope goes on")
    for method in ("K=1", "K=3", "K=7"):
        low, high = fit.tau_interval(method)
        print(f"tau of {method}: {fit.best.tau[method]:.2f}, 90 % interval {low:.2f} .. {high:.2f}")
    counted = [abs(e["error"]) for e in table if e["counts"]]
    mean, wrong = float(np.mean(counted)), order_kept(table)
    print(f"{len(counted)} predictions: {mean:.1%} off on average (aim {BAR:.0%}), {max(counted):.1%} at worst")
    print(f"order of methods where measured differ by more than 5 %: {'; '.join(wrong) or 'kept everywhere'}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        data = {"rows": table, "tau": fit.best.tau, "mean_error": mean, "order_wrong": wrong}
        args.json.write_text(json.dumps(data, indent=1, default=float) + "\n", encoding="utf-8")
    if args.picture:
        draw(table, args.picture)
    return int(mean > BAR)


if __name__ == "__main__":
    sys.exit(main())
