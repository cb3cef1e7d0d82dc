"""What a rank's steps exchanged, and what the naive plan would have exchanged in their place."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import torch

from weft.engine.worker.graph_inputs import Shape
from weft.planner.chain import Counts
from weft.planner.plan import Plan, Planner
from weft.planner.recipes import Merge
from weft.planner.settlements import Settled
from weft.planner.show import fold
from weft.stream.settler import Settler
from weft.stream.stats import Stats, StepKey, StepStat, StepTimes

MAX_COUNTS = 4096
"""How many different counts are kept before they are added up, so that they take no more memory with every step."""


class RunStats:
    """The counts of one rank.

    planner: of eager steps. settler: counts what they settle. device: the rank's.

    Attributes:
        timing_interval: of so many eager steps, the collectives of one are timed.
        graph_planner: of the plans of graphs.
        graph_seconds: by rows of a graph in each DP group, seconds of its exchanges, each alone.
    """

    timing_interval = 16

    def __init__(self, planner: Planner, settler: Settler, device: torch.device):
        self._planner, self._settler, self._device = planner, settler, device
        self.graph_planner = planner
        self.graph_seconds: Mapping[int, dict[StepKey, float]] = {}
        self.forget()

    def forget(self) -> None:
        """Clears all counts."""
        self._stats, self._naive, self._times = Stats(), Stats(), StepTimes(self._device)
        self.steps: Counter[tuple[Counts, int | None]] = Counter()  # since the totals were last worked out
        self._settler.ran.clear()
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
        return self.graph_planner.plan((rows,) * self._settler.mesh.attn_dp)

    def moves(self, counts: Counts, shape: Shape | None) -> list[tuple[str, str, str, int]]:
        """The collectives of a step, in order: the read that each serves, its step, its group's name, and the bytes
        that the busiest rank receives; where the vocabulary is split, of rows that take their best token, and without
        a graph, of a step without prompts. shape: of the graph that is replayed, if any.
        """
        plan = self._planner.plan(counts) if shape is None else self.graph_plan(shape.rows)
        received, rows = self._planner.received, counts[self._settler.mesh.group_of(self._settler.rank)]
        capacity, sampled = (rows, rows) if shape is None else (shape.rows, shape.sampled)
        found: list[tuple[str, str, str, int]] = []
        for read in plan.reads:
            site = read.read.site
            found += [(site, str(s), s.group, received(s, counts)) for _, s, _ in read.moves()]
            for settlement, settled in read.settlements():
                if settlement.asked:
                    continue
                for op in settled.ops():
                    if settlement.packed:
                        calls = op.calls(min(sampled, 1), 1)
                        calls = [(kind, moved * sampled // max(plan.counts)) for kind, moved in calls]
                    else:
                        calls = [(op.kinds[0], received(op, counts))] if op.by_counts else op.calls(capacity, rows)
                    names = [(f"{op.call_name(kind)} · {op.transport}", moved) for kind, moved in calls]
                    found += [(site, name, op.group, moved) for name, moved in names]
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
        for (site, settled), (calls, moved, seconds, predicted) in self._settler.ran.items():
            self._stats.add(site, settled, calls, moved, seconds, predicted)
            self._add_naively(site, settled, calls, moved)
        self._settler.ran.clear()

    def _add_naively(self, site: str, settled: Settled, calls: int, moved: int) -> None:
        """What eager steps settled, as the naive plan merges attention; vocabularies as they are."""
        naive = settled
        if isinstance(settled.value, Merge) and self._planner.choice != "naive":
            naive = self._planner.settlements.naive(settled.value, settled.group, settled.rows)
            moved = round(moved * naive.bytes / settled.bytes) if settled.bytes else calls * naive.bytes
        us = naive.us if naive.us < math.inf else 0.0
        self._naive.add(site, naive, calls, moved, 0.0, calls * us / 1e6)
