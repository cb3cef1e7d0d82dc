"""The protocol of transports, and the one place that turns a planned edge into a call.

Rows are ragged: sizes differ by rank, may be zero, and change every step. All ranks of a group make the same calls in
the same order, also with zero rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from weft.comm.forks import ProcessBound
from weft.comm.transport_registry import TransportEntry
from weft.kernels.torch_reference import UnfilledRows, add_rms_norm
from weft.planner import exchange as exchanges
from weft.planner.cost import Cost, Offer
from weft.planner.edges import legal_edges
from weft.planner.exchange import Exchange, input_rows
from weft.planner.recipes import block_exchanges
from weft.planner.spec import Mesh

COLLECTIVE = "weft collective "
"""Prefix of a collective's range in a trace, before its kind. Names in a trace are ASCII only."""
Ranks = tuple[int, ...]
"""Group: its global ranks, ascending, including the caller."""
Sizes = tuple[int, ...]
"""Rows of each segment of an exchange, as in `weft.planner.exchange.parts`."""


@dataclass(frozen=True, slots=True)
class LiveSizes:
    """Sizes with live rows that only the device knows.

    Live rows lie one after the other from a tensor's first row on, whatever the capacities. Rows after them are neither
    read nor written.

    Attributes:
        live: int32 `[segments]` in device memory, read when the kernel runs: live rows of each segment, at most its
          capacity. For a permute `[2 · ranks]`: rows that this rank sends to each rank, then rows that it receives.
    """

    capacity: Sizes  # maximum rows of each segment, by which tensors are allocated; the same on every rank
    live: Tensor


class CommError(RuntimeError):
    """Failure or timeout of a collective. The message names the rank, the call and, if known, the lost peer."""


class PeerLost(CommError):
    """Loss of the process of global rank `rank`."""

    def __init__(self, rank: int, by: int):
        super().__init__(f"rank {by}: rank {rank} is gone")
        self.rank = rank


class CommTimeout(CommError):
    """Timeout of a collective."""


@dataclass(frozen=True, slots=True)
class Epilogue:
    """Residual add and RMSNorm of a sum's result, in the same call (see `finish`)."""

    residual: Tensor  # `[rows, width]` for the result's rows, in the input's dtype
    weight: Tensor  # `[width]`, in the same dtype or float32, as in `weft.kernels.torch_reference.rms_norm`
    eps: float
    quantised: UnfilledRows | None = None  # filled with the normalised rows, for products that need them in a format


def finish(delta: Tensor, epilogue: Epilogue) -> Tensor:
    """Return the result of a sum with an epilogue, from the sum delta `[rows, width]`: `[2, rows, width]`.

    First the new residual, residual + delta; then its `weft.kernels.torch_reference.rms_norm`. `epilogue.quantised` is
    filled with the latter.
    """
    e = epilogue
    return torch.stack(add_rms_norm(e.residual, delta, e.weight, e.eps, quantised=e.quantised))


