"""A drawn counterexample made simpler: fewer requests and steps, and rounder numbers, wherever the law stays bent."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from specsim.audit.law import Asked, distance_of
from specsim.audit.models import TABLES, TARGETS, Decoder, Instance, Prompts, Tables, from_drafter


def simplified(instance: Instance, asked: Asked, tolerance: float) -> Instance:
    """``instance`` without requests and steps that play no part, and then with plainer numbers, if the law stays bent.

    What is left should still be plain to see: the least total variation is a twentieth of that at first.
    """
    smallest = max(tolerance, distance_of(instance, asked) / 20)
    for fewer in (_one_request, _everyone, _first_steps):
        instance = next((i for i in fewer(instance) if distance_of(i, asked) > smallest), instance)
    for change in _changes():
        simpler = change(instance)
        if distance_of(simpler, asked) > smallest:
            instance = simpler
    return instance


def _one_request(instance: Instance) -> Iterator[Instance]:
    """Each of two requests alone, drafts at the price that its steps had alone, or beside the other; prompts stay."""
    seats = enumerate(instance.decoders if len(instance.decoders) > 1 else ())
    for (seat, decoder), least in itertools.product(seats, (0, 1)):
        yield replace(
            instance,
            decoders=(decoder,),
            seconds=instance.seconds[least : least + decoder.gamma + 1],
            present=tuple((row[seat],) for row in instance.present),
            ids=(instance.ids[seat], instance.ids[1 - seat]),
        )


def _everyone(instance: Instance) -> Iterator[Instance]:
    """All requests in all steps."""
    yield replace(instance, present=((True,) * len(instance.decoders),) * instance.steps)


def _first_steps(instance: Instance) -> Iterator[Instance]:
    """The first steps alone, few before many; the target goes on from there."""
    for n in range(1, instance.steps):
        yield replace(instance, present=instance.present[:n], prompts=instance.prompts[:n])


def _changes() -> Iterator[Any]:
    yield lambda i: replace(i, prompts=(Prompts(),) * i.steps)
    yield lambda i: replace(i, ids=(0, 1))
    yield lambda i: _each(i, target=_plain_target, drafter=_even)
    yield lambda i: _each(i, target=_plain_target)
    yield lambda i: _each(i, drafter=_even)
    for digits in (1, 2):
        for name in TABLES:
            rounded = _rounded_laws(digits) if name != "confidence" else _rounded(digits)
            yield lambda i, name=name, rounded=rounded: _each(i, **{name: rounded})
        yield lambda i, digits=digits: replace(i, seconds=np.maximum(i.seconds.round(digits), 10.0**-digits))


def _each(instance: Instance, **changes: Any) -> Instance:
    decoders = []
    for decoder in instance.decoders:
        new: Decoder = replace(decoder, **{name: change(getattr(decoder, name)) for name, change in changes.items()})
        decoders.append(from_drafter(new, instance.confidence))
    return replace(instance, decoders=tuple(decoders))


def _plain_target(tables: Tables) -> Tables:
    return tuple(np.tile(TARGETS[table.shape[-1]], (len(table), 1)) for table in tables)


def _even(tables: Tables) -> Tables:
    return tuple(np.full(table.shape, 1 / table.shape[-1]) for table in tables)


def _rounded(digits: int) -> Any:
    return lambda tables: tuple(table.round(digits) for table in tables)


def _rounded_laws(digits: int) -> Any:
    """All but the likeliest token rounded; it takes what is left."""

    def change(tables: Tables) -> Tables:
        out = []
        for table in tables:
            new = table.round(digits)
            top = table.argmax(axis=-1)[..., None]
            np.put_along_axis(new, top, 0.0, axis=-1)
            np.put_along_axis(new, top, 1 - new.sum(axis=-1, keepdims=True), axis=-1)
            out.append(new.clip(0.0, 1.0).round(digits))
        return tuple(out)

    return change
