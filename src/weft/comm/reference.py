"""Reference transport: N emulated ranks in one process, one thread each, every exchange in plain torch.

Sums are computed in float64 in rank order and rounded once. Every call is checked: the ranks of a group must make the
same call with matching shapes, or all of them raise instead of hanging.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from weft.comm.transport import (
    CommError,
    Epilogue,
    LiveSizes,
    NamedCalls,
    Ranks,
    Sizes,
    check_call,
    check_merge,
    finish,
    place_in,
    sizes_on_host,
)
from weft.comm.transport_registry import REFERENCE, Opening
from weft.kernels.torch_reference import softmax_merge
from weft.planner.exchange import Exchange, parts
from weft.planner.spec import PlacementError

T = TypeVar("T")
R = TypeVar("R")


class _Meeting:
    """Meeting point of one group, for an exchange of values."""

    def __init__(self, size: int):
        self.barrier = threading.Barrier(size)
        self.calls: dict[int, tuple[Hashable, Any]] = {}


class ComputeLock:
    """Lock that lets one of several rank threads compute at a time, while a waiting rank releases it.

    Threads that compute at once hand Python's lock to each other at every operator, which costs a fifth of their time.
    timeout_s: a rank that waits longer for another to stop computing raises CommError.
    """

    def __init__(self, timeout_s: float):
        self._timeout_s, self._lock, self._of_thread = timeout_s, threading.Lock(), threading.local()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Hold the lock, except inside of `waiting`."""
        self._lock.acquire()
        self._of_thread.holds = True
        try:
            yield
        finally:
            self._release()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Release the lock meanwhile, if this thread holds it."""
        was_computing = self._release()
        try:
            yield
        finally:
            if was_computing:
                if not self._lock.acquire(timeout=self._timeout_s):
                    raise CommError(f"another rank has computed for {self._timeout_s:g} s")
                self._of_thread.holds = True

    def _release(self) -> bool:
        """Release the lock; return True if this thread held it."""
        if was_computing := getattr(self._of_thread, "holds", False):
            self._of_thread.holds = False
            self._lock.release()
        return was_computing


class ReferenceWorld:
    """N emulated ranks. Each rank's transport must be used from its own thread.

    audit: also refuse sums that look like mistakes: bitwise equal, non-zero inputs on all ranks are a replicated value
    that was declared partial.
    timeout_s: a rank that waits longer for its peers raises CommError.
    """

    def __init__(self, world: int, *, audit: bool = True, timeout_s: float = 60.0):
        self.world, self.audit, self.timeout_s = world, audit, timeout_s
        self._meetings: dict[Ranks, _Meeting] = {}
        self._lock = threading.Lock()
        self._aborted = False
        self.compute_lock = ComputeLock(timeout_s)

    def transports(self) -> list[ReferenceTransport]:
        """Return one transport for each rank, in rank order."""
        return [ReferenceTransport(self, rank) for rank in range(self.world)]

    def abort(self) -> None:
        """Wake all waiting ranks with CommError, and fail all later calls."""
        with self._lock:
            self._aborted = True
            meetings = list(self._meetings.values())
        for meeting in meetings:
            meeting.barrier.abort()

    def meet(self, rank: int, group: Ranks, call: Hashable, value: T, work: Callable[[list[T]], R]) -> R:
        """Show a `call`'s `value` to the group, wait for all, and return `work` of all values in rank order."""
        place_in(group, rank)
        with self._lock:
            if self._aborted:
                raise CommError(f"rank {rank}: the world was aborted before {call}")
            meeting = self._meetings.setdefault(group, _Meeting(len(group)))
        meeting.calls[rank] = (call, value)
        try:
            with self.compute_lock.waiting():
                meeting.barrier.wait(self.timeout_s)
            calls = {r: meeting.calls[r][0] for r in group}
            if len(set(calls.values())) > 1:
                raise CommError(f"the ranks of {group} made different calls: {calls}")
            result = work([meeting.calls[r][1] for r in group])
            with self.compute_lock.waiting():
                meeting.barrier.wait(self.timeout_s)
        except threading.BrokenBarrierError:
            raise CommError(f"rank {rank}: {call} in {group}: a peer failed or did not arrive") from None
        except BaseException:
            self.abort()
            raise
        return result

    def total(self, tensors: list[Tensor]) -> Tensor:
        """Return the sum, in float64 and rank order, rounded to the inputs' dtype."""
        first = tensors[0]
        if self.audit and len(tensors) > 1 and first.any() and all(torch.equal(first, t) for t in tensors[1:]):
            raise PlacementError("a sum over ranks that all hold the same values: replicated, but declared partial")
        total = torch.zeros_like(first, dtype=torch.float64)
        for t in tensors:
            total += t
        return total.to(first.dtype)


class ReferenceTransport(NamedCalls):
    """One emulated rank; see `weft.comm.transport.Transport` for the results of each method."""

    entry = REFERENCE

    def __init__(self, world: ReferenceWorld, rank: int):
        self._world, self.rank = world, rank

    def close(self) -> None:
        pass

    def empty(self, *shape: int, like: Tensor) -> Tensor:
        return like.new_empty(shape)

    def barrier(self, group: Ranks) -> None:
        self._world.meet(self.rank, group, "barrier", None, lambda _: torch.empty(0))

    def exchange(
        self, x: Tensor, exchange: Exchange, group: Ranks, sizes: Sizes | LiveSizes, epilogue: Epilogue | None = None
    ) -> Tensor:
        sizes = sizes_on_host(self, sizes)
        place = check_call(self, x, exchange, group, sizes, epilogue)
        permutes = exchange.direction == "permute"

        def combine(given: list[tuple[Tensor, Sizes]]) -> Tensor:
            all_sizes = _sent(given, place) if permutes else sizes
            own_parts = [p for p in parts(exchange, all_sizes) if place in p.readers]
            terms = [[given[s][0][p.source_row : p.source_row + p.rows] for s in p.sources] for p in own_parts]
            return torch.cat([self._world.total(t) if exchange.combine == "sum" else t[0] for t in terms])

        call = (exchange, () if permutes else sizes, x.shape[1:], x.dtype)
        out = self._world.meet(self.rank, group, call, (x, sizes), combine)
        return finish(out, epilogue) if epilogue else out

    def merge_scatterv(
        self, out: Tensor, lse: Tensor, group: Ranks, live: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        place, n = check_merge(self, out, lse, group), len(group)

        def combine(given: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
            outs, lses = (torch.stack([g[i].tensor_split(n, 1)[place].double() for g in given]) for i in range(2))
            merged, total = softmax_merge(outs, lses)
            return merged.to(out.dtype), total.float()

        return self._world.meet(self.rank, group, ("merge_scatterv", out.shape, out.dtype), (out, lse), combine)


def open_transport(rank: Opening) -> ReferenceTransport:
    """Open transport reference for a world of one rank."""
    return ReferenceWorld(1).transports()[0]


def _sent(given: list[tuple[Tensor, Sizes]], place: int) -> Sizes:
    """Return the whole matrix of a permute, from all senders. Raises CommError if this rank expects other rows."""
    n = len(given)
    matrix = tuple(rows for i, (_, sizes) in enumerate(given) for rows in sizes[i * n : (i + 1) * n])
    expected, sent = given[place][1][place::n], matrix[place::n]
    if sent != expected:
        raise CommError(f"all_to_allv: place {place} of the group expects {expected} rows and is sent {sent}")
    return matrix
