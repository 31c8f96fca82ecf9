"""As much of HTTP/1.1 as a local server needs, on asyncio's streams: requests in, JSON or events out."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

HEAD_BYTES = 64 << 10
BODY_BYTES = 16 << 20
IDLE_SECONDS = 120.0
REASONS = {
    200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 411: "Length Required",
    413: "Content Too Large", 431: "Request Header Fields Too Large", 500: "Internal Server Error",
    503: "Service Unavailable",
}  # fmt: skip


class HttpError(Exception):
    """An answer that is an error: its status and one line that says why; ``last``: nothing more can be read."""

    def __init__(self, status: int, message: str, last: bool = False) -> None:
        super().__init__(message)
        self.status, self.last = status, last

    @property
    def body(self) -> dict[str, Any]:
        """The error as OpenAI's clients expect it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.status}}


@dataclass(frozen=True)
class Call:
    """A request that was read: ``keep`` the connection for another one; ``chunks``: it knows chunked answers."""

    method: str
    path: str
    body: bytes
    keep: bool
    chunks: bool


async def read_call(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Call | None:
    """The next request of a connection, None where the client is gone or idle; HttpError for what is none."""
    try:
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), IDLE_SECONDS)
        lines = head.decode("latin-1").split("\r\n")
        method, target, version = lines[0].split(" ")
        fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        if not version.startswith("HTTP/1."):
            raise ValueError
        if "transfer-encoding" in fields:
            raise HttpError(411, "expected a Content-Length, got a chunked body", last=True)
        length = fields.get("content-length", "0")
        if not (length.isascii() and length.isdigit()):
            raise ValueError
        if len(length) > 12 or int(length) > BODY_BYTES:
            raise HttpError(413, f"expected a body of at most {BODY_BYTES} bytes, got {length}", last=True)
        if fields.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await asyncio.wait_for(reader.readexactly(int(length)), IDLE_SECONDS)
    except asyncio.LimitOverrunError as error:
        raise HttpError(431, f"expected a head of at most {HEAD_BYTES} bytes", last=True) from error
    except ValueError as error:
        raise HttpError(400, "expected an HTTP/1.1 request", last=True) from error
    except (asyncio.IncompleteReadError, TimeoutError, ConnectionError):
        return None
    modern = version != "HTTP/1.0"
    keep = modern and "close" not in fields.get("connection", "").lower()
    return Call(method, target.partition("?")[0], body, keep, modern)


async def write_answer(writer: asyncio.StreamWriter, status: int, body: Any, keep: bool) -> None:
    """Send ``body``: text as it is, anything else as JSON."""
    kind = "text/plain; version=0.0.4; charset=utf-8" if isinstance(body, str) else "application/json"
    data = (body if isinstance(body, str) else json.dumps(body)).encode()
    writer.write(_head(status, kind, keep, f"Content-Length: {len(data)}") + data)
    await writer.drain()


class Events:
    """An answer of server-sent events; nothing is sent before the first."""

    def __init__(self, writer: asyncio.StreamWriter, call: Call) -> None:
        self.writer, self.call, self.begun = writer, call, False

    async def send(self, data: Any) -> None:
        """One event: text as it is, anything else as JSON."""
        text = data if isinstance(data, str) else json.dumps(data)
        self._write(f"data: {text}\n\n".encode())
        await self.writer.drain()

    async def close(self) -> None:
        """No more events."""
        if self.call.chunks:
            self.writer.write(b"0\r\n\r\n")
        await self.writer.drain()

    def _write(self, data: bytes) -> None:
        if not self.begun:
            how = "Transfer-Encoding: chunked" if self.call.chunks else "Cache-Control: no-store"
            self.writer.write(_head(200, "text/event-stream; charset=utf-8", self.call.keep, how))
            self.begun = True
        self.writer.write(b"%x\r\n%b\r\n" % (len(data), data) if self.call.chunks else data)


def _head(status: int, kind: str, keep: bool, more: str) -> bytes:
    lines = (
        f"HTTP/1.1 {status} {REASONS[status]}",
        f"Content-Type: {kind}",
        f"Connection: {'keep-alive' if keep else 'close'}",
        more,
    )
    return "\r\n".join((*lines, "", "")).encode("latin-1")
