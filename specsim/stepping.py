"""How steps take their place in simulated time."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import simpy
from simpy.events import EventPriority


class StepEnd(simpy.Event):
    """A timeout after all others of its moment: who arrives just as a step ends is seen at its end."""

    def __init__(self, env: simpy.Environment, seconds: float) -> None:
        super().__init__(env)
        self._ok, self._value = True, None
        env.schedule(self, EventPriority(2), seconds)


def run_in_lockstep(env: simpy.Environment, replicas: Sequence[Any]) -> Generator[simpy.Event, None, None]:
    """Step replicas together, as ranks that exchange experts' tokens do: the slowest decides how long a step lasts.

    A rank without work steps along (an empty forward, never the slowest).
    """
    while True:
        if not any(r.busy for r in replicas):
            wake = env.event()
            for r in replicas:
                r.wake = wake
            yield wake
        for r in replicas:
            r.plan_step()
        working = [r for r in replicas if r.batch.n or r.prefills]
        if working:
            seconds = max([r.begin_step() for r in working])
            yield StepEnd(env, seconds)
            for r in working:
                r.end_step(seconds)
