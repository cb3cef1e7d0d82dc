"""What a rank's steps exchanged, and what the naive plan would have exchanged in their place."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import torch

from weft.engine.worker.graph_inputs import Shape
from weft.planner.chain import Counts
from weft.planner.op import BlockOp
from weft.planner.plan import Plan, Planner
from weft.planner.recipes import Merge
from weft.planner.show import fold
from weft.stream.block_exchanges import BlockExchanges
from weft.stream.stats import Stats, StepKey, StepStat, StepTimes

MAX_COUNTS = 4096
"""How many different counts are kept before they are added up, so that they take no more memory with every step."""


class RunStats:
    """The counts of one rank.

    planner: of eager steps. exchanges: those inside blocks, which count themselves. device: the rank's.

    Attributes:
        timing_interval: of so many eager steps, the collectives of one are timed.
        graph_planner: of the plans of graphs.
        graph_seconds: by rows of a graph in each DP group, seconds of its exchanges, each alone.
    """

    timing_interval = 16

    def __init__(self, planner: Planner, exchanges: BlockExchanges, device: torch.device):
        self._planner, self._exchanges, self._device = planner, exchanges, device
        self.graph_planner = planner
        self.graph_seconds: Mapping[int, dict[StepKey, float]] = {}
        self.forget()

    def forget(self) -> None:
        """Clears all counts."""
        self._stats, self._naive, self._times = Stats(), Stats(), StepTimes(self._device)
        self.steps: Counter[tuple[Counts, int | None]] = Counter()  # since the totals were last worked out
        self._exchanges.ran.clear()
        self._eager = 0

    def times(self) -> StepTimes | None:
        """Where the next eager step is to be timed."""
        return self._times if self._eager % self.timing_interval == 0 else None

    def ran(self, counts: Counts, graph_rows: int | None = None, steps: int = 1) -> None:
        """Steps of these counts ran, eagerly or by a graph of so many rows in each DP group."""
        self.steps[counts, graph_rows] += steps
        self._eager += steps if graph_rows is None else 0
        if len(self.steps) == MAX_COUNTS:
            self._count()

    def report(self) -> list[StepStat]:
        """What ran since the start, in the order of a step."""
        self._count()
        return self._in_order(self._stats.table(self._times))

    def naive_report(self) -> list[StepStat]:
        """What the naive plan would have moved for the same steps; seconds are those of replayed graphs alone."""
        self._count()
        return self._in_order(self._naive.table())

    def graph_plan(self, rows: int) -> Plan:
        """Of a graph of so many rows in each DP group."""
        return self.graph_planner.plan((rows,) * self._exchanges.mesh.attn_dp)

    def moves(self, counts: Counts, shape: Shape | None) -> list[tuple[str, str, str, int]]:
        """The collectives of a step, in order: the read that each serves, its step, its group's name, and the bytes
        that the busiest rank receives; where the vocabulary is split, of rows that take their best token, and without
        a graph, of a step without prompts. shape: of the graph that is replayed, if any.
        """
        plan = self._planner.plan(counts) if shape is None else self.graph_plan(shape.rows)
        rows = counts[self._exchanges.mesh.group_of(self._exchanges.rank)]
        capacity, sampled = (rows, rows) if shape is None else (shape.rows, shape.sampled)
        found: list[tuple[str, str, str, int]] = []
        for site, op in plan.ops(asked=False):
            if op.by_counts:
                calls = [(str(op), self._planner.received(op, counts))]
            elif op.packed:
                calls = op.named_calls(min(sampled, 1), 1)
                calls = [(name, moved * sampled // max(plan.counts)) for name, moved in calls]
            else:
                calls = op.named_calls(capacity, rows)
            found += [(site, name, op.group, moved) for name, moved in calls]
        return found

    def _in_order(self, found: list[StepStat]) -> list[StepStat]:
        order = {fold(read.site): at for at, read in reversed([*enumerate(self._planner.chain.reads)])}
        return sorted(found, key=lambda stat: order[stat.site])

    def _count(self) -> None:
        """Adds the steps to the totals."""
        for (counts, rows), steps in self.steps.items():
            planner, capacity = self._planner, counts
            alone: tuple[dict[StepKey, float], ...] = ()
            if rows is not None:
                planner, capacity, alone = self.graph_planner, (rows,) * len(counts), (self.graph_seconds[rows],)
            self._stats.record(planner, planner.plan(capacity), counts, steps, *alone)
            self._naive.record(planner, planner.naive(capacity), counts, steps, *alone)
        self.steps.clear()
        for (site, op), (calls, moved, seconds, predicted) in self._exchanges.ran.items():
            self._stats.add(site, op, calls, moved, seconds, predicted)
            self._add_naively(site, op, calls, moved)
        self._exchanges.ran.clear()

    def _add_naively(self, site: str, op: BlockOp, calls: int, moved: int) -> None:
        """Counts calls of eager steps as the naive plan merges attention; vocabularies as they are."""
        naive = op
        if isinstance(op.value, Merge) and self._planner.choice != "naive":
            naive = self._planner.blocks.naive(op.value, op.group, op.rows)
            moved = round(moved * naive.bytes / op.bytes) if op.bytes else calls * naive.bytes
        us = naive.us if naive.us < math.inf else 0.0
        self._naive.add(site, naive, calls, moved, 0.0, calls * us / 1e6)
