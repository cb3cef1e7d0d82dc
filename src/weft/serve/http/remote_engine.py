"""An API process's engine, which runs in another process, with the interface that the HTTP server uses of `Engine`."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import pickle
import random
import threading
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import msgspec

from weft.engine.config.config import EngineConfig, EngineError, QueueFull
from weft.engine.grammar.grammar import Compiled
from weft.engine.messages import api_messages as messages
from weft.engine.messages.rank_sockets import RankSocket
from weft.engine.messages.request import FAIR_SHARE, Output, SamplingParams, Sharing
from weft.engine.output.request_output import Request, RequestOutput, check_count, prepare_all
from weft.engine.output.text_processor import TextProcessor
from weft.serve.http.errors import ApiError
from weft.serve.http.metrics import Observations

if TYPE_CHECKING:  # these import torch
    from weft.engine.controller.engine import Engine
    from weft.serve.http.shared import Shared

AnyEngine: TypeAlias = "Engine | RemoteEngine"
"""Engine of this process or of another one."""
AnyShared: TypeAlias = "Shared | RemoteEngine"
"""State that all processes of the server share, in this process or in another one."""
HERE_ONLY = ("stop", "watch", "keep_special", "grammar")
"""Sampling parameters that need text, and the grammar, which is sent as a text."""


class RefusedOutput:
    """Output of a request that the engine does not queue: `take` raises why."""

    end = None

    def __init__(self, error: Exception):
        self._error = error

    def take(self, count: int = 1) -> Output:
        raise self._error


class RemoteEngine:
    """Engine of another process. Only `submit_all` may be called outside the event loop's thread.

    Args:
        connection: socket to the engine's process.
        process: number of this API process.
        setup: values of the engine (`weft.serve.http.api_processes`).
        observed: observations of this process.
    """

    error: str | None = None
    state: messages.EngineState = "serving"
    serving = stopped = False
    """serving: the process may accept connections. stopped: it must not go on."""

    def __init__(self, connection: RankSocket, process: int, setup: dict[str, Any], observed: Observations):
        self._connection, self._process, self._observed = connection, process, observed
        self.config = EngineConfig.from_dict(json.loads(setup["config"]))
        self.max_model_len: int = setup["max_model_len"]
        vocabulary, eos = setup["vocabulary"], tuple(setup["eos"])
        self.text_processor = TextProcessor(pickle.loads(setup["tokenizer"]), self.config.tokenizer, vocabulary, eos)
        self.tokenizer = self.text_processor.tokenizer
        self._seeds, self._numbers = random.Random(), itertools.count()
        self._open: dict[int, RequestOutput] = {}
        self._results: dict[int, asyncio.Future[Any]] = {}
        self._unsent: list[bytes] = []
        self._sending = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: Any = None

    def serve(self, loop: asyncio.AbstractEventLoop, stop: Any) -> None:
        """Receive on this event loop from now on. stop: called when the engine's process stops serving."""
        self._loop, self._stop = loop, stop
        loop.add_reader(self._connection.fileno(), self.receive)

    def submit_all(
        self, requests: Sequence[Request], *, sharing: Sharing = FAIR_SHARE, timeout_s: float | None = None, name: str
    ) -> list[int]:
        """Queue requests as `Engine.submit_all`. A later refusal is an output with a `take` that raises it."""
        check_count(len(requests), self.config.max_choices)
        context = min(self.max_model_len, self.config.cached_tokens)
        here = [(prompt, _without_grammar(params), callback) for prompt, params, callback in requests]
        outputs = prepare_all(here, context, self.text_processor, self._seeds)
        with self._sending:
            numbers = [next(self._numbers) for _ in outputs]
        plain = [_plain(params) for _, params, _ in requests]
        jobs = tuple((o.sequence.tokens.tobytes(), params) for o, params in zip(outputs, plain, strict=True))
        new = messages.encode(messages.NewRequests(numbers[0], jobs, sharing, timeout_s, name))
        for output, number in zip(outputs, numbers, strict=True):
            output.name, output.sequence.request = name, number
            output.sequence.arrived = 0.0
            self._open[number] = output
        self._send(new)
        return numbers

    def cancel(self, request: int) -> None:
        """End a request, unless it has ended already."""
        if self._open.pop(request, None) is not None:
            self._send(messages.encode(messages.CancelRequests((request,))))

    async def ask(self, what: str, *arguments: Any) -> Any:
        """Return the result of a function of `weft.serve.http.shared.Shared`. Raises ApiError."""
        with self._sending:
            number = next(self._numbers)
        question = messages.encode(messages.Question(number, what, arguments))
        result = self._results[number] = asyncio.get_running_loop().create_future()
        self._send(question)
        try:
            return await result
        finally:
            del self._results[number]

    def _send(self, message: bytes) -> None:
        """Send an encoded message in the next packet: one that cannot be encoded is its caller's error alone."""
        with self._sending:
            self._unsent.append(message)
            first = len(self._unsent) == 1
        if first and self._loop is not None:
            self._loop.call_soon_threadsafe(self._flush)
        elif first:
            self._flush()

    def _flush(self) -> None:
        with self._sending:
            unsent, self._unsent = self._unsent, []
        self._connection.send(messages.packed(self._process, unsent))

    def receive(self) -> None:
        """Wait for messages and take them."""
        try:
            received = messages.decode_to_api(self._connection.receive())
        except EOFError:
            os._exit(1)  # the engine's process is gone
        for message in received:
            match message:
                case messages.StepTokens(requests, tokens):
                    for request, token in zip(requests, tokens, strict=True):
                        if (output := self._open.get(request)) is not None:
                            output.accept(token)
                            self._notify(output)
                case messages.Increment():
                    if (output := self._open.get(message.request)) is not None:
                        self._add(output, message)
                case messages.RequestsRefused():
                    self._refuse(message)
                case messages.QuestionResult(number, value, error):
                    if (result := self._results.get(number)) is not None and not result.done():
                        if error is None:
                            result.set_result(msgspec.msgpack.decode(value))
                        else:
                            result.set_exception(ApiError(error[0], error[1], param=error[2]))
                case messages.EngineStatus(state, error):
                    self.state, self.error = state, error
                case messages.CollectObserved():
                    self._send(messages.encode(self._observed.take()))
                case messages.ServeRequests():
                    self.serving = True
                case messages.StopServing():
                    self.stopped = True
                    if self._stop is not None:
                        self._stop()

    def _add(self, output: RequestOutput, increment: messages.Increment) -> None:
        sequence, end = output.sequence, increment.end
        if increment.first is not None:
            sequence.cached, sequence.admitted = increment.first.cached, increment.first.queue_s
            sequence.scores = list(increment.first.prompt_logprobs)
        at = sequence.output_tokens
        if increment.token is not None:
            output.accept(increment.token, increment.logprobs)
        # A stop string precedes the end of a grammar and of a length. The engine's other ends precede it.
        own = output.end
        if end is not None and (own is None or own.reason == "length" or end.reason not in ("stop", "length")):
            output.end = msgspec.structs.replace(end, at=at, token=increment.token is not None)
        self._notify(output, known=end is not None)

    def _notify(self, output: RequestOutput, known: bool = False) -> None:
        """Call the callback. known: the engine knows that this is the end."""
        if output.notify():
            self._open.pop(output.sequence.request, None)
            if not known:
                self._send(messages.encode(messages.CancelRequests((output.sequence.request,))))

    def _refuse(self, message: messages.RequestsRefused) -> None:
        output = self._open.get(message.first)
        error: Exception = EngineError(message.error)
        if message.invalid:
            error = ValueError(message.error)
        elif message.retry_after_s is not None:
            error = QueueFull(0, message.retry_after_s)
            error.args = (message.error,)
        for number in range(message.first, message.first + message.count):
            self._open.pop(number, None)
        if output is not None:
            output.callback(cast(RequestOutput, RefusedOutput(error)))


def _without_grammar(params: SamplingParams) -> SamplingParams:
    return params if params.grammar is None else replace(params, grammar=None)


def _plain(params: SamplingParams) -> dict[str, Any]:
    """Return the parameters that the engine's process needs and that are not the default."""
    plain = {f.name: value for f in fields(params) if (value := getattr(params, f.name)) != f.default}
    grammar = params.grammar.text if isinstance(params.grammar, Compiled) else params.grammar
    return {name: value for name, value in plain.items() if name not in HERE_ONLY} | (
        {} if grammar is None else {"grammar": grammar}
    )
