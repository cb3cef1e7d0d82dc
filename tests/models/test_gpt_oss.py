"""GPT-OSS against transformers' implementation, its checkpoints, and what it refuses."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from models.layouts import MESHES, check, nearness, stored_shapes
from models.oss import GptOss, small_config, small_gpt_oss
from weft.engine.assets import preset_dir
from weft.engine.attention.caches import cached_layers
from weft.engine.kernels.model_reference import route_chosen
from weft.engine.kernels.mxfp4 import Mxfp4
from weft.engine.kv.cache_spec import PagedKV, Window
from weft.engine.models.config_json.fields import ModelError
from weft.engine.models.layers.basic import Builder
from weft.engine.models.layers.moe import Experts
from weft.engine.models.load import describe_products, dummy_model, load_model
from weft.engine.models.registry import load_config, read_config
from weft.planner.spec import Mesh


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, GptOss]:
    directory = tmp_path_factory.mktemp("gpt-oss")
    return directory, small_gpt_oss(directory)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_logits_are_transformers(saved: tuple[Path, GptOss], mesh: Mesh) -> None:
    check(saved[0], mesh, saved[1], 61)


def test_other_configs(tmp_path: Path) -> None:
    model = small_gpt_oss(tmp_path, attention_bias=False, swiglu_alpha=1.2, sliding_window=5, layer_types=None)
    check(tmp_path, Mesh(1, 2, 2, 1), model, 61)


def test_bfloat16_is_as_near_to_the_truth_as_transformers(tmp_path: Path) -> None:
    ours, theirs = nearness(GptOss(small_config(), 1), small_config(), tmp_path)
    assert ours <= 1.25 * theirs


def test_experts_in_mxfp4(saved: tuple[Path, GptOss], tmp_path: Path) -> None:
    """Experts are in MXFP4 as published; ranks of moe_tp cut through runs of values that share a scale."""
    tensors = load_file(saved[0] / "model.safetensors")
    plain, packed = dict(tensors), dict(tensors)
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors[name].shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 130, (experts, outputs, inputs // 32), dtype=torch.uint8)
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
        del packed[name]
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    directories = [tmp_path / "plain", tmp_path / "packed"]
    quantised = dict(quantization_config=dict(quant_method="mxfp4", modules_to_not_convert=["lm_head"]))
    for directory, weights, more in zip(directories, (plain, packed), ({}, quantised), strict=True):
        directory.mkdir()
        save_file(weights, directory / "model.safetensors")
        (directory / "config.json").write_text(json.dumps(small_config(**more)))
    for mesh, rank in product((Mesh(1, 8, 2, 4), Mesh(1, 7, 1, 7)), (0, 1, 5, 6)):
        wanted, found = (
            dict(load_model(directory, load_config(directory), mesh, rank).named_parameters())
            for directory in directories
        )
        assert wanted.keys() == found.keys() and all(torch.equal(wanted[n], found[n]) for n in wanted)


def packed_checkpoint(directory: Path, **changes: Any) -> Path:
    """Save a small model with random experts in MXFP4, in the powers of two that weights have."""
    small_gpt_oss(directory, **changes)
    tensors = load_file(directory / "model.safetensors")
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(122, 126, (experts, outputs, inputs // 32), dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, directory / "model.safetensors")
    quantised = dict(quantization_config=dict(quant_method="mxfp4", modules_to_not_convert=["lm_head"]))
    (directory / "config.json").write_text(json.dumps(small_config(**changes, **quantised)))
    return directory


@pytest.mark.parametrize("mesh", [Mesh(1, 1, 1, 1), Mesh(1, 2, 1, 2), Mesh(1, 4, 2, 2), Mesh(1, 3, 1, 3)], ids=str)
def test_experts_that_stay_in_mxfp4(mesh: Mesh, tmp_path: Path) -> None:
    """They stand for the dequantised ones, and so do the sums. Five blocks of 32 features divide over no ranks, and
    no rank has a part of a block."""
    config = load_config(packed_checkpoint(tmp_path, intermediate_size=160))
    kept, plain = replace(config, float8=True), replace(config, float8=False)
    sizes = []
    for rank in range(mesh.world):
        found = [layer for layer in load_model(tmp_path, kept, mesh, rank).modules() if isinstance(layer, Experts)]
        wanted = [layer for layer in load_model(tmp_path, plain, mesh, rank).modules() if isinstance(layer, Experts)]
        sizes.append(found[0].declared("down").shape[-1])
        for ours, theirs in zip(found, wanted, strict=True):
            if sizes[-1] != theirs.down.shape[-1]:
                continue  # shares of plain features are cut anywhere
            x, expert = torch.randn(7, 32), torch.randint(8, (7, 3))
            chosen = route_chosen(torch.rand(7, 3), expert, None, ours.mine, False)
            for name in ("gate_up", "down"):
                weight = ours.declared(name)
                assert isinstance(weight, Mxfp4) and torch.equal(
                    weight.dequantise(torch.float32), theirs.declared(name)
                )
            torch.testing.assert_close(ours._sum(x, x, chosen), theirs._sum(x, x, chosen))
    assert sum(sizes) == 160 * mesh.ep * (mesh.world // (mesh.ep * mesh.moe_tp)) and all(n % 32 == 0 for n in sizes)


def test_scales_that_the_kernels_cannot_dequantise(tmp_path: Path) -> None:
    """A greater power of two is read where experts are dequantised, and refused where they stay in MXFP4."""
    config, file = load_config(packed_checkpoint(tmp_path)), tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("down_proj_scales"))
    for scale, kept in ((128, True), (129, False), (129, True)):
        tensors[name][3, 0, 0] = scale
        save_file(tensors, file)
        refused = pytest.raises(ModelError, match="over 128; choose --float8 off")
        with refused if scale > 128 and kept else nullcontext():
            load_model(tmp_path, replace(config, float8=kept), Mesh(), 0)


def test_logits_of_experts_that_stay_in_mxfp4(tmp_path: Path) -> None:
    """The whole model, with made-up weights: layouts have parts of one model, next to one that is dequantised."""
    config = replace(load_config(packed_checkpoint(tmp_path)), float8=True)
    weights: list[dict[str, torch.Tensor]] = []
    for mesh in (Mesh(), Mesh(1, 2, 2, 1)):
        model = dummy_model(config, mesh, 0)
        weights.append({})
        for path, layer in model.named_modules():
            if isinstance(layer, Experts):
                for name in ("gate_up", "down"):
                    weight = layer.declared(name)
                    assert isinstance(weight, Mxfp4)
                    weights[-1][f"{path}.{name}"] = weight.dequantise(torch.float32)
                    spread = weights[-1][f"{path}.{name}"].std() * weight.shape[-1] ** 0.5
                    assert 0.6 < spread < 1.7
    assert all(torch.equal(whole[:4], weights[1][name]) for name, whole in weights[0].items())
    assert "MXFP4: gate_up_proj, down_proj" in describe_products(config, Mesh(), torch.float32)


def test_every_published_tensor_is_read_and_no_other(saved: tuple[Path, GptOss]) -> None:
    stored = {name: tuple(t.shape) for name, t in load_file(saved[0] / "model.safetensors").items()}
    assert stored_shapes(saved[0]) == stored


PUBLISHED = {
    "model.embed_tokens.weight": (201088, 2880),
    "model.layers.0.self_attn.q_proj.weight": (4096, 2880),
    "model.layers.0.self_attn.k_proj.bias": (512,),
    "model.layers.0.self_attn.o_proj.bias": (2880,),
    "model.layers.0.self_attn.sinks": (64,),
    "model.layers.0.mlp.router.weight": (128, 2880),
    "model.layers.0.mlp.router.bias": (128,),
    "model.layers.0.mlp.experts.gate_up_proj": (128, 5760, 2880),  # … _blocks (128, 5760, 90, 16)
    "model.layers.0.mlp.experts.gate_up_proj_bias": (128, 5760),
    "model.layers.35.mlp.experts.down_proj": (128, 2880, 2880),
    "model.layers.35.mlp.experts.down_proj_bias": (128, 2880),
}
"""Names and shapes in the published index, but for the packing of MXFP4."""


def test_the_preset_is_what_is_published() -> None:
    assert stored_shapes(preset_dir("gpt-oss-120b")).items() >= PUBLISHED.items()
    config = load_config(preset_dir("gpt-oss-120b"))
    model = config.build(Builder(Mesh(1, 4, 4, 1), 0, torch.bfloat16, torch.device("meta")))
    assert Counter(cached_layers(model).values()) == {PagedKV(2, 64): 18, Window(128, 2, 64): 18}


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(experts_per_token=4), "experts_per_token=4 is not supported"),
        (dict(layer_types=["linear_attention"] * 3), "layer type 'linear_attention' is not supported"),
        (dict(hidden_act="gelu"), "hidden_act='gelu' is not supported"),
        (dict(attention_chunk_size=1), r"'attention_chunk_size' \(value 1\) is not understood"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(changes: dict, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_config(small_config(**changes))
