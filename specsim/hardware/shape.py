"""What a forward holds, and what anything that prices it must offer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

Prices = NDArray[np.float64]
Axis = tuple[str, float, float, float]
"""Name, value, smallest and largest value that has a price."""


class Part(BaseModel):
    """A part of a profile file: unknown fields are refused, and nothing is changed after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Shape(NamedTuple):
    """What a step's forward holds, drafts left out.

    ``num_seqs`` decoding sequences of one token each hold ``kv_tokens`` tokens of KV cache in all, the
    ``shortest`` and ``longest`` of them so many (filled in only for a surface that needs them). Each
    prefill has a chunk of prompt tokens in the forward and a history already in the cache.
    """

    num_seqs: int = 0
    kv_tokens: float = 0
    chunks: Sequence[int] = ()
    histories: Sequence[int] = ()
    shortest: float = 0
    longest: float = 0

    @property
    def num_tokens(self) -> int:
        """Tokens in the forward, drafts left out."""
        return self.num_seqs + sum(self.chunks)


class Surface(Protocol):
    """A verify cost spread out for one run."""

    @property
    def needs_lengths(self) -> bool:
        """Whether prices depend on the shortest and longest decoding sequence."""

    def curve(self, shape: Shape, most: int) -> Prices:
        """Seconds [most + 1] of the forward with 0, 1, .. ``most`` draft tokens; infinite outside the range."""

    def axes(self, shape: Shape, num_tokens: int) -> list[Axis]:
        """The axes along which such a step of ``num_tokens`` tokens may lie outside what was measured."""


def last_slope(at: Prices, price: Prices) -> float:
    """Seconds per unit between the last two points; 0 for a single one, or where the curve ends falling."""
    return max(0.0, float((price[-1] - price[-2]) / (at[-1] - at[-2]))) if len(at) > 1 else 0.0
