"""Start and stop of ranks: as processes, or as threads of this process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from weft.comm.reference import ReferenceTransport, ReferenceWorld
from weft.engine.config.config import EngineConfig
from weft.engine.controller.executor import Executor, Gone
from weft.engine.controller.process_executor import HostsExecutor, ProcessExecutor
from weft.engine.messages.rank_messages import Failure, FromRank, Stop, ToRank
from weft.engine.models.config_json.fields import ModelError
from weft.engine.processes.rank_processes import POLL_S
from weft.engine.worker.worker import Worker, failure
from weft.planner.cost import costs
from weft.planner.spec import LayoutError


class ThreadExecutor(Executor):
    """Ranks as threads of this process on the reference transport, for tests and debugging."""

    _world: ReferenceWorld | None = None

    def _launch(self, poll: Callable[[], None]) -> None:
        self._world = world = ReferenceWorld(self.mesh.world, timeout_s=self.config.step_timeout_s)
        self._inbox: queue.Queue[FromRank] = queue.Queue()
        self._outboxes: list[queue.Queue[ToRank]] = [queue.Queue() for _ in range(self.mesh.world)]
        # Each start has its own queues and world, so that late threads of an earlier start are not heard.
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

        def next_message() -> ToRank:
            with world.compute_lock.waiting():
                return receive()

        try:
            with world.compute_lock.computing():
                Worker(self.config, [transport], costs("cpu"), send).serve(next_message, send)
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

    def _dead(self, *, killed: bool = False) -> Gone | None:
        return None  # a failing thread reports itself

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
    """Return the executor named by the configuration."""
    if config.executor == "thread":
        return ThreadExecutor(config)
    return ProcessExecutor(config) if config.master_addr is None else HostsExecutor(config)
