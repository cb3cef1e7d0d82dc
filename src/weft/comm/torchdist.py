"""torch.distributed: gloo on CPUs, NCCL on GPUs. Works everywhere, on several hosts too.

Over gloo, calls among more than two ranks are made of all_to_all rounds with a sum here, in rank order: gloo has no
ragged collectives, its all_reduce takes 2(n-1) rounds, and a round is what costs (docs/LOG.md). Small sums take one
round, in which each rank receives every part of what it needs; large ones two, in which no row is received twice. So
both fused edges are one round as well, and every rank gets the same bits.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.transport import CommError, Epilogue, Ranks, Sizes
from weft.place.edges import ALL_GATHERV, ALL_REDUCE, COLLECTIVES, REDUCE_SCATTERV
from weft.place.spec import GROUP_NAMES, Mesh

KINDS = {"gloo": frozenset(COLLECTIVES), "nccl": frozenset((ALL_REDUCE, REDUCE_SCATTERV, ALL_GATHERV))}
"""The planned edges that each backend offers."""
ONE_ROUND_BYTES = 128 * 1024
"""Sums whose whole result is at most this large take one round: above, the second round costs less than the bytes."""


class TorchDistTransport:
    """One rank of a torch.distributed world; see `weft.comm.transport.Transport` for what each method gives.

    init_method: as torch.distributed takes it (`tcp://HOST:PORT`, `file:///…`, `env://`). Building one is collective:
    every rank of the mesh must. Raises CommError where the ranks do not meet within timeout_s. A process holds one
    at a time, as torch.distributed does. one_round_bytes: up to which results a sum over gloo takes one round.
    """

    epilogues: frozenset[str] = frozenset()
    max_bytes: int | None = None

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        init_method: str,
        *,
        backend: str = "gloo",
        timeout_s: float = 60.0,
        one_round_bytes: int = ONE_ROUND_BYTES,
    ):
        self._one_round_bytes = one_round_bytes
        self.rank, self.backend, self._world = rank, backend, tuple(range(mesh.world))
        self.name, self.kinds = f"torchdist/{backend}", KINDS[backend]
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

    def empty(self, *shape: int, like: Tensor) -> Tensor:
        return like.new_empty(shape)

    def all_reduce(self, x: Tensor, group: Ranks, epilogue: Epilogue | None = None) -> Tensor:
        self._refuse(epilogue)
        n, rows = len(group), x.shape[0]
        if self.backend == "nccl" or n == 2:  # of two ranks, gloo's own takes one round too, and copies less
            out = x.clone()
            self._call("all_reduce", group, lambda g: dist.all_reduce(out, group=g))
            return out
        if self._small(x, rows):
            return _sum(self.all_gatherv(x, group, (rows,) * n), n)
        sizes = tuple(rows // n + (i < rows % n) for i in range(n))
        return self.all_gatherv(self.reduce_scatterv(x, group, sizes), group, sizes)

    def reduce_scatterv(self, x: Tensor, group: Ranks, sizes: Sizes, epilogue: Epilogue | None = None) -> Tensor:
        self._refuse(epilogue)
        mine = sizes[group.index(self.rank)]
        if self.backend == "nccl":
            out = x.new_empty((mine, *x.shape[1:]))
            runs = [run.contiguous() for run in x.split(sizes)]
            self._call("reduce_scatterv", group, lambda g: dist.reduce_scatter(out, runs, group=g))
            return out
        return _sum(self.all_to_allv(x, group, sizes, (mine,) * len(group)), len(group))

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

    def all_reduce_all_gatherv(
        self, x: Tensor, reduce: Ranks, gather: Ranks, sizes: Sizes, epilogue: Epilogue | None = None
    ) -> Tensor:
        self._refuse(epilogue)
        self._require_gloo()
        tp, world = len(reduce), self._world
        if not self._small(x, sum(sizes)):
            mine = gather.index(self.rank)
            own = [tuple(n // tp + (a < n % tp) for a in range(tp)) for n in sizes]
            part = self.reduce_scatterv(x, reduce, own[mine])
            return self.all_gatherv(part, world, tuple(n for group in own for n in group))
        every = self.all_gatherv(x, world, tuple(n for n in sizes for _ in range(tp)))
        return torch.cat([_sum(parts, tp) for parts in every.split([n * tp for n in sizes])])

    def reduce_scatterv_all_reduce(
        self, x: Tensor, scatter: Ranks, reduce: Ranks, sizes: Sizes, epilogue: Epilogue | None = None
    ) -> Tensor:
        self._refuse(epilogue)
        self._require_gloo()
        tp, world = len(reduce), self._world
        mine = sizes[scatter.index(self.rank)]
        if not self._small(x, x.shape[0]):
            own = [tuple(n // tp + (a < n % tp) for a in range(tp)) for n in sizes]
            part = self.reduce_scatterv(x, world, tuple(n for group in own for n in group))
            return self.all_gatherv(part, reduce, own[scatter.index(self.rank)])
        # Each rank gets its group's rows from everyone: the ranks of a group get the same.
        runs = torch.cat([run for run in x.split(sizes) for _ in range(tp)])
        send = tuple(n for n in sizes for _ in range(tp))
        return _sum(self.all_to_allv(runs, world, send, (mine,) * len(world)), len(world))

    def _small(self, x: Tensor, rows: int) -> bool:
        """Whether `rows` rows like x's are few bytes. Every rank asks with the same number, so all go the same way."""
        return rows * x.shape[1:].numel() * x.element_size() <= self._one_round_bytes

    def _refuse(self, epilogue: Epilogue | None) -> None:
        if epilogue is not None:
            raise CommError(f"{self.name} takes no epilogue")

    def _require_gloo(self) -> None:
        if self.backend != "gloo":
            raise CommError(f"{self.name} does not offer fused edges")


def _sum(parts: Tensor, ranks: int) -> Tensor:
    """Sum of `ranks` equal runs of rows in order; low precision is summed in float32 and rounded once."""
    wide = torch.float32 if parts.dtype in (torch.bfloat16, torch.float16) else parts.dtype
    return parts.view(ranks, parts.shape[0] // ranks, *parts.shape[1:]).sum(0, dtype=wide).to(parts.dtype)
