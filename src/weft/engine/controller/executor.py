"""The controller's end of all ranks: messages to them, and replies from them before a deadline."""

from __future__ import annotations

import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from weft.engine.config.config import EngineConfig, EngineError
from weft.engine.controller.startup import check_plans
from weft.engine.kv.cache_spec import CacheGroup
from weft.engine.messages import rank_messages as messages
from weft.engine.models.config_json.fields import ModelError
from weft.engine.models.layers.model_config import ModelConfig
from weft.engine.processes.rank_processes import POLL_S
from weft.planner.chain import Counts

Gone = tuple[str, tuple[int, ...]]
"""One line about ranks that have ended, and these ranks."""
M = TypeVar("M", messages.Result, messages.Report, messages.PlanText, messages.Profiled, messages.Ready)
LOAD_TIMEOUT_S = 600.0
REPORT_S = 5.0
"""Interval of rank 0's reports, while steps are sent."""


class Executor(ABC):
    """The controller's end of all ranks. Methods raise EngineError in one line when a rank fails or is lost."""

    def __init__(self, config: EngineConfig):
        self.config, self.mesh = config, config.mesh
        self._interrupted = threading.Event()
        self.groups: tuple[CacheGroup, ...] = ()
        """Groups of the model's caches; known once `start` has returned."""
        self.eager = ""
        """`Ready.eager`, known once `start` has returned."""
        self.reported = messages.Report((), ())
        """The last report of rank 0; any thread may read it."""
        self._reports_due, self._asked_at, self._unreported = 0, 0.0, False
        self._in_flight: deque[tuple[int, Counts, float]] = deque()  # steps not collected yet, with deadlines
        self._results: list[deque[messages.Result]] = []  # results of each rank, not collected yet

    def plan(self, model: ModelConfig) -> None:
        """Check that every step can be planned, before `start`. Raises errors as `check_plans`."""
        self.config = check_plans(self.config, model)

    def prepare(self) -> None:
        """Begin slow preparations that need no rank; `start` waits for them."""
        return

    def start(
        self, progress: Callable[[str, float], None] | None = None, poll: Callable[[], None] = lambda: None
    ) -> None:
        """Start or restart the ranks, and wait until all have loaded.

        Raises ModelError or LayoutError if the user can fix the cause, else EngineError; then no rank is left.

        Args:
            progress: called with the current activity and its fraction done.
            poll: called several times a second; an exception from it ends the start.
        """
        loaded = dict.fromkeys(range(self.mesh.world), 0.0)
        self._progress = progress or (lambda what, part: None)
        self._stop_ranks(grace_s=0)
        self._in_flight.clear()
        self._reports_due, self._unreported = 0, False
        self._results = [deque() for _ in range(self.mesh.world)]
        try:
            self._launch(poll)
            ready, deadline = dict[int, messages.Ready](), time.monotonic() + LOAD_TIMEOUT_S
            while len(ready) < self.mesh.world:
                poll()
                message = self._next(deadline, "loading", poll)
                if isinstance(message, messages.Progress):
                    loaded[message.rank] = message.done / message.total
                    self._progress(message.what, sum(loaded.values()) / len(loaded))
                if isinstance(message, messages.Ready):
                    ready[message.rank] = message
            self.groups, self.eager = ready[0].groups, ready[0].eager
            _compare_plans(ready)
            self.config = self.config.with_cache(self.groups)  # restarted ranks allocate the same size
        except BaseException:
            self._stop_ranks(grace_s=0)
            raise

    def resize(self, config: EngineConfig) -> None:
        """Stop the ranks. The next `start` starts the ranks of this configuration."""
        self._stop_ranks(grace_s=0)
        self.config, self.mesh = config, config.mesh

    def send(self, step: messages.Step) -> None:
        """Send a step to every rank, behind earlier steps."""
        now = time.monotonic()
        deadline = now + self.config.step_timeout_s * (1 + len(self._in_flight))
        self._in_flight.append((step.number, step.counts, deadline))
        self._send_all(step)
        self._unreported = True
        if now >= self._asked_at + REPORT_S:
            self._ask_report()

    def collect(self) -> list[messages.Result]:
        """Wait for the oldest step in flight. Returns each DP group's result, in group order.

        Raises EngineError also if a rank ran another step, other counts or another plan, or sampled other tokens than
        its group.
        """
        number, counts, deadline = self._in_flight[0]
        while not all(self._results):
            result = self._await(messages.Result, deadline, f"step {number}")
            self._results[result.rank].append(result)
        self._in_flight.popleft()
        results = [queue.popleft() for queue in self._results]
        leaders = [results[self.mesh.leader(g)] for g in range(self.mesh.attn_dp)]
        for rank, result in enumerate(results):
            sampled = leaders[self.mesh.group_of(rank)].ran.tokens
            due = messages.Ran(number, counts, results[0].ran.plan, sampled)
            if result.ran != due:
                raise EngineError(f"ranks diverge: rank {rank} ran {result.ran}, where {due} was due, as on others")
        return leaders

    def report(self) -> None:
        """Request a report of rank 0 and wait for it."""
        self._ask_report()
        deadline = time.monotonic() + self.config.step_timeout_s
        while self._reports_due:
            self._note(self._await(messages.Report, deadline, "the report"))

    def _ask_report(self) -> None:
        self._reports_due, self._asked_at, self._unreported = self._reports_due + 1, time.monotonic(), False
        self._send(0, messages.AskReport())

    def _note(self, report: messages.Report) -> None:
        self._reports_due, self.reported = self._reports_due - 1, report

    def plan_text(self, tokens: int) -> str:
        """Return the plan for this number of tokens per DP group, as printable text."""
        self._send(0, messages.AskPlan(tokens))
        return self._await(messages.PlanText, time.monotonic() + self.config.step_timeout_s, "the plan").text

    def ask_all(self, question: messages.StartProfile | messages.StopProfile, what: str) -> list[messages.Profiled]:
        """Send a question to every rank. Returns their replies, in any order. what: name of the replies in errors."""
        for rank in range(self.mesh.world):
            self._send(rank, question)
        deadline = time.monotonic() + LOAD_TIMEOUT_S  # a profiler's start and a long trace are slow
        return [self._await(messages.Profiled, deadline, what) for _ in range(self.mesh.world)]

    def interrupt(self) -> None:
        """End every current and later wait for replies with an EngineError. May be called on any thread."""
        self._interrupted.set()

    def check(self) -> None:
        """Raise EngineError if a rank is gone."""
        if dead := self._dead():
            raise EngineError(*dead)

    def idle(self) -> None:
        """Check the ranks and refresh the report. Call it now and then while no step is sent."""
        self.check()
        if self._unreported:
            self.report()

    def _await(self, kind: type[M], deadline: float, what: str) -> M:
        while not isinstance(message := self._next(deadline, what), kind):
            if isinstance(message, messages.Report):
                self._note(message)
            elif isinstance(message, messages.Result):
                self._results[message.rank].append(message)
            else:
                raise EngineError(f"a rank sent {type(message).__name__} while the controller waited for {what}")
        return message

    def _next(self, deadline: float, what: str, poll: Callable[[], None] = lambda: None) -> messages.FromRank:
        while (message := self._receive()) is None:
            self._check_wait(deadline, what, poll)
            self.check()
        if isinstance(message, messages.Failure):
            raise self._cause(message)
        return message

    def _check_wait(self, deadline: float, what: str, poll: Callable[[], None]) -> None:
        """Raise EngineError if waiting any longer is useless. Call it while waiting."""
        poll()
        if self._interrupted.is_set():
            raise EngineError(f"interrupted while waiting for {what}")
        if time.monotonic() > deadline:
            raise EngineError(f"no reply from the ranks for {what} in time; see step_timeout_s")

    def _cause(self, first: messages.Failure) -> Exception:
        """Return the error behind a failure: a killed rank's first, then one of a rank that failed by itself.

        One rank's fault makes its peers fail too, in any order.
        """
        failures, deadline = [first], time.monotonic() + POLL_S
        while time.monotonic() < deadline:
            message = self._receive()
            if isinstance(message, messages.Failure):
                failures.append(message)
        if lost := [failure for failure in failures if failure.lost_device]:
            line = "; ".join(f"rank {failure.rank} failed: {failure.text}" for failure in lost)
            return EngineError(line, tuple(sorted(failure.rank for failure in lost)), "devices")
        cause = min(failures, key=lambda f: f.lost_peer)
        if cause.user:
            return ModelError(cause.text)
        return EngineError(*(self._dead(killed=True) or (f"rank {cause.rank} failed: {cause.text}", (cause.rank,))))

    @abstractmethod
    def _launch(self, poll: Callable[[], None]) -> None: ...

    @abstractmethod
    def _stop_ranks(self, grace_s: float) -> None: ...

    @abstractmethod
    def _send(self, rank: int, message: messages.ToRank) -> None: ...

    def _send_all(self, message: messages.ToRank) -> None:
        for rank in range(self.mesh.world):
            self._send(rank, message)

    @abstractmethod
    def _receive(self) -> messages.FromRank | None:
        """Return the next message; None after POLL_S."""

    @abstractmethod
    def _dead(self, *, killed: bool = False) -> Gone | None:
        """Return a rank that has ended, or None. killed: only ranks ended by a signal count."""

    def close(self, grace_s: float = 5.0) -> None:
        """Stop every rank. May be called twice. grace_s: maximum seconds for ranks to exit by themselves."""
        self._stop_ranks(grace_s)


def _compare_plans(ready: dict[int, messages.Ready]) -> None:
    """Raise EngineError if a rank's plans differ from rank 0's."""
    for rank, message in sorted(ready.items()):
        for reported, due in itertools.zip_longest(message.plans, ready[0].plans):
            if reported != due:
                raise EngineError(
                    f"ranks diverge: rank {rank} plans {reported}, where rank 0 plans {due}; "
                    "give all the same options, cost table and version of weft"
                )
