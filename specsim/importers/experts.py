"""What a layer of experts costs by tokens, from times by tokens and by the distinct experts that they take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from specsim.importers.model_shape import ModelShape
from specsim.importers.profile_parts import Row, whole
from specsim.importers.units import in_seconds
from specsim.types import Floats, SpecsimError


def expert_seconds(
    path: Path, rows: Sequence[Row], shape: ModelShape, ranks: int
) -> tuple[list[int], Callable[[Floats], Floats], str]:
    """Token sizes measured, seconds of all layers of experts by tokens, and a note that tells what is assumed.

    B tokens that each take k of E experts, uniformly, take E(1 − (1 − k/E)^B) distinct ones; each of ``ranks``
    ranks holds E/ranks experts and its share of the distinct ones. The measured grid is ragged, since few tokens
    take few experts: a hole costs what the nearest larger token count does with as many experts, which read as
    many weights. Linear in both axes between.
    """
    if shape.experts % ranks:
        raise SpecsimError(f"--expert-parallel: expected a divisor of the {shape.experts} experts, got {ranks}")
    sharded = any(row.cells.get("ep") is not None for row in rows)
    prices: dict[tuple[int, int], float] = {}
    for where, cells in rows:
        at = f"{path}: {where}"
        if sharded and whole(f"{at}: ep", cells["ep"]) != ranks:
            continue
        key = whole(f"{at}: tokens", cells["tokens"]), whole(f"{at}: activated_experts", cells["activated_experts"])
        if key in prices:
            raise SpecsimError(f"{at}: {key[0]} tokens with {key[1]} experts stand there twice, expected once")
        prices[key] = in_seconds(f"{at}: time_us", cells["time_us"], "us")
    if not prices:
        raise SpecsimError(f"{path}: ep: expected rows of {ranks} ranks (--expert-parallel), got none")
    tokens, experts = (sorted({key[i] for key in prices}) for i in (0, 1))
    local = shape.experts / ranks
    if experts[-1] < local:
        raise SpecsimError(
            f"{path}: activated_experts: expected up to {local:g}, the experts of a rank, got at most {experts[-1]}"
        )
    grid = np.full((len(tokens), len(experts)), np.nan)
    for (t, e), seconds in prices.items():
        grid[tokens.index(t), experts.index(e)] = seconds
    for j in range(len(experts)):
        there = np.flatnonzero(~np.isnan(grid[:, j]))
        grid[:, j] = np.interp(tokens, np.array(tokens)[there], grid[there, j])

    def seconds_at(count: Floats) -> Floats:
        distinct = local * -np.expm1(count * np.log1p(-shape.experts_per_token / shape.experts))
        columns = np.stack([np.interp(count, tokens, grid[:, j]) for j in range(len(experts))])
        spot = np.clip(np.searchsorted(experts, distinct) - 1, 0, max(0, len(experts) - 2))
        here = np.arange(len(count))
        low, high = columns[spot, here], columns[np.minimum(spot + 1, len(experts) - 1), here]
        left, right = np.array(experts)[spot], np.array(experts)[np.minimum(spot + 1, len(experts) - 1)]
        share = np.clip((distinct - left) / np.maximum(1, right - left), 0, 1)
        return np.asarray(shape.expert_layers * (low + (high - low) * share))

    note = (
        f"{shape.expert_layers} layers of {shape.experts} experts, {shape.experts_per_token} a token: priced at the "
        "number of distinct experts expected under uniform routing, E(1-(1-k/E)^B)."
    )
    if ranks > 1:
        note += (
            f" Experts lie on {ranks} ranks, {local:g} each, and every rank sees all tokens of the step; the "
            "exchange between ranks is not priced"
        )
        note += "." if sharded else ", and times measured on one rank hold the expert work of all ranks' tokens."
    return tokens, seconds_at, note
