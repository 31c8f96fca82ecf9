"""The exact law of what comes out under a scheduler, step by step.

A scheduler is asked once for each distinct history that it can tell apart. One without memory sees a view alone; one
with ``start()`` has seen the views before it too, and is replayed from a fresh start; one that reads ``view.previous``
also knows what was verified and how much came out. Equal states with equal histories are merged: what a scheduler says
does not depend on what it cannot see, so their chances may be added up before it is asked.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specsim.asking import ask, fresh, scheduler_name
from specsim.audit.models import Array, Decoder, Instance, Prompts
from specsim.audit.sizes import MOST_GAMMA, own_gamma
from specsim.types import SpecsimError
from specsim.views import Lens, StepRecord, StepView


class Seen(NamedTuple):
    """What tells one view from another within an instance: requests, their confidences as bytes, prompts."""

    ids: tuple[int, ...]
    rows: tuple[bytes, ...]
    prompts: Prompts


class Past(NamedTuple):
    """A step that was: what was seen, what was verified, and, if the scheduler looks back, what came out."""

    seen: Seen
    lens: tuple[int, ...]
    emitted: tuple[int, ...] | None


History = tuple[Past, ...]


class _LooksBack(BaseException):
    """The scheduler reads view.previous: histories must be told apart by it. Not an Exception, which it may catch."""


class AuditView(StepView):
    """A StepView that notices whether the scheduler looks back."""

    __slots__ = ("_past",)

    @property
    def previous(self) -> Sequence[StepRecord]:
        """The last steps' records, newest last."""
        return self._past()  # type: ignore[no-any-return]

    @previous.setter
    def previous(self, past: Any) -> None:
        self._past = past


class Asked:
    """A scheduler, and what it said: each distinct question is put once, or twice where ``twice`` is set.

    ``verified``: whether it ever verified a draft.
    """

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.name = scheduler_name(scheduler)
        self.remembers = hasattr(scheduler, "start")
        self.looks_back = self.looked = False
        self.may_look_back = getattr(scheduler, "uses_previous", True)
        self.reads_confidence = False
        self.below_block = self.off_own = self.verified = False
        self.most = own_gamma(scheduler) or MOST_GAMMA
        self.twice = False
        self.calls = 0
        self.answers: dict[tuple[History, Seen], Lens] = {}
        self.prices: dict[tuple[int, int], Array] = {}

    @property
    def left_out(self) -> bool:
        """Whether it ever left out a draft: of the blocks, or, if it never verified more, of as many as its gamma."""
        return self.below_block and self.off_own

    def enter(self, instance: Instance) -> None:
        """Begin with an instance: answers to another are forgotten."""
        self.answers.clear()
        self.prices.clear()
        self.instance = instance
        self.gamma = instance.decoders[0].gamma

    def lens(self, history: History, seen: Seen) -> Lens:
        """The draft lengths for what is seen after ``history``."""
        key = history, seen
        if key not in self.answers:
            answer = self._ask(history, seen)
            if self.twice and (answer != self._ask(history, seen)).any():
                self._unsteady()
            self.below_block |= bool(answer.min() < self.gamma)
            self.off_own |= bool((answer != min(self.gamma, self.most)).any())
            self.verified |= bool(answer.max() > 0)
            self.answers[key] = answer
        return self.answers[key]

    def _ask(self, history: History, seen: Seen) -> Lens:
        schedule = self.scheduler
        if self.remembers:
            schedule = fresh(self.scheduler)
            for i, past in enumerate(history):
                again = self._answer(schedule, self._view(history[:i], past.seen))
                if tuple(again.tolist()) != past.lens:
                    self._unsteady()
        self.calls += 1
        return self._answer(schedule, self._view(history, seen))

    def _answer(self, schedule: Any, view: StepView) -> Lens:
        try:
            return ask(self.scheduler, schedule, view)
        finally:
            # Whatever became of what was raised there: a bare except swallows it, a clause of its own raises another.
            if self.looked and not self.looks_back:
                raise _LooksBack

    def _unsteady(self) -> None:
        raise SpecsimError(
            f"scheduler {self.name}: answers one and the same view in two ways: expected no chance in it, or a fixed "
            "seed, and memory only in what start() returns"
        )

    def _view(self, history: History, seen: Seen) -> AuditView:
        n, (tokens, finishing, before) = len(seen.ids), seen.prompts

        def confidence() -> Array:
            self.reads_confidence = True
            return np.frombuffer(b"".join(seen.rows)).reshape(n, self.gamma)

        def previous() -> Sequence[StepRecord]:
            if not self.may_look_back or self.instance.steps == 1:
                return ()
            self.looked = True
            if not self.looks_back:
                raise _LooksBack
            views = [(self._view(history[:i], past.seen), past) for i, past in enumerate(history)]
            return tuple(StepRecord(view, np.array(past.lens), np.array(past.emitted)) for view, past in views)

        return AuditView(
            _frozen(np.array(seen.ids)),
            lambda: _frozen(confidence().cumprod(axis=1)),
            self._cost(n, tokens),
            gamma=self.gamma,
            confidence=confidence,
            prefill_tokens=tokens,
            finishing_prefills=finishing,
            prefilled=before,
            previous=previous,  # type: ignore[arg-type]
        )

    def _cost(self, n: int, prompt_tokens: int) -> Any:
        """Step seconds by draft tokens of ``n`` requests, infinite beyond n·γ."""
        key = n, prompt_tokens
        if key not in self.prices:
            self.prices[key] = np.append(self.instance.price(n, prompt_tokens), np.inf)
        curve = self.prices[key]
        return lambda drafts: curve.take(drafts, mode="clip")


