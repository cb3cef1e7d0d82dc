"""The planner: the cheapest legal steps for every read of a model, found exactly.

A model is a `Chain`: its reads in order, each with the deltas added before it. To serve a read, the deltas' debts are
settled, the residual is brought up to date, normalised, and delivered on the rows that the block asks for. The norm
works on single rows, so it may run before the last gather. The only state between two reads is which rows of the
residual a rank holds. So the cheapest plan is a shortest path: dynamic programming over the chain with these rows as
the state. `weft.planner.search` finds the cost of each read.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

from weft.planner.chain import Chain, Counts, Read, bucket
from weft.planner.cost import Offer
from weft.planner.edges import Edge, legal_edges, wire_edges
from weft.planner.plan_step import NORMED, Step
from weft.planner.prices import StepPrices
from weft.planner.row_formats import Wire
from weft.planner.search import Delivery, Graph, Sums
from weft.planner.settlements import Settled, Settlement, Settlements, by_default
from weft.planner.spec import LayoutError, Mesh, Placement, PlacementError, Rows

Choice = Literal["cheapest", "naive"]


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """The steps of one read. residual: the rows of the residual that stay after it.

    settled: the plans of the read's settlements. us: of the steps, and of the settlements that run in all steps.
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
        """The settlements after it and before the next read, in order."""
        return zip(self.read.settles, self.settled, strict=True)


Op = tuple[str, Step | Settled]
"""A communicating step of a plan: the site of the read that it serves or follows, and the step."""


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
        """All exchanges of ranks, in the order of a step. asked: also those that only run where a row asks for them."""
        for read_plan in self.reads:
            site = read_plan.read.site
            yield from ((site, step) for _, step, _ in read_plan.moves())
            for settlement, settled in read_plan.settlements():
                if asked or not settlement.asked:
                    yield from ((site, op) for op in settled.ops())

    def checksum(self) -> int:
        """CRC-32 of the ops, and of the rows that they are for: ranks with another one run other collectives."""
        ops = (f"{site} {op}" + (f" by {op.each}" if isinstance(op, Settled) else "") for site, op in self.ops())
        return zlib.crc32("|".join((str(self.counts), *ops)).encode())


