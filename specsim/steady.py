"""Does a scheduler answer a run made again as it answered the first time?"""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from specsim.asking import check_callable, scheduler_name
from specsim.engine import Scenario, simulate
from specsim.types import SpecsimError
from specsim.views import StepView
from specsim.zoo import WrongCost

ASKED = 307
"""Questions of a run that are put again: a scheduler that draws is found out by few, and they take milliseconds.

A prime, so that one that counts steps in short cycles is met in another place the second time.
"""


def check_steady(scenario: Scenario, seed: int) -> None:
    """SpecsimError if the scenario's scheduler answers otherwise once its first ASKED steps are simulated again.

    Both times in this process, one after the other, each from its start(): what it draws from a stream that others
    share, or remembers elsewhere, shows. Then another seed, by the scheduler that has these runs behind it and by a
    copy that has none, if it can be copied: what it keeps by request, the same in all seeds, shows. Schedulers of
    specsim's own are not asked.
    """
    scheduler = scenario.scheduler
    if _is_ours(scheduler):
        return
    check_callable(scheduler)
    name = scheduler_name(scheduler)  # before it is asked: what it remembers may be in it
    unused: Any = None
    with suppress(Exception, SystemExit):  # one with a lock or an open file in it cannot be copied
        unused = copy.deepcopy(scheduler)
    if not _agree(scenario, scheduler, scheduler, seed):
        raise SpecsimError(
            f"scheduler {name}: answers otherwise when the same seed is run again: expected chance only from a "
            "generator that its start() makes of a seed, such as np.random.default_rng(self.seed), and memory only in "
            "what start() returns"
        )
    if unused is None or unused is scheduler:  # a function is its own copy
        return
    try:
        steady = _agree(scenario, scheduler, unused, int(seed) + 1)
    except SpecsimError:  # a seed that nobody asked for may hold a request that does not fit
        return
    if not steady:
        raise SpecsimError(
            f"scheduler {name}: answers otherwise than a copy of it that has run no other seed: expected memory only "
            "in what start() returns"
        )


def _agree(scenario: Scenario, one: Any, other: Any, seed: int) -> bool:
    """Whether two schedulers, one after the other, answer alike under ``seed``."""
    first, second = (_answers(replace(scenario, scheduler=asked), seed) for asked in (one, other))
    return len(first) == len(second) and all(map(np.array_equal, first, second))


class _Enough(BaseException):
    """Ends a run. Not an Exception, which a scheduler may catch."""


class _Heard:
    """A scheduler whose first answers are kept. It raises and returns what the one inside does, under its name."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.answers: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheduler, name)  # what an engine asks of it, it asks of the one inside

    def __repr__(self) -> str:
        return scheduler_name(self.scheduler)

    def start(self) -> Any:
        schedule = self.scheduler.start() if hasattr(self.scheduler, "start") else self.scheduler

        def heard(view: StepView) -> Any:
            if len(self.answers) == ASKED:
                raise _Enough
            answer = schedule(view)
            self.answers.append(np.copy(answer) if isinstance(answer, np.ndarray) else answer)
            return answer

        return heard if callable(schedule) else schedule


def _answers(scenario: Scenario, seed: int) -> list[Any]:
    heard = _Heard(scenario.scheduler)
    with suppress(_Enough):
        simulate(replace(scenario, scheduler=heard), seed)
    return heard.answers


def _is_ours(scheduler: Any) -> bool:
    if isinstance(scheduler, WrongCost):
        return _is_ours(scheduler.scheduler)
    return type(scheduler).__module__ in ("specsim.schedulers", "specsim.zoo")
