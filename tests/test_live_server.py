"""The reference engine behind HTTP: answers, events, errors, clients that go, metrics, and the verb."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
from test_live_reference import plain
from tiny_models import LETTERS, any_drafter, plain_model, tiny_target, torch

from specsim.importers.counters import read_metrics
from specsim.importers.evidence import Ask
from specsim.live.reference import Engine
from specsim.live.server import Server, Text
from specsim.schedulers import StaticGamma
from specsim.types import SpecsimError

VOCAB = 12
PROMPT = [0, 1, 2, 0, 1]


@pytest.fixture(scope="module")
def target():
    return tiny_target(vocab=VOCAB, ends=4)


@contextmanager
def served(target, scheduler=None, *, failure=None, **fields):
    """A server on a free port, in a thread: (port, engine); ``failure``: what it must end with."""
    settings = {"max_num_seqs": 4, "max_model_len": 60, "temperature": 0.0} | fields
    engine = Engine(target, any_drafter("dspark", VOCAB), scheduler or StaticGamma(2), **settings)
    ports, told = [], {}
    up = threading.Event()

    async def main():
        told["stop"], told["loop"] = asyncio.Event(), asyncio.get_running_loop()
        await Server(engine, 'tiny "one"').run(
            "127.0.0.1", 0, told["stop"], lambda port: (ports.append(port), up.set())
        )

    def work():
        try:
            asyncio.run(main())
        except SpecsimError as error:
            told["error"] = str(error)
        finally:
            up.set()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert up.wait(20)
        yield ports[0], engine
    finally:
        if thread.is_alive():
            told["loop"].call_soon_threadsafe(told["stop"].set)
        thread.join(20)
        assert not thread.is_alive()
    assert failure in told["error"] if failure else "error" not in told


@pytest.fixture(scope="module")
def port(target):
    with served(target) as (port, _):
        yield port


def call(port, path, body=None, method=None):
    """Status and JSON (or text) of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(method or ("GET" if body is None else "POST"), path, data)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, json.loads(text) if answer.getheader("Content-Type") == "application/json" else text


def events(text):
    """The data of server-sent events, which must end as OpenAI's do."""
    lines = text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def test_answers_at_once_and_as_they_come(port, target):
    want = plain(plain_model(target), PROMPT, 20)
    assert len(want) > 3
    words = "".join(LETTERS[t] for t in want)
    usage = {"prompt_tokens": 5, "completion_tokens": len(want), "total_tokens": 5 + len(want)}
    reason = "stop" if want[-1] == 4 else "length"
    for prompt in (PROMPT, "abcab", ["abcab"], [PROMPT]):
        status, answer = call(port, "/v1/completions", {"prompt": prompt, "max_tokens": 20, "return_token_ids": True})
        assert status == 200
        assert answer["object"] == "text_completion"
        assert answer["model"] == 'tiny "one"'
        assert answer["usage"] == usage
        [choice] = answer["choices"]
        assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == (words, want, reason)
    asked = {"prompt": PROMPT, "max_tokens": 20, "return_token_ids": True, "stream": True, "model": 'tiny "one"'}
    _, text = call(port, "/v1/completions", asked | {"stream_options": {"include_usage": True}})
    *chunks, last = events(text)
    assert last["choices"] == []
    assert last["usage"] == usage
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == words
    assert [token for choice in choices for token in choice["token_ids"]] == want
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + [reason]
    assert len(choices[0]["token_ids"]) == 1
    assert all(1 <= len(choice["token_ids"]) <= 3 for choice in choices)
    # Without the option no event tells the usage, and none the token ids.
    _, text = call(port, "/v1/completions", {"prompt": PROMPT, "max_tokens": 20, "stream": True})
    assert not any("usage" in chunk or "token_ids" in chunk["choices"][0] for chunk in events(text))


