"""Connections with time-outs: each must send its request and read its response in time."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
from functools import partial
from typing import Any, ClassVar, Literal

from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from weft.serve.http.errors import ApiError
from weft.serve.http.options import Options

log = logging.getLogger(__name__)
ACCEPTED_AT_ONCE = 16
"""Maximum connections that asyncio accepts before other code runs."""
SPARE_DESCRIPTORS = 5 * ACCEPTED_AT_ONCE
"""File descriptors kept free: asyncio needs four iterations to close a connection that a new one replaces."""
MAX_HEADERS = 2**16
"""Maximum bytes of a request's headers."""
FULL = ApiError(503, "every connection to this server is in use; try again", headers={"Retry-After": "1"})
NO_HTTP = ApiError(400, "this is not a valid HTTP/1.1 request")
TOO_LONG = ApiError(431, f"the headers of a request are larger than {MAX_HEADERS} bytes, the limit here")


class HeadersTooLong(Exception):
    """Error raised in a parser callback to stop the parser at headers that are too long."""


class CloseDelimited(RequestResponseCycle):
    """Response to HTTP/1.0, which has no chunks: closing the connection ends a response without a length."""

    async def send(self, message: ASGISendEvent) -> None:
        if message["type"] == "http.response.start":
            if all(name.lower() != b"content-length" for name, _ in message.get("headers", ())):
                self.chunked_encoding = False
                self._open_end = True
        elif getattr(self, "_open_end", False) and message["type"] == "http.response.body":
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


def write_now(cycle: RequestResponseCycle, piece: bytes) -> bool:
    """Write a piece of a response in chunks, unless it has not begun, or its client does not read. Returns whether it
    was written."""
    if cycle.disconnected or not cycle.chunked_encoding or cycle.response_complete or cycle.flow.write_paused:
        return False
    if piece:
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
    return True


class Connection(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 connection with time-outs, a limit of the headers, and a maximum number of connections.

    A new connection above it replaces the longest idle one, and is refused with 503 if every connection has a request.
    """

    options: ClassVar[Options]
    limit: ClassVar[int]

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._awaited: Literal["headers", "body"] | None = None
        self._headers = self._unfinished = 0
        self._timer: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._since = self.loop.time()

    @property
    def has_request(self) -> bool:
        """True from the complete headers of a request to the end of its response."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_request()
        if len(self.connections) > self.limit:
            others = [c for c in self.connections if isinstance(c, Connection) and c is not self and not c.has_request]
            if not others:
                self._refuse(FULL)
            leaver = min(others, key=lambda c: c._since, default=self)
            leaver.connections.discard(leaver)  # not counted any more, though it is closed a moment later
            leaver.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._timer, self._stalled, self.timeout_keep_alive_task):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_request()
        # The parser reports only complete headers.
        self._unfinished = self._unfinished + len(data) if self._awaited == "headers" else 0
        if self._unfinished > MAX_HEADERS:
            self._refuse(TOO_LONG)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._headers = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count(len(name) + len(value) + len(b": \r\n"))

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self.cycle is not None:
            self.scope.setdefault("state", {})["write"] = partial(write_now, self.cycle)
        if self.scope["http_version"] == "1.0" and self.cycle is not None:
            self.cycle.__class__ = CloseDelimited  # uvicorn has just made the cycle and begun no response

    def send_400_response(self, msg: str) -> None:
        self._refuse(TOO_LONG if self._headers > MAX_HEADERS else NO_HTTP)

    def on_response_complete(self) -> None:
        self._since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(self.options.stall_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()

    def _count(self, size: int) -> None:
        self._headers += size
        if self._headers > MAX_HEADERS:
            raise HeadersTooLong

    def _refuse(self, error: ApiError) -> None:
        """Respond to a request that never reaches the application, and close; amid another response, only close."""
        if self.transport.is_closing():
            return
        fields = {"outcome": "refused", "status": error.status, "reason": error.message}
        log.info("request", extra={"fields": fields | {"client": self.client[0] if self.client else None}})
        if not (self.has_request and self.cycle.response_started):
            response = error.response()
            lines = [b"%b: %b" % header for header in (*response.raw_headers, (b"connection", b"close"))]
            status = STATUS_LINE[error.status]  # includes the end of the line
            self.transport.write(status + b"\r\n".join([*lines, b"", bytes(response.body)]))
        self.transport.close()

    def _watch_request(self) -> None:
        """Start a timer for the headers, then one for the body; stop it once the request is complete."""
        awaited: Literal["headers", "body"] | None = None
        if not self.has_request:
            awaited = "headers"
        elif self.cycle.more_body:
            awaited = "body"
        if awaited == self._awaited:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._awaited, self._timer = awaited, None
        if awaited == "headers":
            self._timer = self.loop.call_later(self.options.header_timeout_s, self.transport.close)
        elif awaited == "body":
            self._timer = self.loop.call_later(self.options.body_timeout_s, self.transport.abort)


def connection_class(options: Options) -> type[Connection]:
    """Return a `Connection` class with these options, and raise the process's limit of open files if possible."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    free = hard - len(os.listdir("/proc/self/fd")) - SPARE_DESCRIPTORS
    limit = options.max_connections if hard == resource.RLIM_INFINITY else min(options.max_connections, max(1, free))
    return type("Connection", (Connection,), {"options": options, "limit": limit})
