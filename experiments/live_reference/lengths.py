"""Schedulers to learn a step's price with: draft lengths that cover all there can be, whatever they are worth."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from specsim.views import StepView

Schedule = Callable[[StepView], np.ndarray]


class Equal:
    """In every step one random length for all requests, as static schedulers ask for."""

    def start(self) -> Schedule:
        """A run's own random stream."""
        rng = np.random.default_rng(0)
        return lambda view: np.full(view.num_seqs, rng.integers(0, view.gamma + 1))


class Unequal:
    """A length for each request, as schedulers ask for that look at confidences: most are short, some are whole."""

    def start(self) -> Schedule:
        """A run's own random stream."""
        rng = np.random.default_rng(0)

        def schedule(view: StepView) -> np.ndarray:
            longer = rng.random()  # the chance of each further token, another one in every step
            return (rng.random((view.num_seqs, view.gamma)) < longer).cumprod(axis=1).sum(axis=1)

        return schedule
