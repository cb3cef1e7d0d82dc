"""Request bodies: parse and handle them without blocking other requests."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Collection, Coroutine
from functools import cached_property
from typing import Any, ClassVar, TypeVar, get_type_hints

import anyio
import msgspec
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, model_validator
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from weft.serve.http.errors import ApiError, bad_field, field_errors

T = TypeVar("T")
QUICK = 2**16
"""Maximum bytes of a body that the event loop parses, in at most a millisecond, or four if it is all short messages.
Waking a thread would take longer, and many threads delay each other and the engine's thread."""
SMALL = 4096
"""Maximum bytes of a body to tokenise on the event loop."""
SLOW_AT_ONCE = LARGE_AT_ONCE = 2
"""Maximum threads for slow bodies, and for bodies above `QUICK` bytes: more threads are not faster, and leave less of
the interpreter's lock to the event loop and the engine."""
MAX_VALUES = 2**20
"""Maximum values in a body: the parser holds the interpreter's lock until it has read them all."""
MAX_CONTAINERS = 2**17
"""Maximum lists, objects and members of objects in a body: each takes ten times as long to parse as a number."""
EXPLAINED = 2**16
"""Maximum bytes of a body that Python's parser reads too: it is slower, and also holds the interpreter's lock."""
IS_JSON = re.compile(r"application/([\w.-]+\+)?json\s*(;|$)", re.IGNORECASE)
NO_OBJECT = "the body must be a JSON object, sent with Content-Type: application/json"


