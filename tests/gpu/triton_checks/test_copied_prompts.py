"""Prompts over copies of their tokens in a row: against the definition of attention, and bit for bit against prompts
over pages.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attention.oracle import Case, check, make_case, roomy
from gpu import definitions
from gpu.triton_checks.test_backend import on
from gpu.triton_checks.test_decode_attention import PAGE, TOLERANCE, close
from gpu.triton_checks.test_other_backends import TOLERANCE as TOLERANCE_OF_ROWS
from gpu.triton_checks.test_other_backends import case_of
from gpu.triton_checks.test_prefill_attention import SPANS, Step, attend
from gpu.triton_checks.worker import INTERPRETED
from weft.engine.attention import expansion, paged_triton
from weft.engine.attention.backend import Queries
from weft.engine.attention.backend_registry import TRITON
from weft.engine.attention.forward_batch import PageTables
from weft.engine.kernels.triton import copied_prompts as kernels
from weft.engine.kernels.triton.copy_pages import copy_pages
from weft.engine.kernels.triton.prefill_attention import PrefillTile, prefill_attention
from weft.engine.kv.cache import KVCache
from weft.engine.kv.cache_spec import Latent, PagedKV, Window
from weft.kernels.float8 import Stored, to_vectors

SMALL = PrefillTile(64, 32, 4, 2)
LONG = ((150, 90), (1, 9), (0, 3), (2, 17), (130, 0))


def attend_copied(
    step: Step, q: Tensor, keys: Stored, values: Stored, chosen: Tensor, tile: PrefillTile | None
) -> tuple[Tensor, Tensor]:
    """(output, lse) where the chosen sequences, bool `[B]`, attend to copies, and the others over pages."""
    spans = step.starts.diff()
    lengths = torch.stack(
        [step.limits[int(last) - 1] if n else n for n, last in zip(spans, step.starts[1:], strict=True)]
    ).int()
    bases, live = expansion._places(chosen & (spans > 1), lengths, 1024)
    copied = torch.full((2, 1024, *keys.shape[1:]), float("nan"), dtype=q.dtype, device=q.device)
    copy_pages(keys, values, step.pages, bases, lengths, live, PAGE, copied)
    out, lse = torch.full_like(q, -7.0), torch.full(q.shape[:2], -7.0, device=q.device)
    of_rows = step.starts, step.limits
    kernels.copied_prefill_attention(q, copied, *of_rows, bases, 0.3, out, lse=lse, tile=tile)
    where = (step.pages, *of_rows, PAGE, 0.3)
    prefill_attention(q, keys, values, *where, out, lse=lse, bases=bases, tile=tile)
    return out, lse


@pytest.mark.parametrize(
    "spans, dim, tile, float8",
    [
        (SPANS, 16, SMALL, False),
        (SPANS, 16, SMALL, True),
        (LONG, 128, None, False),
        pytest.param(((300, 0),), 128, None, False, marks=pytest.mark.nightly),
        pytest.param(((300, 0),), 128, None, True, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_copied_prompts(
    spans: tuple[tuple[int, int], ...], dim: int, tile: PrefillTile | None, float8: bool, device: torch.device
) -> None:
    step = Step(spans, 4, dim, torch.float16, device)
    q = torch.randn(len(step.limits), 6, dim, device=device).half()
    keys, values = step.cache[:, :2], step.cache[:, 2:]
    wide = [x.double() for x in (q, keys, values)]
    if float8:
        keys, values = to_vectors(keys), to_vectors(values)
        wide[1:] = [torch.ldexp(x.values.double(), x.exponents[..., None]) for x in (keys, values)]
    paged = attend(step, q, keys, values, tile=tile)
    wanted, lse = definitions.decode_attention(*wide, step.pages[step.sequence], step.limits, PAGE, 0.3, None)
    every = torch.ones(len(spans), dtype=torch.bool, device=device)
    for chosen in (every, torch.arange(len(spans), device=device) % 2 == 0):
        found = attend_copied(step, q, keys, values, chosen, tile)
        assert close(found[0][step.several], wanted[step.several], TOLERANCE[q.dtype])
        assert torch.allclose(found[1].double()[step.several], lse[step.several], rtol=1e-5, atol=2e-3)
        assert all(torch.equal(a, b) for a, b in zip(found, paged, strict=True)), "the bits depend on the kernel"


def test_a_row_has_the_same_bits_however_its_prompt_is_cut(device: torch.device) -> None:
    whole = Step(((301, 0),), 2, 128, torch.float16, device)
    q = torch.randn(301, 8, 128, device=device).half()
    keys, values, one = whole.cache[:, :1], whole.cache[:, 1:], torch.ones(1, dtype=torch.bool, device=device)
    together = attend_copied(whole, q, keys, values, one, None)
    for begin, end, copied in ((0, 133, True), (133, 140, False), (140, 301, True)):
        chunk = Step(((end - begin, begin),), 2, 128, torch.float16, device)
        chunk.pages = whole.pages
        alone = attend_copied(chunk, q[begin:end].clone(), keys, values, one & copied, None)
        assert all(torch.equal(a, b[begin:end]) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize(
    "capacity",
    [pytest.param(1 << 16, id="room for all", marks=pytest.mark.nightly), pytest.param(256, id="room for some")],
)
def test_backend(capacity: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with prompts, eager ones and a graph's: ragged rows, next to decode rows, sequences without a place."""
    monkeypatch.setattr(expansion, "MIN_MEAN_ROWS", 3)
    monkeypatch.setattr(expansion, "MAX_TOKENS", capacity)
    if INTERPRETED:  # which has no bfloat16
        monkeypatch.setattr(paged_triton, "copies_pages", lambda dim, size: True)
    copied: list[Tensor] = []
    attend = kernels.copied_prefill_attention
    monkeypatch.setattr(
        paged_triton, "copied_prefill_attention", lambda *a, **k: (copied.append(a[4]), attend(*a, **k))
    )
    for spans in ([(1, 90), (1, 0), (36, 20), (9, 0), (130, 3)], [(70, 3)], [(2, 60), (20, 0)]):
        case = make_case(spans, page=16, spec=PagedKV(2, 16)) if INTERPRETED else case_of(spans, PagedKV(2, 128), 1)
        for each in (case, roomy(case, len(case.q) + 5, len(spans) + 2)):
            case = on(device, each)
            check(TRITON.make(case.cache), case, spans, *(() if INTERPRETED else (TOLERANCE_OF_ROWS,)))
    chosen = [int((bases >= 0).sum()) for bases in copied[::2]]  # each step attends twice
    assert chosen == ([3, 3, 1, 1, 1, 1] if capacity > 256 else [2, 2, 1, 1, 1, 1])


