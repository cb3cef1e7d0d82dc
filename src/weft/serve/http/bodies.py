"""Bodies of requests, read so that no other request has to wait: neither for their JSON nor for what is made of it."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Collection, Coroutine
from typing import Any, ClassVar, TypeVar, get_type_hints

import anyio
import msgspec
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, model_validator
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from weft.serve.http.errors import ApiError, field_errors

T = TypeVar("T")
QUICK = 2**16
"""Bytes of a body that is read on the event loop, which takes a millisecond at most, or four where all of it is short
messages. A thread takes longer to hear of it, and many of them keep each other and the engine's thread waiting."""
SMALL = 4096
"""Bytes of a body of which texts are made into tokens there, too."""
SLOW_AT_ONCE = LARGE_AT_ONCE = 2
"""Bodies that ask for what takes long, and bodies of more than `QUICK` bytes: more threads of Python take no less time,
and leave less of the interpreter's lock to the event loop and the engine."""
MAX_VALUES = 2**20
"""Values in a body: the parser lets no other thread run until it has read them all."""
MAX_CONTAINERS = 2**17
"""Lists and objects among them, and members of objects: each takes ten times as long as a number."""
EXPLAINED = 2**16
"""Bytes of a body that Python's parser may read too: it is slower, and lets no other thread run either."""
IS_JSON = re.compile(r"application/([\w.-]+\+)?json\s*(;|$)", re.IGNORECASE)
NO_OBJECT = "the body must be a JSON object, sent with Content-Type: application/json"


class Body(BaseModel):
    """A JSON object in which null counts as left out, and only known fields may stand, however deep."""

    model_config = ConfigDict(extra="allow")
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Fields that are not served, with the values that ask for nothing."""
    harmless: ClassVar[frozenset[str]] = frozenset()
    """Fields that are accepted and change no output."""
    open: ClassVar[bool] = False
    """Whether any further field is served."""

    @property
    def slow(self) -> bool:
        """Whether much work comes before the first token, though the body may be short."""
        return False

    @property
    def tokenised(self) -> bool:
        """Whether its prompts are token ids, of which nothing else has to be made."""
        return False

    @property
    def heavy(self) -> bool:
        """Whether it is more work than its length says."""
        return False

    @model_validator(mode="before")
    @classmethod
    def _null_is_left_out(cls, body: Any) -> Any:
        return {k: v for k, v in body.items() if v is not None} if isinstance(body, dict) else body

    def refuse_unsupported(self, place: str = "") -> None:
        """ApiError 400 for a field that asks for something Weft cannot do, here or in an object inside.

        place: of this object in the request, with a dot at its end.
        """
        further = self.model_extra or {}
        for name, value in further.items():
            if not self.open and name not in self.harmless and value not in self.neutral.get(name, ()):
                raise ApiError(400, f"{place}{name} is not supported; leave it out", param=f"{place}{name}")
        for name in self.model_fields_set - further.keys():
            value = getattr(self, name)
            if isinstance(value, Body):
                value.refuse_unsupported(f"{place}{name}.")
            elif isinstance(value, list) and value and isinstance(value[0], Body):
                for at, item in enumerate(value):
                    item.refuse_unsupported(f"{place}{name}.{at}.")


B = TypeVar("B", bound=Body)


async def work_on(request: Request, function: Callable[[B], T], body: B) -> T:
    """What the function makes of a body; on a thread where that may take long, so that streams go on meanwhile.

    Bodies that are slow wait for each other, and so do large ones, not on threads that others need.
    """
    try:
        if request.state.small and not body.slow:
            return function(body)
        return await anyio.to_thread.run_sync(function, body, limiter=_limiter(request, body))
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply; send it flatter") from error


def _limiter(request: Request, body: Body) -> anyio.CapacityLimiter | None:
    """What a body waits for; None: anyio's own threads."""
    state = request.app.state
    limiter: anyio.CapacityLimiter | None = state.slow if body.slow else state.large if request.state.large else None
    return limiter


class JsonRoute(APIRoute):
    """A route to an endpoint that takes `body`, of any type that pydantic checks, and the request.

    FastAPI knows it for the schema alone: what it does for each request to find an endpoint's arguments takes longer
    than all that is needed here.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        if "body" not in inspect.signature(self.endpoint).parameters:
            return super().get_route_handler()
        checked = TypeAdapter(get_type_hints(self.endpoint)["body"])

        def check(data: bytes) -> Any:
            value = decode(data)
            try:
                return checked.validate_python(value)
            except ValidationError as error:
                raise field_errors(error.errors(include_url=False), value) from error

        async def read(request: Request) -> Any:
            if not IS_JSON.match(request.headers.get("content-type", "")):  # browsers ask before they send it elsewhere
                raise ApiError(400, NO_OBJECT)
            data = b"".join([piece async for piece in request.stream()])
            large = request.state.large = len(data) > QUICK
            limiter = request.app.state.large
            body = await anyio.to_thread.run_sync(check, data, limiter=limiter) if large else check(data)
            request.state.small = not (large or body.heavy) and (len(data) <= SMALL or body.tokenised)
            return body

        async def handle(request: Request) -> Response:
            try:
                body = await read(request)
            except ClientDisconnect:
                return Response(status_code=499)  # nobody reads this
            return await self.endpoint(body, request)

        return handle


def decode(data: bytes) -> dict[str, Any]:
    """A JSON object. ApiError 400 for anything else, and for more values than may be."""
    if has_more_values(data, MAX_VALUES, MAX_CONTAINERS):
        limits = f"{MAX_VALUES} values, or {MAX_CONTAINERS} lists and objects, or {MAX_CONTAINERS} members of objects"
        raise ApiError(400, f"the body holds more than {limits}; send several requests")
    try:
        value = _parsed(data)
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error.msg} at character {error.pos}") from error
    except (msgspec.ValidationError, ValueError, RecursionError) as error:  # numbers beyond what is read, among others
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
    value = json.loads(data, parse_constant=_no_number)  # it says where it is wrong, or takes what is: UTF-16
    if (place := _half_character(value)) is not None:
        raise ApiError(400, f"{place or 'the body'}: half of a surrogate pair is no text", param=place or None)
    return value


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _half_character(value: Any) -> str | None:
    """The place of half of a surrogate pair, or of the object that has it in a key: no such text can be encoded."""
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
    """Whether JSON holds more commas outside of strings than `max_values`, or more lists and objects, or more members
    of objects, than `max_containers`."""

    def exceeds(text: bytes) -> bool:
        containers = text.count(b"[") + text.count(b"{")
        return text.count(b",") > max_values or max(containers, text.count(b":")) > max_containers

    if not exceeds(data):
        return False
    unescaped = data.replace(rb"\\", b"").replace(rb"\"", b"")  # the quotes that are left begin and end strings
    return exceeds(b"".join(unescaped.split(b'"')[::2]))
