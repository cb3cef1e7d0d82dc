"""Measurements over several hosts: hosts meet like an engine's hosts, and node 0 describes the measurement to them.

Each host then starts a process per rank, and the ranks meet by torch.distributed's store.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from weft.engine.config.config import EngineConfig, EngineError
from weft.engine.hosts import addresses
from weft.engine.hosts.agent import HostAgent
from weft.engine.hosts.agents import Agents
from weft.engine.messages.host_messages import Start
from weft.tune.ranks import HostContext, Report, run_ranks

RankWork = Callable[[int, Path, Report, HostContext, dict[str, Any]], None]
"""Function of a rank's part of a measurement, called with its rank, a folder shared by its host's ranks, a function to
report with, facts of its host, and node 0's description."""


def run_over_hosts(
    config: EngineConfig, work: RankWork, describe: Callable[[], dict[str, Any]], say: Callable[[str], None]
) -> Iterator[Any]:
    """Run this host's ranks of a measurement. Yields the reports of rank 0, on node 0 only.

    Args:
        work: a rank's part; a function of a module, the same on all hosts.
        describe: returns node 0's description for all ranks, in JSON's types; called there once all hosts have joined.
        say: called with lines for the user.

    Raises EngineError, CommError.
    """
    name = f"{work.__module__}.{work.__qualname__}"
    assert config.master_addr is not None
    _, interface = addresses.route_to_node_0(config)
    node = config.node_rank or 0
    with addresses.reserve_store(config) if node == 0 else nullcontext():
        task = _announce(config, {"work": name, **describe()}) if node == 0 else _await_task(config, name, say)
        store = config.master_addr, config.store_port
        host = HostContext(config.mesh, interface, store, config.plugins, config.model)
        ranks = [r for r in range(config.mesh.world) if config.mesh.host_of(r) == node]
        yield from run_ranks(ranks, _rank, work, host, task)


def _announce(config: EngineConfig, task: dict[str, Any]) -> dict[str, Any]:
    agents = Agents(config)
    try:
        agents.wait_for_all(config.join_timeout_s, lambda: None)
        agents.start(task, None, 1)
    finally:
        agents.close()
    return task


def _await_task(config: EngineConfig, work: str, say: Callable[[str], None]) -> dict[str, Any]:
    agent = _MeasurementAgent(config, say)
    agent.run()
    if agent.task is None or agent.task.get("work") != work:
        raise EngineError(f"node 0 measures nothing here: start the same command there as on node {agent.node}")
    return agent.task


class _MeasurementAgent(HostAgent):
    """Agent that joins, and leaves with node 0's first message."""

    task: dict[str, Any] | None = None

    def _start(self, start: Start) -> None:
        self.task = start.config

    def _follow(self, frame: bytes) -> bool:
        return super()._follow(frame) and self.task is None


def _rank(rank: int, directory: Path, report: Report, work: RankWork, host: HostContext, task: dict[str, Any]) -> None:
    (meeting := directory / "ranks").mkdir(exist_ok=True)  # the same name on every host
    os.environ["GLOO_SOCKET_IFNAME"] = host.interface
    work(rank, meeting, report, host, task)
