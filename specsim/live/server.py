"""The reference engine behind OpenAI's HTTP interface: completions, chat completions, models, health and metrics.

The engine steps in a thread of its own; requests come and go between its steps. A request's ``seed`` is not looked at:
the engine has one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import torch

from specsim.asking import scheduler_name
from specsim.drafters.target import Target
from specsim.live.asked import Asked, read_asked
from specsim.live.reference import Counts, Engine, Request
from specsim.live.wire import HEAD_BYTES, Call, Events, HttpError, read_call, write_answer
from specsim.types import SpecsimError

LOOK_SECONDS = 0.1
"""How often a waiting request looks whether its client is still there."""


@dataclass
class News:
    """What a request has got that its connection has not taken yet: its tokens of a step, and whether it ended.

    None: the engine failed. ``told`` counts the tokens.
    """

    queue: asyncio.Queue[tuple[list[int], str | None] | None] = field(default_factory=asyncio.Queue)
    told: int = 0


class Server:
    """Serves ``engine`` as the model ``name``; :meth:`run` until told to stop."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine, self.name, self.target = engine, name, engine.target
        self.began = int(time.time())
        self.news: dict[Request, News] = {}
        self.open: set[asyncio.Task[None]] = set()
        self.failure: Exception | None = None
        self.counts = engine.counts.copy()  # after a step: in the midst of one they need not add up

    async def run(self, host: str, port: int, stop: asyncio.Event, ready: Callable[[int], None]) -> None:
        """Listen until ``stop`` is set; ``ready`` is told the port (a free one for 0).

        Raises SpecsimError where the address cannot be had, and what the engine failed with: then every request that
        was under way is told, and the server ends.
        """
        self.work = asyncio.Event()
        try:
            server = await asyncio.start_server(self._connected, host, port, limit=HEAD_BYTES)
        except OSError as error:
            raise SpecsimError(f"{host}:{port}: cannot listen: {error.strerror or error}") from error
        ready(server.sockets[0].getsockname()[1])
        stepping = asyncio.create_task(self._step())
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait((stepping, stopping), return_when=asyncio.FIRST_COMPLETED)
            if self.failure is not None and self.open:
                await asyncio.wait(self.open, timeout=1)  # they are told
        finally:
            server.close()
            self.work.set()
            for task in (*self.open, stopping):
                task.cancel()
            stepping.cancel()
            await asyncio.gather(stepping, stopping, *self.open, return_exceptions=True)
        if self.failure is not None:
            raise self.failure

    async def _step(self) -> None:
        """Step while there is work; wake those whose requests got on."""
        loop = asyncio.get_running_loop()
        # One thread: each that enters torch has worker threads of its own.
        with ThreadPoolExecutor(1, "steps") as thread:
            while True:
                if not self.engine.busy:
                    self.work.clear()
                    await self.work.wait()
                try:
                    touched = await loop.run_in_executor(thread, self.engine.step)
                except Exception as error:
                    self.failure = error
                    if isinstance(error, torch.OutOfMemoryError):
                        self.failure = SpecsimError("out of memory: expected less of max_num_seqs or max_model_len")
                    for everyone in self.news.values():
                        everyone.queue.put_nowait(None)
                    return
                self.counts = self.engine.counts.copy()
                for request in touched:
                    if (news := self.news.get(request)) is not None:
                        news.queue.put_nowait((request.output[news.told :], request.finish))
                        news.told = len(request.output)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        task = asyncio.current_task()
        assert task is not None
        self.open.add(task)
        try:
            while await self._serve(reader, writer):
                pass
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self.open.discard(task)
            writer.close()
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await writer.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; whether another may follow."""
        keep = False
        try:
            call = await read_call(reader, writer)
            if call is None:
                return False
            keep = call.keep
            if call.path in ("/v1/completions", "/v1/chat/completions"):
                _method(call, "POST")
                asked = read_asked(call.body, self.target, self.name, "chat" in call.path)
                return await self._complete(asked, call, reader, writer)
            answer = self._facts(call)
            await write_answer(writer, 200, answer, keep)
        except HttpError as error:
            keep = keep and not error.last
            await write_answer(writer, error.status, error.body, keep)
        return keep

    def _facts(self, call: Call) -> Any:
        """What GET gives."""
        if call.path == "/v1/models":
            model = {"id": self.name, "object": "model", "created": self.began, "owned_by": "specsim",
                     "max_model_len": self.engine.max_model_len}  # fmt: skip
            answer: Any = {"object": "list", "data": [model]}
        elif call.path == "/health":
            self._check_alive()
            answer = {}
        elif call.path == "/version":
            engine = self.engine
            answer = {
                "version": version("specsim"),
                "scheduler": scheduler_name(engine.scheduler),
                "max_num_seqs": engine.max_num_seqs,
                "max_num_batched_tokens": engine.max_num_batched_tokens,
            }
        elif call.path == "/metrics":
            answer = metrics(self.engine, self.counts, self.name)
        else:
            raise HttpError(404, f"{call.path}: expected /v1/completions, /v1/chat/completions, /v1/models or /metrics")
        _method(call, "GET")
        return answer

    def _check_alive(self) -> None:
        if self.failure is not None:
            raise HttpError(500, f"the engine failed: {self.failure}")

    async def _complete(
        self, asked: Asked, call: Call, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Let the engine answer, and send what it says at once or as it comes."""
        self._check_alive()
        try:
            request = self.engine.submit(asked.prompt, asked.max_tokens, asked.temperature, asked.ignore_eos)
        except SpecsimError as error:
            raise HttpError(400, str(error)) from error
        self.news[request] = News()
        self.work.set()
        form, text = Form(asked, request, self.name), Text(self.target)
        try:
            if asked.stream:
                return await self._stream(form, text, call, reader, writer)
            async for _ in self._progress(request, reader, writer):
                pass
            whole = text.new(request.output, True)
            await write_answer(writer, 200, form.whole(whole), call.keep)
            return call.keep
        finally:
            del self.news[request]
            if request.finish is None:
                self.engine.cancel(request)
                self.work.set()

    async def _stream(
        self, form: Form, text: Text, call: Call, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Send an event for every step that the request got tokens in."""
        events, request = Events(writer, call), form.request
        try:
            async for tokens, finish in self._progress(request, reader, writer):
                await events.send(form.event(text.new(tokens, finish is not None), tokens, finish))
        except HttpError as error:
            if not events.begun:
                raise
            await events.send(error.body)
            return False
        if form.asked.usage:
            await events.send(form.usage_event())
        await events.send("[DONE]")
        await events.close()
        return call.keep

    async def _progress(
        self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> AsyncIterator[tuple[list[int], str | None]]:
        """The request's new tokens and its end, step by step, while its client is there."""
        queue, finish = self.news[request].queue, None
        while finish is None:
            news: tuple[list[int], str | None] | None = ([], None)
            with contextlib.suppress(TimeoutError):
                news = await asyncio.wait_for(queue.get(), LOOK_SECONDS)
            if reader.at_eof() or writer.is_closing():
                raise ConnectionResetError("the client is gone")
            if news is None:
                raise HttpError(500, f"the engine failed: {self.failure}")
            tokens, finish = news
            if tokens or finish:
                yield tokens, finish


class Form:
    """The objects that an answer to ``asked`` is made of."""

    def __init__(self, asked: Asked, request: Request, name: str) -> None:
        self.asked, self.request, self.first = asked, request, True
        kind = "chat.completion" if asked.chat else "text_completion"
        prefix = "chatcmpl" if asked.chat else "cmpl"
        self.head = {"id": f"{prefix}-{request.number}", "object": kind, "created": int(time.time()), "model": name}

    def whole(self, text: str) -> dict[str, Any]:
        """The answer at once."""
        choice = self._choice(
            {"message": {"role": "assistant", "content": text}} if self.asked.chat else {"text": text}
        )
        choice["finish_reason"] = self.request.finish
        if self.asked.ids:
            choice["token_ids"] = self.request.output
        return {**self.head, "choices": [choice], "usage": self._usage()}

    def event(self, text: str, tokens: list[int], finish: str | None) -> dict[str, Any]:
        """Some of the answer as it comes."""
        delta = {"role": "assistant", "content": text} if self.first else {"content": text}
        self.first = False
        choice = self._choice({"delta": delta} if self.asked.chat else {"text": text})
        choice["finish_reason"] = finish
        if self.asked.ids:
            choice["token_ids"] = tokens
        return {**self._event_head(), "choices": [choice]}

    def usage_event(self) -> dict[str, Any]:
        """The token counts."""
        return {**self._event_head(), "choices": [], "usage": self._usage()}

    def _event_head(self) -> dict[str, Any]:
        return {**self.head, "object": "chat.completion.chunk"} if self.asked.chat else self.head

    def _choice(self, content: dict[str, Any]) -> dict[str, Any]:
        return {"index": 0, **content, "logprobs": None}

    def _usage(self) -> dict[str, int]:
        prompt, output = len(self.request.prompt), len(self.request.output)
        return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


class Text:
    """Text of tokens as they come: what may still change, half a character, waits for the next ones."""

    def __init__(self, target: Target) -> None:
        self.tokenizer = target.tokenizer
        self.tokens: list[int] = []
        self.context = self.done = 0  # tokens whose text is known; from ``context`` on they are read anew with the next

    def new(self, tokens: list[int], last: bool) -> str:
        """What ``tokens`` add; token ids with blanks between them where there is no tokenizer."""
        if self.tokenizer is None:
            return "".join(f"{token} " for token in tokens)
        self.tokens += tokens
        before = self._decode(self.tokens[self.context : self.done])
        after = self._decode(self.tokens[self.context :])
        if len(after) <= len(before) or (after.endswith("\N{REPLACEMENT CHARACTER}") and not last):
            return ""
        self.context, self.done = self.done, len(self.tokens)
        return after[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


def metrics(engine: Engine, counts: Counts, name: str) -> str:
    """The engine's counters and gauges in Prometheus' text format, named as vLLM names its own."""
    lines: list[str] = []
    label = 'model_name="' + name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'

    def add(metric: str, kind: str, help: str, *values: tuple[str, float]) -> None:
        family = f"specsim:{metric}"
        lines.extend((f"# HELP {family} {help}", f"# TYPE {family} {kind}"))
        suffix = "_total" if kind == "counter" else ""
        lines.extend(f"{family}{suffix}{{{label}{more}}} {value}" for more, value in values)

    add("num_requests_running", "gauge", "Requests that have a row.", ("", len(engine.running)))
    add("num_requests_waiting", "gauge", "Requests that wait for one.", ("", len(engine.waiting)))
    add("prompt_tokens", "counter", "Prompt tokens computed.", ("", counts.prompt_tokens))
    add("generation_tokens", "counter", "Tokens generated.", ("", counts.generated))
    add("num_steps", "counter", "Steps of the engine.", ("", counts.steps))
    add("num_decodes", "counter", "Cycles of decoding requests, with drafts or without.", ("", counts.cycles))
    if engine.gamma:
        add("spec_decode_num_drafts", "counter", "Cycles with verified drafts.", ("", counts.drafts))
        add("spec_decode_num_draft_tokens", "counter", "Draft tokens verified.", ("", counts.draft_tokens))
        add("spec_decode_num_accepted_tokens", "counter", "Draft tokens accepted.", ("", counts.accepted))
        places = [(f',position="{k}"', int(count)) for k, count in enumerate(counts.accepted_at)]
        add("spec_decode_num_accepted_tokens_per_pos", "counter", "Draft tokens accepted by position.", *places)
    return "\n".join((*lines, ""))


def _method(call: Call, method: str) -> None:
    if call.method != method:
        raise HttpError(405, f"{call.path}: expected {method}, got {call.method}")
