"""The controller's end of ranks that are processes on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from weft.engine.config.config import EngineConfig
from weft.engine.controller.executor import LOAD_TIMEOUT_S, Executor, Gone
from weft.engine.messages.rank_messages import FromRank, ToRank, decode_from_rank, encode
from weft.engine.processes.fork_client import RankProcess
from weft.engine.processes.rank_processes import POLL_S, RankProcesses


class ProcessExecutor(Executor):
    """Ranks as processes on this machine."""

    def __init__(self, config: EngineConfig):
        super().__init__(config)
        self._local = RankProcesses()
        self._starts = 0

    @property
    def processes(self) -> list[RankProcess]:
        """Processes of the ranks on this machine."""
        return self._local.processes

    @property
    def directory(self) -> Path:
        """Private folder of the ranks' files, once `prepare` has run."""
        return self._local.directory

    def prepare(self) -> None:
        self._local.prepare()

    def _launch(self, poll: Callable[[], None]) -> None:
        self._starts += 1
        self._local.launch(self.config, self._starts, range(self.mesh.world))
        deadline = time.monotonic() + LOAD_TIMEOUT_S
        while not self._local.launched(POLL_S):
            self._check_wait(deadline, "the start", poll)

    def _send(self, rank: int, message: ToRank) -> None:
        self._local.send(rank, encode(message))

    def _send_all(self, message: ToRank) -> None:
        self._local.send_all(encode(message))

    def _receive(self) -> FromRank | None:
        encoded = self._local.receive()
        return None if encoded is None else decode_from_rank(encoded)

    def _dead(self, *, killed: bool = False) -> Gone | None:
        return self._local.ended(killed=killed)

    def _stop_ranks(self, grace_s: float) -> None:
        self._local.stop(grace_s)

    def close(self, grace_s: float = 5.0) -> None:
        self._local.close(grace_s)
