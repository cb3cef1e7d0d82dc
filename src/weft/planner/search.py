"""Exact search for the cheapest steps that serve one read.

Steps on different values commute, so a plan is determined by the sets of deltas that are summed, and where, before the
residual absorbs them. The cheapest sum of a set of deltas in some placement is either moved there, or joined there from
the sums of two smaller sets: the Steiner trees of Dreyfus and Wagner (doi:10.1002/net.3230010302). The residual absorbs
such sums between its own moves, the last of them perhaps in a `finish`. This is exact for all costs that are not
negative, and costs O(3ⁿ) for n deltas of different placements; deltas of equal placements only count once.
"""

from __future__ import annotations

import heapq
import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from weft.planner.op import NORMED, RESIDUAL, StreamOp
from weft.planner.spec import Placement

Deltas = tuple[int, ...]
"""Set of a read's deltas: how many of each placement."""


@dataclass(frozen=True, slots=True)
class SearchGraph:
    """All legal steps with their prices; placements have numbers."""

    placements: tuple[Placement, ...]
    moves: tuple[tuple[tuple[int, StreamOp], ...], ...]  # by start placement: (end placement, step)
    finishes: tuple[tuple[tuple[int, StreamOp], ...], ...]  # by start placement: (end placement, step)
    merge: tuple[StreamOp, ...]  # by the placement of the rows
    absorb: tuple[StreamOp, ...]  # by the placement of the rows
    norm: tuple[StreamOp, ...]  # by the placement of the rows; `read` of a read without a norm
    norm_of_sum: tuple[StreamOp, ...]  # norm right after an absorb, by placement


Moves = Sequence[Sequence[tuple[int, StreamOp]]]
"""Steps by the number where they start, each with the number where it ends."""


class Delivery:
    """Cheapest steps from a normalised value in any placement to the value that its readers require.

    Args:
        moves: steps of the value, by the graph's placement numbers and further numbers after them.
        goal: number of the readers' value.
        with_norm: steps that a norm's kernel includes, and where they end, by the placement that is normalised.
    """

    def __init__(self, moves: Moves, goal: int, with_norm: Mapping[int, Sequence[tuple[int, StreamOp]]]):
        self._goal, self._with_norm = goal, with_norm
        into: dict[int, list[tuple[int, StreamOp]]] = {}
        for src, steps in enumerate(moves):
            for dst, step in steps:
                into.setdefault(dst, []).append((src, step))
        self._best: dict[int, tuple[float, int]] = {goal: (0.0, 0)}
        self._first: dict[int, tuple[StreamOp, int]] = {}
        done, heap = set[int](), [(0.0, 0, goal)]
        while heap:
            us, length, at = heapq.heappop(heap)
            if at in done:
                continue
            done.add(at)
            for src, step in into.get(at, ()):
                cost = us + step.us, length + 1
                if src not in done and (src not in self._best or cost < self._best[src]):
                    self._best[src], self._first[src] = cost, (step, at)
                    heapq.heappush(heap, (*cost, src))
        self._known: dict[int, tuple[StreamOp, ...] | None] = {}

    def steps(self, normed: int) -> tuple[StreamOp, ...] | None:
        """Return the steps after the norm on a placement; None if none lead to the goal."""
        if normed not in self._known:
            starts: list[tuple[tuple[float, int], int, StreamOp | None]] = []
            if normed in self._best:
                starts.append((self._best[normed], normed, None))
            for at, step in self._with_norm.get(normed, ()):
                if at in self._best:
                    us, length = self._best[at]
                    starts.append(((us + step.us, length + 1), at, step))
            self._known[normed] = self._follow(*min(starts, key=lambda s: s[0])[1:]) if starts else None
        return self._known[normed]

    def _follow(self, at: int, begin: StreamOp | None) -> tuple[StreamOp, ...]:
        steps = [] if begin is None else [begin]
        while at != self._goal:
            step, at = self._first[at]
            steps.append(step)
        return tuple(steps)


class SearchNode(NamedTuple):
    """Cheapest steps found so far that make a value: the last step, and the nodes of its operands.

    Of nodes with equal times the one with fewer steps is kept.
    """

    us: float  # time of all steps
    length: int  # number of all steps
    step: StreamOp | None = None
    after: tuple[SearchNode, ...] = ()
    given: int = -1  # without a step: number of the placement of the delta to begin with; -1 for the residual


Nodes = dict[int, SearchNode]
"""Node of a value in each reachable placement."""


def _within(of: Deltas) -> Iterator[Deltas]:
    """Yield all sets of deltas within `of`, each after its subsets."""
    return itertools.product(*(range(n + 1) for n in of))


def _improve(nodes: Nodes, at: int, step: StreamOp, *after: SearchNode) -> None:
    """Keep the node that does `step` after `after`, if it is better than the one found before."""
    us, length = step.us, 1
    for node in after:
        us, length = us + node.us, length + node.length
    found = nodes.get(at)
    if found is None or us < found.us or (us == found.us and length < found.length):
        nodes[at] = SearchNode(us, length, step, after)


