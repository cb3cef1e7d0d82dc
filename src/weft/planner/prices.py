"""Prices of a plan's steps, by the offers of transports and the local kernels of a rank.

All prices are for `tokens` tokens in each DP group: plans are made for buckets, in which all groups have equally many.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, lru_cache

from weft.planner.chain import Chain, Counts
from weft.planner.cost import Offer
from weft.planner.edges import Edge
from weft.planner.edges import rows_received as rows_of_edge
from weft.planner.exchange import rows_received
from weft.planner.plan_step import NORMED, Step
from weft.planner.row_formats import Wire
from weft.planner.settlements import Settled
from weft.planner.spec import Mesh, Placement, Rows


class StepPrices:
    """Bytes, times and transports of the steps of a chain's plans on a mesh.

    Local steps cost what the first offer says. slices_copy: a slice copies its rows, as in a CUDA graph, where the host
    does not know at which row it begins; otherwise it is a view, and free.
    """

    def __init__(self, mesh: Mesh, chain: Chain, offers: Sequence[Offer], slices_copy: bool):
        self.mesh, self.chain, self.offers, self.slices_copy = mesh, chain, tuple(offers), slices_copy
        self._home = {rows: mesh.placement(rows) for rows in mesh.row_kinds}
        self._priced = cache(self._price)
        self.bytes_received = lru_cache(1 << 16)(self._bytes_received)

    def _bytes_received(self, edge: Edge, counts: Counts) -> float:
        """Bytes that the busiest rank receives.

        A rank's bytes are linear in its own group's tokens, so the busiest is in the largest or the smallest group.
        """
        ranks = {self.mesh.leader(counts.index(n)) for n in (min(counts), max(counts))}
        return max(rows_of_edge(edge, self.mesh, r, counts) for r in ranks) * self._row_bytes(edge.src.wire)

    def received(self, op: Step | Settled, counts: Counts) -> int:
        """Bytes that the busiest rank receives for an op of a plan."""
        if isinstance(op, Settled):
            return op.received(counts)
        return 0 if op.edge is None else int(self.bytes_received(op.edge, counts))

    def _price(self, edge: Edge, tokens: int) -> tuple[float, str]:
        """(µs, transport) of the fastest; infinite where none has the capacity, or none was measured."""
        if not edge.moves:
            return (self._local_us(edge.dst, 2, tokens) if self.slices_copy else 0.0), "local"
        times = [(self._collective_us(o, edge, tokens), o.transport) for o in self._able(edge, tokens)]
        us, transport = min(times, default=(math.inf, "nobody"))
        return us + self._reorder_us(edge, tokens), transport

    def _price_finish(self, edge: Edge, tokens: int) -> tuple[float, str] | None:
        touched = 4 * self._max_bytes(edge.dst, tokens)  # reads delta and residual, writes residual and norm
        row = self._row_bytes()
        able = [
            o
            for o in self._able(edge, tokens)
            if edge.kind in o.epilogues and (o.max_normed_bytes is None or row <= o.max_normed_bytes)
        ]
        reorder_us = self._reorder_us(edge, tokens)
        times = [
            (self._collective_us(o, edge, tokens) + reorder_us + o.cost.epilogue_us(touched), o.transport) for o in able
        ]
        return min(times, default=None)

    def _collective_us(self, offer: Offer, edge: Edge, tokens: int) -> float:
        ranks, hosts = self.mesh.size(edge.group), self.mesh.hosts_of(edge.group)
        return offer.cost.collective_us(edge.kind, ranks, self._bytes_moved(edge, tokens), hosts)

    def _reorder_us(self, edge: Edge, tokens: int) -> float:
        """µs of a copy of the rows of all segments, where these are not in rank order."""
        if not edge.reorders(self.mesh):
            return 0.0
        return max(self._local_us(p, 2, tokens) for p in (edge.src, edge.dst))

    def _able(self, edge: Edge, tokens: int) -> list[Offer]:
        """The offers that have the edge, serve its group, and have the capacity."""
        ranks, hosts = self.mesh.size(edge.group), self.mesh.hosts_of(edge.group)
        needed = self._needed_bytes(edge, tokens)
        return [
            o
            for o in self.offers
            if edge.kind in o.kinds and o.serves(ranks, hosts) and (o.max_bytes is None or needed <= o.max_bytes)
        ]

    def _needed_bytes(self, edge: Edge, tokens: int) -> int:
        return max(self._max_bytes(p, tokens) for p in (edge.src, edge.dst))

    def _bytes_moved(self, edge: Edge, tokens: int) -> float:
        """Bytes that each rank receives; see `_bytes_received`."""
        assert edge.exchange is not None
        rows = self.mesh.extent(self.mesh.gathered(edge.segment_rows)) * tokens / self.mesh.attn_tp
        return rows_received(edge.exchange, [rows] * edge.exchange.segments, 0) * self._row_bytes(edge.src.wire)

    def _local_us(self, at: Placement, touches: int, tokens: int) -> float:
        return self.offers[0].cost.local_us(touches * self._max_bytes(at, tokens))

    def _max_bytes(self, at: Placement, tokens: int) -> int:
        return self._max_rows(at.rows, tokens) * self._row_bytes(at.wire)

    def _max_rows(self, rows: Rows, tokens: int) -> int:
        """Maximum of any rank: that of the first, as the first ranks of a DP group have one token more where the
        number of ranks does not divide the tokens."""
        gathered, groups = self.mesh.gathered(rows), self.mesh.gathered(self.mesh.rows(Rows.GROUP))
        whole = self.mesh.extent(gathered & ~groups)
        held = self.mesh.peers(self.mesh.named(gathered & groups), 0)
        return whole * sum(self.mesh.row_count(Rows.OWN, rank, (tokens,)) for rank in held)

    def _row_bytes(self, wire: Wire | None = None) -> int:
        return wire.row_bytes(self.chain.width) if wire else self.chain.width * self.chain.element_bytes

    def _move(self, operand: int | str, edge: Edge, tokens: int) -> Step:
        us, transport = self._priced(edge, tokens)
        return Step("move", operand, edge, us=us, transport=transport)

    def _add_us(self, rows: Rows, tokens: int) -> float:
        return self._local_us(self._home[rows], 3, tokens)

    def _norm(self, rows: Rows, tokens: int, added: bool) -> Step:
        """added: right after an addition to the residual, which one kernel then does with the norm."""
        at = self._home[rows]
        us = self._local_us(at, 2, tokens)
        if added:
            us = min(us, max(0.0, self._local_us(at, 4, tokens) - self._add_us(rows, tokens)))
        return Step("norm", rows=rows, us=us)

    def _format_bytes(self, rows: Rows, wire: Wire, tokens: int) -> int:
        return self._max_rows(rows, tokens) * sum(wire.format.parts(self.chain.width))

    def _quantise(self, rows: Rows, wire: Wire, tokens: int, with_norm: bool) -> Step:
        """with_norm: in the norm's kernel, which has read the rows."""
        cost, made = self.offers[0].cost, self._format_bytes(rows, wire, tokens)
        us = cost.epilogue_us(made) if with_norm else cost.local_us(self._max_bytes(self._home[rows], tokens) + made)
        return Step("quantise", NORMED, rows=rows, us=us, wire=wire)

    def _laid_out_us(self, rows: Rows, wire: Wire, tokens: int, kernels: int = 1) -> float:
        """µs of kernels that pack or unpack rows."""
        touched = self._format_bytes(rows, wire, tokens) + self._max_rows(rows, tokens) * self._row_bytes(wire)
        local_us = self.offers[0].cost.local_us
        return local_us(touched) + (kernels - 1) * local_us(0)

    def _pack(self, rows: Rows, wire: Wire, tokens: int, with_norm: bool) -> Step:
        us = self._quantise(rows, wire, tokens, with_norm).us + self._laid_out_us(rows, wire, tokens)
        return Step("pack", NORMED, rows=rows, us=us, wire=wire)
