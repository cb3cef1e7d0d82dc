"""How ranks are started, stepped and stopped: as processes, or as threads of this one."""

from __future__ import annotations

import json
import queue
import shutil
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import zmq

from weft.comm.reference import ReferenceTransport, ReferenceWorld
from weft.engine.config import EngineConfig, EngineError
from weft.engine.forkserver import ForkServer, RankProcess
from weft.engine.messages import (
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
    Stop,
    StopProfile,
    ToRank,
    decode_from_rank,
    encode,
)
from weft.engine.worker import Worker, failure
from weft.kv.spec import CacheGroup
from weft.models.config import ModelError
from weft.place.cost import costs
from weft.place.plan import Counts
from weft.place.spec import LayoutError

M = TypeVar("M", Result, Report, PlanText, Profiled, Ready)
POLL_S = 0.2
LOAD_TIMEOUT_S = 600.0
REPORT_S = 5.0
"""How often rank 0 says what it has run, while steps are sent."""


class Executor(ABC):
    """The controller's end of all ranks. Methods raise EngineError with one line when a rank fails or is lost."""

    def __init__(self, config: EngineConfig):
        self.config, self.mesh = config, config.mesh
        self._interrupted = threading.Event()
        self.groups: tuple[CacheGroup, ...] = ()
        """Of the model's caches; known once `start` has returned."""
        self.reported = Report((), ())
        """What rank 0 said last of what it has run; may be read on any thread."""
        self._reports_due, self._asked_at, self._news = 0, 0.0, False  # news: steps were sent since it was asked
        self._under_way: deque[tuple[int, Counts, float]] = deque()  # steps that were not collected, and until when
        self._results: list[deque[Result]] = []  # of each rank, those that came and were not collected

    def prepare(self) -> None:
        """Begins what takes long and needs no rank; `start` waits for it."""
        return

    def start(
        self, progress: Callable[[str, float], None] | None = None, poll: Callable[[], None] = lambda: None
    ) -> None:
        """Starts the ranks, anew where there are some, and waits until all have loaded. progress(what, fraction).

        poll: called several times a second meanwhile; what it raises ends the start. Raises ModelError or LayoutError
        where the user can put it right, else EngineError; then no rank is left.
        """
        loaded = dict.fromkeys(range(self.mesh.world), 0.0)
        self._stop_ranks(grace_s=0)
        self._under_way.clear()
        self._reports_due, self._news = 0, False
        self._results = [deque() for _ in range(self.mesh.world)]
        try:
            self._launch(poll)
            ready, deadline = 0, time.monotonic() + LOAD_TIMEOUT_S
            while ready < self.mesh.world:
                message = self._next(deadline, "loading", poll)
                if isinstance(message, Progress):
                    loaded[message.rank] = message.done / message.total
                    if progress:
                        progress(message.what, sum(loaded.values()) / len(loaded))
                if isinstance(message, Ready):
                    ready, self.groups = ready + 1, message.groups
            self.config = self.config.with_cache(self.groups)  # ranks that are started anew make one of the same size
        except BaseException:
            self._stop_ranks(grace_s=0)
            raise

    def send(self, step: Step) -> None:
        """Has every rank run a step, after those that were sent before."""
        now = time.monotonic()
        deadline = now + self.config.step_timeout_s * (1 + len(self._under_way))
        self._under_way.append((step.number, step.counts, deadline))
        self._tell_all(step)
        self._news = True
        if now >= self._asked_at + REPORT_S:
            self._ask_report()

    def collect(self) -> list[Result]:
        """Waits for the oldest step under way; gives each DP group's result, in group order.

        Raises EngineError also where ranks did not all execute this step, with these counts, by the same plan, or drew
        other tokens than the others of their group.
        """
        number, counts, deadline = self._under_way[0]
        while not all(self._results):
            result = self._await(Result, deadline, f"step {number}")
            self._results[result.rank].append(result)
        self._under_way.popleft()
        results = [each.popleft() for each in self._results]
        leaders = [results[self.mesh.leader(g)] for g in range(self.mesh.attn_dp)]
        for rank, result in enumerate(results):
            drawn = leaders[self.mesh.group_of(rank)].ran.tokens
            asked = Ran(number, counts, results[0].ran.plan, drawn)
            if result.ran != asked:
                raise EngineError(f"ranks diverge: rank {rank} ran {result.ran}, where {asked} was due, as on others")
        return leaders

    def report(self) -> None:
        """Has rank 0 tell what it has run and what the naive plan would have moved, and waits until it has."""
        self._ask_report()
        deadline = time.monotonic() + self.config.step_timeout_s
        while self._reports_due:
            self._note(self._await(Report, deadline, "the report"))

    def _ask_report(self) -> None:
        self._reports_due, self._asked_at, self._news = self._reports_due + 1, time.monotonic(), False
        self._send(0, AskReport())

    def _note(self, report: Report) -> None:
        self._reports_due, self.reported = self._reports_due - 1, report

    def plan_text(self, tokens: int) -> str:
        """The plan for so many tokens in each DP group, printable."""
        self._send(0, AskPlan(tokens))
        return self._await(PlanText, time.monotonic() + self.config.step_timeout_s, "the plan").text

    def ask_all(self, question: StartProfile | StopProfile, what: str) -> list[Profiled]:
        """Every rank's answer, in any order. what: is waited for."""
        for rank in range(self.mesh.world):
            self._send(rank, question)
        deadline = time.monotonic() + LOAD_TIMEOUT_S  # a profiler's start and a long trace take their time
        return [self._await(Profiled, deadline, what) for _ in range(self.mesh.world)]

    def interrupt(self) -> None:
        """Ends what waits for an answer of the ranks with an EngineError, now and from now on; from any thread."""
        self._interrupted.set()

    def check(self) -> None:
        """Raises EngineError where a rank is gone."""
        if dead := self._dead():
            raise EngineError(dead)

    def idle(self) -> None:
        """To be called now and then while no step is sent: looks after the ranks, and has reported what they ran."""
        self.check()
        if self._news:
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
        while True:
            message = self._receive()
            if isinstance(message, Failure):
                raise self._cause(message)
            self._go_on(deadline, what, poll)
            if message is not None:
                return message
            self.check()

    def _go_on(self, deadline: float, what: str, poll: Callable[[], None]) -> None:
        """To be called while waiting. Raises EngineError where there is no use in that any more."""
        poll()
        if self._interrupted.is_set():
            raise EngineError(f"interrupted while waiting for {what}")
        if time.monotonic() > deadline:
            raise EngineError(f"no answer from the ranks for {what} in time; see step_timeout_s")

    def _cause(self, first: Failure) -> Exception:
        """The error that explains a failure. One rank's fault fails its peers too: a killed rank comes before all,
        then one that failed by itself, whoever's message was here first."""
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

    def _tell_all(self, message: ToRank) -> None:
        for rank in range(self.mesh.world):
            self._send(rank, message)

    @abstractmethod
    def _receive(self) -> FromRank | None:
        """The next message; None where none came within POLL_S."""

    @abstractmethod
    def _dead(self, *, killed: bool = False) -> str | None:
        """One line about a rank that is gone, or None. killed: only about one that a signal ended."""

    def close(self, grace_s: float = 5.0) -> None:
        """Stops every rank; nothing is left of them. May be called twice.

        grace_s: how long they may take to leave by themselves; they hold nothing that would be lost.
        """
        self._stop_ranks(grace_s)


