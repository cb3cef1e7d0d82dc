"""Every attention backend against the definition of attention, in bfloat16: ragged rows, rows that see nothing,
windows, latents, tokens sharded over dcp, log-sum-exps. Sinks follow from the latter (`gate_heads`).

On a GPU with the packages installed; on CPUs FlashAttention 3 and FlashInfer are stand-ins (`fakes.py`), which hold the
calls against the real signatures.
"""

from __future__ import annotations

import copy
import importlib
import sys
from dataclasses import replace
from functools import cache
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from attention.oracle import Case, check, make_case, padded, roomy
from dcp.interleaved import run_interleaved
from gpu.triton_checks import fakes
from gpu.triton_checks.test_backend import on
from gpu.triton_checks.worker import INTERPRETED
from weft.engine.attention import fa3, paged_flashinfer
from weft.engine.attention.backend import AttentionInputs, DecodeRows, Queries
from weft.engine.attention.backend_registry import BACKENDS, FA3, FLASHINFER, MIXED, TORCH, BackendEntry, fa3_library
from weft.engine.attention.forward_batch import PageTables
from weft.engine.attention.paged_triton import TritonDecode, TritonPrompts
from weft.engine.kv.cache import KVCache
from weft.engine.kv.cache_spec import Latent, PagedKV, Window
from weft.stream.interleave import Interleave

Spec = PagedKV | Window | Latent
TOLERANCE = 1e-2
"""Tolerance as a share of a row's norm: outputs are rounded to bfloat16, and so are the weights of values."""
SPECS = [PagedKV(2, 128), PagedKV(1, 64), Window(40, 2, 128), Latent(576, 512)]


def kind(spec: Spec) -> str:
    """A word for `pytest -k`."""
    return f"{type(spec).__name__.lower()}{spec.value_width if isinstance(spec, Latent) else spec.dim}"


DECODE = [(1, 7), (1, 0), (1, 150), (1, 63), (1, 16)]
STEPS = [[(1, 90), (1, 0), (36, 20), (9, 0)], [(1, 12), (6, 2), (1, 40)], [(70, 3)]]


@cache
def fake_library() -> fakes.FlashAttention3Library:
    """Operators are registered once in a process."""
    return fakes.FlashAttention3Library()


ON_GPUS = [entry for entry in BACKENDS if entry.device != "cpu"]


