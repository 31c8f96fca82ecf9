"""Runs side by side."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from specsim.parallel import side_by_side
from specsim.types import SpecsimError


def deaf(case: int) -> tuple[int, bool]:
    return case, signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_workers_never_see_ctrl_c_and_this_process_does():
    """A terminal sends Ctrl-C to all of them: a worker that still loads would print a traceback of its own."""
    before = signal.getsignal(signal.SIGINT)
    # Three: no other test asks for as many, so that these processes are started here.
    assert list(side_by_side(deaf, [(i,) for i in range(4)], 3)) == [(i, True) for i in range(4)]
    assert signal.getsignal(signal.SIGINT) == before


def test_one_worker_is_this_process_and_a_thread_may_ask_too():
    found: list[tuple[int, bool]] = []
    thread = threading.Thread(target=lambda: found.extend(side_by_side(deaf, [(1,), (2,)], 1)))
    thread.start()
    thread.join()
    assert [case for case, _ in found] == [1, 2]


def test_a_worker_that_is_ended_is_told_in_one_line():
    """As where the system runs out of memory: joblib's own words are sixty lines."""
    with pytest.raises(SpecsimError, match=r"^a worker process ended: the system may have run out of memory \(fewer"):
        list(side_by_side(os._exit, [(3,), (3,)], 2))
    assert list(side_by_side(abs, [(-1,), (-2,)], 2)) == [1, 2]
