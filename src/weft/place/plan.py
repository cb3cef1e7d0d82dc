"""The planner: the cheapest legal steps for every read of a model, found exactly.

A model is a `Chain`: its reads in order, each with the deltas added before it. To serve a read, the deltas' debts are
settled, the residual is brought up to date, normalised, and delivered on the rows that the block asked for. The norm
works on single rows, so it may run before the last gather. Between two reads only one thing is left to remember, which
rows of the residual a rank holds; so the cheapest plan is a shortest path: dynamic programming over the chain with the
residual's rows as the state. `weft.place.search` finds what each read costs.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Literal

from weft.place.chain import Chain, Counts, Read, bucket
from weft.place.cost import Offer
from weft.place.edges import Edge, legal_edges
from weft.place.edges import rows_received as rows_of_edge
from weft.place.exchange import rows_received
from weft.place.search import Graph, Sums
from weft.place.settle import Settled, Settlement, Settlements
from weft.place.spec import LayoutError, Mesh, Placement, PlacementError, Rows
from weft.place.step import NORMED, Step

Choice = Literal["cheapest", "naive"]


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """The steps of one read; residual: the rows of the residual that stay after it.

    settled: how each of the read's settlements goes. us: of the steps, and of the settlements that every step takes.
    """

    read: Read
    steps: tuple[Step, ...]
    residual: Rows
    us: float
    settled: tuple[Settled, ...] = ()

    def moves(self) -> Iterator[tuple[Read, Step, Edge]]:
        """Its communicating steps, in order."""
        for step in self.steps:
            if step.edge is not None and step.edge.moves:
                yield self.read, step, step.edge

    def settlements(self) -> Iterator[tuple[Settlement, Settled]]:
        """What is settled after it and before the next, in order."""
        return zip(self.read.settles, self.settled, strict=True)


Op = tuple[str, Step | Settled]
"""A communicating step of a plan: the site of the read that it serves or follows, and what is done."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A step's plan, made for `counts` tokens in each DP group: a read plan for each read of the chain."""

    mesh: Mesh
    chain: Chain
    counts: Counts
    reads: tuple[ReadPlan, ...]
    us: float = field(default=0.0)

    def moves(self) -> Iterator[tuple[Read, Step, Edge]]:
        """The communicating steps of the stream, in order."""
        for read_plan in self.reads:
            yield from read_plan.moves()

    def ops(self, asked: bool = True) -> Iterator[Op]:
        """All that ranks exchange, in the order of a step. asked: what steps only do where a row asks for it too."""
        for read_plan in self.reads:
            site = read_plan.read.site
            yield from ((site, step) for _, step, _ in read_plan.moves())
            for settlement, settled in read_plan.settlements():
                if asked or not settlement.asked:
                    yield from ((site, op) for op in settled.ops())

    def checksum(self) -> int:
        """CRC-32 of the ops: ranks that disagree on one run different collectives."""
        return zlib.crc32("|".join(f"{site} {op}" for site, op in self.ops()).encode())


