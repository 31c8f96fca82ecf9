"""One request to an OpenAI-compatible server: streamed, timed chunk by chunk, and whatever went wrong by its kind.

Times are seconds of the event loop's clock, which is monotonic: setting the wall clock moves none of them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import httpx

from specsim.types import SpecsimError

KEY_VARIABLE = "SPECSIM_API_KEY"
"""The environment variable that may hold the server's API key; it is sent, never printed or written."""
CUT_OFF = "cut off"
"""What became of a request that was still running when its load was over: no fault of anybody."""
SHORT = "fewer tokens than asked"
LONGEST_DETAIL = 160


@dataclass(frozen=True)
class Target:
    """Where requests go and what they all say.

    ``timeout``: seconds without a byte after which a request is given up. ``stream``: tokens come as they are made,
    or the answer whole at its end.
    """

    url: str
    model: str
    timeout: float = 60.0
    temperature: float = 0.0
    ignore_eos: bool = True
    stream: bool = True
    key: str | None = field(default=None, repr=False)

    @property
    def headers(self) -> dict[str, str]:
        """What is sent along; the key alone."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}


@dataclass(frozen=True)
class Order:
    """What to ask for: a prompt (token ids or a text) of so many tokens (None: not known), and an answer of so many."""

    prompt: Sequence[int] | str
    output_tokens: int
    prompt_tokens: int | None = None


@dataclass
class Answer:
    """What became of request ``index``; it is filled in as the answer streams, so a request cut off keeps its part.

    ``arrival``: when it was due, ``sent``: when it was sent, ``chunks``: when each chunk of tokens came, ``finish``:
    when the last one did (None: it never ended). ``counted``: the server told no usage, so tokens are chunks.
    ``fault``: what went wrong in a few words that repeat (None: nothing), ``detail``: the rest.
    """

    index: int
    order: Order
    arrival: float
    sent: float
    chunks: list[float] = field(default_factory=list)
    finish: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    counted: bool = False
    timings: Mapping[str, Any] | None = None
    fault: str | None = None
    detail: str = ""

    @property
    def done(self) -> bool:
        """Whether the whole answer came."""
        return self.fault is None and self.finish is not None

    @property
    def ttft(self) -> float:
        """Seconds from the moment it was due to its first chunk."""
        return self.chunks[0] - self.arrival

    @property
    def tpot(self) -> float | None:
        """Seconds an output token after the first; None for an answer of one."""
        tokens = self.output_tokens or 0
        return None if tokens < 2 or self.finish is None else (self.finish - self.chunks[0]) / (tokens - 1)


def open_client(target: Target, transport: httpx.AsyncBaseTransport | None = None) -> httpx.AsyncClient:
    """A client for ``target``. The environment's proxies and .netrc are left out: they change what is measured."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(
        base_url=target.url,
        headers=target.headers,
        timeout=None,
        limits=limits,
        trust_env=False,
        transport=transport,
    )


def check_url(url: str, allow_remote: bool, option: str = "--url") -> str:
    """``url`` without a path's end; SpecsimError where it is none, holds a password, or leads off this machine."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise SpecsimError(f"{option}: expected http://HOST:PORT, got {url!r}: {error}") from error
    if parts.scheme not in ("http", "https") or not host or port == 0:
        raise SpecsimError(f"{option}: expected http://HOST:PORT, got {url!r}")
    if parts.username is not None or parts.password is not None:
        raise SpecsimError(f"{option}: expected no user or password in it, set {KEY_VARIABLE} for a key")
    if parts.query or parts.fragment:
        raise SpecsimError(f"{option}: expected http://HOST:PORT without ? and #, got {url!r}")
    if not allow_remote and not _is_loopback(host):
        raise SpecsimError(f"{option}: {host} is not this machine: load goes to another host only with --allow-remote")
    return url.rstrip("/").removesuffix("/v1")


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def ask(client: httpx.AsyncClient, target: Target, answer: Answer) -> None:
    """Send ``answer``'s order and fill ``answer`` in.

    Nothing is raised for what the server does: it becomes the answer's fault. A cancelled request is marked as cut
    off, and the cancellation goes on.
    """
    order = answer.order
    body: dict[str, Any] = {
        "model": target.model,
        "prompt": order.prompt if isinstance(order.prompt, str) else list(order.prompt),
        "max_tokens": order.output_tokens,
        "temperature": target.temperature,
        "ignore_eos": target.ignore_eos,
        "stream": target.stream,
    }
    if target.stream:
        body["stream_options"] = {"include_usage": True}
    clock = asyncio.get_running_loop().time
    try:
        async with asyncio.timeout(target.timeout) as limit:
            async with client.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode("utf-8", "replace")
                    _fail(answer, f"HTTP {response.status_code}", _without(target.key, text))
                    return
                reader = _Reader(answer, target.key)
                if not target.stream:
                    # The whole answer is one event of a stream.
                    text = (await response.aread()).decode("utf-8", "replace")
                    reader.take(f"data: {text}", clock())
                    reader.end()
                    return
                async for line in _lines(response):
                    now = clock()
                    limit.reschedule(now + target.timeout)
                    if not reader.take(line, now):
                        break
                reader.end()
    except TimeoutError:
        tokens = len(answer.chunks)
        kind = "stalled stream" if tokens else "no answer in time"
        _fail(answer, kind, f"nothing for {target.timeout:g} s after {tokens} chunks")
    except httpx.ConnectError as error:
        _fail(answer, "no connection", str(error))
    except (httpx.HTTPError, httpx.StreamError) as error:
        _fail(answer, "connection lost", f"{type(error).__name__}: {error}")
    except asyncio.CancelledError:
        if answer.finish is None:
            _fail(answer, CUT_OFF, "")
        raise


async def _lines(response: httpx.Response) -> AsyncIterator[str]:
    """The lines of a stream of events. Texts may hold what Python takes for a line's end: httpx would cut there."""
    rest = b""
    async for piece in response.aiter_bytes():
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line.rstrip(b"\r").decode("utf-8", "replace")
    if rest:
        yield rest.decode("utf-8", "replace")


