"""The planner: an exact search for the cheapest legal steps of every read of a model.

A model is a `Chain`: its reads in order, each with the deltas added before it. To serve a read, the deltas' debts are
paid, the residual is brought up to date, normalised, and delivered on the rows that the block asks for. The norm works
on single rows, so it may run before the last gather. The only state between two reads is the set of residual rows that
a rank holds. So the cheapest plan is a shortest path: dynamic programming over the chain with these rows as the state.
`weft.planner.search` finds the cost of each read.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Literal

from weft.planner.chain import Chain, Counts, Read, bucket
from weft.planner.cost import Offer
from weft.planner.edges import Edge, legal_edges, wire_edges
from weft.planner.op import NORMED, BlockOp, BlockValue, Op, StreamOp, with_formats
from weft.planner.prices import BlockPrices, Recipes, StreamPrices
from weft.planner.row_formats import Wire
from weft.planner.search import Delivery, SearchGraph, Sums
from weft.planner.spec import LayoutError, Mesh, Placement, PlacementError, Rows

Choice = Literal["cheapest", "naive"]


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Ops of one read."""

    read: Read
    steps: tuple[StreamOp, ...]  # ops that bring the stream's rows
    residual: Rows  # rows of the residual after these steps
    us: float  # time of the steps, and of the ops that run in all steps
    inside: tuple[BlockOp, ...] = ()  # ops of the reading block, before the next read

    def ops(self) -> Iterator[Op]:
        """Yield all ops in order; an op that is made of others yields these."""
        for op in (*self.steps, *self.inside):
            yield from op.steps()


@dataclass(frozen=True)
class Plan:
    """Plan of a step, made for `counts` tokens in each DP group: a read plan for each read of the chain."""

    mesh: Mesh
    chain: Chain
    counts: Counts
    reads: tuple[ReadPlan, ...]
    us: float = field(default=0.0)

    def moves(self) -> Iterator[tuple[Read, StreamOp, Edge]]:
        """Yield the communicating ops of the stream, in order."""
        for read in self.reads:
            for step in read.steps:
                if step.edge is not None and step.edge.moves:
                    yield read.read, step, step.edge

    def ops(self, optional: bool = True) -> Iterator[tuple[str, Op]]:
        """Yield all ops in order, with the sites of their reads. optional: include ops that run only if a row asks."""
        for read in self.reads:
            yield from ((read.read.site, op) for op in read.ops() if op.kinds and (optional or not op.optional))

    @cached_property
    def exchanges_us(self) -> float:
        """Time of all collectives that run in every step."""
        return sum(op.us for _, op in self.ops(optional=False) if op.collectives)

    def checksum(self) -> int:
        """CRC-32 of the ops and their rows: ranks with a different checksum run different collectives."""
        ops = (f"{site} {op}" + (f" by {op.max_call_rows}" if op.max_call_rows else "") for site, op in self.ops())
        return zlib.crc32("|".join((str(self.counts), *ops)).encode())


