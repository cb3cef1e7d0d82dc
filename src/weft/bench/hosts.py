"""Measurements over several hosts: hosts meet as those of an engine do, and node 0 says what is measured.

Each host then starts a process for each of its ranks, and these meet by torch.distributed's store.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from weft.bench import collectives_hosts, latency, tune_hosts
from weft.bench.ranks import Here, Report, run_ranks
from weft.engine.config import EngineConfig, EngineError
from weft.engine.hosts import addresses
from weft.engine.hosts.agent import HostAgent
from weft.engine.hosts.agents import Agents
from weft.engine.hosts.host_messages import Start

WORKS: dict[str, Callable[..., None]] = {
    "tune": tune_hosts.price,
    "collectives": collectives_hosts.measure,
    "latency": latency.measure_over_hosts,
}
"""What node 0 may ask for: each is called by every rank with what it needs of its host, and with what node 0 says."""


def over_hosts(
    config: EngineConfig, work: str, describe: Callable[[], dict[str, Any]], say: Callable[[str], None]
) -> Iterator[Any]:
    """This host's part of one of WORKS; yields what rank 0 reports, so nothing on other hosts than node 0.

    config: with layout and hosts. describe: gives what node 0 says to all ranks, in JSON's types; called there once
    all hosts have come. say: is given lines for whoever looks on. Raises EngineError, CommError.
    """
    assert config.master_addr is not None
    address = addresses.resolve(config.master_addr, config.master_port)
    interface = config.interface or addresses.interface_to(address, config.master_port)
    addresses.check_interface(interface)
    node = config.node_rank or 0
    said = _tell(config, {"work": work, **describe()}) if node == 0 else _hear(config, work, say)
    here = Here(config.mesh, interface, (config.master_addr, config.store_port), config.plugins, config.model)
    yield from run_ranks([r for r in range(config.mesh.world) if config.mesh.host_of(r) == node], _rank, here, said)


def _tell(config: EngineConfig, said: dict[str, Any]) -> dict[str, Any]:
    agents = Agents(config)
    try:
        agents.wait_for_all(config.join_timeout_s, lambda: None)
        agents.start(said, None, 1)
    finally:
        agents.close()
    return said


def _hear(config: EngineConfig, work: str, say: Callable[[str], None]) -> dict[str, Any]:
    agent = _Hearing(config, say)
    agent.run()
    if agent.said is None or agent.said.get("work") != work:
        raise EngineError(f"node 0 measures nothing here: start the same command there as on node {agent.node}")
    return agent.said


class _Hearing(HostAgent):
    """Joins, and leaves with what node 0 says first."""

    said: dict[str, Any] | None = None

    def _start(self, start: Start) -> None:
        self.said = start.config

    def _follow(self, frame: bytes) -> bool:
        return super()._follow(frame) and self.said is None


def _rank(rank: int, directory: Path, report: Report, here: Here, said: dict[str, Any]) -> None:
    (meeting := directory / "ranks").mkdir(exist_ok=True)  # of the same name on every host
    os.environ["GLOO_SOCKET_IFNAME"] = here.interface
    WORKS[said["work"]](rank, meeting, report, here, said)
