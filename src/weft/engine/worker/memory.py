"""Size of a GPU's cache: the memory not used by weights, steps and graphs, measured before the cache is allocated.

Every rank runs the largest steps once, with a cache just large enough for them, and reads the allocator's peak. The
rest of the memory within `gpu_memory_fraction` is for the cache. The minimum over ranks counts, since page tables are
the same on each rank.
"""

from __future__ import annotations

import bisect
import gc
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from weft.comm.transport import Transport
from weft.engine.attention.build_batch import SeqRows, build_batch
from weft.engine.attention.caches import cached_layers
from weft.engine.attention.expansion import MAX_ELEMENTS, MAX_TOKENS
from weft.engine.attention.forward_batch import Batch, PageTables, StateSlots
from weft.engine.attention.paged import PagedAttention
from weft.engine.config.config import EngineConfig
from weft.engine.config.device import kv_dtype_of
from weft.engine.kv.cache import state_bytes, token_bytes
from weft.engine.kv.cache_spec import CacheGroup, Latent, Recurrent, Spec, Window, cache_groups, rule
from weft.engine.models.layers.model_config import LanguageModel, ModelConfig
from weft.engine.models.load import model_shape
from weft.engine.worker.graph_inputs import decode_capacities
from weft.engine.worker.model_runner import ModelRunner
from weft.planner.exchange import all_gatherv
from weft.planner.spec import LayoutError, Mesh

