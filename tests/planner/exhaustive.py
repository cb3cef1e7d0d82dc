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
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Literal

from weft.planner.chain import Chain, Read
from weft.planner.cost import AlphaBeta, Network, Offer
from weft.planner.op import NORMED, RESIDUAL, StreamOp
from weft.planner.plan import Plan
from weft.planner.row_formats import Wire
from weft.planner.spec import Mesh, Placement
from weft.stream.formats import Float8

Shares = int
"""Rows, as shares of the world's: bit r is the share of rank r."""
Blocks = tuple[int, ...]
"""A cut of the ranks into groups: each rank's group, by its first rank."""


@dataclass(frozen=True)
class Value:
    """Shares that each rank holds, and the blocks of ranks over which a sum is still missing."""

    held: tuple[Shares, ...]
    owes: Blocks


@dataclass(frozen=True)
class Machine:
    """A transport and what it costs: µs a call and a doubling of the group, bytes/µs; the same of local work.

    fused: whether a summing edge takes residual add and norm along. capacity: bytes of a tensor, if limited;
    norm_capacity: bytes of a row that is normalised along; max_ranks, max_hosts: ranks and hosts of a group. network:
    the first three costs over hosts, with the doublings of a host's ranks.
    """

    name: str
    kinds: frozenset[str]
    fused: bool
    call_us: float
    doubling_us: float
    bytes_us: float
    local_us: float
    local_bytes_us: float
    capacity: int | None = None
    norm_capacity: int | None = None
    max_ranks: int | None = None
    max_hosts: int | None = None
    network: tuple[float, float, float] | None = None

    def offer(self) -> Offer:
        """Return the planner's form of this."""
        cost = AlphaBeta(
            self.name,
            self.call_us,
            self.doubling_us,
            self.bytes_us / 1e3,
            self.local_us,
            self.local_bytes_us / 1e3,
            Network(self.network[0], self.network[1], self.network[2] / 1e3) if self.network else None,
        )
        fused = frozenset(k for k in self.kinds if "reduce" in k) if self.fused else frozenset()
        return Offer(
            self.name, self.kinds, fused, cost, self.capacity, self.norm_capacity, self.max_ranks, self.max_hosts
        )

    def serves(self, ranks: int, hosts: int) -> bool:
        """Return whether it carries exchanges of `ranks` ranks on `hosts` hosts."""
        limits = (ranks, self.max_ranks), (hosts, self.max_hosts)
        return all(limit is None or n <= limit for n, limit in limits)

    def collective(self, ranks: int, hosts: int, received: float) -> float:
        """A collective in which each rank receives `received` bytes; infinite over hosts that nothing joins."""
        call_us, doubling_us, bytes_us = self.call_us, self.doubling_us, self.bytes_us
        if hosts > 1:
            if self.network is None:
                return math.inf
            call_us, doubling_us, bytes_us = self.network
        return call_us + doubling_us * math.log2(ranks / hosts) + received / bytes_us

    def kernel(self, touched: float) -> float:
        """A kernel of a rank's own that goes over `touched` bytes."""
        return self.local_us + touched / self.local_bytes_us


@dataclass(frozen=True)
class Hop:
    """A legal step of one value. received: shares' worth of rows that a rank must receive; 0 ranks: a slice. hosts:
    that the ranks are on. copied: what is received, or sent, lies in another order than that of the ranks.
    """

    kind: str
    ranks: int
    received: float
    src: Value
    dst: Value
    hosts: int = 1
    copied: bool = False


