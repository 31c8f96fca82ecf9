"""Which replica takes the next request."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, get_args

from specsim.replica import Replica
from specsim.types import stream

Router = Literal["round_robin", "least_loaded", "random", "vllm"]
ROUTERS: tuple[str, ...] = get_args(Router)


def make_router(name: Router, replicas: list[Replica], seed: int) -> Callable[[], Replica]:
    """A function that picks the replica for the next request; "random" draws from the routing stream of ``seed``."""
    if name == "least_loaded":
        return lambda: min(replicas, key=lambda r: (r.load, r.index))
    if name == "vllm":
        return _vllm_router(replicas)
    if name == "random":
        rng = stream(seed, "routing")
        return lambda: replicas[int(rng.integers(len(replicas)))]
    turn = iter(range(1 << 62))
    return lambda: replicas[next(turn) % len(replicas)]


def _vllm_router(replicas: list[Replica]) -> Callable[[], Replica]:
    """As vLLM's front end picks a data-parallel rank (vllm/v1/engine/core_client.py): the least of 4 × waiting +
    running, by counts that are up to a tenth of a second old, and one more waiting for each request sent since."""
    told, scores = -math.inf, [0] * len(replicas)

    def pick() -> Replica:
        nonlocal told
        now = replicas[0].env.now
        if now - told >= 0.1:
            told, scores[:] = now, [4 * r.queued + r.running for r in replicas]
        chosen = min(replicas, key=lambda r: scores[r.index])
        scores[chosen.index] += 4
        return chosen

    return pick
