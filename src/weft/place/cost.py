"""What a step costs: latency plus bytes over bandwidth (the α-β model of Hockney, doi:10.1016/S0167-8191(06)80021-9).

The presets are starting points for planning, from public datasheets and the measurements under `benchmarks/`; a table
measured on the host replaces them by offering the same two methods.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from weft.place.spec import LayoutError


class Cost(Protocol):
    """Predicted times in microseconds; `bytes_moved` is what the busiest rank receives."""

    @property
    def name(self) -> str: ...

    def collective_us(self, kind: str, group_size: int, bytes_moved: float) -> float: ...

    def local_us(self, bytes_touched: float) -> float: ...


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


PRESETS: dict[str, AlphaBeta] = {
    p.name: p
    for p in (
        AlphaBeta("cpu-gloo", alpha_us=300.0, hop_us=300.0, gb_s=1.0, launch_us=4.0, mem_gb_s=8.0),
        AlphaBeta("h100-nvlink", alpha_us=10.5, hop_us=0.5, gb_s=368.0, launch_us=2.0, mem_gb_s=2700.0),
        AlphaBeta("h200-nvlink", alpha_us=10.5, hop_us=0.5, gb_s=368.0, launch_us=2.0, mem_gb_s=4000.0),
        AlphaBeta("gb200-nvl72", alpha_us=10.5, hop_us=0.4, gb_s=720.0, launch_us=2.0, mem_gb_s=6500.0),
        AlphaBeta("pcie-gen5", alpha_us=15.0, hop_us=4.0, gb_s=45.0, launch_us=2.0, mem_gb_s=1500.0),
    )
}


def preset(name: str) -> AlphaBeta:
    """A preset by name. Raises LayoutError with the known names."""
    if name not in PRESETS:
        raise LayoutError(f"no cost preset {name!r}; known: {', '.join(PRESETS)}")
    return PRESETS[name]
