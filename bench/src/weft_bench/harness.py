"""Parts that timings of exchanges share: a case's figures, turns of calls on CPUs, and the file of results."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from weft.comm.shm import ShmTransport
from weft.comm.torchdist import TorchDistTransport
from weft.planner.spec import Mesh
from weft.tune.call_times import time_phases
from weft.tune.host import describe_host
from weft.tune.ranks import all_cores, slowest

ROUNDS, ROUND_S = 5, 0.03
"""Turns of each call on CPUs, and seconds of a turn."""
Thunk = Callable[[], object]
"""A call to time, without arguments."""


@dataclass(frozen=True)
class Timing:
    """Median µs of a call by implementation, the slowest rank's. case: a dataclass; more: columns of its row."""

    case: Any
    us: dict[str, float]
    more: Mapping[str, object] = field(default_factory=dict)

    def row(self) -> dict[str, object]:
        """Return the row for JSON."""
        return asdict(self.case) | dict(self.more) | {"us": {name: round(us, 3) for name, us in self.us.items()}}


@dataclass(frozen=True)
class Implementation:
    """An implementation of an exchange of x, in one or more phases. over_gloo: its calls run on gloo's threads."""

    x: Tensor
    phases: list[Thunk]
    over_gloo: bool = False
    all_cores: bool = False


class CpuRank:
    """Transports of a rank on CPUs: shm, gloo on request, and `patient` for barriers between calls of gloo.

    A rank must not spin between these calls: gloo's own thread has to get onto the rank's core.
    """

    def __init__(self, mesh: Mesh, rank: int, directory: Path, *, gloo: bool = False, **options: Any):
        self.group = tuple(range(mesh.world))
        self.shm = ShmTransport(mesh, rank, directory / "shm", **options)
        self.patient = ShmTransport(mesh, rank, directory / "patient", spins=0)
        self.gloo: TorchDistTransport | None = None
        if gloo:
            with all_cores():
                self.gloo = TorchDistTransport(mesh, rank, f"file://{directory}/gloo")

    def medians_us(
        self, implementations: Mapping[str, Implementation], fresh: Tensor, round_s: float = ROUND_S
    ) -> dict[str, float]:
        """Return µs of each implementation's phases together: the slowest rank's median over calls. Collective.

        Implementations take turns, so a disturbance of the machine affects all.

        Args:
            implementations: by name.
            fresh: copied to the implementation's x before each call, as a model would rewrite its input.
            round_s: seconds of a turn.
        """
        times: dict[str, list[float]] = {name: [] for name in implementations}
        for _ in range(ROUNDS):
            for name, each in implementations.items():
                meeting = self.patient if each.over_gloo else self.shm
                with all_cores() if each.all_cores else nullcontext():
                    phases = time_phases(meeting, self.group, each.x, fresh, each.phases, round_s)
                times[name] += map(sum, zip(*phases, strict=True))
        us = slowest((statistics.median(found) * 1e6 for found in times.values()), self.shm, self.group)
        return dict(zip(times, us, strict=True))

    def close(self) -> None:
        """Close all transports. Collective."""
        for transport in (self.gloo, self.patient, self.shm):
            if transport is not None:
                transport.close()


@contextmanager
def results_file(path: Path | None, what: str) -> Iterator[list[Any]]:
    """Yield a list for figures, then write the `row()` of each as a line, below `what` and the host.

    An interrupted run writes its figures so far; nothing is written without a path or without figures.
    """
    found: list[Any] = []
    try:
        yield found
    finally:
        if path is not None and found:
            head = json.dumps({"what": what, "host": describe_host()}, indent=1).removesuffix("\n}")
            lines = ",\n  ".join(json.dumps(each.row()) for each in found)
            path.write_text(f'{head},\n "rows": [\n  {lines}\n ]\n}}\n')
