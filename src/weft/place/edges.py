"""The legal steps between placements.

An edge is data: two placements, and the exchange that leads from one to the other. A transport carries it out; the
planner chooses it; a model never sees it. Adding an optimisation is adding an edge here, its exchange in
`weft.place.exchange` where that is new, and a kernel in a transport where a fused one pays.

| kind | from | to |
|---|---|---|
| slice | more rows | fewer rows; free |
| all_reduce | owes sum over G | owes nothing |
| reduce_scatterv | owes a sum that G divides | fewer rows; what is left of the sum |
| all_gatherv | fewer rows | more rows, same debt |
| all_reduce+all_gatherv | GROUP, owes sum over attn_tp | WORLD, complete: one kernel where attention is DP and TP |
| reduce_scatterv+all_reduce | WORLD, owes sum over world | GROUP, complete: its mirror |

Inside a mixture of experts, all_to_allv takes OWN rows to the ranks of their experts, and back (`weft.place.experts`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from weft.place import exchange
from weft.place.exchange import Exchange
from weft.place.spec import GROUP_NAMES, Mesh, Placement, PlacementError, Rows

SLICE = "slice"


class Load(NamedTuple):
    """What each rank of a permute sends to each other, whose sizes only the step itself knows.

    fixed_bytes: whatever rows it has; row_bytes: for each of its own rows, as is to be expected; most_row_bytes: of a
    row that it sends.
    """

    fixed_bytes: int
    row_bytes: float
    most_row_bytes: int


@dataclass(frozen=True, slots=True)
class Edge:
    """One step. exchange: None for a slice; group: the group that communicates, the world for mixed edges.

    load: of a permute, whose sizes do not follow from the placements' rows.
    """

    exchange: Exchange | None
    group: str | None
    src: Placement
    dst: Placement
    load: Load | None = None

    @property
    def kind(self) -> str:
        """The exchange's name, or `slice`."""
        return self.exchange.kind if self.exchange else SLICE

    @property
    def moves(self) -> bool:
        """Whether the step communicates."""
        return self.exchange is not None

    @property
    def sums(self) -> bool:
        """Whether terms are added, so that residual add and norm can follow in the same call."""
        return self.exchange is not None and self.exchange.combine == "sum"

    def sizes(self, mesh: Mesh, rank: int, counts: tuple[int, ...]) -> tuple[int, ...]:
        """Rows of each segment of the exchange, for `counts` tokens in each DP group."""
        assert self.exchange is not None
        rows = self.dst.rows if self.exchange.direction == "scatter" else self.src.rows
        firsts = mesh.peers(self.group, rank)[:: self.exchange.span]
        return tuple(mesh.row_count(rows, first, counts) for first in firsts)

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
    """Every legal edge of the mesh, by the placement it starts from."""
    # Which group joins the rows of one kind into the rows of the next: gathers walk it up, scatters walk it down.
    joins = [(Rows.OWN, Rows.GROUP, "attn_tp"), (Rows.GROUP, Rows.WORLD, "attn_dp"), (Rows.OWN, Rows.WORLD, "world")]
    # Hidden states owe no sum over dcp: its ranks hold the same heads' outputs over parts of the keys (weft.dcp.merge).
    debts = [None, *sorted({g for n in GROUP_NAMES if n != "dcp" and (g := mesh.canonical(n))})]
    found: dict[Placement, dict[Edge, None]] = {}

    def edge(step: Exchange | None, group: str | None, src: Placement | None, dst: Placement | None) -> None:
        if src and dst and src != dst:
            found.setdefault(src, {})[Edge(step, group, src, dst)] = None

    for owes in debts:
        if owes:
            for rows in Rows:
                sum_all = exchange.all_reduce(mesh.size(owes))
                edge(sum_all, owes, _placement(mesh, rows, owes), _placement(mesh, rows, None))
        for few, many, name in joins:
            less, more = _placement(mesh, few, owes), _placement(mesh, many, owes)
            edge(None, None, more, less)
            group = mesh.canonical(name)
            if group is None:
                continue
            edge(exchange.all_gatherv(mesh.size(group)), group, less, more)
            if owes:
                legal, rest = mesh.left_after(owes, group)
                if legal:
                    edge(exchange.reduce_scatterv(mesh.size(group)), group, more, _placement(mesh, few, rest))
    if mesh.attn_dp > 1 and mesh.attn_tp > 1:
        groups, ranks = mesh.attn_dp, mesh.attn_tp
        group_owing, world_owing = mesh.placement(Rows.GROUP, "attn_tp"), mesh.placement(Rows.WORLD, "world")
        edge(exchange.all_reduce_all_gatherv(groups, ranks), "world", group_owing, mesh.placement(Rows.WORLD))
        edge(exchange.reduce_scatterv_all_reduce(groups, ranks), "world", world_owing, mesh.placement(Rows.GROUP))
    return {src: tuple(edges) for src, edges in found.items()}


def rows_received(edge: Edge, mesh: Mesh, rank: int, counts: tuple[int, ...]) -> float:
    """Rows' worth of data that a rank must receive for an edge (`weft.place.exchange.rows_received`).

    OWN rows count as an even share of the group's, so that one edge never seems to move more than the two that it
    replaces.
    """
    if edge.exchange is None:
        return 0.0
    rows = edge.dst.rows if edge.exchange.direction == "scatter" else edge.src.rows
    group = mesh.peers(edge.group, rank)
    sizes: tuple[float, ...] = edge.sizes(mesh, rank, counts)
    if rows is Rows.OWN:
        sizes = tuple(counts[mesh.group_of(r)] / mesh.attn_tp for r in group[:: edge.exchange.span])
    return exchange.rows_received(edge.exchange, sizes, group.index(rank))


def bytes_received(edge: Edge, mesh: Mesh, rank: int, counts: tuple[int, ...], row_bytes: int) -> float:
    """Bytes that a rank must receive for an edge, or is to expect. row_bytes: of a row of the stream."""
    if edge.load is None:
        return rows_received(edge, mesh, rank, counts) * row_bytes
    others = [r for r in mesh.peers(edge.group, rank) if r != rank]
    rows = sum(counts[mesh.group_of(r)] for r in others) / mesh.attn_tp
    return len(others) * edge.load.fixed_bytes + rows * edge.load.row_bytes