class Planner(StepPrices):
    """Plans a chain on a mesh with the edges that transports offer; each edge goes to the cheapest transport.

    Slices need no offer; local steps cost what the first offer says. Plans are cached by `bucket`. choice: naive makes
    the naive plan the one to follow, to compare the two. slices_copy: as for `StepPrices`. settlements: the plans of
    what blocks settle; None: the cheapest by the same offers. Raises PlacementError, naming the block, where no legal
    steps lead to the placement that a block asks for; LayoutError where a step's tensors are larger than any transport
    carries.
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
        super().__init__(mesh, chain, offers, slices_copy)
        self.choice = choice
        self.settlements = settlements or Settlements(mesh, offers, captured=slices_copy)
        self._kinds = frozenset[str]().union(*(o.kinds for o in offers))
        found = [*self._home.values(), *(d for reads in chain.forms for read in reads for d in read.deltas)]
        found += [p for edges in legal_edges(mesh).values() for edge in edges for p in (edge.src, edge.dst)]
        self._placements = tuple(dict.fromkeys(found))
        self._edges = [
            [e for e in legal_edges(mesh).get(at, ()) if not e.moves or e.kind in self._kinds]
            for at in self._placements
        ]
        self._plan, self._naive = cache(self._make), cache(self._make_naive)
        self._graph, self._sums, self._served = cache(self._make_graph), cache(self._find_sums), cache(self._serve)
        self._settled, self._delivery = cache(self._settle), cache(self._make_delivery)

    def plan(self, counts: Counts) -> Plan:
        """The plan to follow for the bucket of these counts: the cheapest, unless the naive one was chosen."""
        if self.choice == "cheapest":
            return self._plan(max(bucket(counts)))
        plan = self.naive(counts)
        if plan.us == math.inf:
            self._refuse(plan)
        return plan

    def naive(self, counts: Counts) -> Plan:
        """The plan of other engines: all-reduce each debt, slice to the group, add, norm, gather the requested rows;
        and merge attention by the first recipe, and gather all logits of a split vocabulary.

        It is for comparison and never fails: an edge that no transport offers takes infinitely long, by `nobody`.
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
            delivered = self._route(NORMED, home, read.target, tokens)
            if read.wire:
                delivered.append(self._quantise(read.target.rows, read.wire, tokens, with_norm=not delivered))
            steps += [self._norm(home.rows, tokens, added), *delivered]
            settles, (us, settled) = read.settles, self._settled(read.settles, tokens)
            if self.choice != "naive":  # blocks settle as they do, where it is the plan to follow
                settles = by_default(settles)
                settled = tuple(self.settlements.naive(*settlement.of(tokens)) for settlement in settles)
                us = sum(each.us for each in settled)
            us += sum(s.us for s in steps)
            reads.append(ReadPlan(replace(read, settles=settles), tuple(steps), home.rows, us, settled))
        return self._whole(tokens, tuple(reads), sum(r.us for r in reads))

    def _whole(self, tokens: int, reads: tuple[ReadPlan, ...], us: float) -> Plan:
        for read in reads:
            for settlement in read.read.settles[len(read.settled) :]:
                self.settlements.plan(*settlement.of(tokens))  # raises, and says what is missing
        return Plan(self.mesh, self.chain, (tokens,) * self.mesh.attn_dp, reads, us)

    def _settle(self, settles: tuple[Settlement, ...], tokens: int) -> tuple[float, tuple[Settled, ...]]:
        """The plans of these settlements, up to one that nothing offers, and the time of those that run in all
        steps."""
        settled, us = [], 0.0
        for settlement in settles:
            plan = self.settlements.find(*settlement.of(tokens))
            if plan is None:
                us = math.inf
                break
            settled.append(plan)
            us += 0.0 if settlement.asked or plan.us == math.inf else plan.us
        return us, tuple(settled)

    def _route(self, operand: int | str, src: Placement, dst: Placement, tokens: int) -> list[Step]:
        """All-reduces the whole debt, then slices or gathers; by way of the world's rows where no step leads to dst."""
        steps: list[Step] = []
        while src != dst:
            edges = {edge.dst: edge for edge in legal_edges(self.mesh)[src]}
            wanted = self.mesh.placement(src.rows) if src.owes else dst
            if wanted not in edges:
                wanted = self.mesh.placement(Rows.WORLD)
            edge = edges[wanted]
            steps.append(self._move(operand, edge, tokens))
            src = wanted
        return steps

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

    def _make_delivery(self, target: Placement, wire: Wire | None, plain: bool, tokens: int) -> Delivery:
        """The delivery of a read's rows: plain, and in its readers' format; in the format on the wire, if none is
        plain.

        Rows on the wire have numbers after the placements, and the readers' values after these.
        """
        graph, number = self._graph(tokens), {at: i for i, at in enumerate(self._placements)}
        if wire is None:
            return Delivery(graph.moves, number[target], {})
        size, goal = len(number), 2 * len(number)
        moves: list[list[tuple[int, Step]]] = [*map(list, graph.moves), *([] for _ in number)]
        with_norm: dict[int, list[tuple[int, Step]]] = {}
        moves[number[target]].append((goal, self._quantise(target.rows, wire, tokens, with_norm=False)))
        with_norm[number[target]] = [(goal, self._quantise(target.rows, wire, tokens, with_norm=True))]
        for src, edges in {} if plain else wire_edges(self.mesh, wire).items():
            at, rows = number[replace(src, wire=None)], src.rows
            moves[at].append((size + at, self._pack(rows, wire, tokens, with_norm=False)))
            with_norm.setdefault(at, []).append((size + at, self._pack(rows, wire, tokens, with_norm=True)))
            for edge in (edge for edge in edges if edge.kind in self._kinds):
                moves[size + at].append((size + number[replace(edge.dst, wire=None)], self._move(NORMED, edge, tokens)))
            if rows == target.rows:
                kernels = len(wire.format.parts(self.chain.width)) + bool(wire.beside)
                us = self._laid_out_us(rows, wire, tokens, kernels)
                moves[size + at].append((goal, Step("unpack", NORMED, rows=rows, us=us, wire=wire)))
        return Delivery(moves, goal, with_norm)

    def _serve(
        self,
        residual: Rows | None,
        deltas: tuple[Placement, ...],
        readers: tuple[Placement, Wire | None, bool],
        tokens: int,
    ) -> dict[Rows, tuple[float, tuple[Step, ...]]]:
        """The cheapest steps that serve a read, for each placement of the residual after it. readers: what they
        take."""
        sums, delivery = self._sums(deltas, tokens), self._delivery(*readers, tokens)
        before = None if residual is None else self._placements.index(self._home[residual])
        found = sums.serve(before, delivery)
        return {self._placements[at].rows: (node.us, sums.steps(node)) for at, node in found.items()}

    def _make(self, tokens: int) -> Plan:
        # The state: the residual's rows, and the form in which the last read was served.
        best: dict[tuple[Rows | None, int], tuple[float, tuple[ReadPlan, ...]]] = {(None, 0): (0.0, ())}
        for index, forms in enumerate(zip(*self.chain.forms, strict=True)):
            reached: dict[tuple[Rows | None, int], tuple[float, tuple[ReadPlan, ...]]] = {}
            for (residual, before), (us, plans) in best.items():
                for form in self._different(index):
                    read = replace(forms[form], deltas=forms[before].deltas)
                    inside_us, settled = self._settled(read.settles, tokens)
                    options = self._served(residual, read.deltas, (read.target, read.wire, read.plain), tokens)
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
        """The forms of a read, one of each set that are equal in rows, settlements and the deltas added next."""
        found: dict[object, int] = {}
        for form, reads in enumerate(self.chain.forms):
            after = reads[index + 1].deltas if index + 1 < len(reads) else ()
            read = reads[index]
            found.setdefault((read.target, read.settles, read.wire, read.plain, after), form)
        return list(found.values())

    def _refuse(self, plan: Plan) -> None:
        lacking, tokens = [edge for _, step, edge in plan.moves() if step.us == math.inf], max(plan.counts)
        largest = max(lacking, key=lambda edge: self._needed_bytes(edge, tokens))
        needed = self._needed_bytes(largest, tokens)
        having = [o for o in self.offers if largest.kind in o.kinds]
        names = ", ".join(o.transport for o in having or self.offers)
        if not having:
            raise LayoutError(f"the naive plan takes {largest.kind}, which {names} has not; leave plan at cheapest")
        if all(o.max_bytes is None or needed <= o.max_bytes for o in having):
            raise LayoutError(f"{largest.kind} on {names} was not measured: run weft tune")
        limits = ", ".join(f"{o.transport} has max_bytes={o.max_bytes}" for o in having)
        raise LayoutError(
            f"steps of {max(plan.counts)} tokens a group exchange tensors of {needed} bytes, but {limits}: "
            f"give it max_bytes={needed}, or plan for fewer tokens"
        )
