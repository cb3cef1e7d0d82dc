"""The same exchanges on GPUs as others do them: NCCL, NCCL over registered windows, torch's symmetric memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.place.spec import Mesh

Call = Callable[[], object]


class Nccl:
    """torch.distributed's calls over NCCL, in the compositions that engines use where it has no call of its own."""

    name = "nccl"

    def __init__(self, mesh: Mesh, rank: int):
        self._mesh, self._rank, self._groups = mesh, rank, {}
        for name in ("attn_tp", "attn_dp"):
            for ranks in mesh.partitions[name]:
                group = dist.new_group(list(ranks))
                if rank in ranks:
                    self._groups[name] = group

    def calls(self, edge: str, xs: Sequence[Tensor], sizes: Sequence[int]) -> list[Call]:
        """A call for each input. sizes: rows of each rank, or of each DP group for the mixed edges."""
        return [self._call(edge, x, sizes) for x in xs]

    def empty(self, like: Tensor, rows: int) -> Tensor:
        """A result's memory."""
        return like.new_empty(rows, *like.shape[1:])

    def _call(self, edge: str, x: Tensor, sizes: Sequence[int]) -> Call:
        equal, mine = len(set(sizes)) == 1, self._rank
        if edge == "all_reduce":
            return partial(dist.all_reduce, x)
        if edge == "broadcast":
            return partial(dist.broadcast, x, 0)
        if edge == "all_gatherv":
            out = self.empty(x, sum(sizes))
            if equal:
                return partial(dist.all_gather_into_tensor, out, x)
            return partial(dist.all_gather, list(out.split(list(sizes))), x)
        if edge == "reduce_scatterv":
            out = self.empty(x, sizes[mine])
            if equal:
                return partial(dist.reduce_scatter_tensor, out, x)
            return partial(dist.reduce_scatter, out, list(x.split(list(sizes))))
        if edge == "all_to_allv":
            return partial(dist.all_to_all_single, self.empty(x, x.shape[0]), x)
        tp, dp = self._groups["attn_tp"], self._groups["attn_dp"]
        if edge == "all_reduce+all_gatherv":
            out = self.empty(x, sum(sizes))

            def gather() -> None:
                dist.all_reduce(x, group=tp)
                dist.all_gather_into_tensor(out, x, group=dp)

            return gather
        assert edge == "reduce_scatterv+all_reduce", edge
        part = self.empty(x, x.shape[0] // self._mesh.attn_dp)

        def scatter() -> None:
            dist.reduce_scatter_tensor(part, x, group=dp)
            dist.all_reduce(part, group=tp)

        return scatter


class NcclWindow(Nccl):
    """NCCL on tensors in memory that it has registered as a symmetric window; no ragged forms there."""

    name = "nccl window"

    def __init__(self, mesh: Mesh, rank: int, device: torch.device, arena_bytes: int):
        self._mesh, self._rank, self._groups = mesh, rank, {}
        backend: Any = dist.group.WORLD._get_backend(device)  # type: ignore[union-attr]
        self._pool = torch.cuda.MemPool(backend.mem_allocator)
        with torch.cuda.use_mem_pool(self._pool):
            self._arena = torch.empty(arena_bytes, dtype=torch.uint8, device=device)
        backend.register_mem_pool(self._pool, symm=True)
        self._used = 0

    def calls(self, edge: str, xs: Sequence[Tensor], sizes: Sequence[int]) -> list[Call]:
        """None for what windows do not serve."""
        if edge not in ("all_reduce", "all_gatherv", "reduce_scatterv") or len(set(sizes)) != 1:
            return []
        self._used = 0
        return [self._call(edge, self.empty(x, x.shape[0]).copy_(x), sizes) for x in xs]

    def empty(self, like: Tensor, rows: int) -> Tensor:
        size = rows * like.shape[1] * like.element_size()
        begin, self._used = self._used, self._used + -(-size // 512) * 512
        return self._arena[begin : begin + size].view(like.dtype).view(rows, like.shape[1])


class SymmetricMemory:
    """torch's kernels over symmetric memory: one- and two-shot all_reduce, with no multicast."""

    def __init__(self, shots: str, rank: int, device: torch.device, arena_bytes: int):
        import torch.distributed._symmetric_memory as symm

        self.name = f"symm {shots}-shot"
        self._shots, self._group = shots, dist.group.WORLD.group_name  # type: ignore[union-attr]
        self._arena = symm.empty(arena_bytes // 2, dtype=torch.bfloat16, device=device)
        symm.rendezvous(self._arena, self._group)

    def calls(self, edge: str, xs: Sequence[Tensor], sizes: Sequence[int]) -> list[Call]:
        """Only all_reduce, on a copy in symmetric memory."""
        if edge != "all_reduce" or xs[0].dtype != self._arena.dtype:
            return []
        found: list[Call] = []
        for i, x in enumerate(xs):
            mine = self._arena[i * x.numel() : (i + 1) * x.numel()].view(x.shape)
            mine.copy_(x)
            if self._shots == "one":
                found.append(partial(torch.ops.symm_mem.one_shot_all_reduce, mine, "sum", self._group))
            else:
                found.append(partial(torch.ops.symm_mem.two_shot_all_reduce_, mine, "sum", self._group))
        return found
