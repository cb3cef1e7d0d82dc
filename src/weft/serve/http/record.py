"""Record of one request: a log line at its end, and its values in the metrics."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.types import Scope

from weft.engine.messages.request import Output
from weft.serve.http.errors import ApiError
from weft.serve.http.metrics import Observations

log = logging.getLogger(__name__)


MAX_REASON = 300
"""Maximum characters of an error in the log."""


def refused(metrics: Observations, scope: Scope, status: int) -> None:
    """Log and count an error response to a request without a Record."""
    outcome = "error" if status == 500 else "refused"
    metrics.refused(outcome)
    state = scope["state"]
    head = {"id": state["request_id"], "path": scope["path"], "outcome": outcome, "status": status}
    log.info("request", extra={"fields": head | _why(state) | {"client": _client(scope)}})


def _why(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members of a log line that explain an error."""
    error: ApiError | None = state.get("refusal")
    return {"reason": error.message[:MAX_REASON], "param": error.param} if error else {}


def _client(scope: Scope) -> str | None:
    return scope["client"][0] if scope.get("client") else None


def as_api_error(error: Exception, state: MutableMapping[str, Any]) -> ApiError:
    """Return the client's error of an exception; an unexpected one is logged and becomes the request's outcome.

    state: of the request, with `request_id` and perhaps `record`.
    """
    if isinstance(error, ApiError):
        state["refusal"] = error
        return error
    log.error("request %s ends with an error", state["request_id"], exc_info=error)
    if (record := state.get("record")) is not None:
        record.outcome = "error"
    return ApiError(500, f"internal error: {type(error).__name__}")


class Record:
    """Record of one request, from its construction; the request's state has it. outcome: the end in one word.

    Times are measured on the event loop, so they include clients' waits for the loop.
    """

    def __init__(self, metrics: Observations, request: Request, prompts: Sequence[Sequence[int]]):
        self._metrics, self._scope, self._began = metrics, request.scope, time.perf_counter()
        self._last = [self._began] * len(prompts)
        self._outputs: list[Output | None] = [None] * len(prompts)
        self._first: float | None = None
        self.id, self._path = getattr(request.state, "request_id", ""), request.url.path
        self._prompt_tokens = sum(map(len, prompts))
        request.state.record = self
        self.outcome = "client_left"

    def increment(self, choice: int, output: Output) -> None:
        """Observe an increment of a choice."""
        now = time.perf_counter()
        if count := len(output.token_ids):
            begun = self._outputs[choice] is not None
            self._metrics.token_batch(begun, now - self._last[choice], count)
            self._first = self._first or now
        self._last[choice], self._outputs[choice] = now, output

    def end(self) -> None:
        """Log and count the end of the response; called once."""
        seconds = time.perf_counter() - self._began
        outputs = [o for o in self._outputs if o is not None]
        queued = max((o.queue_s for o in outputs), default=0.0)
        generated = [o.completion_tokens for o in outputs]
        cached = sum(o.cached_tokens for o in outputs)
        self._metrics.request(self.outcome, seconds, queued)
        if self._first is not None:
            first, last = self._first - self._began, max(self._last) - self._began
            self._metrics.tokens(self._prompt_tokens, cached, generated, max(0.0, first - queued), last - first)
        fields: dict[str, Any] = {
            "id": self.id,
            "path": self._path,
            "outcome": self.outcome,
            "choices": len(self._outputs),
            "prompt_tokens": self._prompt_tokens,
            "cached_tokens": cached,
            "completion_tokens": sum(generated),
            "queue_s": round(queued, 4),
            "first_token_s": None if self._first is None else round(self._first - self._began, 4),
            "total_s": round(seconds, 4),
        }
        why = _why(self._scope["state"])
        log.info("request", extra={"fields": fields | why | {"client": _client(self._scope)}})
