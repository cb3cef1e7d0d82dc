"""Qwen3.5-MoE against transformers' implementation, its checkpoints, and what it refuses."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from models.layouts import MESHES, check, check_float8, nearness, stored_shapes
from models.qwen35 import Qwen35, small_config, small_qwen35
from weft.engine.assets import preset_dir
from weft.engine.attention.caches import cached_layers
from weft.engine.kernels.delta_rule import delta_rule
from weft.engine.kv.cache_spec import PagedKV, Recurrent
from weft.engine.models.config_json.fields import ModelError
from weft.engine.models.layers.basic import Builder
from weft.engine.models.registry import load_config, read_config
from weft.planner.spec import LayoutError, Mesh


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Qwen35]:
    directory = tmp_path_factory.mktemp("qwen35")
    return directory, small_qwen35(directory)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_logits_are_transformers(saved: tuple[Path, Qwen35], mesh: Mesh) -> None:
    check(saved[0], mesh, saved[1], 61)


def test_other_configs(tmp_path: Path) -> None:
    """Kinds of layers by their interval, no biases, a window of one token more, as many key heads as value heads."""
    changes = dict(attention_bias=False, linear_conv_kernel_dim=5, linear_num_key_heads=8)
    model = small_qwen35(tmp_path, **changes)
    values = small_config(**changes)
    del values["text_config"]["layer_types"]
    assert read_config(values) == load_config(tmp_path)
    # Float32 rounding: 1.39e-5 at its second token with CPU kernels, below 1e-5 with torch's products or norms.
    check(tmp_path, Mesh(1, 2, 2, 1), model, 61, tolerance=2e-5)


def test_bfloat16_is_as_near_to_the_truth_as_transformers(tmp_path: Path) -> None:
    ours, theirs = nearness(Qwen35(small_config(), 1), small_config(), tmp_path)
    assert ours <= 1.25 * theirs


@pytest.mark.parametrize("lengths", [(1,), (5,), (64, 7), (3, 1, 130)])
def test_the_delta_rule_in_runs_is_what_it_is_token_by_token(lengths: tuple[int, ...]) -> None:
    """Two sequences of three heads, in float64: some tokens forget the whole state, some nothing."""
    generator = torch.Generator().manual_seed(sum(lengths))
    rows = sum(lengths)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(2, 3, *shape, generator=generator, dtype=torch.float64)

    q, k, v, state = random(rows, 4), random(rows, 4) / 2, random(rows, 5), random(4, 5)
    beta = torch.rand(2, 3, rows, generator=generator, dtype=torch.float64)
    decay = -20 * torch.rand(2, 3, rows, generator=generator, dtype=torch.float64) ** 6
    found, wanted, after = [], [], state
    for part in zip(*(x.split(lengths, dim=2) for x in (q, k, v, decay, beta)), strict=True):
        out, after = delta_rule(*part, after)
        found.append(out)
    for t in range(rows):
        state = decay[:, :, t, None, None].exp() * state
        miss = v[:, :, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, :, t])
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, :, t], beta[:, :, t, None] * miss)
        wanted.append(torch.einsum("bhkv,bhk->bhv", state, q[:, :, t]))
    assert torch.allclose(torch.cat(found, dim=2), torch.stack(wanted, dim=2), rtol=1e-9, atol=1e-9)
    assert torch.allclose(after, state, rtol=1e-9, atol=1e-9)


def test_every_published_tensor_is_read_and_no_other(saved: tuple[Path, Qwen35]) -> None:
    stored = {name: tuple(t.shape) for name, t in load_file(saved[0] / "model.safetensors").items()}
    assert stored_shapes(saved[0]) == stored


def test_the_float8_release(saved: tuple[Path, Qwen35], tmp_path: Path) -> None:
    """There experts are not fused, and most projections are in FP8."""
    plain = load_file(saved[0] / "model.safetensors")
    for name in [n for n in plain if ".experts." in n]:
        stacked, fused = plain.pop(name), name.endswith("gate_up_proj")
        for e, weight in enumerate(stacked):
            parts = dict(zip(("gate", "up"), weight.chunk(2), strict=True)) if fused else {"down": weight}
            for part, half in parts.items():
                plain[f"{name.rpartition('.')[0]}.{e}.{part}_proj.weight"] = half.contiguous()
    names = [n for n in plain if n.endswith("proj.weight") or "in_proj_qkv" in n or "in_proj_z" in n]
    check_float8(plain, names, small_config(), tmp_path)


LAYERS = "model.language_model.layers"
PUBLISHED = {
    "model.language_model.embed_tokens.weight": (248320, 2048),
    "lm_head.weight": (248320, 2048),
    "model.language_model.norm.weight": (2048,),
    f"{LAYERS}.0.linear_attn.in_proj_qkv.weight": (8192, 2048),
    f"{LAYERS}.0.linear_attn.in_proj_z.weight": (4096, 2048),
    f"{LAYERS}.0.linear_attn.in_proj_a.weight": (32, 2048),
    f"{LAYERS}.0.linear_attn.conv1d.weight": (8192, 1, 4),
    f"{LAYERS}.0.linear_attn.A_log": (32,),
    f"{LAYERS}.0.linear_attn.dt_bias": (32,),
    f"{LAYERS}.0.linear_attn.norm.weight": (128,),
    f"{LAYERS}.0.linear_attn.out_proj.weight": (2048, 4096),
    f"{LAYERS}.3.self_attn.q_proj.weight": (8192, 2048),
    f"{LAYERS}.3.self_attn.k_proj.weight": (512, 2048),
    f"{LAYERS}.3.self_attn.o_proj.weight": (2048, 4096),
    f"{LAYERS}.39.mlp.gate.weight": (256, 2048),
    f"{LAYERS}.39.mlp.experts.gate_up_proj": (256, 1024, 2048),
    f"{LAYERS}.39.mlp.experts.down_proj": (256, 2048, 512),
    f"{LAYERS}.39.mlp.shared_expert.gate_proj.weight": (512, 2048),
    f"{LAYERS}.39.mlp.shared_expert_gate.weight": (1, 2048),
}
"""Names and shapes in the published index."""


def test_the_preset_is_what_is_published() -> None:
    config = load_config(preset_dir("qwen3.5-35b-a3b"))
    assert stored_shapes(preset_dir("qwen3.5-35b-a3b")).items() >= PUBLISHED.items()
    assert load_config(preset_dir("qwen3.5-35b-a3b"), num_layers=2).num_layers == 2

    def caches(mesh: Mesh) -> Counter[Any]:
        return Counter(cached_layers(config.build(Builder(mesh, 0, torch.bfloat16, torch.device("meta")))).values())

    assert caches(Mesh(1, 4, 4, 1)) == {PagedKV(1, 256): 10, Recurrent(((8, 128, 128), (2048, 3)), by_starts=True): 30}
    # Twice as many ranks as key heads: each is held twice, a value head a rank.
    with pytest.raises(LayoutError, match="attn_tp=32"):
        caches(Mesh(1, 32, 32, 1))


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(attn_output_gate=False), "attn_output_gate=False is not supported"),
        (dict(mamba_ssm_dtype="bfloat16"), "mamba_ssm_dtype='bfloat16' is not supported"),
        (dict(mlp_only_layers=[1]), r"mlp_only_layers=\[1\] is not supported"),
        (dict(partial_rotary_factor=0.25), "partial_rotary_factor=0.25 is not supported"),
        (dict(layer_types=["full_attention"]), "are not 4 of full_attention and linear_attention"),
        (dict(layer_types=["sliding_attention"] * 4), "are not 4 of full_attention and linear_attention"),
        (dict(rope_parameters=dict(rope_theta="1e4")), "text_config.rope_parameters.rope_theta='1e4' is not a number"),
        (dict(num_experts=None), "needs a value for 'text_config.num_experts'"),
        (dict(sliding_window=64), r"'text_config.sliding_window' \(value 64\) is not understood"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(changes: dict, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_config(small_config(**changes))


def test_fields_that_transformers_does_not_read_are_ignored_by_name() -> None:
    config = small_config(output_gate_type="swish", rope_parameters=dict(rope_theta=1e4, spin=1))
    ignored = ("audio_config", "text_config.output_gate_type", "text_config.rope_parameters.spin")
    assert read_config(config | {"audio_config": 1}).ignored == ignored
