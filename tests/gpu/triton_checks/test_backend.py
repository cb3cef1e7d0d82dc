"""The engine's attention backend that stands on the decode kernel, against the definition of attention."""

from __future__ import annotations

import copy
import itertools
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from support import run_world
from torch import Tensor

from attention.oracle import Case, check, make_case, padded, roomy
from dcp.interleaved import run_interleaved, sharded
from pairs import in_pairs
from weft.comm.reference import ReferenceTransport
from weft.engine.attention import captured_prompts, paged_triton, projections
from weft.engine.attention.backend import DecodeRows, Queries
from weft.engine.attention.backend_registry import TORCH, TRITON, backends
from weft.engine.attention.captured_prompts import CapturedPrompts
from weft.engine.attention.expansion import ALIGNMENT, pays
from weft.engine.attention.projections import Absorbed, LatentSplit
from weft.engine.kv.cache_spec import Latent, PagedKV, Window
from weft.engine.models.layers.basic import Builder, HeadNorm
from weft.engine.models.layers.rotary import RotaryTable
from weft.kernels.float8 import FLOAT8
from weft.planner.spec import Mesh
from weft.stream.group import ContextGroup
from weft.stream.interleave import Interleave

DECODE = [(1, 7), (1, 0), (1, 20), (1, 3)]
TOY = str(Path(__file__).parents[2] / "engine" / "toy_backend.py")


def moved(x: Any, device: torch.device) -> Any:
    """x with every tensor in it on the device."""
    if isinstance(x, Tensor):
        return x.to(device)
    if isinstance(x, tuple | list):
        return type(x)(moved(y, device) for y in x)
    if is_dataclass(x) and not isinstance(x, type):
        return replace(x, **{f.name: moved(getattr(x, f.name), device) for f in fields(x)})
    return x


def on(device: torch.device, case: Case) -> Case:
    case = moved(case, device)
    case.cache.keys = case.cache.keys.to(device)
    latent = isinstance(case.cache.spec, Latent)
    case.cache.values = case.cache.keys[..., : case.cache.spec.value_width] if latent else case.cache.values.to(device)
    if case.cache.exponents is not None:
        case.cache.exponents = case.cache.exponents.to(device)
    return case


def by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's kernels store rows and project queries, as on a GPU."""
    monkeypatch.setattr(projections, "on_gpu", lambda x: True)


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, FLOAT8], ids=str)
"""Dtypes of the cache."""


@DTYPES
@pytest.mark.parametrize("spec", [PagedKV(1, 8), PagedKV(2, 8), Window(6, 2, 8), Latent(12, 8), Latent(8, 8)], ids=str)
def test_decode(spec: PagedKV | Window | Latent, dtype: torch.dtype, device: torch.device) -> None:
    case = on(device, make_case(DECODE, seed=1, spec=spec, dtype=dtype))
    check(TRITON.make(case.cache), case, DECODE)


def test_heads_that_share_a_vector_decide_how_rows_are_cut(device: torch.device) -> None:
    for heads, short in ((16, None), (64, None), (128, 1024)):
        case = on(device, make_case(DECODE, seed=1, spec=Latent(576, 512, heads=heads)))
        pages, lengths = (
            torch.zeros(2, 4, dtype=torch.int32, device=device),
            torch.ones(2, dtype=torch.int32, device=device),
        )
        *_, splits = TRITON.decode(case.cache).plan(DecodeRows(pages, lengths))
        assert splits.cut.short == short


@DTYPES
@pytest.mark.parametrize("spec", [PagedKV(2, 8), Window(6, 2, 8), Latent(12, 8)], ids=str)
def test_padding_rows(spec: PagedKV | Window | Latent, dtype: torch.dtype, device: torch.device) -> None:
    case = on(device, padded(make_case(DECODE, seed=2, spec=spec, dtype=dtype), 6))
    check(TRITON.make(case.cache), case, DECODE)


@pytest.mark.parametrize("spec", [PagedKV(2, 8), Window(6, 2, 8), Latent(12, 8), Latent(8, 8)], ids=str)
def test_steps_with_prompts(spec: PagedKV | Window | Latent, device: torch.device) -> None:
    steps: list[list[tuple[int, int]]] = [[(1, 12), (6, 2), (1, 0), (9, 0)], [(1, 12), (1, 0), (6, 2)], [(5, 3)]]
    for dtype, (seed, spans) in itertools.product((torch.float32, FLOAT8), enumerate(steps)):
        case = on(device, make_case(spans, seed=seed, spec=spec, dtype=dtype))
        check(TRITON.make(case.cache), case, spans)


