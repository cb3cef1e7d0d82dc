"""The planner: the cheapest legal steps for every read of a model, found exactly.

A model is a `Chain`: its reads in order, each with the deltas added before it. To serve a read, the deltas' debts are
settled, the residual is brought up to date, normalised, and delivered on the rows that the block asked for. The norm
works on single rows, so it may run before the last gather. Between two reads only one thing is left to remember, which
rows of the residual a rank holds; so the cheapest plan is a shortest path: Dijkstra inside a read, then dynamic
programming over the chain with the residual's rows as the state.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Literal

from weft.place.cost import Offer
from weft.place.edges import Edge, legal_edges, rows_received
from weft.place.spec import LayoutError, Mesh, Placement, PlacementError, Rows

Counts = tuple[int, ...]
RESIDUAL, NORMED = "residual", "normed"


@dataclass(frozen=True, slots=True)
class Read:
    """One read of the stream. site: the norm's name; target: what the block asked for; deltas: what was added since."""

    site: str
    target: Placement
    deltas: tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class Chain:
    """A traced model. width: elements a row; element_bytes: of the activations."""

    reads: tuple[Read, ...]
    width: int
    element_bytes: int


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a read.

    move:   send `operand` (a delta's index, "residual" or "normed") along `edge`.
    merge:  add delta `into + n` to the equal-placed delta `into`: `operand` is the dropped one.
    absorb: add the complete delta `operand` to the residual (the first delta becomes the residual).
    norm:   normalise the residual.
    finish: move, absorb and norm in one call of a transport: the edge with its epilogue.

    transport: who carries the edge out.
    """

    op: Literal["move", "merge", "absorb", "norm", "finish"]
    operand: int | str = RESIDUAL
    edge: Edge | None = None
    into: int = 0
    rows: Rows = Rows.OWN
    us: float = 0.0
    transport: str = "local"

    def __str__(self) -> str:
        if self.edge is not None:
            what = self.operand if isinstance(self.operand, str) else f"delta {self.operand}"
            epilogue = " + residual + norm" if self.op == "finish" else ""
            by = f" by {self.transport}" if self.edge.moves else ""
            return f"{self.edge}{epilogue} [{what}]{by}"
        if self.op == "norm":
            return f"norm on {self.rows.name}"
        return f"{self.op} delta {self.operand} on {self.rows.name}"


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """The steps of one read; residual: the rows of the residual that stay after it."""

    read: Read
    steps: tuple[Step, ...]
    residual: Rows
    us: float


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
            for step in read_plan.steps:
                if step.edge is not None and step.edge.moves:
                    yield read_plan.read, step, step.edge


@dataclass(frozen=True, slots=True)
class _State:
    """Inside a read: rows of the residual (None: not begun), unsettled deltas, rows of the normalised value."""

    residual: Rows | None
    pending: tuple[Placement, ...]
    normed: Placement | None = None


def bucket(counts: Counts) -> Counts:
    """The counts that a plan is made for: every group as full as the fullest, rounded up to a power of two.

    Every rank knows every count, so every rank comes to the same bucket.
    """
    most = max(counts)
    return (1 << max(most - 1, 0).bit_length(),) * len(counts)


class Planner:
    """Plans a chain on a mesh with the edges that transports offer; each edge goes to the cheapest that has it.

    Slices need no offer; local steps cost what the first offer says. Plans are cached by `bucket`. Raises
    PlacementError, naming the block, where no legal steps lead to what a block asks for; LayoutError where a step's
    tensors are larger than any transport carries.
    """

    def __init__(self, mesh: Mesh, chain: Chain, offers: Sequence[Offer]):
        self.mesh, self.chain, self.offers = mesh, chain, tuple(offers)
        kinds = frozenset().union(*(o.kinds for o in offers))
        self.edges = {
            src: tuple(e for e in edges if not e.moves or e.kind in kinds) for src, edges in legal_edges(mesh).items()
        }
        self._plan = cache(self._make)
        self._settle = cache(self._search)
        self._edge_us, self._finish_us = cache(self._price), cache(self._price_finish)
        self.bytes_received = lru_cache(1 << 16)(self._bytes_received)

    def plan(self, counts: Counts) -> Plan:
        """The cheapest plan for the bucket of these counts."""
        return self._plan(bucket(counts))

    def naive(self, counts: Counts) -> Plan:
        """What engines do by default: all-reduce every debt, slice to the group, add, norm, gather what is asked."""
        counts = bucket(counts)
        mesh, residual, reads = self.mesh, mesh_rows(self.mesh, Rows.GROUP), []
        for index, read in enumerate(self.chain.reads):
            steps: list[Step] = []
            for i, delta in enumerate(read.deltas):
                steps += self._route(i, delta, mesh.placement(residual), counts)
            state = _State(None if index == 0 else residual, tuple(mesh.placement(residual) for _ in read.deltas))
            while state.pending:
                step, state = next(self._absorb(state, counts))
                steps.append(step)
            steps.append(self._norm(residual, counts))
            steps += self._route(NORMED, mesh.placement(residual), read.target, counts)
            reads.append(ReadPlan(read, tuple(steps), residual, sum(s.us for s in steps)))
        return Plan(mesh, self.chain, counts, tuple(reads), sum(r.us for r in reads))

    def _bytes_received(self, edge: Edge, counts: Counts) -> float:
        """Bytes that the busiest rank receives."""
        rows = max(rows_received(edge, self.mesh, r, counts) for r in range(self.mesh.world))
        return rows * self.chain.width * self.chain.element_bytes

    # --- costs ------------------------------------------------------------------------------------------------

    def _price(self, edge: Edge, counts: Counts) -> tuple[float, str]:
        """µs, and the transport that takes so long; infinite where none has room."""
        if not edge.moves:
            return 0.0, "local"
        size, moved = self.mesh.size(edge.group), self.bytes_received(edge, counts)
        times = ((o.cost.collective_us(edge.kind, size, moved), o.transport) for o in self._able(edge, counts))
        return min(times, default=(math.inf, "nobody"))

    def _price_finish(self, edge: Edge, counts: Counts) -> tuple[float, str] | None:
        size, moved = self.mesh.size(edge.group), self.bytes_received(edge, counts)
        touched = 4 * self._most_bytes(edge.dst.rows, counts)  # reads delta and residual, writes residual and norm
        able = [o for o in self._able(edge, counts) if edge.kind in o.epilogues]
        times = [
            (o.cost.collective_us(edge.kind, size, moved) + o.cost.epilogue_us(touched), o.transport) for o in able
        ]
        return min(times, default=None)

    def _able(self, edge: Edge, counts: Counts) -> list[Offer]:
        """Who carries the edge out: has it, and room for it."""
        needed = self._needed_bytes(edge, counts)
        return [o for o in self.offers if edge.kind in o.kinds and (o.max_bytes is None or needed <= o.max_bytes)]

    def _needed_bytes(self, edge: Edge, counts: Counts) -> int:
        return max(self._most_bytes(p.rows, counts) for p in (edge.src, edge.dst))

    def _local_us(self, rows: Rows, touches: int, counts: Counts) -> float:
        return self.offers[0].cost.local_us(touches * self._most_bytes(rows, counts))

    def _most_bytes(self, rows: Rows, counts: Counts) -> int:
        most = max(self.mesh.row_count(rows, r, counts) for r in range(self.mesh.world))
        return most * self.chain.width * self.chain.element_bytes

    # --- moves out of a state ---------------------------------------------------------------------------------

    def _moves(self, state: _State, counts: Counts) -> Iterator[tuple[Step, _State]]:
        if state.normed is not None:
            for step, at in self._hops(NORMED, state.normed, counts):
                yield step, replace(state, normed=at)
            return
        for i, delta in enumerate(state.pending):
            for step, at in self._hops(i, delta, counts):
                yield step, replace(state, pending=(*state.pending[:i], at, *state.pending[i + 1 :]))
        for i, j in itertools.combinations(range(len(state.pending)), 2):
            if state.pending[i] == state.pending[j]:
                rows = state.pending[i].rows
                merged = (*state.pending[:j], *state.pending[j + 1 :])
                yield (
                    Step("merge", j, into=i, rows=rows, us=self._local_us(rows, 3, counts)),
                    replace(state, pending=merged),
                )
        if state.residual is not None:
            for step, at in self._hops(RESIDUAL, self.mesh.placement(state.residual), counts):
                yield step, replace(state, residual=at.rows)
            if not state.pending:
                yield self._norm(state.residual, counts), replace(state, normed=self.mesh.placement(state.residual))
        yield from self._absorb(state, counts)
        yield from self._finish(state, counts)

    def _hops(self, operand: int | str, at: Placement, counts: Counts) -> Iterator[tuple[Step, Placement]]:
        for edge in self.edges.get(at, ()):
            us, transport = self._edge_us(edge, counts)
            yield Step("move", operand, edge, us=us, transport=transport), edge.dst

    def _finish(self, state: _State, counts: Counts) -> Iterator[tuple[Step, _State]]:
        """The last delta's debt, the residual add and the norm in one step."""
        if state.residual is None or len(state.pending) != 1:
            return
        done = self.mesh.placement(state.residual)
        for edge in self.edges.get(state.pending[0], ()):
            if edge.dst != done or (best := self._finish_us(edge, counts)) is None:
                continue
            step = Step("finish", 0, edge, rows=state.residual, us=best[0], transport=best[1])
            yield step, _State(state.residual, (), done)

    def _absorb(self, state: _State, counts: Counts) -> Iterator[tuple[Step, _State]]:
        for i, delta in enumerate(state.pending):
            if delta.owes is None and state.residual in (None, delta.rows):
                us = 0.0 if state.residual is None else self._local_us(delta.rows, 3, counts)
                left = (*state.pending[:i], *state.pending[i + 1 :])
                yield Step("absorb", i, rows=delta.rows, us=us), _State(delta.rows, left)

    def _norm(self, rows: Rows, counts: Counts) -> Step:
        return Step("norm", rows=rows, us=self._local_us(rows, 2, counts))

    # --- search -----------------------------------------------------------------------------------------------

    def _search(
        self, residual: Rows | None, deltas: tuple[Placement, ...], target: Placement, counts: Counts
    ) -> dict[Rows, tuple[float, tuple[Step, ...]]]:
        """Cheapest way to serve a read, for each rows of the residual that may remain (Dijkstra)."""
        order = itertools.count()
        start = _State(residual, deltas)
        heap: list[tuple[float, int, int, _State, tuple[Step, ...]]] = [(0.0, 0, next(order), start, ())]
        done: set[_State] = set()
        found: dict[Rows, tuple[float, tuple[Step, ...]]] = {}
        while heap:
            us, length, _, state, steps = heapq.heappop(heap)
            if state in done:
                continue
            done.add(state)
            if state.normed == target and state.residual is not None:
                found.setdefault(state.residual, (us, steps))
                continue
            for step, reached in self._moves(state, counts):
                if reached not in done:
                    heapq.heappush(heap, (us + step.us, length + 1, next(order), reached, (*steps, step)))
        return found

    def _make(self, counts: Counts) -> Plan:
        best: dict[Rows | None, tuple[float, tuple[ReadPlan, ...]]] = {None: (0.0, ())}
        for read in self.chain.reads:
            reached: dict[Rows | None, tuple[float, tuple[ReadPlan, ...]]] = {}
            for residual, (us, plans) in best.items():
                options = self._settle(residual, read.deltas, read.target, counts)
                for rows, (more_us, steps) in options.items():
                    if rows not in reached or us + more_us < reached[rows][0]:
                        reached[rows] = (us + more_us, (*plans, ReadPlan(read, steps, rows, more_us)))
            if not reached:
                added = ", ".join(map(str, read.deltas)) or "nothing"
                raise PlacementError(f"{read.site}: no legal steps lead from what was added, {added}, to {read.target}")
            best = reached
        us, plans = min(best.values(), key=lambda b: b[0])
        plan = Plan(self.mesh, self.chain, counts, plans, us)
        if us == math.inf:
            self._refuse(plan)
        return plan

    def _refuse(self, plan: Plan) -> None:
        needed = max(self._needed_bytes(edge, plan.counts) for _, step, edge in plan.moves() if step.us == math.inf)
        room = ", ".join(f"{o.transport} carries at most max_bytes={o.max_bytes}" for o in self.offers)
        raise LayoutError(
            f"steps of {max(plan.counts)} tokens a group exchange tensors of {needed} bytes, but {room}: "
            f"build it with max_bytes={needed}, or plan for fewer tokens"
        )

    # --- the naive plan's single hops -------------------------------------------------------------------------

    def _route(self, operand: int | str, src: Placement, dst: Placement, counts: Counts) -> list[Step]:
        """All-reduce the debt whole, then slice or gather."""
        steps: list[Step] = []
        while src != dst:
            options = [e for e in self.edges.get(src, ()) if e.kind in ("slice", "all_reduce", "all_gatherv")]
            wanted = self.mesh.placement(src.rows) if src.owes else dst
            edge = next((e for e in options if e.dst == wanted), None)
            if edge is None:
                raise PlacementError(f"no single step leads from {src} to {wanted}")
            us, transport = self._edge_us(edge, counts)
            steps.append(Step("move", operand, edge, us=us, transport=transport))
            src = edge.dst
        return steps


def mesh_rows(mesh: Mesh, rows: Rows) -> Rows:
    """Normalised rows."""
    return mesh.placement(rows).rows
