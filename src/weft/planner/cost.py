"""What a step costs, by transport: a preset, or a table measured on the host by `weft tune`.

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

    A collective of `ranks` ranks on so many `hosts`, as many on each, takes infinitely long where nothing says how
    long: a plan never takes it.
    """

    @property
    def name(self) -> str: ...

    def collective_us(self, kind: str, ranks: int, bytes_moved: float, hosts: int = 1) -> float: ...

    def local_us(self, bytes_touched: float) -> float: ...

    def epilogue_us(self, bytes_touched: float) -> float: ...


@dataclass(frozen=True)
class Offer:
    """What a transport can do, and at what cost.

    epilogues: the kinds that take residual add and norm. max_bytes: of a call's largest tensor; max_normed_bytes: of a
    row that an epilogue takes; max_ranks, max_hosts: of a group that it serves; None: any. live_sizes: it takes row
    counts in device memory, without which a captured step cannot send rows to experts.
    """

    transport: str
    kinds: frozenset[str]
    epilogues: frozenset[str]
    cost: Cost
    max_bytes: int | None = None
    max_normed_bytes: int | None = None
    max_ranks: int | None = None
    max_hosts: int | None = None
    live_sizes: bool = True

    def serves(self, ranks: int, hosts: int) -> bool:
        """Whether it carries exchanges of groups of so many ranks on so many hosts."""
        few_ranks = self.max_ranks is None or ranks <= self.max_ranks
        return few_ranks and (self.max_hosts is None or hosts <= self.max_hosts)


@dataclass(frozen=True)
class Network:
    """What joins hosts. us: latency of a collective of one rank of each host; hop_us: what each doubling of the ranks
    of a host adds; gb_s: what a rank receives over it. All the bytes of such a collective are taken to cross it.
    """

    us: float
    hop_us: float
    gb_s: float

    def collective_us(self, ranks: int, bytes_moved: float, hosts: int) -> float:
        """Time of one collective over hosts."""
        return self.us + self.hop_us * math.log2(ranks / hosts) + bytes_moved / (self.gb_s * 1e3)


@dataclass(frozen=True)
class AlphaBeta:
    """alpha_us: latency of any collective; hop_us: what each doubling of the group adds; gb_s: what a rank receives.

    launch_us, mem_gb_s: latency and memory traffic of a local elementwise kernel. GB/s are 10⁹ bytes a second.
    network: between hosts, if it is known.
    """

    name: str
    alpha_us: float
    hop_us: float
    gb_s: float
    launch_us: float
    mem_gb_s: float
    network: Network | None = None

    def collective_us(self, kind: str, ranks: int, bytes_moved: float, hosts: int = 1) -> float:
        """Time of one collective. A fused edge is one launch, so it pays alpha once."""
        if hosts > 1:
            return math.inf if self.network is None else self.network.collective_us(ranks, bytes_moved, hosts)
        return self.alpha_us + self.hop_us * math.log2(ranks) + bytes_moved / (self.gb_s * 1e3)

    def local_us(self, bytes_touched: float) -> float:
        """Time of one local elementwise kernel."""
        return self.launch_us + bytes_touched / (self.mem_gb_s * 1e3)

    def epilogue_us(self, bytes_touched: float) -> float:
        """What an epilogue adds to its collective: its memory traffic, but no launch."""
        return bytes_touched / (self.mem_gb_s * 1e3)


@dataclass(frozen=True)
class Table:
    """A transport's measured times: us by (kind, ranks, hosts) as points (bytes moved, µs), ascending.

    local, epilogue: the same for local kernels and epilogues. network: for collectives over hosts that were not
    measured. Between points, times are interpolated on logarithmic axes; below the first they are its, beyond the last
    they grow with the bytes. A number of ranks that was not measured takes the next larger one's times, and beyond the
    largest its times in proportion.
    """

    name: str
    us: dict[tuple[str, int, int], tuple[tuple[float, float], ...]]
    local: tuple[tuple[float, float], ...]
    epilogue: tuple[tuple[float, float], ...]
    network: Network | None = None

    def collective_us(self, kind: str, ranks: int, bytes_moved: float, hosts: int = 1) -> float:
        """Measured time of one collective; infinite where the kind was not measured."""
        sizes = sorted(n for k, n, over in self.us if k == kind and over == hosts)
        if not sizes:
            if hosts == 1 or self.network is None:
                return math.inf
            return self.network.collective_us(ranks, bytes_moved, hosts)
        size = next((n for n in sizes if n >= ranks), sizes[-1])
        return _interpolate(self.us[kind, size, hosts], bytes_moved) * max(1.0, ranks / size)

    def local_us(self, bytes_touched: float) -> float:
        """Measured time of one local elementwise kernel."""
        return _interpolate(self.local, bytes_touched)

    def epilogue_us(self, bytes_touched: float) -> float:
        """Measured time that an epilogue adds to its collective."""
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
    """A cost model of every transport. by_transport: of each, by the number of ranks of the world that was measured.

    The transport `*` stands for all others, the world 0 for any.
    """

    name: str
    by_transport: dict[str, dict[int, Cost]]

    def of(self, transport: str, world: int) -> Cost:
        """A transport's in a world of so many ranks: the next larger one measured, else the largest.

        Raises LayoutError with what was measured.
        """
        by_world = self.by_transport.get(transport) or self.by_transport.get("*")
        if by_world is None and world == 1:  # nothing is exchanged, and all tables have the same local times
            by_world = next(iter(self.by_transport.values()))
        if by_world is None:
            known = ", ".join(self.by_transport) or "nothing"
            raise LayoutError(f"{self.name} has no times of {transport}, only of {known}; measure it: weft tune")
        return by_world[min((w for w in by_world if w >= world), default=max(by_world))]


