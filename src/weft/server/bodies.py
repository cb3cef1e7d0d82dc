"""Bodies of requests: JSON by a parser that takes half the time of Python's own, as the event loop waits for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response


class JsonRequest(Request):
    """A request whose JSON is read by msgspec."""

    async def json(self) -> Any:
        """What the body says. Raises json.JSONDecodeError, with the place of what is wrong, as Python's own parser."""
        body = await self.body()
        try:
            return msgspec.json.decode(body)
        except msgspec.DecodeError:
            return json.loads(body)  # it says what is wrong, or takes what is: halves of surrogate pairs, UTF-16


class JsonRoute(APIRoute):
    """A route of such requests."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def with_json(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return with_json
