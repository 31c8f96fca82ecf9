"""Runs side by side, each in a process of its own."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, TypeVar

import joblib

from specsim.types import SpecsimError

T = TypeVar("T")


def side_by_side(function: Callable[..., T], cases: Iterable[tuple[Any, ...]], workers: int) -> Iterator[T]:
    """``function(*case)`` of every case, in their order, as they end; ``workers`` processes (1: this one).

    Raises SpecsimError where one of them is ended from outside, as systems do that run out of memory.
    """
    with _deaf_children():
        parallel = joblib.Parallel(n_jobs=workers, return_as="generator")
        return _told(parallel(joblib.delayed(function)(*case) for case in cases))


def _told(results: Iterator[T]) -> Iterator[T]:
    try:
        yield from results
    except BrokenProcessPool as error:  # of which joblib's own is one
        raise SpecsimError(
            "a worker process ended: the system may have run out of memory (fewer --jobs take less), or a scheduler "
            "ended it"
        ) from error


@contextmanager
def _deaf_children() -> Iterator[None]:
    """Processes started inside never see Ctrl-C: this one does afterwards, and ends them.

    A terminal sends it to all of them, and a worker that is still loading would print a traceback. What is ignored
    when a process starts stays so; a mask would not do, for joblib clears it on its way.
    """
    if threading.current_thread() is not threading.main_thread():  # no other may say what signals do
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
