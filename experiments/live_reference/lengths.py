"""A scheduler to learn a step's price with: draft lengths that cover all there can be, whatever they are worth."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from specsim.views import StepView


class AnyLength:
    """In every other step the same random length for all requests, in the others one for each."""

    def start(self) -> Callable[[StepView], np.ndarray]:
        """A run's own random stream."""
        rng = np.random.default_rng(0)

        def schedule(view: StepView) -> np.ndarray:
            most = int(rng.integers(0, view.gamma + 1))
            if rng.integers(2):
                return np.full(view.num_seqs, most)
            return rng.integers(0, most + 1, size=view.num_seqs)

        return schedule
