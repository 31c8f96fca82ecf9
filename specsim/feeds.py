"""What submits requests to a run and says when it is over: one process for an open loop, one for a closed one."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Protocol

import numpy as np
import simpy

from specsim.kv import contents, conversation
from specsim.ledger import Ledger
from specsim.rules import Limits
from specsim.types import Ints, SpecsimError
from specsim.workload import LATEST_S, Arrivals, ClosedLoop, OpenLoop, Workload


class Run(Protocol):
    """What a feed needs of the run that it feeds."""

    seed: int
    env: simpy.Environment
    ledger: Ledger
    limits: Limits
    done: simpy.Event

    def add(self, prompt: Ints, output: Ints, names: tuple[str, ...], codes: Ints) -> None:
        """Enter requests in the ledger."""

    def submit(self) -> None:
        """The next request in the ledger arrives now."""

    def mark(self) -> None:
        """An edge of the measurement window."""


def shares_prefixes(workload: Workload) -> bool:
    """Whether prompts start alike: as their hashes tell, or because a request goes on where another ended."""
    if isinstance(workload, ClosedLoop):
        return workload.has_turns
    table = workload.table if isinstance(workload, Arrivals) else None
    return table is not None and (table.prefix_hashes is not None or table.session_id is not None)


class OpenFeed:
    """Requests arrive when the workload says; those of the first tenth of the run warm it up."""

    closed = False

    def __init__(self, run: Run, workload: OpenLoop) -> None:
        requests = workload.requests(run.seed)
        if requests.arrival_s[-1] > LATEST_S:
            raise SpecsimError(
                f"workload {workload.label}: expected the last arrival within {LATEST_S:g} s, got "
                f"{requests.arrival_s[-1]:.3g} s, where clocks do not tell microseconds apart"
            )
        run.add(requests.prompt_tokens, requests.output_tokens, requests.domains, requests.domain)
        if run.ledger.shares_prefixes:
            hashes, sessions = requests.prefix_hashes, requests.session_id
            known = None if sessions is None else sessions.tolist()
            lengths = requests.prompt_tokens.tolist(), requests.output_tokens.tolist()
            run.ledger.contents = contents(*lengths, hashes, known, run.limits.block_size)
        self.run, self.times = run, requests.arrival_s
        self.last = len(self.times)
        self.first = int(np.searchsorted(self.times, 0.1 * self.times[-1]))
        self.left = self.last

    def arrive(self) -> Generator[simpy.Event, None, None]:
        run, env = self.run, self.run.env
        for i, time in enumerate(self.times.tolist()):
            if time > env.now:
                yield env.timeout(time - env.now)
            if i == self.first:
                run.mark()
            run.submit()
        run.mark()

    def finished(self, requests: list[int]) -> None:
        self.left -= len(requests)
        if not self.left:
            self.run.done.succeed()


class ClosedFeed:
    """A fixed number of users, each with one request at a time; load is kept to the end of the run.

    The time thought after a request goes by the request's number, as its lengths do: the same under every scheduler.
    Where users hold conversations, a prompt is all that was said before and what the user says now.
    """

    closed = True

    def __init__(self, run: Run, workload: ClosedLoop) -> None:
        self.run, self.workload = run, workload
        self.blocks, self.asked = workload.lengths(run.seed), workload.asked(run.seed)  # one or the other is read
        self.turns = workload.conversations(run.seed)
        self.first = workload.first_measured
        self.last = self.first + workload.num_measured
        self.left = workload.num_measured
        self.session = [-1] * workload.concurrency  # each user's conversation,
        self.said = [0] * workload.concurrency  # the tokens in it so far,
        self.more = [0] * workload.concurrency  # and the turns that are to come
        self.user: list[int] = []  # of each request
        self.think_blocks = workload.thinks(run.seed)
        self.thinks: list[float] = []  # after each request, as far as drawn
        self.sessions = 0

    def arrive(self) -> Generator[simpy.Event, None, None]:
        if self.workload.think_s > 0:
            for user, first in enumerate(self.workload.first_asks(self.run.seed).tolist()):
                self._ask_in(first, user)
        else:
            for user in range(self.workload.concurrency):
                self.submit(user)
        yield self.run.done

    def submit(self, user: int) -> None:
        run = self.run
        if not self.workload.has_turns:
            if run.ledger.arrived == run.ledger.known:
                self._add(*next(self.blocks))
        else:
            self._say(user)
        self.user.append(user)
        if run.ledger.arrived == self.first:
            run.mark()
        run.submit()

    def _add(self, prompt: Ints, output: Ints) -> None:
        self.run.add(prompt, output, (self.workload.domain,), np.zeros(len(prompt), dtype=np.int64))

    def _say(self, user: int) -> None:
        """The next turn of a user's conversation, or the first of a new one."""
        if not self.more[user]:
            self.session[user], self.said[user], self.more[user] = self.sessions, 0, next(self.turns)
            self.sessions += 1
        prompt, output = next(self.asked)
        self._add(np.array([self.said[user] + prompt]), np.array([output]))
        self.said[user] += prompt + output
        content = conversation(len(self.user), self.session[user], self.said[user], self.run.limits.block_size)
        self.run.ledger.contents.append(content)
        self.more[user] -= 1

    def finished(self, requests: list[int]) -> None:
        run = self.run
        self.left -= sum(self.first <= r < self.last for r in requests)
        if not self.left:
            if not run.done.triggered:
                run.mark()
                run.done.succeed()
            return
        for request in requests:
            user = self.user[request]
            if self.workload.think_s > 0:
                while request >= len(self.thinks):
                    self.thinks += next(self.think_blocks).tolist()
                self._ask_in(self.thinks[request], user)
            else:
                self.submit(user)

    def _ask_in(self, seconds: float, user: int) -> None:
        self.run.env.timeout(seconds, user).callbacks.append(self._ask_again)

    def _ask_again(self, event: Any) -> None:
        self.submit(event.value)
