"""Timing of a rank group's calls on CPUs."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from weft.comm.shm import ShmTransport
from weft.comm.torchdist import TorchDistTransport
from weft.planner.spec import Mesh

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
MIXED = ("all_reduce+all_gatherv", "reduce_scatterv+all_reduce")
MAX_CALLS, MIN_CALLS = 300, 3


def mesh_of(ranks: int) -> Mesh:
    """Return the layout with the groups to measure: DP × TP with four ranks or more, else TP."""
    return Mesh(2, ranks // 2, 2, ranks // 2) if ranks >= 4 and ranks % 2 == 0 else Mesh(1, ranks, ranks, 1)


def time_phases(
    shm: ShmTransport | TorchDistTransport,
    group: tuple[int, ...],
    x: Tensor,
    fresh: Tensor,
    phases: list[Callable[[], object]],
    budget: float,
) -> list[list[float]]:
    """Return the seconds of each phase, call by call; rank 0's clock sets the number of calls of all ranks.

    shm: its barrier precedes each of `phases`; over hosts torchdist's. x: gets `fresh` before a call. budget: seconds.
    """
    times: list[list[float]] = [[] for _ in phases]
    calls, warm = MIN_CALLS, True
    while True:
        began = time.perf_counter()
        for _ in range(calls):
            x.copy_(fresh)
            for at, phase in enumerate(phases):
                shm.barrier(group)
                start = time.perf_counter()
                phase()
                times[at].append(time.perf_counter() - start)
        if not warm:
            return times
        needed = int(budget / ((time.perf_counter() - began) / calls))
        agreed = shm.broadcast(torch.tensor([min(MAX_CALLS, max(MIN_CALLS, needed))]), group, group[0])
        calls, warm, times = int(agreed), False, [[] for _ in phases]
