"""Step-3.5-Flash against transformers' implementation, its checkpoints, and what it refuses."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from models.layouts import MESHES, check, check_float8, nearness, stored_shapes
from models.stepfun import Step, small_config, small_step
from weft.engine.assets import preset_dir
from weft.engine.attention.caches import cached_layers
from weft.engine.kv.cache_spec import PagedKV, Window
from weft.engine.models.config_json.fields import ModelError
from weft.engine.models.layers.basic import Builder
from weft.engine.models.registry import load_config, read_config
from weft.planner.spec import Mesh


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Step]:
    directory = tmp_path_factory.mktemp("step")
    return directory, small_step(directory)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_logits_are_transformers(saved: tuple[Path, Step], mesh: Mesh) -> None:
    check(saved[0], mesh, saved[1], 61)


@pytest.mark.parametrize(
    "changes",
    [
        dict(moe_layers_enum=[1, 2, 3], swiglu_limits_shared=None),
        dict(rope_scaling=None, yarn_only_types=None, rope_theta=1e4, swiglu_limits=None, sliding_window=5),
    ],
    ids=["experts everywhere", "one rope"],
)
def test_other_configs(changes: dict, tmp_path: Path) -> None:
    """Fields may be left out, and the draft layers' values may be missing."""
    values = {name: value for name, value in (small_config() | changes).items() if value is not None}
    model = small_step(tmp_path, **changes)
    assert read_config(values) == load_config(tmp_path)
    check(tmp_path, Mesh(1, 2, 2, 1), model, 61)


def test_bfloat16_is_as_near_to_the_truth_as_transformers(tmp_path: Path) -> None:
    ours, theirs = nearness(Step(small_config(), 1), small_config(), tmp_path)
    assert ours <= 1.25 * theirs


def test_every_published_tensor_is_read_and_no_other(saved: tuple[Path, Step]) -> None:
    stored = {name: tuple(t.shape) for name, t in load_file(saved[0] / "model.safetensors").items()}
    assert stored_shapes(saved[0]) == stored


def test_the_float8_release(saved: tuple[Path, Step], tmp_path: Path) -> None:
    plain = load_file(saved[0] / "model.safetensors")
    names = [n for n in plain if n.endswith("proj.weight") and "g_proj" not in n]
    assert any(plain[name].dim() == 3 for name in names)
    check_float8(plain, names, small_config(), tmp_path)


PUBLISHED = {
    "model.embed_tokens.weight": (128896, 4096),
    "lm_head.weight": (128896, 4096),
    "model.norm.weight": (4096,),
    "model.layers.0.self_attn.q_proj.weight": (8192, 4096),
    "model.layers.0.self_attn.g_proj.weight": (64, 4096),
    "model.layers.1.self_attn.q_proj.weight": (12288, 4096),
    "model.layers.1.self_attn.k_proj.weight": (1024, 4096),
    "model.layers.1.self_attn.g_proj.weight": (96, 4096),
    "model.layers.1.self_attn.q_norm.weight": (128,),
    "model.layers.1.self_attn.o_proj.weight": (4096, 12288),
    "model.layers.2.mlp.down_proj.weight": (4096, 11264),
    "model.layers.3.moe.gate.weight": (288, 4096),
    "model.layers.3.moe.router_bias": (288,),
    "model.layers.3.moe.gate_proj.weight": (288, 1280, 4096),
    "model.layers.3.moe.up_proj.weight": (288, 1280, 4096),
    "model.layers.3.moe.down_proj.weight": (288, 4096, 1280),
    "model.layers.44.share_expert.up_proj.weight": (1280, 4096),
}
"""Names and shapes in the published index."""


def test_the_preset_is_what_is_published() -> None:
    config = load_config(preset_dir("step-3.5-flash"))
    found = stored_shapes(preset_dir("step-3.5-flash"))
    assert found.items() >= PUBLISHED.items() and not any(".layers.45." in name for name in found)
    model = config.build(Builder(Mesh(1, 4, 4, 1), 0, torch.bfloat16, torch.device("meta")))
    caches = Counter(cached_layers(model).values())
    assert caches == {PagedKV(2, 128): 12, Window(512, 2, 128): 33}
    limited = {i: (layer.mlp.experts.limit, layer.mlp.shared.limit) for i, layer in enumerate(model.layers) if i > 2}
    assert {i: limits for i, limits in limited.items() if any(limits)} == {43: (7.0, None), 44: (7.0, 16.0)}


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(sink=True), "sink=True is not supported"),
        (dict(use_head_wise_attn_gate=False), "use_head_wise_attn_gate=False is not supported"),
        (dict(yarn_only_types=None), "needs a value for 'yarn_only_types'"),
        (dict(zero_centered=False), "zero_centered=False is not supported"),
        (dict(moe_router_activation="softmax"), "moe_router_activation='softmax' is not supported"),
        (dict(use_rope_layers=[0]), r"use_rope_layers=\[0\] is not supported"),
        (dict(hidden_act="gelu"), "hidden_act='gelu' is not supported"),
        (dict(layer_types=["full_attention", "linear"] * 3), "layer type 'linear' is not supported"),
        (dict(layer_types=["full_attention"]), "layer_types has 1 values for 4 layers"),
        (dict(attention_other_setting=dict(head_dim=16)), "attention_other_setting.head_dim=16 is not supported"),
        (dict(rope_scaling=dict(rope_type="dynamic")), "rope type 'dynamic' is not supported"),
        (dict(use_bidirectional_attention=True), r"'use_bidirectional_attention' \(value True\) is not understood"),
        (dict(moe_num_experts=None), "needs a value for 'moe_num_experts'"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(changes: dict, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_config(small_config(**changes))
