"""What a step costs, by transport: a preset, or a table measured on the host by `weft tune`.

Presets are latency plus bytes over bandwidth (the α-β model of Hockney, doi:10.1016/S0167-8191(06)80021-9): starting
points for planning, from public datasheets and the measurements under `benchmarks/`.
"""

from __future__ import annotations

import bisect
import json
import math
import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from weft.place.spec import LayoutError

T = TypeVar("T")


class Cost(Protocol):
    """Predicted times in microseconds; `bytes_moved` is what the busiest rank receives."""

    @property
    def name(self) -> str: ...

    def collective_us(self, kind: str, group_size: int, bytes_moved: float) -> float: ...

    def local_us(self, bytes_touched: float) -> float: ...

    def epilogue_us(self, bytes_touched: float) -> float: ...


@dataclass(frozen=True)
class Offer:
    """What a transport can do, and at what cost.

    epilogues: the kinds that take residual add and norm. max_bytes: of a call's largest tensor; max_normed_bytes: of a
    row that an epilogue takes; None: any.
    """

    transport: str
    kinds: frozenset[str]
    epilogues: frozenset[str]
    cost: Cost
    max_bytes: int | None = None
    max_normed_bytes: int | None = None


@dataclass(frozen=True)
class AlphaBeta:
    """alpha_us: latency of any collective; hop_us: what each doubling of the group adds; gb_s: what a rank receives.

    launch_us, mem_gb_s: latency and memory traffic of a local elementwise kernel. GB/s are 10⁹ bytes a second.
    """

    name: str
    alpha_us: float
    hop_us: float
    gb_s: float
    launch_us: float
    mem_gb_s: float

    def collective_us(self, kind: str, group_size: int, bytes_moved: float) -> float:
        """Time of one collective. A fused edge is one launch, so it pays alpha once."""
        return self.alpha_us + self.hop_us * math.log2(group_size) + bytes_moved / (self.gb_s * 1e3)

    def local_us(self, bytes_touched: float) -> float:
        """Time of one local elementwise kernel."""
        return self.launch_us + bytes_touched / (self.mem_gb_s * 1e3)

    def epilogue_us(self, bytes_touched: float) -> float:
        """What an epilogue adds to its collective: its memory traffic, but no launch."""
        return bytes_touched / (self.mem_gb_s * 1e3)


@dataclass(frozen=True)
class Table:
    """A transport's measured times: us by (kind, group size) as points (bytes moved, µs), ascending.

    local, epilogue: the same for local kernels and epilogues. Between points, times are interpolated on logarithmic
    axes; below the first they are its, beyond the last they grow with the bytes. A group size that was not measured
    takes the next larger one's, and beyond the largest its times in proportion.
    """

    name: str
    us: dict[tuple[str, int], tuple[tuple[float, float], ...]]
    local: tuple[tuple[float, float], ...]
    epilogue: tuple[tuple[float, float], ...]

    def collective_us(self, kind: str, group_size: int, bytes_moved: float) -> float:
        """Measured time of one collective. Raises LayoutError where the kind was not measured."""
        sizes = sorted(n for k, n in self.us if k == kind)
        if not sizes:
            raise LayoutError(f"{self.name} has no times of {kind}; measure them: weft tune")
        size = next((n for n in sizes if n >= group_size), sizes[-1])
        return _interpolate(self.us[kind, size], bytes_moved) * max(1.0, group_size / size)

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
        if by_world is None and world == 1:  # nothing is exchanged: whose times of local work these are is all the same
            by_world = next(iter(self.by_transport.values()))
        if by_world is None:
            known = ", ".join(self.by_transport) or "nothing"
            raise LayoutError(f"{self.name} has no times of {transport}, only of {known}; measure it: weft tune")
        return by_world[min((w for w in by_world if w >= world), default=max(by_world))]


def read_table(path: Path, name: str = "") -> Costs:
    """The table that `weft tune` wrote, by this name or the file's. Raises LayoutError where it is none."""
    name = name or str(path)
    try:
        table = json.loads(path.read_text())
        local, epilogue = _points(table["local"]), _points(table["epilogue"])
        by_transport: dict[str, dict[int, Cost]] = {}
        for transport, rows in table["transports"].items():
            for world in {row["world"] for row in rows}:
                us: dict[tuple[str, int], list[tuple[float, float]]] = {}
                for row in (r for r in rows if r["world"] == world):
                    us.setdefault((row["kind"], row["ranks"]), []).append((float(row["bytes"]), float(row["us"])))
                points = {key: _points(found) for key, found in us.items()}
                by_transport.setdefault(transport, {})[world] = Table(name, points, local, epilogue)
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


def host_table(gpus: bool = False) -> Path:
    """Where `weft tune` writes this host's table unless told otherwise, and where the engine looks for it.

    gpus: the one of ranks on GPUs, which also lists other times of local kernels.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "weft" / f"tune-{socket.gethostname()}{'-gpu' * gpus}.json"


PRESETS: dict[str, AlphaBeta] = {
    p.name: p
    for p in (
        AlphaBeta("cpu-gloo", alpha_us=300.0, hop_us=300.0, gb_s=1.0, launch_us=4.0, mem_gb_s=8.0),
        AlphaBeta("cpu-shm", alpha_us=1.5, hop_us=0.5, gb_s=12.0, launch_us=4.0, mem_gb_s=8.0),
        AlphaBeta("h100-nvlink", alpha_us=10.5, hop_us=0.5, gb_s=368.0, launch_us=2.0, mem_gb_s=2700.0),
        AlphaBeta("h200-nvlink", alpha_us=10.5, hop_us=0.5, gb_s=368.0, launch_us=2.0, mem_gb_s=4000.0),
        AlphaBeta("gb200-nvl72", alpha_us=10.5, hop_us=0.4, gb_s=720.0, launch_us=2.0, mem_gb_s=6500.0),
        AlphaBeta("pcie-gen5", alpha_us=15.0, hop_us=4.0, gb_s=45.0, launch_us=2.0, mem_gb_s=1500.0),
    )
}


TABLES = {"h200x4": Path(__file__).with_name("h200x4.json")}
"""Tables that come with the package, as `weft tune` wrote them: transports peer and torchdist/nccl on four H200s."""


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
