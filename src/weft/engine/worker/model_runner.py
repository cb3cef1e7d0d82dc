"""Execution of a model on one rank by its plans, with statistics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.comm.transport import Transport, offer_of
from weft.engine.attention.backend_registry import BackendEntry, default_backend
from weft.engine.attention.caches import Caches, cached_layers
from weft.engine.attention.forward_batch import Batch
from weft.engine.kv.cache_spec import CacheGroup
from weft.engine.messages.rank_messages import GroupRows, Planned, Step
from weft.engine.models.layers.model_config import LanguageModel
from weft.engine.worker.device_rows import DeviceRows
from weft.engine.worker.draft_chain import DraftChain, Drafts, RowsKept
from weft.engine.worker.draft_graphs import DraftGraphs
from weft.engine.worker.exchange_times import Timer, exchange_times, graph_seconds, host_seconds
from weft.engine.worker.graph_inputs import DecodeInputs, Inputs, PromptInputs, RecordedInputs, Shape, captures_prompts
from weft.engine.worker.planning import plan_model, sharded_context
from weft.engine.worker.recorded_drafts import RecordedDrafts
from weft.engine.worker.recorded_steps import RecordedSteps
from weft.engine.worker.row_table import RowTable
from weft.engine.worker.run_stats import RunStats
from weft.engine.worker.split_vocabulary import SplitVocabulary
from weft.engine.worker.step_graphs import StepGraphs
from weft.kernels.cpu_rows import MAX_ROWS
from weft.planner.chain import Chain, Counts
from weft.planner.cost import Costs
from weft.planner.cost import costs as load_costs
from weft.planner.dcp import ShardedContext
from weft.planner.plan import Choice, Plan, Planner
from weft.planner.prices import Recipes
from weft.planner.recipes import Merge, Prompt
from weft.planner.spec import Mesh
from weft.stream.block_exchanges import BlockExchanges
from weft.stream.group import context_group
from weft.stream.interleave import Interleave
from weft.stream.stats import StepKey
from weft.stream.step_rows import StepRows, captured_rows
from weft.stream.stream import Observer, Stream


class ModelRunner:
    """Runner of a model on one rank. Every rank must call `forward` for every step, with the same counts.

    Args:
        transports: choices of the planner for each edge, by cost.
        groups, page_size: groups and page size of the caches, which are allocated here once.
        interleave: consecutive tokens on one rank, under decode context parallelism; None: a page.
        dcp_exchange: recipe that merges attention (`weft.planner.recipes`).
        dcp_prefill: recipe of attention of prompts.
        plan: cheapest or naive.
        attention: the attention backend; None: the device's default.
        kv_dtype: dtype of keys and values, as in `KVCache`; None: the weights' dtype.
        max_rows: maximum rows of a DP group's step.

    Attributes:
        attention: the attention backend in use.
        observer: called with the reads of each step without a graph (`weft.stream.stream.Stream`).
        draft: the draft layer or draft model, if any.
    """

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
        attention: BackendEntry | None = None,
        kv_dtype: torch.dtype | None = None,
        max_rows: int = 1,
    ):
        config, weight = model.config, model.embed.weight
        self.model, self.mesh, self.rank = model, mesh, rank
        self.transports = {t.entry.name: t for t in transports}
        costs = costs or load_costs("cpu")
        offers = [offer_of(t.entry, mesh, costs.of(t.entry.name, mesh.world)) for t in transports]
        recipes: Recipes = {Merge: dcp_exchange, Prompt: dcp_prefill}
        self.planner = plan_model(config, mesh, weight.dtype, offers, plan, recipes=recipes)
        drafts = None
        if config.drafts or config.draft_model is not None:
            drafts = plan_model(config, mesh, weight.dtype, offers, plan, recipes=recipes, draft=True)
        self.exchanges = BlockExchanges(mesh, rank, self.transports, self.planner.blocks)
        self.vocabulary = None
        if config.split_vocabulary and mesh.attn_tp > 1:
            self.vocabulary = SplitVocabulary(config.vocab_size, mesh, rank, self.exchanges)
        sharding = Interleave(mesh.dcp, interleave or page_size, page_size)
        group = context_group(sharding, self.exchanges)
        self.rules, self._page_size = [group.rule for group in groups], sharding.span
        layers, device = cached_layers(model), weight.device
        self.attention, self._kv_dtype = attention or default_backend(device.type), kv_dtype or weight.dtype
        self.caches = Caches(layers, groups, sharding.span, self._kv_dtype, device, self.attention.make, group)
        self._graphs: StepGraphs | None = None
        self.observer: Observer | None = None
        self.stats = RunStats(self.planner, self.exchanges, weight.device, drafts)
        self.draft: DraftChain | None = None
        if drafts is not None:
            shared = self.transports, self.exchanges, self.caches, self.stats, max_rows
            self.draft = DraftChain(model, mesh, rank, drafts, *shared)
        self._checksums: dict[tuple[Counts, bool], int] = {}

    @torch.inference_mode()
    def forward(self, batch: Batch, counts: Counts, full: bool = True) -> Tensor:
        """Run a step. Returns float32 logits `[S, vocabulary]` of the sampled rows, the same on all ranks of the DP
        group.

        Raises CommError if a peer is lost, ValueError for wrong counts.

        Args:
            batch: this DP group's rows.
            counts: rows of every DP group in this step.
            full: False: if the vocabulary is split, return this rank's share `[S, own]` of logits (`SplitVocabulary`).
        """
        own_rows = counts[self.mesh.group_of(self.rank)]
        if len(counts) != self.mesh.attn_dp or len(batch.tokens) != own_rows:
            raise ValueError(f"{len(batch.tokens)} rows on rank {self.rank}, but the step's counts are {counts}")
        rows = StepRows(self.mesh, self.rank, counts)
        plan, times = self.planner.plan(counts), self.stats.times()
        stream = Stream(plan, self.transports, rows, times, self.exchanges, self.observer)
        caches = self.caches.plan(batch)
        logits: Tensor = self._called(stream, batch, caches)
        stream.finish()
        logits = self.full_logits(logits) if full else logits.float()
        self.stats.ran(counts)
        return logits

    def plan_checksum(self, counts: Counts, shape: Shape | None = None, passes: tuple[Counts, ...] = ()) -> int:
        """Return the checksum of the plans of a step of these counts. shape: shape of the step's graph, if any. passes:
        counts of its passes of the draft layer."""
        plan = self.planner.plan(counts) if shape is None else self.stats.graph_plan(shape.rows)
        key = (plan.counts, shape is not None)
        if key not in self._checksums:
            self._checksums[key] = plan.checksum()
        return self._checksums[key] ^ (self.draft.checksum(passes) if self.draft and passes else 0)

    def planned(self, max_rows: int) -> tuple[Planned, ...]:
        """Return the plans of all graphs, and of steps without a graph of `max_rows` rows per DP group."""
        largest = {shape.rows: shape for shape in (self._graphs.shapes if self._graphs else ())}
        captured = [Planned(rows, True, self.plan_checksum((), shape)) for rows, shape in sorted(largest.items())]
        counts = (max_rows,) * self.mesh.attn_dp
        eager = Planned(max_rows, False, self.plan_checksum(counts, passes=(counts,)))
        return (*captured, eager)

    def capture(self, rows: DeviceRows, max_rows: int, progress: Callable[[int, int], None] | None = None) -> None:
        """Capture graphs of decode steps for up to the table's rows, and if it `captures_prompts`, graphs of steps with
        prompts for up to `max_rows` rows. Collective; on GPUs only. progress: called with (done, total).
        """
        # Graphs use only transports that read counts on the device, if one of these serves all ranks.
        counting = {name: t for name, t in self.transports.items() if t.entry.takes_live_sizes}
        able = counting if any(t.entry.spans(self.mesh.hosts) for t in counting.values()) else self.transports
        offers = [offer for offer in self.planner.offers if offer.transport in able]
        on_device = all(t.entry.takes_live_sizes for t in able.values())  # including the first row of each group
        choice, recipes = self.planner.choice, self.planner.blocks.recipes

        def planner_of(chain: Chain) -> Planner:
            return Planner(self.mesh, chain, offers, choice, slices_copy=on_device, recipes=recipes)

        planner = planner_of(self.planner.chain)
        inputs: list[Inputs] = [DecodeInputs(rows, self.rules, self._page_size)]
        if self.captures_prompts:
            inputs.append(PromptInputs(rows, self.rules, self._page_size, max_rows))
        self._graphs = StepGraphs(*self._capturing(planner.plan, able, rows, inputs))
        if self.draft is not None:
            of_drafts = self.draft, planner_of(self.draft.planner.chain)
            self._graphs.drafts = DraftGraphs(*of_drafts, rows, self.rules, self._page_size, max_rows)
        with self.exchanges.planned_by(planner.blocks):
            self._graphs.capture(progress)
        self.exchanges.ran.clear()
        self.stats.graph_planner = planner
        for graph_rows in sorted({shape.rows for shape in self._graphs.shapes}):
            self._time_exchanges(graph_rows, able, graph_seconds)

    def record(self, rows: DeviceRows) -> str | None:
        """Prepare recorded decode steps on CPUs (`RecordedSteps`). Collective. Returns the reason if there are none."""
        inputs = RecordedInputs(rows, self.rules, self._page_size).limit(MAX_ROWS // self.mesh.attn_dp)
        graphs = RecordedSteps(*self._capturing(self.planner.plan, self.transports, rows, [inputs]))
        if self.draft is not None:
            of_drafts = self.draft, self.draft.planner
            graphs.drafts = RecordedDrafts(*of_drafts, rows, self.rules, self._page_size, rows.max_sampled)
        graphs.capture()
        self._graphs = None if graphs.refusal else graphs
        return graphs.refusal

    def _capturing(
        self, plan: Callable[[Counts], Plan], able: dict[str, Transport], rows: DeviceRows, inputs: Sequence[Inputs]
    ) -> tuple[Any, ...]:
        """Return the arguments of StepGraphs."""
        place = self._called, self.mesh, self.rank
        return *place, plan, able, self.caches, rows, inputs, self.exchanges, self.vocabulary

    def _time_exchanges(self, rows: int, able: dict[str, Transport], timer: Timer) -> None:
        """Time the exchanges of captured steps of these rows. Collective."""
        weight, planner, seconds = self.model.embed.weight, self.stats.graph_planner, dict[StepKey, float]()
        full = captured_rows(able.values(), self.mesh, self.rank, rows, weight.device)
        full.fill(capacity := (rows,) * self.mesh.attn_dp)
        for plan in (planner.plan(capacity), planner.naive(capacity)):
            seconds |= exchange_times(plan, able, full, weight, timer)
        self.stats.graph_seconds[rows] = seconds

    @property
    def _called(self) -> LanguageModel | RowsKept:
        """The model as steps call it."""
        return self.model if self.draft is None else self.draft.kept

    def drafts(
        self,
        step: Step,
        rows: GroupRows,
        table: RowTable,
        tokens: Tensor,
        accepted: Sequence[int],
        shape: Shape | None = None,
    ) -> Drafts | None:
        """Run the draft layer, if any, after a step: see `DraftChain.run`. shape: shape of the step's graph."""
        if self.draft is None:
            return None
        if shape is None:
            return self.draft.run(step, rows, table, tokens, accepted)
        assert self._graphs is not None and self._graphs.drafts is not None
        return self._graphs.drafts.run(step, rows, table, tokens, accepted, shape)

    def delay_drafts(
        self, counts: Counts, rows: GroupRows, table: RowTable, tokens: Tensor, shape: Shape, behind: int
    ) -> None:
        """Delay the draft layer's pass, if any, of a step that was repeated: see `DraftGraphs.delay`."""
        if self.draft is not None:
            assert self._graphs is not None and self._graphs.drafts is not None
            self._graphs.drafts.delay(counts, rows, table, tokens, shape, behind)

    def draft_passes(self, step: Step, table: RowTable) -> tuple[Counts, ...]:
        """Return the rows of each DP group in each pass of the draft layer, if any, before and after a step, and run
        the passes before it (`DraftChain.catch_up`). Collective."""
        return () if self.draft is None else (*self.draft.catch_up(step, table), *self.draft.passes(step))

    def draft_counts(self, step: Step, left: Sequence[int]) -> Sequence[int]:
        """Return the number of drafts after each row that samples. left: `RowTable.tokens_left` of these rows."""
        return () if self.draft is None or not step.drafts else self.draft.valid(step.drafts, left)

    @property
    def captures_prompts(self) -> bool:
        """True if steps with prompts have graphs."""
        return captures_prompts(self.caches, self.planner.blocks.recipes)

    def check(self) -> None:
        """Raise CommError if a collective had a fault, which makes all later results invalid."""
        for transport in self.transports.values():
            transport.check()

    def shape_of(self, groups: Sequence[GroupRows], counts: Counts) -> Shape | None:
        """Return the shape of the graph for a step; None for an eager step (`StepGraphs.shape_of`)."""
        shape = None if self._graphs is None else self._graphs.shape_of(groups, counts)
        if shape is not None and self.greedy and shape.rows not in self.stats.graph_seconds:  # just recorded
            self._time_exchanges(shape.rows, self.transports, host_seconds)
        return shape

    @property
    def greedy(self) -> bool:
        """True if graphs sample the greatest logit (`StepGraphs`)."""
        return self._graphs is not None and self._graphs.greedy

    def replay(self, shape: Shape, group_rows: GroupRows, counts: Counts) -> tuple[Tensor, Tensor]:
        """Replay a graph. Returns its logits and sampled tokens (`StepGraphs.replay`).

        `full_logits` converts these logits to the form of `forward`; few steps need it, and for few rows.
        """
        assert self._graphs is not None
        self.stats.ran(counts, shape.rows)
        return self._graphs.replay(shape, group_rows, counts)

    def repeat(self, shape: Shape) -> None:
        """Replay the last graph for the same rows (`StepGraphs.repeat`). The caller counts it in `stats`."""
        assert self._graphs is not None
        self._graphs.repeat(shape)

    def sampled_tokens(self, count: int) -> Callable[[], np.ndarray]:
        """Return a function that waits for the last replay's tokens (`PinnedTokenRing.wait`)."""
        assert self._graphs is not None
        return self._graphs.token_ring.wait(count)

    def full_logits(self, logits: Tensor) -> Tensor:
        """Return rows of logits over the whole vocabulary, as float32. Collective in the group if it is split."""
        logits = logits.float()
        return logits if self.vocabulary is None else self.vocabulary.gather_logits(logits)

    def merges_from(self, rows: int) -> int | None:
        """Return the number of cached tokens from which a prompt's next `rows` are merged over dcp; None: never."""
        return None if self._context is None else self._context.merges_from(rows, self.planner.blocks)

    @cached_property
    def _context(self) -> ShardedContext | None:
        return sharded_context(self.model.config, self.mesh, self._kv_dtype, self.planner.chain)
