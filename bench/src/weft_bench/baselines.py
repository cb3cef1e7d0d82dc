"""Other libraries' exchanges on CPUs: torch.distributed over gloo, and DeepSpeed's shared-memory all_reduce."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.transport import CommError
from weft.planner.spec import Mesh
from weft.tune.ranks import Report


def groups_of(mesh: Mesh, rank: int) -> dict[str, Any]:
    """Return torch.distributed's groups of a rank for attn_tp and attn_dp. Collective."""
    partitions = [(name, ranks) for name in ("attn_tp", "attn_dp") for ranks in mesh.partitions[name]]
    groups = [(name, ranks, dist.new_group(list(ranks))) for name, ranks in partitions]
    return {name: group for name, ranks, group in groups if rank in ranks}


class Gloo:
    """torch.distributed's own calls, in the compositions that engines use where it has no call of its own."""

    name = "gloo"

    def __init__(self, mesh: Mesh, rank: int, directory: Path):
        dist.init_process_group("gloo", init_method=f"file://{directory}/gloo", rank=rank, world_size=mesh.world)
        self._mesh, self._rank, self._groups = mesh, rank, groups_of(mesh, rank)

    def call(self, edge: str, x: Tensor, shares: tuple[int, ...]) -> Callable[[], object] | None:
        """Return a call that exchanges x, or None if gloo has none to compare with. shares: rows per rank."""
        n, tp = len(shares), self._mesh.attn_tp
        if edge in ("all_reduce", "reduce_scatterv", "reduce_scatterv+all_reduce"):
            return lambda: dist.all_reduce(x)  # gloo's default form of a scatter; the caller slices
        if edge == "barrier":
            return dist.barrier
        if edge == "broadcast":
            return lambda: dist.broadcast(x, 0)
        if edge == "all_gatherv":
            parts = list(x.new_empty(sum(shares), *x.shape[1:]).split(shares))
            return (lambda: dist.all_gather(parts, x)) if len(set(shares)) == 1 else None
        if edge == "all_to_allv":
            out = torch.empty_like(x)
            return (lambda: dist.all_to_all_single(out, x)) if x.shape[0] % n == 0 else None
        if edge == "all_reduce+all_gatherv" and len(set(shares)) == 1:
            out = x.new_empty(self._mesh.attn_dp * x.shape[0], *x.shape[1:])

            def gather_mixed() -> None:
                dist.all_reduce(x, group=self._groups["attn_tp"])
                dist.all_gather(list(out.chunk(n // tp)), x, group=self._groups["attn_dp"])

            return gather_mixed
        return None

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()


def build_deepspeed(rank: int, directory: Path, report: Report) -> None:
    """Compile DeepSpeed's kernel in a process of its own, unless it is compiled; see `run_ranks`.

    Compilation may exceed the time that ranks wait for each other. Raises CommError if DeepSpeed is not installed.
    """
    _load_deepspeed()


def _load_deepspeed() -> Any:
    os.environ["DS_ACCELERATOR"] = "cpu"
    try:
        from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
    except ImportError as error:
        raise CommError(
            f"DeepSpeed is not installed ({error}); see docs/design/shared-memory.md, or omit it from --baselines"
        ) from error
    return ShareMemCommBuilder().load(verbose=False)


class DeepSpeed:
    """DeepSpeed's shared-memory all_reduce, called directly, in place, once `build_deepspeed` has compiled it.

    It reads its settings from the environment, leaves its segments in /dev/shm, and starts once in a process's life.
    """

    name = "deepspeed"

    def __init__(self, world: int, rank: int, directory: Path, barrier: Callable[[], None]):
        # Nobody listens on this port: DeepSpeed only names its segments by it.
        port = str(20000 + sum(str(directory).encode()) * 7919 % 20000)
        os.environ |= {"LOCAL_SIZE": str(world), "WORLD_SIZE": str(world)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        module = _load_deepspeed()
        barrier()
        module.initialize(world, rank)
        barrier()
        if rank == 0:
            for segment in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1_{port}_*"):
                segment.unlink()
        self._all_reduce = torch.ops.deepspeed.inference_all_reduce_.default

    def call(self, edge: str, x: Tensor, shares: tuple[int, ...]) -> Callable[[], object] | None:
        """Return a call that exchanges x; None for all edges but all_reduce."""
        return (lambda: self._all_reduce(x)) if edge == "all_reduce" else None

    def close(self) -> None:
        """Do nothing: DeepSpeed cannot release its segments."""
