"""FP8 checkpoints whose weights stay in FP8: what ranks hold, and how far products in FP8 are from float32."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import run_world, small_config

from models import qwen35, stepfun
from models.layouts import drive, sequences
from weft.engine.assets import preset_dir
from weft.engine.config.config import EngineConfig
from weft.engine.controller.engine import Engine
from weft.engine.kernels import model_reference
from weft.engine.messages.request import SamplingParams
from weft.engine.models.config_json.fields import ModelError
from weft.engine.models.layers.basic import Layer
from weft.engine.models.load import build_model, describe_products, dummy_model, load_model
from weft.engine.models.registry import load_config, read_config
from weft.engine.models.weights.float8_weights import Float8Format
from weft.engine.models.weights.weight_format import WeightFormat
from weft.engine.worker.planning import trace
from weft.kernels import cpu_rows, float8, stream_ops
from weft.kernels.float8 import FLOAT8, Fp8Rows, Fp8Weight, dequantise
from weft.planner.spec import LayoutError, Mesh
from weft.stream.formats import Float8
from weft.stream.hidden import Hidden

QUARTER = Mesh(2, 2, 2, 2)
UNEVEN = Mesh(1, 3, 1, 3)
SPLITS = (Mesh(), QUARTER, Mesh(1, 4, 1, 4), UNEVEN, Mesh(1, 3, 3, 1))
WIDE = dict(hidden_size=256, intermediate_size=256, moe_intermediate_size=256)


def qwen3(family: str) -> dict[str, Any]:
    wide = {name: size for name, size in WIDE.items() if family == "qwen3_moe" or "moe" not in name}
    found: dict[str, Any] = small_config(family, 4, **wide, head_dim=32, attention_bias=False).to_dict()
    return found


def deepseek() -> dict[str, Any]:
    latent = dict(q_lora_rank=160, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32)
    found: dict[str, Any] = small_config("deepseek_v3", 4, **WIDE, **latent).to_dict()
    return found


def minimax() -> dict[str, Any]:
    found: dict[str, Any] = small_config(
        "minimax_m2", 4, hidden_size=256, intermediate_size=256, head_dim=32, rotary_dim=16
    ).to_dict()
    return found


def step() -> dict[str, Any]:
    other = dict(attention_type=stepfun.SLIDING, num_attention_heads=16, num_attention_groups=2, head_dim=32)
    return stepfun.small_config(**WIDE, share_expert_dim=256, head_dim=32, attention_other_setting=other)


def qwen3_5() -> dict[str, Any]:
    delta = dict(linear_key_head_dim=32, linear_value_head_dim=32)
    return qwen35.small_config(
        hidden_size=256, moe_intermediate_size=256, shared_expert_intermediate_size=256, head_dim=32, **delta
    )


FAMILIES: dict[str, tuple[Callable[[], dict[str, Any]], list[str]]] = {
    "qwen3_moe": (partial(qwen3, "qwen3_moe"), ["lm_head", "model.layers.1.self_attn.o_proj"]),
    "qwen3": (partial(qwen3, "qwen3"), ["lm_head"]),
    "deepseek_v3": (deepseek, []),
    "minimax_m2": (minimax, ["gate", "e_score_correction_bias", "lm_head"]),
    "step": (step, ["lm_head", "g_proj"]),
    "qwen3.5": (qwen3_5, ["lm_head", "in_proj_a", "in_proj_b"]),
}
"""The config of a small model, and the modules that its checkpoint leaves as they are."""


def saved(family: str, directory: Path, block: int = 128) -> Path:
    """A random checkpoint of the family, with scales that differ from block to block; the latter come in bfloat16."""
    small, left_out = FAMILIES[family]
    method = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[block, block])
    (directory / "config.json").write_text(
        json.dumps(small() | {"quantization_config": method | {"modules_to_not_convert": left_out}})
    )
    config = replace(load_config(directory), float8=True)
    model = build_model(config, Mesh(), 0, torch.float32, torch.device("meta"))
    generator, tensors = torch.Generator().manual_seed(0), dict[str, torch.Tensor]()
    layers = [layer for layer in model.modules() if isinstance(layer, Layer)]
    for source in (source for layer in layers for part in layer.sources.values() for source in part):
        shape = source.stored()[0]
        if source.name in tensors:
            continue
        values = torch.randn(shape, generator=generator) / (shape[-1] ** 0.5 if len(shape) > 1 else 4)
        if "norm" in source.name and family in ("qwen3_moe", "qwen3", "deepseek_v3", "minimax_m2"):
            values += 1
        product = "_proj" in source.name or ".experts." in source.name
        if config.storage.keeps(source.name) and product and len(shape) > 1:
            blocks = (*shape[:-2], *(-(-n // block) for n in shape[-2:]))
            scales = (torch.rand(blocks, generator=generator) + 0.5) / 300
            wide = scales.bfloat16().float().repeat_interleave(block, -2).repeat_interleave(block, -1)
            values = (values / wide[..., : shape[-2], : shape[-1]]).clamp(-448, 448).to(FLOAT8)
            tensors[f"{source.name}_scale_inv"] = scales.bfloat16()
        tensors[source.name] = values
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_hold_what_is_stored(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit what is read dequantised, with a smaller block where a rank's slice cuts one of the checkpoint's."""
    monkeypatch.setattr(WeightFormat, "share_unit", Float8Format.share_unit)  # equal shares of features
    config = load_config(saved(family, tmp_path))
    units: set[tuple[int, int]] = set()
    for mesh in SPLITS:
        for rank in {0, mesh.world - 1}:
            wanted = load_model(tmp_path, config, mesh, rank)
            found = load_model(tmp_path, replace(config, float8=True), mesh, rank)
            wide = dict(wanted.named_modules())
            for path, layer in found.named_modules():
                if not isinstance(layer, Layer):
                    continue
                parts: dict[str, list[torch.Tensor]] = {}
                for name in layer.sources:
                    weight = layer.declared(name)
                    units |= {weight.unit} if isinstance(weight, Fp8Weight) else set()
                    parts.setdefault(name.partition("weight_")[0] or "weight", []).append(
                        dequantise(weight) if isinstance(weight, Fp8Weight) else weight
                    )
                for name, weights in parts.items():
                    assert torch.equal(torch.cat(weights), wide[path].get_parameter(name)), f"{path}.{name}"
            for layer in found.layers:
                if hasattr(layer.mlp, "router"):
                    assert layer.mlp.router.weight.dtype == torch.float32
                    assert layer.mlp.experts.gate_up.dtype == layer.mlp.experts.down.dtype == FLOAT8
    assert (128, 128) in units and len(units) > 1


