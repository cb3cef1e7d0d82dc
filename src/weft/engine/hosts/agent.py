"""Agent of a host: it joins node 0, starts this host's ranks on node 0's request, and forwards their messages.

The agent ends with node 0, and its ranks end with the agent.
"""

# Why not start ranks by torchrun, srun or Ray? They do start agents (`weft.serve.cli.several_hosts`, `ray_hosts`), but
# an agent does more for its ranks:
# - It restarts ranks after a fault, from its fork server, while node 0 keeps the HTTP port and the waiting requests.
#   torchrun restarts all processes of a job, the controller too; srun ends the job; Ray restarts one actor, but its
#   peers in a collective do not notice.
# - It reports the rank and host of a process ended by a signal: the cause among many failures.
# - A step is one encrypted message per host instead of one per rank, and node 0 sends it between two steps.
# - It compares versions and files (`digests`) and the secret (`secured`) before any rank loads weights, and refuses in
#   one line. A launcher's store admits anyone who reaches its port.
# Ranks with sockets of their own to node 0 would save its relay, about 60 of 900 lines.

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from weft.engine.config.config import EngineConfig, EngineError
from weft.engine.config.cpu_shares import cores_left, with_cpu_shares
from weft.engine.config.device import gpus_of
from weft.engine.hosts import addresses, digests, secured
from weft.engine.messages import host_messages as messages
from weft.engine.processes.rank_processes import RankProcesses

