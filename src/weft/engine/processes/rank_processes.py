"""The processes of one host's ranks: a fork server starts them, and sockets carry messages to and from them."""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from weft.engine.config.config import EngineConfig, EngineError
from weft.engine.messages.rank_messages import Stop, encode
from weft.engine.messages.rank_sockets import SOCKET, RankSockets
from weft.engine.processes.fork_client import ForkServer, RankProcess

log = logging.getLogger(__name__)
POLL_S = 0.2
"""Seconds of one wait for a message."""
KILLED_S = 30.0
"""Seconds until a killed rank counts as gone: it may sleep for ever in the driver of a lost GPU."""
DRAIN_S = 0.05
"""Interval at which messages of stopping ranks are read."""


class RankProcesses:
    """One host's ranks, with all their files in one private folder. Methods raise EngineError in one line.

    ranks: their numbers in the world. processes: in the order of `ranks`. sockets: to poll; None while no rank runs.
    """

    def __init__(self) -> None:
        self.ranks: tuple[int, ...] = ()
        self.processes: list[RankProcess] = []
        self.sockets: RankSockets | None = None
        self._server: ForkServer | None = None

    def prepare(self) -> None:
        """Begin the start of the fork server, unless there is one."""
        if self._server is None or not self._server.alive:
            self.close()  # remove the remains of a killed one
            self.directory = Path(tempfile.mkdtemp(prefix="weft-"))
            self._server = ForkServer(self.directory)

    @property
    def running(self) -> bool:
        """True from `launch` to `stop`."""
        return self.sockets is not None

    def launch(self, config: EngineConfig, number: int, ranks: Sequence[int]) -> None:
        """Request these ranks; `launched` tells when they run. number: of this start, each a new one."""
        self.prepare()
        assert self._server is not None
        self.processes, self.ranks = [], tuple(ranks)
        self._run = run = self.directory / str(number)
        run.mkdir()
        (run / "config.json").write_text(json.dumps(config.to_dict()))
        try:
            self.sockets = RankSockets(run / SOCKET, self.ranks)
        except OSError as error:  # not every file system has sockets
            raise EngineError(f"no sockets in {self.directory}: {error}; set TMPDIR to another") from error
        for rank in self.ranks:
            self._server.request(run, rank)

    def launched(self, timeout_s: float) -> bool:
        """Wait up to timeout_s for the next rank's process. Returns whether all are there."""
        assert self._server is not None
        if len(self.processes) < len(self.ranks):
            process = self._server.forked(self.ranks[len(self.processes)], timeout_s)
            if process is not None:
                self.processes.append(process)
        return len(self.processes) == len(self.ranks)

    def send(self, rank: int, encoded: bytes) -> None:
        """Send a message to one rank."""
        assert self.sockets is not None
        self.sockets.send(rank, encoded)

    def send_all(self, encoded: bytes) -> None:
        """Send the same message to every rank of this host."""
        for rank in self.ranks:
            self.send(rank, encoded)

    def receive(self, timeout_s: float = POLL_S) -> bytes | None:
        """Return the next message of a rank; None after timeout_s."""
        assert self.sockets is not None
        return self.sockets.receive(timeout_s)

    def ended(self, *, killed: bool = False) -> tuple[str, tuple[int]] | None:
        """Return one line about a rank that has ended, and the rank; None: all run. killed: only a signal counts."""
        # Look for signals first: a killed rank is the cause of its peers' failures.
        gone = [(r, c) for r, p in zip(self.ranks, self.processes, strict=False) if (c := p.poll()) is not None]
        gone = [(r, code) for r, code in gone if code < 0 or not killed]
        for rank, code in sorted(gone, key=lambda g: g[1]):
            log = self._run / f"rank-{rank}.log"
            lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            return f"rank {rank} {how}" + (f": {lines[-1]}" if lines else ""), (rank,)
        return None

    def stop(self, grace_s: float) -> None:
        """End every rank. grace_s: maximum seconds for ranks to exit by themselves. May be called twice."""
        if self.sockets is None:
            return
        for rank, process in zip(self.ranks, self.processes, strict=False):
            if grace_s and process.poll() is None:
                self.send(rank, encode(Stop()))
        deadline = time.monotonic() + grace_s
        for process in self.processes:
            while process.wait(max(0.0, min(DRAIN_S, deadline - time.monotonic()))) is None:
                while self.sockets.receive(0):  # a rank blocked in a send does not see that it must stop
                    pass
                if time.monotonic() >= deadline:
                    process.kill()
                    if process.wait(KILLED_S) is None:
                        log.error("process %d of a rank was killed and does not end; nobody waits for it", process.pid)
                        break
        self.sockets.close()
        self.sockets = None
        shutil.rmtree(self._run, ignore_errors=True)
        if len(self.processes) < len(self.ranks) and self._server is not None:
            self._server.close()  # else it may still fork requested ranks, to be mistaken for later ones

    def close(self, grace_s: float = 5.0) -> None:
        """End every rank and the fork server. May be called twice."""
        self.stop(grace_s)
        if self._server is not None:
            self._server.close()
            shutil.rmtree(self.directory, ignore_errors=True)  # a killed server could not do it
        self._server = None
