"""The experiment: learn an engine's step cost and acceptance at some loads, measure others; repeated, interleaved."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import httpx

from specsim.importers.evidence import Evidence
from specsim.lengths import Lengths, Quantiles
from specsim.live.client import Target, open_client
from specsim.live.engines import (
    Engine,
    counted_acceptance,
    detect,
    draft_length,
    drafted,
    drafts_counted,
    gauged_acceptance,
    has_counters,
    scrape,
    timed_acceptance,
)
from specsim.live.load import INTERRUPTED, Drive, Driver, Prompts
from specsim.types import Requests, SpecsimError
from specsim.workload import ClosedLoop, Poisson

WALL = time.time
MIXED = 0.25
"""Share by which answers differ in length. Equal ones would march in step, all prompts in one step, and whether one of
them comes a millisecond late would change the whole load: in practice they do not, so neither side should."""
LEAST_ARRIVALS = 20
"""Fewer Poisson arrivals than that span too short a time to tell a throughput."""
ROOM = 8
"""Tokens that are left free in an engine's longest request: some put tokens of their own in front."""
BURSTS = 6
"""Bursts of one request; those of more have as many in all, but two of each at least."""
LEAST_STEPS = 16
"""Steps by which a burst of long answers is longer than one of short ones, at least."""
LONGER = 4
"""By how much the second prompt that is timed alone is longer than the first."""


@dataclass(frozen=True)
class Plan:
    """What to do.

    ``calibrate`` and ``check``: users of closed loops; ``poisson``: requests/s to check too; ``arrivals``: a table to
    replay. ``requests``: measured in each load, rounded up to whole rounds of its users. ``known_steps``: a profile
    tells the step cost, so loads only tell the acceptance, where it is needed; ``known_draft``: so is what drafting
    costs. ``draft_len``: tokens of a request's block that its steps verify, as far as that is known. ``metrics``: the
    server should have them. ``seconds`` bounds all of it.
    """

    calibrate: Sequence[int] = (1, 3, 8)
    check: Sequence[int] = (2, 4, 6)
    poisson: float | None = None
    arrivals: Requests | None = None
    prompt_tokens: int = 64
    output_tokens: int = 64
    requests: int = 16
    repeat: int = 3
    known_steps: bool = False
    known_draft: bool = False
    needs_acceptance: bool = True
    draft_len: int = 0
    metrics: bool = True
    seconds: float = 900.0

    def closed(self, users: int) -> ClosedLoop:
        """The closed loop of so many users."""
        rounds = max(2, math.ceil(self.requests / users))
        return ClosedLoop(users, self.prompt_tokens, self.answers, measured=rounds * users)

    @property
    def counted(self) -> list[int]:
        """The users of the loops that drafts are counted in: those of ``calibrate`` that are no more than are checked.

        More are of use for steps alone: of many tokens, as the drafts of few users are.
        """
        most = max(self.check, default=max(self.calibrate))
        return [users for users in self.calibrate if users <= most] or [min(self.calibrate)]

    @property
    def answers(self) -> Lengths:
        """The law of the answers' lengths: evenly, MIXED more or less than ``output_tokens``."""
        low, high = (max(2, round(self.output_tokens * (1 + sign * MIXED))) for sign in (-1, 1))
        return Quantiles((0.0, 1.0), (low, high))

    @property
    def burst(self) -> tuple[int, int]:
        """Prompt and answer of each request in a burst, in tokens.

        A step that verifies so many tokens has 1 + draft_len of each of its requests: with a token of each of so many
        requests instead, KV is as much only if each holds so much less of it.
        """
        if not self.draft_len:
            return self.prompt_tokens, self.output_tokens
        held = (self.prompt_tokens + self.output_tokens / 2) / (1 + self.draft_len)
        answer = max(LEAST_STEPS, round(self.output_tokens / (1 + self.draft_len)))
        return max(1, round(held - answer / 2)), answer

    def open(self) -> Requests | None:
        """The Poisson arrivals: the same in every repetition, so that their spread is the engine's own."""
        if self.poisson is None:
            return None
        count = max(LEAST_ARRIVALS, self.requests)
        return Poisson(self.poisson, count, self.prompt_tokens, self.answers).requests(0)