def hosts_of_ranks(mesh: Mesh) -> tuple[int, list[int]]:
    """Return the number of neighbours that go to a host before the next one's turn, and the host of each rank."""
    run, on_host = max(mesh.attn_tp, mesh.moe_tp), mesh.world // mesh.hosts
    if run % mesh.attn_tp or run % mesh.moe_tp or on_host % run:  # hosts take such runs of ranks in turn, if these fit
        run = on_host
    return run, [rank // run % mesh.hosts for rank in range(mesh.world)]


class World:
    """The algebra of placements on one mesh.

    crossing: rows are also gathered and scattered over groups that cross others, as attn_tp 2 crosses hosts of 3 ranks.
    Plans have no such step (docs/design/overview.md).
    """

    def __init__(self, mesh: Mesh, crossing: bool = False):
        self.mesh, self.ranks = mesh, range(mesh.world)
        tp, moe_tp, hosts = mesh.attn_tp, mesh.moe_tp, mesh.hosts
        self.blocks: dict[str, Blocks] = {
            "world": tuple(0 for r in self.ranks),
            "attn_tp": tuple(r - r % tp for r in self.ranks),
            "attn_dp": tuple(r % tp for r in self.ranks),
            "moe_tp": tuple(r - r % moe_tp for r in self.ranks),
            "ep": tuple(r % moe_tp for r in self.ranks),
        }
        self.alone: Blocks = tuple(self.ranks)
        self.only_sum = set[Blocks]()  # groups over which no rows are gathered or scattered
        run, self.host = hosts_of_ranks(mesh)
        if hosts > 1:  # every cut of the ranks that follows from these
            self.blocks["host"] = tuple(self.host.index(h) for h in self.host)
            self.blocks["rail"] = tuple(r - self.host[r] * run for r in self.ranks)
            every = {self.alone, self.blocks["world"]}
            for names in (("attn_tp", "attn_dp"), ("host", "rail"), ("moe_tp", "ep")):
                more = self.closed(every | {self.blocks[name] for name in names})
                if crossing or all(map(self.is_even, more)):  # else they cross those before
                    every = set(filter(self.is_even, more))
                elif "host" in names:
                    del self.blocks["host"], self.blocks["rail"]
            of_rows, self.groups = every, (every | set(self.blocks.values())) - {self.alone}
            self.only_sum = self.groups - every
        else:
            of_rows = {self.alone, self.blocks["attn_tp"], self.blocks["world"]}
            self.groups = set(self.blocks.values()) - {self.alone}
        self.rows = {tuple(sum(1 << p for p in self.members(b, r)) for r in self.ranks) for b in of_rows}
        values = {Value(held, owes) for held in self.rows for owes in (self.alone, *self.groups)}
        self.values = [v for v in values if self.can_be_summed(v)]
        self.hops = {v: list(self.hops_from(v)) for v in self.values}

    def members(self, blocks: Blocks, rank: int) -> list[int]:
        return [r for r in self.ranks if blocks[r] == blocks[rank]]

    def meet(self, a: Blocks, b: Blocks) -> Blocks:
        """The ranks that are together in both."""
        return tuple(min(set(self.members(a, r)) & set(self.members(b, r))) for r in self.ranks)

    def join(self, a: Blocks, b: Blocks) -> Blocks:
        """The ranks that are together in either, and so on."""
        found = list(a)
        for _ in self.ranks:
            found = [min(found[p] for q in (a, b) for p in self.members(q, r)) for r in self.ranks]
        return tuple(found)

    def closed(self, every: set[Blocks]) -> set[Blocks]:
        """Return these cuts, and all that follow from them."""
        while more := {f(a, b) for a in every for b in every for f in (self.meet, self.join)} - every:
            every = every | more
        return every

    def is_even(self, blocks: Blocks) -> bool:
        """Return whether the groups have equally many ranks."""
        return len({len(self.members(blocks, r)) for r in self.ranks}) == 1

    def can_be_summed(self, value: Value) -> bool:
        """Ranks that will be summed hold the same rows."""
        return all(value.held[r] == value.held[value.owes[r]] for r in self.ranks)

    def cut(self, name: str | None) -> Blocks:
        """A cut by the package's name of a group."""
        if name is None:
            return self.alone
        if name in self.blocks:
            return self.blocks[name]
        return tuple(self.mesh.peers(name, r)[0] for r in self.ranks)

    def value(self, placement: Placement) -> Value:
        over = self.cut(placement.rows.over)
        return Value(tuple(sum(1 << p for p in self.members(over, r)) for r in self.ranks), self.cut(placement.owes))

    def hops_from(self, value: Value) -> Iterator[Hop]:
        """Every legal step, by the table of edges in the documentation."""
        have = value.held[0].bit_count()
        wider = {held for held in self.rows if held[0].bit_count() > have}
        fewer = {f for f in self.rows if f != value.held and all(f[r] & ~value.held[r] == 0 for r in self.ranks)}
        for held in fewer:
            if self.can_be_summed(Value(held, value.owes)):
                yield Hop("slice", 0, 0, value, Value(held, value.owes))
        for over in self.groups:
            n, hosts = len(self.members(over, 0)), self.hosts(over)
            for rest in self.left_over(value.owes, over):
                if value.owes != self.alone:
                    yield Hop("all_reduce", n, 2 * have * (n - 1) / n, value, Value(value.held, rest), hosts)
            for held in wider if over not in self.only_sum else ():
                after = Value(held, value.owes)
                if self.joins(value.held, held, over) and self.can_be_summed(after):
                    copied = self.copied(value.held, over, 1)
                    yield Hop("all_gatherv", n, held[0].bit_count() - have, value, after, hosts, copied)
            for held in fewer if over not in self.only_sum else ():
                if self.joins(held, value.held, over):
                    for rest in self.left_over(value.owes, over):
                        if self.can_be_summed(after := Value(held, rest)):
                            received, copied = held[0].bit_count() * (n - 1), self.copied(held, over, 1)
                            yield Hop("reduce_scatterv", n, received, value, after, hosts, copied)
        for inner, outer, both in self.fusible:
            n, span, hosts = len(self.members(both, 0)), len(self.members(inner, 0)), self.hosts(both)
            for held in wider if value.owes == inner else ():
                if self.joins(value.held, held, outer):
                    received = (have / span) * (span - 1) + held[0].bit_count() - have / span
                    copied, after = self.copied(value.held, both, span), Value(held, self.alone)
                    yield Hop("all_reduce+all_gatherv", n, received, value, after, hosts, copied)
            for held in fewer if value.owes == both else ():
                if self.joins(held, value.held, outer) and self.can_be_summed(Value(held, inner)):
                    share = held[0].bit_count() / span
                    received, copied = share * (n - 1) + held[0].bit_count() - share, self.copied(held, both, span)
                    yield Hop("reduce_scatterv+all_reduce", n, received, value, Value(held, self.alone), hosts, copied)

    @cached_property
    def fusible(self) -> list[tuple[Blocks, Blocks, Blocks]]:
        """(inner, outer, both): each block of both is made of neighbouring blocks of inner, over which outer goes."""

        def fits(inner: Blocks, outer: Blocks, both: Blocks) -> bool:
            span = len(self.members(inner, 0))
            for r in self.ranks:
                ranks = self.members(both, r)
                if len(ranks) % span:
                    return False
                runs = [ranks[i : i + span] for i in range(0, len(ranks), span)]
                places = list(map(list, zip(*runs, strict=True)))
                if any(run != self.members(inner, run[0]) for run in runs):
                    return False
                if any(place != self.members(outer, rank) for place in places for rank in place):
                    return False
            return True

        every = itertools.product(self.groups, repeat=3)
        return [(inner, outer, both) for inner, outer, both in every if inner != both and fits(inner, outer, both)]

    def hosts(self, over: Blocks) -> int:
        return max(len({self.host[p] for p in self.members(over, r)}) for r in self.ranks)

    def copied(self, held: tuple[Shares, ...], over: Blocks, span: int) -> bool:
        """Return whether the shares of a group's segments, one after the other, are out of order."""
        for r in self.ranks:
            firsts = self.members(over, r)[::span]
            shares = [bit for first in firsts for bit in self.ranks if held[first] >> bit & 1]
            if shares != sorted(shares):
                return True
        return False

    def joins(self, few: tuple[Shares, ...], many: tuple[Shares, ...], over: Blocks) -> bool:
        """Return whether the rows of each block's ranks, which differ, make up each rank's rows afterwards."""
        for r in self.ranks:
            runs = [few[p] for p in self.members(over, r)]
            if sum(runs) != many[r] or sum(run.bit_count() for run in runs) != many[r].bit_count():
                return False
        return True

    def left_over(self, owes: Blocks, over: Blocks) -> set[Blocks]:
        """Return the blocks still to be summed over after a sum over some: owes = over × rest."""

        def completes(rest: Blocks) -> bool:
            return all(
                sorted(q for p in self.members(over, r) for q in self.members(rest, p)) == self.members(owes, r)
                for r in self.ranks
            )

        return {rest for rest in (self.alone, *self.groups) if completes(rest)}


world = cache(World)


class Prices:
    """Prices of steps with `tokens` in each DP group. slices_copy: the rows of a slice are copied."""

    def __init__(self, mesh: Mesh, chain: Chain, machines: list[Machine], tokens: int, slices_copy: bool):
        self.machines, self.tokens, self.tp, self.slices_copy = machines, tokens, mesh.attn_tp, slices_copy
        self.width, self.row_bytes = chain.width, chain.width * chain.element_bytes

    def tensor(self, value: Value) -> int:
        """Bytes of the largest rank's tensor."""
        return self.rows(value) * self.row_bytes

    def rows(self, value: Value) -> int:
        """Return the rows of the largest rank's tensor: a group's first ranks have one more if tokens do not divide."""
        held, ranks = value.held[0], range(value.held[0].bit_length())
        return sum(-(-(self.tokens - r % self.tp) // self.tp) for r in ranks if held >> r & 1)

    def eight(self, wire: Wire) -> int:
        """Bytes of a row in FP8: a byte an element, and four for each run of as many as share a scale."""
        assert isinstance(wire.format, Float8)
        return self.width + 4 * math.ceil(self.width / wire.format.group)

    def on_wire(self, wire: Wire) -> int:
        """Return the bytes of a row in FP8 on the wire: with its extra columns, in units of 16."""
        return 16 * math.ceil((self.eight(wire) + wire.extra) / 16)

    def quantise(self, value: Value, wire: Wire, with_norm: bool) -> float:
        """A kernel that reads the rows and writes them in FP8; the norm's kernel only writes more."""
        first, made = self.machines[0], self.rows(value) * self.eight(wire)
        return made / first.local_bytes_us if with_norm else first.kernel(self.tensor(value) + made)

    def pack(self, value: Value, wire: Wire, with_norm: bool) -> float:
        """And another that lays them out."""
        return self.quantise(value, wire, with_norm) + self.unpack(value, wire, 1)

    def unpack(self, value: Value, wire: Wire, kernels: int = 0) -> float:
        """A kernel for values, scales, and extra columns."""
        first, kernels = self.machines[0], kernels or 2 + (wire.extra > 0)
        touched = self.rows(value) * (self.eight(wire) + self.on_wire(wire))
        return first.kernel(touched) + (kernels - 1) * first.kernel(0)

    def local(self, tensors: int, value: Value) -> float:
        """A kernel of a rank's own that goes over `tensors` tensors. The first machine says what that takes."""
        return self.machines[0].kernel(tensors * self.tensor(value))

    def hop(self, hop: Hop, by: Machine, finish: bool = False, wire: Wire | None = None) -> float:
        """A step by a machine; infinite where it cannot. Finish reads delta and residual, writes residual and norm.

        wire: how rows are written down that travel; only a gather can take them so.
        """
        row_bytes = self.on_wire(wire) if wire else self.row_bytes
        if wire and hop.kind != "all_gatherv":
            return math.inf
        if hop.kind == "slice":
            return math.inf if finish else self.slice(hop)
        if hop.kind not in by.kinds or (finish and not (by.fused and "reduce" in hop.kind)):
            return math.inf
        if finish and by.norm_capacity is not None and self.row_bytes > by.norm_capacity:
            return math.inf
        if by.capacity is not None and max(self.rows(hop.src), self.rows(hop.dst)) * row_bytes > by.capacity:
            return math.inf
        if not by.serves(hop.ranks, hop.hosts):
            return math.inf
        us = by.collective(hop.ranks, hop.hosts, hop.received * self.tokens / self.tp * row_bytes)
        copied = 2 * max(self.rows(hop.src), self.rows(hop.dst)) * row_bytes
        us += self.machines[0].kernel(copied) if hop.copied else 0.0
        return us + (4 * self.tensor(hop.dst) / by.local_bytes_us if finish else 0.0)

    def slice(self, hop: Hop) -> float:
        """A view takes nothing, a copy reads its rows and writes them."""
        return self.local(2, hop.dst) if self.slices_copy else 0.0

    def norm(self, value: Value, added: bool) -> float:
        """Reads and writes the residual; right after an addition to it, one kernel does both: it reads two tensors,
        writes two, and the addition alone was paid.
        """
        return self.local(4, value) - self.local(3, value) if added else self.local(2, value)

    def best(self, hop: Hop, finish: bool = False, wire: Wire | None = None) -> float:
        return min(self.hop(hop, m, finish, wire) for m in self.machines)


@dataclass(frozen=True)
class State:
    """Inside a read: the residual (None before the first delta), deltas not yet added, the normalised value.

    added: the last step was an addition to the residual. fresh: it was the norm. written: how the normalised rows are:
    as they are, on the wire in the readers' format, or as the readers take them.
    """

    residual: Value | None
    pending: tuple[Value, ...]
    normed: Value | None = None
    added: bool = False
    fresh: bool = False
    written: Literal["plain", "wire", "taken"] = "plain"


def following(state: State, w: World, prices: Prices, read: Read) -> Iterator[tuple[float, State]]:
    """Every state that one legal step leads to, and what the step takes."""
    residual, pending, wire, at = state.residual, state.pending, read.wire, state.normed
    if at is not None:
        if state.written == "taken":
            return
        for hop in w.hops[at]:
            us = prices.best(hop, wire=wire if state.written == "wire" else None)
            yield us, State(residual, pending, hop.dst, written=state.written)
        if wire and state.written == "wire":
            yield prices.unpack(at, wire), State(residual, pending, at, written="taken")
        elif wire:
            yield prices.quantise(at, wire, state.fresh), State(residual, pending, at, written="taken")
            if not read.plain:
                yield prices.pack(at, wire, state.fresh), State(residual, pending, at, written="wire")
        return
    for i, delta in enumerate(pending):
        others = pending[:i] + pending[i + 1 :]
        for hop in w.hops[delta]:
            yield prices.best(hop), State(residual, (*others, hop.dst))
            if not others and residual is not None and hop.dst == residual and read.normed:
                yield prices.best(hop, finish=True), State(residual, (), residual, fresh=True)
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
            us = prices.norm(residual, state.added) if read.normed else 0.0
            yield us, State(residual, (), residual, fresh=read.normed)


def minimum(
    mesh: Mesh, chain: Chain, machines: list[Machine], tokens: int, slices_copy: bool, crossing: bool = False
) -> float:
    """The least time of all plans; infinite where there is none. Goes through the states in order of their time."""
    w, prices = world(mesh, crossing), Prices(mesh, chain, machines, tokens, slices_copy)
    ends: dict[Value | None, float] = {None: 0.0}
    for read in chain.reads:
        before, ends = ends, {}
        target, tie = w.value(read.target), itertools.count()
        for residual, us in before.items():
            heap = [(us, next(tie), State(residual, tuple(w.value(d) for d in read.deltas)))]
            seen: set[object] = set()
            while heap:
                us, _, state = heapq.heappop(heap)
                same = frozenset((v, state.pending.count(v)) for v in state.pending)
                if (known := (replace(state, pending=()), same)) in seen:
                    continue
                seen.add(known)
                if state.normed == target and state.written == ("taken" if read.wire else "plain"):
                    ends[state.residual] = min(us, ends.get(state.residual, math.inf))
                for more, after in following(state, w, prices, read):
                    if more < math.inf:
                        heapq.heappush(heap, (us + more, next(tie), after))
    return min(ends.values(), default=math.inf)


def price(plan: Plan, machines: list[Machine], slices_copy: bool = False) -> float:
    """Return the price of a plan, step by step, on its transports. Fails if a step is not legal."""
    w = world(plan.mesh)
    prices = Prices(plan.mesh, plan.chain, machines, plan.counts[0], slices_copy)
    by_name = {m.name: m for m in machines}
    residual: Value | None = None
    us = 0.0

    def hop(step: StreamOp) -> Hop:
        assert step.edge is not None
        ends = (w.value(step.edge.src), w.value(step.edge.dst))
        ranks = plan.mesh.size(step.edge.group) if step.edge.moves else 0
        [found] = [h for h in w.hops[ends[0]] if (h.kind, h.ranks, h.dst) == (step.edge.kind, ranks, ends[1])]
        return found

    for read_plan in plan.reads:
        pending, normed, added = [w.value(d) for d in read_plan.read.deltas], None, False
        fresh, written, wire = False, "plain", read_plan.read.wire
        for step in read_plan.steps:
            after_sum, added, after_norm, fresh = added, False, fresh, step.op in ("norm", "finish")
            if step.op in ("move", "finish"):
                taken, finish = hop(step), step.op == "finish"
                slices = taken.kind == "slice"
                sent = wire if written == "wire" else None
                assert step.edge is not None and step.edge.src.wire == step.edge.dst.wire == sent
                us += prices.hop(taken, machines[0] if slices else by_name[step.transport], finish, sent)
                if finish:
                    assert read_plan.read.normed and pending == [taken.src] and residual == taken.dst
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
            elif step.op in ("norm", "read"):
                assert residual is not None and not pending and read_plan.read.normed == (step.op == "norm")
                us, normed = us + (prices.norm(residual, after_sum) if step.op == "norm" else 0.0), residual
            elif step.op in ("quantise", "pack"):
                assert normed is not None and wire == step.wire and written == "plain"
                written = "taken" if step.op == "quantise" else "wire"
                assert written == "taken" or not read_plan.read.plain
                us += (prices.quantise if written == "taken" else prices.pack)(normed, wire, after_norm)
            elif step.op == "unpack":
                assert normed is not None and wire == step.wire and written == "wire"
                us, written = us + prices.unpack(normed, wire), "taken"
            else:
                delta = pending.pop(step.operand)
                if step.op == "merge":
                    assert delta == pending[step.into]
                    us += prices.local(3, delta)
                else:
                    assert delta.owes == w.alone and residual in (None, delta)
                    us, added = us + (prices.local(3, delta) if residual else 0.0), residual is not None
                    residual = delta
        assert normed == w.value(read_plan.read.target) and not pending and (written == "taken") == bool(wire)
    return us
