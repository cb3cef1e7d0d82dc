"""The planner: the cheapest legal steps for every read of a model, found exactly.

A model is a `Chain`: its reads in order, each with the deltas added before it. To serve a read, the deltas' debts are
settled, the residual is brought up to date, normalised, and delivered on the rows that the block asked for. The norm
works on single rows, so it may run before the last gather. Between two reads only one thing is left to remember, which
rows of the residual a rank holds; so the cheapest plan is a shortest path: dynamic programming over the chain with the
residual's rows as the state. `weft.place.search` finds what each read costs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Literal

from weft.place.cost import Offer
from weft.place.edges import Edge, bytes_received, legal_edges
from weft.place.experts import COUNTS, PACK_KERNELS, RETURN, SEND, Dispatch
from weft.place.search import Graph, Sums
from weft.place.spec import LayoutError, Mesh, Placement, PlacementError, Rows
from weft.place.step import NORMED, Step

Choice = Literal["cheapest", "naive"]
Counts = tuple[int, ...]
"""Tokens of each DP group."""


@dataclass(frozen=True, slots=True)
class Read:
    """One read of the stream. site: the norm's name; target: what the block asked for; deltas: what was added since.

    dispatch: what the block sends to experts on other ranks, of OWN rows. run: its products in FP8 take rows quantised
    by runs of so many columns; 0: it has none.
    """

    site: str
    target: Placement
    deltas: tuple[Placement, ...]
    dispatch: Dispatch | None = None
    run: int = 0


@dataclass(frozen=True, slots=True)
class Chain:
    """A traced model. width: elements a row; element_bytes: of the activations.

    others: the same reads once more, as far as blocks take rows in other forms, in which they leave other deltas too.
    What a read's deltas are follows from the form in which the read before it was served.
    """

    reads: tuple[Read, ...]
    width: int
    element_bytes: int
    others: tuple[tuple[Read, ...], ...] = ()

    @property
    def forms(self) -> tuple[tuple[Read, ...], ...]:
        """Every form of the reads."""
        return (self.reads, *self.others)


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """The steps of one read; residual: the rows of the residual that stay after it.

    inside: what the block that reads does beyond its own work, to reach experts on other ranks.
    """

    read: Read
    steps: tuple[Step, ...]
    residual: Rows
    us: float
    inside: tuple[Step, ...] = ()

    def moves(self) -> Iterator[tuple[Read, Step, Edge]]:
        """Its communicating steps, in order."""
        for step in (*self.steps, *self.inside):
            if step.edge is not None and step.edge.moves:
                yield self.read, step, step.edge


@dataclass(frozen=True, slots=True)
class Plan:
    """A read plan for each read of the chain, made for `counts` tokens in each DP group."""

    mesh: Mesh
    chain: Chain
    counts: Counts
    reads: tuple[ReadPlan, ...]
    us: float = field(default=0.0)

    def moves(self) -> Iterator[tuple[Read, Step, Edge]]:
        """The plan's communicating steps, in order."""
        for read_plan in self.reads:
            yield from read_plan.moves()


def bucket(counts: Counts) -> Counts:
    """The counts that a plan is made for: every group as full as the fullest, rounded up to a power of two.

    Every rank knows every count, so every rank comes to the same bucket.
    """
    most = max(counts)
    return (1 << max(most - 1, 0).bit_length(),) * len(counts)


