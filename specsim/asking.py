"""Asking a scheduler that may be a user's: its label, what to call, and its mistakes in one line."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import numpy as np

from specsim.types import SpecsimError
from specsim.views import Lens, StepView

Scheduler = Callable[[StepView], Any]


class TooLong(SpecsimError):
    """An answer of whole draft lengths of which one is more than γ."""


def scheduler_name(scheduler: Any) -> str:
    """The label of a scheduler: its repr, or the plain name of a function or of a class without one.

    It is one line, without addresses, which are others in every run. Raises SpecsimError for a repr that fails.
    """
    if hasattr(scheduler, "__name__"):
        return str(scheduler.__name__)
    kind = type(scheduler).__name__
    try:
        label = repr(scheduler)
    except SpecsimError:
        raise
    except (Exception, SystemExit) as error:
        told = f"{type(error).__name__}: {error}{_where(error)}"
        raise SpecsimError(f"scheduler {kind}: its __repr__, which makes its label, fails: {told}") from error
    if f" at {hex(id(scheduler))}" in label:  # object's own repr
        return kind
    return " ".join(re.sub(r" at 0x[0-9a-f]+\b", "", label).split()) or kind


def told_twice(label: str, schedulers: Iterable[Any]) -> str:
    """What to say where all of ``schedulers`` have this label, and what helps where it tells no settings."""
    text = f"policy {label} is given twice: labels tell results apart"
    kinds: list[Any] = [type(s) for s in schedulers]
    if label == "<lambda>":
        text += "; define them as functions of two names"
    elif any(kind.__repr__ is object.__repr__ for kind in kinds):
        text += "; two settings of a class cannot be told apart: give it a __repr__, a dataclass has one"
    return text


def several(name: str, given: Any) -> list[Any]:
    """``given`` as a list; SpecsimError, in the argument's ``name``, for one thing where several are expected."""
    try:
        if not isinstance(given, str | bytes):
            return list(given)
    except TypeError:  # nothing to iterate over
        pass
    raise SpecsimError(f"{name}: expected several, in a list, got {type(given).__name__} {given!r:.60}")


def check_callable(scheduler: Any) -> None:
    """SpecsimError unless ``scheduler`` can be called with a view, or has a start() that returns what can."""
    name = scheduler_name(scheduler)
    if isinstance(scheduler, type):
        raise SpecsimError(f"scheduler {name}: expected an instance, such as {name}(), got the class")
    if not callable(scheduler) and not hasattr(scheduler, "start"):
        raise SpecsimError(f"scheduler {name}: expected something that can be called with a StepView")


def fresh(scheduler: Any) -> Any:
    """What to call: what start() returns, or the scheduler itself, which all replicas and runs then share."""
    if not hasattr(scheduler, "start"):
        return scheduler
    try:
        schedule = scheduler.start()
    except (Exception, SystemExit) as error:
        told = f"{type(error).__name__}: {error}{_where(error)}"
        raise SpecsimError(f"scheduler {scheduler_name(scheduler)}: start: {told}") from error
    if not callable(schedule):
        raise SpecsimError(
            f"scheduler {scheduler_name(scheduler)}: start: expected it to return something that can be called with a "
            f"StepView, got {type(schedule).__name__}"
        )
    return schedule


def ask(scheduler: Any, schedule: Any, view: StepView) -> Lens:
    """What ``schedule``, made from ``scheduler``, returns for ``view``, checked; its own errors told in one line."""
    try:
        answer = schedule(view)
    except SpecsimError as error:
        raise SpecsimError(f"scheduler {scheduler_name(scheduler)}: {error}") from error
    except (Exception, SystemExit) as error:  # one that ends the program would end it as if all were well
        where = _where(error)
        misfit = isinstance(error, TypeError) and not where  # raised by the call itself
        how = "expected something that can be called with a StepView alone: " if misfit else ""
        told = f"{type(error).__name__}: {error}{where}"
        raise SpecsimError(f"scheduler {scheduler_name(scheduler)}: {how}{told}") from error
    n, gamma = view.num_seqs, view.gamma
    try:
        lens = np.asarray(answer)
    except (ValueError, TypeError):  # rows of several lengths
        lens = np.empty(0)
    whole = lens.dtype.kind in "iu" and lens.shape == (n,)
    if not whole or lens.min() < 0 or lens.max() > gamma:
        got = f"{lens.dtype} {lens.shape}: {lens.ravel()[:8]}" if lens.size and lens.dtype != object else None
        raise (TooLong if whole and lens.max() > gamma else SpecsimError)(
            f"scheduler {scheduler_name(scheduler)}: expected {n} whole draft lengths within 0..{gamma}, "
            f"got {got or type(answer).__name__}"
        )
    return lens.astype(np.int64)  # a copy: history keeps it, and a scheduler may fill its array again


def _where(error: BaseException) -> str:
    """Where ``error`` arose, `` (in FILE, line N, FUNCTION)``: the last place in a scheduler's own code.

    Nothing where no code but specsim's was reached; of libraries alone, their last place.
    """
    ours, python = (os.path.dirname(file) + os.sep for file in (__file__, os.__file__))
    frames = [(_file(frame), line, frame.f_code.co_name) for frame, line in traceback.walk_tb(error.__traceback__)]
    frames = [f for f in frames if not f[0].startswith(ours)]
    own = [f for f in frames if not f[0].startswith(python) and "site-packages" not in f[0]]
    last = (own or frames)[-1:]
    return "".join(f" (in {os.path.basename(file)}, line {line}, {name})" for file, line, name in last)


def _file(frame: FrameType) -> str:
    """Where the code of ``frame`` is from; what a worker process was sent knows that by its module alone."""
    file = frame.f_code.co_filename
    return str(frame.f_globals.get("__file__", file)) if file.startswith("<") else file
