"""`weft doctor`."""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from weft import __version__
from weft.comm.cores import own_cores
from weft.kernels.build import BUILT, CPU_KERNELS, MODEL_KERNELS, nvcc
from weft.serve.cli.command import ModelDir, Revision, model_dir, user_errors
from weft.serve.cli.several_hosts import SeveralHosts, config_over_hosts

SHARED_MEMORY = 2**30
"""Sufficient bytes of /dev/shm for the ranks of a host; containers often get 64 MiB."""
DESCRIPTORS = 4096
OLD_TABLE_DAYS = 30
MAX_CLOCK_S, REACH_S = 1.0, 5.0
FIREWALL = "a firewall? Ranks of all hosts connect to it"
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
PACKAGES = ("torch", "transformers", "tokenizers", "llguidance", "apache-tvm-ffi", "uvicorn", "fastapi")


@dataclass(frozen=True)
class Finding:
    """Result of one check. why: consequence and remedy, unless the level is ok."""

    level: Literal["ok", "slow", "bad"]
    what: str
    why: str = ""

    @classmethod
    def of(cls, fine: bool, what: str, why: str) -> Finding:
        """Return a finding about `what`: of level ok if it is `fine`, else slow, for the reason `why`."""
        return cls("ok", what) if fine else cls("slow", what, why)


@dataclass(frozen=True)
class Command:
    """Check this host: print what Weft finds, what will be slow, and why. Exit code 1 if something will not work.

    With --nnodes, started on each host with its --node-rank, it also checks the hosts' interfaces, ports, versions,
    model files and clocks, and ends once all hosts have joined.

    Examples:
      weft doctor
      weft doctor DIR --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --cluster-key FILE
    """

    model: ModelDir = None
    """Model to compare between the hosts of --nnodes; omitted: the embedded model."""
    revision: Revision = None
    cluster: SeveralHosts = field(default_factory=SeveralHosts)

    def run(self) -> int:
        """Print each finding at once and return the exit code. Raises UserError, ModelError."""
        bad, hosts = False, self._between_hosts()
        for finding in itertools.chain(examine(), hosts):
            print(f"{finding.level:5}{finding.what}", flush=True)
            if finding.why:
                print(f"     {finding.why}", flush=True)
            bad |= finding.level == "bad"
        return int(bad)

    def _between_hosts(self) -> Iterator[Finding]:
        with user_errors():
            directory = model_dir(self.model, revision=self.revision)
            config = config_over_hosts(self.cluster, model=directory)
        return iter(()) if config is None else between_hosts(config)


