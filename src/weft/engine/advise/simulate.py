"""Simulation of a load: the engine's own loop and schedulers, on steps of modelled times and a clock of their own.

Clients form a closed loop: each waits for its output and sends its next request at once; or requests arrive at recorded
times. An HTTP server handles requests and tokens one after the other. The time of clients is not in it.
"""

from __future__ import annotations

import heapq
import itertools
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, pairwise
from random import Random
from typing import Any

from weft.engine.advise.candidates import ClientLoad
from weft.engine.config.config import EngineConfig
from weft.engine.controller.engine import Engine
from weft.engine.controller.executor import Executor
from weft.engine.kv.cache_spec import CacheGroup, Rule
from weft.engine.messages.rank_messages import GroupRows, Ran, Result, Step
from weft.engine.messages.request import SamplingParams
from weft.engine.output.request_output import Request, RequestOutput
from weft.tune.step_table import NotMeasured, StepShape

StepUs = Callable[[Sequence[StepShape]], float]
"""Function that returns the µs of a step, from the rows of each DP group."""
WAIT_S, SLOW_S = 600.0, 1e-3
TOKEN = 5
"""Token that every row samples: the load ignores end tokens."""


@dataclass(frozen=True)
class ApiTimes:
    """CPU time of the HTTP server and the controller, or of the controller alone.

    Attributes:
        request_us, token_us: µs of a request, and of each token of an output.
        crowded: no core is free of ranks, so that this time is added to their steps.
        http: a server reads and writes one thing after the other; otherwise the controller does before the next step.
    """

    request_us: float = 0.0
    token_us: float = 0.0
    crowded: bool = False
    http: bool = True


NO_API = ApiTimes()


class Clock:
    """Seconds of a simulation, calls at later times, and the HTTP server, which does one thing at a time.

    Attributes:
        now: end of the last collected step, or the time of the current call.
        spent_s: seconds of this CPU time since the last step was sent.
    """

    def __init__(self, api: ApiTimes = NO_API):
        self.now = self.spent_s = 0.0
        self.api, self._api_free, self._order = api, 0.0, itertools.count()
        self._calls: list[tuple[float, int, Callable[[], object]]] = []
        self._lock = threading.RLock()

    def at(self, seconds: float, call: Callable[[], object]) -> None:
        """Call `call` at a time; at once if it is now."""
        if seconds <= self.now and not self._calls:
            call()
        else:
            heapq.heappush(self._calls, (seconds, next(self._order), call))

    def served(self, us: float) -> float:
        """Return the time at which the server is done with work of these µs that begins now or once it is free.

        Without HTTP it is now: the controller begins the next step later.
        """
        self.spent_s += us / 1e6
        if self.api.http:
            self._api_free = max(self.now, self._api_free) + us / 1e6
        return self._api_free if self.api.http else self.now

    def begin(self, busy_until: float) -> float:
        """Return the time at which ranks begin a step that is sent now, if they run others until then.

        Ranks that use all cores lose the time that the server or the controller has spent. Steps in flight hide the
        controller's time otherwise.
        """
        spent_s, self.spent_s = self.spent_s, 0.0
        return max(self.now + spent_s * (not self.api.http), max(self.now, busy_until) + spent_s * self.api.crowded)

    def request(self, submit: Callable[[], object]) -> None:
        """Submit a request once the server has read it."""
        self.at(self.served(self.api.request_us), submit)

    def token(self) -> float:
        """Return the time at which a client has a token of the step that has ended now."""
        return self.served(self.api.token_us)

    def move(self, seconds: float) -> None:
        """Go on to a time, with all calls before it."""
        with self._lock:
            while self._calls and self._calls[0][0] <= seconds:
                when, _, call = heapq.heappop(self._calls)
                self.now = max(self.now, when)
                call()
            self.now = max(self.now, seconds)

    def skip(self) -> bool:
        """Go on to the next call, as nothing runs before it; return False if there is none."""
        if self._calls:
            self.move(self._calls[0][0])
            return True
        return False


class ModelledRanks(Executor):
    """Ranks that compute nothing: a step ends its modelled time after it was sent and the one before has ended.

    unknown: the first step without a time.
    """

    def __init__(self, config: EngineConfig, groups: Sequence[CacheGroup], us: StepUs, clock: Clock):
        super().__init__(config)
        self._of_start, self._us, self._clock = tuple(groups), us, clock
        self._busy_until = 0.0
        self.steps, self.unknown = 0, ""
        self._sent: deque[tuple[Step, float]] = deque()
        self._lengths: list[dict[int, int]] = [{} for _ in range(config.attn_dp)]  # tokens of each row, by DP group

    def plan(self, model: Any) -> None:
        """Plan nothing: times are given, and a layout was planned when it was found."""

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
        self._busy_until = self._clock.begin(self._busy_until) + us / 1e6
        self._sent.append((step, self._busy_until))
        self.steps += 1

    def collect(self) -> list[Result]:
        """End the oldest step: move the clock."""
        step, ended = self._sent.popleft()
        self._clock.move(ended)
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
        decode, prompts = len(rows.decode_rows), max(1, len(rows.chunks))
        return StepShape(decode, context / max(1, decode), prompt, cached / max(1, prompt), prompts)

    def report(self) -> None: ...
    def idle(self) -> None: ...
    def _launch(self, poll: Callable[[], None]) -> None: ...
    def _stop_ranks(self, grace_s: float) -> None: ...
    def _send(self, rank: int, message: Any) -> None: ...
    def _receive(self) -> None: ...
    def _dead(self, *, killed: bool = False) -> None: ...


