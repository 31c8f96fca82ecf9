"""What bounds an engine's step and how it schedules: vLLM V1's rules, each of which can be switched off."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from specsim.types import SpecsimError


@dataclass(frozen=True)
class Rules:
    """How the engine schedules (vllm/v1/core/sched/scheduler.py); the defaults are vLLM V1's.

    - ``prefix_caching``: freed KV blocks keep their content until they are taken again, so that preempted
      requests, later turns of a session and prompts that start alike compute less.
    - ``whole_prompt``: a waiting request is admitted only where blocks for all that is known of it are free, not
      for its first chunk alone.
    - ``pause``: nothing is admitted in a step that preempted a request.
    - ``lookahead``: a decode reserves blocks for 1 + γ tokens, not for those that it will keep.
    - ``split``: a prompt is cut to what is left of a step. Without it, it waits for the step that it fits in, or in
      which it is the first prompt.
    - ``own_prefills``: each prompt in a step is priced by its own chunk and history, not all of them as one.
    - ``mixed``: prompts and decodes share steps. Without it a step with prompts holds no decodes, as SGLang's.
    """

    prefix_caching: bool = True
    whole_prompt: bool = True
    pause: bool = True
    lookahead: bool = True
    split: bool = True
    own_prefills: bool = True
    mixed: bool = True

    def without(self, *names: str) -> Rules:
        """These rules with some switched off; SpecsimError for a name that is none of them."""
        for name in names:
            if name not in RULES:
                raise SpecsimError(f"rules: expected one of {', '.join(RULES)}, got {name!r}")
        return replace(self, **dict.fromkeys(names, False))


RULES = tuple(field.name for field in fields(Rules))
VLLM = Rules()


@dataclass(frozen=True)
class Limits:
    """What bounds a step: sequences, tokens, KV blocks of ``block_size`` tokens; whether prefill is free, and whether
    a step is scheduled ``ahead``, while the one before it runs."""

    max_num_seqs: int
    max_num_batched_tokens: int
    kv_blocks: int
    prefill_free: bool
    block_size: int = 16
    ahead: bool = False
