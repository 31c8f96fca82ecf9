"""The books of a run: one row a request, grown as requests arrive."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from specsim.kv import Content
from specsim.types import Floats, Ints

NAN = float("nan")


class Ledger:
    """Columns by request number; times are seconds, NaN until they happen.

    Plain lists, for a run reads and writes one entry at a time. ``part`` is the tape's domain that the
    request reads and ``place`` (0..1) where in it the request starts; ``verified`` and ``accepted`` count
    draft tokens (before the output length clips them), ``emitted`` output tokens, ``cached`` the tokens that
    were found in the KV cache when the request was scheduled.
    """

    def __init__(self, shares_prefixes: bool = False) -> None:
        self.shares_prefixes = shares_prefixes  # the workload names prefixes or sessions
        self.contents: list[Content] = []
        self.arrived = 0
        self.prompt_tokens: list[int] = []
        self.output_tokens: list[int] = []
        self.domain: list[int] = []
        self.part: list[int] = []
        self.place: list[float] = []
        self.replica: list[int] = []
        self.cycles: list[int] = []
        self.verified: list[int] = []
        self.accepted: list[int] = []
        self.emitted: list[int] = []
        self.cached: list[int] = []
        self.preemptions: list[int] = []
        self.arrival: list[float] = []
        self.queued: list[float] = []
        self.scheduled: list[float] = []
        self.first_token: list[float] = []
        self.finish: list[float] = []

    @property
    def known(self) -> int:
        """Requests whose lengths are drawn, arrived or not."""
        return len(self.domain)

    def content(self, request: int) -> Content:
        """What the request's KV holds, for the cache."""
        return self.contents[request] if self.shares_prefixes else Content(request)

    def extend(self, prompt_tokens: Ints, output_tokens: Ints, domain: Ints, part: Ints, place: Floats) -> None:
        """Add requests that have not arrived yet, numbered on from the last."""
        n = len(domain)
        self.prompt_tokens += prompt_tokens.tolist()
        self.output_tokens += output_tokens.tolist()
        self.domain += domain.tolist()
        self.part += part.tolist()
        self.place += place.tolist()
        for counts in (
            self.replica,
            self.cycles,
            self.verified,
            self.accepted,
            self.emitted,
            self.cached,
            self.preemptions,
        ):
            counts += [0] * n
        for times in (self.arrival, self.queued, self.scheduled, self.first_token, self.finish):
            times += [NAN] * n

    def tokens_by_domain(self, domains: int) -> NDArray[np.int64]:
        """Output tokens [domains] that the requests have emitted."""
        return np.bincount(self.domain, weights=self.emitted, minlength=domains).astype(np.int64)

    def table(self, domains: tuple[str, ...]) -> pd.DataFrame:
        """The request table: a row a request that arrived."""
        n = self.arrived
        names = ("replica", "arrival", "queued", "scheduled", "first_token", "finish", "prompt_tokens", "output_tokens",
                 "cycles", "verified", "accepted", "emitted", "cached", "preemptions")  # fmt: skip
        columns = {
            "request_id": np.arange(n),
            "domain": pd.Categorical.from_codes(np.array(self.domain[:n], dtype=np.int64), pd.Index(domains)),
        }
        return pd.DataFrame(columns | {name: np.array(getattr(self, name)[:n]) for name in names})
