"""Write the shipped synthetic traces from the DSpark paper's figures.

    python experiments/qwen3_traces/make.py --figures FIGURES.csv --out traces/

FIGURES.csv holds points read off the figures of arXiv 2607.05147 with the columns figure, target,
method, panel, x_name, x, y_name, y. Figure 2 gives the conditional acceptance of each position.
The spread of DSpark's confidence (the Beta concentration κ of a domain) is fitted to figure 5, the
sweep of a confidence threshold: with independent positions, the expected verified and accepted
tokens under a threshold are products of incomplete Beta integrals, so no simulation is needed.
Figure 5 has other data sets than figure 2 (GSM8K, HumanEval, MT-Bench alone), hence another mean:
it is shifted, on the logit scale, to figure 5's own rate without a threshold.
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import brentq, minimize_scalar
from scipy.special import betaincc, expit, logit

from specsim.files import write_json
from specsim.hardware import Provenance
from specsim.synthesis import Domain, Synthetic

TARGET = "Qwen3-4B"
PAPER = "DSpark, arXiv 2607.05147"
COMMAND = "python experiments/qwen3_traces/make.py --figures FIGURES.csv --out traces/"
DATE = "2026-11-29"


def under_threshold(mean: np.ndarray, kappa: float, threshold: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Expected tokens a cycle and token acceptance rate (bonus counted) [thresholds] of Threshold(c)."""
    a, b = (mean * kappa)[:, None], ((1 - mean) * kappa)[:, None]
    passes = betaincc(a, b, threshold)  # P(c_k >= threshold)
    survives = mean[:, None] * betaincc(a + 1, b, threshold)  # E[c_k; c_k >= threshold]
    tokens = 1 + np.cumprod(survives, axis=0).sum(axis=0)
    return tokens, tokens / (1 + np.cumprod(passes, axis=0).sum(axis=0))


def fit_concentration(mean: np.ndarray, sweep: pd.DataFrame) -> tuple[float, float]:
    """κ that fits figure 5's two curves best, and the root mean square of what it leaves (relative)."""
    table = sweep.pivot_table(index="x", columns="y_name", values="y").sort_index()
    threshold = table.index.to_numpy()
    tokens = table["accepted_tokens_per_step"].to_numpy()
    rate = table["acceptance_rate_pct"].to_numpy() / 100

    def tokens_without_threshold(shift: float) -> float:
        return float(1 + np.cumprod(expit(logit(mean) + shift)).sum() - tokens[0])

    shifted = expit(logit(mean) + brentq(tokens_without_threshold, -3, 3))

    def loss(log_kappa: float) -> float:
        got_tokens, got_rate = under_threshold(shifted, float(np.exp(log_kappa)), threshold)
        return float(np.mean(np.concatenate([got_tokens / tokens - 1, got_rate / rate - 1]) ** 2))

    best = minimize_scalar(loss, bounds=(-1, 5), method="bounded")
    return float(np.exp(best.x)), float(np.sqrt(best.fun))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figures", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("traces"))
    arguments = parser.parse_args()
    figures = pd.read_csv(arguments.figures)
    figures = figures[figures["target"] == TARGET]
    for drafter in ("DSpark", "DFlash", "Eagle3"):
        domains, notes = {}, []
        for name in ("math", "code", "chat"):
            of_domain = figures[(figures["method"] == drafter) & (figures["panel"] == name)]
            mean = of_domain[of_domain["figure"] == "fig2"].sort_values("x")["y"].to_numpy()
            kappa = None
            if drafter == "DSpark":
                kappa, left = fit_concentration(mean, of_domain[of_domain["figure"] == "fig5"])
                kappa = round(kappa, 2)
                notes.append(f"{name} {kappa} (rms residual {100 * left:.1f} %)")
            domains[name] = Domain(conditional_acceptance=mean.tolist(), concentration=kappa)
        spread = (
            f"Beta concentration fitted to figure 5 with independent positions: {', '.join(notes)}."
            if notes
            else "No spread is published: the confidence is the mean of the position."
        )
        trace = Synthetic(
            drafter=drafter,
            target=TARGET,
            gamma=7,
            confidence_source="head" if notes else "position_mean",
            domains=domains,
            provenance=Provenance(
                source=f"{PAPER}: conditional acceptance from figure 2",
                command=COMMAND,
                date=DATE,
                notes=f"{spread} Positions of a block and blocks of a request are independent; calibrated.",
            ),
        )
        print(write_json(arguments.out / f"qwen3-4b-{drafter.lower()}.json", trace), *notes, sep="\n  ")
    mtp = Synthetic(
        drafter="MTP-1",
        target="DeepSeek-V3",
        gamma=1,
        confidence_source="position_mean",
        domains={"*": Domain(conditional_acceptance=(0.85,))},
        provenance=Provenance(
            source="DeepSeek-V3 report, arXiv 2412.19437: the second token is accepted 85 to 90 % of the time",
            command=COMMAND,
            date=DATE,
            notes="The lower end of the range, for every domain. No spread is published.",
        ),
    )
    print(write_json(arguments.out / "mtp1.json", mtp))


if __name__ == "__main__":
    main()
