"""The load client against a server whose steps are known: what it measures, counts and refuses to lose."""

from __future__ import annotations

import asyncio
import signal
import threading
from typing import Any

import numpy as np
import pytest

pytest.importorskip("httpx", reason="the extra live is not installed")

from fake_engine import FakeEngine, FakeTransport, serve, virtual

from specsim.live.client import Target, check_url, open_client
from specsim.live.load import Drive, Driver, Prompts, latencies, read_prompts
from specsim.types import SpecsimError
from specsim.workload import ClosedLoop, Poisson

STEP = 1 / 64


def steps(decodes: int, prompt: int) -> float:
    """A step of one 64th of a second, and a 1024th for each token of a prompt."""
    return STEP + prompt / 1024


def drive(engine: FakeEngine, work: Any, seconds: float = 1e5, **options: Any) -> Drive:
    """Run ``work(driver)`` on a clock that never sleeps."""

    async def main() -> Drive:
        wall = options.pop("wall", None) or asyncio.get_running_loop().time
        target = Target("http://127.0.0.1:1", "tiny", **options)
        async with open_client(target, FakeTransport(engine)) as client:
            deadline = asyncio.get_running_loop().time() + seconds
            return await work(Driver(client, target, Prompts(), deadline, wall=wall))

    return virtual(main())


def closed(users: int, measured: int, prompt: int = 64, output: int = 9) -> Any:
    return lambda driver: driver.closed(ClosedLoop(users, prompt, output, measured=measured))


def test_a_closed_loop_measures_what_the_engine_did():
    found = drive(FakeEngine(steps), closed(2, 8))
    ttft, tpot = latencies(found)
    # Both users march in step: two prompts at once, then eight steps alone.
    assert ttft == pytest.approx(STEP + 128 / 1024)
    assert tpot == pytest.approx(STEP)
    assert found.tokens() / (found.end - found.start) == pytest.approx(2 * 9 / (9 * STEP + 128 / 1024))
    assert found.counts()["answered"] >= 10
    assert not found.faults()