ALIVE_S = 1.0
TICK_MS = 100
REFUSALS = 3
"""Number of failed handshakes without a message from which the other end counts as having another key."""
FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class HostAgent:
    """Agent of node `node_rank`, from 1 on. Raises EngineError in one line. say: called with lines for the user."""

    def __init__(self, config: EngineConfig, say: Callable[[str], None]):
        assert config.master_addr is not None and config.cluster_key is not None and config.node_rank
        node = config.node_rank
        self.node, self._say = node, say
        key = secured.read_key(config.cluster_key)
        address, interface = addresses.route_to_node_0(config)
        addresses.check_not_loopback(config.master_addr, address)
        self._where = f"{config.master_addr}:{config.master_port}"
        self._config = replace(config, interface=interface)
        self._ranks = RankProcesses()
        self._number, self._launching, self._ended = 0, False, False
        self._welcome, self._gone, self._refusals = False, False, 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = secured.connecting(self._context, key)
        self._monitor = self._socket.get_monitor_socket(FAILED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._socket.connect(secured.endpoint(address, config.master_port))
        self._facts = digests.facts(config)

    def run(self) -> None:
        """Serve until node 0 exits in order. Raises EngineError if node 0 is lost or refuses this host."""
        try:
            self._say(f"node {self.node}: waiting for node 0 at {self._where} (interface {self._config.interface})")
            self._ranks.prepare()
            self._serve()
        except BaseException as error:
            why = "was stopped" if isinstance(error, KeyboardInterrupt) else f"left: {error}"
            self._send(messages.Left(why))
            raise
        finally:
            self._ranks.close(grace_s=0)
            self._socket.disable_monitor()
            self._context.destroy(linger=1000)

    def _serve(self) -> None:
        began, last_heartbeat, looked = time.monotonic(), 0.0, 0.0
        while True:
            # The monitor first: node 0's last message is in the socket before the monitor reports that it is gone.
            sources: list[Any] = [self._monitor, self._socket]
            if self._ranks.sockets:
                sources.append(self._ranks.sockets.fileno())
            ready: dict[Any, int] = dict(zmq.zmq_poll([(source, zmq.POLLIN) for source in sources], TICK_MS))
            if self._monitor in ready:
                self._watch(recv_monitor_message(self._monitor)["event"])
            if self._socket in ready:
                if not self._follow(self._socket.recv()):
                    return
            elif self._gone:  # and its last messages have been read
                raise EngineError(f"node 0 at {self._where} is gone; so are the ranks of this host")
            if self._ranks.running and (message := self._ranks.receive(0)) is not None:
                self._send(messages.FromRanks(self._number, message))
            if (now := time.monotonic()) > looked + TICK_MS / 1000:
                looked = now
                self._monitor_ranks()
            if self._welcome and now > last_heartbeat + ALIVE_S:
                last_heartbeat = now
                self._send(messages.Alive())
            if not self._welcome and now > began + self._config.join_timeout_s:
                raise EngineError(f"node 0 was not heard at {self._where} within {self._config.join_timeout_s:g} s")

    def _watch(self, event: int) -> None:
        """Handle an event of the connection's monitor."""
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED and not self._welcome:  # of this node 0, or of its successor
            options = digests.options(self._config)
            self._send(messages.Join(self.node, socket.gethostname(), self._facts, options, time.time()))
        self._refusals = self._refusals + 1 if event & FAILED else self._refusals
        if self._refusals >= REFUSALS:
            raise EngineError(
                f"node 0 at {self._where} does not know this --cluster-key: the file must be the same on every host "
                "(or something else listens there)"
            )
        self._gone |= event == zmq.EVENT_DISCONNECTED and self._welcome

    def _follow(self, frame: bytes) -> bool:
        """Carry out a message of node 0. Returns False if node 0 exits."""
        message = messages.decode_to_agent(frame)
        if isinstance(message, messages.Refused):
            raise EngineError(message.text)
        if isinstance(message, messages.Leave):
            self._send(messages.Left("node 0 has ended"))
            self._say(f"node {self.node}: node 0 has ended")
            return False
        if isinstance(message, messages.Welcome):
            self._welcome = True
            self._say(f"node {self.node}: joined {self._where}")
        elif isinstance(message, messages.Start):
            self._start(message)
        elif isinstance(message, messages.ToRanks) and self._ranks.running and message.number == self._number:
            if message.rank is None:
                self._ranks.send_all(message.encoded)
            else:
                self._ranks.send(message.rank, message.encoded)
        elif isinstance(message, messages.StopRanks):
            self._ranks.stop(grace_s=0)
            self._launching = False
            self._send(messages.Stopped(message.number))
        return True

    def _start(self, start: messages.Start) -> None:
        self._ranks.stop(grace_s=0)
        if start.config["shrink"] and not self._config.gpus:
            self._config = replace(self._config, gpus=gpus_of(self._config))
        own, places = digests.of_this_host(self._config), start.config["places"]
        if places:
            own["cpu_bind"] = cores_left(self._config.cpu_bind, places[self.node])
        if places and not places[self.node]:
            self._say(f"node {self.node}: runs no ranks until all hosts start anew: others are lost for good")
            return
        config = with_cpu_shares(EngineConfig.from_dict(start.config | own))
        self._number, self._launching, self._ended = start.number, True, False
        try:
            self._ranks.prepare()
            if start.table is not None:
                table = self._ranks.directory / "cost.json"
                table.write_text(start.table)
                config = replace(config, cost=str(table))
            self._ranks.launch(config, start.number, config.ranks_of(self.node))
        except (EngineError, OSError) as error:
            self._fail(str(error), (), killed=True)

    def _monitor_ranks(self) -> None:
        if not self._ranks.running or self._ended:
            return
        try:
            for _ in self._ranks.ranks if self._launching else ():
                self._launching = not self._ranks.launched(0)
            if killed := self._ranks.ended(killed=True):
                self._fail(*killed, killed=True)
            elif ended := self._ranks.ended():
                self._fail(*ended, killed=False)
        except EngineError as error:
            self._fail(str(error), (), killed=True)

    def _fail(self, text: str, ranks: tuple[int, ...], killed: bool) -> None:
        self._ended = True
        self._send(messages.Ended(self._number, f"{text} (node {self.node}, {socket.gethostname()})", killed, ranks))

    def _send(self, message: messages.FromAgent) -> None:
        self._socket.send(messages.encode(message))
