"""Time of each step by transport: a preset, or a table measured on the host by `weft tune`.

Presets are latency plus bytes over bandwidth (the α-β model of Hockney, doi:10.1016/S0167-8191(06)80021-9): starting
points for planning, from public datasheets and the measurements under `bench/results`.
"""

from __future__ import annotations

import bisect
import json
import math
import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

from weft.planner.spec import LayoutError

T = TypeVar("T")


class Cost(Protocol):
    """Predicted times in microseconds; `bytes_moved` is what the busiest rank receives.

    A collective of `ranks` ranks, evenly spread over `hosts` hosts, has an infinite time if nothing predicts it: no
    plan uses it.
    """

    @property
    def name(self) -> str: ...

    def collective_us(self, kind: str, ranks: int, bytes_moved: float, hosts: int = 1) -> float: ...

    def local_us(self, bytes_touched: float) -> float: ...

    def epilogue_us(self, bytes_touched: float) -> float: ...


@dataclass(frozen=True)
class Offer:
    """Capabilities and costs of a transport. None: no limit."""

    transport: str
    kinds: frozenset[str]
    epilogues: frozenset[str]  # kinds that can run residual add and norm in the same call
    cost: Cost
    max_bytes: int | None = None  # maximum size of a call's largest tensor
    max_normed_bytes: int | None = None  # maximum size of a row in an epilogue
    max_ranks: int | None = None  # maximum ranks of a group
    max_hosts: int | None = None  # maximum hosts of a group
    live_sizes: bool = True  # accepts row counts in device memory, as captured steps with dispatch require

    def serves(self, ranks: int, hosts: int) -> bool:
        """Return True if the transport serves groups of `ranks` ranks on `hosts` hosts."""
        few_ranks = self.max_ranks is None or ranks <= self.max_ranks
        return few_ranks and (self.max_hosts is None or hosts <= self.max_hosts)


@dataclass(frozen=True)
class Network:
    """Network between hosts. All bytes of a collective over hosts are assumed to cross it."""

    us: float  # latency of a collective with one rank of each host
    hop_us: float  # extra latency for each doubling of the ranks of a host
    gb_s: float  # bandwidth into a rank

    def collective_us(self, ranks: int, bytes_moved: float, hosts: int) -> float:
        """Return the µs of one collective over hosts, as `Cost.collective_us`."""
        return self.us + self.hop_us * math.log2(ranks / hosts) + bytes_moved / (self.gb_s * 1e3)


@dataclass(frozen=True)
class AlphaBeta:
    """Latency and bandwidth of a transport; GB/s are 10⁹ bytes a second."""

    name: str
    alpha_us: float  # latency of any collective
    hop_us: float  # extra latency for each doubling of the group
    gb_s: float  # bandwidth into a rank
    launch_us: float  # latency of a local elementwise kernel
    mem_gb_s: float  # memory bandwidth of a local elementwise kernel
    network: Network | None = None  # between hosts, if it is known

    def collective_us(self, kind: str, ranks: int, bytes_moved: float, hosts: int = 1) -> float:
        """Return the µs of a collective, as `Cost.collective_us`. A fused edge is one launch: it pays alpha once."""
        if hosts > 1:
            return math.inf if self.network is None else self.network.collective_us(ranks, bytes_moved, hosts)
        return self.alpha_us + self.hop_us * math.log2(ranks) + bytes_moved / (self.gb_s * 1e3)

    def local_us(self, bytes_touched: float) -> float:
        """Return the µs of one local elementwise kernel."""
        return self.launch_us + bytes_touched / (self.mem_gb_s * 1e3)

    def epilogue_us(self, bytes_touched: float) -> float:
        """Return the µs that an epilogue adds to its collective: its memory traffic, but no launch."""
        return bytes_touched / (self.mem_gb_s * 1e3)


