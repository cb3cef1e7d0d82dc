"""What a step takes to the ranks of a host and back: directly, and through the agent of another host.

Ranks are processes that reply at once, and the messages are bytes: what is measured are sockets, CURVE and the agent's
loop. The controller sends a step to two ranks of its own host, or to an agent that has two, and waits for both replies;
the two ways take turns. The agent is a process of this host, reached over loopback, or one of another host, which is
a namespace of this machine (`weft_bench.hosts_rig`, which takes root) behind a link. Prints medians of µs over rounds,
and the median of the rounds' ratios.

    python bench/scripts/agent_step.py --json agent_step.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft.engine.config.config import EngineConfig
from weft.engine.hosts.agent import HostAgent
from weft.engine.hosts.agents import Agents
from weft.engine.messages.rank_sockets import SOCKET, RankSocket, RankSockets
from weft.serve.cli.command import stop_on_sigterm
from weft.tune.host import describe_host
from weft_bench.hosts_rig import Host, joined_hosts

RANKS = 2
"""Of each host."""
REPLY = b"." * 128
WARM = 50


def echo(folder: str, rank: int) -> None:
    """A rank: its socket is that of `weft.engine.worker.rank`."""
    controller = RankSocket(Path(folder) / SOCKET, rank)
    controller.send(REPLY)
    while controller.receive():
        controller.send(REPLY)


class EchoRanks:
    """In place of `RankProcesses`: ranks that reply at once."""

    def __init__(self) -> None:
        self.ranks, self.running = range(RANKS), False

    def prepare(self) -> None:
        """Starts them."""
        if self.running:
            return
        self.folder = tempfile.TemporaryDirectory()
        self.sockets = RankSockets(Path(self.folder.name) / SOCKET, self.ranks)
        self._processes = []
        for rank in self.ranks:
            process = multiprocessing.get_context("spawn").Process(target=echo, args=(self.folder.name, rank))
            process.start()
            self._processes.append(process)
        for _ in self.ranks:
            assert self.receive(60), "a rank did not start"
        self.running = True

    def send_all(self, encoded: bytes) -> None:
        """A step."""
        for rank in self.ranks:
            self.sockets.send(rank, encoded)

    def receive(self, timeout_s: float) -> bytes | None:
        """A reply."""
        return self.sockets.receive(timeout_s)

    def ended(self, *, killed: bool = False) -> None:
        """None has."""

    def stop(self, grace_s: float) -> None:
        """Nothing: they stay."""

    def close(self, grace_s: float = 0.0) -> None:
        """Ends them."""
        for process in self._processes:
            process.kill()
            process.join()
        self.sockets.close()
        self.folder.cleanup()
        self.running = False


def config_of(node: int, address: str, key: Path) -> EngineConfig:
    """Of a node of two."""
    meeting: dict[str, Any] = dict(nnodes=2, node_rank=node, master_addr=address, cluster_key=key)
    return EngineConfig(attn_dp=2, attn_tp=RANKS, device="cpu", **meeting)


def agent(address: str, key: Path) -> None:
    """Node 1: an agent as it is, with ranks that are none."""
    found = HostAgent(config_of(1, address, key), lambda line: None)
    found._ranks = EchoRanks()  # type: ignore[assignment]
    found._number = 1
    found.run()


def controller(address: str, key: Path, asked: argparse.Namespace) -> dict[str, list[float]]:
    """Node 0: µs of a round trip in each round, by each way."""
    agents, local = Agents(config_of(0, address, key)), EchoRanks()
    local.prepare()
    agents.wait_for_all(600, lambda: None)
    agents._number = 1
    message = os.urandom(asked.bytes)

    def directly() -> None:
        local.send_all(message)
        for _ in range(RANKS):
            local.receive(60)

    def by_agent() -> None:
        agents.send(1, None, message)
        replies = 0
        while replies < RANKS:
            agents.socket.poll(1000)
            replies += agents.receive() is not None

    ways: dict[str, Callable[[], None]] = {"direct": directly, "agent": by_agent}
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(asked.rounds + 1):
        for name, run in ways.items():
            times = []
            for _ in range(asked.calls if number else WARM):
                began = time.perf_counter()
                run()
                times.append(time.perf_counter() - began)
            if number:
                found[name].append(round(statistics.median(times) * 1e6, 1))
    agents.close()
    local.close()
    return found


def measure(hosts: tuple[Host, ...] | None, asked: argparse.Namespace) -> dict[str, list[float]]:
    """Both ends as processes; of this host, or of two of the rig."""
    with tempfile.TemporaryDirectory() as folder:
        (key := Path(folder) / "cluster.key").write_text(os.urandom(32).hex())
        address, result = "127.0.0.1" if hosts is None else hosts[0].address, Path(folder) / "result.json"
        options = ["--address", address, "--key", str(key), "--json", str(result)]
        options += ["--rounds", str(asked.rounds), "--calls", str(asked.calls), "--bytes", str(asked.bytes)]
        started = []
        for node in (0, 1):
            command = [sys.executable, __file__, "--node", str(node), *options]
            started.append(subprocess.Popen(command) if hosts is None else hosts[node].start(*command))
        if any([process.wait() for process in started]):
            raise SystemExit("a host failed")
        found: dict[str, list[float]] = json.loads(result.read_text())
        return found


def main(asked: argparse.Namespace) -> None:
    """On one host, then in the rig."""
    stop_on_sigterm()  # so that the hosts are removed
    found: dict[str, Any] = {"what": "bench/scripts/agent_step.py", "host": describe_host(), "ranks": RANKS}
    found |= {"bytes": asked.bytes, "calls": asked.calls, "us": {}}
    with joined_hosts(2) as hosts:
        for name, where in (("loopback", None), ("rig", hosts)):
            us = found["us"][name] = measure(where, asked)
            direct, by_agent = (statistics.median(us[way]) for way in ("direct", "agent"))
            ratio = statistics.median(a / b for a, b in zip(us["agent"], us["direct"], strict=True))
            print(f"{name:9} direct {direct:7.1f} µs  through the agent {by_agent:7.1f} µs  {ratio:.2f}×", flush=True)
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="in each of which both ways run")
    parser.add_argument("--calls", type=int, default=300, help="round trips of a round")
    parser.add_argument("--bytes", type=int, default=2048, help="of a step's message")
    parser.add_argument("--json", type=Path, help="file for the raw figures")
    parser.add_argument("--node", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--key", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.node is None:
        main(given)
    elif given.node:
        agent(given.address, given.key)
    else:
        given.json.write_text(json.dumps(controller(given.address, given.key, given)))
