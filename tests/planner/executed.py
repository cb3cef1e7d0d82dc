"""Plans executed on random values, and their results computed by one process without placements."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from support import held

from weft.comm.transport import Transport
from weft.planner.plan import Plan
from weft.planner.spec import Mesh
from weft.stream.hidden import Hidden
from weft.stream.step_rows import StepRows
from weft.stream.stream import Stream

WIDTH = 6


class Norm:
    """RMSNorm in float64."""

    eps = 1e-5

    def __init__(self, path: str):
        self.path = path
        self.weight = torch.linspace(-2, 3, WIDTH, dtype=torch.float64)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt()


def sampled(mesh: Mesh, total: int, seed: int) -> torch.Tensor:
    """Return a random whole value (row 0) and each rank's random part (rows 1…)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1 + mesh.world, total, WIDTH, generator=generator, dtype=torch.float64)


def execute(transports: Mapping[str, Transport], plan: Plan, counts: tuple[int, ...], seed: int) -> list[torch.Tensor]:
    """Run a plan on random deltas that mean the same on every rank; return the rows of each read.

    transports: a rank's, by their names in the plan.
    """
    mesh, rank = plan.mesh, next(iter(transports.values())).rank
    stream = Stream(plan, transports, StepRows(mesh, rank, counts))
    out = []
    for i, read_plan in enumerate(plan.reads):
        for j, placement in enumerate(read_plan.read.deltas):
            whole, *parts = sampled(mesh, sum(counts), seed * 1000 + i * 10 + j)
            if placement.owes:  # random parts; the last rank of each group holds what is missing to the whole
                *others, last = mesh.peers(placement.owes, rank)
                part = parts[rank] if rank != last else whole - sum(parts[r] for r in others)
            else:
                part = whole
            stream.add(Hidden(held(part, mesh, placement.rows, rank, counts), placement, mesh, f"delta {j}"))
        out.append(stream.read(Norm(read_plan.read.site), read_plan.read.target.rows).value)
    stream.finish()
    return out


def whole_result(plan: Plan, counts: tuple[int, ...], seed: int) -> list[torch.Tensor]:
    """Return the same results, computed by one process without placements."""
    residual, out = torch.zeros(sum(counts), WIDTH, dtype=torch.float64), []
    for i, read_plan in enumerate(plan.reads):
        for j in range(len(read_plan.read.deltas)):
            residual = residual + sampled(plan.mesh, sum(counts), seed * 1000 + i * 10 + j)[0]
        out.append(Norm("")(residual))
    return out
