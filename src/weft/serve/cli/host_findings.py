"""Checks of `weft doctor --nnodes` between hosts: interfaces, ports, versions, files, clocks. No rank is started."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

from weft.engine.config.config import EngineConfig, EngineError
from weft.engine.hosts import addresses
from weft.engine.hosts.agent import HostAgent
from weft.engine.hosts.agents import Agents
from weft.serve.cli.findings import Finding

MAX_CLOCK_S, REACH_S = 1.0, 5.0
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def between_hosts(config: EngineConfig) -> Iterator[Finding]:
    """Join the other hosts like the agents of ranks, yield the findings, and leave."""
    try:
        address, interface = addresses.route_to_node_0(config)
        source = addresses.source_address(address, config.master_port)
        yield Finding("ok", f"interface {interface}, address {source}, on the way to {config.master_addr} ({address})")
        if PORT_RANGE.is_file():
            low, high = PORT_RANGE.read_text().split()
            yield Finding("ok", f"gloo takes any port from {low} to {high} here: they must be open to the other hosts")
        yield from _check_as_agent(config) if config.node_rank else _check_as_node_0(config)
    except EngineError as error:
        yield Finding("bad", f"node {config.node_rank or 0} of {config.mesh.hosts}", str(error))


def _check_as_node_0(config: EngineConfig) -> Iterator[Finding]:
    store, agents = config.store_port, Agents(config)
    with socket.create_server(("", store)) as opened:
        yield Finding("ok", f"listening on {agents.where} and the next port; waiting for the other hosts")
        deadline, known = time.monotonic() + config.join_timeout_s, set[int]()
        while missing := set(agents.missing) - agents.refused.keys():
            if agents.socket.poll(100):
                agents.receive()
            for node in set(agents.clocks) - known:
                known.add(node)
                yield _clock(node, agents.clocks[node])
            if time.monotonic() > deadline:
                why = "start weft doctor there with its --node-rank, and see what it says"
                yield Finding("bad", f"node {', '.join(map(str, sorted(missing)))} did not come", why)
                break
        for node in set(agents.clocks) - known:
            yield _clock(node, agents.clocks[node])
        yield from (Finding("bad", f"node {node} is refused", why) for node, why in agents.refused.items())
        opened.settimeout(REACH_S)
        try:
            for _ in agents.clocks:
                opened.accept()[0].close()
        except TimeoutError:
            yield Finding(
                "bad", f"not every host reaches port {store} here", "a firewall? Ranks of all hosts connect to it"
            )
        agents.close()


def _clock(node: int, ahead: float) -> Finding:
    far = abs(ahead) > MAX_CLOCK_S
    what = f"node {node} is there, with the same versions and model; its clock is {ahead:+.2f} s off"
    return Finding("slow" if far else "ok", what, "logs of both hosts do not fit each other: set the clocks" * far)


def _check_as_agent(config: EngineConfig) -> Iterator[Finding]:
    said: list[str] = []
    unreached: list[str] = []
    store = config.store_port

    def say(line: str) -> None:
        said.append(line)
        if "joined" in line:
            try:
                socket.create_connection((config.master_addr, store), timeout=REACH_S).close()
            except OSError as error:
                unreached.append(f"{config.master_addr}:{store} cannot be reached: {error}")

    agent = HostAgent(config, say)
    yield Finding("ok", "joining node 0")
    agent.run()
    yield from (Finding("bad", what, "a firewall? Ranks of all hosts connect to it") for what in unreached)
    if not unreached:
        yield Finding("ok", f"node 0 has the same versions and model, and is reached at {store} too")
