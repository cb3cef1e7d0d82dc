"""Faults of a server with ranks on several hosts, which are namespaces of this machine: of ranks, agents, links, hosts.

Node 0 is not lost: nobody serves without it. Agents that end are started again, as an orchestrator does.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from chaos.chaos_one_host import send, stop_for_a_while
from chaos.faults import HEAR_S, RANK_S, Fault, Moment
from chaos.health import Health
from chaos.hosts_rig import Host, arguments, joined_hosts, started_by, stopped
from chaos.server_process import SERVE, ServerError, ServerProcess, forker_of, ranks_of
from weft.engine.hosts.agents import SILENT_S

AGAIN_S = 1.0
"""Seconds until an agent that has ended starts again."""
REFUSED_S = 1.0
"""Bound of an agent's refusal, from its search for node 0 (docs/guide/hosts.md)."""
STRANGER_S = 120.0
"""Maximum seconds of a process that is to be refused."""


class KeptAgent:
    """Agent of a host, which is started again whenever it ends."""

    def __init__(self, host: Host, command: Sequence[str], log: Path):
        self.host, self.log = host, log
        self._command = command
        self._stop, self._off = threading.Event(), threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """Process of the agent; None if there is none now."""
        with suppress(ProcessLookupError):
            return None if self._process is None else started_by(self._process)
        return None

    def stop_for_a_while(self, seconds: float) -> bool:
        """Stop the agent for a while; return False if there is none now."""
        return self._process is not None and stopped(self._process, seconds)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Keep the agent off inside the context."""
        with self._off:
            yield

    def end(self, timeout_s: float) -> int | None:
        """Wait for the agent's last end. Return its exit code, None if it does not end."""
        self._stop.set()
        self._thread.join(timeout_s)
        return None if self._process is None else self._process.poll()

    def let_end(self) -> None:
        """Let the agent end: it is not started again."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            with self._off, open(self.log, "a") as log:
                self._process = self.host.start(*self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            self._process.wait()
            self._stop.wait(AGAIN_S)


class HostsChaos:
    """Server on several hosts, and its faults. strangers: commands that node 1 must see refused."""

    def __init__(
        self,
        served: ServerProcess,
        health: Health,
        hosts: Sequence[Host],
        agents: Sequence[KeptAgent],
        strangers: dict[str, tuple[list[str], str]],
        rng: random.Random,
    ):
        self.served, self.health = served, health
        self._hosts, self._agents, self._rng = hosts, agents, rng
        self.faults = kinds(self, strangers)

    def release(self) -> None:
        """Do nothing: clients hold nothing open."""

    def end(self) -> tuple[dict[str, int | None], dict[str, dict[str, list[str]]]]:
        """End the server, and so the agents. Return exit codes, and what is left, by host."""
        for agent in self._agents:
            agent.let_end()
        codes = {"node 0": self.served.end(60.0)}
        codes |= {f"node {agent.host.number}": agent.end(60.0) for agent in self._agents}
        return codes, {f"node {host.number}": host.left_behind(60.0) for host in self._hosts}

    def logs(self) -> dict[str, str]:
        """Return the logs of the server and the agents, by host."""
        files = [self.served.log, *(agent.log for agent in self._agents)]
        return {f"node {node}": log.read_text(errors="replace") for node, log in enumerate(files)}

    def ranks(self) -> list[dict[int, int]]:
        """Return the process id of each live rank, by host and rank."""
        return [ranks_of(pid or 0) for pid in (self.served.pid, *(agent.pid for agent in self._agents))]

    def kill_rank(self, *, of_node_0: bool) -> Moment | None:
        ranks = ranks_of(self._starter(of_node_0))
        return _kill(self._rng.choice(sorted(ranks.values()))) if ranks else None

    def kill_forker(self, *, of_node_0: bool) -> Moment | None:
        """Kill the process that forks a host's ranks."""
        return None if (pid := forker_of(self._starter(of_node_0))) is None else _kill(pid)

    def stop_rank(self) -> None:
        """Stop a rank for a while."""
        if ranks := ranks_of(self._starter(self._rng.random() < 0.5)):
            with suppress(ProcessLookupError):
                stop_for_a_while(self._rng.choice(sorted(ranks.values())), self._rng.uniform(0.1, 2.0))

    def kill_agent(self) -> Moment | None:
        return None if (pid := self._agent().pid) is None else _kill(pid)

    def stop_agent(self, shortest_s: float, longest_s: float) -> Moment | None:
        """Stop an agent for a while."""
        at = time.monotonic()
        return Moment(at) if self._agent().stop_for_a_while(self._rng.uniform(shortest_s, longest_s)) else None

    def cut_for_a_moment(self) -> None:
        """Cut the link for a moment, too short to be heard."""
        host = self._rng.choice(self._hosts)
        host.cut()
        time.sleep(self._rng.uniform(0.1, 1.0))
        host.mend()

    def cut(self, *, of_node_0: bool) -> Moment:
        """Cut the link until that is heard, and for some time more."""
        host = self._hosts[0] if of_node_0 else self._agent().host
        at = time.monotonic()
        host.cut()
        self._wait_until_heard(at)
        time.sleep(self._rng.uniform(0.0, 2.0))
        host.mend()
        return Moment(at)

    def lose_host(self) -> Moment:
        """Switch a host off, and on again once that is heard: its memory is lost."""
        agent = self._agent()
        host = agent.host
        with agent.off():
            at = time.monotonic()
            host.cut()
            host.kill_all()
            self._wait_until_heard(at)
            if segments := host.left_behind()["segments"]:
                raise ServerError(f"segments are left of processes that were killed: {', '.join(segments)}")
            host.run("find", str(host.temporary), "-mindepth", "1", "-delete")
            host.mend()
        return Moment(at)

    def be_refused(self, command: Sequence[str], says: str) -> Moment:
        """Start a process on node 1 that must end with this line. Raises ServerError otherwise."""
        stranger = self._hosts[1].start(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert stranger.stdout is not None
        limit = threading.Timer(STRANGER_S, lambda: _kill(started_by(stranger)))
        limit.start()
        began = refused = None
        line = ""
        for line in stranger.stdout:
            if "waiting for node 0" in line:
                began = time.monotonic()
            elif re.search(says, line):
                refused = time.monotonic()
        code = stranger.wait()
        limit.cancel()
        if code != 1 or refused is None:
            raise ServerError(f"a process that must be refused ended with {code}: {line.strip()}")
        return Moment(refused) if began is None else Moment(began, refused)

    def _agent(self) -> KeptAgent:
        return self._rng.choice(self._agents)

    def _starter(self, of_node_0: bool) -> int:
        """Return the process that has started a host's ranks; 0 if there is none."""
        return self.served.pid if of_node_0 else self._agent().pid or 0

    def _wait_until_heard(self, at: float) -> None:
        if self.health.serving:
            self.health.heard(False, at, HEAR_S)
        else:  # it may wait for this host as it is
            time.sleep(SILENT_S + 1)


def kinds(chaos: HostsChaos, strangers: dict[str, tuple[list[str], str]]) -> dict[str, Fault]:
    """Return the kinds of faults on several hosts."""
    return {
        "kill a rank of node 0": Fault(partial(chaos.kill_rank, of_node_0=True), RANK_S),
        "kill a rank of another node": Fault(partial(chaos.kill_rank, of_node_0=False), RANK_S),
        "stop a rank for a while": Fault(chaos.stop_rank),
        "kill the process that forks node 0's ranks": Fault(partial(chaos.kill_forker, of_node_0=True), RANK_S),
        "kill the process that forks another node's ranks": Fault(partial(chaos.kill_forker, of_node_0=False), RANK_S),
        "kill an agent": Fault(chaos.kill_agent, SILENT_S),
        "stop an agent for a moment": Fault(partial(chaos.stop_agent, 0.1, 2.0)),
        "stop an agent for too long": Fault(partial(chaos.stop_agent, SILENT_S + 0.5, SILENT_S + 3), SILENT_S),
        "cut a link for a moment": Fault(chaos.cut_for_a_moment),
        "cut node 0's link": Fault(partial(chaos.cut, of_node_0=True), SILENT_S),
        "cut another node's link": Fault(partial(chaos.cut, of_node_0=False), SILENT_S),
        "switch a host off and on": Fault(chaos.lose_host, SILENT_S),
        **{
            name: Fault(partial(chaos.be_refused, command, says), REFUSED_S, calm=True)
            for name, (command, says) in strangers.items()
        },
    }


def _kill(pid: int) -> Moment | None:
    return send(pid, signal.SIGKILL)


def _strangers(
    folder: Path, model: Path | None, options: Sequence[str], joining: Sequence[str], name: str
) -> dict[str, tuple[list[str], str]]:
    """Return commands that must be refused on node 1 next to its agent, with their messages, by kind of fault."""
    (key := folder / "other.key").write_text(os.urandom(32).hex())
    made = [] if model is None else [str(model)]
    command = [*SERVE, *made, *options, *joining]
    found = {
        "join with another key": ([*command, "--cluster-key", str(key)], "does not know this --cluster-key"),
        "join as a node that is there": (command, "is there already; give each host another --node-rank"),
        "join a name that is 127.0.1.1": (
            [*command, "--master-addr", name],
            rf"--master-addr {name} is 127\.0\.1\.1 on this host",
        ),
    }
    if model is not None:
        (other := folder / "other-model").mkdir()
        for path in model.iterdir():
            (other / path.name).symlink_to(path)
        (other / "config.json").unlink()
        (other / "config.json").write_text((model / "config.json").read_text() + "\n")
        found["join with another model"] = ([*SERVE, str(other), *options, *joining], "has other config.json: ")
    return found


@contextmanager
def several_hosts(
    folder: Path, model: Path | None, options: Sequence[str], nnodes: int, rng: random.Random
) -> Iterator[HostsChaos]:
    """Serve a model with these options of `weft serve` on `nnodes` hosts, with all logs in `folder`.

    model: its directory; None if the options name a preset. This thread is in node 0's network meanwhile. Raises
    ServerError if the server does not start, and PermissionError if hosts may not be made.
    """
    with ExitStack() as stack:
        hosts = stack.enter_context(joined_hosts(nnodes))
        stack.enter_context(hosts[0].network())
        (key := folder / "cluster.key").write_text(os.urandom(32).hex())
        made = [] if model is None else [str(model)]
        joining = [arguments(host, key, nnodes) for host in hosts]
        agents = []
        for host in hosts[1:]:
            command = [*SERVE, *made, *options, *joining[host.number]]
            agents.append(KeptAgent(host, command, folder / f"node-{host.number}.log"))
            stack.callback(agents[-1].let_end)
        served = ServerProcess(folder, [*made, *options, *joining[0]], hosts[0])
        stack.callback(served.kill)
        health = Health(served)
        stack.callback(health.stop)
        strangers = _strangers(folder, model, options, joining[1], hosts[1].name)
        yield HostsChaos(served, health, hosts, agents, strangers, rng)
