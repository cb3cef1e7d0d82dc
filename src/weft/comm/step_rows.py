"""How many rows a step has, and how many its tensors have room for.

Outside of CUDA graphs both are the same, and the host knows them: `StepRows`. A captured graph has tensors of one
shape, its capacity, and serves every step that fits: kernels read the live counts from device memory, live rows lie at
a tensor's front, and what lies behind them is never read: `PaddedRows`. Where a transport takes no counts from device
memory, all groups exchange their whole capacity: `EqualRows`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor

from weft.comm.transport import CommError, Epilogue, LiveSizes, Sizes, Transport
from weft.place.chain import Counts
from weft.place.edges import Edge
from weft.place.spec import NAMED_ROWS, Mesh, Rows


class StepRows:
    """A step of `counts` tokens in each DP group, as one rank sees it; tensors have just these rows.

    capacity: the counts that tensors have room for. idle: no rank holds a row, and every rank knows it.
    """

    def __init__(self, mesh: Mesh, rank: int, counts: Counts):
        self.mesh, self.rank, self.capacity = mesh, rank, counts
        self.idle = sum(counts) == 0
        self._sizes: dict[Edge, Sizes] = {}
        self._orders: dict[Edge, Tensor] = {}

    def room(self, rows: Rows) -> int:
        """Rows of a tensor."""
        return self.mesh.row_count(rows, self.rank, self.capacity)

    def live(self, rows: Rows) -> Tensor | None:
        """int32 `[1]` on the device: how many of a tensor's rows are live; None where all are."""
        return None

    def sizes(self, edge: Edge) -> Sizes:
        """Rows of each segment of an edge's exchange that tensors have room for."""
        found = self._sizes.get(edge)
        if found is None:
            found = self._sizes[edge] = edge.sizes(self.mesh, self.rank, self.capacity)
        return found

    def slice(self, x: Tensor, src: Rows, dst: Rows) -> Tensor:
        """Of x, which holds src rows, the dst rows."""
        if src in NAMED_ROWS and dst in NAMED_ROWS:
            (start, stop), (base, _) = (self.mesh.row_range(rows, self.rank, self.capacity) for rows in (dst, src))
            return x[start - base : stop - base]
        places = self._runs(src)
        return torch.cat([x[places[p].start : places[p].stop] for p in self.mesh.peers(dst.over, self.rank)])

    def carry(self, edge: Edge, x: Tensor, transport: Transport, epilogue: Epilogue | None = None) -> Tensor:
        """Takes x `[rows, width]` along an edge. Raises CommError, PlacementError."""
        if edge.exchange is None:
            return self.slice(x, edge.src.rows, edge.dst.rows)
        group = self.mesh.peers(edge.group, self.rank)
        if not edge.reorders(self.mesh):
            return transport.exchange(x, edge.exchange, group, self.sizes(edge), epilogue)
        order = self._segment_order(edge, x.device)
        if edge.exchange.direction == "scatter":
            return transport.exchange(x.index_select(0, order), edge.exchange, group, self.sizes(edge), epilogue)
        given = transport.exchange(x, edge.exchange, group, self.sizes(edge), epilogue)
        return torch.empty_like(given).index_copy_(-2, order, given)

    def _runs(self, rows: Rows) -> dict[int, range]:
        """Where the OWN rows of each rank lie in a tensor of these rows."""
        found, at = {}, 0
        for peer in self.mesh.peers(rows.over, self.rank):
            count = self.mesh.row_count(Rows.OWN, peer, self.capacity)
            found[peer], at = range(at, at + count), at + count
        return found

    def _segment_order(self, edge: Edge, device: torch.device) -> Tensor:
        """int64: of the rows of all segments, one after the other, the places in rank order."""
        found = self._orders.get(edge)
        if found is None:
            joined = max(edge.src.rows, edge.dst.rows, key=lambda rows: self.mesh.extent(self.mesh.gathered(rows)))
            places, firsts = self._runs(joined), edge.segments(self.mesh, self.rank)
            held = (peer for first in firsts for peer in self.mesh.peers(edge.segment_rows.over, first))
            order = [place for peer in held for place in places[peer]]
            found = self._orders[edge] = torch.tensor(order, dtype=torch.int64, device=device)
        return found


