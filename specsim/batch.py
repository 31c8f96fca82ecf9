"""The decoding requests of a replica: one int64 matrix with a column a request, in running order."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specsim.acceptance import Tape
from specsim.ledger import Ledger

# Rows of the matrix. A cycle only adds to TOKENS (made since the request joined, before its output
# length clips them) and VERIFIED; where it reads the tape, its KV and its end all follow from those.
# BASE: tape row at TOKENS = 0; NEED: tokens still to make then; KV0: KV tokens then; END: end of its
# tape rows; JOINED: number of its first cycle here; LAST: tokens made in its last cycle.
_ID, _BASE, _NEED, _TOKENS, _KV0, _JOINED, _VERIFIED, _END, _LAST = range(9)

ONES = np.ones(1 << 16, dtype=np.int64)


class Gone(NamedTuple):
    """A request that left. Of its KV tokens ``named`` are in blocks that can be found, ``held`` have blocks.

    Blocks get their names as they are given out: of the tokens of a last cycle only the one that it began with has one.
    """

    request: int
    named: int
    held: int


class Batch:
    """State and arithmetic of the decodes; requests join at the tail.

    ``ids`` [n] is never changed in place, for schedulers keep it. ``kv_total`` counts KV tokens; a cycle holds
    blocks for ``reserve`` more than a request has.
    """

    def __init__(self, capacity: int, ledger: Ledger, tape: Tape | None, reserve: int = 1) -> None:
        self.ledger, self.tape, self.reserve = ledger, tape, reserve
        self.width = 1 + (tape.gamma if tape else 0)
        self.state = np.zeros((9, capacity), dtype=np.int64)
        self.n = self.kv_total = self.cycle = 0
        self.slack = 0  # each request may read at least this many more rows before its part of the tape ends
        self._parts = list(zip(tape.first.tolist(), tape.size.tolist(), strict=True)) if tape else []
        self._edges = tape.edges if tape else ()
        self._bind()

    def rows(self, n: int) -> NDArray[np.int64]:
        """The tape rows [n] of the first ``n`` requests' blocks (a new array)."""
        if self.tape is not None and self.tape.by_cycle:
            return np.asarray(self.base[:n] + (self.cycle - self.state[_JOINED, :n]))
        return np.asarray(self.base[:n] + self.tokens[:n])

    def kv_tokens(self) -> NDArray[np.int64]:
        """KV tokens [n] that each request holds."""
        live = self.state[:, : self.n]
        return np.asarray(live[_KV0] + live[_TOKENS])

    def advance(
        self, n: int, made: NDArray[np.int64], verified: NDArray[np.int64] | None
    ) -> tuple[int, NDArray[np.bool_] | None]:
        """The first ``n`` requests made ``made`` [n] tokens each; return tokens emitted and who is done, if any.

        ``verified`` [n]: draft tokens verified for it.
        """
        if n < self.n:  # the budget did not reach the tail: no cycle for it
            self.state[_JOINED, n : self.n] += 1
        tokens = self.tokens[:n]
        tokens += made
        self.last[:n] = made
        if verified is not None:
            total = self.verified[:n]
            total += verified
        emitted = int(made.dot(ONES[:n]))
        self.kv_total += emitted
        self.cycle += 1
        self.slack -= self.width
        done = self.tokens >= self.need
        if not np.count_nonzero(done):
            if self.slack <= 0:
                self._wrap()
            return emitted, None
        return emitted - int((self.tokens - self.need)[done].sum()), done

    def join(self, requests: list[int]) -> None:
        """Append requests that have their first token."""
        ledger, tape = self.ledger, self.tape
        for request in requests:
            emitted = ledger.emitted[request]
            kv = ledger.prompt_tokens[request] + emitted - 1
            base = end = 0
            if tape is not None:
                base, end = self._place(request, emitted, ledger.cycles[request])
                self.slack = min(self.slack, end - base) if self.n else end - base
            self.state[:, self.n] = (
                request,
                base,
                ledger.output_tokens[request] - emitted,
                0,
                kv,
                self.cycle,
                0,
                end,
                1,
            )
            self.kv_total += kv
            self.n += 1
        self._bind()

    def leave(self, gone: NDArray[np.bool_]) -> list[Gone]:
        """Take out the requests marked in ``gone`` [n], enter what they did in the ledger, return them in order."""
        ledger, left = self.ledger, []
        for column in self.state[:, : self.n].compress(gone, axis=1).T.tolist():
            request, _, need, tokens, kv, joined, verified, _, last = column
            cycles = self.cycle - joined
            ledger.emitted[request] += min(tokens, need)
            ledger.cycles[request] += cycles
            ledger.verified[request] += verified
            ledger.accepted[request] += tokens - cycles
            self.kv_total -= kv + tokens
            begun = kv + tokens - last  # tokens that it had before its last cycle
            left.append(Gone(request, begun + 1, begun + self.reserve if cycles else kv))
        kept = self.state[:, : self.n].compress(~gone, axis=1)
        self.n -= len(left)
        self.state[:, : self.n] = kept
        self._bind()
        if self.slack <= 0:
            self._wrap()
        return left

    def emitted_by(self, domains: int) -> NDArray[np.int64]:
        """Tokens [domains] that the requests here have emitted since they joined."""
        codes = [self.ledger.domain[request] for request in self.ids.tolist()]
        return np.bincount(codes, weights=self.tokens, minlength=domains).astype(np.int64)

    def _place(self, request: int, emitted: int, cycles: int) -> tuple[int, int]:
        """The tape row of a request's next block, and the row at which it must be placed anew."""
        tape, ledger = self.tape, self.ledger
        assert tape is not None
        part, to_edge = ledger.part[request], 1 << 62
        if self._edges:
            at = emitted - 1 + (ledger.prompt_tokens[request] if tape.by == "context" else 0)
            passed = bisect_right(self._edges, at)
            part = part * (len(self._edges) + 1) + passed
            if passed < len(self._edges):
                to_edge = self._edges[passed] - at
                if tape.by_cycle:  # a row is a cycle, of at most γ + 1 tokens: the edge is not nearer than that
                    to_edge = max(to_edge // self.width, 1)
        first, size = self._parts[part]
        row = first + (int(ledger.place[request] * size) + (cycles if tape.by_cycle else emitted - 1)) % size
        return row, min(first + size, row + to_edge)

    def _wrap(self) -> None:
        """Send requests that have read to the end of their part of the tape back to its start, or on to the next."""
        if self.tape is None or not self.n:
            return
        rows, end = self.rows(self.n), self.state[_END, : self.n]
        for i in np.flatnonzero(rows >= end).tolist():
            request = int(self.ids[i])
            emitted = self.ledger.emitted[request] + int(self.tokens[i])
            cycles = self.ledger.cycles[request] + self.cycle - int(self.state[_JOINED, i])
            row, end[i] = self._place(request, emitted, cycles)
            self.base[i] += row - rows[i]
            rows[i] = row
        self.slack = int((end - rows).min())

    def _bind(self) -> None:
        """Name the rows of the state after its width changed."""
        live: Any = self.state[:, : self.n]
        self.base, self.need, self.tokens, self.verified = live[_BASE], live[_NEED], live[_TOKENS], live[_VERIFIED]
        self.last = live[_LAST]
        self.ids = live[_ID].copy()
        self.ids.flags.writeable = False
