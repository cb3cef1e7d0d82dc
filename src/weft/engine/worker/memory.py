"""The size of a GPU's cache: what weights, steps and graphs leave, measured before the cache is made.

Every rank runs the largest steps once, with a cache that just holds them, and reads the allocator's peak. The rest of
the memory, minus the share that `gpu_memory_fraction` leaves to others, is for the cache. The smallest of all ranks
counts, as page tables are the same on each.
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
from weft.engine.attention.expansion import MAX_ELEMENTS, MAX_TOKENS
from weft.engine.attention.forward_batch import Batch, PageTables, StateSlots
from weft.engine.attention.sdpa import SDPA
from weft.engine.config.config import EngineConfig
from weft.engine.kv.cache import token_bytes
from weft.engine.kv.cache_spec import CacheGroup, Latent, Recurrent, Rule, Spec, Window, cache_groups, rule
from weft.engine.models.load import build_model
from weft.engine.models.model_config import LanguageModel, ModelConfig
from weft.engine.worker.graph_inputs import decode_capacities
from weft.engine.worker.model_runner import ModelRunner
from weft.planner.exchange import all_gatherv
from weft.planner.spec import LayoutError, Mesh

GIB = 1 << 30
MAX_PAGES = 1 << 24
"""Ranks exchange numbers of pages as float32, which has all integers up to here."""
MAX_SPLIT_TOKENS = 8192
"""Context of a decode row from which on its attention takes no more memory: it is cut into no more parts."""
MakeRunner = Callable[[Sequence[CacheGroup]], ModelRunner]


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank's GPU, with its weights and without its cache.

    Attributes:
        total, free: of the GPU.
        steps: what an eager step takes at most.
        graphs: what all graphs keep.
    """

    total: int
    free: int
    steps: int
    graphs: int

    def capacity(self, fraction: float) -> int:
        """Bytes for the cache where this fraction of the GPU may be used; below 0 where the rest does not fit."""
        return self.free - self.steps - self.graphs - int((1 - fraction) * self.total)


def cache_bytes(
    specs: Mapping[str, Spec], groups: Sequence[CacheGroup], config: EngineConfig, dtype: torch.dtype
) -> int:
    """What the caches of these groups take on a rank. dtype: of keys and values, as of `KVCache`."""
    size, total = {group.rule: group.size for group in groups}, 0
    for spec in specs.values():
        have = size[rule(spec)]
        if isinstance(spec, Recurrent):
            total += (have + 2) * 4 * sum(torch.Size(shape).numel() for shape in spec.shapes)
        else:
            slots = (have + 1) * (config.interleave.span if isinstance(spec, Window) else config.page_size)
            total += slots * token_bytes(spec, dtype)
    return total


def groups_of(specs: Mapping[str, Spec], config: EngineConfig, pages: int | None = None) -> tuple[CacheGroup, ...]:
    """The cache groups of a configuration. pages: of whole sequences, in place of what it says."""
    return cache_groups(
        specs.values(),
        page_size=config.interleave.span,
        kv_tokens=config.cached_tokens if pages is None else pages * config.interleave.span,
        max_running=config.batch_sequences,
        max_batch_tokens=config.batch_tokens,
        prefix_cache=config.prefix_cache,
    )


def weight_bytes(model: ModelConfig, mesh: Mesh, rank: int, dtype: torch.dtype) -> int:
    """Bytes of a rank's weights."""
    return parameter_bytes(build_model(model, mesh, rank, dtype, torch.device("meta")))


def parameter_bytes(model: LanguageModel) -> int:
    """Bytes of a model's weights, which need not be there."""
    return sum(w.numel() * w.element_size() for w in model.parameters())


def check_weights(model: ModelConfig, config: EngineConfig, rank: int, dtype: torch.dtype, free: int) -> None:
    """Raises LayoutError, in one line that says how much is missing, where a rank's weights need more than is free."""
    if (need := weight_bytes(model, config.mesh, rank, dtype)) > free:
        raise LayoutError(
            f"the weights of rank {rank} take {need / GIB:.1f} GiB, and its GPU has {free / GIB:.1f} GiB free: "
            f"{(need - free) / GIB:.1f} GiB are missing; spread the model over more ranks (--attn-tp, --ep), or free "
            "the GPU"
        )


def check_cache(specs: Mapping[str, Spec], config: EngineConfig, dtype: torch.dtype, free: int | None = None) -> None:
    """The same for a cache of a given size. dtype: as for `cache_bytes`. free: of a GPU; None: the rank runs on a CPU,
    where it may have its share of the host's memory.
    """
    need, where = cache_bytes(specs, groups_of(specs, config), config, dtype), "free beside the weights a GPU has"
    advice = "lower --kv-tokens, or leave it out for as many as fit"
    if free is None:
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // config.ranks_of_host
        where, advice = "a rank of this host has", "lower --kv-tokens"
    if need > free:
        raise LayoutError(
            f"a cache of {config.cached_tokens} tokens takes {need / GIB:.1f} GiB, and {where} "
            f"{free / GIB:.1f} GiB: {(need - free) / GIB:.1f} GiB are missing; {advice}"
        )


def max_sequence_tokens(config: EngineConfig, model: ModelConfig) -> int:
    """Tokens that a sequence may have."""
    return config.max_model_len or model.max_position


def large_steps(config: EngineConfig, model: ModelConfig) -> list[list[int]]:
    """Rows of each sequence in the largest steps: one long prompt; many prompts that end, with their logits;
    and one decode row of every sequence.
    """
    longest = min(config.batch_tokens, max_sequence_tokens(config, model))
    each, more = divmod(config.batch_tokens, config.batch_sequences)
    spread = [min(longest, each + (i < more)) for i in range(config.batch_sequences)]
    return [[longest], spread, [1] * config.batch_sequences]


