"""The table of attention backends: one row is all that a backend takes, a plugin's too; what one lacks is refused."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
import torch

from attention.oracle import check, make_case, padded, roomy
from dcp.interleaved import run_interleaved
from e2e.here import weft_here
from weft.engine.assets import preset_dir
from weft.engine.attention import backend_registry
from weft.engine.attention.backend_registry import (
    BACKENDS,
    MIXED,
    NATIVE,
    TORCH,
    TRITON,
    BackendEntry,
    Needs,
    backends,
    default_backend,
)
from weft.engine.attention.paged import PagedAttention
from weft.engine.config.config import EngineConfig
from weft.engine.config.device import attention_backend
from weft.engine.controller.engine import Engine
from weft.engine.controller.startup import check_plans, resolve_defaults
from weft.engine.kv.cache import KVCache
from weft.engine.kv.cache_spec import Latent, PagedKV, Recurrent, Window
from weft.engine.messages.request import SamplingParams
from weft.planner.spec import LayoutError
from weft.plugins import PluginError
from weft.stream.interleave import Interleave

TOY = str(Path(__file__).with_name("toy_backend.py"))
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def test_a_plugins_backend_serves(model_dir: Path) -> None:
    """Tokens equal the default backend's, and the report has the plug-in's name."""
    prompts, found = [[1, 2, 3, 4, 5], [9, 8]], []
    for options in ({}, {"attention_backend": "toy", "plugins": (TOY,)}):
        config = EngineConfig(model=model_dir, executor="thread", kv_tokens=512, **options)
        with Engine(config) as engine:
            found.append([r.token_ids for r in engine.generate(prompts, GREEDY)])
            assert engine.config.attention_backend == options.get("attention_backend", "native")
    assert found[0] == found[1] and sys.modules[TOY].MADE


@pytest.mark.parametrize("spec", [PagedKV(2, 8), Window(6, 2, 8)], ids=str)
def test_a_plugins_kernels_attend(spec: PagedKV | Window) -> None:
    """Eager steps, and steps whose sequences only the device knows, as in a CUDA graph, use the plug-in's kernels."""
    make, spans = backends([TOY])["toy"].make, [(1, 12), (1, 0), (6, 2), (9, 0)]
    for case in (make_case(spans, spec=spec), roomy(make_case(spans, spec=spec), 25, 6)):
        check(make(case.cache), case, spans)
    decode = [(1, 7), (1, 0), (1, 20)]
    case = padded(make_case(decode, spec=spec), 5)
    check(make(case.cache), case, decode)


@pytest.mark.parametrize("prefill", ["gather", "merge"])
def test_a_plugins_kernels_attend_over_dcp(prefill: Literal["gather", "merge"]) -> None:
    make, interleave, spans = backends([TOY])["toy"].make, Interleave(2, 2, 4), [(1, 12), (6, 2), (1, 0), (4, 31)]
    case = partial(make_case, page=interleave.span, spec=PagedKV(1, 8))
    run_interleaved(make, case(spans), spans, interleave, prefill=prefill)
    decode = [(1, 7), (1, 0), (1, 20)]
    run_interleaved(make, padded(case(decode), 5), decode, interleave)


def test_commands_know_backends_by_their_rows() -> None:
    code, out, _ = weft_here("serve", "--plugins", TOY, "--help")
    assert code == 0 and f"{{auto,{','.join(backends())},toy}}" in re.sub(r"[\s│]+", "", out)
    code, _, err = weft_here("serve", "--attention-backend", "nope")
    said = re.sub(r"[\s│]+", " ", err)
    assert code == 2 and "invalid choice 'nope' for argument '--attention-backend'" in said and "triton" in said
    with pytest.raises(
        ValueError, match=r"attention_backend is 'toy'; it must be one of auto, triton, fa3, .*, torch$"
    ):
        EngineConfig(attention_backend="toy")
    with pytest.raises(ValueError, match=r"it must be one of auto, .*, toy$"):
        EngineConfig(attention_backend="nope", plugins=(TOY,))


def test_a_backend_that_is_there_already_is_refused(tmp_path: Path) -> None:
    (plugin := tmp_path / "again.py").write_text(
        "from dataclasses import replace\nfrom weft.engine.attention.backend_registry import TORCH\n"
        "ATTENTION_BACKENDS = (replace(TORCH, device='cpu'),)\n"
    )
    with pytest.raises(PluginError, match=r"again.py adds attention backend torch, but there is another of this name"):
        backends([str(plugin)])
    assert list(backends([TOY, TOY])) == [*backends(), "toy"]


def test_auto_is_what_the_device_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert default_backend("cuda") is TRITON and default_backend("cpu") is TORCH
    assert resolve_defaults(EngineConfig(device="cpu")).attention_backend == "native"
    assert resolve_defaults(EngineConfig(device="cpu", kv_dtype="fp8_e4m3")).attention_backend == "native"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(backend_registry, "find_spec", lambda name: None)
    capability = (9, 0)
    assert attention_backend(EngineConfig()).option == "triton"
    with_library(monkeypatch, tmp_path)
    assert attention_backend(EngineConfig()).option == "fa3+triton"
    assert attention_backend(EngineConfig(dtype="float32")).option == "triton"
    dcp = {"attn_tp": 8, "dcp": 2}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    latents = [Latent(576, 512), Recurrent(((2, 2),)), Window(4, 2, 128)]
    for caches, merges in ((latents, "fa3+triton"), ([*latents, PagedKV(1, 128)], "triton")):
        assert attention_backend(EngineConfig(**dcp), partial(list, caches)).option == merges
        gathers = EngineConfig(**dcp, dcp_prefill="gather")
        assert attention_backend(gathers, partial(list, caches)).option == "fa3+triton"
    capability = (10, 0)
    assert attention_backend(EngineConfig()).option == "triton"


