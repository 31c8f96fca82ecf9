"""A server whose step time and batching are known: on a clock that is pushed forward, or on a real socket.

``FakeEngine`` steps as the simulator's replica does; ``virtual`` runs a coroutine on an event loop that never sleeps,
so that what takes minutes is exact and over at once; ``serve`` puts the engine behind a real loopback port.
"""

from __future__ import annotations

import asyncio
import json
import selectors
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import httpx


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that moves its clock forward instead of sleeping."""

    def __init__(self) -> None:
        super().__init__(selectors.SelectSelector())
        self.now = 1000.0
        select = self._selector.select  # type: ignore[attr-defined]

        def skip(timeout: float | None = None) -> Any:
            ready = select(0)
            if not ready and timeout:
                self.now += timeout
            return ready

        self._selector.select = skip  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now


def virtual(main: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


class FakeEngine:
    """Continuous batching: a step of decodes and all prompts that wait lasts ``step(decoded tokens, prompt tokens)``.

    ``accept(cycle)`` (draft tokens accepted in a cycle) makes it speculate with blocks of ``gamma``. Faults: see the
    attributes; ``requests`` counts what was asked so far.
    """

    def __init__(self, step: Callable[[int, int], float], kind: str = "vllm", **faults: Any) -> None:
        self.step, self.kind = step, kind
        self.model, self.gamma, self.accept = "tiny", 0, None
        self.refuse: Callable[[int], int | None] = lambda i: None  # an HTTP status for request i
        self.break_at: Callable[[int, int], str | None] = lambda i, token: None  # stall, cut, garbage, error
        self.short_by = 0
        self.positions = 0  # that it has counters for, where those are more than it verifies
        self.mute_end = False  # the last token is no text
        self.says = "busy"  # when it refuses
        self.metrics = True
        self.longest = 4096
        self.usage = True
        self.per_chunk = 1
        self.sending = 0.0  # seconds that a token streamed takes from the next step
        self.word = " a"
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        for name, value in faults.items():
            assert hasattr(self, name), name
            setattr(self, name, value)
        self.drafts, self.drafted, self.cycles, self.sent = 0, 0, 0, 0
        self.accepted = [0] * 8
        self.waiting: list[Any] = []
        self.running: list[Any] = []
        self.task: asyncio.Task[None] | None = None

    # The engine.

    async def _run(self) -> None:
        await asyncio.sleep(0)  # whoever asks at the moment it wakes is in
        while self.waiting or self.running:
            # The next step begins at once: who asks on the answer of the last one has to wait for this one.
            new, self.waiting = self.waiting, []
            prompts = sum(len(r["prompt"]) for r in new)
            decodes = len(self.running) * (1 + self.gamma)
            await asyncio.sleep(self.step(decodes, prompts) + self.sending * self.sent)
            self.sent = 0
            for r in self.running:
                kept = 0
                if self.accept is not None:
                    kept = self.accept(self.cycles)
                    self.cycles += 1
                    self.drafts += 1
                    self.drafted += self.gamma
                    for k in range(kept):
                        self.accepted[k] += 1
                    r["drafted"] += self.gamma
                    r["kept"] += kept
                self.sent += r["stream"] * (1 + kept)
                r["queue"].put_nowait(min(1 + kept, r["left"]))
                r["left"] -= min(1 + kept, r["left"])
            for r in new:
                r["queue"].put_nowait(1)
                r["left"] -= 1
            self.running = [r for r in self.running + new if r["left"] > 0]

    async def events(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        """What the server answers to a request: lines of server-sent events, or all of them in one object."""
        if body["stream"]:
            async for event in self._stream(body):
                yield event
            return
        texts = [event.removeprefix(b"data:").strip() async for event in self._stream(body)]
        if broken := next((text for text in texts if text.startswith(b"{not")), None):
            yield broken
            return
        data = [json.loads(text) for text in texts if text != b"[DONE]"]
        words = "".join(choice["text"] for event in data for choice in event["choices"])
        yield json.dumps({**data[-1], "choices": [{"index": 0, "text": words, "finish_reason": "length"}]}).encode()

    async def _stream(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        number = len(self.bodies) - 1
        total = max(1, body["max_tokens"] - self.short_by)
        queue: asyncio.Queue[int] = asyncio.Queue()
        prompt = body["prompt"] if isinstance(body["prompt"], list) else body["prompt"].split()
        r = {"prompt": prompt, "left": total, "queue": queue, "drafted": 0, "kept": 0, "stream": body["stream"]}
        self.waiting.append(r)
        if self.task is None or self.task.done():
            self.task = asyncio.create_task(self._run())
        try:
            sent = held = 0
            while sent + held < total:
                held += await queue.get()
                if held < self.per_chunk and sent + held < total and sent:
                    continue
                sent, held = sent + held, 0
                fault = self.break_at(number, sent)
                if fault == "stall":
                    await asyncio.sleep(1e6)
                elif fault == "cut":
                    raise ConnectionError("gone")
                elif fault == "end":
                    return
                elif fault == "garbage":
                    yield b"data: {not json\n\n"
                elif fault == "error":
                    yield b'data: {"error": {"message": "out of memory"}}\n\n'
                reason = "length" if sent == total else None
                text = "" if reason and self.mute_end else self.word
                choice = {"index": 0, "text": text, "finish_reason": reason if self.kind != "llamacpp" else None}
                yield _event({"choices": [choice]})
            last: dict[str, Any] = {"choices": []}
            if self.kind == "llamacpp":
                last["choices"] = [{"index": 0, "text": "", "finish_reason": "length"}]
                last["timings"] = {"predicted_n": total}
                if self.gamma:
                    last["timings"] |= {"draft_n": r["drafted"], "draft_n_accepted": r["kept"]}
            if self.usage:
                last["usage"] = {"prompt_tokens": len(prompt), "completion_tokens": total}
            yield _event(last)
            yield b"data: [DONE]\n\n"
        finally:  # also where the client left
            r["left"] = 0
            self.running = [x for x in self.running if x is not r]
            self.waiting = [x for x in self.waiting if x is not r]

    # What it says of itself.

    def page(self, path: str) -> tuple[int, str]:
        """Status and text of a GET."""
        owners = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llamacpp", "specsim": "specsim"}
        pages: dict[str, Any] = {
            "/v1/models": {
                "data": [{"id": self.model, "owned_by": owners.get(self.kind, ""), "max_model_len": self.longest}]
            },
            "/health": {},
        }
        if self.kind in ("vllm", "specsim", "mute"):
            pages["/version"] = {"version": "0.99", "max_num_seqs": 64}
        if self.kind == "llamacpp":
            pages["/props"] = {
                "total_slots": 8, "build_info": "b1", "default_generation_settings": {"n_ctx": 2048},
            }  # fmt: skip
        if self.kind == "sglang":
            pages["/server_info"] = {"version": "0.5", "max_running_requests": 32, "chunked_prefill_size": 4096}
            if self.gamma:
                pages["/server_info"] |= {
                    "speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": self.gamma + 1,
                }  # fmt: skip
        if path == "/metrics" and self.metrics:
            return 200, self._metrics()
        return (200, json.dumps(pages[path])) if path in pages else (404, "no such page")

    def _metrics(self) -> str:
        lines = ['vllm:cache_config_info{block_size="16",num_gpu_blocks="1001"} 1.0'] * (self.kind == "vllm")
        if self.gamma and self.kind == "sglang":
            lines.append(
                f'sglang:spec_accept_length{{model_name="tiny"}} {1 + sum(self.accepted) / max(1, self.drafts)}'
            )
        elif self.gamma:
            name = f"{self.kind}:spec_decode_num_"
            lines += [
                f"{name}drafts_total {self.drafts}", f"{name}draft_tokens_total {self.drafted}",
                f"{name}accepted_tokens_total {sum(self.accepted)}",
            ]  # fmt: skip
            for k in range(max(self.gamma, self.positions)):
                lines.append(f'{name}accepted_tokens_per_pos_total{{position="{k}"}} {self.accepted[k]}')
        return "\n".join(lines) + "\n"

    def take(self, body: dict[str, Any], headers: dict[str, str]) -> int:
        """Note a request; the status that it gets."""
        self.bodies.append(body)
        self.headers.append(headers)
        return self.refuse(len(self.bodies) - 1) or 200


def _event(data: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


class FakeTransport(httpx.AsyncBaseTransport):
    """The engine without a socket, for a virtual loop."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            status, text = self.engine.page(request.url.path)
            return httpx.Response(status, text=text)
        body = json.loads(await request.aread())
        status = self.engine.take(body, dict(request.headers))
        if status == -1:
            raise httpx.ConnectError("refused")
        if status != 200:
            return httpx.Response(status, text=self.engine.says)
        return httpx.Response(200, stream=_Stream(self.engine.events(body)))


