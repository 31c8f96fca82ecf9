"""Loads on a server: closed loops, arrivals at given times and drains; bounded, and whole wherever they stop."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from specsim.files import read_text
from specsim.live.client import CUT_OFF, SHORT, Answer, Order, Target, ask
from specsim.live.engines import Drafted
from specsim.types import Floats, Ints, Requests, SpecsimError
from specsim.workload import ClosedLoop

IN_A_ROW = 5
"""So many requests that fail one after the other, beyond one for each user, end a load: the engine is not there."""
PAUSE = 0.1
"""Seconds that a user waits after a request that failed, so that a refusing server is not stormed."""
JUMP = 0.5
"""Seconds by which the wall clock may part from the monotonic one during a load before it counts as a step."""
TOKEN_IDS = (100, 1000)
"""Random prompts are made of these ids: every vocabulary has them, and special tokens are rarely among them."""
INTERRUPTED, OUT_OF_TIME = "interrupted", "out of time"


class Prompts:
    """Prompts of a given number of tokens: random ids that no other request shares, or the texts of a file in turn."""

    def __init__(self, seed: int = 0, given: Sequence[str | list[int]] = ()) -> None:
        self.seed, self.given, self.made = seed, given, 0

    def order(self, prompt_tokens: int, output_tokens: int) -> Order:
        """The next order; a given prompt has the length that it has."""
        made, self.made = self.made, self.made + 1
        if self.given:
            prompt = self.given[made % len(self.given)]
            return Order(prompt, output_tokens, None if isinstance(prompt, str) else len(prompt))
        rng = np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=(made,)))
        return Order(rng.integers(*TOKEN_IDS, size=prompt_tokens).tolist(), output_tokens, prompt_tokens)


def read_prompts(path: Path) -> list[str | list[int]]:
    """The prompts of a JSON-lines file, ``{"prompt": TEXT or [ids]}`` each; SpecsimError names file and line."""
    found: list[str | list[int]] = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError, RecursionError):
            prompt = None
        ids = isinstance(prompt, list) and all(type(t) is int and t >= 0 for t in prompt)
        if not prompt or not (ids or isinstance(prompt, str)):
            raise SpecsimError(f"{path}: line {number}: prompt: expected a text or a list of token ids")
        found.append(prompt)
    if not found:
        raise SpecsimError(f"{path}: expected at least one prompt, got none")
    return found


@dataclass
class Drive:
    """One load, driven: its answers in the order in which they were sent, those ``first`` .. ``last`` - 1 measured.

    ``start`` and ``end`` (seconds, the loop's clock) bound the time in which tokens are counted. ``stopped`` says why
    it ended early (None: it did not), ``clock_step`` by how many seconds somebody set the wall clock meanwhile, and
    ``started_at`` (seconds since 1970) when it began. ``drafted``: what an engine that speculates counted meanwhile.
    ``to_length``: answers were asked to ignore an end of their own, so a shorter one is a fault.
    """

    name: str
    answers: list[Answer] = field(default_factory=list)
    first: int = 0
    last: int = 0
    start: float = math.nan
    end: float = math.nan
    stopped: str | None = None
    clock_step: float = 0.0
    started_at: float = 0.0
    drafted: Drafted | None = None
    to_length: bool = True

    @property
    def measured(self) -> list[Answer]:
        """The requests that were to be measured and were answered in full."""
        return [a for a in self.answers[self.first : self.last] if a.done]

    def counts(self) -> dict[str, int]:
        """What became of all that was sent: ``answered``, ``cut off`` and each fault; they add up to ``sent``."""
        fates = Counter("answered" if a.done else a.fault or CUT_OFF for a in self.answers)
        return {"sent": len(self.answers), **{name: fates[name] for name in sorted(fates)}}

    def faults(self) -> dict[str, tuple[int, str]]:
        """Faults of the engine by kind: how many, and the first one's detail. An answer may be whole and short."""
        found: dict[str, tuple[int, str]] = {}
        for a in self.answers:
            kind, detail = a.fault, a.detail
            if self.to_length and a.done and (a.output_tokens or 0) < a.order.output_tokens:
                kind, detail = SHORT, f"{a.output_tokens} of {a.order.output_tokens}"
            if kind is not None and kind != CUT_OFF:
                count, first = found.get(kind, (0, detail))
                found[kind] = count + 1, first
        return found

    def most_running(self) -> int:
        """The most requests that were decoding at a time."""
        edges = [(t, sign) for a in self.answers if a.chunks for t, sign in ((a.chunks[0], 1), (a.chunks[-1], -1))]
        return max(itertools.accumulate(step for _, step in sorted(edges)), default=0)

    def tokens(self) -> float:
        """Output tokens that came between ``start`` and ``end``; each chunk holds an even share of its answer's."""
        whole = [a for a in self.answers if a.done and a.chunks]
        chunks = sum(len(a.chunks) for a in whole)
        usual = sum(a.output_tokens or 0 for a in whole) / chunks if chunks else 1.0
        total = 0.0
        for a in self.answers:
            each = (a.output_tokens or 0) / len(a.chunks) if a.done and a.chunks else usual
            total += each * sum(self.start < t <= self.end for t in a.chunks)
        return total


class Driver:
    """Sends loads to one target, until ``deadline`` on the loop's clock; ``on_answer(done, total)`` hears of each."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        target: Target,
        prompts: Prompts,
        deadline: float,
        on_answer: Callable[[int, int], None] = lambda done, total: None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.client, self.target, self.prompts, self.deadline = client, target, prompts, deadline
        self.on_answer, self.wall = on_answer, wall
        self.failed_in_a_row = 0  # over all loads: a server that is gone is not asked again by each

    async def closed(self, workload: ClosedLoop, seed: int = 0, prompts: Prompts | None = None) -> Drive:
        """A closed loop: one request of each user warms it up, and load is kept to the end of those measured."""
        prompts = prompts or self.prompts
        users, measured = workload.concurrency, workload.num_measured
        drive = Drive(workload.label, first=users, last=users + measured)
        lengths = workload.asked(seed)
        thinks = itertools.chain.from_iterable(workload.thinks(seed))
        load = _Load(self, drive, users)

        async def user(first: float) -> None:
            if workload.think_s:
                await asyncio.sleep(first)
            while True:
                prompt, output = next(lengths)
                if await load.send(prompts.order(prompt, output)):
                    await asyncio.sleep(PAUSE)
                if workload.think_s:
                    await asyncio.sleep(float(next(thinks)))

        return await load.run([user(first) for first in workload.first_asks(seed).tolist()])

    async def drain(self, users: int, prompt_tokens: int, output_tokens: int) -> Drive:
        """``users`` requests at once whose answers end one after the other, evenly: steps of ``users`` down to 1."""
        drive = Drive(f"drain {users}", last=users)
        load = _Load(self, drive, users)

        async def user(share: float) -> None:
            await load.send(self.prompts.order(prompt_tokens, max(2, round(output_tokens * share))))

        return await load.run([user((i + 1) / users) for i in range(users)])

    async def burst(self, users: int, prompt_tokens: int, output_tokens: int) -> Drive:
        """``users`` requests at once of equal answers, which come whole: no time goes into sending tokens."""
        drive = Drive(f"burst {users}", last=users)
        load = _Load(self, drive, users, replace(self.target, stream=False))
        work = [load.send(self.prompts.order(prompt_tokens, output_tokens)) for _ in range(users)]
        return await load.run(work)

    async def open(self, name: str, requests: Requests) -> Drive:
        """Arrivals at the times of ``requests``; those of the first tenth of the time warm up, as in the simulator."""
        n, times = len(requests), requests.arrival_s
        drive = Drive(name, first=int(np.searchsorted(times, 0.1 * times[-1])), last=n)
        load = _Load(self, drive, n)
        clock = asyncio.get_running_loop().time
        zero = clock()

        async def feed() -> None:
            async with asyncio.TaskGroup() as group:
                for i, at in enumerate(times.tolist()):
                    await asyncio.sleep(max(0.0, zero + at - clock()))
                    order = self.prompts.order(int(requests.prompt_tokens[i]), int(requests.output_tokens[i]))
                    # A sender that is late is not the engine's: requests count from when they were due.
                    group.create_task(load.send(order, zero + at))

        drive = await load.run([feed()])
        arrivals = [a.arrival for a in drive.answers[drive.first :]]
        if drive.stopped is None and arrivals:
            drive.start, drive.end = arrivals[0], arrivals[-1]
        return drive


class _Load:
    """A load under way: who is to be waited for, and what ends it."""

    def __init__(self, driver: Driver, drive: Drive, users: int, target: Target | None = None) -> None:
        self.driver, self.drive, self.users = driver, drive, users
        self.target = target or driver.target
        self.left = drive.last - drive.first
        self.over = asyncio.Event()
        self.clock = asyncio.get_running_loop().time

    async def send(self, order: Order, due: float | None = None) -> bool:
        """Send one request and wait for its answer; whether it failed."""
        drive, now = self.drive, self.clock()
        answer = Answer(len(drive.answers), order, now if due is None else due, now)
        if answer.index == drive.first:
            drive.start = now
        drive.answers.append(answer)
        await ask(self.driver.client, self.target, answer)
        failed = answer.fault is not None
        in_a_row = self.driver.failed_in_a_row = self.driver.failed_in_a_row + 1 if failed else 0
        if in_a_row >= IN_A_ROW + self.users and not self.over.is_set():
            drive.stopped = f"{in_a_row} requests failed one after the other"
            self.over.set()
        if drive.first <= answer.index < drive.last:
            self.left -= 1
            drive.end = self.clock() if answer.finish is None else max(answer.finish, _or_least(drive.end))
            self.driver.on_answer(drive.last - drive.first - self.left, drive.last - drive.first)
            if not self.left:
                self.over.set()
        return failed

    async def run(self, work: Sequence[Coroutine[Any, Any, Any]]) -> Drive:
        """Do ``work`` until all measured requests are answered, time is out, or somebody interrupts."""
        drive, wall = self.drive, self.driver.wall
        drive.started_at, began = wall(), self.clock()
        drive.to_length = self.target.ignore_eos
        tasks = [asyncio.create_task(part) for part in work]
        try:
            async with asyncio.timeout_at(self.driver.deadline):
                await self._ended(tasks)
        except TimeoutError:
            drive.stopped = OUT_OF_TIME
        except asyncio.CancelledError:
            drive.stopped = INTERRUPTED
            current = asyncio.current_task()
            assert current is not None
            current.uncancel()  # what is there is returned; whoever drives sees why it is not all
        finally:
            for task in tasks:
                task.cancel()
            done = await asyncio.gather(*tasks, return_exceptions=True)
        for failure in done:
            if isinstance(failure, Exception):
                raise failure
        if drive.stopped is not None:
            drive.last = min(drive.last, len(drive.answers))
            drive.end = self.clock()
        step = (wall() - drive.started_at) - (self.clock() - began)
        drive.clock_step = step if abs(step) > JUMP else 0.0
        return drive

    async def _ended(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Wait for the end, or for a user that broke down, which would otherwise be waited for in vain."""
        over: asyncio.Task[Any] = asyncio.create_task(self.over.wait())
        try:
            pending: set[asyncio.Task[Any]] = set(tasks)
            while pending and not over.done():
                done, _ = await asyncio.wait({over, *pending}, return_when=asyncio.FIRST_COMPLETED)
                pending -= done
                if any(t.exception() for t in done if t is not over):
                    return
        finally:
            over.cancel()


def _or_least(value: float) -> float:
    return -math.inf if math.isnan(value) else value


def observed(answers: Sequence[Answer]) -> tuple[Ints, Ints]:
    """Prompt and output tokens of ``answers``, as the server counted them."""
    prompt = [a.prompt_tokens or len(a.order.prompt) for a in answers]
    return np.array(prompt, dtype=np.int64), np.array([a.output_tokens or 0 for a in answers], dtype=np.int64)


def latencies(drive: Drive) -> tuple[Floats, Floats]:
    """ttft [n] and tpot [n or fewer] of the measured answers, seconds."""
    ttft = np.array([a.ttft for a in drive.measured])
    return ttft, np.array([t for a in drive.measured if (t := a.tpot) is not None])