class Planner(StreamPrices):
    """Planner of a chain on a mesh with the edges that transports offer; each edge goes to the cheapest transport.

    Slices need no offer; local steps cost what the first offer says. Plans are cached by `bucket`. Raises
    PlacementError, naming the block, if no legal steps lead to the placement that a block asks for; LayoutError if a
    step's tensors exceed every transport's capacity.

    Args:
        choice: `naive` follows the naive plan, to compare the two.
        slices_copy: as for `StreamPrices`, in captured steps.
        recipes: recipes of the blocks' ops, as for `BlockPrices`.
    """

    def __init__(
        self,
        mesh: Mesh,
        chain: Chain,
        offers: Sequence[Offer],
        choice: Choice = "cheapest",
        slices_copy: bool = False,
        recipes: Recipes | None = None,
    ):
        super().__init__(mesh, chain, offers, slices_copy)
        self.choice, self.blocks = choice, BlockPrices(mesh, offers, recipes, captured=slices_copy)
        self._kinds = frozenset[str]().union(*(o.kinds for o in offers))
        result = [*self._home.values(), *(d for reads in chain.forms for read in reads for d in read.deltas)]
        result += [p for edges in legal_edges(mesh).values() for edge in edges for p in (edge.src, edge.dst)]
        self._placements = tuple(dict.fromkeys(result))
        self._edges = [
            [e for e in legal_edges(mesh).get(at, ()) if not e.moves or e.kind in self._kinds]
            for at in self._placements
        ]
        self._plan, self._naive = cache(self._make), cache(self._make_naive)
        self._graph, self._sums, self._served = cache(self._make_graph), cache(self._find_sums), cache(self._serve)
        self._inside, self._delivery = cache(self._find_inside), cache(self._make_delivery)

    def plan(self, counts: Counts) -> Plan:
        """Return the plan to follow for the bucket of these counts: the cheapest, unless `choice` is naive."""
        if self.choice == "cheapest":
            return self._plan(max(bucket(counts)))
        plan = self.naive(counts)
        if plan.us == math.inf:
            self._refuse(plan)
        return plan

    def naive(self, counts: Counts) -> Plan:
        """Return the plan of other engines: all-reduce each debt, slice to the group, add, norm, gather the requested
        rows.

        Attention is merged by the first recipe, and all logits of a split vocabulary are gathered. For comparison only,
        so it never fails: an edge that no transport offers has an infinite time, by `nobody`.
        """
        return self._naive(max(bucket(counts)))

    def _make_naive(self, tokens: int) -> Plan:
        home, reads = self.mesh.placement(Rows.GROUP), []
        for index, read in enumerate(self.chain.reads):
            steps: list[StreamOp] = []
            for i, delta in enumerate(read.deltas):
                steps += self._route(i, delta, home, tokens)
            for i in range(len(read.deltas)):
                us = self._add_us(home.rows, tokens) if index or i else 0.0
                steps.append(StreamOp("absorb", 0, rows=home.rows, us=us))
            added = len(read.deltas) > (0 if index else 1)
            delivered = self._route(NORMED, home, read.target, tokens)
            if read.wire:
                delivered.append(self._quantise(read.target.rows, read.wire, tokens, with_norm=not delivered))
            norm = self._norm(home.rows, tokens, added) if read.normed else StreamOp("read", rows=home.rows)
            steps += [norm, *delivered]
            inside, (us, ops) = read.inside, self._inside(read.inside, tokens)
            if self.choice != "naive":  # the blocks' exchanges only change if it is the plan to follow
                inside = tuple(replace(value, optional=False) for value in inside if not value.spares)
                ops = tuple(self.blocks.naive(*value.of(tokens)) for value in inside)
                us = sum(op.us for op in ops)
            us += sum(s.us for s in steps)
            reads.append(ReadPlan(replace(read, inside=inside), with_formats(steps), home.rows, us, ops))
        return self._whole(tokens, tuple(reads), sum(r.us for r in reads))

    def _whole(self, tokens: int, reads: tuple[ReadPlan, ...], us: float) -> Plan:
        for read in reads:
            for value in read.read.inside[len(read.inside) :]:
                self.blocks.plan(*value.of(tokens))  # raises, with the missing offer
        return Plan(self.mesh, self.chain, (tokens,) * self.mesh.attn_dp, reads, us)

    def _find_inside(self, values: tuple[BlockValue, ...], tokens: int) -> tuple[float, tuple[BlockOp, ...]]:
        """Return the ops for these values, up to one that nothing offers, and the time of ops that run in all steps."""
        ops, us = [], 0.0
        for value in values:
            op = self.blocks.find(*value.of(tokens))
            if op is None:
                us = math.inf
                break
            ops.append(
                replace(op, optional=value.optional, packed=value.packed) if value.optional or value.packed else op
            )
            us += 0.0 if value.optional or op.us == math.inf else op.us
        return us, tuple(ops)

    def _route(self, operand: int | str, src: Placement, dst: Placement, tokens: int) -> list[StreamOp]:
        """All-reduce the whole debt, then slice or gather; by way of the world's rows if no step leads to dst."""
        steps: list[StreamOp] = []
        while src != dst:
            edges = {edge.dst: edge for edge in legal_edges(self.mesh)[src]}
            required = self.mesh.placement(src.rows) if src.owes else dst
            if required not in edges:
                required = self.mesh.placement(Rows.WORLD)
            edge = edges[required]
            steps.append(self._move(operand, edge, tokens))
            src = required
        return steps

    def _make_graph(self, tokens: int, normed: bool) -> SearchGraph:
        number = {at: i for i, at in enumerate(self._placements)}
        moves = [[(number[e.dst], self._move(0, e, tokens)) for e in edges] for edges in self._edges]
        finishes: list[list[tuple[int, StreamOp]]] = [[] for _ in moves]
        for result, edges in zip(finishes, self._edges, strict=True):
            for edge in edges if normed else ():
                us, transport = self._price(edge, tokens, finish=True) if edge.moves else (0.0, "nobody")
                if edge.dst.owes is None and transport != "nobody":
                    step = StreamOp("finish", 0, edge, rows=edge.dst.rows, us=us, transport=transport)
                    result.append((number[edge.dst], step))
        adds = [(at.rows, self._add_us(at.rows, tokens)) for at in self._placements]
        merge, absorb = (tuple(StreamOp(op, 0, rows=rows, us=us) for rows, us in adds) for op in ("merge", "absorb"))
        read = tuple(StreamOp("read", rows=at.rows) for at in self._placements)
        norm, added = (tuple(self._norm(at.rows, tokens, a) for at in self._placements) for a in (False, True))
        norms = (norm, added) if normed else (read, read)
        return SearchGraph(
            self._placements, tuple(map(tuple, moves)), tuple(map(tuple, finishes)), merge, absorb, *norms
        )

    def _find_sums(self, deltas: tuple[Placement, ...], tokens: int, normed: bool) -> Sums:
        return Sums([self._placements.index(delta) for delta in deltas], self._graph(tokens, normed))

    def _make_delivery(self, target: Placement, wire: Wire | None, plain: bool, tokens: int) -> Delivery:
        """Return the delivery of a read's rows: plain and in its readers' format; without plain readers, in that.

        Rows on the wire have numbers after the placements, and the readers' values after these.
        """
        graph, number = self._graph(tokens, True), {at: i for i, at in enumerate(self._placements)}
        if wire is None:
            return Delivery(graph.moves, number[target], {})
        size, goal = len(number), 2 * len(number)
        moves: list[list[tuple[int, StreamOp]]] = [*map(list, graph.moves), *([] for _ in number)]
        with_norm: dict[int, list[tuple[int, StreamOp]]] = {}
        moves[number[target]].append((goal, self._quantise(target.rows, wire, tokens, with_norm=False)))
        with_norm[number[target]] = [(goal, self._quantise(target.rows, wire, tokens, with_norm=True))]
        for src, edges in {} if plain else wire_edges(self.mesh, wire).items():
            at, rows = number[replace(src, wire=None)], src.rows
            moves[at].append((size + at, self._pack(rows, wire, tokens, with_norm=False)))
            with_norm.setdefault(at, []).append((size + at, self._pack(rows, wire, tokens, with_norm=True)))
            for edge in (edge for edge in edges if edge.kind in self._kinds):
                moves[size + at].append((size + number[replace(edge.dst, wire=None)], self._move(NORMED, edge, tokens)))
            if rows == target.rows:
                kernels = len(wire.format.parts(self.chain.width)) + bool(wire.extra)
                us = self._laid_out_us(rows, wire, tokens, kernels)
                moves[size + at].append((goal, StreamOp("unpack", NORMED, rows=rows, us=us, wire=wire)))
        return Delivery(moves, goal, with_norm)

    def _serve(
        self,
        residual: Rows | None,
        deltas: tuple[Placement, ...],
        readers: tuple[Placement, Wire | None, bool],
        normed: bool,
        tokens: int,
    ) -> dict[Rows, tuple[float, tuple[StreamOp, ...]]]:
        """Return the cheapest steps of a read, by the residual's placement after it. readers: requirements."""
        sums, delivery = self._sums(deltas, tokens, normed), self._delivery(*readers, tokens)
        before = None if residual is None else self._placements.index(self._home[residual])
        result = sums.serve(before, delivery)
        return {self._placements[at].rows: (node.us, with_formats(sums.steps(node))) for at, node in result.items()}

    def _make(self, tokens: int) -> Plan:
        # The state: the residual's rows, and the form of the last read.
        best: dict[tuple[Rows | None, int], tuple[float, tuple[ReadPlan, ...]]] = {(None, 0): (0.0, ())}
        for index, forms in enumerate(zip(*self.chain.forms, strict=True)):
            reached: dict[tuple[Rows | None, int], tuple[float, tuple[ReadPlan, ...]]] = {}
            for (residual, before), (us, plans) in best.items():
                for form in self._different(index):
                    read = replace(forms[form], deltas=forms[before].deltas)
                    inside_us, inside = self._inside(read.inside, tokens)
                    readers = read.target, read.wire, read.plain
                    options = self._served(residual, read.deltas, readers, read.normed, tokens)
                    for rows, (more_us, steps) in options.items():
                        more_us += inside_us
                        if (rows, form) not in reached or us + more_us < reached[rows, form][0]:
                            read_plan = ReadPlan(read, steps, rows, more_us, inside)
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
        """Return one form of each set of a read's forms with equal rows, values inside and deltas added next."""
        result: dict[object, int] = {}
        for form, reads in enumerate(self.chain.forms):
            after = reads[index + 1].deltas if index + 1 < len(reads) else ()
            read = reads[index]
            result.setdefault((read.target, read.inside, read.wire, read.plain, read.normed, after), form)
        return list(result.values())

    def _refuse(self, plan: Plan) -> None:
        lacking, tokens = [edge for _, step, edge in plan.moves() if step.us == math.inf], max(plan.counts)
        largest = max(lacking, key=lambda edge: self._needed_bytes(edge, tokens))
        needed = self._needed_bytes(largest, tokens)
        having = [o for o in self.offers if largest.kind in o.kinds]
        names = ", ".join(o.transport for o in having or self.offers)
        if not having:
            raise LayoutError(f"the naive plan requires {largest.kind}, not offered by {names}; leave plan at cheapest")
        if all(o.max_bytes is None or needed <= o.max_bytes for o in having):
            raise LayoutError(f"{largest.kind} on {names} was not measured: run weft tune")
        limits = ", ".join(f"{o.transport} has max_bytes={o.max_bytes}" for o in having)
        raise LayoutError(
            f"steps of {max(plan.counts)} tokens a group exchange tensors of {needed} bytes, but {limits}: "
            f"give it max_bytes={needed}, or plan for fewer tokens"
        )
