"""Messages between the engine's process and the processes that serve its API, encoded as msgpack.

Each direction has one list of messages a step. An API process numbers its requests itself. It reads the tokens of each
as the engine's thread does (`weft.engine.output.request_output`), so stop strings end an output at the same character;
the engine runs on for a step or two until it knows.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct

from weft.engine.messages.rank_messages import Logprobs
from weft.engine.messages.request import End, Sharing, TokenLogprob

EngineState = Literal["starting", "serving", "degraded", "restarting", "draining", "failed", "stopped"]


class ApiConnected(Struct, frozen=True, tag=True):
    """API process: it waits for its setup."""


class ApiStarted(Struct, frozen=True, tag=True):
    """API process: it can serve. error: reason in one line why it cannot."""

    error: str | None = None


class NewRequests(Struct, frozen=True, tag=True):
    """API process: requests to queue, all or none, numbered from `first`; other fields as in `Engine.submit_all`.

    requests: tokens of each prompt (`weft.engine.kv.tokens`), and sampling parameters that are not the default.
    """

    first: int
    requests: tuple[tuple[bytes, dict[str, Any]], ...]
    sharing: Sharing
    timeout_s: float | None
    name: str


class CancelRequests(Struct, frozen=True, tag=True):
    """API process: requests that nobody reads any more."""

    requests: tuple[int, ...]


class Question(Struct, frozen=True, tag=True):
    """API process: call of a function of the engine's process."""

    number: int
    what: str
    arguments: tuple[Any, ...]


class Observed(Struct, frozen=True, tag=True):
    """API process: observations since its last message: (counts of buckets, sum) of histograms, requests by outcome."""

    histograms: dict[str, tuple[list[int], float]]
    outcomes: dict[str, int]


class ApiSetup(Struct, frozen=True, tag=True):
    """Engine: plain values that an API process starts with."""

    values: dict[str, Any]


class ServeRequests(Struct, frozen=True, tag=True):
    """Engine: accept connections from now on."""


class StopServing(Struct, frozen=True, tag=True):
    """Engine: stop as a server does on SIGTERM."""


class CollectObserved(Struct, frozen=True, tag=True):
    """Engine: send `Observed` now."""


class EngineStatus(Struct, frozen=True, tag=True):
    """Engine: its state and error, as in `Engine`, when they change."""

    state: EngineState
    error: str | None


class QuestionResult(Struct, frozen=True, tag=True):
    """Engine: encoded result of a question. error: HTTP status, message and parameter instead of a value."""

    number: int
    value: bytes
    error: tuple[int, str, str | None] | None


class RequestsRefused(Struct, frozen=True, tag=True):
    """Engine: requests that it does not queue. retry_after_s: set if too many wait. invalid: by a ValueError."""

    first: int
    count: int
    error: str
    retry_after_s: float | None
    invalid: bool


class StepTokens(Struct, frozen=True, tag=True):
    """Engine: a token of each of these requests, in this order."""

    requests: list[int]
    tokens: list[int]


class FirstIncrement(Struct, frozen=True, array_like=True):
    """Part of a request's first increment; see `Output`."""

    cached: int
    queue_s: float
    prompt_logprobs: tuple[TokenLogprob, ...]


class Increment(Struct, frozen=True, tag=True):
    """Engine: an increment with more than a token. token: None in an end without one. end: without its fault."""

    request: int
    token: int | None
    logprobs: Logprobs | None
    first: FirstIncrement | None
    end: End | None


FromApi = ApiConnected | ApiStarted | NewRequests | CancelRequests | Question | Observed
ToApi = (
    ApiSetup
    | ServeRequests
    | StopServing
    | CollectObserved
    | EngineStatus
    | QuestionResult
    | RequestsRefused
    | StepTokens
    | Increment
)


class ApiPacket(Struct, frozen=True, array_like=True):
    """Messages of an API process, by its number."""

    process: int
    messages: list[FromApi]


encode = msgspec.msgpack.Encoder().encode
decode_from_api = msgspec.msgpack.Decoder(ApiPacket).decode
decode_to_api = msgspec.msgpack.Decoder(list[ToApi]).decode


def packed(process: int, encoded: list[bytes]) -> bytes:
    """Return the `ApiPacket` of encoded messages."""
    return encode((process, list(map(msgspec.Raw, encoded))))
