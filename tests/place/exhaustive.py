"""The cheapest plan by trying everything: an oracle for the planner that shares nothing with it.

Placements, legal steps and prices are written down here once more, from the documentation, rank by rank: a value is a
set of row shares on each rank, and the blocks of ranks over which it is still to be summed. Of the package only the
names in a chain and in a plan's steps are read.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from weft.place.cost import AlphaBeta, Offer
from weft.place.plan import Chain, Plan
from weft.place.spec import Mesh, Placement
from weft.place.step import NORMED, RESIDUAL, Step

Shares = int
"""Rows, as shares of the world's: bit r is the share of rank r."""
Blocks = tuple[int, ...]
"""A cut of the ranks into groups: each rank's group, by its first rank."""


@dataclass(frozen=True)
class Value:
    """Which shares each rank holds, and over which blocks of ranks a sum is still missing."""

    held: tuple[Shares, ...]
    owes: Blocks


@dataclass(frozen=True)
class Machine:
    """A transport and what it costs: µs a call and a doubling of the group, bytes/µs; the same of local work.

    fused: whether a summing edge takes residual add and norm along. room: bytes of a tensor, if limited; norm_room: of
    a row that is normalised along.
    """

    name: str
    kinds: frozenset[str]
    fused: bool
    call_us: float
    doubling_us: float
    bytes_us: float
    local_us: float
    local_bytes_us: float
    room: int | None = None
    norm_room: int | None = None

    def offer(self) -> Offer:
        """The same as the planner takes it."""
        cost = AlphaBeta(
            self.name,
            self.call_us,
            self.doubling_us,
            self.bytes_us / 1e3,
            self.local_us,
            self.local_bytes_us / 1e3,
        )
        fused = frozenset(k for k in self.kinds if "reduce" in k) if self.fused else frozenset()
        return Offer(self.name, self.kinds, fused, cost, self.room, self.norm_room)


@dataclass(frozen=True)
class Hop:
    """A legal step of one value. received: shares' worth of rows that a rank must receive; 0 ranks: a slice."""

    kind: str
    ranks: int
    received: float
    src: Value
    dst: Value


class World:
    """The algebra of placements on one mesh."""

    def __init__(self, mesh: Mesh):
        self.mesh, self.ranks = mesh, range(mesh.world)
        tp, moe_tp = mesh.attn_tp, mesh.moe_tp
        self.blocks: dict[str, Blocks] = {
            "world": tuple(0 for r in self.ranks),
            "attn_tp": tuple(r - r % tp for r in self.ranks),
            "attn_dp": tuple(r % tp for r in self.ranks),
            "moe_tp": tuple(r - r % moe_tp for r in self.ranks),
            "ep": tuple(r % moe_tp for r in self.ranks),
        }
        self.alone: Blocks = tuple(self.ranks)
        self.rows: dict[str, tuple[Shares, ...]] = {
            "OWN": tuple(1 << r for r in self.ranks),
            "GROUP": tuple(sum(1 << p for p in self.members(self.blocks["attn_tp"], r)) for r in self.ranks),
            "WORLD": tuple((1 << mesh.world) - 1 for r in self.ranks),
        }
        values = {Value(held, owes) for held in self.rows.values() for owes in (self.alone, *self.blocks.values())}
        self.values = [v for v in values if self.can_be_summed(v)]
        self.hops = {v: list(self.hops_from(v)) for v in self.values}

    def members(self, blocks: Blocks, rank: int) -> list[int]:
        return [r for r in self.ranks if blocks[r] == blocks[rank]]

    def can_be_summed(self, value: Value) -> bool:
        """Ranks that will be summed hold the same rows."""
        return all(value.held[r] == value.held[value.owes[r]] for r in self.ranks)

    def value(self, placement: Placement) -> Value:
        return Value(self.rows[placement.rows.name], self.blocks[placement.owes] if placement.owes else self.alone)

    def hops_from(self, value: Value) -> Iterator[Hop]:
        """Every legal step, by the table of edges in the documentation."""
        have = value.held[0].bit_count()
        wider = {held for held in self.rows.values() if held[0].bit_count() > have}
        fewer = {held for held in self.rows.values() if held[0].bit_count() < have}
        if value.owes != self.alone:
            n = len(self.members(value.owes, 0))
            yield Hop("all_reduce", n, 2 * have * (n - 1) / n, value, Value(value.held, self.alone))
        for held in fewer:
            if self.can_be_summed(Value(held, value.owes)):
                yield Hop("slice", 0, 0, value, Value(held, value.owes))
        for over in {b for b in self.blocks.values() if b != self.alone}:
            n = len(self.members(over, 0))
            for held in wider:
                after = Value(held, value.owes)
                if self.joins(value.held, held, over) and self.can_be_summed(after):
                    yield Hop("all_gatherv", n, held[0].bit_count() - have, value, after)
            for held in fewer:
                if self.joins(held, value.held, over):
                    for rest in self.left_over(value.owes, over):
                        if self.can_be_summed(after := Value(held, rest)):
                            yield Hop("reduce_scatterv", n, held[0].bit_count() * (n - 1), value, after)
        dp, tp, world = self.mesh.attn_dp, self.mesh.attn_tp, self.mesh.world
        if dp > 1 and tp > 1:
            everything, group = self.rows["WORLD"], self.rows["GROUP"]
            if value == Value(group, self.blocks["attn_tp"]):
                yield Hop("all_reduce+all_gatherv", world, tp - 1 + world - 1, value, Value(everything, self.alone))
            if value == Value(everything, self.blocks["world"]):
                yield Hop("reduce_scatterv+all_reduce", world, world - 1 + tp - 1, value, Value(group, self.alone))

    def joins(self, few: tuple[Shares, ...], many: tuple[Shares, ...], over: Blocks) -> bool:
        """Whether the rows of each block's ranks, which differ, make up the rows that each of them has then."""
        for r in self.ranks:
            runs = [few[p] for p in self.members(over, r)]
            if sum(runs) != many[r] or sum(run.bit_count() for run in runs) != many[r].bit_count():
                return False
        return True

    def left_over(self, owes: Blocks, over: Blocks) -> set[Blocks]:
        """What is still to be summed over, once it was summed over some blocks: owes = over × rest."""

        def completes(rest: Blocks) -> bool:
            return all(
                sorted(q for p in self.members(over, r) for q in self.members(rest, p)) == self.members(owes, r)
                for r in self.ranks
            )

        return {rest for rest in (self.alone, *self.blocks.values()) if completes(rest)}


