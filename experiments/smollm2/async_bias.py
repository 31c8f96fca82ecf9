"""How far is replay from real runs under DSparkAsync, which looks at confidences of positions that were trimmed?

    python experiments/smollm2/async_bias.py --target models/SmolLM2-135M-Instruct.Q4_1.gguf \
        --drafter experiments/smollm2/dspark --prompts prompts/test.jsonl --trace traces/smollm2-dspark-t1.parquet \
        --profile hw_profiles/dsv4-flash-b300-tp4.json

R requests an engine, so many engines side by side that all prompts run at once; each engine's scheduler sees its own
requests only and plans with the profile's step costs. Prints τ of both and the bias of replay with its 95 % interval,
clustered by response and taken prompt by prompt; τ counts the chances of survival at the positions reached, which has
less luck in it than what was accepted.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from replaying import compare, from_real, replay, some_prompts

from specsim.blocktrace import read_trace
from specsim.drafters.checkpoint import load_checkpoint
from specsim.drafters.prompts import prompt_tokens
from specsim.drafters.speculate import speculate
from specsim.drafters.target import load_target
from specsim.hardware import load_profile
from specsim.schedulers import DSparkAsync


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("target", "drafter", "prompts", "trace", "profile"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--limit", type=int, default=192)
    parser.add_argument("--sequences", default="1,4,16", help="R: requests an engine")
    parser.add_argument("--staleness", default="1,2")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    target = load_target(args.target, "float32")
    drafter = load_checkpoint(args.drafter, target)
    trace, profile = read_trace(args.trace), load_profile(args.profile)
    prompts = some_prompts(args.prompts, trace, args.limit)
    tokens = [prompt_tokens(target.tokenizer, p) for p in prompts]
    rows = []
    for staleness in map(int, args.staleness.split(",")):
        for r in map(int, args.sequences.split(",")):
            scheduler, engines = DSparkAsync(staleness=staleness), max(1, len(prompts) // r)
            run = speculate(
                target, drafter, tokens, scheduler, max_tokens=args.tokens + trace.gamma, engines=engines,
                temperature=float(trace.meta.temperature or 0.0), seed=args.seed, step_seconds=profile.step_seconds,
            )  # fmt: skip
            real = from_real(run, target.end_tokens, args.tokens, trace.gamma)
            walked = replay(trace, [p.id for p in prompts], scheduler, args.tokens, profile.step_seconds, engines)
            tau = compare(real, walked, trace.gamma)["tau by chances"]
            row = {
                "staleness": staleness, "sequences": r, "cycles": len(real.accepted),
                "draft_len_real": float(real.draft_len.mean()), "draft_len_replay": float(walked.draft_len.mean()),
                "tau_real": tau.real, "tau_replay": tau.replay, "bias": tau.replay / tau.real - 1,
                "interval": 1.96 * tau.error / tau.real,
            }  # fmt: skip
            rows.append(row)
            print(
                f"staleness {staleness}, R = {r}: τ real {tau.real:.3f}, replay {tau.replay:.3f}, "
                f"bias {100 * row['bias']:+.1f} ± {100 * row['interval']:.1f} %, "
                f"draft_len {row['draft_len_real']:.2f} / {row['draft_len_replay']:.2f}",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
