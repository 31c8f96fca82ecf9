"""The books of a run: one row a request, grown as requests arrive."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from specsim.types import Ints

_INTS = ("prompt_tokens", "output_tokens", "domain", "part", "offset", "replica", "cycles", "verified", "accepted",
         "emitted", "preemptions")  # fmt: skip
_TIMES = ("arrival", "scheduled", "first_token", "finish")


class Ledger:
    """Columns [capacity] by request number; times are seconds, NaN until they happen.

    ``part`` is the tape's domain that the request reads and ``offset`` where in it it starts; ``verified`` and
    ``accepted`` count draft tokens (before the output length clips them), ``emitted`` output tokens.
    """

    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    domain: NDArray[np.int64]
    part: NDArray[np.int64]
    offset: NDArray[np.int64]
    replica: NDArray[np.int64]
    cycles: NDArray[np.int64]
    verified: NDArray[np.int64]
    accepted: NDArray[np.int64]
    emitted: NDArray[np.int64]
    preemptions: NDArray[np.int64]
    arrival: NDArray[np.float64]
    scheduled: NDArray[np.float64]
    first_token: NDArray[np.float64]
    finish: NDArray[np.float64]

    def __init__(self) -> None:
        self.arrived = 0
        for name in _INTS:
            setattr(self, name, np.zeros(0, dtype=np.int64))
        for name in _TIMES:
            setattr(self, name, np.zeros(0))

    @property
    def known(self) -> int:
        """Requests whose lengths are drawn, arrived or not."""
        return len(self.domain)

    def extend(
        self,
        prompt_tokens: Ints,
        output_tokens: Ints,
        domain: Ints,
        part: Ints,
        offset: Ints,
    ) -> None:
        """Add requests that have not arrived yet, numbered on from the last."""
        given = {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens, "domain": domain}
        given |= {"part": part, "offset": offset}
        n = len(domain)
        for name in _INTS:
            new = np.asarray(given.get(name, np.zeros(n)), dtype=np.int64)
            setattr(self, name, np.concatenate([getattr(self, name), new]))
        for name in _TIMES:
            setattr(self, name, np.concatenate([getattr(self, name), np.full(n, np.nan)]))

    def tokens_by_domain(self, domains: int) -> NDArray[np.int64]:
        """Output tokens [domains] that the requests have emitted."""
        total = np.bincount(self.domain, weights=self.emitted, minlength=domains)
        return total.astype(np.int64)

    def table(self, domains: tuple[str, ...]) -> pd.DataFrame:
        """The request table: a row a request that arrived."""
        n = self.arrived
        columns = {
            "request_id": np.arange(n),
            "domain": pd.Categorical.from_codes(self.domain[:n], pd.Index(domains)),
            "replica": self.replica[:n],
        }
        names = (
            *_TIMES,
            "prompt_tokens",
            "output_tokens",
            "cycles",
            "verified",
            "accepted",
            "emitted",
            "preemptions",
        )
        columns |= {name: getattr(self, name)[:n] for name in names}
        return pd.DataFrame(columns)