world = cache(World)


class Prices:
    """What steps take, with `tokens` in each DP group. slices_copy: the rows of a slice are copied."""

    def __init__(self, mesh: Mesh, chain: Chain, machines: list[Machine], tokens: int, slices_copy: bool):
        self.machines, self.tokens, self.tp, self.slices_copy = machines, tokens, mesh.attn_tp, slices_copy
        self.row_bytes = chain.width * chain.element_bytes

    def tensor(self, value: Value) -> int:
        """Bytes of the largest rank's tensor; where a group's tokens do not divide, its first ranks have one more."""
        shares = value.held[0].bit_count()
        rows = shares // self.tp * self.tokens if shares >= self.tp else -(-self.tokens // self.tp)
        return rows * self.row_bytes

    def local(self, tensors: int, value: Value) -> float:
        """A kernel of a rank's own that goes over so many tensors. The first machine says what that takes."""
        first = self.machines[0]
        return first.local_us + tensors * self.tensor(value) / first.local_bytes_us

    def hop(self, hop: Hop, by: Machine, finish: bool = False) -> float:
        """A step by a machine; infinite where it cannot. Finish reads delta and residual, writes residual and norm."""
        if hop.kind == "slice":
            return math.inf if finish else self.slice(hop)
        if hop.kind not in by.kinds or (finish and not (by.fused and "reduce" in hop.kind)):
            return math.inf
        if finish and by.norm_room is not None and self.row_bytes > by.norm_room:
            return math.inf
        if by.room is not None and max(self.tensor(hop.src), self.tensor(hop.dst)) > by.room:
            return math.inf
        moved = hop.received * self.tokens / self.tp * self.row_bytes
        us = by.call_us + by.doubling_us * math.log2(hop.ranks) + moved / by.bytes_us
        return us + (4 * self.tensor(hop.dst) / by.local_bytes_us if finish else 0.0)

    def slice(self, hop: Hop) -> float:
        """A view takes nothing, a copy reads its rows and writes them."""
        return self.local(2, hop.dst) if self.slices_copy else 0.0

    def norm(self, value: Value, added: bool) -> float:
        """Reads and writes the residual; right after an addition to it, one kernel does both: it reads two tensors,
        writes two, and the addition alone was paid.
        """
        return self.local(4, value) - self.local(3, value) if added else self.local(2, value)

    def best(self, hop: Hop, finish: bool = False) -> float:
        return min(self.hop(hop, m, finish) for m in self.machines)


