"""Turn the published MTP-1 throughput of a deployment into a hardware profile.

    python experiments/dspark_production/fit_profile.py --figures FIGURES.csv --target DeepSeek-V4-Flash \\
        --out hw_profiles/dsv4-flash-production.json

Under MTP-1 every one of C requests verifies 2 tokens a step and gets τ of them on average, so

    tokens in the forward  B = 2 · C          step time  T(B) = τ · C / throughput(C)   [s].

τ is not published: 1.85 is assumed, and all step times are proportional to it. The whole step, MTP-1's
own drafting included, becomes the price of verifying B tokens; the profile's draft cost is zero.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import numpy as np
from figures import Curve, read_figures
from scipy.interpolate import PchipInterpolator

from specsim.hardware import SCHEMA, DraftCost, Profile, Provenance, Table1D, save_profile
from specsim.types import SpecsimError

TAU_MTP = 1.85
"""Tokens a request gets from an MTP-1 step (of 2 at most). Assumed: the figures do not give it."""
SOURCE = "arXiv 2607.05147, figure 8, MTP-1 throughput against concurrent requests per GPU"


def step_profile(
    mtp_throughput: Curve,
    target: str,
    tau_mtp: float = TAU_MTP,
    *,
    name: str = "mtp1-steps",
    source: str = SOURCE,
    command: str | None = None,
    date: str | None = None,
) -> Profile:
    """The step-time curve behind an MTP-1 ``throughput`` curve (tok/s per GPU), as a profile of one GPU.

    The table has the published vertices, moved to the nearest whole number of tokens along a monotone
    cubic (PCHIP) through T(B). Below the first, steps cost what the first does when a run extrapolates;
    beyond the last they go on at the slope of the last two vertices.
    """
    if not 1 < tau_mtp <= 2:
        raise SpecsimError(f"tau_mtp: expected above 1, at most 2 (one draft token and the bonus), got {tau_mtp}")
    exact, seconds = 2 * mtp_throughput.load, tau_mtp * mtp_throughput.load / mtp_throughput.y
    first, last = max(math.ceil(exact[0]), 1), math.floor(exact[-1])
    tokens = np.unique(np.clip(np.rint(exact), first, last).astype(int))
    if last <= first or len(tokens) < 2:
        raise SpecsimError(f"{target}: MTP-1 throughput: expected points a token or more apart, from {exact[0]:g} on")
    return Profile(
        schema=SCHEMA,
        name=name,
        kind="fitted",
        model=target,
        device="not published",
        gpus=1,
        engine="production",
        verify=Table1D(
            tokens=tuple(tokens.tolist()),
            seconds=tuple(PchipInterpolator(exact, seconds)(tokens).round(9).tolist()),
            below="linear",
        ),
        draft=DraftCost(type="parallel", num_seqs=(1, 1024), seconds=(0.0, 0.0)),
        provenance=Provenance(
            source=source,
            command=command,
            date=date,
            notes=f"Tokens = 2 · concurrency; seconds = τ · concurrency / throughput with τ of MTP-1 assumed "
            f"{tau_mtp:g} (all step times are proportional to it). Drafting is inside the MTP-1 steps, so the draft "
            "cost here is zero: another drafter's cost, less MTP-1's, is not in it. Figures are per GPU; the "
            "deployment's device and parallelism are not published.",
        ),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figures", type=Path, required=True, help="CSV of published curves (see figures.py)")
    parser.add_argument("--target", required=True, help="target in that file, such as DeepSeek-V4-Flash")
    parser.add_argument("--tau-mtp", type=float, default=TAU_MTP, help="default: %(default)s")
    parser.add_argument("--source", default=SOURCE, help="what to cite (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="profile to write (JSON)")
    # Fixed, so that a profile made again differs only where its inputs or this program do.
    parser.add_argument("--date", default="2026-11-29", help="date to record (default: %(default)s)")
    args = parser.parse_args()
    command = (
        f"python experiments/dspark_production/fit_profile.py --figures FIGURES.csv --target {args.target} "
        f"--tau-mtp {args.tau_mtp:g} --out hw_profiles/{args.out.name}"
    )
    try:
        curve = read_figures(args.figures, args.target).mtp_throughput
        about = {"name": args.out.stem, "source": args.source, "command": command, "date": args.date}
        print(save_profile(step_profile(curve, args.target, args.tau_mtp, **about), args.out))
    except SpecsimError as error:
        print(f"fit_profile.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
