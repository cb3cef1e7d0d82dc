"""Threads and cores of CPU ranks: an equal share of the host's cores for each rank, in one NUMA node."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from weft.comm.cores import core_list, core_text, own_cores, text_of
from weft.engine.config.config import EngineConfig
from weft.engine.config.device import on_gpus

log = logging.getLogger(__name__)
MIN_SHARE = 4
"""Cores that each rank must keep if one core of its node is left to the controller and the HTTP server."""


def divide(
    nodes: Mapping[int, Sequence[int]], ranks: int, quota: float = math.inf, taken: Collection[int] = ()
) -> tuple[int, str, str]:
    """Divide the cores of a host among its ranks. Return the threads of each rank, the value of cpu_bind, and the
    reason if ranks are not bound.

    Args:
        nodes: a CPU of each core, by NUMA node.
        ranks: number of ranks on the host.
        quota: CPUs that a container may use at a time.
        taken: CPUs of other engines' ranks.
    """
    if quota < (total := sum(map(len, nodes.values()))):  # containers of a host would all choose the same cores
        return max(1, int(quota) // ranks), "off", f"the container's quota is {quota:g} CPUs"
    if total < ranks:
        return 1, "off", f"{ranks} ranks share {total} core(s)"
    placed = dict.fromkeys(sorted(nodes), 0)
    for _ in range(ranks):
        placed[max(placed, key=lambda node: len(nodes[node]) / (placed[node] + 1))] += 1
    used = [(len(nodes[node]), count) for node, count in placed.items() if count]
    # Shares are equal, since ranks wait for one another.
    share = min((n - 1) // count if (n - 1) // count >= MIN_SHARE else n // count for n, count in used)
    cores = [nodes[node][i * share : (i + 1) * share] for node, count in placed.items() for i in range(count)]
    if shared := set().union(*cores) & set(taken):
        return share, "off", f"ranks of another engine use core(s) {core_text(shared)}; see --cpu-bind"
    return share, "|".join(map(core_text, cores)), ""


def divide_servers(nodes: Mapping[int, Sequence[int]], ranks: int, servers: int) -> list[str]:
    """Return cpu_bind of each of `servers` servers with `ranks` ranks each, which share a host: see `divide`."""
    cores = divide(nodes, ranks * servers)[1].split("|")
    return ["|".join(cores[i * ranks : (i + 1) * ranks]) or "off" for i in range(servers)]


def cores_left(cpu_bind: str, places: Sequence[int]) -> str:
    """Return cpu_bind for the ranks in these places of a host."""
    parts = cpu_bind.split("|")
    return cpu_bind if cpu_bind in ("auto", "off") else "|".join(parts[place] for place in places)


def cpu_quota(cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float:
    """Return the CPUs that cgroups of version 1 or 2 let this process use at a time; infinity without a limit."""
    quotas = [math.inf]
    for controllers, path in re.findall(r"^\d+:(|(?:\S*,)?cpu(?:,\S*)?):/*(.*)$", text_of(own), re.MULTILINE):
        folder = cgroups / ("cpu" if controllers else "") / path
        for each in (folder, *folder.parents):  # in a container the top may be its own, and the path be missing
            version1 = f"{text_of(each / 'cpu.cfs_quota_us')} {text_of(each / 'cpu.cfs_period_us')}"
            if found := re.fullmatch(r"(\d+) (\d+)", text_of(each / "cpu.max") or version1):
                quotas.append(int(found[1]) / int(found[2]))
    return min(quotas)


def cores_of_engines() -> set[int]:
    """Return the CPUs on which ranks of this host's engines may run."""
    status = re.compile(r"Name:\tweft-rank-.*^Cpus_allowed_list:\t(\S+)$", re.MULTILINE | re.DOTALL)
    found = (status.match(text_of(path)) for path in Path("/proc").glob("[0-9]*/status"))
    return set().union(*(core_list(ranks[1]) for ranks in found if ranks))


def with_cpu_shares(config: EngineConfig) -> EngineConfig:
    """Return the configuration with values for `auto` of threads and cpu_bind; a rank on a GPU needs one thread."""
    omp, shares = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0], (1, "off", "")
    own_host = config.mesh.hosts == 1 or config.master_addr is not None
    if config.executor == "process" and own_host and not on_gpus(config):
        if config.threads == "auto" and omp.isdecimal():
            shares = int(omp) or 1, "off", ""
        elif config.cores:
            shares = min(map(len, config.cores)), config.cpu_bind, ""
        else:
            shares = divide(own_cores(), config.ranks_of_host, cpu_quota(), cores_of_engines())
    threads, cpu_bind, reason = shares
    if reason and config.cpu_bind == "auto":
        log.warning("ranks are not bound to cores: %s", reason)
    cpu_bind = cpu_bind if config.cpu_bind == "auto" else config.cpu_bind
    return replace(config, cpu_bind=cpu_bind, threads=threads if config.threads == "auto" else config.threads)
