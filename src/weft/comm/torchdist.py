"""torch.distributed: gloo on CPUs, NCCL on GPUs. Works everywhere, on several hosts too.

Over gloo, an exchange is one round of all_to_all and a sum on each rank, in rank order: gloo has no ragged collectives,
its all_reduce takes 2(n-1) rounds, and rounds dominate the time (docs/log/notes.md). Small sums take one round: each
rank receives all terms of its result. Large sums take two rounds and receive no row twice. All ranks get the same bits.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from weft.comm.transport import CommError, Epilogue, LiveSizes, NamedCalls, Ranks, Sizes, check_call, sizes_on_host
from weft.comm.transport_registry import GLOO, NCCL, Opening
from weft.planner.exchange import Exchange, Part, in_two_steps, parts
from weft.planner.spec import Mesh

ONE_ROUND_BYTES = 128 * 1024
"""Maximum bytes of a sum's result in one round; above, a second round costs less than the bytes that it saves."""


class TorchDistTransport(NamedCalls):
    """One rank of a torch.distributed world; see `weft.comm.transport.Transport` for the results of each method.

    Building the transport is collective over the mesh. Raises CommError if the ranks do not meet within timeout_s. A
    process holds one at a time, like torch.distributed.

    Args:
        meeting: URL for torch.distributed (`tcp://HOST:PORT`, `file:///…`, `env://`) or a store.
        one_round_bytes: maximum bytes of the result of a sum over gloo in one round.
        in_place: all_reduce leaves its result in the input's memory, which saves a copy; for callers that do not read
          the input afterwards, such as `weft.stream.stream.Stream`.
    """

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        meeting: str | Store,
        *,
        backend: str = "gloo",
        timeout_s: float = 60.0,
        one_round_bytes: int = ONE_ROUND_BYTES,
        in_place: bool = False,
    ):
        self._one_round_bytes, self._in_place = one_round_bytes, in_place
        self.rank, self.backend, self.entry = rank, backend, NCCL if backend == "nccl" else GLOO
        self._groups: dict[Ranks, dist.ProcessGroup | None] = {}
        timeout = datetime.timedelta(seconds=timeout_s)
        try:
            where: Any = {"init_method": meeting} if isinstance(meeting, str) else {"store": meeting}
            dist.init_process_group(backend, **where, rank=rank, world_size=mesh.world, timeout=timeout)
            for ranks in mesh.groups:
                if len(ranks) > 1:
                    self._groups[ranks] = dist.new_group(list(ranks), timeout=timeout)
        except (RuntimeError, ValueError) as error:
            raise CommError(f"rank {rank}: no {backend} group of {mesh.world} ranks at {meeting}: {error}") from error

    def close(self) -> None:
        """Leave the group. The transport must not be used after."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def empty(self, *shape: int, like: Tensor) -> Tensor:
        return like.new_empty(shape)

    def barrier(self, group: Ranks) -> None:
        self._call("barrier", group, lambda g: dist.barrier(group=g))

    def exchange(
        self, x: Tensor, exchange: Exchange, group: Ranks, sizes: Sizes | LiveSizes, epilogue: Epilogue | None = None
    ) -> Tensor:
        sizes = sizes_on_host(self, sizes)
        place = check_call(self, x, exchange, group, sizes, epilogue)
        x = x.contiguous()
        if self.backend == "nccl":
            return self._nccl(x, exchange.kind, group, sizes, place)
        if exchange.kind == "all_reduce" and len(group) == 2:  # gloo's own takes one round, too, and copies less
            return self._all_reduced(x, group)
        copied = exchange.combine == "none"
        all_parts = [p._replace(sources=p.sources[:1]) if copied else p for p in parts(exchange, sizes)]
        # All ranks compute the same number, whatever their own rows, so that all make the same choice.
        largest = max(sum(p.rows for p in all_parts if r in p.readers) for r in range(len(group)))
        row_bytes = x.shape[1:].numel() * x.element_size()
        if copied or largest * row_bytes <= self._one_round_bytes:
            return self._round(x, all_parts, exchange.kind, group, place)
        first, second = in_two_steps(all_parts)
        return self._round(self._round(x, first, exchange.kind, group, place), second, exchange.kind, group, place)

    def _round(self, x: Tensor, found: Sequence[Part], kind: str, group: Ranks, place: int) -> Tensor:
        """Run one all_to_all: each reader of a part gets all its terms, and adds them in rank order."""
        everyone = range(len(group))
        sent = [[p for p in found if place in p.sources and r in p.readers] for r in everyone]
        due = [[p for p in found if r in p.sources and place in p.readers] for r in everyone]
        send = [sum(p.rows for p in runs) for runs in sent]
        receive = [sum(p.rows for p in runs) for runs in due]
        outgoing = [x[p.source_row : p.source_row + p.rows] for runs in sent for p in runs]
        send_buffer = torch.cat(outgoing) if outgoing else x[:0]
        receive_buffer = x.new_empty((sum(receive), *x.shape[1:]))
        self._call(kind, group, lambda g: dist.all_to_all_single(receive_buffer, send_buffer, receive, send, group=g))
        arrived: dict[tuple[int, Part], Tensor] = {}
        for r, of in zip(everyone, receive_buffer.split(receive), strict=True):
            arrived |= zip([(r, p) for p in due[r]], of.split([p.rows for p in due[r]]), strict=True)
        own_parts = sorted({p for runs in due for p in runs}, key=lambda p: p.reader_row)
        sums = [_sum([arrived[s, p] for s in p.sources]) for p in own_parts]
        return torch.cat(sums) if sums else x[:0]

    def _nccl(self, x: Tensor, kind: str, group: Ranks, sizes: Sizes, place: int) -> Tensor:
        n, equal = len(group), len(set(sizes)) == 1 and sizes[0] > 0
        if kind == "all_reduce":
            return self._all_reduced(x, group)
        if kind == "reduce_scatterv":
            out = x.new_empty((sizes[place], *x.shape[1:]))
            if equal:
                self._call(kind, group, lambda g: dist.reduce_scatter_tensor(out, x, group=g))
            else:
                self._call(kind, group, lambda g: dist.reduce_scatter(out, list(x.split(sizes)), group=g))
        elif kind == "all_gatherv":
            out = x.new_empty((sum(sizes), *x.shape[1:]))
            if equal:
                self._call(kind, group, lambda g: dist.all_gather_into_tensor(out, x, group=g))
            else:
                self._call(kind, group, lambda g: dist.all_gather(list(out.split(sizes)), x, group=g))
        else:
            send, receive = list(sizes[place * n : (place + 1) * n]), list(sizes[place::n])
            out = x.new_empty((sum(receive), *x.shape[1:]))
            self._call(kind, group, lambda g: dist.all_to_all_single(out, x, receive, send, group=g))
        return out

    def _all_reduced(self, x: Tensor, group: Ranks) -> Tensor:
        out = x if self._in_place else x.clone()
        self._call("all_reduce", group, lambda g: dist.all_reduce(out, group=g))
        return out

    def _call(self, what: str, group: Ranks, call: Callable[[dist.ProcessGroup | None], object]) -> None:
        if group not in self._groups:
            raise CommError(f"rank {self.rank}: {what} over {group}, which is no group of this layout")
        try:
            call(self._groups[group])
        except RuntimeError as error:
            raise CommError(f"rank {self.rank}: {what} over {group} failed: {error}") from error


def open_transport(rank: Opening) -> TorchDistTransport:
    """Open gloo on CPUs, nccl on GPUs: the `open` of their rows in the table."""
    backend = "nccl" if rank.device.type == "cuda" else "gloo"
    meeting = _store(rank, *rank.store) if rank.store else f"file://{rank.directory}/rendezvous"
    return TorchDistTransport(
        rank.mesh, rank.rank, meeting, backend=backend, timeout_s=rank.timeout_s, in_place=backend == "nccl"
    )


def _store(rank: Opening, host: str, port: int) -> Store:
    """Return the store of ranks on several hosts, served by rank 0. Raises CommError if it cannot be reached.

    Its keys begin with the name of the ranks' folder, which is new at each start, so that no keys of an earlier start
    are read.
    """
    timeout = datetime.timedelta(seconds=rank.timeout_s)
    try:
        store = TCPStore(host, port, rank.mesh.world, rank.rank == 0, timeout, wait_for_workers=False)
    except RuntimeError as error:
        do = "listen on" if rank.rank == 0 else "reach"
        why = str(error).splitlines()[0]
        raise CommError(f"rank {rank.rank} cannot {do} {host}:{port}, the store of the ranks: {why}") from error
    return PrefixStore(rank.directory.name, store)


def _sum(terms: Sequence[Tensor]) -> Tensor:
    """Return the sum in order; low precision is summed in float32 and rounded once."""
    first = terms[0]
    if len(terms) == 1:
        return first
    wide = torch.float32 if first.dtype in (torch.bfloat16, torch.float16) else first.dtype
    return torch.stack(list(terms)).sum(0, dtype=wide).to(first.dtype)
