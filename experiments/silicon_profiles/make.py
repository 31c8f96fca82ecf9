"""Compose the shipped profiles of Qwen3 on H100, H200 and B200 from AIConfigurator's silicon data.

    python experiments/silicon_profiles/make.py --out hw_profiles/
    python experiments/silicon_profiles/make.py --only h200-qwen3-8b-tp1-vllm --out out/
    python experiments/silicon_profiles/make.py --table hw_profiles/

Needs ``pip install 'specsim[silicon]'``, but for --table, which prints what the profiles in a folder say: steps
per second at 1, 64 and 512 sequences of 1024 tokens of KV, and the bounds of a verification step. Each profile
carries the composed draft cost of a parallel drafter of 5 layers and γ = 7, the size of the drafters that
DSpark's authors publish for Qwen3.
"""

import argparse
import importlib.util
import sys
from pathlib import Path

from specsim.files import check_folder
from specsim.hardware import load_profile, save_profile
from specsim.importers.composed import PACKAGE, verification_bounds
from specsim.importers.silicon import load_silicon
from specsim.types import SpecsimError

SYSTEMS = ("h100_sxm", "h200_sxm", "b200_sxm")
MODELS = ("Qwen/Qwen3-8B", "Qwen/Qwen3-32B")
TPS = (1, 2, 4)
NAMES = {
    f"{system.removesuffix('_sxm')}-{model.partition('/')[2].lower()}-tp{tp}-vllm": (model, system, tp)
    for system in SYSTEMS
    for model in MODELS
    for tp in TPS
}
CONTEXT = 1024


def make(name: str, out: Path) -> Path:
    """Compose one profile and write it into ``out``; SpecsimError where the data has no such deployment."""
    model, system, tp = NAMES[name]
    profile = load_silicon(
        model, system, "vllm", tp, draft_layers=5, draft_gamma=7,
        command="python experiments/silicon_profiles/make.py --out hw_profiles/",
    )  # fmt: skip
    return save_profile(profile, out / f"{profile.name}.json")


def table(folder: Path) -> str:
    """A Markdown table of the profiles that are there: SPS(B) and the bounds of verification, where the KV fits."""
    lines = [
        "| profile | KV tokens | SPS(1) | SPS(64) | SPS(512) | 64 × 8 tokens, ms: once – per query | upper bound |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name in NAMES:
        if not (folder / f"{name}.json").exists():
            continue
        profile = load_profile(folder / f"{name}.json")
        room = profile.kv_tokens or 0
        rates = [
            f"{1 / profile.step_seconds(n, kv_tokens=n * CONTEXT).item():.1f}" if n * CONTEXT <= room else "—"
            for n in (1, 64, 512)
        ]
        low, high = verification_bounds(profile)
        bounds = f"{low * 1e3:.1f} – {high * 1e3:.1f} | +{high / low - 1:.0%}" if room >= 64 * CONTEXT else "— | —"
        lines.append(f"| {name} | {room:,} | {' | '.join(rates)} | {bounds} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("hw_profiles"))
    parser.add_argument("--only", choices=sorted(NAMES), action="append")
    parser.add_argument("--table", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(arguments.table))
        return 0
    if importlib.util.find_spec("aiconfigurator_core") is None:
        print(f"skipped: {PACKAGE} is not installed: pip install 'specsim[silicon]'")
        return 0
    check_folder(arguments.out)
    missing = 0
    for name in arguments.only or NAMES:
        try:
            print(make(name, arguments.out))
        except SpecsimError as error:
            missing += 1
            print(f"missing: {name}: {error}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
