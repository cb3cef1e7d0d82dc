"""A model on one rank: run by its plans, and counted."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from weft.attention.caches import Caches, cached_layers
from weft.attention.forward_batch import Batch
from weft.comm.settler import Settler
from weft.comm.stats import Stats, StepKey, StepStat, StepTimes
from weft.comm.step_rows import StepRows, captured_rows
from weft.comm.transport import Transport, offer_of
from weft.dcp.group import context_group
from weft.dcp.interleave import Interleave
from weft.engine.messages import GroupRows, Planned
from weft.engine.planning import plan_model, sharded_context
from weft.engine.worker.device_rows import DeviceRows
from weft.engine.worker.exchange_times import exchange_times
from weft.engine.worker.graph_inputs import DecodeInputs, Inputs, PromptInputs, Shape, captures_prompts
from weft.engine.worker.split_vocabulary import SplitVocabulary
from weft.engine.worker.step_graphs import StepGraphs
from weft.kv.cache_spec import CacheGroup
from weft.models.model_config import LanguageModel
from weft.place.chain import Counts
from weft.place.cost import Costs
from weft.place.cost import costs as load_costs
from weft.place.dcp import ShardedContext
from weft.place.plan import Choice, Plan, Planner
from weft.place.recipes import Merge, Prompt
from weft.place.settlements import Recipes, Settled, Settlements
from weft.place.show import fold, plan_text
from weft.place.spec import Mesh
from weft.stream import Stream

MAX_COUNTS = 4096
"""How many different counts are kept before they are added up, so that they take no more memory with every step."""


class ModelRunner:
    """Runs a model on one rank. Every rank must call `forward` for every step, with the same counts.

    Args:
        model: its weights on this rank.
        mesh, rank: the layout, and this rank's place in it.
        transports: the planner chooses among them for each edge, by cost.
        groups, page_size: of the caches, which are allocated here once.
        costs: the cost model (`weft.place.cost.costs`).
        interleave: under decode context parallelism, consecutive tokens on one rank; None: a page.
        dcp_exchange: the recipe by which attention is merged (`weft.place.recipes`).
        dcp_prefill: the recipe by which prompts attend.
        plan: cheapest or naive.

    Attributes:
        timing_interval: of so many steps, the collectives of one are timed.
    """

    timing_interval = 16

    def __init__(
        self,
        model: LanguageModel,
        mesh: Mesh,
        rank: int,
        transports: Sequence[Transport],
        groups: Sequence[CacheGroup],
        page_size: int,
        costs: Costs | None = None,
        *,
        interleave: int | None = None,
        dcp_exchange: str = "auto",
        dcp_prefill: str = "auto",
        plan: Choice = "cheapest",
    ):
        config, weight = model.config, model.embed.weight
        self.model, self.mesh, self.rank = model, mesh, rank
        self.transports = {t.name: t for t in transports}
        costs = costs or load_costs("cpu")
        offers = [offer_of(t, mesh, costs.of(t.name, mesh.world)) for t in transports]
        recipes: Recipes = {Merge: dcp_exchange, Prompt: dcp_prefill}
        self.planner = plan_model(config, mesh, weight.dtype, offers, plan, recipes=recipes)
        self.settler = Settler(mesh, rank, self.transports, self.planner.settlements)
        self.vocabulary = None
        if config.split_vocabulary and mesh.attn_tp > 1:
            self.vocabulary = SplitVocabulary(config.vocab_size, mesh, rank, self.settler)
        sharding = Interleave(mesh.dcp, interleave or page_size, page_size)
        group = context_group(sharding, self.settler)
        self.rules, self._page_size = [group.rule for group in groups], sharding.span
        layers, device = cached_layers(model), weight.device
        if device.type == "cuda":
            from weft.attention.paged_triton import PagedTriton  # a CPU need not have Triton

            self.caches = Caches(layers, groups, sharding.span, weight.dtype, device, PagedTriton, group)
        else:
            self.caches = Caches(layers, groups, sharding.span, weight.dtype, device, group=group)
        self._graphs: StepGraphs | None = None
        self._graph_planner = self.planner
        self._stats, self._naive_stats, self._times = Stats(), Stats(), StepTimes(weight.device)
        self._checksums: dict[tuple[Counts, bool], int] = {}
        self._steps: Counter[Counts] = Counter()  # walked since the totals were last worked out
        self._replays: Counter[tuple[Counts, Shape]] = Counter()  # the same of graphs
        self._alone: dict[Counts, dict[StepKey, float]] = {}  # seconds of the exchanges of graphs, by capacity
        self._walks = 0

    @torch.inference_mode()
    def forward(self, batch: Batch, counts: Counts, full: bool = True) -> Tensor:
        """Runs a step. Returns float32 logits `[S, vocabulary]` of the sampled rows, the same on all ranks of the DP
        group.

        Raises CommError where a peer is lost, ValueError for wrong counts.

        Args:
            batch: this DP group's rows.
            counts: rows of every DP group in this step.
            full: False: where the vocabulary is split, the logits are this rank's share `[S, own]` (`SplitVocabulary`).
        """
        mine = counts[self.mesh.group_of(self.rank)]
        if len(counts) != self.mesh.attn_dp or len(batch.tokens) != mine:
            raise ValueError(f"{len(batch.tokens)} rows on rank {self.rank}, but the step's counts are {counts}")
        times = self._times if self._walks % self.timing_interval == 0 else None
        rows = StepRows(self.mesh, self.rank, counts)
        stream = Stream(self.planner.plan(counts), self.transports, rows, times, self.settler)
        logits: Tensor = self.model(stream, batch, self.caches.plan(batch))
        stream.finish()
        logits = self.full_logits(logits) if full else logits.float()
        self._steps[counts] += 1
        self._walks += 1
        if len(self._steps) == MAX_COUNTS:
            self._count()
        return logits

    def plan_checksum(self, counts: Counts, shape: Shape | None = None) -> int:
        """`Plan.checksum` of a step of these counts. shape: of the graph that is replayed for them."""
        plan = self.planner.plan(counts) if shape is None else self._captured_plan(shape)
        key = (plan.counts, shape is not None)
        if key not in self._checksums:
            self._checksums[key] = plan.checksum()
        return self._checksums[key]

    def planned(self, max_rows: int) -> tuple[Planned, ...]:
        """The plans of all graphs, and of steps of `max_rows` rows in each DP group that run without one."""
        largest = {shape.rows: shape for shape in (self._graphs.shapes if self._graphs else ())}
        captured = [Planned(rows, True, self.plan_checksum((), shape)) for rows, shape in sorted(largest.items())]
        eager = Planned(max_rows, False, self.plan_checksum((max_rows,) * self.mesh.attn_dp))
        return (*captured, eager)

    def capture(self, rows: DeviceRows, max_rows: int, progress: Callable[[int, int], None] | None = None) -> None:
        """Captures graphs of decode steps for up to as many rows as the table has, and where `captures_prompts` says
        so, graphs of steps with prompts for up to `max_rows`. Collective; on GPUs only. progress(done, total).
        """
        # Plans of graphs hold only what reads counts on the device, where there is such a transport.
        able = {name: t for name, t in self.transports.items() if t.takes_live_sizes} or self.transports
        offers = [offer for offer in self.planner.offers if offer.transport in able]
        on_device = all(t.takes_live_sizes for t in able.values())  # and so where the rows of a group begin
        settlements = Settlements(self.mesh, offers, self.planner.settlements.recipes, on_device)
        chain, choice = self.planner.chain, self.planner.choice
        planner = Planner(self.mesh, chain, offers, choice, slices_copy=on_device, settlements=settlements)
        inputs: list[Inputs] = [DecodeInputs(rows, self.rules, self._page_size)]
        if captures_prompts(self.rules, self.mesh):
            inputs.append(PromptInputs(rows, self._page_size, max_rows))
        self._graphs = StepGraphs(
            self.model,
            self.mesh,
            self.rank,
            planner.plan,
            able,
            self.caches,
            rows,
            inputs,
            self.settler,
            self.vocabulary,
        )
        self._graph_planner = planner
        with self.settler.planned_by(settlements):
            self._graphs.capture(progress)
        self.settler.ran.clear()
        for capacity in sorted({self._capacity(shape) for shape in self._graphs.shapes}):
            weight = self.model.embed.weight
            full = captured_rows(able.values(), self.mesh, self.rank, capacity[0], weight.device)
            full.fill(capacity)
            for plan in (planner.plan(capacity), planner.naive(capacity)):
                self._alone.setdefault(capacity, {}).update(exchange_times(plan, able, full, weight))

    def check(self) -> None:
        """Raises CommError where a collective that has run met a fault: what was computed with it means nothing."""
        for transport in self.transports.values():
            transport.check()

    def shape_of(self, groups: Sequence[GroupRows], counts: Counts) -> Shape | None:
        """The shape of the graph for a step; None where it runs eagerly (`StepGraphs.shape_of`)."""
        return None if self._graphs is None else self._graphs.shape_of(groups, counts)

    def replay(self, shape: Shape, group_rows: GroupRows, counts: Counts) -> tuple[Tensor, Tensor]:
        """Replays a graph. Returns its logits and sampled tokens (`StepGraphs.replay`).

        `full_logits` makes of these logits what `forward` returns; few steps need it, and for few rows.
        """
        assert self._graphs is not None
        self._replays[counts, shape] += 1
        return self._graphs.replay(shape, group_rows, counts)

    def sampled_tokens(self, count: int) -> Callable[[], Tensor]:
        """A function that waits for the last replay's tokens (`PinnedTokenRing.wait`)."""
        assert self._graphs is not None
        return self._graphs.token_ring.wait(count)

    def full_logits(self, logits: Tensor) -> Tensor:
        """Rows of logits as float32, of the whole vocabulary. Collective in the group where it is split."""
        logits = logits.float()
        return logits if self.vocabulary is None else self.vocabulary.gather_logits(logits)

    def moves(self, counts: Counts, shape: Shape | None) -> list[tuple[str, str, str, int]]:
        """The collectives of a step, in order: the read that each serves, its step, its group's name, and the bytes
        that the busiest rank receives; where the vocabulary is split, of rows that take their best token, and without
        a graph, of a step without prompts. shape: of the graph that is replayed, if any.
        """
        plan = self.planner.plan(counts) if shape is None else self._captured_plan(shape)
        received, rows = self.planner.received, counts[self.mesh.group_of(self.rank)]
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

    def merges_from(self, rows: int) -> int | None:
        """The number of cached tokens from which a prompt's next `rows` are merged over dcp; None: never."""
        return None if self._context is None else self._context.merges_from(rows, self.planner.settlements)

    def forget(self) -> None:
        """Clears all counts."""
        self._steps.clear()
        self._replays.clear()
        self.settler.ran.clear()
        self._stats, self._naive_stats, self._times = Stats(), Stats(), StepTimes(self.model.embed.weight.device)
        self._walks = 0

    def report(self) -> list[StepStat]:
        """What ran since the start, in the order of a step."""
        self._count()
        return self._in_order(self._stats.table(self._times))

    def naive_report(self) -> list[StepStat]:
        """What the naive plan would have moved for the same steps; seconds are those of replayed graphs alone."""
        self._count()
        return self._in_order(self._naive_stats.table())

    def _in_order(self, found: list[StepStat]) -> list[StepStat]:
        order = {fold(read.site): at for at, read in reversed([*enumerate(self.planner.chain.reads)])}
        return sorted(found, key=lambda stat: order[stat.site])

    def _count(self) -> None:
        """Adds what was walked to the totals."""
        for counts, walks in self._steps.items():
            self._stats.record(self.planner, self.planner.plan(counts), counts, walks)
            self._naive_stats.record(self.planner, self.planner.naive(counts), counts, walks)
        self._steps.clear()
        for (counts, shape), walks in self._replays.items():
            capacity = self._capacity(shape)
            alone, planner = self._alone[capacity], self._graph_planner
            self._stats.record(planner, planner.plan(capacity), counts, walks, alone)
            self._naive_stats.record(planner, planner.naive(capacity), counts, walks, alone)
        self._replays.clear()
        for (site, settled), (calls, moved, seconds, predicted) in self.settler.ran.items():
            self._stats.add(site, settled, calls, moved, seconds, predicted)
            self._add_naively(site, settled, calls, moved)
        self.settler.ran.clear()

    def _add_naively(self, site: str, settled: Settled, calls: int, moved: int) -> None:
        """What eager steps settled, as the naive plan merges attention; vocabularies as they are."""
        naive = settled
        if isinstance(settled.value, Merge) and self.planner.choice != "naive":
            naive = self.planner.settlements.naive(settled.value, settled.group, settled.rows)
            moved = round(moved * naive.bytes / settled.bytes) if settled.bytes else calls * naive.bytes
        us = naive.us if naive.us < math.inf else 0.0
        self._naive_stats.add(site, naive, calls, moved, 0.0, calls * us / 1e6)

    @cached_property
    def _context(self) -> ShardedContext | None:
        return sharded_context(self.model.config, self.mesh, self.model.embed.weight.dtype, self.planner.chain)

    def _capacity(self, shape: Shape) -> Counts:
        """Rows that a graph has for each DP group."""
        return (shape.rows,) * self.mesh.attn_dp

    def _captured_plan(self, shape: Shape) -> Plan:
        return self._graph_planner.plan(self._capacity(shape))

    def plan_text(self, tokens_per_group: int) -> str:
        """The plan for so many tokens in each DP group, beside the naive one."""
        counts = (tokens_per_group,) * self.mesh.attn_dp
        return plan_text(self.planner, counts)
