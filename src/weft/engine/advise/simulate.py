"""Simulation of a load: the engine's own loop and schedulers, on steps of modelled times and a clock of their own.

Clients form a closed loop: each waits for its output and sends its next request at once. The time of the HTTP server
and of clients is not in it.
"""

from __future__ import annotations

import statistics
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import Any

from weft.engine.advise.candidates import ClientLoad
from weft.engine.config.config import EngineConfig
from weft.engine.controller.engine import Engine
from weft.engine.controller.executor import Executor
from weft.engine.kv.cache_spec import CacheGroup
from weft.engine.messages.rank_messages import GroupRows, Ran, Result, Step
from weft.engine.messages.request import SamplingParams
from weft.engine.output.request_output import Request, RequestOutput
from weft.tune.step_table import NotMeasured, StepShape

StepUs = Callable[[Sequence[StepShape]], float]
"""Function that returns the µs of a step, from the rows of each DP group."""
WAIT_S = 600.0
TOKEN = 5
"""Token that every row samples: the load ignores end tokens."""


class ModelledRanks(Executor):
    """Ranks that compute nothing: a step ends its modelled time after it was sent and the one before has ended.

    now: seconds of the clock, at the end of the last collected step. unknown: the first step without a time.
    """

    def __init__(self, config: EngineConfig, groups: Sequence[CacheGroup], us: StepUs):
        super().__init__(config)
        self._of_start, self._us = tuple(groups), us
        self.now = self._busy_until = 0.0
        self.steps, self.unknown = 0, ""
        self._sent: deque[tuple[Step, float]] = deque()
        self._lengths: list[dict[int, int]] = [{} for _ in range(config.attn_dp)]  # tokens of each row, by DP group

    def start(self, progress: Any = None, poll: Callable[[], None] = lambda: None) -> None:
        """Start nothing."""
        self.groups = self._of_start
        self.config = self.config.with_cache(self.groups)

    def send(self, step: Step) -> None:
        """Begin a step."""
        shapes = [self._shape(rows, lengths) for rows, lengths in zip(step.groups, self._lengths, strict=True)]
        try:
            us = self._us(shapes)
        except NotMeasured as error:
            us, self.unknown = 0.0, self.unknown or str(error)
        self._busy_until = max(self.now, self._busy_until) + us / 1e6
        self._sent.append((step, self._busy_until))
        self.steps += 1

    def collect(self) -> list[Result]:
        """End the oldest step: move the clock."""
        step, ended = self._sent.popleft()
        self.now = max(self.now, ended)
        ran = Ran(step.number, step.counts, 0, 0)
        leaders = map(self.mesh.leader, range(self.mesh.attn_dp))
        sampled = ((TOKEN,) * len(rows.sampled_rows) for rows in step.groups)
        return [Result(rank, ran, tokens) for rank, tokens in zip(leaders, sampled, strict=True)]

    @staticmethod
    def _shape(rows: GroupRows, lengths: dict[int, int]) -> StepShape:
        for join in rows.joins:
            lengths[join.row] = join.context
        prompt = cached = context = 0
        for chunk in rows.chunks:
            prompt += chunk.count
            cached += chunk.count * lengths[chunk.row]
            lengths[chunk.row] += chunk.count
        for row in rows.decode_rows:
            context += lengths[row]
            lengths[row] += 1
        decode = len(rows.decode_rows)
        return StepShape(decode, context / decode if decode else 0.0, prompt, cached / prompt if prompt else 0.0)

    def report(self) -> None: ...
    def idle(self) -> None: ...
    def _launch(self, poll: Callable[[], None]) -> None: ...
    def _stop_ranks(self, grace_s: float) -> None: ...
    def _send(self, rank: int, message: Any) -> None: ...
    def _receive(self) -> None: ...
    def _dead(self, *, killed: bool = False) -> None: ...


