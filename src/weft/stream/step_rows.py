"""Rows of a step, and the rows of its tensors: their capacity.

Outside of CUDA graphs both are equal, and the host knows them: `StepRows`. A captured graph has tensors of one shape,
its capacity, and serves all steps that fit: kernels read the live counts from device memory, live rows lie at a
tensor's front, and rows after them are never read: `PaddedRows`. If a transport accepts no counts in device memory, all
groups exchange their whole capacity: `EqualRows`.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from weft.comm.transport import CommError, Epilogue, LiveSizes, Sizes, Transport
from weft.planner.chain import Counts
from weft.planner.edges import Edge
from weft.planner.spec import NAMED_ROWS, Mesh, Rows

MAX_FILLED = 1024
"""Maximum number of different counts that `PaddedRows.fill` keeps."""
Fill = Callable[[Tensor, Sequence[int]], None]
"""Function that fills an int32 tensor on the device with the host's numbers, before all work queued from now on."""


def copy_numbers(to: Tensor, values: Sequence[int]) -> None:
    """Fill by a copy that is queued on torch's current stream."""
    # torch keeps this pinned memory until the copy has ended.
    to.copy_(torch.tensor(values, dtype=torch.int32, pin_memory=to.is_cuda), non_blocking=True)


class StepRows:
    """Step of `counts` tokens in each DP group, as one rank sees it; tensors have exactly these rows.

    capacity: counts by which tensors are allocated. idle: no rank has a row, and all ranks know it.
    """

    def __init__(self, mesh: Mesh, rank: int, counts: Counts):
        self.mesh, self.rank, self.capacity = mesh, rank, counts
        self.idle = sum(counts) == 0
        self._sizes: dict[Edge, Sizes] = {}
        self._orders: dict[Edge, Tensor] = {}

    def capacity_of(self, rows: Rows) -> int:
        """Return the rows of a tensor."""
        return self.mesh.row_count(rows, self.rank, self.capacity)

    def live(self, rows: Rows) -> Tensor | None:
        """Return int32 `[1]` on the device: the number of a tensor's live rows; None if all are live."""
        return None

    def sizes(self, edge: Edge) -> Sizes:
        """Return the capacity of each segment of an edge's exchange."""
        result = self._sizes.get(edge)
        if result is None:
            result = self._sizes[edge] = edge.sizes(self.mesh, self.rank, self.capacity)
        return result

    def slice(self, x: Tensor, src: Rows, dst: Rows) -> Tensor:
        """Return the `dst` rows of `x`, which has `src` rows."""
        if src in NAMED_ROWS and dst in NAMED_ROWS:
            (start, stop), (base, _) = (self.mesh.row_range(rows, self.rank, self.capacity) for rows in (dst, src))
            return x[start - base : stop - base]
        places = self._runs(src)
        return torch.cat([x[places[p].start : places[p].stop] for p in self.mesh.peers(dst.over, self.rank)])

    def carry(self, edge: Edge, x: Tensor, transport: Transport, epilogue: Epilogue | None = None) -> Tensor:
        """Send x `[rows, width]` along an edge. Raises CommError, PlacementError."""
        if edge.exchange is None:
            return self.slice(x, edge.src.rows, edge.dst.rows)
        group = self.mesh.peers(edge.group, self.rank)
        if not edge.reorders(self.mesh):
            return transport.exchange(x, edge.exchange, group, self.sizes(edge), epilogue)
        order = self._segment_order(edge, x.device)
        if edge.exchange.direction == "scatter":
            return transport.exchange(x.index_select(0, order), edge.exchange, group, self.sizes(edge), epilogue)
        result = transport.exchange(x, edge.exchange, group, self.sizes(edge), epilogue)
        return torch.empty_like(result).index_copy_(-2, order, result)

    def _runs(self, rows: Rows) -> dict[int, range]:
        """Return the range of each rank's OWN rows in a tensor of these rows."""
        result, at = {}, 0
        for peer in self.mesh.peers(rows.over, self.rank):
            count = self.mesh.row_count(Rows.OWN, peer, self.capacity)
            result[peer], at = range(at, at + count), at + count
        return result

    def _segment_order(self, edge: Edge, device: torch.device) -> Tensor:
        """Return int64: the places in rank order of the rows of all segments, one after the other."""
        result = self._orders.get(edge)
        if result is None:
            joined = max(edge.src.rows, edge.dst.rows, key=lambda rows: self.mesh.extent(self.mesh.gathered(rows)))
            places, firsts = self._runs(joined), edge.segments(self.mesh, self.rank)
            peers = (peer for first in firsts for peer in self.mesh.peers(edge.segment_rows.over, first))
            order = [place for peer in peers for place in places[peer]]
            result = self._orders[edge] = torch.tensor(order, dtype=torch.int64, device=device)
        return result