@pytest.mark.parametrize("spec", [PagedKV(2, 8), Window(6, 2, 8), Latent(12, 8)], ids=str)
def test_steps_with_prompts_in_graphs(spec: PagedKV | Window | Latent, device: torch.device) -> None:
    """Answers, chunks of a row and of several, padding behind; one kind missing, or all; no room to spare."""
    dtypes = torch.float32, FLOAT8
    ragged: list[list[tuple[int, int]]] = [[(1, 12), (1, 0), (6, 2), (9, 0)], [(5, 3)], [(1, 7), (1, 2)]]
    for seed, (spans, capacity) in enumerate(zip(ragged, ((25, 6), (7, 2), (4, 4)), strict=True)):
        for rows, sequences in (capacity, (sum(n for n, _ in spans), len(spans))):
            case = on(device, roomy(make_case(spans, seed=seed, spec=spec, dtype=dtypes[seed % 2]), rows, sequences))
            check(TRITON.make(case.cache), case, spans)


@pytest.mark.usefixtures("ranks")
@DTYPES
@pytest.mark.parametrize("spec", [PagedKV(1, 8), Latent(12, 8)], ids=str)
def test_sharded_tokens(spec: PagedKV | Latent, dtype: torch.dtype, device: torch.device) -> None:
    """Decode context parallelism: ranks that hold nothing of a row, padding rows, and prompts next to them."""
    interleave = Interleave(2, 2, 4)
    case = on(device, padded(make_case(DECODE, seed=4, page=interleave.span, spec=spec, dtype=dtype), 6))
    run_interleaved(TRITON.make, case, DECODE, interleave)
    spans = [(1, 12), (6, 2), (1, 0)]
    for prefill in ("gather", "merge"):
        case = on(device, make_case(spans, seed=3, page=interleave.span, spec=spec, dtype=dtype))
        run_interleaved(TRITON.make, case, spans, interleave, prefill=prefill)


SHARDED: dict[str, tuple[list[tuple[int, int]], tuple[int, int], dict[str, Any], bool]] = {
    "gathered": ([(1, 12), (1, 0), (6, 2), (9, 0)], (25, 6), {}, True),
    "tokens in several calls": ([(5, 113), (3, 30)], (9, 2), dict(max_bytes=1500), True),
    "queries in two calls": ([(1, 12), (1, 0), (3, 2), (3, 0)], (25, 6), dict(max_bytes=1500), True),
    "merged": ([(1, 12), (6, 2), (9, 0)], (25, 6), dict(prefill="merge"), False),
    "no counts on the device": ([(1, 12), (6, 2), (9, 0)], (25, 6), dict(live=False), False),
    "queries of all heads": ([(3, 0), (2, 41)], (5, 2), dict(gathered=True), True),
    "queries of all heads, merged": ([(1, 7), (5, 41)], (6, 2), dict(gathered=True, prefill="merge"), False),
    "no prompts": ([(1, 7), (1, 2)], (4, 4), {}, False),
    "an empty group": ([(0, 0)], (4, 4), {}, False),
}
"""Steps with their upper bounds of rows and of sequences, and whether their prompts gather the tokens that they see."""


