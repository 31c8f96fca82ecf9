"""vLLM on this machine's CPU, predicted and measured: without speculation, and with a draft model.

    python experiments/live_vllm/run.py --models models --out out/live_vllm

Needs ``make engines`` and ``make models``, and a quiet machine for about twenty minutes. Each part is one
``specsim validate live``, printed as it runs; exit code 1 where a gate is broken.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "engines"))
from hf_model import save
from serving import validate, vllm

LAYERS = 8
"""Layers of the draft model, the target's first ones."""
GAMMA = 3
PLAIN = ["--no-enable-prefix-caching"]
"""Prompts are random ids, which no cache of prefixes helps."""
LOADS = ["--prompt-tokens", "48", "--output-tokens", "64", "--max-seconds", "7200"]
GATES = ["--max-throughput-error", "8%", "--max-tpot-error", "8%"]
PARTS = ("none", "draft_model")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=Path("models"), help="the target (make models)")
    parser.add_argument("--out", type=Path, default=Path("out/live_vllm"))
    parser.add_argument("--only", choices=PARTS, help="one part alone")
    asked = parser.parse_args()
    target, draft = asked.models / "hf", asked.models / f"hf-{LAYERS}"
    for folder, layers in ((target, None), (draft, LAYERS)):
        if not (folder / "config.json").exists():
            save(str(asked.models), folder, layers)
    parts = [asked.only] if asked.only else PARTS
    codes = [plain(target, asked.out) if part == "none" else drafted(target, draft, asked.out) for part in parts]
    return max(codes)


def plain(target: Path, out: Path) -> int:
    """Without speculation: steps learned at 1, 3 and 8 users, other loads predicted."""
    with vllm(target, out / "none.log", *PLAIN) as url:
        return validate(
            url, out / "none", *LOADS, *GATES, "--requests", "16", "--calibrate", "1,3,8", "--check", "2,4,6",
            "--poisson", "1",
        )  # fmt: skip


def drafted(target: Path, draft: Path, out: Path) -> int:
    """With a draft model; acceptance is counted, steps and drafting are learned from servers of their own, in turn."""
    folder = out / "draft_model"
    told = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": GAMMA}
    with (
        vllm(target, folder / "plain.log", *PLAIN) as steps,
        vllm(draft, folder / "draft.log", *PLAIN) as drafting,
        vllm(target, folder / "server.log", *PLAIN, "--speculative-config", json.dumps(told)) as url,
    ):
        return validate(
            url, folder, *LOADS, *GATES, "--requests", "16", "--calibrate", "1,3,8,16", "--check", "2,4",
            "--plain-url", steps, "--draft-url", drafting,
        )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