class ProcessExecutor(Executor):
    """One process a rank, transports between them, ZeroMQ to here; all files in one private folder."""

    def __init__(self, config: EngineConfig):
        super().__init__(config)
        self._server: ForkServer | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._outboxes: list[zmq.Socket[bytes]] = []
        self.processes: list[RankProcess] = []
        self._starts = 0

    def prepare(self) -> None:
        if self._server is None or not self._server.alive:
            self.close()  # what is left of one that was killed
            self._directory = Path(tempfile.mkdtemp(prefix="weft-"))
            self._server = ForkServer(self._directory)

    def _launch(self, poll: Callable[[], None]) -> None:
        self.prepare()
        assert self._server is not None
        self._starts, self.processes, self._outboxes = self._starts + 1, [], []
        self._run = run = self._directory / str(self._starts)
        run.mkdir()
        (run / "config.json").write_text(json.dumps(self.config.to_dict()))
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.setsockopt(zmq.RCVTIMEO, int(POLL_S * 1000))  # a poll before each message would take twice the time
        try:
            self._inbox.bind(f"ipc://{run}/from")
        except zmq.ZMQError as error:  # the path of a socket is short; TMPDIR may be long
            raise EngineError(f"no sockets in {self._directory}: {error.strerror}; set TMPDIR to another") from error
        for rank in range(self.mesh.world):
            outbox = self._context.socket(zmq.PUSH)
            # The rank binds and this end connects: a PUSH socket that binds blocks once its only peer is dead.
            outbox.connect(f"ipc://{run}/to-{rank}")
            self._outboxes.append(outbox)
            self._server.request(run, rank)
        deadline = time.monotonic() + LOAD_TIMEOUT_S
        while len(self.processes) < self.mesh.world:
            process = self._server.forked(len(self.processes), POLL_S)
            if process is not None:
                self.processes.append(process)
            self._go_on(deadline, "the start", poll)

    def _send(self, rank: int, message: ToRank) -> None:
        self._outboxes[rank].send(encode(message))

    def _tell_all(self, message: ToRank) -> None:
        encoded = encode(message)
        for outbox in self._outboxes:
            outbox.send(encoded)

    def _receive(self) -> FromRank | None:
        try:
            return decode_from_rank(self._inbox.recv())
        except zmq.Again:
            return None

    def _dead(self, *, killed: bool = False) -> str | None:
        # A killed rank is the cause where others failed after it: look for signals first.
        gone = [(r, code) for r, p in enumerate(self.processes) if (code := p.poll()) is not None]
        gone = [(r, code) for r, code in gone if code < 0 or not killed]
        for rank, code in sorted(gone, key=lambda g: g[1]):
            log = self._run / f"rank-{rank}.log"
            lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            return f"rank {rank} {how}" + (f": {lines[-1]}" if lines else "")
        return None

    def _stop_ranks(self, grace_s: float) -> None:
        if self._context is None:
            return
        for rank, process in enumerate(self.processes):
            if grace_s and process.poll() is None:
                self._send(rank, Stop())
        deadline = time.monotonic() + grace_s
        for process in self.processes:
            if process.wait(max(0.0, deadline - time.monotonic())) is None:
                process.kill()
                process.wait()
        self._context.destroy(linger=0)
        shutil.rmtree(self._run, ignore_errors=True)
        self._context = None
        if len(self.processes) < self.mesh.world and self._server is not None:
            self._server.close()  # it may still fork ranks that were asked for: they must not be taken for later ones

    def close(self, grace_s: float = 5.0) -> None:
        self._stop_ranks(grace_s)
        if self._server is not None:
            self._server.close()
            shutil.rmtree(self._directory, ignore_errors=True)  # where the server was killed, it could not
        self._server = None