def test_chat(port, target):
    messages = [{"role": "system", "content": [{"type": "text", "text": "abc"}]}]  # no template: the text itself
    want = "".join(LETTERS[t] for t in plain(plain_model(target), [0, 1, 2], 9))
    for limit in ("max_tokens", "max_completion_tokens"):
        status, answer = call(port, "/v1/chat/completions", {"messages": messages, limit: 9})
        assert status == 200
        assert answer["object"] == "chat.completion"
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": want}
    _, text = call(port, "/v1/chat/completions", {"messages": messages, "max_tokens": 9, "stream": True})
    chunks = events(text)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [delta.get("role") for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert "".join(delta["content"] for delta in deltas) == want
    _, whole = call(port, "/v1/chat/completions", {"messages": messages, "ignore_eos": True})
    assert whole["usage"]["completion_tokens"] == 57  # all that there is room for
    _, short = call(port, "/v1/completions", {"prompt": "a", "ignore_eos": True})
    assert short["usage"]["completion_tokens"] == 16


def test_bad_requests_are_told_in_one_line(port):
    good = {"prompt": [1, 2], "max_tokens": 3}
    wrong = [
        (b"{", "expected a JSON object"), ([1], "expected a JSON object, got list"),
        ({"max_tokens": 3}, "prompt: expected one text or one list of token ids, got null"),
        (good | {"prompt": ["a", "b"]}, "prompt: expected one text"),
        (good | {"prompt": [True]}, "prompt: expected one text"),
        (good | {"prompt": []}, "prompt: expected at least one"),
        (good | {"prompt": "A"}, "prompt: the target's tokenizer refuses it"),
        (good | {"prompt": [12]}, "prompt: expected token ids within 0..11, got 12"),
        (good | {"prompt": [0] * 60}, "prompt: expected fewer than 60 tokens"),
        (good | {"max_tokens": 59}, "max_tokens: expected 1..58 after a prompt of 2 tokens"),
        (good | {"max_tokens": 0}, "max_tokens: expected a whole number of 1 or more, got 0"),
        (good | {"max_tokens": "3"}, "max_tokens: expected a whole number"),
        (good | {"temperature": -1}, "temperature: expected a number within 0..100, got -1"),
        (good | {"temperature": float("nan")}, "temperature: expected a number"),
        (good | {"temperature": 10**400}, "temperature: expected a number"),
        (good | {"n": 2}, "n: expected 1 or nothing, got 2"), (good | {"top_p": 0.5}, "top_p: expected 1"),
        (good | {"stop": ["x"]}, "stop: expected [] or nothing"),
        (good | {"stream": 1}, "stream: expected true or false"),
        (good | {"stream_options": []}, "stream_options: expected an object"),
    ]  # fmt: skip
    for body, words in wrong:
        status, answer = call(port, "/v1/completions", body)
        assert status == 400, body
        message = answer["error"]["message"]
        assert words in message
        assert "\n" not in message
    for messages in (None, [], "a", [{"role": "user"}], [{"role": "user", "content": [{"text": 1}]}], [3]):
        status, answer = call(port, "/v1/chat/completions", {"messages": messages})
        assert status == 400
        assert answer["error"]["message"].startswith("messages")
    neutral = {"n": 1, "top_p": 1.0, "stop": None, "logprobs": False, "presence_penalty": 0, "seed": 3}
    assert call(port, "/v1/completions", good | neutral)[0] == 200
    assert call(port, "/v1/completions", good | {"model": "other"})[0] == 404
    assert call(port, "/v2")[0] == 404
    assert call(port, "/v1/models", good)[0] == call(port, "/v1/completions")[0] == 405


def test_what_else_it_tells(port):
    assert call(port, "/health") == (200, {})
    told = call(port, "/version")[1]
    assert told.pop("version")
    assert told == {"scheduler": "StaticGamma(2)", "max_num_seqs": 4, "max_num_batched_tokens": 8192}
    [model] = call(port, "/v1/models")[1]["data"]
    assert (model["id"], model["max_model_len"]) == ('tiny "one"', 60)


def exchange(port, data):
    """All that comes back for these bytes until the server closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(data)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def test_connections(port):
    body = json.dumps({"prompt": [1, 2], "max_tokens": 3, "stream": True, "ignore_eos": True}).encode()
    head = b"POST /v1/completions HTTP/1.%d\r\nContent-Length: %d\r\n%b\r\n"
    whole = exchange(port, head % (1, len(body), b"") + body + head % (1, len(body), b"Connection: close\r\n") + body)
    assert whole.count(b"HTTP/1.1 200 OK") == whole.count(b"[DONE]") == 2  # one after the other on one connection
    assert whole.endswith(b"0\r\n\r\n")
    old = exchange(port, head % (0, len(body), b"") + body)
    assert b"chunked" not in old
    assert old.endswith(b"data: [DONE]\n\n")
    waits = exchange(port, head % (1, len(body), b"Expect: 100-continue\r\nConnection: close\r\n") + body)
    assert waits.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK")
    for data, status in (
        (b"nonsense\r\n\r\n", 400), (b"GET / HTTP/2\r\n\r\n", 400), (head % (1, -1, b"") + body, 400),
        (head % (1, 1 << 30, b""), 413), (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 411),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * (1 << 17), 431),
    ):  # fmt: skip
        assert exchange(port, data).startswith(b"HTTP/1.1 %d " % status), data[:50]


def slowly(view):
    time.sleep(0.01)
    return np.full(view.num_seqs, 2)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_frees_its_row(target, stream):
    with served(target, slowly, max_num_seqs=1, max_model_len=400) as (port, engine):
        asked = {"prompt": [1], "max_tokens": 390, "ignore_eos": True, "stream": stream}
        gone = [http.client.HTTPConnection("127.0.0.1", port, timeout=20) for _ in range(2)]
        for connection in gone:
            connection.request("POST", "/v1/completions", json.dumps(asked))
        deadline = time.monotonic() + 20
        while not (len(engine.running) == len(engine.waiting) == 1 and engine.counts.steps > 2):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        gone[1].close()
        while engine.waiting:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        gone[0].close()
        status, answer = call(port, "/v1/completions", {"prompt": [1], "max_tokens": 4, "ignore_eos": True})
        assert status == 200
        assert answer["usage"]["completion_tokens"] == 4
        assert engine.counts.generated < 200
        assert engine.counts.prompt_tokens == 2  # who waited was never served
        assert not engine.busy


def test_metrics_are_what_the_importer_reads(target, tmp_path):
    with served(target, StaticGamma(3), temperature=1.0) as (port, engine):
        assert call(port, "/metrics")[0] == 200
        threads = [
            threading.Thread(
                target=call, args=(port, "/v1/completions", {"prompt": [k], "max_tokens": 30, "ignore_eos": True})
            )
            for k in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        _, text = call(port, "/metrics")
        counts = engine.counts
    assert counts.accepted > 0
    evidence = read_metrics(tmp_path / "metrics.txt", text, Ask(fixed_length=True))
    assert evidence.target == 'tiny "one"'
    np.testing.assert_allclose(evidence.survival["*"], counts.accepted_at / counts.drafts)
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    label = '{model_name="tiny \\"one\\""}'
    for name, value in (
        ("num_requests_running", 0), ("num_requests_waiting", 0), ("prompt_tokens_total", 8),
        ("generation_tokens_total", 240), ("num_decodes_total", counts.cycles), ("num_steps_total", counts.steps),
        ("spec_decode_num_draft_tokens_total", counts.draft_tokens),
    ):  # fmt: skip
        assert float(lines[f"specsim:{name}{label}"]) == value


@pytest.mark.parametrize("stream", [True, False])
def test_a_scheduler_that_fails_is_told_to_everybody(target, stream):
    def fails(view):
        if view.previous:
            raise KeyError("mine")
        return np.zeros(view.num_seqs, dtype=int)

    words = "scheduler fails: KeyError: 'mine'"
    with served(target, fails, failure=words) as (port, _):
        asked = {"prompt": [1], "max_tokens": 30, "ignore_eos": True, "stream": stream}
        status, answer = call(port, "/v1/completions", asked) if not stream else (500, broken_stream(port, asked))
        assert status == 500
        assert words in answer["error"]["message"]


def test_too_little_memory_is_one_line(target, monkeypatch):
    def short(self):
        raise torch.OutOfMemoryError("lines\nof advice")

    monkeypatch.setattr(Engine, "step", short)
    with served(target, failure="out of memory: expected less of max_num_seqs") as (port, _):
        assert call(port, "/v1/completions", {"prompt": [1]})[0] == 500


def broken_stream(port, asked):
    body = json.dumps(asked).encode()
    data = exchange(port, b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    assert b"[DONE]" not in data
    return json.loads(data.decode().split("data: ")[-1])


def test_half_a_character_waits_for_the_rest():
    class Bytes:
        def decode(self, tokens, skip_special_tokens):
            assert skip_special_tokens
            return bytes(tokens).decode(errors="replace")

    class Mute:
        tokenizer = Bytes()

    data = list("aé€b".encode())
    text = Text(Mute())
    parts = [text.new([token], i == len(data) - 1) for i, token in enumerate(data)]
    assert parts == ["a", "", "é", "", "", "€", "b"]
    text = Text(Mute())
    assert [text.new(data[:2], False), text.new([], True)] == ["", "a\N{REPLACEMENT CHARACTER}"]


# The verb


@pytest.fixture(scope="module")
def model(tmp_path_factory, target):
    folder = tmp_path_factory.mktemp("served") / "target"
    target.model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("scheduler", "flags", "label"),
    [("mine.py:two", ("--gamma", 2), "two with NGRAM, γ = 2"), ("MTP1", (), "MTP1() with NGRAM, γ = 1"),
     ("NoSpec", (), "NoSpec()")],
    ids=["mine", "MTP1", "NoSpec"],
)  # fmt: skip
def test_the_verb_serves_until_interrupted(model, run, tmp_path, monkeypatch, scheduler, flags, label):
    monkeypatch.chdir(tmp_path)
    log = tmp_path / "steps.jsonl"
    (tmp_path / "mine.py").write_text("def two(view):\n    return view.request_ids * 0 + 2\n")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    answers = []

    def client():
        for _ in range(200):
            try:
                answers.append(call(port, "/v1/completions", {"prompt": [0, 1, 0, 1], "max_tokens": 9}))
                break
            except ConnectionRefusedError:
                time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=client)
    thread.start()
    code, text, err = run(
        "serve-reference", "--target", model, "--drafter", "ngram(longest=2, shortest=1)", "-s", scheduler, *flags,
        "--port", port, "--dtype", "float32", "--temperature", 0, "--log", log, "--max-model-len", 50,
    )  # fmt: skip
    thread.join()
    assert code == 0, err
    [(status, answer)] = answers
    assert status == 200
    label = label.replace("NGRAM", "ngram(longest=2, shortest=1)")
    assert f"target on cpu, {label}: http://127.0.0.1:{port}/v1" in text
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert sum(row["emitted"] for row in rows) == answer["usage"]["completion_tokens"]
    assert f"{answer['usage']['completion_tokens']} tokens in {len(rows)} steps" in text


def test_mistakes_of_the_verb_are_one_line(model, run, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for flags, words in (
            (("--host", "0.0.0.0"), "--host: 0.0.0.0: expected 127.0.0.1, or --allow-remote"),
            (("-s", "Nothing"), "scheduler 'Nothing': not known"),
            (("-s", "StaticGamma(2)"), "StaticGamma(2): expected a drafter: only NoSpec"),
            (("-s", "StaticGamma(3)", "--drafter", "ngram", "--gamma", 2), "expected at most 2, the block length"),
            (("-s", "DSparkGreedy", "--drafter", "ngram"), "needs confidences"),
            (("--temperature", "inf"), "--temperature: expected a number of 0 or more"),
            (("--dtype", "int8"), "--dtype: expected auto, float32 or bfloat16"),
            (("--drafter", tmp_path / "none"), "expected a drafter's folder"),
            (("--profile", tmp_path / "none"), "cannot read"),
            (("--log", tmp_path), "--log"),
            (("--port", taken.getsockname()[1], "--log", tmp_path / "steps.jsonl"), "cannot listen: "),
        ):
            code, text, err = run("serve-reference", "--target", model, "--max-model-len", 40, *flags)
            assert code == 2, flags
            assert words in err
            assert err.count("\n") == 1
            assert not text
            assert not list(tmp_path.iterdir())
