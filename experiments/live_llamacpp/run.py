"""llama.cpp on this machine's CPU, predicted and measured: without speculation, and with a draft model whose
acceptance is an input.

    python experiments/live_llamacpp/run.py --models models --out out/live_llamacpp

Needs ``make engines`` and ``make models``, and a quiet machine for about ten minutes. Each part is one
``specsim validate live``, printed as it runs; exit code 1 where a gate is broken.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "engines"))
from cut_gguf import cut
from serving import llamacpp, validate

from specsim.acceptance import synthetic
from specsim.files import write_json

MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
DRAFT_LAYERS = 4
RATES = {1: (0.8,), 3: (0.8, 0.6, 0.4), 5: (0.8, 0.6, 0.4, 0.3, 0.2)}
"""Unconditional survival by position that the server is told to draw acceptance by."""
LEARN = {1: "1,2,4,6,8", 3: "1,4,8,12,16", 5: "1,4,6,12,18,24"}
"""Sizes that steps are learned at: those of 1 to 4 users with so many drafts each."""
BY_TOKENS = ["--kv-unified", "-fa", "off"]
"""With these a step depends on its tokens, not on whose they are: by default, four tokens of one request take a quarter
less than one of each of four."""
LOADS = ["--prompt-tokens", "48", "--max-seconds", "7200"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=Path("models"), help=f"folder with {MODEL} (make models)")
    parser.add_argument("--out", type=Path, default=Path("out/live_llamacpp"))
    parser.add_argument("--only", choices=("none", *map(str, RATES)), help="one part alone: none, or drafts so long")
    asked = parser.parse_args()
    parts = [asked.only] if asked.only else ["none", *map(str, RATES)]
    model, out = asked.models / MODEL, asked.out
    codes = [plain(model, out) if part == "none" else drafted(model, out, int(part)) for part in parts]
    return max(codes)


def plain(model: Path, out: Path) -> int:
    """Without speculation: steps learned at 1, 3 and 8 users, other loads predicted."""
    with llamacpp(model, out / "none.log") as url:
        return validate(
            url, out / "none", *LOADS, "--output-tokens", "96", "--requests", "24", "--calibrate", "1,3,8",
            "--check", "2,4,6", "--poisson", "1", "--max-throughput-error", "8%", "--max-tpot-error", "8%",
        )  # fmt: skip


def drafted(model: Path, out: Path, gamma: int) -> int:
    """Drafts of ``gamma`` tokens, accepted as RATES says; steps and drafting learned from servers of their own.

    All three are up and asked in turn, so that a machine that drifts drifts for all.
    """
    draft, rates, folder = out / f"draft-{DRAFT_LAYERS}.gguf", RATES[gamma], out / f"synthetic-{gamma}"
    folder.mkdir(parents=True, exist_ok=True)
    cut(model, DRAFT_LAYERS, draft)
    trace = folder / "rates.json"
    conditional = tuple(b / a for a, b in zip((1.0, *rates), rates, strict=False))
    write_json(trace, synthetic(conditional, gamma, name=f"rates-{gamma}").acceptance)
    speculation = ["--spec-type", "draft-simple", "-md", str(draft), "--spec-draft-n-max", str(gamma),
                   "--spec-synth-rates", ",".join(map(str, rates))]  # fmt: skip
    # Slots alike: what they hold of past requests is read by every step of a common KV buffer.
    start = partial(llamacpp, slots=max(map(int, LEARN[gamma].split(","))), context=512)
    with (
        start(model, folder / "plain.log", *BY_TOKENS) as steps,
        start(draft, folder / "draft.log", *BY_TOKENS) as drafting,
        start(model, folder / "server.log", *BY_TOKENS, *speculation) as url,
    ):
        return validate(
            url, folder, *LOADS, "--output-tokens", "64", "--requests", "16", "--repeat", "2", "--check", "1,4",
            "--plain-url", steps, "--calibrate", LEARN[gamma], "--draft-url", drafting, "--trace", str(trace),
            "--scheduler", f"StaticGamma({gamma})", "--max-throughput-error", "12%",
        )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