def _frozen(values: NDArray[Any]) -> NDArray[Any]:
    values.flags.writeable = False
    return values


@dataclass(frozen=True)
class Block:
    """States that the scheduler cannot tell apart at a step, all that it may see there, and what it said.

    ``seen`` [n] and ``said`` [n]: the views and the draft lengths. For each of the two seats ``states`` [i] (rows or
    columns of ``mass``), and for each view the kind of block drafted, ``kinds`` [n], and ``lens`` [n] of its tokens
    verified. A seat where nobody decodes has one kind, of no tokens.
    """

    history: History
    mass: Array
    states: tuple[NDArray[np.int64], NDArray[np.int64]]
    live: tuple[bool, bool]
    kinds: tuple[Lens, Lens]
    lens: tuple[Lens, Lens]
    seen: list[Seen]
    said: list[tuple[int, ...]]


Mass = dict[History, Array]


def start(instance: Instance) -> Mass:
    """All the mass where nothing has been put out yet, [states, states]; a seat without a request has one state."""
    mass = np.zeros([d.first[-1] for d in instance.decoders] + [1] * (2 - len(instance.decoders)))
    mass[0, 0] = 1.0
    return {(): mass}


def blocks(instance: Instance, asked: Asked, mass: Mass, step: int) -> Iterator[Block]:
    """What the scheduler says at ``step``, to each history and wherever the requests may stand."""
    for history, m in mass.items():
        seats = [_groups(instance, step, seat, m.sum(axis=1 - seat)) for seat in (0, 1)]
        for row, states1 in seats[0]:
            for column, states2 in seats[1]:
                part = m[np.ix_(states1, states2)]
                if part.any():
                    yield _block(instance, asked, history, step, part, (states1, states2), (row, column))


def _groups(instance: Instance, step: int, seat: int, reached: Array) -> list[tuple[int | None, NDArray[np.int64]]]:
    """The states that a request may be in, by the drafter's row; None where it does not decode."""
    if seat >= len(instance.decoders):
        return [(None, np.zeros(1, dtype=np.int64))]
    states = np.flatnonzero(reached)
    if not instance.present[step][seat]:
        return [(None, states)]
    anchors = instance.decoders[seat].anchors[states]
    return [(None if a < 0 else int(a), states[anchors == a]) for a in np.unique(anchors)]


def _block(
    instance: Instance,
    asked: Asked,
    history: History,
    step: int,
    mass: Array,
    states: tuple[NDArray[np.int64], NDArray[np.int64]],
    anchors: tuple[int | None, int | None],
) -> Block:
    live = [seat for seat in (0, 1) if anchors[seat] is not None]
    rows = [[b""] if a is None else list(instance.decoders[seat].kinds[a]) for seat, a in enumerate(anchors)]
    seen: list[Seen] = []
    said: list[tuple[int, ...]] = []
    lens = np.zeros((2, len(rows[0]) * len(rows[1])), dtype=np.int64)
    if live:
        ids = tuple(instance.ids[seat] for seat in live)
        for n, shown in enumerate(itertools.product(*rows)):
            seen.append(Seen(ids, tuple(shown[seat] for seat in live), instance.prompts[step]))
            answer = asked.lens(history, seen[n])
            said.append(tuple(answer.tolist()))
            lens[live, n] = answer
    kinds = np.divmod(np.arange(lens.shape[1]), len(rows[1]))
    return Block(history, mass, states, (0 in live, 1 in live), kinds, (lens[0], lens[1]), seen, said)