class Planner:
    """Plans a chain on a mesh with the edges that transports offer; each edge goes to the cheapest that has it.

    Slices need no offer; local steps cost what the first offer says. Plans are cached by `bucket`. choice: naive makes
    the naive plan the one to follow, for whoever compares the two. slices_copy: a slice copies its rows, as in a CUDA
    graph, where the host does not know at which row it begins; otherwise it is a view, and free. Raises PlacementError,
    naming the block, where no legal steps lead to what a block asks for; LayoutError where a step's tensors are larger
    than any transport carries.
    """

    def __init__(
        self, mesh: Mesh, chain: Chain, offers: Sequence[Offer], choice: Choice = "cheapest", slices_copy: bool = False
    ):
        self.mesh, self.chain, self.offers, self.choice = mesh, chain, tuple(offers), choice
        self._slices_copy = slices_copy
        kinds = frozenset().union(*(o.kinds for o in offers))
        self._home = {rows: mesh.placement(rows) for rows in Rows}
        every = [*self._home.values(), *(d for reads in chain.forms for read in reads for d in read.deltas)]
        every += [p for edges in legal_edges(mesh).values() for edge in edges for p in (edge.src, edge.dst)]
        self._placements = tuple(dict.fromkeys(every))
        self._edges = [
            [e for e in legal_edges(mesh).get(at, ()) if not e.moves or e.kind in kinds] for at in self._placements
        ]
        self._plan, self._naive = cache(self._make), cache(self._make_naive)
        self._graph, self._sums, self._served = cache(self._make_graph), cache(self._find_sums), cache(self._serve)
        self._inside = cache(self._dispatch_steps)
        self.bytes_received = lru_cache(1 << 16)(self._bytes_received)

    def plan(self, counts: Counts) -> Plan:
        """The plan to follow for the bucket of these counts: the cheapest, unless the naive one was chosen."""
        if self.choice == "cheapest":
            return self._plan(bucket(counts))
        plan = self.naive(counts)
        if plan.us == math.inf:
            self._refuse(plan)
        return plan

    def naive(self, counts: Counts) -> Plan:
        """What engines do by default: all-reduce every debt, slice to the group, add, norm, gather what is asked.

        Only for comparison, so it never fails: an edge that no transport offers takes for ever, by `nobody`.
        """
        return self._naive(bucket(counts))

    def _make_naive(self, counts: Counts) -> Plan:
        home, reads = self._home[Rows.GROUP], []
        for index, read in enumerate(self.chain.reads):
            steps: list[Step] = []
            for i, delta in enumerate(read.deltas):
                steps += self._route(i, delta, home, counts)
            for i in range(len(read.deltas)):
                us = self._add_us(home.rows, counts) if index or i else 0.0
                steps.append(Step("absorb", 0, rows=home.rows, us=us))
            added = len(read.deltas) > (0 if index else 1)
            steps += [self._norm(home.rows, counts, added), *self._route(NORMED, home, read.target, counts)]
            inside = self._inside(read.dispatch, counts)
            us = sum(s.us for s in (*steps, *inside))
            reads.append(ReadPlan(read, tuple(steps), home.rows, us, inside))
        return Plan(self.mesh, self.chain, counts, tuple(reads), sum(r.us for r in reads))

    def _route(self, operand: int | str, src: Placement, dst: Placement, counts: Counts) -> list[Step]:
        """All-reduce the debt whole, then slice or gather."""
        steps: list[Step] = []
        while src != dst:
            wanted = self._home[src.rows] if src.owes else dst
            edge = next(e for e in legal_edges(self.mesh)[src] if e.dst == wanted)
            steps.append(self._move(operand, edge, counts))
            src = wanted
        return steps

    def _bytes_received(self, edge: Edge, counts: Counts) -> float:
        """Bytes that the busiest rank receives.

        What a rank receives is linear in its own group's tokens, so it is a rank of the fullest or the emptiest group.
        """
        ranks = {self.mesh.leader(counts.index(n)) for n in (min(counts), max(counts))}
        return max(bytes_received(edge, self.mesh, r, counts, self._row_bytes) for r in ranks)

    # --- costs ------------------------------------------------------------------------------------------------

    def _price(self, edge: Edge, counts: Counts) -> tuple[float, str]:
        """µs, and the transport that takes so long; infinite where none has room."""
        if not edge.moves:
            return (self._local_us(edge.dst.rows, 2, counts) if self._slices_copy else 0.0), "local"
        size, moved = self.mesh.size(edge.group), self.bytes_received(edge, counts)
        times = []
        for offer in self._able(edge, counts):
            try:
                times.append((offer.cost.collective_us(edge.kind, size, moved), offer.transport))
            except LayoutError:  # not measured: only a dispatch need not have been
                if edge.load is None:
                    raise
        return min(times, default=(math.inf, "nobody"))

    def _price_finish(self, edge: Edge, counts: Counts) -> tuple[float, str] | None:
        size, moved = self.mesh.size(edge.group), self.bytes_received(edge, counts)
        touched = 4 * self._most_bytes(edge.dst.rows, counts)  # reads delta and residual, writes residual and norm
        row = self._row_bytes
        able = [
            o
            for o in self._able(edge, counts)
            if edge.kind in o.epilogues and (o.max_normed_bytes is None or row <= o.max_normed_bytes)
        ]
        times = [
            (o.cost.collective_us(edge.kind, size, moved) + o.cost.epilogue_us(touched), o.transport) for o in able
        ]
        return min(times, default=None)

    def _able(self, edge: Edge, counts: Counts) -> list[Offer]:
        """Who carries the edge out: has it, and room for it."""
        needed = self._needed_bytes(edge, counts)
        return [o for o in self.offers if edge.kind in o.kinds and (o.max_bytes is None or needed <= o.max_bytes)]

    def _needed_bytes(self, edge: Edge, counts: Counts) -> int:
        if edge.load is not None:  # every row may go to every rank, and all rows to one
            most = max(self.mesh.row_count(Rows.OWN, r, counts) for r in range(self.mesh.world))
            return most * self.mesh.world * edge.load.most_row_bytes
        return max(self._most_bytes(p.rows, counts) for p in (edge.src, edge.dst))

    def _local_us(self, rows: Rows, touches: int, counts: Counts) -> float:
        return self.offers[0].cost.local_us(touches * self._most_bytes(rows, counts))

    def _most_bytes(self, rows: Rows, counts: Counts) -> int:
        most = max(self.mesh.row_count(rows, r, counts) for r in range(self.mesh.world))
        return most * self._row_bytes

    @property
    def _row_bytes(self) -> int:
        return self.chain.width * self.chain.element_bytes

    def _move(self, operand: int | str, edge: Edge, counts: Counts) -> Step:
        us, transport = self._price(edge, counts)
        return Step("move", operand, edge, us=us, transport=transport)

    def _add_us(self, rows: Rows, counts: Counts) -> float:
        return self._local_us(rows, 3, counts)

    def _norm(self, rows: Rows, counts: Counts, added: bool) -> Step:
        """added: right after an addition to the residual, which one kernel then does together with the norm."""
        us = self._local_us(rows, 2, counts)
        if added:
            us = min(us, max(0.0, self._local_us(rows, 4, counts) - self._add_us(rows, counts)))
        return Step("norm", rows=rows, us=us)

    def _dispatch_steps(self, dispatch: Dispatch | None, counts: Counts) -> tuple[Step, ...]:
        """What a block does beside its own work to send rows to experts and get them back."""
        if dispatch is None or self.mesh.world == 1:
            return ()
        own = self._home[Rows.OWN].rows
        given = self._most_bytes(own, counts)
        sent = self.mesh.world * dispatch.share(self.mesh) * given
        local_us = self.offers[0].cost.local_us
        moved_us, launch_us = local_us(given + sent), local_us(0)  # packing reads rows and writes them, adding reverses
        steps = {}
        for name, edge in dispatch.edges(self.mesh, self._row_bytes).items():
            us, transport = self._price(edge, counts)
            steps[name] = Step("exchange", name, edge, us=us, transport=transport)
        pack = Step("pack", rows=own, us=moved_us + PACK_KERNELS * launch_us)
        unpack = Step("unpack", rows=own, us=moved_us + self.mesh.world * launch_us)  # a kernel for each rank's
        return steps[COUNTS], pack, steps[SEND], steps[RETURN], unpack

    # --- search -----------------------------------------------------------------------------------------------

    def _make_graph(self, counts: Counts) -> Graph:
        number = {at: i for i, at in enumerate(self._placements)}
        moves = [[(number[e.dst], self._move(0, e, counts)) for e in edges] for edges in self._edges]
        finishes: list[list[tuple[int, Step]]] = [[] for _ in moves]
        for found, edges in zip(finishes, self._edges, strict=True):
            for edge in edges:
                if edge.dst.owes is None and (best := self._price_finish(edge, counts)):
                    step = Step("finish", 0, edge, rows=edge.dst.rows, us=best[0], transport=best[1])
                    found.append((number[edge.dst], step))
        adds = [(at.rows, self._add_us(at.rows, counts)) for at in self._placements]
        merge, absorb = (tuple(Step(op, 0, rows=rows, us=us) for rows, us in adds) for op in ("merge", "absorb"))
        norm, added = (tuple(self._norm(at.rows, counts, a) for at in self._placements) for a in (False, True))
        return Graph(
            self._placements, tuple(map(tuple, moves)), tuple(map(tuple, finishes)), merge, absorb, norm, added
        )

    def _find_sums(self, deltas: tuple[Placement, ...], counts: Counts) -> Sums:
        return Sums([self._placements.index(delta) for delta in deltas], self._graph(counts))

    def _serve(
        self, residual: Rows | None, deltas: tuple[Placement, ...], target: Placement, counts: Counts
    ) -> dict[Rows, tuple[float, tuple[Step, ...]]]:
        """Cheapest way to serve a read, for each rows of the residual that may remain."""
        sums, wanted = self._sums(deltas, counts), self._placements.index(target)
        before = None if residual is None else self._placements.index(self._home[residual])
        ways = {self._placements[at].rows: found.get(wanted) for at, found in sums.serve(before).items()}
        return {rows: (way.us, sums.steps(way)) for rows, way in ways.items() if way}

    def _make(self, counts: Counts) -> Plan:
        # What is left to remember: the residual's rows, and in which form the last read was served.
        best: dict[tuple[Rows | None, int], tuple[float, tuple[ReadPlan, ...]]] = {(None, 0): (0.0, ())}
        for index, forms in enumerate(zip(*self.chain.forms, strict=True)):
            reached: dict[tuple[Rows | None, int], tuple[float, tuple[ReadPlan, ...]]] = {}
            for (residual, before), (us, plans) in best.items():
                for form in self._different(index):
                    read = replace(forms[form], deltas=forms[before].deltas)
                    inside = self._inside(read.dispatch, counts)
                    options = self._served(residual, read.deltas, read.target, counts)
                    for rows, (more_us, steps) in options.items():
                        more_us += sum(step.us for step in inside)
                        if (rows, form) not in reached or us + more_us < reached[rows, form][0]:
                            read_plan = ReadPlan(read, steps, rows, more_us, inside)
                            reached[rows, form] = (us + more_us, (*plans, read_plan))
            if not reached:
                read = forms[0]
                added = ", ".join(map(str, read.deltas)) or "nothing"
                raise PlacementError(f"{read.site}: no legal steps lead from what was added, {added}, to {read.target}")
            best = reached
        us, plans = min(best.values(), key=lambda b: b[0])
        plan = Plan(self.mesh, self.chain, counts, plans, us)
        if us == math.inf:
            self._refuse(plan)
        return plan

    def _different(self, index: int) -> list[int]:
        """The forms of a read, those that are equal once: in what is read, exchanged inside, and added next."""
        found: dict[object, int] = {}
        for form, reads in enumerate(self.chain.forms):
            after = reads[index + 1].deltas if index + 1 < len(reads) else ()
            found.setdefault((reads[index].target, reads[index].dispatch, after), form)
        return list(found.values())

    def _refuse(self, plan: Plan) -> None:
        lacking = [edge for _, step, edge in plan.moves() if step.us == math.inf]
        most = max(lacking, key=lambda edge: self._needed_bytes(edge, plan.counts))
        needed = self._needed_bytes(most, plan.counts)
        having = [o for o in self.offers if most.kind in o.kinds]
        names = ", ".join(o.transport for o in having or self.offers)
        if not having:
            what = "the naive plan takes" if most.load is None else "experts by dispatch take"
            instead = "plan at cheapest" if most.load is None else "experts at auto"
            raise LayoutError(f"{what} {most.kind}, which {names} has not; leave {instead}")
        if all(o.max_bytes is None or needed <= o.max_bytes for o in having):
            raise LayoutError(f"{most.kind} on {names} was not measured: run weft tune, or leave experts at auto")
        room = ", ".join(f"{o.transport} has max_bytes={o.max_bytes}" for o in having)
        raise LayoutError(
            f"steps of {max(plan.counts)} tokens a group exchange tensors of {needed} bytes, but {room}: "
            f"give it max_bytes={needed}, or plan for fewer tokens"
        )