def examine() -> Iterator[Finding]:
    """Yield all findings about this host."""
    yield Finding("ok", f"weft {__version__}, Python {platform.python_version()}, {platform.platform()}")
    yield from packages()
    yield from processor(Path("/proc/cpuinfo").read_text(), len(os.sched_getaffinity(0)), os.getloadavg()[0])
    yield shares()
    yield memory(Path("/dev/shm"))
    yield descriptors(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    if all((BUILT / f"{kernels[0]}.so").exists() for kernels in (CPU_KERNELS, MODEL_KERNELS)):
        yield Finding("ok", "kernels of transport shm and of models on CPUs are installed")
    else:
        yield compiler("c++", "g++", "clang++")
    yield table()
    yield from gpus()


def packages() -> Iterator[Finding]:
    """Yield the versions of the packages that Weft depends on."""
    versions, missing = [], []
    for name in PACKAGES:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    yield Finding("ok", ", ".join(versions))
    if missing:
        yield Finding("bad", f"not installed: {', '.join(missing)}", "pip install 'weft[serve]'")


def processor(cpuinfo: str, cores: int, load: float) -> Iterator[Finding]:
    """Yield findings about `cores` and load. cpuinfo: text of /proc/cpuinfo; load: mean runnable processes."""
    lines = (line.split(":", 1)[1] for line in cpuinfo.splitlines() if line.startswith(("flags", "Features")))
    flags = set(next(lines, "").split())
    best = next((name for name in ("avx512f", "avx2", "asimd") if name in flags), None)
    why = "no vector instructions that Weft's kernels know: sums of transport shm take scalar ones"
    yield Finding.of(best is not None, f"{cores} cores, {best or 'scalar'}", why)
    if load > 0.5 * cores:
        why = "others use the cores: ranks wait for one another, and measurements mean nothing"
        yield Finding("slow", f"load {load:.1f} on {cores} cores", why)


def shares() -> Finding:
    """Return the finding about default threads and cores of CPU ranks, for as many ranks as NUMA nodes."""
    from weft.engine.config.config import EngineConfig
    from weft.engine.config.cpu_shares import with_cpu_shares

    nodes = len(own_cores())
    config = with_cpu_shares(EngineConfig(attn_dp=nodes, ep=nodes, device="cpu"))
    where = "any core" if config.cpu_bind == "off" else f"cores {config.cpu_bind}"
    return Finding("ok", f"{nodes} NUMA node(s); {nodes} CPU rank(s) get {config.threads} thread(s) each, {where}")


def memory(shared: Path) -> Finding:
    """Return the finding about the file system of shared memory."""
    if not shared.is_dir():
        return Finding("bad", f"no {shared}", "transport shm has no memory to share; use --transport gloo")
    free = shutil.disk_usage(shared).free
    why = "a large step may not fit; give the container more, such as docker run --shm-size 4g"
    return Finding.of(free >= SHARED_MEMORY, f"{free / 2**20:,.0f} MiB free in {shared}", why)


def descriptors(hard: int) -> Finding:
    """Return the finding about open files. hard: the process's hard limit."""
    unlimited = hard == resource.RLIM_INFINITY
    what = f"{'any number of' if unlimited else hard} open files"
    return Finding.of(unlimited or hard >= DESCRIPTORS, what, "fewer clients at once; raise it with ulimit -Hn")


def compiler(*names: str) -> Finding:
    """Return the finding about the compiler of native kernels. names: programs to look for."""
    executable = next((path for name in names if (path := shutil.which(name))), None)
    if executable:
        return Finding("ok", f"compiler {executable}")
    return Finding("slow", f"none of {', '.join(names)}", "transport shm cannot be built: ranks use gloo; install g++")


def gpus() -> Iterator[Finding]:
    """Yield findings about GPUs, peer access between them, nvcc, and their cost table."""
    import torch

    if not torch.cuda.is_available():
        yield Finding("ok", "no GPU that torch can use")
        return
    count = torch.cuda.device_count()
    for gpu in range(count):
        about = torch.cuda.get_device_properties(gpu)
        size, arch = f"{about.total_memory / 2**30:.0f} GiB", f"sm_{about.major}{about.minor}"
        yield Finding("ok", f"GPU {gpu}: {about.name}, {size}, {arch}")
    apart = [(a, b) for a, b in itertools.permutations(range(count), 2) if not torch.cuda.can_device_access_peer(a, b)]
    if apart:
        pairs = ", ".join(f"{a}→{b}" for a, b in apart)
        why = "transport peer cannot be used between them; NCCL goes by the host"
        yield Finding("slow", f"no peer access {pairs}", why)
    elif count > 1:
        yield Finding("ok", "every GPU reaches the others' memory")
    if count > 1 and (smi := shutil.which("nvidia-smi")):
        yield from links(subprocess.run([smi, "topo", "-m"], capture_output=True, text=True, timeout=60).stdout)
    if (BUILT / "weft_cuda.so").exists():
        yield Finding("ok", "kernels of transport peer are installed")
    elif not shutil.which(nvcc()):
        why = "neither transport peer nor FP8 experts of prompts can be built; install CUDA's nvcc, or set PATH to it"
        yield Finding("slow", "no nvcc", why)
    yield table(gpus=True)


def links(matrix: str) -> Iterator[Finding]:
    """Yield the kinds of links between GPUs. matrix: output of `nvidia-smi topo -m`."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split("\t") for line in matrix.splitlines()]
    rows = [[cell.strip() for cell in line] for line in lines if re.fullmatch(r"GPU\d+", line[0].strip())]
    joined: dict[str, list[str]] = {}
    for row in rows:
        for other, kind in zip(rows, row[1:], strict=False):
            if row[0] < other[0]:
                joined.setdefault(kind, []).append(f"{row[0]}–{other[0]}")
    for kind, pairs in joined.items():
        fast = kind.startswith("NV")
        why = "collectives between them go over PCI Express: prefer layouts with few of them"
        yield Finding.of(fast, f"{'NVLink' if fast else 'no NVLink'} ({kind}) {', '.join(pairs)}", why)


def table(gpus: bool = False) -> Finding:
    """Return the finding about this host's cost table of `weft tune`, for CPUs or GPUs."""
    from weft.planner.cost import host_table, read_table
    from weft.planner.spec import LayoutError

    path = host_table(gpus)
    if gpus and not path.exists():
        return Finding("ok", "no cost table of this host's GPUs yet; the first weft serve on several measures one")
    if not path.exists():
        return Finding("slow", "no cost table of this host", "plans are made by presets; run weft tune once")
    try:
        read_table(path)
    except LayoutError as error:
        return Finding("bad", f"{path} cannot be used", f"{error}; run weft tune again")
    days = (time.time() - path.stat().st_mtime) / 86400
    why = "the host may have changed since; run weft tune again"
    return Finding.of(days <= OLD_TABLE_DAYS, f"{path}, measured {days:.0f} days ago", why)


def between_hosts(config: Any) -> Iterator[Finding]:
    """Join the other hosts like the agents of ranks, yield the findings, and leave. No rank is started.

    config: the EngineConfig of this host.
    """
    from weft.engine.config.config import EngineError
    from weft.engine.hosts import addresses

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


def _check_as_node_0(config: Any) -> Iterator[Finding]:
    from weft.engine.hosts.agents import Agents

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
        yield from (Finding("bad", f"node {node} is refused", why) for node, why in agents.refused.items())
        opened.settimeout(REACH_S)
        try:
            for _ in agents.clocks:
                opened.accept()[0].close()
        except TimeoutError:
            yield Finding("bad", f"not every host reaches port {store} here", FIREWALL)
        agents.close()


def _clock(node: int, ahead: float) -> Finding:
    what = f"node {node} is there, with the same versions and model; its clock is {ahead:+.2f} s off"
    return Finding.of(abs(ahead) <= MAX_CLOCK_S, what, "logs of both hosts do not fit each other: set the clocks")


def _check_as_agent(config: Any) -> Iterator[Finding]:
    from weft.engine.hosts.agent import HostAgent

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
    yield from (Finding("bad", what, FIREWALL) for what in unreached)
    if not unreached:
        yield Finding("ok", f"node 0 has the same versions and model, and is reached at {store} too")