def _without(key: str | None, text: str) -> str:
    """``text`` without the key, which a server may repeat in its complaint about it."""
    return text.replace(key, "(key)") if key else text


def _fail(answer: Answer, fault: str, detail: str) -> None:
    answer.fault, answer.detail = fault, " ".join(detail.split())[:LONGEST_DETAIL]
    answer.finish = None


class _Reader:
    """Server-sent events, line by line, into an Answer."""

    def __init__(self, answer: Answer, key: str | None) -> None:
        self.answer, self.key = answer, key
        self.finished = self.closed = False
        self.usage: Mapping[str, Any] = {}

    def take(self, line: str, now: float) -> bool:
        """Read a line that came ``now``; False where the stream is over, well or not."""
        answer = self.answer
        if not line.startswith("data:"):
            if line and not line.startswith((":", "event:", "id:", "retry:")):
                _fail(answer, "malformed stream", f"expected a line of data, got {line!r}")
                return False
            return True
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            self.closed = True
            return False
        try:
            event = json.loads(data)
            if not isinstance(event, dict):
                raise ValueError("expected an object")
        except (ValueError, RecursionError) as error:
            _fail(answer, "malformed stream", f"{error}: {data[:60]!r}")
            return False
        if event.get("error"):
            _fail(answer, "error in the stream", _without(self.key, json.dumps(event["error"])))
            return False
        choices = event.get("choices")
        if isinstance(choices, list) and choices and isinstance(choices[0], dict):
            self._tokens(choices[0], now)
        if isinstance(event.get("usage"), dict):
            self.usage = event["usage"]
        if isinstance(event.get("timings"), dict):
            answer.timings = event["timings"]
        return True

    def _tokens(self, choice: Mapping[str, Any], now: float) -> None:
        answer, ended = self.answer, bool(choice.get("finish_reason"))
        if ended and not choice.get("text") and answer.chunks:
            # llama.cpp ends with a chunk that holds no token, on the heels of the last one; elsewhere an empty text is
            # a token too, one without a letter of its own, and comes a step later.
            usual = (answer.chunks[-1] - answer.chunks[0]) / max(1, len(answer.chunks) - 1)
            if now - answer.chunks[-1] > usual / 2:
                answer.chunks.append(now)
        else:
            answer.chunks.append(now)
        self.finished |= ended

    def end(self) -> None:
        """The stream is over: see that it was whole, and count its tokens."""
        answer = self.answer
        if answer.fault is not None:
            return
        if not self.finished and not (self.closed and answer.chunks):
            _fail(answer, "connection lost", f"the stream ended after {len(answer.chunks)} chunks")
            return
        told = self.usage.get("completion_tokens")
        answer.counted = not _is_count(told)
        answer.output_tokens = len(answer.chunks) if answer.counted else told
        prompt = self.usage.get("prompt_tokens")
        answer.prompt_tokens = prompt if _is_count(prompt) else answer.order.prompt_tokens
        if not answer.chunks or not answer.output_tokens:
            _fail(answer, "empty answer", "not one token came")
            return
        answer.finish = answer.chunks[-1]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31