class PaddedRows(StepRows):
    """Step in a CUDA graph: tensors have the capacity of `capacity` tokens in each DP group, live counts are on the
    device.

    `fill` sets the counts. All tensors that this object returns keep their addresses, so that a graph that was captured
    with it serves every fill.
    """

    def __init__(self, mesh: Mesh, rank: int, capacity: int, device: torch.device):
        super().__init__(mesh, rank, (capacity,) * mesh.attn_dp)
        if mesh.hosts > 1:
            raise CommError("row counts in device memory work on one host only")
        self.idle = False
        # Rows of a tensor that a smaller tensor selects: any after the live ones.
        cuts = {(src, dst): self.capacity_of(dst) for dst, src in itertools.combinations(NAMED_ROWS, 2)}
        lengths = [mesh.attn_dp, mesh.world, *(1 for _ in NAMED_ROWS), *cuts.values()]
        self._device = torch.zeros(sum(lengths), dtype=torch.int32, device=device)
        by_group, by_rank, *rest = self._device.split(lengths)
        self._by_group, self._by_rank = by_group, by_rank
        self._live = dict(zip(NAMED_ROWS, rest, strict=False))
        self._indices = dict(zip(cuts, rest[len(NAMED_ROWS) :], strict=True))
        self._counts: Counts | None = None
        self._filled: dict[Counts, array[int]] = {}  # by counts of earlier steps
        self._live_sizes: dict[Edge, LiveSizes] = {}

    def fill(self, counts: Counts, fill: Fill = copy_numbers) -> None:
        """Set the live counts, at most the capacity, by `fill` if they change. Raises ValueError if they do not fit."""
        if counts == self._counts:
            return
        if (filled := self._filled.get(counts)) is None:
            if len(self._filled) == MAX_FILLED:
                self._filled.clear()
            filled = self._filled[counts] = array("i", self._values(counts))
        fill(self._device, filled)
        self._counts = counts

    def _values(self, counts: Counts) -> list[int]:
        """Return all numbers that are on the device."""
        mesh, rank = self.mesh, self.rank
        _check_counts(counts, self.capacity)
        values = [*counts, *(mesh.row_count(Rows.OWN, r, counts) for r in range(mesh.world))]
        values += [mesh.row_count(rows, rank, counts) for rows in NAMED_ROWS]
        for (src, dst), index in self._indices.items():
            start = mesh.row_range(dst, rank, counts)[0] - mesh.row_range(src, rank, counts)[0]
            last = max(self.capacity_of(src) - 1, 0)
            values += [min(start + i, last) for i in range(len(index))]
        return values

    def live(self, rows: Rows) -> Tensor:
        return self._live[rows]

    def carry(self, edge: Edge, x: Tensor, transport: Transport, epilogue: Epilogue | None = None) -> Tensor:
        # An all_reduce also sums the rows after the live ones: no rank reads them.
        if edge.exchange is None or edge.exchange.segments == 1:
            return super().carry(edge, x, transport, epilogue)
        group = self.mesh.peers(edge.group, self.rank)
        return transport.exchange(x, edge.exchange, group, self.live_sizes(edge), epilogue)

    def live_sizes(self, edge: Edge) -> LiveSizes:
        """Return the rows of each segment of an edge's exchange: live and capacity."""
        result = self._live_sizes.get(edge)
        if result is None:
            result = self._live_sizes[edge] = self._find_sizes(edge)
        return result

    def _find_sizes(self, edge: Edge) -> LiveSizes:
        ranks, is_own = edge.segments(self.mesh, self.rank), edge.segment_rows == Rows.OWN
        places = ranks if is_own else [self.mesh.group_of(r) for r in ranks]
        first, last = places[0], places[-1] + 1
        assert list(places) == list(range(first, last)), "segments of live rows are neighbours"
        return LiveSizes(self.sizes(edge), (self._by_rank if is_own else self._by_group)[first:last])

    def slice(self, x: Tensor, src: Rows, dst: Rows) -> Tensor:
        return x.index_select(0, self._indices[src, dst])


class EqualRows(StepRows):
    """`PaddedRows` for transports without row counts in device memory: each group exchanges its whole capacity.

    In tensors of several groups' rows each group's rows have a fixed place. Rows after a group's live rows are computed
    like tokens, and so are their experts, but no rank samples from them.
    """

    def __init__(self, mesh: Mesh, rank: int, capacity: int, device: torch.device):
        super().__init__(mesh, rank, (capacity,) * mesh.attn_dp)
        self.idle = False
        self._of_group = torch.zeros(1, dtype=torch.int32, device=device)
        self._live = {
            rows: self._of_group
            if mesh.rows(rows) == mesh.rows(Rows.GROUP)
            else torch.full((1,), self.capacity_of(rows), dtype=torch.int32, device=device)
            for rows in dict.fromkeys((*NAMED_ROWS, *mesh.row_kinds))
        }
        self._filled: int | None = None

    def fill(self, counts: Counts, fill: Fill = copy_numbers) -> None:
        """Set the live counts, like `PaddedRows.fill`."""
        _check_counts(counts, self.capacity)
        own_rows = counts[self.mesh.group_of(self.rank)]
        if own_rows != self._filled:
            fill(self._of_group, [own_rows])
            self._filled = own_rows

    def live(self, rows: Rows) -> Tensor:
        return self._live[rows]


CapturedRows = PaddedRows | EqualRows


def captured_rows(
    transports: Iterable[Transport], mesh: Mesh, rank: int, capacity: int, device: torch.device
) -> CapturedRows:
    """Return the rows of a graph on these transports, for `capacity` tokens in each DP group."""
    kind = PaddedRows if all(t.entry.takes_live_sizes for t in transports) else EqualRows
    return kind(mesh, rank, capacity, device)


def _check_counts(counts: Counts, capacity: Counts) -> None:
    if len(counts) != len(capacity) or not all(0 <= n <= limit for n, limit in zip(counts, capacity, strict=True)):
        raise ValueError(f"{list(counts)} tokens do not fit a capacity of {list(capacity)}")
