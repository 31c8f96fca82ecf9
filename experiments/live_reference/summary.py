"""What the runs of run.py say: tau, verified tokens and throughput, measured beside replayed, as a table and a picture.

    python experiments/live_reference/summary.py out/live_reference

Replay is repeated with SEEDS seeds, each as long as all that was measured of a load: its spread is that of such a
measurement by chance. tau must lie in the interval that so many comparisons leave at 99 % together, verified tokens
within 5 % and throughput within 10 %. Exit code 1 where one does not.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from joblib import Parallel, delayed
from matplotlib.figure import Figure
from run import kind_of, prices_of
from scipy.stats import norm

from specsim.acceptance import load_drafter
from specsim.cli.inputs import parse_scheduler
from specsim.hardware import load_profile
from specsim.importers.recorded import read_run
from specsim.lengths import Empirical
from specsim.live.comparing import Model
from specsim.live.engines import Engine
from specsim.plots import COLOURS, GREY, caption, plain_axes, save_figure
from specsim.workload import ClosedLoop

SEEDS = 24
LEVEL = 0.99
VERIFIED, THROUGHPUT = 0.05, 0.10


@dataclass
class Cell:
    """A scheduler at a load: what was measured (means over ``repeats``), and replayed by seed."""

    scheduler: str
    users: int
    requests: int
    tau: float
    verified: float
    throughput: float
    throughputs: tuple[float, ...]
    predicted: float
    taus: np.ndarray
    verifieds: np.ndarray

    def half(self, comparisons: int) -> float:
        """Half of replay's interval for one measurement: ``comparisons`` of them hold at LEVEL together."""
        z = norm.ppf(1 - (1 - LEVEL) / (2 * comparisons))
        return float(z * self.taus.std(ddof=1) * np.sqrt(1 + 1 / len(self.taus)))


def main() -> int:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "out/live_reference")
    reports = sorted(folder.glob("*/report.json"), key=lambda path: path.stat().st_mtime)
    if not reports:
        sys.exit(f"{folder}: expected the reports of run.py")
    cells = [cell for path in reports for cell in read(folder, path)]
    wrong = 0
    print("| scheduler | users | requests | τ measured | τ replayed | verified tokens, measured | replayed "
          "| tok/s measured | simulated |\n|" + "---|" * 9)  # fmt: skip
    for c in cells:
        half, verified = c.half(len(cells)), c.verifieds.mean() / c.verified - 1
        rate = c.predicted / c.throughput - 1
        marks = [abs(c.tau - c.taus.mean()) > half, abs(verified) > VERIFIED, abs(rate) > THROUGHPUT]
        wrong += sum(marks)
        tau, checked, speed = (" **out**" if mark else "" for mark in marks)
        print(
            f"| {c.scheduler} | {c.users} | {c.requests} | {c.tau:.3f} | {c.taus.mean():.3f} ± {half:.3f}{tau} "
            f"| {c.verified:.3f} | {c.verifieds.mean():.3f} ({100 * verified:+.1f} %){checked} "
            f"| {c.throughput:.1f} | {c.predicted:.1f} ({100 * rate:+.1f} %){speed} |"
        )
    save_figure(draw(cells), folder / "summary.png")
    print(f"\n{wrong} of {3 * len(cells)} beyond their bounds; picture: {folder / 'summary.png'}")
    return 1 if wrong else 0


def read(folder: Path, path: Path) -> list[Cell]:
    """The cells of one scheduler's report."""
    report = json.loads(path.read_text())
    policy = parse_scheduler(report["engine"]["speculation"])
    engine = Engine("specsim", report["engine"]["model"], max_num_seqs=report["engine"]["max_num_seqs"],
                    max_num_batched_tokens=report["engine"]["max_num_batched_tokens"])  # fmt: skip
    prices = load_profile(prices_of(folder, kind_of(report["engine"]["speculation"])))
    model = Model(prices, engine, policy, load_drafter(folder / "trace.parquet"))
    rows = {(row["load"], row["metric"]): row for row in report["rows"]}
    cells = []
    for load in dict.fromkeys(row["load"] for row in report["rows"]):
        users = int(load.removeprefix("closed "))
        runs = [read_run(run).requests for run in sorted((path.parent / "runs").glob(f"closed-{users}-r*"))]
        prompts, outputs = (
            Empirical(tuple(int(n) for run in runs for n in getattr(run, name)))
            for name in ("prompt_tokens", "output_tokens")
        )
        count = sum(len(run) for run in runs)
        loop = ClosedLoop(users, prompts, outputs, measured=count)
        found = Parallel(n_jobs=-1)(delayed(model.predict)(loop, seed) for seed in range(SEEDS))
        speed = rows[load, "throughput"]
        cells.append(
            Cell(
                report["engine"]["speculation"], users, count, rows[load, "tau"]["measured"],
                rows[load, "verified_tokens"]["measured"], speed["measured"], tuple(speed["measured_each"]),
                speed["predicted"],
                np.array([numbers["tau"] for numbers, _ in found]),
                np.array([numbers["verified_tokens"] for numbers, _ in found]),
            )
        )  # fmt: skip
    return cells


def draw(cells: list[Cell]) -> Figure:
    """Throughput, tau and verified tokens by users, one colour a scheduler: marks measured, lines ours."""
    figure = Figure(figsize=(11.0, 4.4), layout="constrained")
    names, loads = (list(dict.fromkeys(getattr(c, name) for c in cells)) for name in ("scheduler", "users"))
    panels = figure.subplots(1, 3)
    for axes, label in zip(panels, ("throughput (tok/s)", "τ (tok/cycle)", "verified tokens"), strict=True):
        plain_axes(axes)
        axes.set_xlabel("users", fontsize=9)
        axes.set_ylabel(label, fontsize=9)
        axes.tick_params(labelsize=8, color=GREY)
        axes.set_xticks(range(len(loads)), [str(users) for users in loads])
        axes.grid(axis="x", visible=False)
    for number, (colour, name) in enumerate(zip(COLOURS, names, strict=False)):
        mine = [c for c in cells if c.scheduler == name]
        at = np.array([loads.index(c.users) for c in mine]) + (number - (len(names) - 1) / 2) * 0.14
        half = [c.half(len(cells)) for c in mine]
        sides = (
            ([c.predicted for c in mine], [c.throughput for c in mine]),
            ([c.taus.mean() for c in mine], [c.tau for c in mine]),
            ([c.verifieds.mean() for c in mine], [c.verified for c in mine]),
        )
        for axes, (ours, theirs) in zip(panels, sides, strict=True):
            axes.plot(at, ours, color=colour, linewidth=1.2, alpha=0.8)
            axes.plot(at, theirs, color=colour, linestyle="none", marker="o", markersize=5, label=name)
        panels[0].plot(at, [c.throughputs for c in mine], color=colour, linestyle="none", marker="o", markersize=2)
        panels[1].errorbar(at, sides[1][0], yerr=half, color=colour, linestyle="none", alpha=0.6, capsize=2)
    panels[0].set_ylim(bottom=0)
    panels[2].set_ylim(bottom=0)
    figure.legend(*panels[2].get_legend_handles_labels(), loc="outside upper right", ncols=5, fontsize=8, frameon=False)
    caption(figure, ["dots: measured (small: each repetition); lines: simulated, with replay's 99 % interval for τ"])
    return figure


if __name__ == "__main__":
    sys.exit(main())