def step_of(
    rows: Sequence[int],
    rules: Sequence[Rule],
    pages: Sequence[int],
    span: int,
    device: torch.device,
    context: int = 0,
) -> Batch:
    """A step of sequences with so many rows each on top of as many tokens; they share pages where there are too few.

    pages: of each rule's group; span: tokens of a sequence that a page stands for.
    """
    seqs, at = [], 0
    for count in rows:
        need = -(-(context + count) // span)
        tables = [
            (-1, -1) if r.state else [(at + i) % have for i in range(need)]
            for r, have in zip(rules, pages, strict=True)
        ]
        seqs.append(SeqRows(count, context, tables, 1))
        at += need
    return build_batch([0] * sum(rows), seqs, span, rules, device)


def captured_form(batch: Batch, pages: int) -> Batch:
    """A step with prompts as a CUDA graph has it: the host does not know these, and tables have so many pages."""

    def wide(tables: PageTables | StateSlots) -> PageTables | StateSlots:
        return replace(tables, pages=tables.pages[:, :1].repeat(1, pages)) if isinstance(tables, PageTables) else tables

    return replace(batch, tables=tuple(map(wide, batch.tables)), spans=None)


def measure(make: MakeRunner, specs: Mapping[str, Spec], config: EngineConfig, model: ModelConfig) -> Memory:
    """Runs the largest steps on this rank's GPU. Collective: every rank of the mesh must."""
    steps, span = large_steps(config, model), config.interleave.span
    pages = max(sum(-(-count // span) for count in rows) for rows in steps)
    groups = groups_of(specs, config, pages)
    runner = make(groups)
    weight = runner.model.embed.weight
    device = weight.device
    cases, peaks = [(rows, 0) for rows in steps], []
    cases[-1] = (steps[-1], min(max_sequence_tokens(config, model), MAX_SPLIT_TOKENS) - 1)
    longest = steps[0][0]
    if (context := runner.merges_from(longest) or 0) and context + longest <= max_sequence_tokens(config, model):
        cases.insert(0, ([longest], context))  # with queries and outputs of all heads of a dcp group
    batches = [step_of(n, [g.rule for g in groups], [g.size for g in groups], span, device, c) for n, c in cases]
    if (prompts := config.cuda_graphs and runner.captures_prompts) and config.dcp > 1:
        tokens = min(MAX_TOKENS, config.batch_sequences * max_sequence_tokens(config, model))
        batches.insert(0, captured_form(batches[-3], -(-tokens // span)))
    for batch in batches:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        runner.forward(batch, (len(batch.tokens),) * config.attn_dp)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    # Graphs share one pool, as large as the largest needs: with prompts it also attends as a decode step does. Each
    # decode graph keeps its logits; those with prompts share one place for theirs.
    sampled = sum(decode_capacities(config.batch_sequences)) + config.batch_sequences * prompts
    logits = len(weight) * weight.element_size()  # of a token: the head is split as the embedding is
    # Prompts are measured on top of few cached tokens, and more may be expanded or copied.
    expands = any(isinstance(spec, Latent) and spec.expanded for spec in specs.values())
    expands = expands or any(isinstance(backend, SDPA) and backend.copies for _, backend in runner.caches.paged)
    largest = max(peaks) + MAX_ELEMENTS * weight.element_size() * (expands and (prompts or config.dcp == 1))
    graphs = peaks[-1] + largest * prompts + sampled * logits
    del runner, batch, batches
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return Memory(total, free, largest, graphs if config.cuda_graphs else 0)


def sized(
    config: EngineConfig, specs: Mapping[str, Spec], memory: Memory, dtype: torch.dtype, agree: Callable[[int], int]
) -> EngineConfig:
    """The configuration with the largest cache that fits on every rank. dtype: as for `cache_bytes`. agree: gives the
    minimum over ranks of their numbers.

    Raises LayoutError, on every rank, where not one sequence of max_model_len tokens fits, or not one page.
    """

    def bytes_of(pages: int) -> int:
        return cache_bytes(specs, groups_of(specs, config, pages), config, dtype)

    capacity = memory.capacity(config.gpu_memory_fraction)
    # Windows and states do not grow with the pages: where there are no others, as many as may be fit.
    pages = agree(max(0, bisect.bisect_right(range(MAX_PAGES), capacity, key=bytes_of) - 1))
    found = replace(config, kv_tokens=max(1, pages) * config.page_size)
    tokens = max(config.interleave.span, config.max_model_len or 0)
    if pages * config.interleave.span < tokens:
        need, weights = bytes_of(-(-tokens // config.interleave.span)), memory.total - memory.free
        if need <= capacity:
            raise LayoutError(
                f"another rank's GPU has too little memory for the cache of a sequence of {tokens} tokens"
            )
        cache, missing = f"{need / GIB:.1f} GiB", f"{(need - capacity) / GIB:.1f} GiB are missing"
        raise LayoutError(
            f"a GPU's {memory.total / GIB:.1f} GiB hold {weights / GIB:.1f} GiB of weights and what else is there, and "
            f"steps take {(memory.steps + memory.graphs) / GIB:.1f} GiB: for the cache of a sequence of {tokens} "
            f"tokens, {cache}, {missing}; raise --gpu-memory-fraction ({config.gpu_memory_fraction}), lower "
            "--max-model-len or --max-batch-tokens, or take more ranks"
        )
    return found


def min_over_ranks(transports: Sequence[Transport], mesh: Mesh, device: torch.device) -> Callable[[int], int]:
    """A function that gives the minimum over ranks of their numbers, up to MAX_PAGES, by the first of the transports
    that serves all ranks. Collective.
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
