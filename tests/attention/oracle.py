"""Definition of attention over a paged cache, in float64, one row at a time, and random steps to try a backend on."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from weft.engine.attention.backend import Queries
from weft.engine.attention.build_batch import SeqRows, build_batch
from weft.engine.attention.forward_batch import Batch, PageTables
from weft.engine.attention.paged import PagedAttention
from weft.engine.kv.cache import KVCache
from weft.engine.kv.cache_spec import Latent, PagedKV, Window
from weft.kernels.float8 import FLOAT8, take, to_vectors

NAN = float("nan")


@dataclass
class Case:
    """A step of random sequences: the cache holds what came before it, and NaN wherever no token lies."""

    batch: Batch
    cache: KVCache
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    keys: list[Tensor]
    """Keys of each sequence, `[context + rows, kv_heads, dim]`, as the cache holds them: dequantised for FP8."""
    values: list[Tensor]


def make_case(
    spans: list[tuple[int, int]],
    *,
    seed: int = 0,
    page: int = 4,
    heads: int = 4,
    spec: PagedKV | Window | Latent = PagedKV(2, 8),  # noqa: B008
    dtype: torch.dtype = torch.float32,
) -> Case:
    """A case of sequences of (rows, context), in layer 1 of 2, with scores far from even. dtype: of the cache; if it is
    bfloat16, also of queries, keys and values."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    own = dtype if dtype == torch.bfloat16 else torch.float32

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(own)

    needed = [-(-(rows + context) // page) for rows, context in spans]
    free = draw.sample(range(sum(needed) + 3), sum(needed))
    cache, latent = KVCache(spec, 2, len(free) + 3, page, dtype), isinstance(spec, Latent)
    kv_heads, dim = cache.keys.shape[2:]
    forget(cache)
    seqs, keys, values = [], [], []
    for (rows, context), count in zip(spans, needed, strict=True):
        pages = [free.pop() for _ in range(count)]
        keys.append(3 * normal(context + rows, kv_heads, dim))
        values.append(keys[-1][..., : spec.value_width] if latent else normal(context + rows, kv_heads, dim))
        at = torch.arange(0 if cache.window is None else max(0, context - cache.window + 1), context)
        slots = torch.tensor(pages, dtype=torch.int64)[at // page] * page + at % page
        cache.write(1, slots, keys[-1][at], None if latent else values[-1][at])
        seqs.append(SeqRows(rows, context, [pages], True))
    total = sum(rows for rows, _ in spans)
    batch = build_batch(list(range(total)), seqs, page)
    new = [slice(context, None) for _, context in spans]
    k, v = (torch.cat([x[at] for x, at in zip(all_, new, strict=True)]) for all_ in (keys, values))
    if dtype == FLOAT8:
        keys, values = ([as_held(x) for x in all_] for all_ in (keys, values))
        values = [x[..., : spec.value_width] for x in keys] if latent else values
    return Case(batch, cache, normal(total, heads, dim), k, v, 0.7, keys, values)


def as_held(x: Tensor) -> Tensor:
    """Return vectors as a cache in FP8 holds them, dequantised."""
    values, exponents = to_vectors(x)
    return torch.ldexp(values.float(), exponents[..., None])


def forget(cache: KVCache) -> None:
    """NaN in every slot."""
    cache.keys.fill_(NAN)
    cache.values.fill_(NAN)


def padded(case: Case, capacity: int) -> Case:
    """Return the same decode step as a CUDA graph sees it: more rows than sequences, and nothing known to the host."""
    batch, pads = case.batch, capacity - len(case.batch.tokens)
    assert batch.spans is not None and all(rows == 1 for rows, _ in batch.spans) and pads >= 0

    def longer(x: Tensor, filler: float) -> Tensor:
        return torch.cat([x, x.new_full((pads, *x.shape[1:]), filler)])

    tables = batch.tables[0]
    assert isinstance(tables, PageTables)
    pages = torch.cat([tables.pages, tables.pages.new_full((len(tables.pages), 2), 1000)], dim=1)
    return replace(
        case,
        batch=replace(
            batch,
            tokens=longer(batch.tokens, 0),
            positions=longer(batch.positions, 0),
            lengths=longer(batch.lengths, 0),
            starts=None,
            tables=(PageTables(longer(pages, 1000), longer(tables.slots, -1)),),
            spans=None,
        ),
        q=longer(case.q, NAN),
        k=longer(case.k, NAN),
        v=longer(case.v, NAN),
    )


def roomy(case: Case, rows: int, sequences: int) -> Case:
    """A step with prompts as a CUDA graph would see it: sequences of one row come first, then others, then none."""
    batch, tables = case.batch, case.batch.tables[0]
    assert batch.starts is not None and isinstance(tables, PageTables)

    def longer(x: Tensor, space: int, filler: float) -> Tensor:
        return torch.cat([x, x.new_full((space - len(x), *x.shape[1:]), filler)])

    pages = torch.cat([tables.pages, tables.pages.new_full((len(tables.pages), 2), 1000)], dim=1)
    return replace(
        case,
        batch=replace(
            batch,
            tokens=longer(batch.tokens, rows, 0),
            positions=longer(batch.positions, rows, 0),
            starts=longer(batch.starts, sequences + 1, len(batch.tokens)),
            lengths=longer(batch.lengths, sequences, 0),
            tables=(PageTables(longer(pages, sequences, 1000), longer(tables.slots, rows, -1)),),
            spans=None,
        ),
        q=longer(case.q, rows, NAN),
        k=longer(case.k, rows, NAN),
        v=longer(case.v, rows, NAN),
    )


def check(backend: PagedAttention, case: Case, spans: list[tuple[int, int]], tolerance: float = 1e-5) -> None:
    """Run the step on a backend of the case's cache; raise AssertionError if a row or the cache is wrong."""
    before, tables = [x.clone() for x in case.cache.tensors], case.batch.tables[0]
    assert isinstance(tables, PageTables)
    v = None if isinstance(case.cache.spec, Latent) else case.v
    plan = backend.plan(case.batch, tables)
    backend.cache.write(1, plan.stored, case.k, v)
    out, lse = backend.attend(plan, 1, Queries(case.q, case.scale, lse=True))
    alone, none = backend.attend(plan, 1, Queries(case.q, case.scale))
    row = sum(rows for rows, _ in spans)
    assert lse is not None and none is None and torch.equal(alone[:row], out[:row])
    check_rows(case, spans, out, lse, tolerance=tolerance)
    new = tables.slots[tables.slots >= 0]
    check_stored(case.cache, case, spans, new, torch.ones(row, dtype=torch.bool, device=new.device), before)


def check_stored(
    cache: KVCache, case: Case, spans: list[tuple[int, int]], new: Tensor, mine: Tensor, before: list[Tensor]
) -> None:
    """AssertionError unless the case's new rows, where they are mine, lie in these slots of layer 1, and all else is as
    before.
    """
    for stored, all_ in zip(cache.of_layer(1), (case.keys, case.values), strict=True):
        wanted = torch.cat([x[context:] for x, (_, context) in zip(all_, spans, strict=True)])
        assert torch.equal(take(stored, new.long(), wanted.dtype), wanted[mine])
    old = torch.ones(cache.num_pages * cache.page_size, dtype=torch.bool, device=new.device)
    old[new.long()] = False
    for kept, was in zip(cache.tensors, before, strict=True):
        now, then = (x[1, : len(old)][old].nan_to_num(9e9) for x in (kept.float(), was.float()))
        assert torch.equal(now, then), "a slot that no row owns was written"


def check_rows(
    case: Case,
    spans: list[tuple[int, int]],
    out: Tensor,
    lse: Tensor,
    heads: slice = slice(None),
    tolerance: float = 1e-5,
) -> int:
    """AssertionError unless these are the case's outputs and lse, of some of its heads; gives the rows of sequences."""
    row = 0
    for (rows, context), keys, values in zip(spans, case.keys, case.values, strict=True):
        for i in range(rows):
            end = context + i + 1
            begin = 0 if case.cache.window is None else max(0, end - case.cache.window)
            for at, head in enumerate(range(case.q.shape[1])[heads]):
                kv = head * keys.shape[1] // case.q.shape[1]
                scores = case.scale * keys[begin:end, kv].double() @ case.q[row, head].double()
                expected = scores.softmax(0) @ values[begin:end, kv].double()
                assert (out[row, at].double() - expected).norm() <= tolerance * expected.norm()
                assert abs(lse[row, at].double() - scores.logsumexp(0)) <= tolerance * (1 + scores.abs().max())
            row += 1
    if case.batch.starts is not None and case.batch.spans is None:
        return row  # nobody reads what else is there
    assert torch.equal(out[row:], torch.zeros_like(out[row:])), "a padding row's output"
    assert bool((lse[row:] == -torch.inf).all()), "a padding row sees nothing"
    return row
