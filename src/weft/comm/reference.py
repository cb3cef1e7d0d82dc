"""The oracle: N emulated ranks in one process, one thread each, every edge in plain torch.

Sums are taken in float64 in rank order and rounded once. Every call is checked: the ranks of a group must make the same
call with fitting shapes, or all of them raise instead of hanging.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

from weft.comm.transport import CommError, Epilogue, Ranks, Sizes, finish
from weft.place.edges import COLLECTIVES, REDUCTIONS
from weft.place.spec import PlacementError

T = TypeVar("T")


class _Meeting:
    """Where the ranks of one group put their values and look at each other's."""

    def __init__(self, size: int):
        self.barrier = threading.Barrier(size)
        self.calls: dict[int, tuple[Hashable, Any]] = {}


class ReferenceWorld:
    """N emulated ranks. Each rank's transport is to be used from a thread of its own.

    audit: also refuse sums that cannot be meant: bitwise equal, non-zero inputs on every rank are a replicated value
    taken for a partial one. timeout_s: after so long without its peers a rank raises CommError.
    """

    def __init__(self, world: int, *, audit: bool = True, timeout_s: float = 60.0):
        self.world, self.audit, self.timeout_s = world, audit, timeout_s
        self._meetings: dict[Ranks, _Meeting] = {}
        self._lock = threading.Lock()
        self._aborted = False

    def transports(self) -> list[ReferenceTransport]:
        """One transport for each rank, in rank order."""
        return [ReferenceTransport(self, rank) for rank in range(self.world)]

    def abort(self) -> None:
        """Wakes every waiting rank with CommError, and fails every later call."""
        with self._lock:
            self._aborted = True
            meetings = list(self._meetings.values())
        for meeting in meetings:
            meeting.barrier.abort()

    def meet(self, rank: int, group: Ranks, call: Hashable, value: T, work: Callable[[list[T]], Tensor]) -> Tensor:
        """Shows a value to the group, waits for all, and returns `work` on every rank's value in rank order."""
        if rank not in group:
            raise CommError(f"rank {rank} called {call} for the group {group}, which it is not in")
        with self._lock:
            if self._aborted:
                raise CommError(f"rank {rank}: the world was aborted before {call}")
            meeting = self._meetings.setdefault(group, _Meeting(len(group)))
        meeting.calls[rank] = (call, value)
        try:
            meeting.barrier.wait(self.timeout_s)
            calls = {r: meeting.calls[r][0] for r in group}
            if len(set(calls.values())) > 1:
                raise CommError(f"the ranks of {group} made different calls: {calls}")
            result = work([meeting.calls[r][1] for r in group])
            meeting.barrier.wait(self.timeout_s)
        except threading.BrokenBarrierError:
            raise CommError(f"rank {rank}: {call} in {group}: a peer failed or did not come") from None
        except BaseException:
            self.abort()
            raise
        return result

    def total(self, tensors: list[Tensor]) -> Tensor:
        """The sum, in float64 and rank order, rounded to the inputs' dtype."""
        first = tensors[0]
        if self.audit and len(tensors) > 1 and first.any() and all(torch.equal(first, t) for t in tensors[1:]):
            raise PlacementError("a sum over ranks that all hold the same values: replicated, but declared partial")
        total = torch.zeros_like(first, dtype=torch.float64)
        for t in tensors:
            total += t
        return total.to(first.dtype)


class ReferenceTransport:
    """One emulated rank; see `weft.comm.transport.Transport` for what each method gives."""

    name = "reference"
    kinds = frozenset(COLLECTIVES)
    epilogues = frozenset(REDUCTIONS)
    max_bytes: int | None = None

    def __init__(self, world: ReferenceWorld, rank: int):
        self._world, self.rank = world, rank

    def _meet(self, group: Ranks, call: Hashable, value: T, work: Callable[[list[T]], Tensor]) -> Tensor:
        return self._world.meet(self.rank, group, call, value, work)

    def close(self) -> None:
        pass

    def empty(self, *shape: int, like: Tensor) -> Tensor:
        return like.new_empty(shape)

    def all_reduce(self, x: Tensor, group: Ranks, epilogue: Epilogue | None = None) -> Tensor:
        out = self._meet(group, ("all_reduce", tuple(x.shape)), x, self._world.total)
        return finish(out, epilogue) if epilogue else out

    def reduce_scatterv(self, x: Tensor, group: Ranks, sizes: Sizes, epilogue: Epilogue | None = None) -> Tensor:
        if x.shape[0] != sum(sizes):
            raise CommError(f"rank {self.rank}: reduce_scatterv of {x.shape[0]} rows into runs of {sizes}")
        mine = group.index(self.rank)
        out = self._meet(
            group,
            ("reduce_scatterv", tuple(x.shape), sizes),
            x,
            lambda xs: self._world.total(xs).split(sizes)[mine].clone(),
        )
        return finish(out, epilogue) if epilogue else out

    def all_gatherv(self, x: Tensor, group: Ranks, sizes: Sizes) -> Tensor:
        if x.shape[0] != sizes[group.index(self.rank)]:
            raise CommError(f"rank {self.rank}: all_gatherv of {x.shape[0]} rows where {sizes} were announced")
        return self._meet(group, ("all_gatherv", x.shape[1:], sizes), x, torch.cat)

    def all_to_allv(self, x: Tensor, group: Ranks, send: Sizes, receive: Sizes) -> Tensor:
        mine = group.index(self.rank)

        def collect(sent: list[tuple[Tensor, ...]]) -> Tensor:
            runs = [runs[mine] for runs in sent]
            if tuple(len(run) for run in runs) != receive:
                raise CommError(f"rank {self.rank}: all_to_allv announced {receive} rows, its peers send others")
            return torch.cat(runs)

        return self._meet(group, ("all_to_allv", x.shape[1:]), x.split(send), collect)

    def broadcast(self, x: Tensor, group: Ranks, root: int) -> Tensor:
        at = group.index(root)
        return self._meet(group, ("broadcast", tuple(x.shape), root), x, lambda xs: xs[at].clone())

    def barrier(self, group: Ranks) -> None:
        self._meet(group, ("barrier",), torch.empty(0), lambda xs: xs[0])

    def all_reduce_all_gatherv(
        self, x: Tensor, reduce: Ranks, gather: Ranks, sizes: Sizes, epilogue: Epilogue | None = None
    ) -> Tensor:
        out = self.all_gatherv(self.all_reduce(x, reduce), gather, sizes)
        return finish(out, epilogue) if epilogue else out

    def reduce_scatterv_all_reduce(
        self, x: Tensor, scatter: Ranks, reduce: Ranks, sizes: Sizes, epilogue: Epilogue | None = None
    ) -> Tensor:
        return self.all_reduce(self.reduce_scatterv(x, scatter, sizes), reduce, epilogue)
