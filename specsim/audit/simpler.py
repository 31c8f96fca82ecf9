"""A drawn counterexample made simpler: rounder numbers wherever the law stays bent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from specsim.audit.law import Asked, distance_of
from specsim.audit.models import TABLES, TARGETS, Decoder, Instance, Prompts, Tables, from_drafter


def simplified(instance: Instance, asked: Asked, tolerance: float) -> Instance:
    """``instance`` with rounder numbers, and the plain target and drafter, wherever the law stays bent."""
    smallest = max(tolerance, distance_of(instance, asked) / 20)  # what is left should still be plain to see
    for change in _changes():
        simpler = change(instance)
        if distance_of(simpler, asked) > smallest:
            instance = simpler
    return instance


def _changes() -> Iterator[Any]:
    yield lambda i: replace(i, prompts=(Prompts(),) * i.steps)
    yield lambda i: replace(i, ids=(0, 1))
    yield lambda i: replace(i, present=((True,) * len(i.decoders),) * i.steps)
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