class Planner:
    """Plans a chain on a mesh with the edges that transports offer; each edge goes to the cheapest that has it.

    Slices need no offer; local steps cost what the first offer says. Plans are cached by `bucket`. choice: naive makes
    the naive plan the one to follow, for whoever compares the two. slices_copy: a slice copies its rows, as in a CUDA
    graph, where the host does not know at which row it begins; otherwise it is a view, and free. settlements: the plans
    of what blocks settle; left out, the cheapest by the same offers. Raises PlacementError, naming the block, where no
    legal steps lead to what a block asks for; LayoutError where a step's tensors are larger
    than any transport carries.
    """

    def __init__(
        self,
        mesh: Mesh,
        chain: Chain,
        offers: Sequence[Offer],
        choice: Choice = "cheapest",
        slices_copy: bool = False,
        settlements: Settlements | None = None,
    ):
        self.mesh, self.chain, self.offers, self.choice = mesh, chain, tuple(offers), choice
        self._slices_copy = slices_copy
        self.settlements = settlements or Settlements(mesh, offers, captured=slices_copy)
        kinds = frozenset().union(*(o.kinds for o in offers))
        self._home = {rows: mesh.placement(rows) for rows in mesh.row_kinds}
        every = [*self._home.values(), *(d for reads in chain.forms for read in reads for d in read.deltas)]
        every += [p for edges in legal_edges(mesh).values() for edge in edges for p in (edge.src, edge.dst)]
        self._placements = tuple(dict.fromkeys(every))
        self._edges = [
            [e for e in legal_edges(mesh).get(at, ()) if not e.moves or e.kind in kinds] for at in self._placements
        ]
        self._plan, self._naive = cache(self._make), cache(self._make_naive)
        self._graph, self._sums, self._served = cache(self._make_graph), cache(self._find_sums), cache(self._serve)
        self._settled, self._priced = cache(self._settle), cache(self._price)
        self.bytes_received = lru_cache(1 << 16)(self._bytes_received)

    def plan(self, counts: Counts) -> Plan:
        """The plan to follow for the bucket of these counts: the cheapest, unless the naive one was chosen."""
        if self.choice == "cheapest":
            return self._plan(max(bucket(counts)))
        plan = self.naive(counts)
        if plan.us == math.inf:
            self._refuse(plan)
        return plan

    def naive(self, counts: Counts) -> Plan:
        """What engines do by default: all-reduce every debt, slice to the group, add, norm, gather what is asked.

        Only for comparison, so it never fails: an edge that no transport offers takes infinitely long, by `nobody`.
        """
        return self._naive(max(bucket(counts)))

    def _make_naive(self, tokens: int) -> Plan:
        home, reads = self.mesh.placement(Rows.GROUP), []
        for index, read in enumerate(self.chain.reads):
            steps: list[Step] = []
            for i, delta in enumerate(read.deltas):
                steps += self._route(i, delta, home, tokens)
            for i in range(len(read.deltas)):
                us = self._add_us(home.rows, tokens) if index or i else 0.0
                steps.append(Step("absorb", 0, rows=home.rows, us=us))
            added = len(read.deltas) > (0 if index else 1)
            steps += [self._norm(home.rows, tokens, added), *self._route(NORMED, home, read.target, tokens)]
            us, settled = self._settled(read.settles, tokens)
            reads.append(ReadPlan(read, tuple(steps), home.rows, us + sum(s.us for s in steps), settled))
        return self._whole(tokens, tuple(reads), sum(r.us for r in reads))

    def _whole(self, tokens: int, reads: tuple[ReadPlan, ...], us: float) -> Plan:
        for read in reads:
            for settlement in read.read.settles[len(read.settled) :]:
                self.settlements.plan(*settlement.of(tokens))  # says what is missing
        return Plan(self.mesh, self.chain, (tokens,) * self.mesh.attn_dp, reads, us)

    def _settle(self, settles: tuple[Settlement, ...], tokens: int) -> tuple[float, tuple[Settled, ...]]:
        """How values are settled, up to one that nothing offers, and the time that every step takes for them."""
        settled, us = [], 0.0
        for settlement in settles:
            plan = self.settlements.planned(*settlement.of(tokens))
            if plan is None:
                us = math.inf
                break
            settled.append(plan)
            us += 0.0 if settlement.asked or plan.us == math.inf else plan.us
        return us, tuple(settled)

    def _route(self, operand: int | str, src: Placement, dst: Placement, tokens: int) -> list[Step]:
        """All-reduce the debt whole, then slice or gather."""
        steps: list[Step] = []
        while src != dst:
            wanted = self.mesh.placement(src.rows) if src.owes else dst
            edge = next(e for e in legal_edges(self.mesh)[src] if e.dst == wanted)
            steps.append(self._move(operand, edge, tokens))
            src = wanted
        return steps

    def _bytes_received(self, edge: Edge, counts: Counts) -> float:
        """Bytes that the busiest rank receives.

        What a rank receives is linear in its own group's tokens, so it is a rank of the fullest or the emptiest group.
        """
        ranks = {self.mesh.leader(counts.index(n)) for n in (min(counts), max(counts))}
        return max(rows_of_edge(edge, self.mesh, r, counts) for r in ranks) * self._row_bytes

    def received(self, op: Step | Settled, counts: Counts) -> int:
        """Bytes that the busiest rank receives for an op of a plan."""
        if isinstance(op, Settled):
            return op.received(counts)
        return 0 if op.edge is None else int(self.bytes_received(op.edge, counts))

    # --- costs ------------------------------------------------------------------------------------------------
    # All for `tokens` tokens in each DP group: plans are made for buckets, in which all groups have as many.

    def _price(self, edge: Edge, tokens: int) -> tuple[float, str]:
        """µs, and the transport that takes so long; infinite where none has room, or none was measured."""
        if not edge.moves:
            return (self._local_us(edge.dst.rows, 2, tokens) if self._slices_copy else 0.0), "local"
        times = [(self._collective_us(o, edge, tokens), o.transport) for o in self._able(edge, tokens)]
        us, transport = min(times, default=(math.inf, "nobody"))
        return us + self._reorder_us(edge, tokens), transport

    def _price_finish(self, edge: Edge, tokens: int) -> tuple[float, str] | None:
        touched = 4 * self._most_bytes(edge.dst.rows, tokens)  # reads delta and residual, writes residual and norm
        row = self._row_bytes
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
        """Of a copy of the rows of all segments, where these are not in rank order."""
        if not edge.reorders(self.mesh):
            return 0.0
        return max(self._local_us(p.rows, 2, tokens) for p in (edge.src, edge.dst))

    def _able(self, edge: Edge, tokens: int) -> list[Offer]:
        """Who carries the edge out: has it, serves the group, and has room for it."""
        ranks, hosts = self.mesh.size(edge.group), self.mesh.hosts_of(edge.group)
        needed = self._needed_bytes(edge, tokens)
        return [
            o
            for o in self.offers
            if edge.kind in o.kinds and o.serves(ranks, hosts) and (o.max_bytes is None or needed <= o.max_bytes)
        ]

    def _needed_bytes(self, edge: Edge, tokens: int) -> int:
        return max(self._most_bytes(p.rows, tokens) for p in (edge.src, edge.dst))

    def _bytes_moved(self, edge: Edge, tokens: int) -> float:
        """Bytes that each rank receives, as `bytes_received` has it."""
        assert edge.exchange is not None
        rows = self.mesh.extent(self.mesh.gathered(edge.segment_rows)) * tokens / self.mesh.attn_tp
        return rows_received(edge.exchange, [rows] * edge.exchange.segments, 0) * self._row_bytes

    def _local_us(self, rows: Rows, touches: int, tokens: int) -> float:
        return self.offers[0].cost.local_us(touches * self._most_bytes(rows, tokens))

    def _most_bytes(self, rows: Rows, tokens: int) -> int:
        return self._most_rows(rows, tokens) * self._row_bytes

    def _most_rows(self, rows: Rows, tokens: int) -> int:
        """Of any rank: of the first, as the first ranks of a DP group have a token more where they do not divide."""
        gathered, groups = self.mesh.gathered(rows), self.mesh.gathered(self.mesh.rows(Rows.GROUP))
        whole = self.mesh.extent(gathered & ~groups)
        held = self.mesh.peers(self.mesh.named(gathered & groups), 0)
        return whole * sum(self.mesh.row_count(Rows.OWN, rank, (tokens,)) for rank in held)

    @property
    def _row_bytes(self) -> int:
        return self.chain.width * self.chain.element_bytes

    def _move(self, operand: int | str, edge: Edge, tokens: int) -> Step:
        us, transport = self._priced(edge, tokens)
        return Step("move", operand, edge, us=us, transport=transport)

    def _add_us(self, rows: Rows, tokens: int) -> float:
        return self._local_us(rows, 3, tokens)

    def _norm(self, rows: Rows, tokens: int, added: bool) -> Step:
        """added: right after an addition to the residual, which one kernel then does together with the norm."""
        us = self._local_us(rows, 2, tokens)
        if added:
            us = min(us, max(0.0, self._local_us(rows, 4, tokens) - self._add_us(rows, tokens)))
        return Step("norm", rows=rows, us=us)

    # --- search -----------------------------------------------------------------------------------------------

    def _make_graph(self, tokens: int) -> Graph:
        number = {at: i for i, at in enumerate(self._placements)}
        moves = [[(number[e.dst], self._move(0, e, tokens)) for e in edges] for edges in self._edges]
        finishes: list[list[tuple[int, Step]]] = [[] for _ in moves]
        for found, edges in zip(finishes, self._edges, strict=True):
            for edge in edges:
                if edge.dst.owes is None and (best := self._price_finish(edge, tokens)):
                    step = Step("finish", 0, edge, rows=edge.dst.rows, us=best[0], transport=best[1])
                    found.append((number[edge.dst], step))
        adds = [(at.rows, self._add_us(at.rows, tokens)) for at in self._placements]
        merge, absorb = (tuple(Step(op, 0, rows=rows, us=us) for rows, us in adds) for op in ("merge", "absorb"))
        norm, added = (tuple(self._norm(at.rows, tokens, a) for at in self._placements) for a in (False, True))
        return Graph(
            self._placements, tuple(map(tuple, moves)), tuple(map(tuple, finishes)), merge, absorb, norm, added
        )

    def _find_sums(self, deltas: tuple[Placement, ...], tokens: int) -> Sums:
        return Sums([self._placements.index(delta) for delta in deltas], self._graph(tokens))

    def _serve(
        self, residual: Rows | None, deltas: tuple[Placement, ...], target: Placement, tokens: int
    ) -> dict[Rows, tuple[float, tuple[Step, ...]]]:
        """Cheapest way to serve a read, for each rows of the residual that may remain."""
        sums, wanted = self._sums(deltas, tokens), self._placements.index(target)
        before = None if residual is None else self._placements.index(self._home[residual])
        found = sums.serve(before, wanted)
        return {self._placements[at].rows: (way.us, sums.steps(way)) for at, way in found.items()}

    def _make(self, tokens: int) -> Plan:
        # What is left to remember: the residual's rows, and in which form the last read was served.
        best: dict[tuple[Rows | None, int], tuple[float, tuple[ReadPlan, ...]]] = {(None, 0): (0.0, ())}
        for index, forms in enumerate(zip(*self.chain.forms, strict=True)):
            reached: dict[tuple[Rows | None, int], tuple[float, tuple[ReadPlan, ...]]] = {}
            for (residual, before), (us, plans) in best.items():
                for form in self._different(index):
                    read = replace(forms[form], deltas=forms[before].deltas)
                    inside_us, settled = self._settled(read.settles, tokens)
                    options = self._served(residual, read.deltas, read.target, tokens)
                    for rows, (more_us, steps) in options.items():
                        more_us += inside_us
                        if (rows, form) not in reached or us + more_us < reached[rows, form][0]:
                            read_plan = ReadPlan(read, steps, rows, more_us, settled)
                            reached[rows, form] = (us + more_us, (*plans, read_plan))
            if not reached:
                read = forms[0]
                added = ", ".join(map(str, read.deltas)) or "nothing"
                raise PlacementError(f"{read.site}: no legal steps lead from what was added, {added}, to {read.target}")
            best = reached
        us, plans = min(best.values(), key=lambda b: b[0])
        plan = self._whole(tokens, plans, us)
        if us == math.inf:
            self._refuse(plan)
        return plan

    def _different(self, index: int) -> list[int]:
        """The forms of a read, those that are equal once: in what is read, settled, and added next."""
        found: dict[object, int] = {}
        for form, reads in enumerate(self.chain.forms):
            after = reads[index + 1].deltas if index + 1 < len(reads) else ()
            found.setdefault((reads[index].target, reads[index].settles, after), form)
        return list(found.values())

    def _refuse(self, plan: Plan) -> None:
        lacking, tokens = [edge for _, step, edge in plan.moves() if step.us == math.inf], max(plan.counts)
        most = max(lacking, key=lambda edge: self._needed_bytes(edge, tokens))
        needed = self._needed_bytes(most, tokens)
        having = [o for o in self.offers if most.kind in o.kinds]
        names = ", ".join(o.transport for o in having or self.offers)
        if not having:
            raise LayoutError(f"the naive plan takes {most.kind}, which {names} has not; leave plan at cheapest")
        if all(o.max_bytes is None or needed <= o.max_bytes for o in having):
            raise LayoutError(f"{most.kind} on {names} was not measured: run weft tune")
        room = ", ".join(f"{o.transport} has max_bytes={o.max_bytes}" for o in having)
        raise LayoutError(
            f"steps of {max(plan.counts)} tokens a group exchange tensors of {needed} bytes, but {room}: "
            f"give it max_bytes={needed}, or plan for fewer tokens"
        )