class ThreadExecutor(Executor):
    """Ranks as threads of this process on the reference transport: for tests and for looking closely."""

    _world: ReferenceWorld | None = None

    def _launch(self, poll: Callable[[], None]) -> None:
        self._world = world = ReferenceWorld(self.mesh.world, timeout_s=self.config.step_timeout_s)
        self._inbox: queue.Queue[FromRank] = queue.Queue()
        self._outboxes: list[queue.Queue[ToRank]] = [queue.Queue() for _ in range(self.mesh.world)]
        # Each has its own queues and world: one of an earlier start that is late must not be heard in this one.
        self._threads = [
            threading.Thread(
                target=self._rank_main, args=(world, t, outbox.get, self._inbox.put), name=f"rank-{t.rank}", daemon=True
            )
            for t, outbox in zip(world.transports(), self._outboxes, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def _rank_main(
        self,
        world: ReferenceWorld,
        transport: ReferenceTransport,
        receive: Callable[[], ToRank],
        send: Callable[[FromRank], None],
    ) -> None:
        rank = transport.rank
        try:
            Worker(self.config, [transport], costs("cpu"), send).serve(receive, send)
        except (LayoutError, ModelError) as error:
            send(Failure(rank, str(error), user=True))
        except Exception as error:
            send(failure(rank, error))
            world.abort()

    def _send(self, rank: int, message: ToRank) -> None:
        self._outboxes[rank].put(message)

    def _receive(self) -> FromRank | None:
        try:
            return self._inbox.get(timeout=POLL_S)
        except queue.Empty:
            return None

    def _dead(self, *, killed: bool = False) -> str | None:
        return None  # a thread that fails says so itself

    def _stop_ranks(self, grace_s: float) -> None:
        if self._world is None:
            return
        if not grace_s:
            self._world.abort()
        for rank in range(self.mesh.world):
            self._send(rank, Stop())
        for thread in self._threads:
            thread.join(timeout=5)
        self._world.abort()
        self._world = None


def make_executor(config: EngineConfig) -> Executor:
    """The executor that the configuration names."""
    return ProcessExecutor(config) if config.executor == "process" else ThreadExecutor(config)
