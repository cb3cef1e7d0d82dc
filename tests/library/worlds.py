"""Forked ranks of a torch ProcessGroup over gloo, which is also what results are compared with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # takes seconds: once here, not in each rank that compiles
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from weft.library.communicator import Communicator

Work = Callable[..., None]


def _rank_main(rank: int, world: int, directory: str, work: Work, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world)
    work(*args)
    dist.destroy_process_group()


def run_ranks(world: int, directory: Path, work: Work, *args: Any) -> None:
    """Run `work(*args)` in a process a rank, with torch.distributed initialised. Raise any rank's error."""
    mp.start_processes(_rank_main, (world, str(directory), work, args), nprocs=world, start_method="fork")


def numbers(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A rank's small whole numbers, whose sums are exact; every rank can work them out."""
    return torch.randint(-7, 8, shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def summed(x: Tensor) -> Tensor:
    """The sum by gloo."""
    out = x.clone()
    dist.all_reduce(out)
    return out


def poison(comm: Communicator) -> None:
    """Leave NaN where the next results will lie, so that what is not written shows."""
    held = [comm.transport.empty(comm.max_bytes // 4, like=torch.empty(0)).fill_(float("nan")) for _ in range(3)]
    del held


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether shapes, dtypes and all bits are equal."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def bits(x: Tensor) -> Tensor:
    """uint8: its bytes, whatever its strides."""
    return x.new_empty(x.numel()).copy_(x.reshape(-1)).view(torch.uint8)
