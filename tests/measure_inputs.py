"""What the tests of measuring build on: flags of a tiny model, and medians that are known in advance."""

from __future__ import annotations

import numpy as np

from specsim.measure.grid import Grid
from specsim.measure.timing import Measured

SIZES = [
    "--tokens", "1,2,4,8,16", "--contexts", "16,64", "--gamma", 3, "--max-seqs", 8, "--rounds", 3, "--device", "cpu",
    "--threads", 1,
]  # fmt: skip
FLAGS = [
    "--hidden", 32, "--layers", 2, "--heads", 4, "--kv-heads", 2, "--head-dim", 8, "--intermediate", 48,
    "--vocab", 64, *SIZES,
]  # fmt: skip


def made_up(grid: Grid, noise: float = 0.0) -> list[Measured]:
    """Medians that are such a sum, known in advance, with prefills a tenth cheaper than they are priced."""
    rng = np.random.default_rng(4)
    found = []
    for p in grid.points():
        if p.kind in ("verify", "chunk"):
            staircase = 0.01 + 1e-4 * grid.padded(p.tokens)
            seconds = staircase + 2e-5 * (p.num_seqs - 1) + 1e-7 * p.kv_tokens
            seconds *= (0.9 if p.kind == "chunk" else 1.0) * (1 + noise * rng.standard_normal())
            found.append(Measured(p, seconds * np.array([0.98, 0.99, 1.0, 1.01, 1.02])))
    return found
