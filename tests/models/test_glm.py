"""GLM-4.5 against transformers' implementation, its checkpoints, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.conftest import byte_tokenizer, greedy_outputs
from engine.test_engine import GREEDY, LAYOUTS, config, prompts
from models.glm import Glm, small_config, small_glm
from models.layouts import MESHES, check, nearness, stored_shapes
from weft.engine.assets import preset_dir
from weft.engine.controller.engine import Engine
from weft.engine.models.config_json.fields import ModelError
from weft.engine.models.registry import read_config
from weft.planner.spec import Mesh


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Glm]:
    directory = tmp_path_factory.mktemp("glm")
    return directory, small_glm(directory)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_logits_are_transformers(saved: tuple[Path, Glm], mesh: Mesh) -> None:
    check(saved[0], mesh, saved[1], 61)


def test_other_configs(tmp_path: Path) -> None:
    """Air has neither norms of heads nor groups; all of a head is rotated, without biases."""
    changes = dict(use_qk_norm=False, n_group=1, attention_bias=False, partial_rotary_factor=1.0)
    check(tmp_path, Mesh(1, 2, 2, 1), small_glm(tmp_path, **changes), 61)


def test_bfloat16_is_as_near_to_the_truth_as_transformers(tmp_path: Path) -> None:
    ours, theirs = nearness(Glm(small_config(), 1), small_config(), tmp_path)
    assert ours <= 1.25 * theirs


def test_greedy_tokens_are_transformers(tmp_path: Path) -> None:
    model = small_glm(tmp_path, seed=3, vocab_size=257, max_position_embeddings=256)
    byte_tokenizer(tmp_path)
    asked = prompts()[:3]
    wanted = greedy_outputs(lambda tokens: torch.stack([*map(model, tokens)]), asked, GREEDY.max_tokens)
    with Engine(config(tmp_path, **LAYOUTS["1x4"])) as engine:
        assert [r.token_ids for r in engine.generate(asked, GREEDY)] == wanted


def test_every_published_tensor_is_read_and_no_other(saved: tuple[Path, Glm]) -> None:
    stored = {name: tuple(t.shape) for name, t in load_file(saved[0] / "model.safetensors").items()}
    assert stored_shapes(saved[0]) == stored


PUBLISHED = {
    "model.embed_tokens.weight": (151552, 4096),
    "lm_head.weight": (151552, 4096),
    "model.norm.weight": (4096,),
    "model.layers.0.self_attn.q_proj.weight": (12288, 4096),
    "model.layers.0.self_attn.q_proj.bias": (12288,),
    "model.layers.0.self_attn.k_proj.bias": (1024,),
    "model.layers.0.self_attn.o_proj.weight": (4096, 12288),
    "model.layers.0.mlp.down_proj.weight": (4096, 10944),
    "model.layers.1.mlp.gate.weight": (128, 4096),
    "model.layers.1.mlp.gate.e_score_correction_bias": (128,),
    "model.layers.1.mlp.experts.127.gate_proj.weight": (1408, 4096),
    "model.layers.1.mlp.experts.127.down_proj.weight": (4096, 1408),
    "model.layers.1.mlp.shared_experts.up_proj.weight": (1408, 4096),
}
"""Names and shapes in the published index of GLM-4.5-Air."""


def test_the_preset_is_what_is_published() -> None:
    found = stored_shapes(preset_dir("glm-4.5-air"), num_layers=2)
    assert found.items() >= PUBLISHED.items() and not any("o_proj.bias" in name or "q_norm" in name for name in found)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(hidden_act="gelu"), "hidden_act='gelu' is not supported"),
        (dict(rope_scaling=dict(rope_type="dynamic", factor=2.0)), "rope type 'dynamic' is not supported"),
        (dict(sliding_window=64), r"'sliding_window' \(value 64\) is not understood"),
        (dict(quantization_config=dict(quant_method="compressed-tensors")), "quantization_config .* is not supported"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(changes: dict, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_config(small_config(**changes))