@dataclass
class Repeat:
    """The loads of one repetition: ``steps`` and ``alone`` to learn from, ``checks`` by name to compare with.

    ``bursts``: not streamed, of the server without speculation; ``draft_bursts`` and ``draft_alone``: the same of the
    draft model served alone. ``counted``: loads that drafts were counted in; ``acceptance``: what was counted, and
    ``draft_length`` how many tokens of a block were verified; None where nothing was.
    """

    steps: list[Drive] = field(default_factory=list)
    alone: list[Drive] = field(default_factory=list)
    bursts: list[Drive] = field(default_factory=list)
    draft_bursts: list[Drive] = field(default_factory=list)
    draft_alone: list[Drive] = field(default_factory=list)
    counted: list[Drive] = field(default_factory=list)
    checks: dict[str, Drive] = field(default_factory=dict)
    acceptance: Evidence | None = None
    draft_length: float | None = None

    @property
    def calibration(self) -> list[Drive]:
        """The loads that something was learned from."""
        return [*self.steps, *self.alone, *self.bursts, *self.draft_bursts, *self.draft_alone, *self.counted]

    @property
    def drives(self) -> list[Drive]:
        """All loads, those of the calibration first."""
        return [*self.calibration, *self.checks.values()]


@dataclass
class Measured:
    """What the experiment left behind: a ``warm_up``, whole repetitions, and maybe a last one that is not.

    ``speculates``: drafts were counted. ``stopped``: why it ended early. ``faults``: lines about the engine's faults.
    """

    engine: Engine
    warm_up: list[Drive] = field(default_factory=list)
    repeats: list[Repeat] = field(default_factory=list)
    speculates: bool = False
    stopped: str | None = None
    faults: list[str] = field(default_factory=list)

    @property
    def drives(self) -> list[Drive]:
        """Every load, in order."""
        return self.warm_up + [drive for repeat in self.repeats for drive in repeat.drives]

    def counts(self) -> dict[str, int]:
        """What became of all requests; the fates add up to ``sent``."""
        total: dict[str, int] = {}
        for drive in self.drives:
            for name, count in drive.counts().items():
                total[name] = total.get(name, 0) + count
        return total


class _Stopped(Exception):
    """A load ended early: the rest is not driven."""


async def run(
    target: Target,
    plan: Plan,
    *,
    kind: str | None = None,
    model: str | None = None,
    prompts: Prompts | None = None,
    plain: str | None = None,
    draft: str | None = None,
    say: Callable[[str], None] = lambda line: None,
    transport: httpx.AsyncBaseTransport | None = None,
    wall: Callable[[], float] | None = None,
) -> Measured:
    """Drive the engine at ``target`` through ``plan``; ``say`` hears what is under way.

    ``plain``: address of a server of the same without speculation, to learn steps from; ``draft``: of the draft model
    alone. Raises SpecsimError where a server cannot be asked at all, or speculates while nothing tells its steps.
    Whatever goes wrong later ends in the Measured that is returned.
    """
    prompts = prompts or Prompts()
    deadline = asyncio.get_running_loop().time() + plan.seconds
    async with AsyncExitStack() as stack:

        async def side(url: str, kind: str | None = None, model: str | None = None) -> _Side:
            client = await stack.enter_async_context(open_client(replace(target, url=url), transport))
            engine = await detect(client, kind, model)
            told = replace(target, url=url, model=engine.model)
            return _Side(client, engine, Driver(client, told, prompts, deadline, wall=wall or WALL))

        main = await side(target.url, kind, model)
        others = [None if url is None else await side(url) for url in (plain, draft)]
        experiment = _Experiment(main, others[0], others[1], plan, Measured(main.engine), say)
        try:
            await experiment.run()
        except _Stopped as reason:
            experiment.measured.stopped = str(reason)
        except asyncio.CancelledError:  # between two loads
            experiment.measured.stopped = INTERRUPTED
            current = asyncio.current_task()
            assert current is not None
            current.uncancel()
        return _told(experiment.measured)


