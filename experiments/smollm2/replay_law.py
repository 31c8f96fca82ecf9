"""Has replay of a dense trace the law of real speculative decoding? Measured on the trained models.

    python experiments/smollm2/replay_law.py --target models/SmolLM2-135M-Instruct.Q4_1.gguf \
        --drafter experiments/smollm2/dspark --prompts prompts/test.jsonl --trace traces/smollm2-dspark-t1.parquet

Same models and prompts: each scheduler decodes the prompts for real (draft, verify, rejection sampling) and walks
their recorded responses. τ and conditional acceptance by position are compared, prompt by prompt, with intervals
clustered by response, family-wise 99 %. With a trace of temperature 0, cycles must agree one by one. Exit code 1
where they do not.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch
from replaying import bound, compare, from_real, replay, some_prompts

from specsim.blocktrace import read_trace
from specsim.drafters.checkpoint import load_checkpoint
from specsim.drafters.prompts import prompt_tokens
from specsim.drafters.speculate import speculate
from specsim.drafters.target import load_target
from specsim.schedulers import StaticGamma, Threshold

SCHEDULERS = (StaticGamma(1), StaticGamma(3), StaticGamma(5), StaticGamma(7), Threshold(0.5))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("target", "drafter", "prompts", "trace"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=96, help="positions of each response that are compared")
    parser.add_argument("--limit", type=int, default=96, help="responses")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    target = load_target(args.target, "float32")
    drafter = load_checkpoint(args.drafter, target)
    trace = read_trace(args.trace)
    temperature = float(trace.meta.temperature or 0.0)
    prompts = some_prompts(args.prompts, trace, args.limit)
    names = [p.id for p in prompts]
    tokens = [prompt_tokens(target.tokenizer, p) for p in prompts]
    results, wrong = {}, 0
    for scheduler in SCHEDULERS:
        run = speculate(
            target, drafter, tokens, scheduler,
            max_tokens=args.tokens + trace.gamma, temperature=temperature, seed=args.seed,
        )  # fmt: skip
        real = from_real(run, target.end_tokens, args.tokens, trace.gamma)
        walked = replay(trace, names, scheduler, args.tokens)
        if temperature == 0:
            order = [np.lexsort((c.position, c.request)) for c in (real, walked)]
            pairs = [
                list(
                    zip(
                        *(getattr(c, f)[o].tolist() for f in ("request", "position", "draft_len", "accepted")),
                        strict=True,
                    )
                )
                for c, o in zip((real, walked), order, strict=True)
            ]
            differ = sorted({row[0] for row in set(pairs[0]) ^ set(pairs[1])})
            wrong += len(differ)
            results[str(scheduler)] = {
                "cycles": len(pairs[0]),
                "responses": len(names),
                "differ": [names[i] for i in differ],
            }
            print(f"{scheduler}: {len(pairs[0])} cycles, {len(differ)} of {len(names)} responses differ", flush=True)
            continue
        found = compare(real, walked, trace.gamma)
        results[str(scheduler)] = {name: vars(c) | {"z": c.z} for name, c in found.items()}
        tau = found["tau"]
        print(
            f"{scheduler}: τ real {tau.real:.3f}, replay {tau.replay:.3f}, difference "
            f"{tau.replay - tau.real:+.3f} ± {tau.error:.3f} (one standard error)",
            flush=True,
        )
    if temperature > 0:
        zs = [(abs(v["z"]), s, k) for s, row in results.items() for k, v in row.items()]
        limit = bound(len(zs))
        worst = max(zs)
        wrong = sum(z > limit for z, _, _ in zs)
        print(f"{len(zs)} comparisons, largest |z| {worst[0]:.2f} ({worst[1]}, {worst[2]}), allowed {limit:.2f}")
        results["summary"] = {"comparisons": len(zs), "largest_z": worst[0], "allowed": limit}
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.exit(main())