@pytest.fixture(params=[FA3, FLASHINFER] if INTERPRETED else ON_GPUS, ids=lambda entry: entry.option)
def entry(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> BackendEntry:
    """The backends; on CPUs the stand-ins, as other checks hold torch's and Triton's there."""
    entry = request.param
    assert isinstance(entry, BackendEntry)
    if entry in (FA3, MIXED) and INTERPRETED:
        calls(entry, monkeypatch)
    elif entry in (FA3, MIXED) and (fa3_library() is None or torch.cuda.get_device_capability()[0] != 9):
        pytest.skip("takes a Hopper GPU, and vLLM or sglang-kernel")
    elif entry is FLASHINFER and INTERPRETED:
        calls(entry, monkeypatch)
    elif entry is FLASHINFER:
        pytest.importorskip("flashinfer")
    return entry


def calls(entry: BackendEntry, monkeypatch: pytest.MonkeyPatch) -> fakes.Calls:
    """Put the stand-in in place of the package; return the calls that it gets."""
    if entry in (FA3, MIXED):
        library = fake_library()
        library.calls.clear()
        ops = torch.ops._vllm_fa3_C
        found = fa3.Operators(fa3.by_keyword(ops.fwd), fa3.by_keyword(ops.get_scheduler_metadata))
        monkeypatch.setattr(fa3, "operators", lambda: found)
        return library.calls
    monkeypatch.setattr(paged_flashinfer, "WORKSPACE_BYTES", 16)
    noted = fakes.Calls()
    monkeypatch.setitem(sys.modules, "flashinfer", fakes.flashinfer(noted))
    return noted


def case_of(spans: list[tuple[int, int]], spec: Spec, seed: int, page: int = 16, heads: int = 8) -> Case:
    """Return a case in bfloat16, with finite numbers where no token lies: these kernels multiply them by 0. An engine's
    pages hold zeros or older tokens there.
    """
    case = make_case(spans, seed=seed, page=page, heads=heads, spec=spec)
    cache = case.cache
    cache.keys = cache.keys.nan_to_num(9.0).bfloat16()
    latent = isinstance(spec, Latent)
    cache.values = cache.keys[..., : spec.value_width] if latent else cache.values.nan_to_num(-9.0).bfloat16()
    keys, values = ([x.bfloat16() for x in kind] for kind in (case.keys, case.values))
    rows = {name: getattr(case, name).bfloat16() for name in ("q", "k", "v")}
    return replace(case, keys=keys, values=values, scale=0.1, **rows)


@pytest.mark.parametrize("spec", SPECS, ids=kind)
@pytest.mark.parametrize("spans", [DECODE, [(1, 129)]], ids=["ragged", "batch 1"])
def test_decode(entry: BackendEntry, spans: list[tuple[int, int]], spec: Spec, device: torch.device) -> None:
    case = on(device, case_of(spans, spec, seed=1))
    check(entry.make(case.cache), case, spans, TOLERANCE)


def test_many_heads_share_a_vector(entry: BackendEntry, device: torch.device) -> None:
    """More than a block of a kernel has."""
    case = on(device, case_of([(1, 70), (1, 300)], Latent(576, 512), seed=1, heads=96))
    check(entry.make(case.cache), case, [(1, 70), (1, 300)], TOLERANCE)


@pytest.mark.parametrize("spec", SPECS, ids=kind)
def test_padding_rows(entry: BackendEntry, spec: Spec, device: torch.device) -> None:
    """Rows that see nothing have output 0 and log-sum-exp −inf, also among long ones."""
    case = on(device, padded(case_of(DECODE, spec, seed=2), 9))
    check(entry.make(case.cache), case, DECODE, TOLERANCE)


@pytest.mark.parametrize("spec", SPECS, ids=kind)
def test_steps_with_prompts(entry: BackendEntry, spec: Spec, device: torch.device) -> None:
    for seed, spans in enumerate(STEPS):
        case = on(device, case_of(spans, spec, seed=seed))
        check(entry.make(case.cache), case, spans, TOLERANCE)


@pytest.mark.parametrize("spec", SPECS, ids=kind)
def test_steps_with_prompts_in_graphs(entry: BackendEntry, spec: Spec, device: torch.device) -> None:
    if entry is FLASHINFER:
        pytest.skip("is refused with CUDA graphs")
    for seed, spans in enumerate([STEPS[0], STEPS[2], [(1, 7), (1, 2)]]):
        rows = sum(n for n, _ in spans)
        case = on(device, roomy(case_of(spans, spec, seed=seed), rows + 5, len(spans) + 2))
        check(entry.make(case.cache), case, spans, TOLERANCE)


@pytest.mark.parametrize("spec", [PagedKV(1, 128), Latent(576, 512)], ids=kind)
def test_tokens_over_dcp(entry: BackendEntry, spec: PagedKV | Latent, device: torch.device) -> None:
    """Ranks that hold nothing of a row; prompts gather their tokens, as pages of one token."""
    interleave = Interleave(2, 16, 16)
    case = on(device, case_of(DECODE, spec, seed=4, page=interleave.span))
    run_interleaved(entry.make, case, DECODE, interleave, tolerance=2 * TOLERANCE)
    spans = [(1, 12), (40, 20), (1, 0)]
    case = on(device, case_of(spans, spec, seed=3, page=interleave.span))
    run_interleaved(entry.make, case, spans, interleave, tolerance=2 * TOLERANCE)


@pytest.mark.parametrize(
    "spans", [[(1, 90), (1, 0), (1, 31)], STEPS[0], [(40, 20), (2, 130)]], ids=["decode rows", "both", "prompts"]
)
@pytest.mark.parametrize("prefill", ["gather", "merge"])
def test_latents_over_dcp_by_the_quicker_of_each(
    spans: list[tuple[int, int]],
    prefill: Literal["gather", "merge"],
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
) -> None:
    """FlashAttention 3's decode rows next to Triton's prompts, gathered and merged, eagerly and in graphs."""
    noted = None
    if INTERPRETED:  # which has no products in bfloat16, so prompts are of a GPU
        if any(rows > 1 for rows, _ in spans):
            pytest.skip("takes a GPU")
        noted = calls(MIXED, monkeypatch)
        monkeypatch.setattr(TritonDecode, "run", None)
        monkeypatch.setattr(TritonPrompts, "run", lambda *given: None)
    elif fa3_library() is None or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("takes a Hopper GPU, and vLLM or sglang-kernel")
    interleave = Interleave(2, 16, 16)
    case = case_of(spans, Latent(576, 512), seed=6, page=interleave.span)
    how: dict[str, Any] = dict(tolerance=2 * TOLERANCE, prefill=prefill)
    run_interleaved(MIXED.make, on(device, copy.deepcopy(case)), spans, interleave, **how)
    captured = roomy(case, sum(rows for rows, _ in spans) + 5, len(spans) + 2)
    run_interleaved(MIXED.make, on(device, captured), spans, interleave, live=True, **how)
    assert noted is None or {call["q"].shape[-2] for call in noted.of("fwd")} == {8}, "the heads of both ranks"


@pytest.mark.skipif(INTERPRETED, reason="takes a GPU")
@pytest.mark.parametrize("spec", SPECS, ids=kind)
def test_one_graph_serves_all_lengths(entry: BackendEntry, spec: Spec, device: torch.device) -> None:
    """A captured decode step of two layers reads lengths when it is replayed, and gives the bits of an eager step."""
    if entry in (FLASHINFER, TORCH):
        pytest.skip("is refused with CUDA graphs")
    case = on(device, padded(case_of([(1, 7), (1, 0), (1, 400), (1, 31)], spec, seed=5), 6))
    backend, tables, lengths = entry.make(case.cache), case.batch.tables[0], case.batch.lengths
    assert isinstance(tables, PageTables)
    q = case.q.nan_to_num(0.0)

    def step() -> list[Tensor | None]:
        plan = backend.plan(case.batch, tables)
        return [x for layer in (0, 1) for x in backend.attend(plan, layer, Queries(q, case.scale, lse=True))]

    step()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        found = step()
    longest = lengths.clone()
    for known in (longest, longest - 5 * (longest > 5).int(), longest * 0, longest):
        lengths.copy_(known)
        graph.replay()
        for x, expected in zip(found, step(), strict=True):
            assert x is not None and expected is not None and torch.equal(x, expected)
            empty, alone = known == 0, 0.0 if x.dim() == 3 else -torch.inf
            assert bool((x[empty] == alone).all()) and bool(x[~empty].isfinite().all())


@pytest.mark.skipif(not INTERPRETED, reason="of the stand-ins")
def test_what_flash_attention_3_is_asked_for(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    noted = calls(FA3, monkeypatch)
    spans = [(1, 90), (1, 0), (36, 20), (9, 0)]
    case = roomy(case_of(spans, PagedKV(2, 128), seed=0), 60, 6)
    backend = FA3.make(case.cache)
    plan = backend.plan(case.batch, case.batch.tables[0])  # type: ignore[arg-type]
    for layer in (0, 1):
        backend.attend(plan, layer, Queries(case.q, 0.1, lse=True))
    assert len(noted.of("get_scheduler_metadata")) == 1, "once a step, for all layers"
    decode, prompts = noted.of("fwd")[2:]
    assert decode["scheduler_metadata"] is not None and prompts["scheduler_metadata"] is None
    assert decode["seqused_k"].tolist() == [91, 1, 0, 0, 0, 0] and prompts["seqused_q"].tolist() == [0, 0, 36, 9, 0, 0]
    assert decode["num_splits"] == 66 and prompts["num_splits"] == 0 and prompts["max_seqlen_q"] == 60
    cache, q = KVCache(PagedKV(1, 128), 1, 1, 16, torch.bfloat16), torch.zeros(256, 64, 128, dtype=torch.bfloat16)
    rows, many = (
        DecodeRows(torch.zeros(256, 1, dtype=torch.int32), torch.zeros(256, dtype=torch.int32)),
        FA3.decode(cache),
    )
    many.run(many.plan(rows), AttentionInputs(q, *cache.of_layer(0), 1.0, torch.empty_like(q), None))
    assert noted.of("fwd")[-1]["num_splits"] == 32, "all splits together stay within SPLIT_BYTES"


@pytest.mark.skipif(not INTERPRETED, reason="of the stand-ins")
def test_what_flashinfer_is_asked_for(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    noted = calls(FLASHINFER, monkeypatch)
    spans = [(1, 90), (1, 0), (36, 20), (9, 0)]
    case = case_of(spans, PagedKV(2, 128), seed=0)
    backend = FLASHINFER.make(case.cache)
    for _ in range(2):
        plan = backend.plan(case.batch, case.batch.tables[0])  # type: ignore[arg-type]
        for layer in (0, 1):
            backend.attend(plan, layer, Queries(case.q, 0.1, lse=True))
    for kind in ("Decode", "Prefill"):
        names = [name for name, _ in noted if name.startswith(f"Batch{kind}WithPagedKVCacheWrapper")]
        step = [name.replace("__init__", "plan") for name in names[1:4]]
        assert [name.rpartition(".")[2] for name in step] == ["plan", "run", "run"], "planned once a step"
        assert names.count(names[0]) == 1 and len(names) == 7
    planned = noted.of("BatchPrefillWithPagedKVCacheWrapper.plan")[0]
    assert planned["qo_indptr"].tolist() == [0, 36, 45] and planned["causal"]
    assert noted.of("BatchDecodeWithPagedKVCacheWrapper.plan")[0]["last_page_len"].tolist() == [11, 1]


@pytest.mark.parametrize("name", fakes.SIGNATURES)
def test_stand_ins_have_the_signatures_of_the_package(name: str) -> None:
    package = pytest.importorskip("flashinfer")
    if package.__version__ != "0.6.13":
        pytest.skip(f"flashinfer is {package.__version__}")
    import inspect

    modules = {"BatchDecode": "decode", "BatchPrefill": "prefill", "BatchMLA": "mla"}
    module = next(module for prefix, module in modules.items() if name.startswith(prefix))
    kind = getattr(importlib.import_module(f"flashinfer.{module}"), name)
    for method, text in fakes.SIGNATURES[name].items():
        scope: dict[str, object] = {}
        exec(f"def f({text}): pass", scope)
        names = list(inspect.signature(scope["f"]).parameters)  # type: ignore[arg-type]
        assert list(inspect.signature(getattr(kind, method)).parameters) == names


@pytest.mark.skipif(not INTERPRETED, reason="of the stand-ins")
@pytest.mark.parametrize("spec", [PagedKV(2, 64), Latent(320, 256)], ids=kind)
def test_each_kind_of_rows_by_what_is_quicker(
    spec: PagedKV | Latent, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """Prompts of keys and values and decode rows of latents by FlashAttention 3, the others by Triton's kernels."""
    noted, spans, by_triton = calls(MIXED, monkeypatch), [(1, 5), (1, 0), (7, 3)], list[str]()

    # The interpreter has no products in bfloat16.
    monkeypatch.setattr(TritonDecode, "run", lambda *given: by_triton.append("decode"))
    monkeypatch.setattr(TritonPrompts, "run", lambda *given: by_triton.append("prompts"))
    case = case_of(spans, spec, seed=0)
    backend, tables = MIXED.make(case.cache), case.batch.tables[0]
    assert isinstance(tables, PageTables)
    backend.attend(backend.plan(case.batch, tables), 1, Queries(case.q, case.scale))
    packed = [call["cu_seqlens_q"] is not None for call in noted.of("fwd")]
    latent = isinstance(spec, Latent)
    assert by_triton == ["prompts" if latent else "decode"] and packed == [not latent]
