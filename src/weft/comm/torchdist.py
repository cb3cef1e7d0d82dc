"""torch.distributed: gloo on CPUs, NCCL on GPUs. Works everywhere, on several hosts too."""

from __future__ import annotations

import datetime
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.transport import CommError, Ranks, Sizes
from weft.place.edges import ALL_GATHERV, ALL_REDUCE, REDUCE_SCATTERV
from weft.place.spec import GROUP_NAMES, Mesh


class TorchDistTransport:
    """One rank of a torch.distributed world; see `weft.comm.transport.Transport` for what each method gives.

    init_method: as torch.distributed takes it (`tcp://HOST:PORT`, `file:///…`, `env://`). Building one is collective:
    every rank of the mesh must. Raises CommError where the ranks do not meet within timeout_s. A process holds one
    at a time, as torch.distributed does.
    """

    kinds = frozenset((ALL_REDUCE, REDUCE_SCATTERV, ALL_GATHERV))

    def __init__(self, mesh: Mesh, rank: int, init_method: str, *, backend: str = "gloo", timeout_s: float = 60.0):
        self.rank, self.backend = rank, backend
        self.name = f"torchdist/{backend}"
        self._groups: dict[Ranks, dist.ProcessGroup | None] = {}
        timeout = datetime.timedelta(seconds=timeout_s)
        try:
            dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=mesh.world, timeout=timeout)
            for ranks in dict.fromkeys(p for name in GROUP_NAMES for p in mesh.partitions[name]):
                if len(ranks) > 1:
                    self._groups[ranks] = dist.new_group(list(ranks), timeout=timeout)
        except (RuntimeError, ValueError) as error:
            raise CommError(
                f"rank {rank}: no {backend} group of {mesh.world} ranks at {init_method}: {error}"
            ) from error

    def close(self) -> None:
        """Leaves the group. The transport is of no use after."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _call(self, what: str, group: Ranks, call: Callable[[dist.ProcessGroup | None], object]) -> None:
        try:
            call(self._groups[group])
        except RuntimeError as error:
            raise CommError(f"rank {self.rank}: {what} over {group} failed: {error}") from error

    def all_reduce(self, x: Tensor, group: Ranks) -> Tensor:
        out = x.clone()
        if len(group) > 1 and out.numel():
            self._call("all_reduce", group, lambda g: dist.all_reduce(out, group=g))
        return out

    def reduce_scatterv(self, x: Tensor, group: Ranks, sizes: Sizes) -> Tensor:
        mine = sizes[group.index(self.rank)]
        if self.backend == "nccl":
            out = x.new_empty((mine, *x.shape[1:]))
            runs = [run.contiguous() for run in x.split(sizes)]
            self._call("reduce_scatterv", group, lambda g: dist.reduce_scatter(out, runs, group=g))
            return out
        # gloo has no ragged reduce_scatter: send each rank its run and add here, in rank order, rounded once.
        runs_in = self.all_to_allv(x, group, sizes, (mine,) * len(group)).view(len(group), mine, *x.shape[1:])
        wide = torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype
        return runs_in.sum(0, dtype=wide).to(x.dtype)

    def all_gatherv(self, x: Tensor, group: Ranks, sizes: Sizes) -> Tensor:
        if self.backend == "nccl":
            out = x.new_empty((sum(sizes), *x.shape[1:]))
            self._call("all_gatherv", group, lambda g: dist.all_gather(list(out.split(sizes)), x, group=g))
            return out
        # gloo's all_gather wants equal sizes: send the same rows to each rank instead.
        same = x.expand(len(group), *x.shape).reshape(-1, *x.shape[1:])
        return self.all_to_allv(same, group, (x.shape[0],) * len(group), sizes)

    def all_to_allv(self, x: Tensor, group: Ranks, send: Sizes, receive: Sizes) -> Tensor:
        out = x.new_empty((sum(receive), *x.shape[1:]))
        self._call(
            "all_to_allv",
            group,
            lambda g: dist.all_to_all_single(out, x.contiguous(), list(receive), list(send), group=g),
        )
        return out

    def broadcast(self, x: Tensor, group: Ranks, root: int) -> Tensor:
        out = x.clone()
        self._call("broadcast", group, lambda g: dist.broadcast(out, src=root, group=g))
        return out

    def barrier(self, group: Ranks) -> None:
        self._call("barrier", group, lambda g: dist.barrier(group=g))

    def all_reduce_all_gatherv(self, x: Tensor, reduce: Ranks, gather: Ranks, sizes: Sizes) -> Tensor:
        raise CommError(f"{self.name} does not offer all_reduce+all_gatherv")

    def reduce_scatterv_all_reduce(self, x: Tensor, scatter: Ranks, reduce: Ranks, sizes: Sizes) -> Tensor:
        raise CommError(f"{self.name} does not offer reduce_scatterv+all_reduce")