class _Stream(httpx.AsyncByteStream):
    def __init__(self, events: AsyncIterator[bytes]) -> None:
        self.events = events

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for event in self.events:
                yield event
        except ConnectionError as error:
            raise httpx.ReadError(str(error)) from error

    async def aclose(self) -> None:
        await self.events.aclose()  # type: ignore[attr-defined]


class Server:
    """An engine behind a loopback port, on a thread of its own; ``kill`` drops every connection at once."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.loop = asyncio.new_event_loop()
        self.writers: set[asyncio.StreamWriter] = set()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.ready = threading.Event()
        self.thread.start()
        assert self.ready.wait(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.server = self.loop.run_until_complete(asyncio.start_server(self._talk, "127.0.0.1", 0))
        self.port = self.server.sockets[0].getsockname()[1]
        self.ready.set()
        self.loop.run_forever()
        self.loop.run_until_complete(asyncio.sleep(0.01))  # what was accepted begins to talk, so that it can be ended
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.run_until_complete(asyncio.sleep(0.01))  # transports close a turn later
        self.loop.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.add(writer)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            method, path, _ = head[0].split()
            headers = {k.lower(): v for k, v in (h.split(": ", 1) for h in head[1:] if h)}
            raw = await reader.readexactly(int(headers.get("content-length", 0)))
            if method == "GET":
                status, text = self.engine.page(path)
                await self._say(writer, status, text)
                return
            body = json.loads(raw)
            status = self.engine.take(body, headers)
            if status != 200:
                await self._say(writer, status, self.engine.says)
                return
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
            events = self.engine.events(body)
            try:
                async for event in events:
                    writer.write(event)
                    await writer.drain()
            finally:
                await events.aclose()  # type: ignore[attr-defined]
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.writers.discard(writer)
            writer.close()

    async def _say(self, writer: asyncio.StreamWriter, status: int, text: str) -> None:
        data = text.encode()
        writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(data)}\r\nconnection: close\r\n\r\n".encode() + data)
        await writer.drain()

    def kill(self) -> None:
        """Close the port and abort all connections."""

        def drop() -> None:
            self.server.close()
            for writer in list(self.writers):
                writer.transport.abort()

        self.loop.call_soon_threadsafe(drop)

    def stop(self) -> None:
        self.kill()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)


@contextmanager
def serve(engine: FakeEngine) -> Iterator[Server]:
    server = Server(engine)
    try:
        yield server
    finally:
        server.stop()
