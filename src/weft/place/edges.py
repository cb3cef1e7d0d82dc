"""The legal steps between placements, and the bytes that each moves.

An edge is data. A transport carries it out; the planner chooses it; a model never sees it. Adding an optimisation is
adding an edge here, its cost below, and a kernel in a transport.

| kind | from | to |
|---|---|---|
| slice | more rows | fewer rows; free |
| all_reduce | owes sum over G | owes nothing |
| reduce_scatterv | owes a sum that G divides | fewer rows; what is left of the sum |
| all_gatherv | fewer rows | more rows, same debt |
| all_reduce+all_gatherv | GROUP, owes sum over attn_tp | WORLD, complete: one kernel where attention is DP and TP |
| reduce_scatterv+all_reduce | WORLD, owes sum over world | GROUP, complete: its mirror |
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from weft.place.spec import GROUP_NAMES, Mesh, Placement, PlacementError, Rows

SLICE = "slice"
ALL_REDUCE = "all_reduce"
REDUCE_SCATTERV = "reduce_scatterv"
ALL_GATHERV = "all_gatherv"
ALL_REDUCE_ALL_GATHERV = "all_reduce+all_gatherv"
REDUCE_SCATTERV_ALL_REDUCE = "reduce_scatterv+all_reduce"
COLLECTIVES = (
    ALL_REDUCE,
    REDUCE_SCATTERV,
    ALL_GATHERV,
    ALL_REDUCE_ALL_GATHERV,
    REDUCE_SCATTERV_ALL_REDUCE,
)
REDUCTIONS = tuple(kind for kind in COLLECTIVES if kind != ALL_GATHERV)
"""Those that sum, and so may go on to residual add and norm where their result is complete."""


@dataclass(frozen=True, slots=True)
class Edge:
    """One step. `group` is the group that communicates (None for a slice); mixed edges span the world."""

    kind: str
    group: str | None
    src: Placement
    dst: Placement

    @property
    def moves(self) -> bool:
        """Whether the step communicates."""
        return self.kind != SLICE

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
    debts = [None, *sorted({g for n in GROUP_NAMES if (g := mesh.canonical(n))})]
    found: dict[Placement, dict[Edge, None]] = {}

    def edge(kind: str, group: str | None, src: Placement | None, dst: Placement | None) -> None:
        if src and dst and src != dst:
            found.setdefault(src, {})[Edge(kind, group, src, dst)] = None

    for owes in debts:
        if owes:
            for rows in Rows:
                edge(ALL_REDUCE, owes, _placement(mesh, rows, owes), _placement(mesh, rows, None))
        for few, many, name in joins:
            less, more = _placement(mesh, few, owes), _placement(mesh, many, owes)
            edge(SLICE, None, more, less)
            group = mesh.canonical(name)
            if group is None:
                continue
            edge(ALL_GATHERV, group, less, more)
            if owes:
                legal, rest = mesh.left_after(owes, group)
                if legal:
                    edge(REDUCE_SCATTERV, group, more, _placement(mesh, few, rest))
    if mesh.attn_dp > 1 and mesh.attn_tp > 1:
        group_owing = mesh.placement(Rows.GROUP, "attn_tp")
        world_owing = mesh.placement(Rows.WORLD, "world")
        edge(ALL_REDUCE_ALL_GATHERV, "world", group_owing, mesh.placement(Rows.WORLD))
        edge(REDUCE_SCATTERV_ALL_REDUCE, "world", world_owing, mesh.placement(Rows.GROUP))
    return {src: tuple(edges) for src, edges in found.items()}


def rows_received(edge: Edge, mesh: Mesh, rank: int, counts: tuple[int, ...]) -> float:
    """Rows' worth of data that a rank must receive for an edge (bandwidth-optimal algorithm).

    An all_reduce of n rows over g ranks receives 2n(g-1)/g: each rank reduces 1/g of the rows and hands its part out
    (Thakur et al., doi:10.1177/1094342005051521). OWN rows count as an even share of the group's, so that one edge
    never seems to move more than the two that it replaces.
    """
    if edge.kind == SLICE:
        return 0.0
    g, tp = mesh.size(edge.group), mesh.attn_tp
    own = counts[mesh.group_of(rank)] / tp

    def held(rows: Rows) -> float:
        return own if rows is Rows.OWN else mesh.row_count(rows, rank, counts)

    have, get = held(edge.src.rows), held(edge.dst.rows)
    if edge.kind == ALL_REDUCE:
        return 2 * have * (g - 1) / g
    if edge.kind == REDUCE_SCATTERV:
        return get * (g - 1)
    if edge.kind == ALL_GATHERV:
        return get - have
    if edge.kind == ALL_REDUCE_ALL_GATHERV:
        return own * (tp - 1) + get - own
    return own * (g - 1) + get - own
