"""An engine whose ranks are a fake device in this process: each token depends on all that its request's pages hold.

So a test of the engine's loop needs no model, decides when a step runs, and sees any wrong page, lost token or token
sampled twice in the output itself.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine.conftest import WAIT_S
from engine.fake import FakeDevice, Parts, expected_output
from weft.engine.config.config import EngineConfig, EngineError
from weft.engine.controller.engine import Engine
from weft.engine.controller.executor import Executor
from weft.engine.kv.cache_spec import CacheGroup, Rule
from weft.engine.messages.rank_messages import Ran, Result, Step
from weft.engine.messages.request import Output, SamplingParams, Sharing
from weft.engine.output.request_output import OutputCallback, RequestOutput


@dataclass
class Sent:
    """A step, by what its message means."""

    number: int
    groups: list[Parts]


class StubExecutor(Executor):
    """All ranks; they have a new, empty device each time that they start."""

    def __init__(self, config: EngineConfig, world: World):
        super().__init__(config)
        self.world = world
        self.groups = (CacheGroup(Rule(), config.num_pages),)

    def start(self, progress: Any = None, poll: Callable[[], None] = lambda: None) -> None:
        self.world.starts += 1
        self._wait(self.world.may_start, poll)
        self.sent: deque[Sent] = deque()
        self.devices = [FakeDevice(self.groups, self.config.page_size) for _ in range(self.config.attn_dp)]
        if self.world.fail(self, "start"):
            raise EngineError("rank 1 failed: no start today")

    def _wait(self, event: threading.Event, poll: Callable[[], None] = lambda: None) -> None:
        for _ in range(int(WAIT_S / 0.01)):
            poll()
            if self._interrupted.is_set():
                raise EngineError("interrupted")
            if event.wait(0.01):
                return
        raise AssertionError("a test waited too long")

    def send(self, step: Step) -> None:
        takes = zip(self.devices, step.groups, strict=True)
        self.sent.append(Sent(step.number, [device.take(rows) for device, rows in takes]))
        self.world.steps.append(self.sent[-1])

    def collect(self) -> list[Result]:
        self._wait(self.world.go)
        step = self.sent.popleft()
        self.world.run += 1
        if self.world.fail(self, "before"):
            raise EngineError("rank 1 was killed by signal 9")
        sampled = [device.run(parts) for device, parts in zip(self.devices, step.groups, strict=True)]
        if self.world.fail(self, "after"):
            raise EngineError("rank 2 was killed by signal 9")
        ran = Ran(step.number, tuple(parts.count for parts in step.groups), 0, 0)
        of_groups = enumerate(zip(step.groups, sampled, strict=True))
        return [Result(self.mesh.leader(g), ran, scored=parts.scored, **tokens) for g, (parts, tokens) in of_groups]

    def report(self) -> None: ...

    def idle(self) -> None:
        if self.world.fail(self, "idle"):
            raise EngineError("rank 3 was killed by signal 9")

    def close(self, grace_s: float = 5.0) -> None:
        self.world.closes += 1

    def _launch(self, poll: Any) -> None: ...
    def _stop_ranks(self, grace_s: float) -> None: ...
    def _send(self, rank: int, message: Any) -> None: ...
    def _receive(self) -> None: ...
    def _dead(self, *, killed: bool = False) -> None: ...


class World:
    """State that a test sees and controls.

    steps: the steps that were sent; run: how many of them have run. go: steps run while it is set; may_start: ranks
    start while it is.

    fail(executor, when): whether a rank dies there: at its "start", "before" or "after" a step has run, or "idle".
    """

    def __init__(self, model_dir: Path, monkeypatch: pytest.MonkeyPatch):
        self.go, self.may_start = threading.Event(), threading.Event()
        self.go.set()
        self.may_start.set()
        self.steps: list[Sent] = []
        self.starts = self.closes = self.run = 0
        self.fail: Callable[[StubExecutor, str], bool] = lambda executor, when: False
        self._model_dir = model_dir
        monkeypatch.setattr("weft.engine.controller.engine.make_executor", lambda config: StubExecutor(config, self))

    def engine(self, **changes: Any) -> Engine:
        values = dict(kv_tokens=512, page_size=4, max_batch_tokens=16, max_running=8)
        return Engine(EngineConfig(**dict(model=self._model_dir) | values | changes))


class Client:
    """Submits requests, and keeps what comes of them."""

    def __init__(self, engine: Engine, name: str = ""):
        self.engine, self.name = engine, name
        self.increments: dict[int, list[Output]] = {}
        self.prompts: dict[int, list[int]] = {}
        self.ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.at: list[int] = []

    def callback_for(self, at: int) -> OutputCallback:
        self.increments[at] = []

        def callback(output: RequestOutput) -> None:
            self.increments[at].append(increment := output.take())
            if increment.finish_reason:
                self.ended.put(at)

        return callback

    def ask(self, prompt: list[int], max_tokens: int, **options: Any) -> int:
        """Queue a request; return its place here."""
        at = len(self.increments)
        self.prompts[at] = prompt
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        self.at.append(self.engine.submit(prompt, params, self.callback_for(at), sharing=Sharing(self.name), **options))
        return at

    def ask_together(self, *asked: tuple[list[int], int]) -> None:
        """Queue requests that come in between the same two steps."""
        first = len(self.increments)
        self.prompts |= {first + i: prompt for i, (prompt, _) in enumerate(asked)}
        how = [SamplingParams(max_tokens=limit, temperature=0, ignore_eos=True) for _, limit in asked]
        callbacks = [self.callback_for(first + i) for i in range(len(asked))]
        self.at += self.engine.submit_all([(p, h, on) for (p, _), h, on in zip(asked, how, callbacks, strict=True)])

    def wait(self, count: int) -> list[int]:
        """Return the next `count` requests that end, in that order."""
        return [self.ended.get(timeout=WAIT_S) for _ in range(count)]

    def last(self, at: int) -> Output:
        return self.increments[at][-1]

    def tokens(self, at: int) -> list[int]:
        return [token for increment in self.increments[at] for token in increment.token_ids]

    def check_whole(self, at: int, max_tokens: int) -> None:
        """The output is what the request gets alone, every token once."""
        assert self.last(at).finish_reason == "length", self.last(at)
        assert self.tokens(at) == expected_output(self.prompts[at], max_tokens)
