"""Statistics of a rank's exchanges, and of the naive plan's exchanges for the same steps."""

from __future__ import annotations

import math
from collections import Counter

import torch

from weft.engine.worker.graph_inputs import Shape
from weft.planner.chain import Counts
from weft.planner.op import BlockOp
from weft.planner.plan import Plan, Planner
from weft.planner.recipes import Merge
from weft.planner.show import fold
from weft.stream.block_exchanges import BlockExchanges
from weft.stream.stats import Stats, StepKey, StepTimes
from weft.stream.step_stat import StepStat

MAX_COUNTS = 4096
"""Maximum distinct counts kept before they are added to the totals, as a limit of memory."""


class RunStats:
    """Counts of one rank.

    planner: of eager steps. exchanges: exchanges inside blocks, which count themselves. device: the rank's. drafts: the
    draft layer's planner.

    Attributes:
        timing_interval: number of eager steps for each one with timed collectives.
        graph_seconds: seconds of a graph's exchanges, each measured alone, by the graph's rows per DP group.
    """

    timing_interval = 16

    def __init__(
        self, planner: Planner, exchanges: BlockExchanges, device: torch.device, drafts: Planner | None = None
    ):
        self._planner, self._exchanges, self._device, self._drafts = planner, exchanges, device, drafts
        self.graph_planner = planner
        self.graph_seconds: dict[int, dict[StepKey, float]] = {}
        self.forget()

    def forget(self) -> None:
        """Clear all counts."""
        self._stats, self._naive, self._times = Stats(), Stats(), StepTimes(self._device)
        self.steps: Counter[tuple[Counts, int | None]] = Counter()  # steps not yet added to the totals
        self._draft_passes: Counter[Counts] = Counter()
        self._exchanges.ran.clear()
        self._eager = 0

    def times(self) -> StepTimes | None:
        """Recorder of the next eager step's times; None if it is not timed."""
        return self._times if self._eager % self.timing_interval == 0 else None

    def ran(self, counts: Counts, graph_rows: int | None = None, steps: int = 1) -> None:
        """Count steps of these counts, run eagerly or by a graph of `graph_rows` rows per DP group."""
        self.steps[counts, graph_rows] += steps
        self._eager += steps if graph_rows is None else 0
        if len(self.steps) == MAX_COUNTS:
            self._count()

    def ran_draft(self, counts: Counts) -> None:
        """Count a pass of the draft layer."""
        self._draft_passes[counts] += 1
        if len(self._draft_passes) == MAX_COUNTS:
            self._count()

    def report(self) -> list[StepStat]:
        """Return statistics since the start, in the order of a step."""
        self._count()
        return self._in_order(self._stats.table(self._times))

    def naive_report(self) -> list[StepStat]:
        """Return statistics of the naive plan for the same steps; seconds only of replayed graphs."""
        self._count()
        return self._in_order(self._naive.table())

    def graph_plan(self, rows: int) -> Plan:
        """Return the plan of a graph of `rows` rows per DP group."""
        return self.graph_planner.plan((rows,) * self._exchanges.mesh.attn_dp)

    def moves(self, counts: Counts, shape: Shape | None) -> list[tuple[str, str, str, int]]:
        """Return (read, step, name of the group, bytes received by the busiest rank) of each collective of a step.

        It assumes rows that need only their best token, if the vocabulary is split, and without a graph, a step without
        prompts. shape: shape of the step's graph, if any.
        """
        plan = self._planner.plan(counts) if shape is None else self.graph_plan(shape.rows)
        rows = counts[self._exchanges.mesh.group_of(self._exchanges.rank)]
        capacity, sampled = (rows, rows) if shape is None else (shape.rows, shape.sampled)
        moves: list[tuple[str, str, str, int]] = []
        for site, op in plan.ops(optional=False):
            if op.by_counts:
                calls = [(str(op), self._planner.received(op, counts))]
            elif op.packed:
                calls = op.named_calls(min(sampled, 1), 1)
                calls = [(name, moved * sampled // max(plan.counts)) for name, moved in calls]
            else:
                calls = op.named_calls(capacity, rows)
            moves += [(site, name, op.group, moved) for name, moved in calls]
        return moves

    def _in_order(self, found: list[StepStat]) -> list[StepStat]:
        planners = [self._planner, *([self._drafts] if self._drafts else [])]
        reads = [read for planner in planners for read in planner.chain.reads]
        order = {fold(read.site): at for at, read in reversed([*enumerate(reads)])}
        return sorted(found, key=lambda stat: order[stat.site])

    def _count(self) -> None:
        """Add the steps to the totals."""
        for (counts, rows), steps in self.steps.items():
            planner, capacity = self._planner, counts
            alone: tuple[dict[StepKey, float], ...] = ()
            if rows is not None:
                planner, capacity, alone = self.graph_planner, (rows,) * len(counts), (self.graph_seconds[rows],)
            self._stats.record(planner, planner.plan(capacity), counts, steps, *alone)
            self._naive.record(planner, planner.naive(capacity), counts, steps, *alone)
        for counts, passes in self._draft_passes.items():
            assert self._drafts is not None
            self._stats.record(self._drafts, self._drafts.plan(counts), counts, passes)
            self._naive.record(self._drafts, self._drafts.naive(counts), counts, passes)
        self.steps.clear()
        self._draft_passes.clear()
        for (site, op), (calls, moved, seconds, predicted) in self._exchanges.ran.items():
            self._stats.add(site, op, calls, moved, seconds, predicted)
            self._add_naively(site, op, calls, moved)
        self._exchanges.ran.clear()

    def _add_naively(self, site: str, op: BlockOp, calls: int, moved: int) -> None:
        """Count calls of eager steps with the naive plan's merge of attention, and vocabularies unchanged."""
        naive = op
        if isinstance(op.value, Merge) and self._planner.choice != "naive":
            naive = self._planner.blocks.naive(op.value, op.group, op.rows)
            moved = round(moved * naive.bytes / op.bytes) if op.bytes else calls * naive.bytes
        us = naive.us if naive.us < math.inf else 0.0
        self._naive.add(site, naive, calls, moved, 0.0, calls * us / 1e6)
