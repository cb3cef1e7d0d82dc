"""Middleware for every request: request id, API key, maximum size of the body, and the record of its end."""

from __future__ import annotations

import asyncio
import ctypes
import re
import secrets
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.serve.http.errors import ApiError, route_path
from weft.serve.http.metrics import Observations
from weft.serve.http.options import Options
from weft.serve.http.record import as_api_error, refused

OPEN_PATHS = ("/health", "/metrics")
"""Paths that require no API key and no allowed host, for probes and scrapers."""
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
"""Accepted form of a client's request id, which is safe in a log."""


def trim_memory() -> None:
    """Return freed memory to the system, if the C library can."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


class Guard:
    """ASGI middleware around the whole application, which returns the client's X-Request-Id or a new one.

    It ends the request's `Record` after the response, and logs and counts an error response without a record. An
    unexpected exception gives 500.
    """

    def __init__(self, app: ASGIApp, options: Options, metrics: Observations):
        self._app, self._options, self._metrics = app, options, metrics
        self._max_body = int(options.max_body_mb * 2**20)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        given_id = headers.get("x-request-id", "")
        request_id = given_id if REQUEST_ID.fullmatch(given_id) else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["request_id"] = request_id

        left = self._max_body
        unread = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        begun, path = False, route_path(scope)

        async def reply(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                response_headers = MutableHeaders(scope=message)
                response_headers["X-Request-Id"] = request_id
                if path.startswith("/v1/messages"):
                    response_headers["request-id"] = request_id  # Anthropic's clients show this header
                if unread:  # the rest of this body would be parsed as the next request, or have to be read first
                    response_headers["Connection"] = "close"
                if message["status"] >= 400 and "record" not in state and path not in OPEN_PATHS:
                    refused(self._metrics, scope, message["status"])
            await send(message)

        if refusal := self._refusal(path, scope["http_version"], headers):
            state["refusal"] = refusal
            return await refusal.response(path)(scope, receive, reply)

        async def limited() -> Message:
            nonlocal left, unread
            message = await receive()
            unread = message.get("more_body", False)
            left -= len(message.get("body", b""))
            if left < 0:
                unread = True
                raise HTTPException(413, self._too_large().message)
            return message

        try:
            await self._app(scope, limited, reply)
        except Exception as error:
            refusal = as_api_error(error, state)
            if not begun:
                await refusal.response(path)(scope, receive, reply)
        finally:
            if (record := state.get("record")) is not None:
                record.end()
            if state.get("large"):  # glibc keeps the memory of a large body that threads have freed
                asyncio.get_running_loop().run_in_executor(None, trim_memory)

    def _refusal(self, path: str, version: str, headers: Headers) -> ApiError | None:
        """Return the error of a request that is refused before its body is read; None if it is accepted."""
        host, key = headers.get("host"), self._options.api_key
        if host is None and version == "1.1":
            return ApiError(400, "HTTP/1.1 requires a Host header; add one")
        if path not in OPEN_PATHS and not self._options.allows_host(host or ""):
            message = f"the host {host!r} is not served here; start weft serve with --allowed-hosts {host or 'NAME'}"
            return ApiError(400, message, code="host_not_allowed")
        if key is not None and path not in OPEN_PATHS:
            scheme, _, bearer = headers.get("authorization", "").partition(" ")
            # Anthropic's clients send x-api-key.
            keys = (bearer if scheme.lower() == "bearer" else "", headers.get("x-api-key", ""))
            if not any(secrets.compare_digest(key_given.strip().encode(), key.encode()) for key_given in keys):
                message = "wrong or missing API key; send it as 'Authorization: Bearer KEY'"
                return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        length = headers.get("content-length", "")
        return self._too_large() if length.isdigit() and int(length) > self._max_body else None

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the request is larger than {self._max_body} bytes, the limit here")
