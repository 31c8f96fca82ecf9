"""At temperature 0 the reference engine answers, under every scheduler, what plain decoding answers: token by token.

    python experiments/live_reference/greedy.py --models models

All prompts are answered at once, so requests share steps. Exit code 1 where an answer differs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from run import DRAFTER, SCHEDULERS, SMOLLM2

from specsim.cli.inputs import parse_scheduler
from specsim.drafters.checkpoint import load_checkpoint
from specsim.drafters.prompts import prompt_tokens, read_prompts
from specsim.drafters.target import load_target
from specsim.live.reference import Engine
from specsim.schedulers import NoSpec


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=Path("models"), help="the target (make models)")
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    asked = parser.parse_args()
    target = load_target(asked.models, "float32")
    drafter = load_checkpoint(DRAFTER, target)
    prompts = [prompt_tokens(target.tokenizer, p) for p in read_prompts(SMOLLM2 / "prompts.jsonl")]

    def answers(scheduler: object, drafts: object) -> tuple[list[list[int]], float]:
        engine = Engine(target, drafts, scheduler, max_num_seqs=len(prompts), max_model_len=512, temperature=0.0)
        requests = [engine.submit(prompt, asked.tokens) for prompt in prompts]
        while engine.busy:
            engine.step()
        return [request.output for request in requests], engine.counts.tau

    plain, _ = answers(NoSpec(), None)
    wrong = 0
    print(f"{len(prompts)} answers, {sum(map(len, plain)):,} tokens by plain decoding")
    for name in SCHEDULERS:
        found, tau = answers(parse_scheduler(name), drafter)
        same = sum(a == b for a, b in zip(found, plain, strict=True))
        wrong += len(plain) - same
        print(f"{name}: {same} of {len(plain)} answers the same, τ {tau:.3f}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