class Body(BaseModel):
    """JSON object that treats null as omitted, and accepts only known fields at any depth."""

    model_config = ConfigDict(extra="allow")
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Unsupported fields, with their values that have no effect."""
    harmless: ClassVar[frozenset[str]] = frozenset()
    """Accepted fields that change no output."""
    open: ClassVar[bool] = False
    """True if unknown fields are accepted."""

    @property
    def slow(self) -> bool:
        """True if a request needs more work before its first token than the length of its body implies."""
        return False

    @property
    def tokenised(self) -> bool:
        """True if all prompts are token ids."""
        return False

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, body: Any) -> Any:
        return {k: v for k, v in body.items() if v is not None} if isinstance(body, dict) else body

    def refuse_unsupported(self, place: str = "") -> None:
        """Raise ApiError 400 for an unsupported field, here or in members. place: path of the object with a dot."""
        further = self.model_extra or {}
        for name, value in further.items():
            if not self.open and name not in self.harmless and value not in self.neutral.get(name, ()):
                raise bad_field(place + name, " is not supported; leave it out")
        for name in self.model_fields_set - further.keys():
            value = getattr(self, name)
            if isinstance(value, Body):
                value.refuse_unsupported(f"{place}{name}.")
            elif isinstance(value, list) and value and isinstance(value[0], Body):
                for at, item in enumerate(value):
                    item.refuse_unsupported(f"{place}{name}.{at}.")


B = TypeVar("B", bound=Body)


async def work_on(request: Request, function: Callable[[B], T], body: B) -> T:
    """Return `function(body)`, computed on a thread if it may take long, so that streams continue.

    Slow bodies wait for each other, as do large ones, without holding threads that other requests need.
    """
    try:
        if request.state.small and not body.slow:
            return function(body)
        return await anyio.to_thread.run_sync(function, body, limiter=_limiter(request, body))
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply; send it flatter") from error


def _limiter(request: Request, body: Body) -> anyio.CapacityLimiter | None:
    """Return the limiter of a body's threads; None for anyio's own."""
    state = request.app.state
    limiter: anyio.CapacityLimiter | None = state.slow if body.slow else state.large if request.state.large else None
    return limiter


class JsonRoute(APIRoute):
    """Route to an endpoint with the argument `body`, of any type that pydantic checks.

    A coroutine also gets the `request`; another function is called by `work_on`.
    FastAPI uses it only for the schema: its search for an endpoint's arguments, and its stacks of what an endpoint may
    depend on, cost more than this whole route.
    """

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._handler is None or scope["method"] not in (self.methods or ()):
            return await super().handle(scope, receive, send)
        response = await self._handler(Request(scope, receive, send))
        await response(scope, receive, send)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        return self._handler or super().get_route_handler()

    @cached_property
    def _handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]] | None:
        if "body" not in inspect.signature(self.endpoint).parameters:
            return None
        checked = TypeAdapter(get_type_hints(self.endpoint)["body"])

        def check(data: bytes) -> Any:
            value = decode(data)
            try:
                return checked.validate_python(value)
            except ValidationError as error:
                raise field_errors(error.errors(include_url=False), value) from error

        async def read(request: Request) -> Any:
            if not IS_JSON.match(request.headers.get("content-type", "")):  # browsers need CORS to send JSON elsewhere
                raise ApiError(400, NO_OBJECT)
            data = b"".join([piece async for piece in request.stream()])
            large = request.state.large = len(data) > QUICK
            limiter = request.app.state.large
            body = await anyio.to_thread.run_sync(check, data, limiter=limiter) if large else check(data)
            request.state.small = not large and (len(data) <= SMALL or body.tokenised)
            return body

        async def handle(request: Request) -> Response:
            try:
                body = await read(request)
            except ClientDisconnect:
                return Response(status_code=499)  # nobody reads this
            if inspect.iscoroutinefunction(self.endpoint):
                return await self.endpoint(body, request)
            return await work_on(request, self.endpoint, body)

        return handle


def decode(data: bytes) -> dict[str, Any]:
    """Return the JSON object of a body. ApiError 400 for anything else, and above the maximum of values."""
    if has_more_values(data, MAX_VALUES, MAX_CONTAINERS):
        limits = f"{MAX_VALUES} values, or {MAX_CONTAINERS} lists and objects, or {MAX_CONTAINERS} members of objects"
        raise ApiError(400, f"the body holds more than {limits}; send several requests")
    try:
        value = _parsed(data)
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error.msg} at character {error.pos}") from error
    except (msgspec.ValidationError, ValueError, RecursionError) as error:  # includes numbers that are too large
        raise ApiError(400, f"the body is not JSON that can be read: {error}") from error
    except msgspec.DecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ApiError(400, NO_OBJECT)
    return value


def _parsed(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        if len(data) > EXPLAINED:
            raise
    value = json.loads(data, parse_constant=_refuse_constant)  # it names the place of an error, and accepts UTF-16
    if (place := _find_surrogate(value)) is not None:
        raise ApiError(400, f"{place or 'the body'}: a lone surrogate is not valid text", param=place or None)
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _find_surrogate(value: Any) -> str | None:
    """Return the place of a lone surrogate, or of the object with one in a key: such text cannot be encoded."""
    waiting: list[tuple[str, Any]] = [("", value)]
    while waiting:
        place, value = waiting.pop()
        members: Collection[tuple[Any, Any]] = value.items() if isinstance(value, dict) else ()
        if isinstance(value, list):
            members = list(enumerate(value))
        for part in (value, *(key for key, _ in members)):
            if isinstance(part, str) and any("\ud800" <= character <= "\udfff" for character in part):
                return place
        waiting += [(f"{place}.{key}".lstrip("."), inside) for key, inside in members]
    return None


def has_more_values(data: bytes, max_values: int, max_containers: int) -> bool:
    """Return whether JSON `data` has more than `max_values` commas outside strings, or more than `max_containers` lists
    and objects, or members of objects."""

    def exceeds(text: bytes) -> bool:
        containers = text.count(b"[") + text.count(b"{")
        return text.count(b",") > max_values or max(containers, text.count(b":")) > max_containers

    if not exceeds(data):
        return False
    unescaped = data.replace(rb"\\", b"").replace(rb"\"", b"")  # the remaining quotes begin and end strings
    return exceeds(b"".join(unescaped.split(b'"')[::2]))
