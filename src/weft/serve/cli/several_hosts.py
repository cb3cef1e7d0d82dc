"""Ranks on several hosts: the environment of torchrun, srun and LeaderWorkerSet, and agents."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from weft.engine.config.engine_options import ClusterOptions


@dataclass(frozen=True)
class Launcher:
    """Hosts by a launcher's environment. name: of the launcher; node: number of this host, None if unknown; master:
    address of node 0."""

    name: str
    nnodes: int
    node: int | None
    master: str | None


def with_launcher(options: dict[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """Fill unset multi-host options from the launcher's environment, and print them to stderr.

    Raises ValueError for a missing option.
    """
    launched, names = None, ("nnodes", "node_rank", "master_addr")
    nnodes, node, master = (options[name] for name in names)
    if nnodes != 1 and None in (nnodes, node, master):
        launched = launcher(environ)
    if launched is not None:
        nnodes = launched.nnodes if nnodes is None else nnodes
        node = launched.node if node is None else node
        master = master or launched.master
    if (nnodes or 1) == 1:
        if launched is None and (
            chosen := [n for n in ("node_rank", "master_addr", "cluster_key") if options[n] is not None]
        ):
            raise ValueError(f"--{chosen[0].replace('_', '-')} is for several hosts: add --nnodes")
        return options | {"nnodes": 1, "node_rank": None, "master_addr": None}
    alone = f", or --nnodes 1 to serve on this host alone, without the others of {launched.name}" if launched else ""
    if node is None:
        raise ValueError(f"--nnodes {nnodes} requires --node-rank: 0 on the host of --master-addr, then 1 and so on")
    if not master:
        raise ValueError(f"--nnodes {nnodes} requires --master-addr, the address of node 0{alone}")
    if options["cluster_key"] is None:
        raise ValueError(
            f"--nnodes {nnodes} requires --cluster-key FILE, a secret that is the same on every host "
            f"(head -c 32 /dev/urandom | base64 > cluster.key){alone}"
        )
    if launched is not None:
        print(f"weft: node {node} of {nnodes}, node 0 at {master}, by {launched.name}'s environment", file=sys.stderr)
    return options | dict(zip(names, (nnodes, node, master), strict=True))


@dataclass(frozen=True)
class SeveralHosts(ClusterOptions):
    """Meeting of the hosts that run this command together: start it on each host, with its --node-rank."""

    nnodes: int | None = None
    """Number of hosts that run the command together; omitted: from torchrun, srun or LeaderWorkerSet, else 1."""


def config_over_hosts(hosts: SeveralHosts, **options: Any) -> Any:
    """Return the EngineConfig of a command that measures or examines several hosts; None on one host.

    options: of the engine; attn_dp defaults to the number of hosts. Raises ValueError, also for wrong options.
    """
    hosts.check()
    found = with_launcher(vars(hosts), os.environ)
    if found["nnodes"] == 1:
        return None
    from weft.engine.config.config import EngineConfig

    return EngineConfig(**{"attn_dp": found["nnodes"], "device": "cpu"} | options | found)


def launcher(environ: Mapping[str, str]) -> Launcher | None:
    """Return the launcher that started this process; None if it is none of the known launchers.

    Raises ValueError if it starts several processes on a host: Weft starts its ranks by itself.
    """
    if "TORCHELASTIC_RUN_ID" in environ:
        if (ranks := int(environ.get("LOCAL_WORLD_SIZE", "1"))) > 1:
            raise ValueError(f"torchrun started {ranks} processes on this host; Weft starts ranks: --nproc-per-node 1")
        master = environ.get("MASTER_ADDR")
        return Launcher("torchrun", int(environ["GROUP_WORLD_SIZE"]), int(environ["GROUP_RANK"]), master)
    if "LWS_GROUP_SIZE" in environ:
        node = _number(environ, "LWS_WORKER_INDEX")  # LeaderWorkerSet before 0.5 sets none
        return Launcher("LeaderWorkerSet", int(environ["LWS_GROUP_SIZE"]), node, environ.get("LWS_LEADER_ADDRESS"))
    if "SLURM_STEP_NUM_NODES" in environ:
        nnodes, tasks = int(environ["SLURM_STEP_NUM_NODES"]), int(environ.get("SLURM_STEP_NUM_TASKS", "1"))
        if tasks > nnodes > 1:
            raise ValueError(f"srun started {tasks} tasks on {nnodes} hosts; Weft starts ranks: --ntasks-per-node 1")
        first = first_host(environ.get("SLURM_STEP_NODELIST", ""))
        return Launcher("srun", nnodes, _number(environ, "SLURM_NODEID"), first)
    return None


def _number(environ: Mapping[str, str], name: str) -> int | None:
    return int(environ[name]) if name in environ else None


def first_host(nodes: str) -> str | None:
    """Return the first host of SLURM's list: gpu03 of `gpu[03-05,9],login`, rack1n7 of `rack[1-2]n[7,9]`."""
    match = re.match(r"(?:[^\[,]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", match[0]) if match else None


def run_agent(config: Any) -> int:
    """Run this host's ranks for node 0 until node 0 ends. Raises EngineError, ModelError, LayoutError."""
    from transformers.utils import logging as transformers_logging

    from weft.engine.controller.startup import check_plans, read_model, resolve_defaults
    from weft.engine.hosts.agent import HostAgent

    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    given, config = config, resolve_defaults(config)
    # Node 0 ends if it refuses the layout, and a host that joins later would wait for it. All use its cost table.
    check_plans(replace(config, cost="auto"), read_model(config))
    config = replace(config, threads=given.threads, cpu_bind=given.cpu_bind)  # shares follow from the ranks of a start
    HostAgent(config, lambda line: print(line, file=sys.stderr, flush=True)).run()
    return 0
