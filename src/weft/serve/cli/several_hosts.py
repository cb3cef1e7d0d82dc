"""Ranks on several hosts: what torchrun, srun and LeaderWorkerSet say of them in the environment, and agents."""

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
    """What a launcher's environment says. name: of the launcher. node: None where it does not say which host this is.
    master: where node 0 is."""

    name: str
    nnodes: int
    node: int | None
    master: str | None


def with_launcher(options: dict[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """The engine's options, with what they leave open of several hosts as a launcher says it; stderr shows it.

    Raises ValueError where something is missing.
    """
    said, names = None, ("nnodes", "node_rank", "master_addr")
    nnodes, node, master = (options[name] for name in names)
    if nnodes != 1 and None in (nnodes, node, master):
        said = launcher(environ)
    if said is not None:
        nnodes = said.nnodes if nnodes is None else nnodes
        node = said.node if node is None else node
        master = master or said.master
    if (nnodes or 1) == 1:
        if said is None and (
            given := [n for n in ("node_rank", "master_addr", "cluster_key") if options[n] is not None]
        ):
            raise ValueError(f"--{given[0].replace('_', '-')} is of several hosts: add --nnodes")
        return options | {"nnodes": 1, "node_rank": None, "master_addr": None}
    alone = f", or --nnodes 1 for one host without the others that {said.name} has started" if said else ""
    if node is None:
        raise ValueError(f"--nnodes {nnodes} takes --node-rank: 0 where --master-addr is, then 1 and so on")
    if not master:
        raise ValueError(f"--nnodes {nnodes} takes --master-addr, the address of node 0{alone}")
    if options["cluster_key"] is None:
        raise ValueError(
            f"--nnodes {nnodes} takes --cluster-key FILE, a secret that is the same on every host "
            f"(head -c 32 /dev/urandom | base64 > cluster.key){alone}"
        )
    if said is not None:
        print(f"weft: node {node} of {nnodes}, node 0 at {master}, by {said.name}'s environment", file=sys.stderr)
    return options | dict(zip(names, (nnodes, node, master), strict=True))


@dataclass(frozen=True)
class SeveralHosts(ClusterOptions):
    """Meeting of the hosts that run this command together: start it on each host, with its --node-rank."""

    nnodes: int | None = None
    """Hosts that run the command together; omitted: what torchrun, srun or LeaderWorkerSet say, else 1."""


def config_over_hosts(hosts: SeveralHosts, **options: Any) -> Any:
    """Return the EngineConfig of a command that measures or examines several hosts; None on one host.

    options: of the engine; without attn_dp, a DP group for each host. Raises ValueError, also where these are wrong.
    """
    hosts.check()
    found = with_launcher(vars(hosts), os.environ)
    if found["nnodes"] == 1:
        return None
    from weft.engine.config.config import EngineConfig

    return EngineConfig(**{"attn_dp": found["nnodes"], "device": "cpu"} | options | found)


def launcher(environ: Mapping[str, str]) -> Launcher | None:
    """The launcher that started this process, if it is one of those that are known.

    Raises ValueError where it starts several processes on a host: Weft starts its ranks by itself.
    """
    if "TORCHELASTIC_RUN_ID" in environ:
        each = int(environ.get("LOCAL_WORLD_SIZE", "1"))
        if each > 1:
            raise ValueError(f"torchrun started {each} processes on this host; Weft starts ranks: --nproc-per-node 1")
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
    """The first of SLURM's list of hosts: `gpu[03-05,9],login` is gpu03, `rack[1-2]n[7,9]` is rack1n7."""
    found = re.match(r"(?:[^\[,]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", found[0]) if found else None


def run_agent(config: Any) -> int:
    """Serves node 0 with this host's ranks until it ends. Raises EngineError, ModelError, LayoutError."""
    from transformers.utils import logging as transformers_logging

    from weft.engine.controller.startup import check_plans, read_model, resolve_defaults
    from weft.engine.hosts.agent import HostAgent

    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    config = resolve_defaults(config)
    # Node 0 refuses what cannot be and ends, and a host that comes later would wait for it. All plan by its cost table.
    check_plans(replace(config, cost="auto"), read_model(config))
    HostAgent(config, lambda line: print(line, file=sys.stderr, flush=True)).run()
    return 0
