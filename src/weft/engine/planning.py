"""A model's trace on a layout, and what is planned from it, before any rank has weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from weft.attention.caches import Caches, cached_layers
from weft.dcp.group import TraceGroup, trace_group
from weft.engine.batch import build_batch
from weft.kv.spec import CacheGroup, Latent, PagedKV, Spec, rule
from weft.models.config import ModelConfig
from weft.models.layers import Workspace, torch_empty
from weft.models.load import build_model
from weft.place.cost import Offer
from weft.place.dcp import Dealt
from weft.place.plan import Chain, Choice, Planner
from weft.place.spec import LayoutError, Mesh
from weft.place.vocabulary import Head, SplitStep, split_step
from weft.stream import TraceStream


def trace(
    config: ModelConfig,
    mesh: Mesh,
    dtype: torch.dtype,
    workspace: Workspace = torch_empty,
    group: TraceGroup | None = None,
) -> Chain:
    """The model's chain of reads and adds, from a run on zero rows with weights that take no memory.

    It runs on the CPU, as the `meta` device does many operations in Python, and imports seconds of torch for them.
    workspace: sees every tensor that the layers take from it on the way. group: sees what attention exchanges over
    dcp. Raises LayoutError where the layout is not one of the model's.
    """
    cpu = torch.device("cpu")
    model = build_model(config, mesh, 0, dtype, cpu, workspace, True)
    layers = cached_layers(model)
    check_heads(config, mesh, layers.values())
    groups = [CacheGroup(r, 0) for r in dict.fromkeys(map(rule, layers.values()))]

    def form(number: int, group: TraceGroup | None) -> TraceStream:
        stream = TraceStream(mesh, config.hidden_size, dtype, cpu, number)
        if group is not None:
            group.log.reads = lambda: stream.reads
        caches = Caches(layers, groups, mesh.dcp, dtype, cpu, group=group)
        batch = build_batch([], [], mesh.dcp, [group.rule for group in groups], cpu)
        caches.plan(batch)
        model(stream, batch, caches)
        return stream

    first = form(0, group or trace_group(mesh))
    others = [form(number, trace_group(mesh)).chain() for number in range(1, first.forms)]
    return replace(first.chain(), others=tuple(chain.reads for chain in others))


def check_heads(config: ModelConfig, mesh: Mesh, caches: Iterable[Spec]) -> None:
    """Raises LayoutError where the ranks of a dcp group would hold other key-value heads than each other.

    Only where attn_tp has more ranks than there are key-value heads do neighbours hold the same. A latent cache is the
    same on all ranks.
    """
    copies = max(1, mesh.attn_tp // config.num_kv_heads)
    if mesh.dcp == 1 or copies % mesh.dcp == 0 or not any(isinstance(spec, PagedKV) for spec in caches):
        return
    legal = [n for n in range(1, copies + 1) if copies % n == 0]
    near = sorted(legal, key=lambda n: (abs(n - mesh.dcp), n))[0]
    raise LayoutError(
        f"dcp={mesh.dcp}: the ranks of a dcp group must hold the same key-value heads, but attn_tp={mesh.attn_tp} over "
        f"{config.num_kv_heads} of them gives each to {copies} rank(s); the nearest dcp is {near}, or take attn_tp="
        f"{config.num_kv_heads * mesh.dcp}"
    )


def plan_model(
    config: ModelConfig,
    mesh: Mesh,
    dtype: torch.dtype,
    offers: Sequence[Offer],
    choice: Choice = "cheapest",
    slices_copy: bool = False,
) -> Planner:
    """The planner of a model on a mesh, as `Planner`. Raises LayoutError, PlacementError."""
    return Planner(mesh, trace(config, mesh, dtype), offers, choice, slices_copy)


def dealt_of(config: ModelConfig, mesh: Mesh, dtype: torch.dtype) -> Dealt | None:
    """What attention does where tokens are dealt out over dcp; None where they are not. Raises LayoutError."""
    group = trace_group(mesh)
    if group is None:
        return None
    trace(config, mesh, dtype, group=group)
    caches = cached_layers(build_model(config, mesh, 0, dtype, torch.device("meta"))).values()
    kept = sum(2 * spec.heads * spec.dim for spec in caches if isinstance(spec, PagedKV))
    latent = sum(spec.width for spec in caches if isinstance(spec, Latent))
    size = dtype.itemsize
    tokens = Counter(2 * spec.heads * spec.dim * size for spec in caches if isinstance(spec, PagedKV))
    tokens += Counter(spec.width * size for spec in caches if isinstance(spec, Latent))
    read = (kept * size, latent * size)
    return Dealt(mesh.dcp, group.gather.rows, group.merge.merges, tokens, *read, group.log.found)


def split_steps(
    config: ModelConfig, mesh: Mesh, dtype: torch.dtype, offers: Sequence[Offer], rows: Sequence[int]
) -> list[SplitStep]:
    """What splitting the vocabulary means for decode steps of so many rows in each DP group; none where there is
    nothing to split it over. Raises as `plan_model`.
    """
    if mesh.attn_tp == 1 or not rows:
        return []
    head = Head(mesh.attn_tp, config.vocab_size, config.hidden_size * dtype.itemsize)
    whole, split = (plan_model(replace(config, split_vocabulary=s), mesh, dtype, offers) for s in (False, True))
    each = [(n,) * mesh.attn_dp for n in rows]
    return [split_step(head, n, split.plan(c).us - whole.plan(c).us, offers) for n, c in zip(rows, each, strict=True)]