SHARDED_BY_DAY = ("gathered", "queries in two calls", "merged", "no counts on the device", "no prompts")


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize(
    "ranks_, spec, dtype, steps",
    [
        (2, PagedKV(1, 8), FLOAT8, SHARDED_BY_DAY),
        *(
            pytest.param(*case, tuple(SHARDED), marks=pytest.mark.nightly)
            for case in itertools.product((2, 4), (PagedKV(1, 8), Latent(12, 8)), (torch.float32, FLOAT8))
            if case != (4, Latent(12, 8), FLOAT8)
        ),
    ],
    ids=str,
)
def test_sharded_tokens_of_prompts_in_graphs(
    ranks_: int,
    spec: PagedKV | Latent,
    dtype: torch.dtype,
    steps: tuple[str, ...],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device decides whether prompts gather tokens or are merged; the host knows neither rows nor tokens."""
    found, attend = list[bool](), CapturedPrompts.attend

    def watched(prompts: CapturedPrompts, *layer: Any) -> Any:
        found.append(prompts._tokens is not None and bool(prompts._tokens.places))
        return attend(prompts, *layer)

    monkeypatch.setattr(CapturedPrompts, "attend", watched)
    interleave = Interleave(ranks_, 2, 4)
    for name in steps:
        spans, capacity, how, gathers = SHARDED[name]
        case = make_case(spans, seed=len(name), page=interleave.span, heads=ranks_, spec=spec, dtype=dtype)
        case = roomy(case, *capacity)
        found.clear()
        run_interleaved(TRITON.make, on(device, case), spans, interleave, **dict(prefill="gather", live=True) | how)
        assert {*found} == {gathers}, name


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("prefill", ["gather", "merge"])
def test_a_plugins_kernels_over_sharded_tokens_in_graphs(
    prefill: Literal["gather", "merge"], device: torch.device
) -> None:
    spans, interleave = [(1, 12), (1, 0), (6, 2), (9, 0)], Interleave(2, 2, 4)
    case = on(device, roomy(make_case(spans, page=interleave.span, spec=PagedKV(1, 8)), 25, 6))
    run_interleaved(backends([TOY])["toy"].make, case, spans, interleave, prefill=prefill, live=True)


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("allowed, gathers", [(27, True), (26, False)])
def test_prompts_in_graphs_gather_all_tokens_that_the_plan_allows(
    allowed: int, gathers: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """27 on the rank that holds the most; each sequence takes whole pages of the places of gathered tokens."""
    found, attend = list[bool](), CapturedPrompts.attend

    def watched(prompts: CapturedPrompts, *layer: Any) -> Any:
        found.append(prompts._tokens is not None and bool(prompts._tokens.places))
        return attend(prompts, *layer)

    monkeypatch.setattr(CapturedPrompts, "attend", watched)
    monkeypatch.setattr(ContextGroup, "prefill", lambda _, what, rows: "gather" if what.seen <= allowed else "merge")
    spans, interleave = [(2, 15)] * 3, Interleave(2, 2, 4)
    case = roomy(make_case(spans, seed=6, page=interleave.span, spec=PagedKV(1, 8), heads=2), 6, 3)
    run_interleaved(TRITON.make, on(device, case), spans, interleave, live=True)
    assert {*found} == {gathers}


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("gathered, cheap, saves", [(False, 99, 1), (True, 1, 0), (False, 1, 1 << 40), (True, 0, 0)])
def test_sharded_latent_projections_in_graphs(
    gathered: bool, cheap: int, saves: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that are expanded, that attend absorbed, and decode rows, as one rank of torch's backend has them.

    cheap: as many tokens are gathered at the price of a merge, and more where expansion saves operations, `saves` for
    each byte; 0: no prompt gathers.
    """
    made, attend = list[bool](), CapturedPrompts.attend

    def watched(prompts: CapturedPrompts, *layer: Any) -> Any:
        made.append(prompts._tokens is not None and bool(prompts._tokens.places))
        return attend(prompts, *layer)

    monkeypatch.setattr(CapturedPrompts, "attend", watched)
    monkeypatch.setattr(ContextGroup, "prefill", lambda _, what, rows: "gather" if what.seen <= cheap else "merge")
    monkeypatch.setattr(captured_prompts, "BYTE_OPERATIONS", saves)
    by_triton(monkeypatch)
    rotary, latent, heads, nope, value, spans = 4, 24, 4, 6, 5, [(1, 12), (6, 2), (2, 61), (9, 0)]
    spec = Latent(latent + rotary, latent, (nope, value))
    expands = [bool(pays(spec, n, n + context)) for n, context in spans[1:]]
    assert expands == [True, False, True]
    interleave = Interleave(2, 2, 4)
    case = make_case(spans, seed=3, page=interleave.span, heads=heads, spec=spec)
    torch.manual_seed(5)
    up = torch.randn(heads, nope + value, latent).to(device) / latent**0.5
    absorbed = Absorbed(*up.split([nope, value], dim=1), up)
    case = on(device, replace(roomy(case, 25, 6), q=torch.randn(25, heads, nope + rotary)))
    whole = TORCH.make(copy.deepcopy(case.cache))
    plan = whole.plan(case.batch, case.batch.tables[0])
    whole.cache.write(1, plan.stored, case.k.nan_to_num(), None)
    expected = whole.attend(plan, 1, Queries(case.q.nan_to_num(), 0.3, absorbed=absorbed))[0]

    def rank_main(transport: ReferenceTransport) -> Tensor:
        backend = sharded(TRITON.make, case, interleave, transport, {}, live=True)
        plan, q = backend.plan(case.batch, case.batch.tables[0]), case.q.chunk(2, dim=1)[transport.rank]
        backend.cache.write(1, plan.stored, case.k, None)
        queries = Queries(case.q if gathered else q, 0.3, absorbed=absorbed, gathered=gathered)
        return backend.attend(plan, 1, queries)[0]

    found, rows = torch.cat(run_world(2, rank_main), dim=1), sum(n for n, _ in spans)
    assert torch.allclose(found[:rows], expected[:rows], rtol=1e-4, atol=1e-5)
    assert {*made} == {cheap == 99 or (cheap > 0 and saves == 0)}


PROJECTED: dict[str, tuple[list[tuple[int, int]], int]] = {
    "decode": (DECODE, 0),
    "prompts": ([(1, 12), (6, 2), (1, 0)], 0),
    "answers first": ([(1, 12), (1, 0), (6, 2)], 0),
    "graph": ([(1, 12), (1, 0), (6, 2)], 3),
    "prompts of both forms": ([(1, 12), (6, 2), (1, 0), (2, 30), (9, 0)], 0),
    "graph of both forms": ([(1, 12), (1, 0), (6, 2), (2, 30), (9, 0)], 3),
    "no answers": ([(4, 0), (2, 0)], 1),
}
"""Rows and context of each sequence of a step, and further rows and sequences that it has room for."""
STORED = {"plain": (False, torch.float32), "interleaved": (True, torch.float32), "in FP8": (True, FLOAT8)}
"""Flag of interleaved angles, and the cache's dtype, by name."""


@in_pairs("step, stored, expanded", PROJECTED, STORED, (False, True))
def test_latent_projections(
    step: str,
    stored: str,
    expanded: bool,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Norm, rotary, the cache's write and attention, from the projections: as torch's backend has them, which never
    expands. expanded: prompts may be, two heads at a time."""
    (spans, more), (interleaved, dtype) = PROJECTED[step], STORED[stored]
    rotary_dim, latent, heads, nope, value = 4, 24, 4, 6, 5
    made = make_case(spans, seed=3, spec=Latent(latent + rotary_dim, latent), dtype=dtype)
    monkeypatch.setattr(paged_triton, "MAX_ELEMENTS", 2 * len(spans) * ALIGNMENT * (nope + value))
    live = len(made.batch.tokens)
    rows = live + 2 * more
    roomier = roomy(made, rows, len(spans) + more) if more else made
    cases = [on(device, replace(roomier, cache=copy.deepcopy(made.cache))) for _ in range(2)]
    torch.manual_seed(5)
    angle = torch.rand(rows, 1, rotary_dim // 2) * 9
    angle = angle.repeat_interleave(2, -1) if interleaved else torch.cat((angle, angle), -1)
    norm = HeadNorm(Builder(Mesh(), 0, torch.float32, torch.device("cpu")), "norm", latent, 1e-6)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    parts = LatentSplit(
        nope + rotary_dim, RotaryTable(angle.cos().to(device), angle.sin().to(device), interleaved), norm
    )
    norm.to(device)
    up = torch.randn(heads, nope + value, latent).to(device)
    absorbed = Absorbed(*up.split([nope, value], dim=1), up=up)
    if expanded:
        spec = replace(made.cache.spec, expanded=(nope, value))
        assert all(pays(spec, n, n + context) == (n > 2 or context == 0) for n, context in spans if n > 1)
        cases[1].cache.spec = spec
    q, kv = torch.randn(rows, heads * parts.dim).to(device), torch.randn(rows, latent + rotary_dim).to(device)
    outs = []
    for case, entry in zip(cases, (TORCH, TRITON), strict=True):
        if entry is TRITON:
            by_triton(monkeypatch)
        backend = entry.make(case.cache)
        plan = backend.plan(case.batch, case.batch.tables[0])
        query, left = parts.store(case.cache, 1, plan.stored, q.clone(), kv, absorbed, plan.absorbed_rows)
        outs.append(backend.attend(plan, 1, Queries(query, 0.3, absorbed=left))[0][:live])
    expands = plan.absorbed_rows is not None
    assert expands == (expanded and (more > 0 or any(n > 1 for n, _ in spans))), "prompts are expanded, also of FP8"
    # A value that lies between two of FP8 may be rounded to either.
    assert torch.allclose(*outs, rtol=1e-4, atol=1e-5 if dtype == torch.float32 else 0.05)
    pages = made.cache.num_pages * made.cache.page_size  # behind them torch's backend puts what is stored nowhere
    near = dict(rtol=1e-5, atol=1e-6) if dtype == torch.float32 else dict(rtol=1 / 16, atol=0)
    assert torch.allclose(*(case.cache.keys[:, :pages].float() for case in cases), equal_nan=True, **near)
