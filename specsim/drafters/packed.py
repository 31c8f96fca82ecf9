"""Several pieces of text in one forward, without padding: a step's verifications of unequal lengths, and its prompts.

Whatever works token by token sees one row of all tokens; only attention takes the pieces apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Piece:
    """``tokens`` int[r, n] of the r rows from ``first`` on, of which each row's first ``counts`` int[r] are run.

    Without ``counts`` all are. :meth:`place` says where they go.
    """

    first: int
    tokens: Tensor
    counts: Tensor | None = None

    def place(self, lengths: Tensor) -> None:
        """Put the tokens behind the ``lengths`` [r] tokens that each row has: ``slots`` and ``mask``."""
        r, n = self.tokens.shape
        offsets = torch.arange(n, device=lengths.device)
        self.slots = lengths[:, None] + offsets
        inside = None if self.counts is None else (offsets < self.counts[:, None]).flatten()
        self.at = None if inside is None or inside.all() else inside.nonzero()[:, 0]
        self.size = r * n if self.at is None else len(self.at)
        self.top = int(self.pack(self.slots).max()) + 1
        self.mask = torch.arange(self.top, device=lengths.device) <= self.slots[..., None]

    @property
    def rows(self) -> Tensor:
        """The row of each token, int[r, n]."""
        r, n = self.tokens.shape
        return torch.arange(self.first, self.first + r, device=self.tokens.device)[:, None].expand(r, n)

    def pack(self, padded: Tensor) -> Tensor:
        """[r, n, ..] to [size, ..]: what is run of it."""
        flat = padded.flatten(0, 1)
        return flat if self.at is None else flat[self.at]

    def unpack(self, packed: Tensor) -> Tensor:
        """[size, ..] to [r, n, ..], zero where nothing is run."""
        r, n = self.tokens.shape
        if self.at is not None:
            packed = packed.new_zeros(r * n, *packed.shape[1:]).index_copy_(0, self.at, packed)
        return packed.unflatten(0, (r, n))
