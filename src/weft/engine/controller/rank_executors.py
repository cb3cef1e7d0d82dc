"""How ranks are started and stopped: as processes, or as threads of this one."""

from __future__ import annotations

import json
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from weft.comm.reference import ReferenceTransport, ReferenceWorld
from weft.engine.config import EngineConfig, EngineError
from weft.engine.controller.executor import LOAD_TIMEOUT_S, POLL_S, Executor
from weft.engine.controller.fork_client import ForkServer, RankProcess
from weft.engine.messages import Failure, FromRank, Stop, ToRank, decode_from_rank, encode
from weft.engine.worker.worker import Worker, failure
from weft.models.model_config import ModelError
from weft.place.cost import costs
from weft.place.spec import LayoutError


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

    def _send_all(self, message: ToRank) -> None:
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
