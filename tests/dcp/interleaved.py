"""Attention of a step whose tokens are sharded over emulated ranks, against its definition in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch
from support import run_world
from torch import Tensor

from attention.oracle import Case, check_rows, check_stored, forget
from weft.comm.reference import ReferenceTransport
from weft.comm.transport import Epilogue, LiveSizes, Ranks, Sizes, finish, offer_of
from weft.comm.transport_registry import REFERENCE
from weft.engine.attention.backend import Queries
from weft.engine.attention.context_parallel import ContextParallel
from weft.engine.attention.forward_batch import PageTables
from weft.engine.attention.paged import PagedAttention
from weft.engine.kv.cache import KVCache
from weft.engine.kv.cache_spec import Latent
from weft.planner.cost import costs
from weft.planner.exchange import Exchange, input_rows, result_rows
from weft.planner.prices import BlockPrices, Recipes
from weft.planner.recipes import Merge, Prompt
from weft.planner.spec import Mesh
from weft.stream.block_exchanges import BlockExchanges
from weft.stream.group import context_group
from weft.stream.interleave import Interleave

Make = Callable[[KVCache], PagedAttention]


def run_interleaved(
    make: Make,
    case: Case,
    spans: list[tuple[int, int]],
    interleave: Interleave,
    recipe: Literal["ag_rs", "a2a", "fused"] = "fused",
    max_bytes: int | None = None,
    prefill: Literal["gather", "merge"] = "gather",
    tolerance: float = 1e-5,
    live: bool = False,
    gathered: bool = False,
) -> list[tuple[Tensor, Tensor]]:
    """Run a step of a case whose pages hold `interleave.span` tokens on every rank, with its heads and tokens alone.

    max_bytes: of a call of the transport. live: the transport takes row counts from device memory. gathered: each rank
    has the queries of all. Raise AssertionError if a rank's rows or cache are wrong. Return each rank's output and lse.
    """
    tables, each = case.batch.tables[0], case.q.shape[1] // interleave.ranks
    assert isinstance(tables, PageTables)

    def rank_main(transport: ReferenceTransport) -> tuple[Tensor, Tensor]:
        backend = sharded(make, case, interleave, transport, {Merge: recipe, Prompt: prefill}, max_bytes, live)
        own = slice(transport.rank * each, (transport.rank + 1) * each)
        cache = backend.cache
        before = [x.clone() for x in cache.tensors]
        plan = backend.plan(case.batch, tables)
        v = None if isinstance(case.cache.spec, Latent) else case.v
        cache.write(1, plan.stored, case.k, v)
        q = case.q if gathered else case.q[:, own]
        out, lse = backend.attend(plan, 1, Queries(q, case.scale, lse=True, gathered=gathered))
        assert lse is not None
        again, none = backend.attend(plan, 1, Queries(q, case.scale, gathered=gathered))
        rows = check_rows(case, spans, out, lse, own, tolerance)
        read = slice(rows if case.batch.starts is not None and case.batch.spans is None else None)
        assert none is None and torch.equal(again[read], out[read]), "the same step twice has the same bits"
        slots = interleave.slots(tables.slots, transport.rank)
        mine, new = slots[:rows] >= 0, slots[slots >= 0].long()
        check_stored(cache, case, spans, new, mine, before)
        return out, lse

    return run_world(interleave.ranks, rank_main)


def sharded(
    make: Make,
    case: Case,
    interleave: Interleave,
    transport: ReferenceTransport,
    recipes: Recipes,
    max_bytes: int | None = None,
    live: bool = False,
) -> ContextParallel:
    """The backend of a rank that holds its part of the case's cache. Arguments as for `run_interleaved`."""
    mesh = Mesh(1, interleave.ranks, 1, interleave.ranks, interleave.ranks)
    transport = LiveReference(transport) if live else transport
    found = offer_of(transport.entry, mesh, costs("cpu").of("reference", interleave.ranks))
    prices = BlockPrices(mesh, [replace(found, max_bytes=max_bytes)], recipes)
    group = context_group(interleave, BlockExchanges(mesh, transport.rank, {"reference": transport}, prices))
    assert group is not None
    return ContextParallel(make(local_cache(case, interleave, transport.rank)), group)


class LiveReference(ReferenceTransport):
    """Another rank's end that takes row counts from device memory. What lies behind the live rows is NaN."""

    entry = replace(REFERENCE, takes_live_sizes=True)

    def __init__(self, transport: ReferenceTransport):
        super().__init__(transport._world, transport.rank)

    def exchange(
        self, x: Tensor, exchange: Exchange, group: Ranks, sizes: Sizes | LiveSizes, epilogue: Epilogue | None = None
    ) -> Tensor:
        if not isinstance(sizes, LiveSizes):
            return super().exchange(x, exchange, group, sizes, epilogue)
        live = tuple(sizes.live.tolist())
        assert all(0 <= n <= most for n, most in zip(live, sizes.capacity, strict=True))
        place = group.index(self.rank)
        found = super().exchange(x[: input_rows(exchange, live, place)], exchange, group, live)
        nothing = float("nan") if x.is_floating_point() else 77
        whole = x.new_full((result_rows(exchange, sizes.capacity, place), x.shape[1]), nothing)
        whole[: len(found)] = found
        return finish(whole, epilogue) if epilogue else whole


def local_cache(case: Case, interleave: Interleave, place: int) -> KVCache:
    """Return the cache of the rank at `place` before the case's step; NaN in slots without a token."""
    whole = case.cache
    cache = KVCache(whole.spec, 2, whole.num_pages, interleave.page_size, whole.keys.dtype, whole.keys.device)
    forget(cache)
    slots = interleave.slots(torch.arange(whole.num_pages * interleave.span, device=whole.keys.device), place)
    mine = slots >= 0
    for here, there in zip(cache.tensors, whole.tensors, strict=True):
        here[:, slots[mine]] = there[:, : len(slots)][:, mine]
    return cache