@dataclass(frozen=True)
class Table:
    """Measured times of a transport, interpolated on logarithmic axes.

    Below the first point the time is constant, beyond the last it grows with the bytes. An unmeasured number of ranks
    uses the next larger one's times; beyond the largest, its times in proportion.
    """

    name: str
    us: dict[tuple[str, int, int], tuple[tuple[float, float], ...]]  # (kind, ranks, hosts) → (bytes moved, µs)
    local: tuple[tuple[float, float], ...]  # points (bytes touched, µs) of local kernels
    epilogue: tuple[tuple[float, float], ...]  # the same of epilogues
    network: Network | None = None  # for collectives over hosts that were not measured

    def collective_us(self, kind: str, ranks: int, bytes_moved: float, hosts: int = 1) -> float:
        """Return the measured µs of one collective, as `Cost.collective_us`; infinite if the kind was not measured."""
        sizes = sorted(n for k, n, over in self.us if k == kind and over == hosts)
        if not sizes:
            if hosts == 1 or self.network is None:
                return math.inf
            return self.network.collective_us(ranks, bytes_moved, hosts)
        size = next((n for n in sizes if n >= ranks), sizes[-1])
        return _interpolate(self.us[kind, size, hosts], bytes_moved) * max(1.0, ranks / size)

    def local_us(self, bytes_touched: float) -> float:
        """Return the measured µs of one local elementwise kernel."""
        return _interpolate(self.local, bytes_touched)

    def epilogue_us(self, bytes_touched: float) -> float:
        """Return the measured µs that an epilogue adds to its collective."""
        return _interpolate(self.epilogue, bytes_touched)


def _interpolate(points: tuple[tuple[float, float], ...], bytes_moved: float) -> float:
    at = bisect.bisect_left(points, (bytes_moved, 0.0))
    if at == 0:
        return points[0][1]
    (low, before), (high, after) = points[at - 1], points[min(at, len(points) - 1)]
    if at == len(points):
        return before * bytes_moved / low
    if min(before, after) <= 0:
        return before + (after - before) * (bytes_moved - low) / (high - low)
    return before * (after / before) ** (math.log(bytes_moved / low) / math.log(high / low))


@dataclass(frozen=True)
class Costs:
    """Cost models by transport and number of ranks of the world that was measured.

    The transport `*` is the default of all others; the world 0 matches any.
    """

    name: str
    by_transport: dict[str, dict[int, Cost]]

    def of(self, transport: str, world: int) -> Cost:
        """Return a transport's cost in a world of `world` ranks: the next larger one measured, else the largest.

        Raises LayoutError with the measured worlds.
        """
        by_world = self.by_transport.get(transport) or self.by_transport.get("*")
        if by_world is None and world == 1:  # no exchanges, and all tables have equal local times
            by_world = next(iter(self.by_transport.values()))
        if by_world is None:
            known = ", ".join(self.by_transport) or "nothing"
            raise LayoutError(f"{self.name} has no times of {transport}, only of {known}; measure it: weft tune")
        return by_world[min((w for w in by_world if w >= world), default=max(by_world))]


def over_network(model: Costs, network: Network) -> Costs:
    """Return the cost model with this network between hosts, unless it has one."""

    def priced(cost: Cost) -> Cost:
        if isinstance(cost, AlphaBeta | Table) and cost.network is None:
            return replace(cost, network=network)
        return cost

    by_transport = {name: {n: priced(c) for n, c in table.items()} for name, table in model.by_transport.items()}
    return Costs(model.name, by_transport)


def read_table(path: Path, name: str = "") -> Costs:
    """Return the table that `weft tune` wrote, named `name` or after the file. Raises LayoutError if it is no table."""
    name = name or str(path)
    try:
        table = json.loads(path.read_text())
        local, epilogue = _points(table["local"]), _points(table["epilogue"])
        network = Network(**table["network"]) if "network" in table else None
        by_transport: dict[str, dict[int, Cost]] = {}
        for transport, rows in table["transports"].items():
            for world in {row["world"] for row in rows}:
                us: dict[tuple[str, int, int], list[tuple[float, float]]] = {}
                entries = [r for r in rows if r["world"] == world]
                kinds = {r["kind"] for r in entries}  # other kinds keep their times from other worlds
                for row in (*entries, *(r for r in rows if r["kind"] not in kinds)):
                    key = row["kind"], row["ranks"], row.get("hosts", 1)
                    us.setdefault(key, []).append((float(row["bytes"]), float(row["us"])))
                points = {key: _points(found) for key, found in us.items()}
                by_transport.setdefault(transport, {})[world] = Table(name, points, local, epilogue, network)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LayoutError(f"{path} is no table of weft tune: {type(error).__name__}: {error}") from error
    return Costs(name, by_transport)


def _points(pairs: Iterable[Sequence[float]]) -> tuple[tuple[float, float], ...]:
    points = tuple(sorted((float(size), float(us)) for size, us in pairs))
    if not points or not all(size > 0 and us >= 0 for size, us in points):
        raise ValueError("times are missing, or not above 0 bytes and µs")
    return points


