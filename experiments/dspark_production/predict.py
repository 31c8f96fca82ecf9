"""Predict a deployment's DSpark throughput and verified tokens from its MTP-1 throughput.

    python experiments/dspark_production/predict.py --figures FIGURES.csv --target DeepSeek-V4-Flash \\
        --json out.json --plot front.png

FIGURES.csv has the columns figure, target, method, panel, x, y (see figures.py). The published MTP-1
curve gives the step times; two acceptance parameters are fitted at two loads; simulate() gives the
rest. What was published is printed beside it, with the bars that the prediction has to hold, then
what changes under other assumptions. Exit code: 0 all bars hold, 1 one is missed, 2 bad input.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pandas as pd
from figures import Curve, Figures, read_figures
from fit_profile import TAU_MTP
from model import Fit, Model, Simulator, fit
from report import listed, print_prediction, print_variants
from verdict import Gain, Verdict, judge

from specsim import DSparkAsync, GlobalArgmax
from specsim.files import write_text
from specsim.types import SpecsimError

FIRST_PREDICTION_SEED = 100
"""Predictions use blocks that the fit, whose seeds start at 0, has not seen."""


@dataclass(frozen=True)
class Variant:
    """Another assumption: a model, fitted again (at the usual loads or ``loads``) or left at the same parameters.

    ``own_blocks``: its blocks are drawn otherwise, so that its runs have no random numbers in common.
    """

    name: str
    model: Model
    refit: bool = True
    free_draft: bool = False
    loads: tuple[int, ...] = ()
    own_blocks: bool = False


def sensitivities(model: Model) -> list[Variant]:
    """The assumptions that are shown whatever comes out: τ of MTP-1, and independent positions."""
    shared = replace(model, block_correlation=1.0)
    taus = [t for t in (round(model.tau_mtp - 0.05, 4), round(model.tau_mtp + 0.05, 4)) if 1 < t <= 2]
    return [
        *(Variant(f"τ of MTP-1 {t:.2f}", replace(model, tau_mtp=t)) for t in taus),
        Variant("one confidence per block", shared, own_blocks=True),
        Variant("… at the same parameters", shared, refit=False),
    ]


def ablations(model: Model, loads: Sequence[int]) -> list[Variant]:
    """The assumptions that may be behind a miss."""
    spread = tuple(sorted({*loads[1::2]}))
    return [
        Variant("draft cost per request, fitted", model, free_draft=True),
        Variant("head too sure, logits × 1.4", replace(model, overconfidence=1.4)),
        Variant("blocks correlated, lag 1: 0.5", replace(model, autocorrelation=0.5), own_blocks=True),
        Variant("acceptance falls with position", replace(model, position_slope=-0.3)),
        *([Variant(f"fitted at {listed(spread)}", model, loads=spread)] if len(spread) > 1 else []),
        Variant("staleness 1", replace(model, scheduler=DSparkAsync(staleness=1)), refit=False),
        Variant("newcomers at the mean", replace(model, scheduler=DSparkAsync(newcomer="mean")), refit=False),
        Variant("GlobalArgmax", replace(model, scheduler=GlobalArgmax()), refit=False),
        Variant("half the slope beyond the curve", replace(model, slope_factor=0.5), refit=False),
        Variant("twice the slope beyond it", replace(model, slope_factor=2.0), refit=False),
    ]


class Study:
    """One deployment, one question: the arguments and what is computed from them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        if args.plot and args.plot.suffix.lower() not in (".png", ".svg"):
            raise SpecsimError(f"--plot {args.plot}: expected a name that ends in .png or .svg")
        self.figures = read_figures(args.figures, args.target)
        self.loads, self.fit_loads = sorted(set(args.loads)), sorted(set(args.fit_loads))
        for panel, curve in (("throughput", self.figures.throughput), ("budget", self.figures.verified)):
            for load in self.fit_loads:
                _covered(args.figures, self.figures, panel, curve, load, "--fit-loads")
            if not any(curve.covers(load) for load in self.loads):
                _covered(args.figures, self.figures, panel, curve, self.loads[0], "--loads")
        self.seeds = range(FIRST_PREDICTION_SEED, FIRST_PREDICTION_SEED + args.seeds)
        self.simulator = Simulator(self.figures, args.jobs)
        self.seconds: dict[str, float] = {}
        self.base = Model(tau_mtp=args.tau_mtp, output_tokens=args.output_tokens)
        self.base.profile(self.figures)  # what is wrong with τ or the MTP-1 curve is told now

    def run(self) -> int:
        """Do everything; return the exit code."""
        args, start = self.args, time.perf_counter()
        mtp1 = self._timed("MTP-1 check", lambda: self.simulator.mtp1_error(self.base, self.fit_loads))
        fitted = self._timed(
            "fit", lambda: fit(self.simulator, self.base, self.fit_loads, range(args.fit_seeds), grid=True)
        )
        runs = self._timed("prediction", lambda: self.simulator.runs(fitted.model, self.loads, self.seeds))
        verdict = judge(self.figures, runs, args.floor, args.matched)
        print_prediction(self.figures, fitted, self.fit_loads, mtp1, verdict, args.floor, args.matched)
        sensitivity: list[dict[str, Any]] = []
        ablation: list[dict[str, Any]] = []
        if not args.quick:
            one = self._timed("fit with one seed", lambda: fit(self.simulator, fitted.model, self.fit_loads, range(1)))
            others = sensitivities(one.model)
            sensitivity = self._timed("sensitivity", lambda: self._variants(runs, one.model, others))
            if not verdict.holds:
                suspects = ablations(one.model, self.loads)
                ablation = self._timed("ablation", lambda: self._variants(runs, one.model, suspects))
        predicted = self._row("as predicted", True, fitted.model, verdict)
        print_variants("Other assumptions", predicted, sensitivity)
        print_variants("What is behind the miss", predicted, ablation)
        error = predicted["squared_error_at_fit_loads"]
        better = [r for r in ablation if not r["missed"] and r["squared_error_at_fit_loads"] < error]
        better.sort(key=lambda r: float(r["squared_error_at_fit_loads"]))
        if better:
            print("\nall bars hold, and the loads of the fit are met better, with (best first):")
        for r in better:
            microseconds = 1e6 * r["draft_seconds_per_request"]
            print(f"  {r['assumption']}" + (f": {microseconds:.1f} µs a request and step" if microseconds else ""))
        self.seconds["total"] = time.perf_counter() - start
        print("\nseconds: " + ", ".join(f"{name} {value:.0f}" for name, value in self.seconds.items()))
        if args.json:
            summary = self._summary(fitted, mtp1, verdict) | {
                "sensitivity": sensitivity,
                "ablation": ablation,
                "responsible": [r["assumption"] for r in better],
            }
            points = verdict.points.to_dict("records")
            text = json.dumps(_plain({"points": points, "summary": summary}), indent=1, ensure_ascii=False)
            write_text(args.json, text + "\n")
        if args.plot:
            from picture import draw

            from specsim.plots import save_figure

            save_figure(draw(self.figures, verdict, self.fit_loads, args.floor, args.matched), args.plot)
        return 0 if verdict.holds else 1

    def _variants(self, runs: pd.DataFrame, base: Model, variants: list[Variant]) -> list[dict[str, Any]]:
        """What the prediction (its ``runs``) becomes under each variant of ``base``.

        Fitted with one seed and run with one: what a variant changes against ``base``, on the same two
        seeds, is applied to ``runs``, load by load. Most of the noise is common to both and cancels. Where
        it does not, since the variant draws its blocks otherwise, it gets all the seeds of the prediction.
        """
        changed = ["throughput", "tps_per_request", "verified_tokens"]
        before = self.simulator.runs(base, self.loads, self.seeds[:1]).set_index("load")[changed]
        rows = []
        for v in variants:
            model = v.model
            if v.refit:
                seeds = range(self.args.fit_seeds if v.own_blocks else 1)
                model = fit(self.simulator, model, v.loads or self.fit_loads, seeds, free_draft=v.free_draft).model
            if v.own_blocks:
                there = self.simulator.runs(model, self.loads, self.seeds)
            else:
                factor = self.simulator.runs(model, self.loads, self.seeds[:1]).set_index("load")[changed] / before
                there = runs.assign(**{c: runs[c] * runs["load"].map(factor[c]) for c in changed})
            verdict = judge(self.figures, there, self.args.floor, self.args.matched)
            rows.append(self._row(v.name, v.refit, model, verdict))
            print(f"  {v.name}: done", file=sys.stderr)
        return rows

    def _row(self, name: str, refit: bool, model: Model, verdict: Verdict) -> dict[str, Any]:
        return {
            "assumption": name,
            "refit": refit,
            "conditional_acceptance": model.acceptance,
            "concentration": model.concentration,
            "draft_seconds_per_request": model.draft_seconds,
            "squared_error_at_fit_loads": verdict.objective(self.fit_loads),
            "bars": {bar.name: bar.value for bar in verdict.bars},
            "missed": [bar.name for bar in verdict.bars if not bar.holds],
            "throughput_gain": verdict.throughput_gain.predicted,
            "speed_gain": verdict.speed_gain.predicted,
        }

    def _timed(self, name: str, work: Callable[[], Any]) -> Any:
        print(f"{name} …", file=sys.stderr)
        start = time.perf_counter()
        result = work()
        self.seconds[name] = time.perf_counter() - start
        return result

    def _summary(self, fitted: Fit, mtp1: float, verdict: Verdict) -> dict[str, Any]:
        args, model = self.args, fitted.model

        def gain(g: Gain) -> dict[str, float]:
            return {"predicted": g.predicted, "ci": g.interval, "published": g.published, "points": g.points}

        return {
            "target": args.target,
            "method": self.figures.method,
            "fitted": {
                "loads": self.fit_loads,
                "conditional_acceptance": model.acceptance,
                "conditional_acceptance_se": fitted.acceptance_se,
                "concentration": model.concentration,
                "concentration_se": fitted.concentration_se,
                "squared_error": fitted.objective,
                "errors": fitted.errors.tolist(),
                "converged": fitted.converged,
                "trail": [list(pair) for pair in fitted.trail],
            },
            "assumed": {
                "tau_mtp": model.tau_mtp,
                "scheduler": repr(model.scheduler),
                "output_tokens": model.output_tokens,
            },
            "mtp1_error": mtp1,
            "throughput_gain": {"at_tok_s_user": args.floor} | gain(verdict.throughput_gain),
            "speed_gain": {"at_tok_s_gpu": args.matched} | gain(verdict.speed_gain),
            "bars": [
                {"name": b.name, "value": b.value, "limit": b.limit, "unit": b.unit, "holds": b.holds}
                for b in verdict.bars
            ],
            "holds": verdict.holds,
            "seeds": {"fit": args.fit_seeds, "prediction": args.seeds},
            "seconds": self.seconds,
        }


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    try:
        return Study(args).run()
    except SpecsimError as error:
        print(f"predict.py: {error}", file=sys.stderr)
        return 2


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"predict.py: {message}\n")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--figures", type=Path, required=True, help="CSV of published curves")
    add("--target", required=True, help="target in that file, such as DeepSeek-V4-Flash")
    add("--json", type=Path, help="write points and summary here")
    add("--plot", type=Path, help="write the picture here (.png or .svg)")
    add("--quick", action="store_true", help="the prediction alone, without other assumptions")
    add("--jobs", type=_whole(1, 1024), default=1, help="processes (default: %(default)s)")
    add("--seeds", type=_whole(2, 8), default=8, help="runs a load of the prediction (default: %(default)s)")
    add("--fit-seeds", type=_whole(1, 8), default=3, help="runs a load of the fit (default: %(default)s)")
    add("--loads", type=_loads, default=list(range(25, 226, 25)), help="concurrencies (default: 25,50,…,225)")
    add("--fit-loads", type=_loads, default=[50, 150], help="those that the fit sees (default: 50,150)")
    add("--output-tokens", type=_whole(2, 1 << 20), default=512, help="length of answers (default: %(default)s)")
    add("--tau-mtp", type=float, default=TAU_MTP, help="tokens a MTP-1 step (default: %(default)s, assumed)")
    add("--floor", type=float, default=80.0, help="tok/s/user at which throughput is compared (default: %(default)s)")
    add("--matched", type=float, default=10600.0, help="tok/s/GPU at which speed is compared (default: %(default)s)")
    return parser.parse_args(argv)


def _whole(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"expected a whole number, {low} to {high}, got {text!r}")
        return int(text)

    return parse


def _loads(text: str) -> list[int]:
    return [_whole(1, 1024)(part.strip()) for part in text.split(",")]


def _covered(path: Path, figures: Figures, panel: str, curve: Curve, load: int, option: str) -> None:
    if not curve.covers(load):
        raise SpecsimError(
            f"{path}: {figures.method}, panel {panel}: {option}: {load} is outside what was published, "
            f"{curve.load[0]:g} to {curve.load[-1]:g}"
        )


def _plain(value: Any) -> Any:
    """The same for JSON: numbers that are not finite become null."""
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    sys.exit(main())