def _cost(node: SearchNode) -> tuple[float, int]:
    return node.us, node.length


def _better(one: Nodes, other: Nodes) -> Nodes:
    """Return the better of two nodes of a value, in each placement."""
    return {at: min((nodes[at] for nodes in (one, other) if at in nodes), key=_cost) for at in one | other}


def _spread(begin: Nodes, graph: SearchGraph) -> Nodes:
    """Return the nodes of a value in all placements that moves lead to (Dijkstra's algorithm)."""
    best, done = dict(begin), set[int]()
    heap = [(node.us, node.length, at) for at, node in best.items()]
    heapq.heapify(heap)
    while heap:
        at = heapq.heappop(heap)[2]
        if at in done:
            continue
        done.add(at)
        for to, step in graph.moves[at]:
            if to not in done:
                before = best.get(to)
                _improve(best, to, step, best[at])
                if best[to] is not before:
                    heapq.heappush(heap, (best[to].us, best[to].length, to))
    return best


class Sums:
    """Nodes of the sum of each set of a read's deltas, in each placement. deltas: numbers of placements."""

    def __init__(self, deltas: Sequence[int], graph: SearchGraph):
        kinds = tuple(dict.fromkeys(deltas))
        self.deltas, self.graph = tuple(deltas), graph
        self.all: Deltas = tuple(self.deltas.count(kind) for kind in kinds)
        self.parts = {
            chosen: [(part, tuple(map(operator.sub, chosen, part))) for part in _within(chosen) if any(part)]
            for chosen in _within(self.all)
        }
        self.nodes: dict[Deltas, Nodes] = {}
        for chosen, parts in self.parts.items():
            nodes: Nodes = {}
            if sum(chosen) == 1:
                single_kind = kinds[chosen.index(1)]
                nodes[single_kind] = SearchNode(0.0, 0, given=single_kind)
            for part, rest in parts:
                if part <= rest:
                    others = self.nodes[rest]
                    for at, node in self.nodes[part].items():
                        if at in others:
                            _improve(nodes, at, graph.merge[at], node, others[at])
            self.nodes[chosen] = _spread(nodes, graph)

    def serve(self, residual: int | None, delivery: Delivery) -> Nodes:
        """Return the node of the readers' value, by the placement of the residual after the read.

        residual: its placement before; None if the first delta becomes the residual.
        """
        graph = self.graph
        absorbed: dict[Deltas, Nodes] = {}  # the residual, once it has absorbed a set of deltas
        for chosen, parts in self.parts.items():
            begun: Nodes = {}
            if residual is not None and not parts:
                begun[residual] = SearchNode(0.0, 0)
            if residual is None and parts:
                for at, delta in self.nodes[chosen].items():
                    if graph.placements[at].owes is None:
                        _improve(begun, at, replace(graph.absorb[at], us=0.0), delta)
            added: Nodes = {}
            for part, before in parts:
                deltas = self.nodes[part]
                for at, kept in absorbed[before].items():
                    if at in deltas:
                        _improve(added, at, graph.absorb[at], kept, deltas[at])
            absorbed[chosen] = _spread(_better(begun, added), graph)
        normed: Nodes = {}
        for at, kept in absorbed[self.all].items():
            _improve(normed, at, graph.norm[at], kept)
        for at, kept in added.items():  # of all deltas, which come last
            _improve(normed, at, graph.norm_of_sum[at], kept)
        for part, before in self.parts[self.all]:
            for src, delta in self.nodes[part].items():
                for at, step in graph.finishes[src]:
                    if at in absorbed[before]:
                        _improve(normed, at, step, absorbed[before][at], delta)
        nodes: Nodes = {}
        for end, node in normed.items():
            if (steps := delivery.steps(end)) is not None:
                for step in steps:
                    node = SearchNode(node.us + step.us, node.length + 1, step, (node,))
                nodes[end] = node
        return nodes

    def steps(self, node: SearchNode) -> tuple[StreamOp, ...]:
        """Return the steps of a node of `serve` in order, with the indices that deltas have by then."""
        live = list(range(len(self.deltas)))
        unused = list(live)
        written: list[StreamOp] = []

        def write(node: SearchNode) -> int | str:
            """Write the steps; return the result: a delta by its number in the read, RESIDUAL or NORMED."""
            if node.step is None:
                if node.given < 0:
                    return RESIDUAL
                return unused.pop(next(i for i, n in enumerate(unused) if self.deltas[n] == node.given))
            step, values = node.step, [write(before) for before in node.after]
            value = values[-1]
            if isinstance(value, str):  # moved or normalised
                written.append(replace(step, operand=value))
                return NORMED if step.op in ("norm", "read") else value
            if step.op == "merge":
                first, value = sorted(v for v in values if isinstance(v, int))
                step = replace(step, into=live.index(first))
            written.append(replace(step, operand=live.index(value)))
            if step.op not in ("merge", "absorb", "finish"):
                return value
            live.remove(value)
            return first if step.op == "merge" else NORMED if step.op == "finish" else RESIDUAL

        write(node)
        return tuple(written)