GIB = 1 << 30
MAX_PAGES = 1 << 24
"""Maximum pages: ranks exchange numbers of pages as float32, which represents all integers up to this one."""
MAX_SPLIT_TOKENS = 8192
"""Context of a decode row beyond which its attention needs no more memory: the number of its splits is limited."""
MakeRunner = Callable[[Sequence[CacheGroup]], ModelRunner]


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank's GPU, with its weights and without its cache.

    Attributes:
        steps: maximum need of an eager step.
        graphs: memory kept by all graphs.
    """

    total: int
    free: int
    steps: int
    graphs: int

    def capacity(self, fraction: float) -> int:
        """Return the bytes for the cache if this fraction of the GPU may be used; below 0 if the rest does not fit."""
        return self.free - self.steps - self.graphs - int((1 - fraction) * self.total)


@dataclass(frozen=True)
class CacheNeed:
    """Memory need of a rank's cache.

    Attributes:
        config: sizes of steps and, unless `pages` are given, of the cache.
        specs: specification of each layer's cache, by the layer's name.
        dtype: dtype of keys and values, as in `KVCache`.
    """

    config: EngineConfig
    specs: Mapping[str, Spec]
    dtype: torch.dtype

    @classmethod
    def of(cls, config: EngineConfig, model: LanguageModel) -> CacheNeed:
        """Return the need of a rank's model."""
        return cls(config, cached_layers(model), kv_dtype_of(config))

    def groups(self, pages: int | None = None) -> tuple[CacheGroup, ...]:
        """Return the cache's groups. pages: pages of whole sequences, instead of the configuration's."""
        config = self.config
        return cache_groups(
            self.specs.values(),
            page_size=config.interleave.span,
            kv_tokens=config.cached_tokens if pages is None else pages * config.interleave.span,
            max_running=config.batch_sequences,
            max_batch_tokens=config.batch_tokens,
            prefix_cache=config.prefix_cache,
        )

    def bytes(self, pages: int | None = None) -> int:
        """Return the bytes of the groups with this number of pages."""
        size, total = {group.rule: group.size for group in self.groups(pages)}, 0
        for spec in self.specs.values():
            have = size[rule(spec)]
            if isinstance(spec, Recurrent):
                total += (have + 2) * state_bytes(spec)
            else:
                span = self.config.interleave.span if isinstance(spec, Window) else self.config.page_size
                total += (have + 1) * span * token_bytes(spec, self.dtype)
        return total

    def check(self, free: int | None = None) -> None:
        """Raise LayoutError if a cache of a given size needs more than the free memory.

        Args:
            free: bytes of a GPU; None: the rank runs on a CPU, and may use its share of the host's memory.
        """
        where, advice = "free next to the weights a GPU has", "lower --kv-tokens, or omit it to use all memory"
        if free is None:
            host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            free = int(min(host, (self.config.host_memory_gib or host) * GIB)) // self.config.ranks_of_host
            where, advice = "a rank of this host has", "lower --kv-tokens"
        if (need := self.bytes()) > free:
            raise LayoutError(
                f"a cache of {self.config.cached_tokens} tokens takes {_gib(need)}, and {where} {_gib(free)}: "
                f"{_gib(need - free)} are missing; {advice}"
            )

    def fit(self, tokens: Sequence[int], weights: int, share: int) -> CacheNeed:
        """Return the cache of a rank on a CPU: the largest of the configuration's and of these that fits its share.

        Args:
            tokens: tokens of a DP group's cache to try if the configuration names no size.
            weights: bytes of the rank's weights and exchanges.
            share: bytes of the host's memory for the rank.

        Raises LayoutError if not even the smallest fits.
        """
        config = self.config
        sizes = {config.num_pages}
        if config.kv_tokens is None:
            sizes |= {-(-count // config.interleave.span) for count in tokens}
        for pages in sorted(sizes, reverse=True):
            if weights + self.bytes(pages) <= share:
                named = pages != config.num_pages
                need = replace(self, config=replace(config, kv_tokens=pages * config.page_size)) if named else self
                need.check()
                return need
        raise LayoutError(
            f"weights, exchanges and the smallest cache take {_gib(weights + self.bytes(min(sizes)))} a rank, and this "
            f"host has {_gib(share)} for each: use more ranks, or --dtype bfloat16"
        )

    def sized(self, memory: Memory, agree: Callable[[int], int]) -> CacheNeed:
        """Return the largest cache that fits on every rank.

        agree: returns the minimum over ranks of their numbers.

        Raises LayoutError, on every rank, if not one sequence of max_model_len tokens fits, or not one page.
        """
        config, span = self.config, self.config.interleave.span
        capacity = memory.capacity(config.gpu_memory_fraction)
        # Windows and states do not grow with the pages: without other caches, MAX_PAGES fit.
        pages = agree(max(0, bisect.bisect_right(range(MAX_PAGES), capacity, key=self.bytes) - 1))
        tokens = max(span, config.max_model_len or 0)
        if pages * span >= tokens:
            return replace(self, config=replace(config, kv_tokens=pages * config.page_size))
        if (need := self.bytes(-(-tokens // span))) <= capacity:
            raise LayoutError(
                f"another rank's GPU has too little memory for the cache of a sequence of {tokens} tokens"
            )
        raise LayoutError(
            f"a GPU's {_gib(memory.total)} hold {_gib(memory.total - memory.free)} of weights and what else is there, "
            f"and steps take {_gib(memory.steps + memory.graphs)}: for the cache of a sequence of {tokens} tokens, "
            f"{_gib(need)}, {_gib(need - capacity)} are missing; raise --gpu-memory-fraction "
            f"({config.gpu_memory_fraction}), lower --max-model-len or --max-batch-tokens, or take more ranks"
        )


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB"


def weight_bytes(model: ModelConfig, mesh: Mesh, rank: int, dtype: torch.dtype) -> int:
    """Return the bytes of a rank's weights."""
    return parameter_bytes(model_shape(model, mesh, dtype, rank))


def parameter_bytes(model: LanguageModel) -> int:
    """Return the bytes of a model's weights."""
    return sum(w.numel() * w.element_size() for w in model.parameters())


def check_weights(need: int, rank: int, free: int) -> None:
    """Raise LayoutError, in one line with the missing bytes, if a rank's weights need more than the free memory."""
    if need > free:
        raise LayoutError(
            f"the weights of rank {rank} take {_gib(need)}, and its GPU has {_gib(free)} free: {_gib(need - free)} are "
            "missing; spread the model over more ranks (--attn-tp, --ep; of weft advise --ranks, --what-if), or free it"
        )


def large_steps(config: EngineConfig, longest: int) -> list[list[int]]:
    """Return the rows of each sequence in the largest steps: one long prompt; many prompts that end, with their logits;
    and one decode row of every sequence. longest: maximum tokens of a sequence.
    """
    longest = min(config.batch_tokens, longest)
    length, more = divmod(config.batch_tokens, config.batch_sequences)
    spread = [min(longest, length + (i < more)) for i in range(config.batch_sequences)]
    return [[longest], spread, [1] * config.batch_sampled]


def dummy_tables(groups: Sequence[CacheGroup], first: int, tokens: int, span: int) -> list[tuple[int, ...]]:
    """Return page tables of made-up `tokens`, one for each of `groups`; sequences share pages if there are too few.

    first: number of the sequence's first page. span: tokens per page.
    """
    pages = range(first, first - (-tokens // span))
    return [(-1, -1) if g.rule.state else tuple(page % g.size for page in pages) for g in groups]


def step_of(
    rows: Sequence[int], groups: Sequence[CacheGroup], span: int, device: torch.device, context: int = 0
) -> Batch:
    """Return a step of sequences with `rows`, each after `context` cached tokens. groups, span: of `dummy_tables`."""
    seqs, at = [], 0
    for count in rows:
        seqs.append(SeqRows(count, context, dummy_tables(groups, at, context + count, span), 1))
        at -= -(context + count) // span
    return build_batch([0] * sum(rows), seqs, span, [g.rule for g in groups], device)


def as_captured(batch: Batch, pages: int) -> Batch:
    """Return a step with prompts in the form of a CUDA graph: unknown to the host, with tables of `pages` pages."""

    def wide(tables: PageTables | StateSlots) -> PageTables | StateSlots:
        return replace(tables, pages=tables.pages[:, :1].repeat(1, pages)) if isinstance(tables, PageTables) else tables

    return replace(batch, tables=tuple(map(wide, batch.tables)), spans=None)


def measure(make: MakeRunner, cache: CacheNeed, model: ModelConfig) -> Memory:
    """Run the largest steps on this rank's GPU. Collective over the mesh."""
    config, span, longest = cache.config, cache.config.interleave.span, cache.config.max_model_len or model.max_position
    steps = large_steps(config, longest)
    groups = cache.groups(max(sum(-(-count // span) for count in rows) for rows in steps))
    runner = make(groups)
    weight = runner.model.embed.weight
    device = weight.device
    cases, peaks = [(rows, 0) for rows in steps], []
    cases[-1] = (steps[-1], min(longest, MAX_SPLIT_TOKENS) - 1)
    if (context := runner.merges_from(steps[0][0]) or 0) and context + steps[0][0] <= longest:
        cases.insert(0, (steps[0], context))  # a merged prompt: queries and outputs of all heads of a dcp group
    batches = [step_of(rows, groups, span, device, context) for rows, context in cases]
    if (prompts := config.cuda_graphs and runner.captures_prompts) and config.dcp > 1:
        tokens = min(MAX_TOKENS, config.batch_sequences * longest)
        batches.insert(0, as_captured(batches[-3], -(-tokens // span)))
    for batch in batches:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        counts = (len(batch.tokens),) * config.attn_dp
        runner.forward(batch, counts)
        if runner.draft is not None:
            runner.draft.rehearse(counts)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    # Graphs share one pool, sized by the largest graph; a graph with prompts also attends as a decode step does. Each
    # decode graph keeps its logits; graphs with prompts share one buffer for logits.
    sampled = sum(decode_capacities(config.batch_sampled)) + config.batch_sampled * prompts
    logits = len(weight) * weight.element_size()  # per token; the head is split like the embedding
    # Prompts are measured with few cached tokens; later steps may expand or copy more.
    expands = any(isinstance(spec, Latent) and spec.expanded for spec in cache.specs.values())
    expands = expands or any(
        isinstance(backend, PagedAttention) and backend.prompts.copies for _, backend in runner.caches.paged
    )
    largest = max(peaks) + MAX_ELEMENTS * weight.element_size() * (expands and (prompts or config.dcp == 1))
    graphs = peaks[-1] + largest * prompts + sampled * logits
    if runner.draft is not None:
        largest += runner.draft.bytes(sum(decode_capacities(config.batch_sampled)), config.batch_sampled)
    del runner, batch, batches
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return Memory(total, free, largest, graphs if config.cuda_graphs else 0)


def min_over_ranks(transports: Sequence[Transport], mesh: Mesh, device: torch.device) -> Callable[[int], int]:
    """Return a collective function that returns the minimum over ranks of numbers up to MAX_PAGES, exchanged by the
    first transport that serves all ranks.
    """
    world = mesh.world
    transport = next(t for t in transports if t.entry.spans(mesh.hosts))

    def agree(mine: int) -> int:
        if world == 1:
            return mine
        numbers = torch.full((1, 8), float(mine), device=device)
        ranks = tuple(range(world))
        return int(transport.exchange(numbers, all_gatherv(world), ranks, (1,) * world).min())

    return agree
