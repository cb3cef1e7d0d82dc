"""The legal steps between placements.

An edge is data: two placements, and the exchange that leads from one to the other. A transport carries it out; the
planner chooses it; a model never sees it. Adding an optimisation is adding an edge here, its exchange in
`weft.planner.exchange` if that is new, and a kernel in a transport if a fused one pays.

With rows gathered over the axes R, a sum owed over D ⊆ R, and any groups S, A and B that may communicate:

| kind | from | to |
|---|---|---|
| slice | R, owes D | R − S, owes D, where S and D are disjoint; moves nothing |
| all_reduce over S ⊆ D | R, owes D | R, owes D − S |
| reduce_scatterv over S ⊆ D | R, owes D | R − S, owes D − S |
| all_gatherv over S | R, owes D | R + S, owes D, where S and R are disjoint |
| all_reduce+all_gatherv over A + B | R, owes A | R + B, complete: a sum inside each part, gathered over all |
| reduce_scatterv+all_reduce over A + B | R + B, owes A + B | R, complete: its mirror |

Fused edges sum over neighbours: every axis of A lies below every axis of B. On one host the table has all steps to
rows of groups with a name: OWN, GROUP and WORLD. Over several hosts R and S are any sets of axes, so that plans may
exchange inside a host first and across hosts then, or in the opposite order.

A complete value may be gathered in a format of its rows (`wire_edges`), since a gather sums nothing.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cache

from weft.planner import exchange
from weft.planner.exchange import Exchange
from weft.planner.row_formats import Wire
from weft.planner.spec import Mesh, Placement, PlacementError, Rows

SLICE = "slice"


@dataclass(frozen=True, slots=True)
class Edge:
    """One step. exchange: None for a slice. group: group that communicates; the world for mixed edges."""

    exchange: Exchange | None
    group: str | None
    src: Placement
    dst: Placement

    @property
    def kind(self) -> str:
        """Name of the exchange, or `slice`."""
        return self.exchange.kind if self.exchange else SLICE

    @property
    def moves(self) -> bool:
        """True if the step communicates."""
        return self.exchange is not None

    @property
    def segment_rows(self) -> Rows:
        """Rows of one segment of the exchange: a rank's input of a gather, its result of a scatter."""
        assert self.exchange is not None
        return self.dst.rows if self.exchange.direction == "scatter" else self.src.rows

    def segments(self, mesh: Mesh, rank: int) -> tuple[int, ...]:
        """Return one rank that holds each segment of the exchange."""
        assert self.exchange is not None
        return mesh.peers(self.group, rank)[:: self.exchange.span]

    def sizes(self, mesh: Mesh, rank: int, counts: tuple[int, ...]) -> tuple[int, ...]:
        """Return the rows of each segment of the exchange, for `counts` tokens in each DP group."""
        return tuple(mesh.row_count(self.segment_rows, first, counts) for first in self.segments(mesh, rank))

    def reorders(self, mesh: Mesh) -> bool:
        """Return True if the segments are not in rank order: a copy reorders rows after a gather, before a scatter."""
        if self.exchange is None or self.exchange.segments == 1:
            return False
        segment, joined = mesh.gathered(self.segment_rows), mesh.axes(self.group)
        if joined is None:
            return False
        joined &= ~segment
        return joined & -joined < segment  # the lowest joined axis lies below an axis of a segment

    def __str__(self) -> str:
        over = f" over {self.group}" if self.group else ""
        return f"{self.kind}{over}: {self.src} → {self.dst}"


def _placement(mesh: Mesh, rows: Rows, owes: str | None) -> Placement | None:
    try:
        return mesh.placement(rows, owes)
    except PlacementError:
        return None


@cache
def legal_edges(mesh: Mesh) -> dict[Placement, tuple[Edge, ...]]:
    """Return all legal edges of the mesh, by their source placement."""
    kinds = {mesh.gathered(rows): rows for rows in mesh.row_kinds}
    groups = {name: mesh.axes(name) for name in mesh.communicating}
    found: dict[Placement, dict[Edge, None]] = {}

    def edge(step: Exchange | None, group: str | None, src: Placement | None, dst: Placement | None) -> None:
        if src and dst and src != dst:
            found.setdefault(src, {})[Edge(step, group, src, dst)] = None

    for (gathered, rows), owes in itertools.product(kinds.items(), (None, *groups)):
        src = _placement(mesh, rows, owes)
        if src is None:
            continue
        for fewer, fewer_rows in kinds.items():
            if fewer & ~gathered == 0:
                edge(None, None, src, _placement(mesh, fewer_rows, owes))
        for group, axes in groups.items():
            ranks = mesh.size(group)
            if owes:
                legal, rest = mesh.left_after(owes, group)
                if legal and (rest is None or rest in groups):
                    edge(exchange.all_reduce(ranks), group, src, _placement(mesh, rows, rest))
                    if axes is not None and (fewer_kind := kinds.get(gathered & ~axes)) and not axes & ~gathered:
                        edge(exchange.reduce_scatterv(ranks), group, src, _placement(mesh, fewer_kind, rest))
            if axes is not None and not axes & gathered and (more_kind := kinds.get(gathered | axes)):
                edge(exchange.all_gatherv(ranks), group, src, _placement(mesh, more_kind, owes))
    of_axes = {name: axes for name, axes in groups.items() if axes is not None}
    for (inner, a), (outer, b) in itertools.product(of_axes.items(), of_axes.items()):
        both = mesh.named(a | b)
        if both not in groups or a >= (b & -b):
            continue
        parts, ranks = mesh.size(outer), mesh.size(inner)
        for gathered, rows in kinds.items():
            more_kind = kinds.get(gathered | b) if not gathered & b else None
            if more_kind is None:
                continue
            few, many = mesh.placement(rows), mesh.placement(more_kind)
            src, owing = _placement(mesh, rows, inner), _placement(mesh, more_kind, both)
            edge(exchange.all_reduce_all_gatherv(parts, ranks), both, src, many)
            edge(exchange.reduce_scatterv_all_reduce(parts, ranks), both, owing, few)
    return {src: tuple(edges) for src, edges in found.items()}


def wire_edges(mesh: Mesh, wire: Wire) -> dict[Placement, tuple[Edge, ...]]:
    """Return all gathers of complete rows in this format, by their source placement."""
    return {
        replace(src, wire=wire): tuple(
            replace(edge, src=replace(src, wire=wire), dst=replace(edge.dst, wire=wire))
            for edge in edges
            if edge.exchange is not None and edge.exchange.combine == "none"
        )
        for src, edges in legal_edges(mesh).items()
        if src.owes is None
    }


def rows_received(edge: Edge, mesh: Mesh, rank: int, counts: tuple[int, ...]) -> float:
    """Return the rows that a rank must receive for an edge (`weft.planner.exchange.rows_received`).

    A rank's rows count as an even share of its DP group's, so that one edge never seems to move more than the two that
    it replaces.
    """
    if edge.exchange is None:
        return 0.0
    rows, sizes = edge.segment_rows, tuple[float, ...]()
    if rows in (Rows.GROUP, Rows.WORLD):
        sizes = edge.sizes(mesh, rank, counts)
    else:
        shares = {first: mesh.peers(rows.over, first) for first in edge.segments(mesh, rank)}
        sizes = tuple(sum(counts[mesh.group_of(r)] for r in ranks) / mesh.attn_tp for ranks in shares.values())
    return exchange.rows_received(edge.exchange, sizes, mesh.peers(edge.group, rank).index(rank))