class SlowRanks(ModelledRanks):
    """Ranks that compute nothing for SLOW_S, so that each token is written by itself."""

    def collect(self) -> list[Result]:
        """End the oldest step."""
        time.sleep(SLOW_S)
        return super().collect()


def slow_engine() -> Engine:
    """Return an engine of the embedded model, with ranks that compute nothing."""
    config = EngineConfig(device="cpu", cpu_bind="off", threads=1)
    groups = (CacheGroup(Rule(), config.num_pages),)
    return Engine(config, executor=lambda given: SlowRanks(given, groups, lambda shapes: 0.0, Clock()))


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
    """Clients of a load against one engine: a closed loop, or one that sends requests as they were recorded.

    Args:
        requests: number of all requests, unless the load has arrivals.
        vocabulary: number of the model's tokens.
        now: returns the seconds at which a request is sent.
        seed: of the prompts.
        clock: of a simulation; None: an engine runs the load, and all times are `now`'s.
    """

    def __init__(
        self,
        load: ClientLoad,
        requests: int,
        vocabulary: int,
        now: Callable[[], float],
        seed: int = 0,
        clock: Clock | None = None,
    ):
        sizes = [(each.input_len, each.output_len) for each in load.arrivals]
        self._sizes = deque(sizes or [(load.input_len, load.output_len)] * requests)
        self._load, self._now, self._clock, self._vocabulary = load, now, clock, vocabulary
        self._random, self._open, self.ended = Random(seed), len(self._sizes), threading.Event()
        self._live = 0  # requests that the engine has
        self._shared = self._tokens(int(load.input_len * load.shared_prefix))
        self.times: list[list[float]] = []  # seconds of each request: of its sending, and of its tokens
        self.submit: Callable[[Sequence[Request]], object] = lambda requests: None

    def begin(self) -> None:
        """Send the first request of each client, or schedule all recorded ones; without a clock all are sent now."""
        if self._load.arrivals and self._clock is not None:
            for each in self._load.arrivals:
                self._clock.at(each.seconds, self._send) if each.seconds else self._send()
        else:
            self._send(len(self._sizes) if self._load.arrivals else min(self._load.concurrency, len(self._sizes)))
        self._skip()

    def _skip(self) -> None:
        """Go on to the next request that the engine gets, if it has none: it arrives, then the server reads it."""
        while self._clock is not None and not self._live and self._clock.skip():
            pass

    def _send(self, count: int = 1) -> None:
        requests = [self._request() for _ in range(count)]
        if self._clock is not None and self._clock.api.http and self._clock.api.request_us:
            for each in requests:
                self._clock.request(partial(self._submit, [each]))
            return
        if self._clock is not None:
            self._clock.served(count * self._clock.api.request_us)
        self._submit(requests)  # all at once, as they are sent at the same time

    def _submit(self, requests: Sequence[Request]) -> None:
        self._live += len(requests)
        self.submit(requests)

    def _request(self) -> Request:
        input_len, output_len = self._sizes.popleft()
        times = [self._now()]
        self.times.append(times)

        def callback(output: RequestOutput) -> None:
            _, token, _, end = output.take_token()
            if token is not None:
                times.append(self._now() if self._clock is None else self._clock.token())
            if end is not None:
                self._open, self._live = self._open - 1, self._live - 1
                if self._sizes and not self._load.arrivals:
                    self._send()
                if not self._open:
                    self.ended.set()
                else:
                    self._skip()

        own = self._tokens(max(1, input_len - len(self._shared)))
        params = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
        return [*self._shared[: input_len - 1], *own][:input_len], params, callback

    def _tokens(self, count: int) -> list[int]:
        # The same numbers as by `randrange`, in a third of its time.
        numbers = iter(partial(self._random.getrandbits, self._vocabulary.bit_length()), None)
        return list(islice((token for token in numbers if token < self._vocabulary), count))


def simulate(
    config: EngineConfig,
    groups: Sequence[CacheGroup],
    load: ClientLoad,
    us: StepUs,
    requests: int,
    api: ApiTimes = NO_API,
) -> LoadFigures:
    """Return the figures of one server under a load.

    config, groups: options and cache groups of its ranks. us: times of steps. requests: number of all requests. api:
    time of the HTTP server.
    """
    ranks, clock = list[ModelledRanks](), Clock(api)

    def make(given: EngineConfig) -> ModelledRanks:
        ranks.append(ModelledRanks(given, groups, us, clock))
        return ranks[0]

    waiting = max(config.max_waiting, load.concurrency, len(load.arrivals))
    many = replace(config, max_waiting=waiting, max_choices=max(1, load.concurrency))
    with Engine(many, executor=make) as engine:
        clients = Clients(load, requests, engine.model_config.vocab_size, lambda: clock.now, clock=clock)
        clients.submit = engine.submit_all
        clients.begin()
        if not clients.ended.wait(WAIT_S):
            raise TimeoutError(f"the simulation of {requests} requests did not end in {WAIT_S:.0f} s")
        preemptions = engine.stats().preemptions
    ttft, itl, rate = figures(clients.times, 0.0)
    return LoadFigures(rate, ttft, itl, clock.now, ranks[0].steps, preemptions, ranks[0].unknown)


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
