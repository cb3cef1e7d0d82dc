"""The controller's end of ranks that are processes: on this machine, or on several hosts through their agents."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import zmq

from weft.engine.config.config import EngineConfig
from weft.engine.config.device import on_gpus
from weft.engine.controller.executor import LOAD_TIMEOUT_S, Executor, Gone
from weft.engine.hosts import addresses
from weft.engine.hosts.agents import SILENT_S, Agents
from weft.engine.messages.rank_messages import Failure, FromRank, Stop, ToRank, decode_from_rank, encode
from weft.engine.processes.fork_client import RankProcess
from weft.engine.processes.rank_processes import POLL_S, RankProcesses
from weft.engine.worker.open_transports import cost_model, table_file
from weft.planner.cost import GPU_COSTS

log = logging.getLogger(__name__)
MARGIN_S = 1.0
"""Seconds by which a busy machine may be late to notice a host's silence."""


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


class HostsExecutor(ProcessExecutor):
    """Ranks of several hosts. A step is one message per host, forwarded by its agent to its ranks."""

    def __init__(self, config: EngineConfig):
        super().__init__(config)
        self._asked = config  # the given configuration, before defaults are resolved
        self._agents: Agents | None = None
        self._received: deque[bytes] = deque()

    def resize(self, config: EngineConfig) -> None:
        super().resize(config)
        if self._agents is not None:
            self._agents.config = config

    def prepare(self) -> None:
        if self._agents is None:
            _, self._interface = addresses.route_to_node_0(self.config)
            self._agents = Agents(self._asked)
        super().prepare()

    def _launch(self, poll: Callable[[], None]) -> None:
        self.prepare()
        assert self._agents is not None
        self._received.clear()
        if missing := self._agents.missing:
            nodes = ", ".join(map(str, missing))
            log.warning("waiting for node %s at %s", nodes, self._agents.where)
            self._progress(f"waiting for node {nodes} at {self._agents.where}", 0.0)
        until = time.monotonic() + self.config.join_timeout_s + SILENT_S
        self._agents.wait_for_all(self.config.join_timeout_s, lambda: self._check_wait(until, "the other hosts", poll))
        self._starts += 1
        config, table = replace(self.config, interface=self._interface), _table(self.config)
        if table is None and config.cost == "auto":
            # Fix the table: hosts must not choose tables of their own.
            config = replace(config, cost=GPU_COSTS if on_gpus(config) else "cpu")
        self._agents.start(config.to_dict(), table, self._starts)
        self._local.launch(config, self._starts, config.ranks_of(0))
        self._poller = zmq.Poller()
        for source in (self._local.sockets, self._agents.socket):
            self._poller.register(source, zmq.POLLIN)
        deadline = time.monotonic() + LOAD_TIMEOUT_S
        while not self._local.launched(POLL_S):
            self._check_wait(deadline, "the start", poll)

    def _send(self, rank: int, message: ToRank) -> None:
        assert self._agents is not None
        if (node := self.config.seat_of(rank)[0]) == 0:
            self._local.send(rank, encode(message))
        else:
            self._agents.send(node, rank, encode(message))

    def _send_all(self, message: ToRank) -> None:
        assert self._agents is not None
        encoded = encode(message)
        for node in self.config.nodes[1:]:
            self._agents.send(node, None, encoded)
        self._local.send_all(encoded)

    def _receive(self) -> FromRank | None:
        assert self._agents is not None
        if not self._received:
            ready = dict(self._poller.poll(int(POLL_S * 1000)))
            of_agents = self._agents.socket in ready
            if len(ready) > of_agents and (message := self._local.receive(0)) is not None:
                self._received.append(message)
            if of_agents:
                self._drain()
        return decode_from_rank(self._received.popleft()) if self._received else None

    def _drain(self) -> None:
        """Handle all pending messages of agents."""
        assert self._agents is not None
        while self._agents.socket.poll(0):
            if (encoded := self._agents.receive()) is not None:
                self._received.append(encoded)

    def _dead(self, *, killed: bool = False) -> Gone | None:
        assert self._agents is not None
        self._drain()  # a busy controller must not mistake unread messages for silence
        return self._local.ended(killed=killed) or self._agents.gone(killed=killed)

    def _cause(self, first: Failure) -> Exception:
        # Ranks notice a lost connection at once; only the agent's silence shows later that its host is lost. Read that
        # host's earlier messages first: they count as heard when they are read.
        self._drain()
        deadline = time.monotonic() + SILENT_S + MARGIN_S
        while first.lost_peer and not self._dead(killed=True) and time.monotonic() < deadline:
            if isinstance(message := self._receive(), Failure) and not message.lost_peer:
                first = message
        return super()._cause(first)

    def _stop_ranks(self, grace_s: float) -> None:
        if self._agents is not None and self._starts:
            if grace_s and self._local.running:
                for node in self.config.nodes[1:]:
                    self._agents.send(node, None, encode(Stop()))
            super()._stop_ranks(grace_s)
            self._agents.stop()

    def close(self, grace_s: float = 5.0) -> None:
        self._stop_ranks(grace_s)
        super().close(grace_s)
        if self._agents is not None:
            self._agents.close()
        self._agents = None


def _table(config: EngineConfig) -> str | None:
    """Return the text of the ranks' cost table; None for a preset, which every host has."""
    path = table_file(config)
    return None if path is None or cost_model(config).name != str(path) else path.read_text()
