"""Trace of a model on a layout and its plans, before any rank has weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from weft.engine.attention.build_batch import build_batch
from weft.engine.attention.caches import Caches, cached_layers
from weft.engine.attention.gathered_tokens import gathered_bytes
from weft.engine.kv.cache import token_bytes
from weft.engine.kv.cache_spec import CacheGroup, Latent, PagedKV, Spec, rule
from weft.engine.models.layers.basic import Workspace, torch_empty
from weft.engine.models.layers.model_config import LanguageModel, ModelConfig
from weft.engine.models.load import model_shape
from weft.planner.chain import Chain
from weft.planner.cost import Offer
from weft.planner.dcp import ShardedContext
from weft.planner.op import BlockValue
from weft.planner.plan import Choice, Planner
from weft.planner.prices import Recipes
from weft.planner.recipes import RECIPES
from weft.planner.shards import in_groups, replicated, shard
from weft.planner.spec import LayoutError, Mesh, divisors
from weft.planner.vocabulary import SplitHead, SplitStep, best_tokens, logit_rows, split_step
from weft.stream.group import context_group
from weft.stream.interleave import Interleave
from weft.stream.stream import TraceStream


def trace(
    config: ModelConfig, mesh: Mesh, dtype: torch.dtype, workspace: Workspace = torch_empty, draft: bool = False
) -> Chain:
    """Return the model's chain, from a run on zero rows. Raises LayoutError.

    workspace: allocator of the layers' tensors, which sees all of them. draft: the chain of its source of drafts.
    """
    return trace_layers(model_shape(config, mesh, dtype, workspace=workspace), mesh, dtype, draft)


def trace_layers(model: LanguageModel, mesh: Mesh, dtype: torch.dtype, draft: bool = False) -> Chain:
    """Return the chain of a model that `model_shape` has built. Arguments and errors: see `trace`."""
    config, cpu, layers = model.config, torch.device("cpu"), cached_layers(model)
    check_heads(config, mesh, layers.values())
    if config.draft_model is not None:
        check_heads(config.draft_model, mesh, layers.values())
    groups = [CacheGroup(r, 0) for r in dict.fromkeys(map(rule, layers.values()))]

    def form(number: int) -> TraceStream:
        width = model.draft.width if draft and model.draft else config.hidden_size
        stream = TraceStream(mesh, width, dtype, cpu, number)
        group = context_group(Interleave(mesh.dcp, 1, 1), stream.exchanges)
        caches = Caches(layers, groups, mesh.dcp, dtype, cpu, group=group)
        batch = build_batch([], [], mesh.dcp, [group.rule for group in groups], cpu)
        if draft:
            assert model.draft is not None
            model.draft(stream, batch, caches.plan(batch), torch.empty(0, width, dtype=dtype))
        else:
            model(stream, batch, caches.plan(batch))
            stream.exchanges.found += _head(config, mesh)
        return stream

    first = form(0)
    others = tuple(form(number).chain().reads for number in range(1, first.forms))
    return replace(first.chain(), others=others)


def _head(config: ModelConfig, mesh: Mesh) -> list[BlockValue]:
    """Return the values exchanged after the model by ranks with shares of the vocabulary."""
    if not config.split_vocabulary or mesh.attn_tp == 1:
        return []
    best, logits = best_tokens(1), logit_rows(config.vocab_size, mesh.attn_tp)
    return [BlockValue(best, "attn_tp", packed=True, spares=True), BlockValue(logits, "attn_tp", optional=True)]


def check_heads(config: ModelConfig, mesh: Mesh, caches: Iterable[Spec]) -> None:
    """Raise LayoutError if the ranks of a dcp group would hold different key-value heads, or unequal numbers of query
    heads.

    Neighbours hold the same heads only if attn_tp exceeds the number of key-value heads. A latent cache is the same on
    all ranks."""
    kinds, ranks = set(map(type, caches)), mesh.attn_tp
    if mesh.dcp == 1 or not kinds & {PagedKV, Latent}:
        return
    heads, kv_heads = config.num_heads, config.num_kv_heads if PagedKV in kinds else 1
    if PagedKV not in kinds:
        held = [(range(1), len(shard(heads, ranks, place))) for place in range(ranks)]
    else:
        both = ((replicated(kv_heads, ranks, p), in_groups(heads, kv_heads, ranks, p)) for p in range(ranks))
        held = [(keys, len(queries)) for keys, queries in both]
    legal = [n for n in divisors(ranks) if all(len(set(held[at : at + n])) == 1 for at in range(0, ranks, n))]
    if mesh.dcp in legal:
        return
    near = min(legal, key=lambda n: (abs(n - mesh.dcp), n))
    raise LayoutError(
        f"dcp={mesh.dcp}: the ranks of a dcp group must hold the same key-value heads and equally many query heads, "
        f"which {heads} heads with {kv_heads} key-value heads on attn_tp={ranks} do not allow; the nearest dcp is "
        f"{near}, or choose attn_tp={kv_heads * mesh.dcp}"
    )


def plan_model(
    config: ModelConfig,
    mesh: Mesh,
    dtype: torch.dtype,
    offers: Sequence[Offer],
    choice: Choice = "cheapest",
    slices_copy: bool = False,
    recipes: Recipes | None = None,
    draft: bool = False,
) -> Planner:
    """Return the planner of a model on a mesh. Raises LayoutError, PlacementError.

    recipes: in the naive plan, `auto` means the first recipe of the table. draft: plan its source of drafts. `choice`,
    `offers`, `slices_copy`: as in `Planner`.
    """
    if choice == "naive":
        auto = [kind for kind, asked in (recipes or {}).items() if asked == "auto"]
        recipes = {**(recipes or {}), **{kind: RECIPES[kind][0].name for kind in auto}}
    return Planner(mesh, trace(config, mesh, dtype, draft=draft), offers, choice, slices_copy, recipes)


def sharded_context(config: ModelConfig, mesh: Mesh, dtype: torch.dtype, chain: Chain) -> ShardedContext | None:
    """Return attention's context for tokens sharded over dcp, from a traced chain; None if they are not sharded.

    dtype: dtype of keys and values, as in `KVCache`."""
    if mesh.dcp == 1:
        return None
    model = replace(config, drafts=False, draft_model=None)
    caches = cached_layers(model_shape(model, mesh, config.dtype)).values()
    bytes_a_token = sum(token_bytes(spec, dtype) for spec in caches if isinstance(spec, PagedKV))
    latent = sum(token_bytes(spec, dtype) for spec in caches if isinstance(spec, Latent))
    tokens = Counter(gathered_bytes(spec, dtype) for spec in caches if isinstance(spec, PagedKV | Latent))
    values = [inside.value for inside in chain.inside if inside.group == "dcp"]
    return ShardedContext(mesh.dcp, values, tokens, bytes_a_token, latent)


def may_split(config: ModelConfig, dtype: torch.dtype, gpus: bool) -> bool:
    """Return True if a split vocabulary may pay: on GPUs, or for a head that no cache of a CPU holds."""
    return gpus or config.vocab_size * config.hidden_size * dtype.itemsize >= 32 << 20


def split_steps(
    config: ModelConfig, mesh: Mesh, dtype: torch.dtype, offers: Sequence[Offer], rows: Sequence[int]
) -> list[SplitStep]:
    """Return the effect of a split vocabulary on decode steps of each number of rows per DP group; empty if there is
    nothing to split it over. Raises errors of `plan_model`."""
    if mesh.attn_tp == 1 or not rows:
        return []
    head = SplitHead(mesh.attn_tp, config.vocab_size, config.hidden_size * dtype.itemsize)
    whole, split = (plan_model(replace(config, split_vocabulary=s), mesh, dtype, offers) for s in (False, True))
    steps = []
    for n in rows:
        counts = (n,) * mesh.attn_dp
        try:
            split_us, whole_us = ([s.us for r in p.plan(counts).reads for s in r.steps] for p in (split, whole))
            steps.append(split_step(head, n, sum(split_us) - sum(whole_us), split.blocks))
        except LayoutError:  # no transport can hold it; with --split-vocabulary on, planning fails later
            return []
    return steps