@dataclass(frozen=True)
class State:
    """Inside a read: the residual (None before the first delta), deltas not yet added, the normalised value.

    added: the last step was an addition to the residual.
    """

    residual: Value | None
    pending: tuple[Value, ...]
    normed: Value | None = None
    added: bool = False


def following(state: State, w: World, prices: Prices) -> Iterator[tuple[float, State]]:
    """Every state that one legal step leads to, and what the step takes."""
    residual, pending = state.residual, state.pending
    if state.normed is not None:
        for hop in w.hops[state.normed]:
            yield prices.best(hop), State(residual, pending, hop.dst)
        return
    for i, delta in enumerate(pending):
        others = pending[:i] + pending[i + 1 :]
        for hop in w.hops[delta]:
            yield prices.best(hop), State(residual, (*others, hop.dst))
            if not others and residual is not None and hop.dst == residual:
                yield prices.best(hop, finish=True), State(residual, (), residual)
        if delta in others:
            yield prices.local(3, delta), State(residual, others)
        if delta.owes == w.alone and residual in (None, delta):
            if residual is None:
                yield 0.0, State(delta, others)
            else:
                yield prices.local(3, delta), State(delta, others, added=True)
    if residual is not None:
        for hop in w.hops[residual]:
            yield prices.best(hop), State(hop.dst, pending)
        if not pending:
            yield prices.norm(residual, state.added), State(residual, (), residual)


def least(mesh: Mesh, chain: Chain, machines: list[Machine], tokens: int, slices_copy: bool) -> float:
    """The least time of all plans; infinite where there is none. Goes through the states in order of their time."""
    w, prices = world(mesh), Prices(mesh, chain, machines, tokens, slices_copy)
    ends: dict[Value | None, float] = {None: 0.0}
    for read in chain.reads:
        before, ends = ends, {}
        target, tie = w.value(read.target), itertools.count()
        for residual, us in before.items():
            heap = [(us, next(tie), State(residual, tuple(w.value(d) for d in read.deltas)))]
            seen: set[tuple[Value | None, frozenset[tuple[Value, int]], Value | None, bool]] = set()
            while heap:
                us, _, state = heapq.heappop(heap)
                same = frozenset((v, state.pending.count(v)) for v in state.pending)
                if (known := (state.residual, same, state.normed, state.added)) in seen:
                    continue
                seen.add(known)
                if state.normed == target:
                    ends[state.residual] = min(us, ends.get(state.residual, math.inf))
                for more, after in following(state, w, prices):
                    if more < math.inf:
                        heapq.heappush(heap, (us + more, next(tie), after))
    return min(ends.values(), default=math.inf)


def price(plan: Plan, machines: list[Machine], slices_copy: bool = False) -> float:
    """What a plan takes, step by step, by whom it names. Fails where a step is not legal."""
    w = world(plan.mesh)
    prices = Prices(plan.mesh, plan.chain, machines, plan.counts[0], slices_copy)
    by_name = {m.name: m for m in machines}
    residual: Value | None = None
    us = 0.0

    def hop(step: Step) -> Hop:
        assert step.edge is not None
        ends = (w.value(step.edge.src), w.value(step.edge.dst))
        [found] = [h for h in w.hops[ends[0]] if (h.kind, h.dst) == (step.edge.kind, ends[1])]
        return found

    for read_plan in plan.reads:
        pending, normed, added = [w.value(d) for d in read_plan.read.deltas], None, False
        for step in read_plan.steps:
            after_sum, added = added, False
            if step.op in ("move", "finish"):
                taken, finish = hop(step), step.op == "finish"
                slices = taken.kind == "slice"
                us += prices.hop(taken, machines[0] if slices else by_name[step.transport], finish)
                if finish:
                    assert pending == [taken.src] and residual == taken.dst
                    pending, normed = [], residual
                elif step.operand == RESIDUAL:
                    assert residual == taken.src and normed is None
                    residual = taken.dst
                elif step.operand == NORMED:
                    assert normed == taken.src
                    normed = taken.dst
                else:
                    assert pending[step.operand] == taken.src
                    pending[step.operand] = taken.dst
            elif step.op == "norm":
                assert residual is not None and not pending
                us, normed = us + prices.norm(residual, after_sum), residual
            else:
                delta = pending.pop(step.operand)
                if step.op == "merge":
                    assert delta == pending[step.into]
                    us += prices.local(3, delta)
                else:
                    assert delta.owes == w.alone and residual in (None, delta)
                    us, added = us + (prices.local(3, delta) if residual else 0.0), residual is not None
                    residual = delta
        assert normed == w.value(read_plan.read.target) and not pending
    return us