def outcomes(instance: Instance, block: Block, seat: int) -> Array:
    """Chances [i, n, states] of where a seat's request stands after the step, for each state before and each view."""
    states = block.states[seat]
    if not block.live[seat]:
        total = instance.decoders[seat].first[-1] if seat < len(instance.decoders) else 1
        stays = np.eye(total)[states][:, None]
        return np.repeat(stays, len(block.kinds[seat]), axis=1)
    decoder = instance.decoders[seat]
    out = np.zeros((len(states), len(block.kinds[seat]), decoder.first[-1]))
    for i, state in enumerate(states.tolist()):
        out[i][:, decoder.below(state)] = decoder.verified(state)[block.kinds[seat], block.lens[seat]]
    return out


def joined(mass: Array, one: Array, other: Array) -> Array:
    """``mass`` [i, j] moved on by both seats' outcomes, [i, n, S] and [j, n, T], summed over views: [S, T]."""
    moved = (mass @ other.reshape(len(other), -1)).reshape(len(one), one.shape[1], -1)
    return np.asarray(one.reshape(-1, one.shape[2]).T @ moved.reshape(-1, other.shape[2]))


def after(instance: Instance, asked: Asked, mass: Mass, step: int) -> Mass:
    """The mass after ``step``, by what the scheduler may remember then."""
    keeps = (asked.remembers or asked.looks_back) and step + 1 < instance.steps
    out: Mass = {}
    for block in blocks(instance, asked, mass, step):
        one, other = (outcomes(instance, block, seat) for seat in (0, 1))
        if not keeps:
            _add(out, (), joined(block.mass, one, other))
        elif not any(block.live):
            _add(out, block.history, joined(block.mass, one, other))
        else:
            for n, (seen, said) in enumerate(zip(block.seen, block.said, strict=True)):
                parts = one[:, n : n + 1], other[:, n : n + 1]
                for emitted, part1, part2 in _by_emitted(instance, asked, block, parts):
                    moved = joined(block.mass, part1, part2)
                    if moved.any():
                        _add(out, (*block.history, Past(seen, said, emitted)), moved)
    return out


def _add(mass: Mass, history: History, moved: Array) -> None:
    mass[history] = mass[history] + moved if history in mass else moved


def _by_emitted(
    instance: Instance, asked: Asked, block: Block, parts: tuple[Array, Array]
) -> Iterator[tuple[tuple[int, ...] | None, Array, Array]]:
    """Outcomes taken apart by how many tokens each request put out, where the scheduler can see that."""
    if not asked.looks_back:
        yield None, *parts
        return
    split: list[list[tuple[tuple[int, ...], Array]]] = []
    for seat, part in enumerate(parts):
        if not block.live[seat]:
            split.append([((), part)])
            continue
        lengths = instance.decoders[seat].lengths
        more = lengths[None, :] - lengths[block.states[seat]][:, None]
        found = ((n, part * (more == n)[:, None]) for n in range(1, asked.gamma + 2))
        split.append([((n,), some) for n, some in found if some.any()])
    for n1, part1 in split[0]:
        for n2, part2 in split[1]:
            yield n1 + n2, part1, part2


def finished(decoders: Sequence[Decoder], mass: Array) -> Array:
    """The joint law of the first N tokens, [V^N] or [V^N, V^N], if the target goes on alone from ``mass``."""
    law = decoders[0].finished(mass)
    return law[:, 0] if len(decoders) == 1 else decoders[1].finished(law.T).T


def target_law(instance: Instance) -> Array:
    """What the target puts out without speculation: the joint law of the first N tokens, a dimension a request."""
    return finished(instance.decoders, start(instance)[()])


def output_law(instance: Instance, asked: Asked) -> Array:
    """What comes out under the scheduler: the joint law of the first N tokens, a dimension a request."""
    mass = told_apart(instance, asked)[-1]
    return finished(instance.decoders, np.add.reduce(list(mass.values())))


def told_apart(instance: Instance, asked: Asked) -> list[Mass]:
    """The mass before each step and after the last, by history."""
    while True:
        asked.enter(instance)
        masses = [start(instance)]
        try:
            for step in range(instance.steps):
                masses.append(after(instance, asked, masses[-1], step))
        except _LooksBack:
            asked.looks_back = True  # and once more, with histories told apart by what it reads
        else:
            return masses


def distance(one: Array, other: Array) -> float:
    """Total variation between two laws."""
    return float(np.abs(one - other).sum() / 2)


def distance_of(instance: Instance, asked: Asked) -> float:
    """Total variation between what comes out and the target's law."""
    return distance(output_law(instance, asked), target_law(instance))
