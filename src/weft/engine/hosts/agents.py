"""Node 0's end of the agents: admits the cluster's agents, notices lost hosts, and forwards messages."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from weft.engine.config.config import EngineConfig, EngineError
from weft.engine.hosts import addresses, digests, secured
from weft.engine.messages import host_messages as messages

log = logging.getLogger(__name__)
SILENT_S = 5.0
"""Seconds without a heartbeat after which an agent counts as lost; agents send one every second."""
LEAVE_S = SILENT_S
"""Maximum seconds to wait until agents leave."""


@dataclass
class Agent:
    """An agent that has joined. heard: monotonic time of its last message. stopped: number of its last ended start."""

    identity: bytes
    join: messages.Join
    heard: float
    stopped: int = 0

    @property
    def name(self) -> str:
        """Name of its host in errors."""
        return f"node {self.join.node} ({self.join.host})"


class Agents:
    """Agents of nodes 1 to nnodes - 1, on a socket bound to `master_addr` and `master_port`.

    The next port, of the ranks' store, stays reserved until `close`.

    config: the nodes that run ranks, which may become fewer. Methods raise EngineError in one line.
    """

    def __init__(self, config: EngineConfig):
        assert config.master_addr is not None and config.cluster_key is not None
        name, self._port = config.master_addr, config.master_port
        self._address = addresses.resolve(name, self._port)
        addresses.check_not_loopback(name, self._address)
        key = secured.read_key(config.cluster_key)
        self.config, self._nodes = config, range(1, config.mesh.hosts)
        self._ours = digests.facts(config), digests.options(config)
        self.clocks: dict[int, float] = {}
        """Seconds by which each host's clock was ahead of node 0's when it joined."""
        self._agents: dict[int, Agent] = {}
        self._candidates: dict[int, Agent] = {}
        """Agents that claim a node already taken: a successor, or a mistake."""
        self.refused: dict[int, str] = {}
        """Reason of the last refusal of each node."""
        self._lost: tuple[str, tuple[int, ...]] | None = None
        self._ended: list[messages.Ended] = []
        self._number = 0
        self._reserved = addresses.reserve_store(config)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = secured.authenticator(self._context, key)
        self.socket = secured.listening(self._context, key)
        try:
            self.socket.bind(secured.endpoint(self._address, self._port))
        except zmq.ZMQError as error:
            self.close()
            if error.errno == zmq.EADDRINUSE:
                why = "is taken; choose another with --master-port, the same on every host"
            elif error.errno in (zmq.EADDRNOTAVAIL, 19):  # ENODEV
                why = "is no address of this host; node 0 runs where --master-addr is"
            else:
                why = f"cannot be listened on: {error.strerror}"
            raise EngineError(f"{self.where} {why}") from error

    @property
    def where(self) -> str:
        """Address and port of this end."""
        return f"{self._address}:{self._port}"

    @property
    def missing(self) -> list[int]:
        """Nodes that run ranks and have not joined, or were lost."""
        return [node for node in self.config.nodes[1:] if node not in self._agents]

    def wait_for_all(self, timeout_s: float, waiting: Callable[[], None]) -> None:
        """Wait until every node has joined. waiting: called several times a second."""
        deadline = time.monotonic() + timeout_s
        while self.missing:
            waiting()
            if time.monotonic() > deadline:
                nodes = ", ".join(map(str, self.missing))
                line = f"node {nodes} did not come to {self.where} within {timeout_s:g} s; start the same command there"
                line += " with --node-rank, and see what it says (docs/guide/hosts.md)"
                lost = tuple(rank for node in self.missing for rank in self.config.ranks_of(node))
                raise EngineError(line, lost, for_good="hosts")
            if self.socket.poll(100):
                self.receive()
            else:
                self._drop_silent()
        self._lost = None

    def start(self, config: dict[str, Any], table: str | None, number: int) -> None:
        """Request every agent to start its ranks. The arguments are the fields of `Start`."""
        self._number, self._ended = number, []
        message = messages.encode(messages.Start(number, config, table))
        for agent in self._agents.values():
            self._send(agent, message)

    def send(self, node: int, rank: int | None, encoded: bytes) -> None:
        """Forward a message to a rank of a node. rank: None for all ranks of the node."""
        if node in self._agents:
            self._send(self._agents[node], messages.encode(messages.ToRanks(self._number, rank, encoded)))

    def receive(self) -> bytes | None:
        """Handle one message of an agent, if there is one. Returns the rank's message that it contained, if any."""
        try:
            identity, frame = self.socket.recv_multipart(zmq.NOBLOCK)
            message: messages.FromAgent = messages.decode_from_agent(frame)
        except (zmq.Again, ValueError, msgspec.DecodeError):  # none yet, or of another version
            return None
        if isinstance(message, messages.Join):
            self._admit(identity, message)
            return None
        agent = next((a for a in self._agents.values() if a.identity == identity), None)
        if agent is None:  # refused or given up; it may not know, if its connection survived
            if not isinstance(message, messages.Left):
                why = f"this host was not heard for {SILENT_S:g} s, and node 0 has given it up; start it again"
                self.socket.send_multipart([identity, messages.encode(messages.Refused(why))])
            return None
        agent.heard = time.monotonic()
        if isinstance(message, messages.Left):
            self._drop(agent, message.text)
            return None
        if (candidate := self._candidates.pop(agent.join.node, None)) is not None:
            self._refuse(candidate, f"{agent.name} is there already; give each host another --node-rank")
        if isinstance(message, messages.FromRanks):
            return message.encoded if message.number == self._number else None
        if isinstance(message, messages.Ended) and message.number == self._number:
            ranks = message.ranks or self.config.ranks_of(agent.join.node)
            self._ended.append(msgspec.structs.replace(message, ranks=ranks))
        elif isinstance(message, messages.Stopped):
            agent.stopped = message.number
        else:
            assert isinstance(message, messages.Alive | messages.Ended)
        return None

    def gone(self, *, killed: bool = False) -> tuple[str, tuple[int, ...]] | None:
        """Return one line about a lost host or an ended rank, and the ranks, or None. Receive pending messages first.

        killed: only ranks ended by a signal count.
        """
        self._drop_silent()
        if self._lost:
            return self._lost
        return next(((e.text, e.ranks) for e in self._ended if e.killed or not killed), None)

    def stop(self, waiting: Callable[[], None] = lambda: None) -> None:
        """End the ranks of every host, and wait for the hosts' confirmations. Hosts without one count as lost."""
        message = messages.encode(messages.StopRanks(self._number))
        for agent in self._agents.values():
            self._send(agent, message)
        while any(agent.stopped < self._number for agent in self._agents.values()):
            waiting()
            if self.socket.poll(100):
                self.receive()
            else:
                self._drop_silent()

    def close(self) -> None:
        """Request all agents to exit, and wait up to LEAVE_S for their replies. May be called twice."""
        if self._context.closed:
            return
        for agent in (*self._agents.values(), *self._candidates.values()):
            self._send(agent, messages.encode(messages.Leave()))
        # A TCP socket that is closed with unread data resets its connection, and the agent loses the request.
        waiting, deadline = {agent.identity for agent in self._agents.values()}, time.monotonic() + LEAVE_S
        while waiting and self.socket.poll(max(0, int((deadline - time.monotonic()) * 1000))):
            with suppress(ValueError, msgspec.DecodeError):  # no message, or of another version
                identity, frame = self.socket.recv_multipart()
                if isinstance(messages.decode_from_agent(frame), messages.Left):
                    waiting.discard(identity)
        self._agents.clear()
        self.socket.close()
        self._authenticator.stop()
        self._context.term()
        self._reserved.close()

    def _send(self, agent: Agent, message: bytes) -> None:
        self.socket.send_multipart([agent.identity, message])

    def _admit(self, identity: bytes, join: messages.Join) -> None:
        agent = Agent(identity, join, time.monotonic())
        if join.node not in self._nodes:
            nodes = f"1 to {self._nodes[-1]}"
            self._refuse(agent, f"{agent.name} is not part of this cluster, which consists of node 0 and {nodes}")
        elif wrong := digests.difference(join.node, join.host, (join.facts, join.options), self._ours):
            self._refuse(agent, wrong)
        elif join.node in self._agents:
            self._candidates[join.node] = agent
        else:
            self._agents[join.node] = agent
            self.clocks[join.node] = join.clock - time.time()
            self._send(agent, messages.encode(messages.Welcome()))

    def _refuse(self, agent: Agent, why: str) -> None:
        log.error("%s", why)
        self.refused[agent.join.node] = why
        self._send(agent, messages.encode(messages.Refused(why)))

    def _drop_silent(self) -> None:
        """Give up agents without recent heartbeats."""
        now = time.monotonic()
        for agent in list(self._agents.values()):
            if now - agent.heard > SILENT_S:
                self._drop(agent, f"has not been heard for {SILENT_S:g} s")

    def _drop(self, agent: Agent, why: str) -> None:
        node = agent.join.node
        del self._agents[node]
        if lost := self.config.ranks_of(node):
            self._lost = f"{agent.name} {why}", lost
        if (candidate := self._candidates.pop(node, None)) is not None:
            self._admit(candidate.identity, candidate.join)
