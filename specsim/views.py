"""What a scheduler may see of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from specsim.acceptance import Tape
from specsim.types import SpecsimError

Lens = NDArray[np.int64]
Array = NDArray[Any]


class StepView:
    """What a scheduler may see of a step; read-only. R decoding requests, blocks of γ.

    ``request_ids`` int [R]; ``confidence`` and ``survival`` [R, γ], calibrated where the trace has
    temperatures; ``num_seqs`` = R; ``prefill_tokens`` the prompt tokens in this step's forward, of
    which ``finishing_prefills`` chunks end their prompt and emit a first token; ``prefilled``: whether
    prompts are in it, or were in steps without decodes since the last view; ``previous`` the last
    steps' StepRecords, newest last. ``step_seconds(k)`` is what the step lasts when k draft tokens
    are verified in all (int or int array). Neither this step's acceptance nor any length is here.
    """

    __slots__ = ("_confidence", "_cost", "_survival", "finishing_prefills", "gamma", "prefill_tokens",
                 "prefilled", "previous", "request_ids")  # fmt: skip

    def __init__(
        self,
        request_ids: Array,
        survival: Array | Callable[[], Array],
        step_seconds: Callable[[Array], Array],
        *,
        gamma: int | None = None,
        confidence: Array | Callable[[], Array] | None = None,
        prefill_tokens: int = 0,
        finishing_prefills: int = 0,
        prefilled: bool = False,
        previous: Sequence[StepRecord] = (),
    ) -> None:
        self.request_ids = request_ids
        self._survival: Any = survival
        self._confidence: Any = confidence
        self._cost = step_seconds
        self.gamma = gamma if gamma is not None else self.survival.shape[1]
        self.prefill_tokens, self.finishing_prefills = prefill_tokens, finishing_prefills
        self.prefilled = prefilled or prefill_tokens > 0
        self.previous = previous

    if not TYPE_CHECKING:  # which would then take any name for one of a view's

        def __getattr__(self, name: str) -> Any:
            """Told of a name that a view does not have, by what it has: its class is an engine's own affair."""
            raise AttributeError(f"a StepView has no {name!r}; it has {', '.join(HAS)}")

    @property
    def num_seqs(self) -> int:
        """Decoding requests in this step."""
        return len(self.request_ids)

    @property
    def survival(self) -> Array:
        """Chance [R, γ] that positions 1..k of each block all survive."""
        if callable(self._survival):
            self._survival = self._survival()
        return cast(Array, self._survival)

    @property
    def confidence(self) -> Array:
        """Chance [R, γ] that position k survives given that 1..k-1 did."""
        if callable(self._confidence):
            self._confidence = self._confidence()
        if self._confidence is None:
            s = self.survival
            before = np.concatenate([np.ones_like(s[:, :1]), s[:, :-1]], axis=1)
            self._confidence = np.divide(s, before, out=np.zeros_like(s), where=before > 0)
        return cast(Array, self._confidence)

    def step_seconds(self, draft_tokens: Any) -> Any:
        """Seconds of the step if ``draft_tokens`` (int or int array) are verified in all."""
        return self._cost(draft_tokens)

    def step_curve(self, most: int) -> Array:
        """step_seconds of 0, 1, ... ``most`` draft tokens, float [most + 1]: all the candidates at once."""
        return np.asarray(self._cost(np.arange(most + 1)))


HAS = tuple(sorted({*StepView.__slots__, *vars(StepView)} - {n for n in dir(StepView) if n.startswith("_")}))
"""What a scheduler may ask of a StepView."""


class StepRecord:
    """What a past step did: request_ids [R], survival [R, γ], draft_lens [R] and emitted tokens [R]."""

    __slots__ = ("_view", "draft_lens", "emitted")

    def __init__(self, view: StepView, draft_lens: Lens, emitted: Lens) -> None:
        view.previous = ()  # or the record and the history that holds it would keep each other alive
        self._view, self.draft_lens, self.emitted = view, draft_lens, emitted

    @property
    def request_ids(self) -> Array:
        """The requests of that step."""
        return self._view.request_ids

    @property
    def survival(self) -> Array:
        """Survival [R, γ] of that step's blocks."""
        return self._view.survival


class OracleView(StepView):
    """A StepView that also tells ``accepted`` [R] (before any trimming): for upper bounds only."""

    __slots__ = ("accepted",)
    accepted: Lens


class TapeView(StepView):
    """The view that a replica makes: it gathers from the tape what the scheduler looks at, and no more.

    ``curve`` [R·γ + 1] holds step seconds by draft tokens, ``fixed`` the seconds besides.
    """

    __slots__ = ("_confidences", "_curve", "_fixed", "_rows", "_survivals")

    def __init__(
        self,
        tape: Tape,
        rows: Lens,
        request_ids: Array,
        curve: Array,
        fixed: float,
        prefill_tokens: int,
        finishing_prefills: int,
        prefilled: bool,
        previous: Sequence[StepRecord],
    ) -> None:
        # Not the tape itself: no way leads from a view to what will be accepted.
        self._survivals, self._confidences, self._rows = tape.survival, tape.confidence, rows
        self._curve, self._fixed = curve, fixed
        self.request_ids, self.gamma, self.previous = request_ids, tape.gamma, previous
        self.prefill_tokens, self.finishing_prefills, self.prefilled = prefill_tokens, finishing_prefills, prefilled
        self._survival = self._confidence = None

    @property
    def survival(self) -> Array:
        """Chance [R, γ] that positions 1..k of each block all survive."""
        if self._survival is None:
            self._survival = self._gather(self._survivals)
        return cast(Array, self._survival)

    @property
    def confidence(self) -> Array:
        """Chance [R, γ] that position k survives given that 1..k-1 did."""
        if self._confidence is None:
            self._confidence = self._gather(self._confidences)
        return cast(Array, self._confidence)

    def step_seconds(self, draft_tokens: Any) -> Any:
        """Seconds of the step if ``draft_tokens`` (int or int array) are verified in all."""
        most = len(self._curve) - 1
        return (
            np.where(np.asarray(draft_tokens) > most, np.inf, self._curve.take(draft_tokens, mode="clip")) + self._fixed
        )

    def step_curve(self, most: int) -> Array:
        """step_seconds of 0, 1, ... ``most`` <= R·γ draft tokens, float [most + 1]."""
        return self._curve[: most + 1] + self._fixed

    def _gather(self, values: Array | None) -> Array:
        if values is None:
            raise SpecsimError("its drafter's trace has no confidences")
        gathered = values.take(self._rows, axis=0)
        gathered.flags.writeable = False
        return gathered


class TapeOracleView(TapeView):
    """A TapeView that also tells ``accepted`` [R], as OracleView does."""

    __slots__ = ("accepted",)
    accepted: Lens