def with_library(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """A vLLM is found whose FlashAttention 3 is an empty file."""
    (library := folder / "vllm_flash_attn" / "_vllm_fa3_C.abi3.so").parent.mkdir(exist_ok=True)
    library.touch()
    found = SimpleNamespace(submodule_search_locations=[str(folder)])
    monkeypatch.setattr(backend_registry, "find_spec", lambda name: found if name == "vllm" else None)


FA3_NEEDS = Needs("cuda", (9, 0), "bfloat16", "auto", lambda: [PagedKV(2, 128), Latent(576, 512)], 16, 1, "auto", True)


@pytest.mark.parametrize("option", ["fa3", "fa3+triton"])
def test_what_flash_attention_3_lacks(option: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    entry = backends()[option]
    monkeypatch.setattr(backend_registry, "find_spec", lambda name: None)
    with pytest.raises(LayoutError, match=rf"^attention_backend {re.escape(option)} requires vLLM or .*: pip install"):
        entry.check(FA3_NEEDS)
    with_library(monkeypatch, tmp_path)
    entry.check(FA3_NEEDS)
    entry.check(replace(FA3_NEEDS, dcp=2, dcp_prefill="gather"))
    for change, why in (
        ({"capability": (8, 0)}, "requires a GPU of sm_90, and this one is sm_80; omit it"),
        ({"dtype": "float32"}, "computes in bfloat16, not in float32: add --dtype bfloat16"),
        ({"caches": lambda: [Latent(40, 32)]}, r"supports latent vectors of .* elements, not 32 \+ 8"),
        ({"caches": lambda: [Window(4, 2, 512)]}, "supports heads of .* elements, not 512"),
        ({"dcp": 2}, "does not merge prompts over dcp: add --dcp-prefill gather"),
    ):
        with pytest.raises(LayoutError, match=rf"^attention_backend {re.escape(option)} {why}$"):
            entry.check(replace(FA3_NEEDS, **change))


def test_what_flashinfer_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    entry, needs = backends()["flashinfer"], replace(FA3_NEEDS, graphs=False)
    monkeypatch.setattr(backend_registry, "find_spec", lambda name: None)
    with pytest.raises(
        LayoutError, match=r"^attention_backend flashinfer requires FlashInfer, which is not installed: pip"
    ):
        entry.check(needs)
    monkeypatch.setattr(backend_registry, "find_spec", lambda name: name)
    entry.check(needs)
    for change, why in (
        ({"graphs": True}, "plans each step on the host, which CUDA graphs cannot: add --no-cuda-graphs"),
        ({"dtype": "float32"}, "computes in bfloat16, .*"),
        ({"caches": lambda: [Latent(320, 256)]}, r"supports latent vectors of 512 \+ 64 elements, not 256 \+ 64"),
        ({"caches": lambda: [PagedKV(2, 96)]}, "supports heads of 64, 128 and 256 elements, not 96"),
        ({"dcp": 2}, "does not merge prompts over dcp: add --dcp-prefill gather"),
    ):
        with pytest.raises(LayoutError, match=rf"^attention_backend flashinfer {why}$"):
            entry.check(replace(needs, **change))


def test_what_a_backend_lacks_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LayoutError, match=r"^attention_backend triton runs on GPUs only; omit it$"):
        attention_backend(EngineConfig(attention_backend="triton", device="cpu"))
    shape = {"model": preset_dir("deepseek-v2-lite"), "load_format": "dummy", "device": "cpu"}
    config = EngineConfig(**shape, attention_backend="toy", plugins=(TOY,))
    with pytest.raises(LayoutError, match=r"^attention_backend toy has no latent caches: take another$"):
        check_plans(config, config.read_model())
    with pytest.raises(
        LayoutError, match=r"^attention_backend toy does not support FP8 caches: use --kv-dtype auto, or another"
    ):
        attention_backend(
            EngineConfig(attention_backend="toy", plugins=(TOY,), device="cpu", kv_dtype="fp8_e4m3"), list
        )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(LayoutError, match=r"^attention_backend torch reads .* on the host, .*: add --no-cuda-graphs$"):
        attention_backend(EngineConfig(attention_backend="torch"))
    assert attention_backend(EngineConfig(attention_backend="torch", cuda_graphs=False)) is TORCH


def test_the_defaults_look_at_no_cache() -> None:
    """So that no start builds the model's shape for them."""

    def caches() -> list[PagedKV]:
        raise AssertionError

    for device in ("cpu", "cuda"):
        gpus = device == "cuda"
        default_backend(device).check(
            Needs(device, (9, 0) if gpus else None, "bfloat16", "auto", caches, 16, 1, "auto", gpus)
        )


@pytest.mark.parametrize("entry", BACKENDS, ids=lambda entry: entry.option)
def test_every_row_names_two_kernels(entry: BackendEntry) -> None:
    if entry not in (TORCH, NATIVE):
        pytest.importorskip("triton")
    for spec in (PagedKV(2, 8), Latent(12, 8)):
        made = entry.make(cache := KVCache(spec, 1, 1, 4, torch.float32))
        assert isinstance(made, PagedAttention) and made.cache is cache
        names = [type(kernel).__name__ for kernel in (made.decode, made.prompts)]
        assert [name.endswith(kind) for name, kind in zip(names, ("Decode", "Prompts"), strict=True)] == [True, True]
        if entry is MIXED:
            latent = isinstance(spec, Latent)
            assert names == (["Fa3Decode", "TritonPrompts"] if latent else ["TritonDecode", "Fa3Prompts"])