def over_network(model: Costs, network: Network) -> Costs:
    """The cost model, with this network between hosts where it knows none."""

    def priced(cost: Cost) -> Cost:
        if isinstance(cost, AlphaBeta | Table) and cost.network is None:
            return replace(cost, network=network)
        return cost

    by_transport = {name: {n: priced(c) for n, c in found.items()} for name, found in model.by_transport.items()}
    return Costs(model.name, by_transport)


def read_table(path: Path, name: str = "") -> Costs:
    """The table that `weft tune` wrote, by this name or the file's. Raises LayoutError where it is none."""
    name = name or str(path)
    try:
        table = json.loads(path.read_text())
        local, epilogue = _points(table["local"]), _points(table["epilogue"])
        network = Network(**table["network"]) if "network" in table else None
        by_transport: dict[str, dict[int, Cost]] = {}
        for transport, rows in table["transports"].items():
            for world in {row["world"] for row in rows}:
                us: dict[tuple[str, int, int], list[tuple[float, float]]] = {}
                here = [r for r in rows if r["world"] == world]
                kinds = {r["kind"] for r in here}  # others as they were measured in other worlds
                for row in (*here, *(r for r in rows if r["kind"] not in kinds)):
                    key = row["kind"], row["ranks"], row.get("hosts", 1)
                    us.setdefault(key, []).append((float(row["bytes"]), float(row["us"])))
                points = {key: _points(found) for key, found in us.items()}
                by_transport.setdefault(transport, {})[world] = Table(name, points, local, epilogue, network)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LayoutError(f"{path} is no table of weft tune: {type(error).__name__}: {error}") from error
    return Costs(name, by_transport)


def _points(pairs: Iterable[Sequence[float]]) -> tuple[tuple[float, float], ...]:
    found = tuple(sorted((float(size), float(us)) for size, us in pairs))
    if not found or not all(size > 0 and us >= 0 for size, us in found):
        raise ValueError("times are missing, or not above 0 bytes and µs")
    return found


def read_tuning(path: Path, key: str, kind: type[T]) -> T:
    """What `weft tune` found best for a transport: key shm_tuning or peer_tuning; what `kind` is by default if it did
    not look.

    Raises LayoutError where the file is no table, or one of another version.
    """
    if not path.is_file():
        return kind()
    try:
        return kind(**json.loads(path.read_text()).get(key, {}))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        wrong = f"{path} is no table of weft tune, or of another version's (weft tune writes a new one)"
        raise LayoutError(f"{wrong}: {type(error).__name__}: {error}") from error


def cache_folder() -> Path:
    """Where Weft keeps what it has made for this host and user: tables of times, compiled kernels."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft"


def host_table(gpus: bool = False, hosts: int = 1) -> Path:
    """Where `weft tune` writes this host's table unless it is given another path, and where the engine looks for it.

    gpus: the one of ranks on GPUs, which also lists other times of local kernels. hosts: the one of ranks on so many,
    of which this is the first.
    """
    over = f"-{hosts}-hosts" if hosts > 1 else ""
    return cache_folder() / f"tune-{socket.gethostname()}{'-gpu' * gpus}{over}.json"


def find_host_table(gpus: bool, hosts: int = 1) -> Path | None:
    """The table of so many hosts where there is one, else this host's own; None where there is neither."""
    return next((path for path in (host_table(gpus, hosts), host_table(gpus)) if path.is_file()), None)


INFINIBAND = Network(us=20.0, hop_us=5.0, gb_s=46.0)
"""A 400 Gb/s port for each GPU, of which collectives reach 46 GB/s; latencies are assumed, not measured."""
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
"""Tables that come with the package, as `weft tune` wrote them: transports peer and torchdist/nccl on four H200s."""
GPU_COSTS = "h200x4"
"""The cost model of GPUs that were never measured."""


def costs(name: str) -> Costs:
    """A cost model by name: a preset for every transport; `cpu`, the CPU presets; one of TABLES; a path FILE.json.

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
    """The table of so many hosts, or else this host's, where there is one and, on GPUs, times of these transports in
    it; else the cost model of hosts like it. Raises LayoutError.
    """
    if (table := find_host_table(gpus, hosts)) is not None:
        found = costs(str(table))
        if not gpus or all(name in found.by_transport for name in transports):
            return found
    return costs(GPU_COSTS if gpus else "cpu")
