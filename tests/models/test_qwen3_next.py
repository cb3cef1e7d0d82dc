"""Qwen3-Next against transformers' implementation, and its checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from models.layouts import check, check_float8, in_two_steps, nearness, stored_shapes
from models.qwen3_next import Qwen3Next, small_config, small_qwen3_next
from models.test_logits import splits
from weft.engine.assets import preset_dir
from weft.engine.models.config_json.fields import ModelError
from weft.engine.models.registry import read_config
from weft.planner.spec import Mesh


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Qwen3Next]:
    directory = tmp_path_factory.mktemp("qwen3_next")
    return directory, small_qwen3_next(directory)


@pytest.mark.parametrize("mesh", [m for m in splits(8) if m.world in (1, 2, 4, 8)], ids=str)
def test_logits_are_transformers(saved: tuple[Path, Qwen3Next], mesh: Mesh) -> None:
    """Two of eight ranks hold each key head, and each of the two one of its value heads."""
    check(saved[0], mesh, saved[1], 61, steps=in_two_steps)


def test_token_by_token(saved: tuple[Path, Qwen3Next]) -> None:
    check(saved[0], Mesh(1, 4, 2, 2), saved[1], 61)


@pytest.mark.parametrize("mesh", [Mesh(1, 3, 3, 1), Mesh(1, 6, 2, 3)], ids=str)
def test_other_numbers_of_heads(mesh: Mesh, tmp_path: Path) -> None:
    """Three value heads to a key head."""
    heads = dict(num_attention_heads=12, num_key_value_heads=6, linear_num_key_heads=6, linear_num_value_heads=18)
    experts = dict(num_experts=6, moe_intermediate_size=12, attention_bias=False, linear_conv_kernel_dim=5)
    model = small_qwen3_next(tmp_path, **heads, **experts)
    check(tmp_path, mesh, model, 61, steps=in_two_steps)


@pytest.mark.nightly
def test_bfloat16_is_as_near_to_the_truth_as_transformers(tmp_path: Path) -> None:
    """Qwen3.5's test, of the same layers, runs by day."""
    ours, theirs = nearness(Qwen3Next(small_config(), 1), small_config(), tmp_path)
    assert ours <= 1.25 * theirs


def test_every_published_tensor_is_read_and_no_other(saved: tuple[Path, Qwen3Next]) -> None:
    stored = {name: tuple(t.shape) for name, t in load_file(saved[0] / "model.safetensors").items()}
    assert stored_shapes(saved[0]) == stored


def test_the_float8_release(saved: tuple[Path, Qwen3Next], tmp_path: Path) -> None:
    plain = load_file(saved[0] / "model.safetensors")
    names = [n for n in plain if n.endswith("proj.weight") or "in_proj_qkvz" in n]
    check_float8(plain, names, small_config(), tmp_path)


PUBLISHED = {
    "model.embed_tokens.weight": (151936, 2048),
    "lm_head.weight": (151936, 2048),
    "model.layers.0.linear_attn.in_proj_qkvz.weight": (12288, 2048),
    "model.layers.0.linear_attn.in_proj_ba.weight": (64, 2048),
    "model.layers.0.linear_attn.conv1d.weight": (8192, 1, 4),
    "model.layers.0.linear_attn.A_log": (32,),
    "model.layers.0.linear_attn.norm.weight": (128,),
    "model.layers.0.linear_attn.out_proj.weight": (2048, 4096),
    "model.layers.3.self_attn.q_proj.weight": (8192, 2048),
    "model.layers.3.self_attn.k_proj.weight": (512, 2048),
    "model.layers.3.self_attn.q_norm.weight": (256,),
    "model.layers.3.mlp.gate.weight": (512, 2048),
    "model.layers.3.mlp.experts.511.gate_proj.weight": (512, 2048),
    "model.layers.3.mlp.shared_expert.down_proj.weight": (2048, 512),
    "model.layers.3.mlp.shared_expert_gate.weight": (1, 2048),
}
"""Names and shapes in the published index of Qwen3-Next-80B-A3B."""


def test_the_preset_is_what_is_published() -> None:
    assert stored_shapes(preset_dir("qwen3-next-80b-a3b"), num_layers=4).items() >= PUBLISHED.items()


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(norm_topk_prob=False), "norm_topk_prob=False is not supported"),
        (dict(mlp_only_layers=[1]), r"mlp_only_layers=\[1\] is not supported"),
        (dict(layer_types=["sliding_attention"] * 4), "are not 4 of full_attention and linear_attention"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(changes: dict, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_config(small_config(**changes))