class PaddedRows(StepRows):
    """A step whose tensors have room for `capacity` tokens in each DP group, and whose live counts are on the device.

    `fill` sets the counts, with one copy from pinned memory; everything that is handed out stays where it is, so that a
    graph that was captured with it serves every fill.
    """

    def __init__(self, mesh: Mesh, rank: int, capacity: int, device: torch.device):
        super().__init__(mesh, rank, (capacity,) * mesh.attn_dp)
        if mesh.hosts > 1:
            raise CommError("row counts in device memory are of the ranks of one host")
        self.idle = False
        # Which rows of a tensor are a smaller tensor's: behind the live ones, any.
        cuts = {(src, dst): self.room(dst) for dst, src in itertools.combinations(NAMED_ROWS, 2)}
        lengths = [mesh.attn_dp, mesh.world, *(1 for _ in NAMED_ROWS), *cuts.values()]
        self._device = torch.zeros(sum(lengths), dtype=torch.int32, device=device)
        by_group, by_rank, *rest = self._device.split(lengths)
        self._by_group, self._by_rank = by_group, by_rank
        self._live = dict(zip(NAMED_ROWS, rest, strict=False))
        self._indices = dict(zip(cuts, rest[len(NAMED_ROWS) :], strict=True))
        self._counts: Counts | None = None
        self._live_sizes: dict[Edge, LiveSizes] = {}

    def fill(self, counts: Counts) -> None:
        """Sets the live counts, at most the capacity. The copy is queued on torch's current stream, if they are new.

        Raises ValueError where they do not fit.
        """
        mesh, rank = self.mesh, self.rank
        _check_counts(counts, self.capacity)
        if counts == self._counts:
            return
        filled = [*counts, *(mesh.row_count(Rows.OWN, r, counts) for r in range(mesh.world))]
        filled += [mesh.row_count(rows, rank, counts) for rows in NAMED_ROWS]
        for (src, dst), index in self._indices.items():
            start = mesh.row_range(dst, rank, counts)[0] - mesh.row_range(src, rank, counts)[0]
            last = max(self.room(src) - 1, 0)
            filled += [min(start + i, last) for i in range(len(index))]
        # Pinned memory that torch keeps until the copy has ended.
        host = torch.tensor(filled, dtype=torch.int32, pin_memory=self._device.is_cuda)
        self._device.copy_(host, non_blocking=True)
        self._counts = counts

    def live(self, rows: Rows) -> Tensor:
        return self._live[rows]

    def carry(self, edge: Edge, x: Tensor, transport: Transport, epilogue: Epilogue | None = None) -> Tensor:
        # An all_reduce sums what lies behind the live rows too: nobody reads it.
        if edge.exchange is None or edge.exchange.segments == 1:
            return super().carry(edge, x, transport, epilogue)
        group = self.mesh.peers(edge.group, self.rank)
        return transport.exchange(x, edge.exchange, group, self.live_sizes(edge), epilogue)

    def live_sizes(self, edge: Edge) -> LiveSizes:
        """Rows of each segment of an edge's exchange, live and at most."""
        found = self._live_sizes.get(edge)
        if found is None:
            found = self._live_sizes[edge] = self._find_sizes(edge)
        return found

    def _find_sizes(self, edge: Edge) -> LiveSizes:
        exchange = edge.exchange
        assert exchange is not None
        rows = edge.dst.rows if exchange.direction == "scatter" else edge.src.rows
        ranks = self.mesh.peers(edge.group, self.rank)[:: exchange.span]
        own = rows == Rows.OWN
        places = ranks if own else [self.mesh.group_of(r) for r in ranks]
        first, last = places[0], places[-1] + 1
        assert list(places) == list(range(first, last)), "segments of live rows are neighbours"
        return LiveSizes(self.sizes(edge), (self._by_rank if own else self._by_group)[first:last])

    def slice(self, x: Tensor, src: Rows, dst: Rows) -> Tensor:
        return x.index_select(0, self._indices[src, dst])


class EqualRows(StepRows):
    """As PaddedRows, for transports that take no row counts in device memory: every group exchanges its whole capacity.

    Each group's rows have a place of their own in tensors of several groups' rows. What lies behind a group's live rows
    is there computed as a token is, and its experts too, and drawn from by nobody.
    """

    def __init__(self, mesh: Mesh, rank: int, capacity: int, device: torch.device):
        super().__init__(mesh, rank, (capacity,) * mesh.attn_dp)
        self.idle = False
        self._of_group = torch.zeros(1, dtype=torch.int32, device=device)
        group = mesh.row_range(Rows.GROUP, rank, self.capacity)
        self._live = {
            rows: self._of_group
            if mesh.row_range(rows, rank, self.capacity) == group
            else torch.full((1,), self.room(rows), dtype=torch.int32, device=device)
            for rows in NAMED_ROWS
        }
        self._filled: int | None = None

    def fill(self, counts: Counts) -> None:
        """As `PaddedRows.fill`."""
        _check_counts(counts, self.capacity)
        mine = counts[self.mesh.group_of(self.rank)]
        if mine != self._filled:
            host = torch.tensor([mine], dtype=torch.int32, pin_memory=self._of_group.is_cuda)
            self._of_group.copy_(host, non_blocking=True)
            self._filled = mine

    def live(self, rows: Rows) -> Tensor:
        return self._live[rows]


CapturedRows = PaddedRows | EqualRows


def captured_rows(
    transports: Iterable[Transport], mesh: Mesh, rank: int, capacity: int, device: torch.device
) -> CapturedRows:
    """The rows of a graph whose exchanges these transports carry, with room for `capacity` tokens in each DP group."""
    kind = PaddedRows if all(t.takes_live_sizes for t in transports) else EqualRows
    return kind(mesh, rank, capacity, device)


def _check_counts(counts: Counts, capacity: Counts) -> None:
    if len(counts) != len(capacity) or not all(0 <= n <= most for n, most in zip(counts, capacity, strict=True)):
        raise ValueError(f"{list(counts)} tokens do not fit a capacity of {list(capacity)}")