def read_tuning(path: Path, key: str, kind: type[T]) -> T:
    """Return the best settings that `weft tune` found; `kind`'s defaults if it did not search.

    key: shm_tuning or peer_tuning. Raises LayoutError if the file is no table, or one of another version.
    """
    if not path.is_file():
        return kind()
    try:
        return kind(**json.loads(path.read_text()).get(key, {}))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        wrong = f"{path} is no table of weft tune, or of another version's (weft tune writes a new one)"
        raise LayoutError(f"{wrong}: {type(error).__name__}: {error}") from error


def cache_folder() -> Path:
    """Return the folder of files made for this host and user: tables of times, compiled kernels."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft"


def host_table(gpus: bool = False, hosts: int = 1) -> Path:
    """Return the default path of this host's table, for `weft tune` and the engine.

    gpus: table for ranks on GPUs, with other times of local kernels. hosts: number of hosts, this one the first.
    """
    over = f"-{hosts}-hosts" if hosts > 1 else ""
    return cache_folder() / f"tune-{socket.gethostname()}{'-gpu' * gpus}{over}.json"


def find_host_table(gpus: bool, hosts: int = 1) -> Path | None:
    """Return the path of the table for `hosts` hosts if it exists, else this host's own; None without either."""
    return next((path for path in (host_table(gpus, hosts), host_table(gpus)) if path.is_file()), None)


INFINIBAND = Network(us=20.0, hop_us=5.0, gb_s=46.0)
"""A 400 Gb/s port per GPU, at which collectives reach 46 GB/s; latencies are assumed, not measured."""
ETHERNET = Network(us=300.0, hop_us=300.0, gb_s=1.0)

PRESETS: dict[str, AlphaBeta] = {
    p.name: p
    for p in (
        AlphaBeta("cpu-gloo", alpha_us=300.0, hop_us=300.0, gb_s=1.0, launch_us=4.0, mem_gb_s=8.0, network=ETHERNET),
        AlphaBeta("cpu-shm", alpha_us=1.5, hop_us=0.5, gb_s=12.0, launch_us=4.0, mem_gb_s=8.0, network=ETHERNET),
        AlphaBeta("h100-nvlink", 10.5, hop_us=0.5, gb_s=368.0, launch_us=2.0, mem_gb_s=2700.0, network=INFINIBAND),
        AlphaBeta("h200-nvlink", 10.5, hop_us=0.5, gb_s=368.0, launch_us=2.0, mem_gb_s=4000.0, network=INFINIBAND),
        AlphaBeta("gb200-nvl72", 10.5, hop_us=0.4, gb_s=720.0, launch_us=2.0, mem_gb_s=6500.0, network=INFINIBAND),
        AlphaBeta("pcie-gen5", 15.0, hop_us=4.0, gb_s=45.0, launch_us=2.0, mem_gb_s=1500.0, network=INFINIBAND),
    )
}


TABLES = {"h200x4": Path(__file__).with_name("h200x4.json")}
"""Tables in the package, as written by `weft tune`: transports peer and torchdist/nccl on four H200s."""
GPU_COSTS = "h200x4"
"""Cost model of GPUs that were never measured."""


def costs(name: str) -> Costs:
    """Return a cost model by name: a preset; `cpu`, the CPU presets; one of TABLES; or a path FILE.json.

    Raises LayoutError with the known names.
    """
    if name.endswith(".json"):
        return read_table(Path(name))
    if name == "cpu":
        return Costs(name, {"shm": {0: PRESETS["cpu-shm"]}, "*": {0: PRESETS["cpu-gloo"]}})
    if name in TABLES:
        return read_table(TABLES[name], name)
    if name not in PRESETS:
        known = ", ".join(("cpu", *TABLES, *PRESETS))
        raise LayoutError(f"no cost preset {name!r}; known: {known}, or a table FILE.json of weft tune")
    return Costs(name, {"*": {0: PRESETS[name]}})


def host_costs(gpus: bool, transports: Iterable[str], hosts: int = 1) -> Costs:
    """Return the table for `hosts` hosts or this host, else the default model. Raises LayoutError.

    With `gpus`, a table must have times of `transports` to be used.
    """
    if (table := find_host_table(gpus, hosts)) is not None:
        found = costs(str(table))
        if not gpus or all(name in found.by_transport for name in transports):
            return found
    return costs(GPU_COSTS if gpus else "cpu")