@pytest.mark.parametrize(
    "arch, spec, dtype, copies",
    [
        (90, PagedKV(2, 128), torch.bfloat16, True),
        (100, PagedKV(2, 128), torch.float16, True),
        (89, PagedKV(2, 128), torch.bfloat16, False),
        (90, PagedKV(2, 128), torch.float32, False),
        (90, PagedKV(2, 128), torch.float8_e4m3fn, True),
        (90, PagedKV(2, 64), torch.bfloat16, False),
        (90, Window(40, 2, 128), torch.bfloat16, False),
        (90, Latent(128, 128), torch.bfloat16, False),
    ],
    ids=str,
)
def test_the_shape_and_the_gpu_choose(
    arch: int, spec: PagedKV | Window | Latent, dtype: torch.dtype, copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "arch", lambda: arch)
    assert TRITON.prompts(KVCache(spec, 1, 2, 16, dtype)).copies is copies


def test_sequences_of_many_rows_are_copied() -> None:
    spans = ((512, 0), (1024, 0), (512, 8000), (600, 8000), (1, 9000), (0, 0))
    starts = torch.tensor([0, *(n for n, _ in spans)]).cumsum(0).int()
    lengths = torch.tensor([n + context for n, context in spans]).int()
    plan = expansion.plan_copies(PagedKV(4, 128), starts, lengths, int(starts[-1]), 9001)
    assert plan is not None and (plan.places, plan.live.tolist()) == (6 * 9088, [1024 + 8704])
    assert plan.bases.tolist() == [-1, 0, -1, 1024, -1, -1]
    assert expansion.plan_copies(PagedKV(4, 128), starts, lengths, 512, 9001) is None
    wide = expansion.plan_copies(PagedKV(64, 128), starts, lengths, 9000, 9001)
    assert wide is not None and wide.places * 2 * 64 * 128 == expansion.MAX_ELEMENTS


def inputs_of(case: Case) -> list[Tensor]:
    """Return a graph's inputs of a step, the tokens' numbers aside."""
    batch, table = case.batch, case.batch.tables[0]
    assert isinstance(table, PageTables) and batch.starts is not None
    return [case.q, case.k, case.v, batch.positions, batch.starts, batch.lengths, table.pages, table.slots]


@pytest.mark.skipif(INTERPRETED, reason="takes a GPU")
def test_a_graph_takes_other_lengths(device: torch.device) -> None:
    """The captured launches hold descriptors of the workspace; what is copied to where is read when they run."""
    cache = KVCache(PagedKV(2, 128), 1, 200, 16, torch.bfloat16, device)
    cache.keys.normal_()
    cache.values.normal_()
    backend, cases = TRITON.make(cache), []
    for spans in ([(700, 20), (600, 0)], [(1, 70), (1100, 900)], [(1, 5), (513, 0)]):
        case = on(device, roomy(case_of(spans, PagedKV(2, 128), 1), 1400, 4))
        table = case.batch.tables[0]
        assert isinstance(table, PageTables)
        pages = torch.nn.functional.pad(table.pages, (0, 140 - table.pages.shape[1]))
        case.batch = replace(case.batch, tables=(replace(table, pages=pages),))
        cases.append(replace(case, **{name: getattr(case, name).nan_to_num(0.0) for name in ("q", "k", "v")}))

    def run(case: Case) -> Tensor:
        table = case.batch.tables[0]
        assert isinstance(table, PageTables)
        plan = backend.plan(case.batch, table)
        cache.write(0, plan.stored, case.k, case.v)
        return backend.attend(plan, 0, Queries(case.q, 0.1))[0]

    kept, wanted = [x.clone() for x in (cache.keys, cache.values)], []
    for case in cases:
        cache.keys.copy_(kept[0])
        cache.values.copy_(kept[1])
        wanted.append(run(case).clone())
    held = replace(cases[0])
    inputs = [x.clone() for x in inputs_of(held)]  # the first is as long as any
    held.q, held.k, held.v, positions, starts, lengths, pages, slots = inputs
    tables = (PageTables(pages, slots),)
    held.batch = replace(held.batch, positions=positions, starts=starts, lengths=lengths, tables=tables)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(held)
    for case, expected in [*zip(cases, wanted, strict=True)][::-1]:
        cache.keys.copy_(kept[0])
        cache.values.copy_(kept[1])
        for mine, given in zip(inputs, inputs_of(case), strict=True):
            mine.copy_(given)
        graph.replay()
        rows = int(starts[-1])
        assert torch.equal(out[:rows], expected[:rows])
