"""The text of a prediction: what is predicted beside what was published, and other assumptions below."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from figures import Figures
from model import Fit
from verdict import Gain, Verdict


def print_prediction(
    figures: Figures,
    fitted: Fit,
    fit_loads: Sequence[int],
    mtp1_error: float,
    verdict: Verdict,
    floor: float,
    matched: float,
) -> None:
    """Print the fit, the points, the gains and the bars."""
    model = fitted.model
    print(f"{figures.target}: {figures.method} predicted from the MTP-1 curve (τ of MTP-1 assumed {model.tau_mtp:g})")
    print(
        f"\nfitted at concurrency {listed(fit_loads)}{'' if fitted.converged else ' (NOT CONVERGED)'}: "
        f"conditional acceptance {model.acceptance:.4f} ± {fitted.acceptance_se:.4f}, "
        f"Beta concentration {model.concentration:.3f} ± {fitted.concentration_se:.3f}"
        f"\n(± a standard error from the runs' noise; sum of squared relative errors {fitted.objective:.2e})"
        f"\ncheck: MTP-1 simulated on its own curve comes within {100 * mtp1_error:.1f} %"
    )
    print("\n                throughput (tok/s per GPU)            verified tokens per request")
    print("concurrency     predicted   published     error        predicted   published    diff        τ")
    for p in verdict.points.itertuples():
        more = p.verified_tokens - p.verified_tokens_published
        print(
            f"{p.concurrency:11d} {p.throughput:9,.0f} ± {p.throughput_ci:<3.0f}"
            f" {_cell(p.throughput_published, 10, ',.0f')} {_cell(100 * p.throughput_error, 8, '+.1f')} %"
            f" {p.verified_tokens:9.2f} ± {p.verified_tokens_ci:.3f} {_cell(p.verified_tokens_published, 9, '.2f')}"
            f" {_cell(more, 8, '+.2f')} {p.tau:8.2f}"
        )
    print()
    for what, at, gain in (
        ("throughput", f"{floor:g} tok/s/user", verdict.throughput_gain),
        ("speed", f"{matched:,.0f} tok/s per GPU", verdict.speed_gain),
    ):
        print(f"{what} gain at {at}: {_gain(gain)}")
    print()
    for bar in verdict.bars:
        state = "holds" if bar.holds else "MISSED"
        print(f"{state:6}  {bar.name:28} {_cell(bar.value, 6, '.2f')}  of at most {bar.limit:g} {bar.unit}")


def print_variants(title: str, predicted: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """Print what the prediction becomes under other assumptions; nothing where there are none."""
    if not rows:
        return
    print(f"\n{title} (fitted again; = marks those left at the same parameters)\n")
    print(f"{'':35}accept-  concen-  sq. err.    throughput    verified  throughput   speed")
    print(f"{'':35}ance     tration  × 1e4     worst   mean    worst      gain       gain")
    for r in [predicted, *rows]:
        worst, mean, verified, *_ = r["bars"].values()
        name = r["assumption"] + ("" if r["refit"] else " =")
        print(
            f"{name:34} {r['conditional_acceptance']:.4f} {r['concentration']:8.3f}"
            f" {1e4 * r['squared_error_at_fit_loads']:8.1f} {worst:8.1f} % {mean:4.1f} % {verified:7.2f}"
            f" {_cell(100 * r['throughput_gain'], 9, '+.1f')} % {_cell(100 * r['speed_gain'], 8, '+.1f')} %"
            f"{'' if r['missed'] else '  all bars hold'}"
        )


def listed(loads: Sequence[int]) -> str:
    """The loads as text."""
    return ", ".join(str(c) for c in loads)


def _gain(gain: Gain) -> str:
    predicted, interval, true = (100 * g for g in (gain.predicted, gain.interval, gain.published))
    return (
        f"{_cell(predicted, 0, '+.1f')} ± {_cell(interval, 0, '.1f')} % predicted, {_cell(true, 0, '+.1f')} % published"
    )


def _cell(value: float, width: int, spec: str) -> str:
    return (format(value, spec) if math.isfinite(value) else "–").rjust(width)