class Transport(Protocol):
    """One rank's end. Tensors are `[rows, width]`. Inputs do not change; results are new tensors.

    All methods raise CommError. A transport declares what it lacks at plan time, in its entry, and has no fallbacks.
    """

    rank: int

    @property
    def entry(self) -> TransportEntry:
        """Row of the table, with the max_bytes that this end was built for."""
        ...

    def exchange(
        self, x: Tensor, exchange: Exchange, group: Ranks, sizes: Sizes | LiveSizes, epilogue: Epilogue | None = None
    ) -> Tensor:
        """Return this rank's result of an exchange among `group`, as defined by `weft.planner.exchange.parts`.

        Raises CommError at once if the transport does not offer the exchange or LiveSizes, or the rank is not in the
        group.

        Args:
            x: this rank's input `[rows, width]`.
            sizes: rows of each segment.
            epilogue: residual add and norm; the result is then `[2, rows, width]` (see `finish`).
        """
        ...

    def merge_scatterv(
        self, out: Tensor, lse: Tensor, group: Ranks, live: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Merge attention over the ranks' shards of the keys: each rank gets its own heads, complete.

        Returns new tensors `[T, H/n, D]` and `[T, H/n]`: the i-th rank gets the i-th H/n heads. Raises CommError like
        `exchange`.

        Args:
            out: `[T, H, D]`, its last dimension contiguous: all heads over this rank's keys. T is the same on all
              ranks.
            lse: float32 `[T, H]`, as in `weft.kernels.torch_reference.softmax_merge`.
            live: int32 `[1]` in device memory: number of tokens in use; None: all T.
        """
        ...

    def empty(self, *shape: int, like: Tensor) -> Tensor:
        """Return an unfilled tensor of like's dtype and device in memory that this transport reads fastest."""
        ...

    def recorded(self, recorder: Any) -> AbstractContextManager[None]:
        """Record the calls inside the context, on CPUs. recorder: a `weft.engine.worker.recorder.Recorder`."""
        ...

    def barrier(self, group: Ranks) -> None:
        """Return once all ranks of the group have called it."""
        ...

    def check(self) -> None:
        """Raise the errors of queued calls that have run since, and PeerLost if a rank is known to be gone."""
        ...

    def close(self) -> None:
        """Leave the world; the transport must not be used after."""
        ...


class NamedCalls(ProcessBound):
    """Base class of transports: a method for each exchange by its name, which calls `exchange`."""

    fork_error = CommError
    entry: TransportEntry
    rank: int

    def exchange(
        self, x: Tensor, exchange: Exchange, group: Ranks, sizes: Sizes | LiveSizes, epilogue: Epilogue | None = None
    ) -> Tensor:
        """Run an exchange. Subclasses override this."""
        raise NotImplementedError

    def merge_scatterv(
        self, out: Tensor, lse: Tensor, group: Ranks, live: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run the exchange `merge_scatterv` as `Transport.merge_scatterv` says, if it is offered."""
        raise CommError(f"{type(self).__name__} does not offer merge_scatterv")

    def check(self) -> None:
        """Do nothing, for transports that queue nothing: calls raise their own errors."""

    @contextmanager
    def recorded(self, recorder: Any) -> Iterator[None]:
        """See `Transport.recorded`. Here calls are recorded as calls of Python."""
        names = "exchange", "merge_scatterv"
        for name in names:
            setattr(self, name, partial(recorder.call, getattr(self, name)))
        try:
            yield
        finally:
            for name in names:
                delattr(self, name)

    def all_reduce(self, x: Tensor, group: Ranks, epilogue: Epilogue | None = None) -> Tensor:
        """Return the sum of all ranks' x."""
        return self.exchange(x, exchanges.all_reduce(len(group)), group, (x.shape[0],), epilogue)

    def reduce_scatterv(self, x: Tensor, group: Ranks, sizes: Sizes) -> Tensor:
        """Return this rank's segment of the rows of the sum of all ranks' x `[sum(sizes), width]`."""
        return self.exchange(x, exchanges.reduce_scatterv(len(group)), group, sizes)

    def all_gatherv(self, x: Tensor, group: Ranks, sizes: Sizes) -> Tensor:
        """Return all ranks' rows, in rank order: `[sum(sizes), width]`; the i-th rank passes `sizes[i]` rows."""
        return self.exchange(x, exchanges.all_gatherv(len(group)), group, sizes)

    def all_to_allv(self, x: Tensor, group: Ranks, send: Sizes, receive: Sizes) -> Tensor:
        """Send `send[i]` rows of `x` to rank i, segment by segment; return `receive[i]` rows of each rank i."""
        return self.exchange(
            x, exchanges.all_to_allv(len(group)), group, to_and_from(send, receive, place_in(group, self.rank))
        )

    def broadcast(self, x: Tensor, group: Ranks, root: int) -> Tensor:
        """Return the x of global rank `root`; all ranks pass a tensor of that shape."""
        own_rows = x if self.rank == root else x[:0]
        return self.all_gatherv(own_rows, group, tuple(x.shape[0] * (r == root) for r in group))

    def all_reduce_all_gatherv(self, x: Tensor, world: Ranks, sizes: Sizes) -> Tensor:
        """Return the sums of x over each group of neighbouring ranks, in group order. sizes: rows of each group."""
        exchange = exchanges.all_reduce_all_gatherv(len(sizes), len(world) // len(sizes))
        return self.exchange(x, exchange, world, sizes)

    def reduce_scatterv_all_reduce(self, x: Tensor, world: Ranks, sizes: Sizes) -> Tensor:
        """Return this group's segment of the rows of the sum of all ranks' x `[sum(sizes), width]`."""
        exchange = exchanges.reduce_scatterv_all_reduce(len(sizes), len(world) // len(sizes))
        return self.exchange(x, exchange, world, sizes)


def to_and_from(send: Sequence[int], receive: Sequence[int], place: int) -> Sizes:
    """Return the sizes of a permute known to the rank at `place`: its row `send` and column `receive`, zeros elsewhere.

    Raises CommError if the rank sends itself a different number of rows than it receives from itself.
    """
    n = len(send)
    if len(receive) != n or send[place] != receive[place]:
        raise CommError(f"all_to_allv: {list(send)} rows sent and {list(receive)} received do not match")
    sizes = [0] * (n * n)
    sizes[place * n : (place + 1) * n] = send
    sizes[place::n] = receive
    return tuple(sizes)


def place_in(group: Ranks, rank: int) -> int:
    """Return the rank's place in the group. Raises CommError without one: its peers would wait for it forever."""
    if rank not in group:
        raise CommError(f"rank {rank} calls over the group {group}, which it is not in")
    return group.index(rank)


def sizes_on_host(transport: Transport, sizes: Sizes | LiveSizes) -> Sizes:
    """Return sizes for a transport that must know them on the host. Raises CommError for LiveSizes."""
    if isinstance(sizes, LiveSizes):
        raise CommError(f"{transport.entry.name} takes no row counts in device memory, so it serves no CUDA graph")
    return sizes


def check_call(
    transport: Transport, x: Tensor, exchange: Exchange, group: Ranks, sizes: Sizes, epilogue: Epilogue | None
) -> int:
    """Return the rank's place in the group. Raises CommError for an error that this rank can find alone."""
    place = place_in(group, transport.rank)
    if not transport.entry.offers(exchange, epilogue is not None):
        what = f"{exchange.kind} with an epilogue" if epilogue is not None else exchange.kind
        raise CommError(f"{transport.entry.name} does not offer {what}")
    if exchange.combine == "softmax_merge":
        raise CommError(f"rank {transport.rank}: {exchange.kind} takes lse too; it has a call of its own")
    if exchange.ranks != len(group):
        raise CommError(f"rank {transport.rank}: {exchange.kind} of {exchange.ranks} ranks over {len(group)} ranks")
    try:
        rows = input_rows(exchange, sizes, place)
    except ValueError as error:
        raise CommError(f"rank {transport.rank}: {error}") from None
    if x.shape[0] != rows:
        raise CommError(
            f"rank {transport.rank}: {exchange.kind} of {x.shape[0]} rows, but the sizes {sizes} say {rows}"
        )
    return place


def check_merge(transport: Transport, out: Tensor, lse: Tensor, group: Ranks) -> int:
    """Return the rank's place in the group. Raises CommError for an error that this rank can find alone."""
    place, rank = place_in(group, transport.rank), transport.rank
    if not transport.entry.offers(exchanges.merge_scatterv(len(group))):
        raise CommError(f"{transport.entry.name} does not offer merge_scatterv")
    if out.dim() != 3 or out.shape[1] % len(group):
        raise CommError(
            f"rank {rank}: merge_scatterv takes [T, H, D], H a multiple of {len(group)}, not {list(out.shape)}"
        )
    if lse.shape != out.shape[:2] or lse.dtype != torch.float32:
        raise CommError(
            f"rank {rank}: merge_scatterv of {list(out.shape)} takes lse {list(out.shape[:2])} in float32, not "
            f"{list(lse.shape)} in {lse.dtype}"
        )
    return place


def offer_of(entry: TransportEntry, mesh: Mesh, cost: Cost) -> Offer:
    """Return a transport's offer to the planner: its edges of the mesh, and its exchanges inside blocks."""
    offered = {e.exchange for edges in legal_edges(mesh).values() for e in edges if e.exchange is not None}
    offered |= block_exchanges(mesh)
    kinds, epilogues = (frozenset(e.kind for e in offered if entry.offers(e, epilogue)) for epilogue in (False, True))
    limits = entry.max_bytes, entry.max_normed_bytes, entry.max_ranks, entry.max_hosts
    return Offer(entry.name, kinds, epilogues, cost, *limits, live_sizes=entry.takes_live_sizes)