class _Side(NamedTuple):
    """A server, and who puts load on it."""

    client: httpx.AsyncClient
    engine: Engine
    driver: Driver


class _Experiment:
    def __init__(
        self,
        main: _Side,
        plain: _Side | None,
        draft: _Side | None,
        plan: Plan,
        measured: Measured,
        say: Callable[[str], None],
    ) -> None:
        self.client, self.driver, self.plan, self.measured, self.say = (
            main.client, main.driver, plan, measured, say,
        )  # fmt: skip
        self.main, self.plain, self.draft = main, plain, draft
        self.random = Prompts(self.driver.prompts.seed + 1)  # of any length, whatever prompts are given

    async def run(self) -> None:
        plan, measured = self.plan, self.measured
        most = measured.engine.max_model_len
        if most is not None and plan.prompt_tokens + round((1 + MIXED) * plan.output_tokens) + ROOM > most:
            raise SpecsimError(
                f"--prompt-tokens and 1.25 times --output-tokens: expected at most {most - ROOM} together, the longest "
                f"request that {measured.engine.name} takes, got {plan.prompt_tokens} and {plan.output_tokens}"
            )
        before = await scrape(self.client)
        if before is None and plan.metrics:
            measured.faults.append(
                "metrics: the server has no /metrics: its drafts cannot be counted (llama.cpp: start it with "
                "--metrics; --no-metrics says that this is known)"
            )
        first = await self._keep("warm-up", self.driver.closed(plan.closed(1)), measured.warm_up.append)
        after = await scrape(self.client)
        timed = timed_acceptance(first.answers) is not None
        # SGLang counts no drafts, but says that it speculates.
        told = measured.engine.kind == "sglang" and measured.engine.speculation is not None
        measured.speculates = timed or told or drafts_counted(after) > drafts_counted(before)
        if measured.speculates and not plan.known_steps and self.plain is None:
            raise SpecsimError(
                f"{measured.engine.name} speculates: its steps are learned without; start one without speculation, and "
                "name it with --plain-url, or keep its profile with --out and give it to this run with --profile"
            )
        if measured.speculates and plan.needs_acceptance and not plan.known_draft:
            raise SpecsimError(
                f"{measured.engine.name} speculates: expected what drafting costs: --draft-url (the draft model served "
                "alone), --draft-profile (its profile), --draft-ms, or a draft in the profile; --draft-ms 0 for n-grams"
            )
        for number in range(plan.repeat):
            repeat = Repeat()
            measured.repeats.append(repeat)
            await self._calibrate(number, repeat)
            await self._check(number, repeat)

    async def _calibrate(self, number: int, repeat: Repeat) -> None:
        plan = self.plan
        if not plan.known_steps:
            loops = plan.calibrate if self.plain is None else plan.counted
            await self._learn(self.plain or self.main, loops, number, repeat.steps)
            if self.plain is not None:
                await self._burst(self.plain, plan.calibrate, plan.burst, repeat.bursts)
            await self._alone(self.plain or self.main, number, repeat.alone)
        if self.draft is not None:
            whole = plan.prompt_tokens, plan.output_tokens
            await self._burst(self.draft, plan.counted, whole, repeat.draft_bursts, "draft model: ")
            await self._alone(self.draft, number, repeat.draft_alone, "draft model: ")
        if not (self.measured.speculates and plan.needs_acceptance):
            return
        before = await scrape(self.client)
        try:
            for users in plan.counted:
                work = self.driver.closed(plan.closed(users), number)
                await self._keep(f"drafts of {users}", work, repeat.counted.append)
        finally:
            if repeat.counted:
                repeat.acceptance = await self._acceptance(before, repeat)

    async def _learn(self, side: _Side, loops: Sequence[int], number: int, steps: list[Drive]) -> None:
        """Loads whose gaps between chunks tell what a step costs."""
        plan, drive = self.plan, side.driver
        for users in loops:
            await self._keep(f"calibration {users}", drive.closed(plan.closed(users), number), steps.append)
            if users > 1:
                work = drive.drain(users, plan.prompt_tokens, plan.output_tokens)
                await self._keep(f"drain {users}", work, steps.append)

    async def _burst(
        self, side: _Side, sizes: Sequence[int], each: tuple[int, int], bursts: list[Drive], what: str = ""
    ) -> None:
        """Bursts, not streamed, of long answers and of short ones: a step of each size without sending tokens.

        ``each``: tokens of a request's prompt and of its long answer; shorter ones are tried more often.
        """
        prompt, answer = each
        times = BURSTS * self.plan.output_tokens / answer
        for users in sizes:
            for _ in range(max(2, math.ceil(times / users))):
                for tokens in (answer, 2):
                    work = side.driver.burst(users, prompt, tokens)
                    await self._keep(f"{what}burst {users}", work, bursts.append)

    async def _alone(self, side: _Side, number: int, alone: list[Drive], what: str = "") -> None:
        """What an idle engine needs for a prompt, and for a longer one; few tokens of answer."""
        plan = self.plan
        longer, most = LONGER * plan.prompt_tokens, side.engine.max_model_len
        for tokens in dict.fromkeys((plan.prompt_tokens, longer if most is None else min(longer, most - ROOM))):
            load = ClosedLoop(1, tokens, 2, measured=max(4, plan.requests // 2))
            await self._keep(f"{what}prompt {tokens}", side.driver.closed(load, number, self.random), alone.append)

    async def _acceptance(self, before: str | None, repeat: Repeat) -> Evidence | None:
        after = await scrape(self.client)
        if before is not None and after is not None and has_counters(after):
            try:
                repeat.draft_length = draft_length(before, after)
                return counted_acceptance(before, after)
            except SpecsimError as error:
                self.measured.faults.append(f"metrics: {error}")
        timed = timed_acceptance([a for d in repeat.counted for a in d.answers])
        return timed[0] if timed else gauged_acceptance(after, self.measured.engine)

    async def _check(self, number: int, repeat: Repeat) -> None:
        plan, drive = self.plan, self.driver

        async def keep(name: str, work: Awaitable[Drive]) -> None:
            before = await scrape(self.client) if self.measured.speculates else None

            def store(drive: Drive) -> None:
                repeat.checks[drive.name] = drive

            found = await self._keep(name, work, store)
            if self.measured.speculates:
                found.drafted = drafted(before, await scrape(self.client), found.answers)

        for users in plan.check:
            await keep(f"closed {users}", drive.closed(plan.closed(users), number))
        requests = plan.open()
        if requests is not None:
            name = f"poisson {plan.poisson:g}/s"
            await keep(name, drive.open(name, requests))
        if plan.arrivals is not None:
            await keep("arrivals", drive.open("arrivals", plan.arrivals))

    async def _keep(self, name: str, work: Awaitable[Drive], keep: Callable[[Drive], None]) -> Drive:
        """Drive a load and keep it, whole or not."""
        number = len(self.measured.repeats)
        self.say(f"repetition {number} of {self.plan.repeat}, {name}" if number else name)
        drive = await work
        drive.name = name
        keep(drive)
        if drive.stopped is not None:
            raise _Stopped(f"{name}: {drive.stopped}")
        return drive


def _told(measured: Measured) -> Measured:
    """Say each kind of fault in a line, with how many of the requests had it."""
    kinds: dict[str, tuple[int, str, str]] = {}
    for drive in measured.drives:
        for kind, (count, detail) in drive.faults().items():
            before, first, where = kinds.get(kind, (0, detail, drive.name))
            kinds[kind] = before + count, first, where
        if drive.clock_step:
            measured.faults.append(
                f"clock: the wall clock moved by {drive.clock_step:+.1f} s during {drive.name} (set, or the machine "
                "slept): times are of the monotonic clock and stand"
            )
    sent = measured.counts().get("sent", 0)
    for kind, (count, detail, where) in kinds.items():
        measured.faults.append(
            f"{kind}: {count} of {sent} requests, first in {where}" + (f": {detail}" if detail else "")
        )
    return measured
