"""The controller's end of all ranks: sends them messages, and waits for their replies with a deadline."""

from __future__ import annotations

import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from weft.engine.config.config import EngineConfig, EngineError
from weft.engine.kv.cache_spec import CacheGroup
from weft.engine.messages.rank_messages import (
    AskPlan,
    AskReport,
    Failure,
    FromRank,
    PlanText,
    Profiled,
    Progress,
    Ran,
    Ready,
    Report,
    Result,
    StartProfile,
    Step,
    StopProfile,
    ToRank,
)
from weft.engine.models.model_config import ModelError
from weft.engine.processes.rank_processes import POLL_S
from weft.planner.chain import Counts

M = TypeVar("M", Result, Report, PlanText, Profiled, Ready)
LOAD_TIMEOUT_S = 600.0
REPORT_S = 5.0
"""How often rank 0 sends a report, while steps are sent."""


class Executor(ABC):
    """The controller's end of all ranks. Methods raise EngineError with one line when a rank fails or is lost."""

    def __init__(self, config: EngineConfig):
        self.config, self.mesh = config, config.mesh
        self._interrupted = threading.Event()
        self.groups: tuple[CacheGroup, ...] = ()
        """Of the model's caches; known once `start` has returned."""
        self.reported = Report((), ())
        """The last report of rank 0; any thread may read it."""
        self._reports_due, self._asked_at, self._unreported = 0, 0.0, False
        self._in_flight: deque[tuple[int, Counts, float]] = deque()  # steps that were not collected, with deadlines
        self._results: list[deque[Result]] = []  # of each rank, results that were not collected

    def prepare(self) -> None:
        """Begins slow preparations that need no rank; `start` waits for them."""
        return

    def start(
        self, progress: Callable[[str, float], None] | None = None, poll: Callable[[], None] = lambda: None
    ) -> None:
        """Starts the ranks, or restarts them, and waits until all have loaded.

        Raises ModelError or LayoutError where the user can put it right, else EngineError; then no rank is left.

        Args:
            progress: called with what is done, and the fraction of it.
            poll: called several times a second; what it raises ends the start.
        """
        loaded = dict.fromkeys(range(self.mesh.world), 0.0)
        self._progress = progress or (lambda what, part: None)
        self._stop_ranks(grace_s=0)
        self._in_flight.clear()
        self._reports_due, self._unreported = 0, False
        self._results = [deque() for _ in range(self.mesh.world)]
        try:
            self._launch(poll)
            ready, deadline = dict[int, Ready](), time.monotonic() + LOAD_TIMEOUT_S
            while len(ready) < self.mesh.world:
                poll()
                message = self._next(deadline, "loading", poll)
                if isinstance(message, Progress):
                    loaded[message.rank] = message.done / message.total
                    self._progress(message.what, sum(loaded.values()) / len(loaded))
                if isinstance(message, Ready):
                    ready[message.rank] = message
            self.groups = ready[0].groups
            _compare_plans(ready)
            self.config = self.config.with_cache(self.groups)  # ranks that are started anew make one of the same size
        except BaseException:
            self._stop_ranks(grace_s=0)
            raise

    def send(self, step: Step) -> None:
        """Sends a step to every rank, behind those that were sent before."""
        now = time.monotonic()
        deadline = now + self.config.step_timeout_s * (1 + len(self._in_flight))
        self._in_flight.append((step.number, step.counts, deadline))
        self._send_all(step)
        self._unreported = True
        if now >= self._asked_at + REPORT_S:
            self._ask_report()

    def collect(self) -> list[Result]:
        """Waits for the oldest step under way. Returns each DP group's result, in group order.

        Raises EngineError also where a rank ran another step, other counts or another plan, or sampled other tokens
        than the others of its group.
        """
        number, counts, deadline = self._in_flight[0]
        while not all(self._results):
            result = self._await(Result, deadline, f"step {number}")
            self._results[result.rank].append(result)
        self._in_flight.popleft()
        results = [each.popleft() for each in self._results]
        leaders = [results[self.mesh.leader(g)] for g in range(self.mesh.attn_dp)]
        for rank, result in enumerate(results):
            sampled = leaders[self.mesh.group_of(rank)].ran.tokens
            asked = Ran(number, counts, results[0].ran.plan, sampled)
            if result.ran != asked:
                raise EngineError(f"ranks diverge: rank {rank} ran {result.ran}, where {asked} was due, as on others")
        return leaders

    def report(self) -> None:
        """Requests a report of rank 0 and waits for it."""
        self._ask_report()
        deadline = time.monotonic() + self.config.step_timeout_s
        while self._reports_due:
            self._note(self._await(Report, deadline, "the report"))

    def _ask_report(self) -> None:
        self._reports_due, self._asked_at, self._unreported = self._reports_due + 1, time.monotonic(), False
        self._send(0, AskReport())

    def _note(self, report: Report) -> None:
        self._reports_due, self.reported = self._reports_due - 1, report

    def plan_text(self, tokens: int) -> str:
        """The plan for so many tokens in each DP group, printable."""
        self._send(0, AskPlan(tokens))
        return self._await(PlanText, time.monotonic() + self.config.step_timeout_s, "the plan").text

    def ask_all(self, question: StartProfile | StopProfile, what: str) -> list[Profiled]:
        """Sends a question to every rank. Returns their replies, in any order. what: is waited for, in errors."""
        for rank in range(self.mesh.world):
            self._send(rank, question)
        deadline = time.monotonic() + LOAD_TIMEOUT_S  # a profiler's start and a long trace take their time
        return [self._await(Profiled, deadline, what) for _ in range(self.mesh.world)]

    def interrupt(self) -> None:
        """Ends every wait for replies, now and from now on, with an EngineError; from any thread."""
        self._interrupted.set()

    def check(self) -> None:
        """Raises EngineError where a rank is gone."""
        if dead := self._dead():
            raise EngineError(dead)

    def idle(self) -> None:
        """Checks the ranks and keeps the report fresh; call it now and then while no step is sent."""
        self.check()
        if self._unreported:
            self.report()

    def _await(self, kind: type[M], deadline: float, what: str) -> M:
        while not isinstance(message := self._next(deadline, what), kind):
            if isinstance(message, Report):
                self._note(message)
            elif isinstance(message, Result):
                self._results[message.rank].append(message)
            else:
                raise EngineError(f"a rank sent {type(message).__name__} while the controller waited for {what}")
        return message

    def _next(self, deadline: float, what: str, poll: Callable[[], None] = lambda: None) -> FromRank:
        while (message := self._receive()) is None:
            self._go_on(deadline, what, poll)
            self.check()
        if isinstance(message, Failure):
            raise self._cause(message)
        return message

    def _go_on(self, deadline: float, what: str, poll: Callable[[], None]) -> None:
        """Call it while waiting. Raises EngineError where waiting is of no use any more."""
        poll()
        if self._interrupted.is_set():
            raise EngineError(f"interrupted while waiting for {what}")
        if time.monotonic() > deadline:
            raise EngineError(f"no reply from the ranks for {what} in time; see step_timeout_s")

    def _cause(self, first: Failure) -> Exception:
        """The error behind a failure. One rank's fault makes its peers fail too, in any order. A killed rank comes
        first, then one that failed by itself.
        """
        failures, deadline = [first], time.monotonic() + POLL_S
        while time.monotonic() < deadline:
            message = self._receive()
            if isinstance(message, Failure):
                failures.append(message)
        cause = min(failures, key=lambda f: f.lost_peer)
        if cause.user:
            return ModelError(cause.text)
        return EngineError(self._dead(killed=True) or f"rank {cause.rank} failed: {cause.text}")

    @abstractmethod
    def _launch(self, poll: Callable[[], None]) -> None: ...

    @abstractmethod
    def _stop_ranks(self, grace_s: float) -> None: ...

    @abstractmethod
    def _send(self, rank: int, message: ToRank) -> None: ...

    def _send_all(self, message: ToRank) -> None:
        for rank in range(self.mesh.world):
            self._send(rank, message)

    @abstractmethod
    def _receive(self) -> FromRank | None:
        """The next message; None where none came within POLL_S."""

    @abstractmethod
    def _dead(self, *, killed: bool = False) -> str | None:
        """One line about a rank that has ended, or None. killed: only about one that a signal ended."""

    def close(self, grace_s: float = 5.0) -> None:
        """Stops every rank. May be called twice.

        grace_s: how long they may take to exit by themselves; they hold nothing that would be lost.
        """
        self._stop_ranks(grace_s)


def _compare_plans(ready: dict[int, Ready]) -> None:
    """Raises EngineError where a rank's plans differ from those of rank 0."""
    for rank, message in sorted(ready.items()):
        for found, asked in itertools.zip_longest(message.plans, ready[0].plans):
            if found != asked:
                raise EngineError(
                    f"ranks diverge: rank {rank} plans {found}, where rank 0 plans {asked}; "
                    "give all the same options, cost table and version of weft"
                )
