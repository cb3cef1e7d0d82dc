"""Errors in OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`, or Anthropic's for /v1/messages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import Scope

from weft.engine.config.config import EngineError
from weft.engine.messages.request import ContextExceeded

MAX_MESSAGE = 2000
"""Maximum characters of an error's text."""


class ErrorDetail(BaseModel):
    """Members of an error. param: the parameter at fault."""

    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Body of every error response except for /v1/messages."""

    error: ErrorDetail


class AnthropicDetail(BaseModel):
    type: str
    message: str


class AnthropicBody(BaseModel):
    """Body of error responses of /v1/messages."""

    type: Literal["error"]
    error: AnthropicDetail


def route_path(scope: Scope) -> str:
    """Return the path of a request without the server's root_path."""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


def described(body: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """Return the schema of a path's errors."""
    return {
        "4XX": {"description": "What the client can put right", "model": body},
        "5XX": {"description": "What it cannot", "model": body},
    }


Names = Mapping[str, str]
"""Checked name of a field → the client's name; members of the field keep their names."""


class ApiError(Exception):
    """Refusal of a request: HTTP `status`, one line `message`, `code`, `headers`. param: the parameter at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        if len(message) > MAX_MESSAGE:  # it may repeat the client's text
            message = f"{message[:MAX_MESSAGE]}…"
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers

    def body(self) -> dict[str, Any]:
        """Return the error in OpenAI's shape."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def renamed(self, names: Names) -> ApiError:
        """Return the error with the client's names of fields."""
        if self.param is None:
            return self
        parts = self.param.split(".")
        known = [end for end in range(1, len(parts) + 1) if ".".join(parts[:end]) in names]
        if not known:
            return self
        param = ".".join([names[".".join(parts[: known[-1]])], *parts[known[-1] :]])
        # The line may name further fields, but a name without _ may be an ordinary word.
        renames = {name: other for name, other in names.items() if "_" in name} | {self.param: param}
        pattern = "|".join(map(re.escape, sorted(renames, key=len, reverse=True)))
        message = re.sub(rf"(?<![\w.])({pattern})(?!\w)", lambda found: renames[found[0]], self.message)
        return ApiError(self.status, message, param=param, code=self.code, headers=self.headers)

    def response(self, path: str = "") -> JSONResponse:
        """Return the error as a response. path: of the request, which decides the shape."""
        body = anthropic_body(self) if path.startswith("/v1/messages") else self.body()
        return JSONResponse(body, status_code=self.status, headers=self.headers)


def bad_field(field: str, rest: str) -> ApiError:
    """Return the ApiError of a field at fault, with a line that begins with its name."""
    return ApiError(400, field + rest, param=field)


@contextmanager
def client_names(names: Names) -> Iterator[None]:
    """Rename the fields of ApiErrors raised in this context to the client's names."""
    try:
        yield
    except ApiError as error:
        raise error.renamed(names) from error


def of_value(error: ValueError) -> ApiError:
    """Return the ApiError of a bad value; its line begins with the name of the field at fault, if any."""
    if isinstance(error, ContextExceeded):
        return ApiError(400, str(error), param=error.field, code="context_length_exceeded")
    name = re.match(r"(\w+)(?=: | is |=)", str(error))
    return ApiError(400, str(error), param=name and name[0])


ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's error types by HTTP status."""


def anthropic_body(error: ApiError) -> dict[str, Any]:
    """Return the error in Anthropic's shape."""
    kind = ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def install(app: FastAPI) -> None:
    """Give each expected error the client's shape; see `weft.serve.http.record.as_api_error` for unexpected ones."""

    @app.exception_handler(ApiError)
    async def refuse(request: Request, error: ApiError) -> JSONResponse:
        request.state.refusal = error  # for the log
        return error.response(route_path(request.scope))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return await refuse(request, field_errors(error.errors(), error.body))

    @app.exception_handler(EngineError)
    async def engine_failed(request: Request, error: EngineError) -> JSONResponse:
        return await refuse(request, ApiError(503, str(error)))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        message = str(error.detail)
        if error.status_code == 404:
            message = f"there is no path {request.url.path} here; GET /openapi.json lists all paths"
        return await refuse(request, ApiError(error.status_code, message, headers=dict(error.headers or {})))


def field_errors(problems: Sequence[Any], body: Any, place: str = "") -> ApiError:
    """Return the error of the first wrong field of pydantic's `problems`. place: path in `body`, with a final dot."""
    # A field of several types has a problem per type, named at the end of its place, after the client's field.
    field = _field(problems[0], body)
    messages = [p["msg"] for p in problems if _field(p, body) == field]
    field = place + field
    return bad_field(field, f": {' or '.join(dict.fromkeys(messages))}")


def _field(problem: dict[str, Any], value: Any) -> str:
    """Return the place of a problem, up to the last part that exists in the body."""
    place = problem["loc"]
    if place[:1] in (("query",), ("path",)):
        return ".".join(map(str, place[1:]))
    parts: list[str] = []
    for at, part in enumerate(place):
        if (isinstance(value, dict) and part in value) or (isinstance(value, list) and isinstance(part, int)):
            value = value[part]
            parts.append(str(part))
        elif problem["type"] == "missing" and at == len(place) - 1:
            parts.append(str(part))
        elif parts:  # the name of one of several bodies may precede the field
            break
    return ".".join(parts)