NOISE = 0.0245
"""Error of rounding to four bits, relative to a value, in the root of the mean square.

It is off by up to half of the last bit, evenly: by 2⁻⁴ / √3 of its power of two, which is less than the value by √2.16,
the root of the mean square of a mantissa between 1 and 2 whose logarithm is spread evenly.
"""


def noisy(x: torch.Tensor, group_size: int) -> Fp8Rows:
    """Rows with so much noise in the place of FP8's rounding."""
    return Fp8Rows(
        x * (1 + NOISE * torch.randn(x.shape)), x.new_ones(*x.shape[:-1], -(-x.shape[-1] // group_size)), group_size
    )


def noisy_unfilled(x: torch.Tensor, group_size: int) -> Fp8Rows:
    """Room for them."""
    return Fp8Rows(torch.empty_like(x), x.new_empty(x.shape[0], -(-x.shape[1] // group_size)), group_size)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_off_as_by_noise_of_the_size_of_the_rounding(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are the same in FP8 and dequantised; rows are rounded. The median over logits, as a router may choose
    another expert by a near tie, is compared: what noise makes of the same model is what rounding may.
    """
    saved(family, tmp_path)

    def logits(mesh: Mesh, kept: bool) -> torch.Tensor:
        run = sequences(mesh, 61)
        seen = run_world(mesh.world, lambda t: drive(t, tmp_path, mesh, run, float8=kept))[0]
        return torch.stack([seen[key] for key in sorted(seen)])

    def off(found: torch.Tensor) -> float:
        return ((found - exact).norm(dim=1) / exact.norm(dim=1)).median().item()

    exact = logits(Mesh(), False)
    found = [off(logits(mesh, True)) for mesh in (Mesh(), QUARTER, UNEVEN)]
    torch.manual_seed(0)
    monkeypatch.setattr(cpu_rows, "missing", lambda: "kernels quantise on their own")
    for module in (float8, stream_ops):
        monkeypatch.setattr(module, "quantise", noisy)
    monkeypatch.setattr(float8, "unfilled", noisy_unfilled)
    wanted = off(logits(Mesh(), True))
    assert all(wanted / 1.5 < far < 1.5 * wanted for far in found), (found, wanted)


@pytest.mark.parametrize("family", ["deepseek_v3", "step"])
def test_rows_that_a_read_quantises_change_no_logit(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are bit by bit what each product would make of them. On one rank all reads of such blocks give them so."""
    config = replace(load_config(saved(family, tmp_path)), float8=True)
    for kept in (True, False):
        *blocks, last = trace(replace(config, float8=kept), Mesh(), torch.float32).reads
        assert {read.wire and read.wire.format for read in blocks} == {Float8(128) if kept else None}
        assert last.wire is None
    calls: Counter[str] = Counter()

    def counted(module: Any, name: str) -> None:
        call = getattr(module, name)
        monkeypatch.setattr(module, name, lambda x, *more: calls.update([name] * bool(len(x))) or call(x, *more))

    counted(Fp8Rows, "fill")
    counted(stream_ops, "quantise")
    rounded = model_reference.rounded

    def in_product(x: Any, weight: Any, dtype: torch.dtype) -> torch.Tensor:
        plain = isinstance(x, torch.Tensor) and isinstance(weight, Fp8Weight)
        calls.update(["in product"] * (plain and bool(len(x))))
        return rounded(x, weight, dtype)

    monkeypatch.setattr(model_reference, "rounded", in_product)
    for mesh in (Mesh(), QUARTER):
        run = sequences(mesh, 61)

        def logits(mesh: Mesh = mesh, run: list[list[list[int]]] = run) -> list[dict[tuple[int, int], torch.Tensor]]:
            return run_world(mesh.world, lambda t: drive(t, tmp_path, mesh, run, float8=True))

        calls.clear()
        found = logits()
        assert calls["fill"] and (mesh.world > 1 or calls["quantise"] == calls["in product"]), calls
        with monkeypatch.context() as patched:
            patched.setattr(Hidden, "taken", lambda self, weight, reader: self.require_complete(reader))
            wanted = logits()
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_what_config_json_leaves_out() -> None:
    storage = Float8Format((128, 128), plain=("lm_head", "mlp.gate", "model.layers.3", "layers.*.o_proj"))
    for name, wanted in (
        ("model.layers.1.mlp.gate_proj.weight", True),
        ("model.layers.1.mlp.gate.weight", False),
        ("model.layers.3.self_attn.q_proj.weight", False),
        ("model.layers.30.self_attn.q_proj.weight", True),
        ("model.layers.1.self_attn.o_proj.weight", False),
        ("lm_head.weight", False),
    ):
        assert storage.keeps(name) == wanted, name
    assert not Float8Format((64, 64)).keeps("x.weight") and not Float8Format().keeps("x.weight")


def test_a_tensor_without_scales_is_read_as_it_is(tmp_path: Path) -> None:
    tensors = load_file(saved("qwen3", tmp_path) / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj.weight"
    tensors[name] = tensors[name].float() * 1e-3
    tensors["model.layers.1.self_attn.o_proj.weight"] = tensors["model.layers.1.self_attn.o_proj.weight"].half()
    del tensors[f"{name}_scale_inv"]
    save_file(tensors, tmp_path / "model.safetensors")
    config = replace(load_config(tmp_path), float8=True)
    with pytest.raises(ModelError, match=r"1\.self_attn\.o_proj\.weight has scales, but is stored in F16"):
        load_model(tmp_path, config, Mesh(), 0)
    tensors["model.layers.1.self_attn.o_proj.weight"] = tensors["model.layers.1.self_attn.o_proj.weight"].to(FLOAT8)
    save_file(tensors, tmp_path / "model.safetensors")
    model = load_model(tmp_path, config, Mesh(), 0)
    assert torch.equal(model.layers[0].attention.out.weight, tensors[name])
    assert model.layers[1].attention.out.weight.dtype == FLOAT8


def test_features_that_cut_a_block_too_small_are_refused(tmp_path: Path) -> None:
    saved("qwen3", tmp_path)
    changed = json.loads((tmp_path / "config.json").read_text()) | {"intermediate_size": 64}
    with pytest.raises(
        LayoutError, match=r"mlp\.down_proj: .* begin 16 columns into a block, .* 32 or more; .*--float8"
    ):
        build_model(
            replace(read_config(changed), float8=True), Mesh(1, 4, 1, 4), 1, torch.bfloat16, torch.device("meta")
        )


def test_made_up_weights_are_in_float8_too(tmp_path: Path) -> None:
    saved("step", tmp_path)
    config = replace(load_config(tmp_path), float8=True)
    whole, rounded_not = dummy_model(config, Mesh(), 0), dummy_model(replace(config, float8=False), Mesh(), 0)
    mesh = Mesh(2, 2, 2, 2)
    for rank in (0, 3):
        part = dummy_model(config, mesh, rank).layers[2].mlp.experts
        full = dequantise(whole.layers[2].mlp.experts.declared("down"))
        mine, cut = slice(8 * (rank // 2), 8 * (rank // 2) + 8), slice(128 * (rank % 2), 128 * (rank % 2) + 128)
        assert torch.equal(dequantise(part.declared("down")), full[mine][..., cut])
    ours, theirs = (m.layers[0].attention.qkv.declared("weight") for m in (whole, rounded_not))
    assert isinstance(ours, Fp8Weight)
    off = (dequantise(ours) - theirs[: len(ours.values)]).norm() / theirs[: len(ours.values)].norm()
    assert 0.01 < off < 0.04


def test_memory_and_what_is_said_of_it() -> None:
    config = load_config(preset_dir("deepseek-v3"), num_layers=4)
    sizes = []
    for kept in (False, True):
        model = build_model(replace(config, float8=kept), Mesh(8, 1, 8, 1), 0, torch.bfloat16, torch.device("meta"))
        sizes.append(sum(w.numel() * w.element_size() for w in model.layers.parameters()))
    says = describe_products(replace(config, float8=True), Mesh(8, 1, 8, 1), torch.bfloat16)
    assert 0.5 * sizes[0] < sizes[1] < 0.52 * sizes[0]
    assert says.startswith("products in FP8: q_a_proj, kv_a_proj_with_mqa, q_b_proj, o_proj, gate_proj, up_proj, down")
    assert "kv_b" not in says and says.endswith("GB a rank); other weights are dequantised")
    assert not describe_products(config, Mesh(8, 1, 8, 1), torch.bfloat16)


def test_the_engine_serves_products_in_float8(tmp_path: Path) -> None:
    """Made-up weights of an FP8 config, on CPUs, as a GPU would take them; off, they are dequantised."""
    saved("qwen3_moe", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    model = EngineConfig(model=tmp_path, executor="thread", load_format="dummy", kv_tokens=64, float8="on")
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    said = []
    for config in (model, replace(model, attn_dp=2, ep=2), replace(model, float8="auto")):
        with Engine(config) as engine:
            assert len(engine.generate([[5, 6, 7]], params)[0].token_ids) == 4
            said.append(describe_products(engine.model_config, engine.config.mesh, torch.float32))
    assert said[0].startswith("products in FP8: q_proj, k_proj, v_proj, o_proj") and said[1] and not said[2]