def test_what_is_asked():
    engine = FakeEngine(steps)
    drive(engine, closed(1, 2), temperature=0.5, key="secret")
    body = engine.bodies[0]
    assert len(body["prompt"]) == 64
    assert body | {"prompt": None} == {
        "model": "tiny", "prompt": None, "max_tokens": 9, "temperature": 0.5, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    assert engine.headers[0]["authorization"] == "Bearer secret"
    assert engine.bodies[0]["prompt"] != engine.bodies[1]["prompt"]  # nothing for a cache of prefixes
    assert "secret" not in repr(Target("http://x", "tiny", key="secret"))


def test_poisson_arrivals_come_when_they_are_due():
    requests = Poisson(5, 20, 64, 9).requests(3)
    found = drive(FakeEngine(steps), lambda driver: driver.open("poisson", requests))
    due = np.array([a.arrival for a in found.answers])
    np.testing.assert_allclose(np.diff(due), np.diff(requests.arrival_s), atol=1e-9)
    assert [a.sent for a in found.answers] == pytest.approx(due)
    assert found.first == np.searchsorted(requests.arrival_s, 0.1 * requests.arrival_s[-1])
    assert found.counts() == {"sent": 20, "answered": 20}


def test_a_drain_steps_with_every_number_of_requests():
    found = drive(FakeEngine(steps), lambda driver: driver.drain(4, 64, 40))
    assert [a.output_tokens for a in found.answers] == [10, 20, 30, 40]


def test_tokens_are_the_usage_not_the_chunks():
    found = drive(FakeEngine(steps, per_chunk=4), closed(1, 2))
    answer = found.measured[0]
    assert len(answer.chunks) == 3  # the first alone, then four and four
    assert answer.output_tokens == 9
    assert answer.tpot == pytest.approx(STEP)
    assert not answer.counted


def test_chunks_are_counted_where_no_usage_is_told():
    found = drive(FakeEngine(steps, usage=False), closed(1, 2))
    assert all(a.counted and a.output_tokens == 9 and a.prompt_tokens == 64 for a in found.measured)


def test_a_last_token_without_text_took_its_step_too():
    found = drive(FakeEngine(steps, mute_end=True), closed(1, 2))
    assert [len(a.chunks) for a in found.measured] == [9, 9]
    assert latencies(found)[1] == pytest.approx(STEP)


def test_llamacpp_ends_with_a_chunk_that_holds_no_token():
    found = drive(FakeEngine(steps, "llamacpp", usage=False), closed(1, 2))
    assert [a.output_tokens for a in found.measured] == [9, 9]


@pytest.mark.parametrize(
    ("faults", "kind"),
    [
        ({"refuse": lambda i: 429 if i == 5 else None}, "HTTP 429"),
        ({"refuse": lambda i: 500 if i == 5 else None}, "HTTP 500"),
        ({"refuse": lambda i: -1 if i == 5 else None}, "no connection"),
        ({"break_at": lambda i, token: "stall" if (i, token) == (5, 4) else None}, "stalled stream"),
        ({"break_at": lambda i, token: "cut" if (i, token) == (5, 4) else None}, "connection lost"),
        ({"break_at": lambda i, token: "end" if (i, token) == (5, 4) else None}, "connection lost"),
        ({"break_at": lambda i, token: "garbage" if (i, token) == (5, 4) else None}, "malformed stream"),
        ({"break_at": lambda i, token: "error" if (i, token) == (5, 4) else None}, "error in the stream"),
    ],
)
def test_each_fault_is_counted_by_its_kind(faults: dict[str, Any], kind: str):
    found = drive(FakeEngine(steps, **faults), closed(2, 10), timeout=5.0)
    counts = found.counts()
    assert counts[kind] == 1
    assert found.faults()[kind][0] == 1
    assert counts["sent"] == sum(count for name, count in counts.items() if name != "sent") == len(found.answers)
    assert len(found.measured) == 9  # the failed one is one of the ten that were bounded
    assert found.stopped is None


def test_a_server_that_repeats_the_key_does_not_get_it_printed():
    found = drive(FakeEngine(steps, refuse=lambda i: 401, says="unknown key sk-1234"), closed(1, 2), key="sk-1234")
    assert found.faults()["HTTP 401"][1] == "unknown key (key)"


def test_an_answer_that_never_begins_is_given_up():
    engine = FakeEngine(lambda decodes, prompt: 100.0)
    found = drive(engine, closed(1, 1), timeout=5.0)
    assert found.faults()["no answer in time"] == (2, "nothing for 5 s after 0 chunks")


def test_short_answers_are_told_of_and_kept():
    found = drive(FakeEngine(steps, short_by=3), closed(1, 4))
    assert len(found.measured) == 4
    assert found.faults()["fewer tokens than asked"] == (len([a for a in found.answers if a.done]), "6 of 9")
    assert "fewer tokens than asked" not in found.counts()  # they were answered: nothing is counted twice


def test_a_text_may_hold_what_python_takes_for_the_end_of_a_line():
    found = drive(FakeEngine(steps, word="\u2028\x85\u2029"), closed(1, 2))
    assert found.faults() == {}
    assert [a.output_tokens for a in found.measured] == [9, 9]


def test_answers_of_a_burst_come_whole():
    engine = FakeEngine(steps)
    found = drive(engine, lambda driver: driver.burst(3, 64, 9))
    assert [body["stream"] for body in engine.bodies] == [False] * 3
    assert "stream_options" not in engine.bodies[0]
    assert [(a.done, a.output_tokens, len(a.chunks)) for a in found.answers] == [(True, 9, 1)] * 3
    assert max(a.finish for a in found.answers) - found.answers[0].sent == pytest.approx(9 * STEP + 3 * 64 / 1024)
    wrong = drive(FakeEngine(steps, break_at=lambda i, token: "garbage"), lambda driver: driver.burst(1, 64, 9))
    assert list(wrong.faults()) == ["malformed stream"]


def test_an_answer_that_may_end_by_itself_is_no_fault():
    engine = FakeEngine(steps, short_by=3)
    found = drive(engine, closed(1, 4), ignore_eos=False)
    assert found.faults() == {}
    assert {a.output_tokens for a in found.measured} == {6}
    assert {body["ignore_eos"] for body in engine.bodies} == {False}


def test_a_server_that_is_gone_ends_the_load():
    found = drive(FakeEngine(steps, refuse=lambda i: -1 if i >= 6 else None), closed(2, 1000))
    assert found.stopped == "7 requests failed one after the other"
    counts = found.counts()
    assert counts["no connection"] in (7, 8)  # one more may be on its way
    assert counts["sent"] == sum(count for name, count in counts.items() if name != "sent")
    assert found.measured  # what was measured before it went is kept


def test_time_is_bounded():
    found = drive(FakeEngine(steps), closed(2, 10_000), seconds=3.0)
    assert found.stopped == "out of time"
    assert 0 < len(found.measured) < 100
    assert found.counts()["cut off"] == 2


def test_a_step_of_the_wall_clock_moves_nothing_and_is_told():
    calls = iter([1e9, 1e9 + 3600])
    found = drive(FakeEngine(steps), closed(1, 2), wall=lambda: next(calls))
    assert found.clock_step == pytest.approx(3600, abs=5)
    assert latencies(found)[1] == pytest.approx(STEP)
    assert drive(FakeEngine(steps), closed(1, 2)).clock_step == 0


def test_ctrl_c_leaves_what_was_measured():
    async def main(url: str) -> Drive:
        target = Target(url, "tiny")
        async with open_client(target) as client:
            loop = asyncio.get_running_loop()
            threading.Timer(0.4, lambda: signal.raise_signal(signal.SIGINT)).start()
            driver = Driver(client, target, Prompts(), loop.time() + 30)
            return await driver.closed(ClosedLoop(2, 4, 4, measured=100_000))

    with serve(FakeEngine(lambda decodes, prompt: 0.002)) as server:
        found = asyncio.run(main(server.url))
    assert found.stopped == "interrupted"
    assert found.measured
    counts = found.counts()
    assert counts["sent"] == sum(count for name, count in counts.items() if name != "sent")


def test_a_killed_server_over_a_real_socket():
    async def main(server: Any) -> Drive:
        target = Target(server.url, "tiny")
        async with open_client(target) as client:
            loop = asyncio.get_running_loop()
            loop.call_later(0.3, server.kill)
            driver = Driver(client, target, Prompts(), loop.time() + 30)
            return await driver.closed(ClosedLoop(2, 4, 8, measured=100_000))

    with serve(FakeEngine(lambda decodes, prompt: 0.002)) as server:
        found = asyncio.run(main(server))
    assert found.stopped is not None
    assert "failed one after the other" in found.stopped
    assert found.measured
    counts = found.counts()
    assert counts["no connection"] + counts.get("connection lost", 0) >= 5
    assert counts["sent"] == sum(count for name, count in counts.items() if name != "sent")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("127.0.0.1:8000", "expected http://HOST:PORT"),
        ("ftp://127.0.0.1", "expected http://HOST:PORT"),
        ("http://127.0.0.1:x", "expected http://HOST:PORT"),
        ("http://user:pw@127.0.0.1:8000", "no user or password"),
        ("http://10.0.0.7:8000", "only with --allow-remote"),
        ("http://localhost.example.com", "only with --allow-remote"),
    ],
)
def test_targets_that_are_refused(url: str, expected: str):
    with pytest.raises(SpecsimError, match=expected) as error:
        check_url(url, allow_remote=False)
    assert "pw" not in str(error.value)


def test_targets_that_are_taken():
    assert check_url("http://127.0.0.1:8000/v1/", False) == "http://127.0.0.1:8000"
    assert check_url("http://localhost:8000", False) == "http://localhost:8000"
    assert check_url("http://[::1]:8000", False) == "http://[::1]:8000"
    assert check_url("https://10.0.0.7", True) == "https://10.0.0.7"


def test_prompts_from_a_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a b c"}\n\n{"prompt": [1, 2]}\n')
    prompts = Prompts(given=read_prompts(path))
    assert [prompts.order(64, 9).prompt for _ in range(3)] == ["a b c", [1, 2], "a b c"]
    path.write_text('{"prompt": ""}\n')
    with pytest.raises(SpecsimError, match=r"line 1: prompt: expected"):
        read_prompts(path)
