"""Attention by torch and on CPUs against its definition: ragged steps, padding rows, caches full of NaN."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attention.oracle import NAN, check, make_case, padded, roomy
from weft.engine.attention import sdpa
from weft.engine.attention.backend import Queries
from weft.engine.attention.backend_registry import NATIVE, TORCH, BackendEntry
from weft.engine.attention.build_batch import SeqRows, build_batch
from weft.engine.attention.projections import Absorbed
from weft.engine.kv.cache import KVCache, StateCache
from weft.engine.kv.cache_spec import Latent, PagedKV, Recurrent, Window
from weft.kernels.float8 import FLOAT8

STEPS = {
    "one row": [(1, 0)],
    "decode": [(1, 7), (1, 0), (1, 20), (1, 3)],
    "a whole prompt": [(9, 0)],
    "chunks": [(5, 4), (3, 9), (2, 1)],
    "mixed": [(1, 12), (6, 2), (1, 0), (4, 0), (1, 31)],
}


SPECS = [PagedKV(1, 8), PagedKV(2, 8), PagedKV(4, 8), Window(1, 2, 8), Window(6, 2, 8), Latent(12, 8), Latent(8, 8)]


BACKEND_DTYPES = pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        pytest.param(backend, dtype, id=f"{backend.option}-{dtype}")
        for backend, dtype in (
            *((TORCH, torch.float32), (TORCH, FLOAT8), (NATIVE, torch.float32), (NATIVE, FLOAT8)),
            (NATIVE, torch.bfloat16),  # by AMX, where a host has it
        )
    ],
)
"""The cache's dtypes of each backend."""
TOLERANCE = {torch.float32: 1e-5, FLOAT8: 1e-5, torch.bfloat16: 2e-2}


@BACKEND_DTYPES
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("step", STEPS)
def test_rows_see_what_they_should(
    step: str, spec: PagedKV | Window | Latent, backend: BackendEntry, dtype: torch.dtype
) -> None:
    for seed in range(3):
        case = make_case(STEPS[step], seed=seed, spec=spec, dtype=dtype)
        check(backend.make(case.cache), case, STEPS[step], TOLERANCE[dtype])


@BACKEND_DTYPES
@pytest.mark.parametrize("capacity", [4, 5, 8])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_padding_rows_write_nothing_and_see_nothing(
    capacity: int, spec: PagedKV | Window | Latent, backend: BackendEntry, dtype: torch.dtype
) -> None:
    case = padded(make_case(STEPS["decode"], seed=capacity, spec=spec, dtype=dtype), capacity)
    check(backend.make(case.cache), case, STEPS["decode"], TOLERANCE[dtype])


@BACKEND_DTYPES
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_prompts_in_tensors_of_larger_capacity(
    spec: PagedKV | Window | Latent, backend: BackendEntry, dtype: torch.dtype
) -> None:
    for seed, spans in enumerate(([(1, 12), (1, 0), (6, 2), (9, 0)], [(5, 3)], [(1, 7), (1, 2)])):
        rows = sum(n for n, _ in spans)
        for more in (0, 3):
            case = roomy(make_case(spans, seed=seed, spec=spec, dtype=dtype), rows + 2 * more, len(spans) + more)
            check(backend.make(case.cache), case, spans, TOLERANCE[dtype])


def test_no_rows_at_all() -> None:
    backend, batch = TORCH.make(KVCache(PagedKV(2, 8), 1, 1, 4, torch.float32)), build_batch([], [], 4)
    plan = backend.plan(batch, batch.tables[0])
    backend.cache.write(0, plan.stored, torch.empty(0, 2, 8), torch.empty(0, 2, 8))
    out, lse = backend.attend(plan, 0, Queries(torch.empty(0, 4, 8), 1.0, lse=True))
    assert out.shape == (0, 4, 8) and lse is not None and lse.shape == (0, 4)


def test_a_table_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="1 pages of 4 do not hold 5 tokens"):
        build_batch([1], [SeqRows(1, 4, [[0]], True)], 4)
    with pytest.raises(ValueError, match="2 tokens for 1 rows"):
        build_batch([1, 2], [SeqRows(1, 0, [[0]], True)], 4)


def test_states_begin_at_zero_and_padding_sequences_keep_none() -> None:
    cache = StateCache(Recurrent(((2, 3), (4,))), 2, 3)
    for states in cache.states:
        states[:, :3] = NAN
    ones = tuple(torch.ones(3, *shape) for shape in cache.spec.shapes)
    cache.store(1, torch.tensor([2, -1, 0]), ones)
    loaded = cache.load(1, torch.tensor([-1, 0, 2, -1]))
    for states, kept in zip(loaded, cache.states, strict=True):
        assert states.flatten(1).amax(1).tolist() == [0, 1, 1, 0] == states.flatten(1).amin(1).tolist()
        assert kept[1, 1].isnan().all() and kept[0, :3].isnan().all()


@pytest.mark.parametrize("heads_at_once", [1, 4])
@pytest.mark.parametrize(("entry", "dtype"), [(TORCH, torch.float32), (NATIVE, torch.bfloat16)], ids=["torch", "cpu"])
def test_expanded_prompts_are_absorbed_ones(
    entry: BackendEntry, dtype: torch.dtype, heads_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks and prompts behind cached tokens are expanded. The absorbed form is chosen by operations: few rows, many
    tokens. An expanded prompt reads neither absorbed projection.
    """
    spans, spec = [(1, 12), (9, 0), (1, 0), (6, 5), (2, 0), (2, 30)], Latent(28, 24, (6, 5))
    plain, case = (make_case(spans, seed=3, spec=each, dtype=dtype) for each in (Latent(28, 24), spec))
    torch.manual_seed(0)
    up, q = (torch.randn(4, 11, 24) / 5).to(dtype), torch.randn(len(case.batch.tokens), 4, 10).to(dtype)
    absorbed = Absorbed(*up.split([6, 5], dim=1))
    monkeypatch.setattr(sdpa, "MAX_ELEMENTS", heads_at_once * 11 * 11)
    outs = []
    for each, projections in ((plain, absorbed), (case, replace(absorbed, up=up))):
        backend = entry.make(each.cache)
        plan = backend.plan(each.batch, each.batch.tables[0])
        backend.cache.write(1, plan.stored, each.k, None)
        outs.append(backend.attend(plan, 1, Queries(q, 0.3, absorbed=projections))[0])
    assert torch.allclose(*outs, rtol=TOLERANCE[dtype], atol=2 * TOLERANCE[dtype])
    unread = torch.full_like(up, NAN)
    backend = entry.make(case.cache)
    plan = backend.plan(case.batch, case.batch.tables[0])
    found, _ = backend.attend(plan, 1, Queries(q, 0.3, absorbed=Absorbed(unread[:, :6], unread[:, 6:], up)))
    rows = torch.repeat_interleave(torch.tensor([n for n, _ in spans]))
    by_sequence = [bool(found[rows == at].isfinite().all()) for at in range(len(spans))]
    assert by_sequence == [False, True, False, True, True, False]