@dataclass(frozen=True)
class LoadFigures:
    """LoadFigures of a load. Latencies are (median, 99th percentile) in ms."""

    tokens_s: float  # output tokens per second
    ttft_ms: tuple[float, float]  # time to the first token
    itl_ms: tuple[float, float]  # time between two tokens
    seconds: float  # duration
    steps: int
    preemptions: int
    unknown: str = ""  # the first step without a known time; empty: all figures are known


class Clients:
    """Closed loop of a load's clients against one engine.

    requests: number of all requests. vocabulary: number of its tokens. now: returns the seconds of the clock. seed: of
    the prompts.
    """

    def __init__(self, load: ClientLoad, requests: int, vocabulary: int, now: Callable[[], float], seed: int = 0):
        self._load, self._left, self._now, self._vocabulary = load, requests, now, vocabulary
        self._random, self._open, self.ended = Random(seed), requests, threading.Event()
        self._shared = self._tokens(int(load.input_len * load.shared_prefix))
        self._params = SamplingParams(max_tokens=load.output_len, temperature=0.0, ignore_eos=True)
        self.times: list[list[float]] = []  # seconds of each request: of its sending, and of its tokens
        self.submit: Callable[[Sequence[Request]], object] = lambda requests: None

    def begin(self) -> None:
        """Send the first request of each client."""
        self.submit([self._request() for _ in range(min(self._load.concurrency, self._left))])

    def _request(self) -> Request:
        self._left -= 1
        times = [self._now()]
        self.times.append(times)

        def callback(output: RequestOutput) -> None:
            _, token, _, end = output.take_token()
            if token is not None:
                times.append(self._now())
            if end is not None:
                self._open -= 1
                if self._left:
                    self.submit([self._request()])
                if not self._open:
                    self.ended.set()

        own = self._tokens(self._load.input_len - len(self._shared))
        return [*self._shared, *own], self._params, callback

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(self._vocabulary) for _ in range(count)]


def simulate(
    config: EngineConfig, groups: Sequence[CacheGroup], load: ClientLoad, us: StepUs, requests: int
) -> LoadFigures:
    """Return the figures of one server under a load.

    config, groups: options and cache groups of its ranks. us: times of steps. requests: number of all requests.
    """
    ranks: list[ModelledRanks] = []

    def make(given: EngineConfig) -> ModelledRanks:
        ranks.append(ModelledRanks(given, groups, us))
        return ranks[0]

    many = replace(config, max_waiting=max(config.max_waiting, load.concurrency), max_choices=max(1, load.concurrency))
    with Engine(many, executor=make) as engine:
        clients = Clients(load, requests, engine.model_config.vocab_size, lambda: ranks[0].now)
        clients.submit = engine.submit_all
        clients.begin()
        if not clients.ended.wait(WAIT_S):
            raise TimeoutError(f"the simulation of {requests} requests did not end in {WAIT_S:.0f} s")
        preemptions = engine.stats().preemptions
    ttft, itl, rate = figures(clients.times, 0.0)
    return LoadFigures(rate, ttft, itl, ranks[0].now, ranks[0].steps, preemptions, ranks[0].unknown)


def figures(times: Sequence[Sequence[float]], began: float) -> tuple[tuple[float, float], tuple[float, float], float]:
    """Return TTFT and ITL, as in `LoadFigures`, and output tokens per second. times: of `Clients`, from `began` on."""
    ttft = [request[1] - request[0] for request in times]
    itl = [b - a for request in times for a, b in pairwise(request[1:])]
    tokens, seconds = sum(len(request) - 1 for request in times), max(request[-1] for request in times) - began
    return _ms(ttft), _ms(itl), tokens / max(seconds, 1e-9)


def _ms(seconds: Sequence[float]) -> tuple[float, float]:
    """Return the median and the 99th percentile in ms; zeros for no values."""
    ordered = sorted(seconds) or [0.0]
    return statistics.median(ordered) * 1e3, ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] * 1e3
