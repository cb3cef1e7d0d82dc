"""JSON responses and streams of events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from weft.engine.messages.request import Output

encode = msgspec.json.Encoder().encode


def json_response(body: dict[str, Any] | list[dict[str, Any]]) -> Response:
    """Return a response with status 200 and this body."""
    return Response(encode(body), media_type="application/json")


def event(data: dict[str, Any]) -> bytes:
    """Return a server-sent event."""
    return b"data: %b\n\n" % encode(data)


def typed_event(kind: str, **fields: Any) -> bytes:
    """Return a server-sent event with a name, which is also the `type` of its data."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind} | fields, ensure_ascii=False)}\n\n".encode()


class EventStream(Response):
    """Response that streams events. The generator of the events must notice that the client has disconnected.

    events_of: see `weft.serve.http.engine_client.IncrementQueue`.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], events_of: Callable[[int, Output], bytes]):
        super().__init__()
        del self.headers["content-length"]
        self._events, self._events_of = events, events_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        scope["state"]["events"] = self._events_of
        async for piece in self._events:
            if piece:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
