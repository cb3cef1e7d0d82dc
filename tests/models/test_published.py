"""Checkpoints as they are published: what families without tests of their own read of them, by names and shapes.

Small ones are saved by transformers, under the names of the published indexes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from support import MODELS, small_model

from models.layouts import stored_shapes
from weft.engine.assets import preset_dir
from weft.engine.models.config_json.fields import ModelError
from weft.engine.models.registry import load_config

Index = dict[str, tuple[int, ...]]


@pytest.mark.parametrize("family", MODELS)
def test_every_published_tensor_is_read_and_no_other(family: str, tmp_path: Path) -> None:
    small_model(family, 4, tmp_path)
    stored = {name: tuple(t.shape) for name, t in load_file(tmp_path / "model.safetensors").items()}
    assert stored_shapes(tmp_path) == stored


def qwen3(width: int, queries: int, keys: int, vocabulary: int = 151936) -> Index:
    """Return the index that all sizes have in common, of the first layer. queries, keys: features."""
    return {
        "model.embed_tokens.weight": (vocabulary, width),
        "model.norm.weight": (width,),
        "lm_head.weight": (vocabulary, width),
        "model.layers.0.input_layernorm.weight": (width,),
        "model.layers.0.self_attn.q_proj.weight": (queries, width),
        "model.layers.0.self_attn.k_proj.weight": (keys, width),
        "model.layers.0.self_attn.v_proj.weight": (keys, width),
        "model.layers.0.self_attn.q_norm.weight": (128,),
        "model.layers.0.self_attn.k_norm.weight": (128,),
        "model.layers.0.self_attn.o_proj.weight": (width, queries),
    }


def deepseek(width: int, heads: int, dense: int, inner: int, experts: int, first: int, vocabulary: int) -> Index:
    """first: the first layer with experts; inner: features of one."""
    sparse = f"model.layers.{first}.mlp"
    return {
        "model.embed_tokens.weight": (vocabulary, width),
        "lm_head.weight": (vocabulary, width),
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": (576, width),
        "model.layers.0.self_attn.kv_a_layernorm.weight": (512,),
        "model.layers.0.self_attn.kv_b_proj.weight": (256 * heads, 512),
        "model.layers.0.self_attn.o_proj.weight": (width, 128 * heads),
        f"model.layers.{first - 1}.mlp.gate_proj.weight": (dense, width),
        f"model.layers.{first - 1}.mlp.down_proj.weight": (width, dense),
        f"{sparse}.gate.weight": (experts, width),
        f"{sparse}.experts.{experts - 1}.up_proj.weight": (inner, width),
        f"{sparse}.experts.{experts - 1}.down_proj.weight": (width, inner),
    }


def compressed(width: int, heads: int) -> Index:
    """Queries of a latent vector."""
    return {
        "model.layers.0.self_attn.q_a_proj.weight": (1536, width),
        "model.layers.0.self_attn.q_a_layernorm.weight": (1536,),
        "model.layers.0.self_attn.q_b_proj.weight": (192 * heads, 1536),
    }


PRESETS: dict[str, Index] = {
    "qwen3-30b-a3b": qwen3(2048, 4096, 512)
    | {
        "model.layers.0.mlp.gate.weight": (128, 2048),
        "model.layers.0.mlp.experts.127.gate_proj.weight": (768, 2048),
        "model.layers.0.mlp.experts.127.down_proj.weight": (2048, 768),
    },
    "qwen3-235b-a22b": qwen3(4096, 8192, 512)
    | {
        "model.layers.0.mlp.gate.weight": (128, 4096),
        "model.layers.0.mlp.experts.127.up_proj.weight": (1536, 4096),
    },
    "deepseek-v2-lite": deepseek(2048, 16, 10944, 1408, 64, 1, 102400)
    | {
        "model.layers.0.self_attn.q_proj.weight": (3072, 2048),
        "model.layers.1.mlp.shared_experts.up_proj.weight": (2816, 2048),
    },
    "deepseek-v2": deepseek(5120, 128, 12288, 1536, 160, 1, 102400)
    | compressed(5120, 128)
    | {"model.layers.1.mlp.shared_experts.down_proj.weight": (5120, 3072)},
    "deepseek-v3": deepseek(7168, 128, 18432, 2048, 256, 3, 129280)
    | compressed(7168, 128)
    | {
        "model.layers.3.mlp.gate.e_score_correction_bias": (256,),
        "model.layers.3.mlp.shared_experts.gate_proj.weight": (2048, 7168),
    },
    "kimi-k2": deepseek(7168, 64, 18432, 2048, 384, 1, 163840)
    | compressed(7168, 64)
    | {"model.layers.1.mlp.gate.e_score_correction_bias": (384,)},
    "llama-3.2-1b": {
        "model.embed_tokens.weight": (128256, 2048),
        "model.norm.weight": (2048,),
        "model.layers.0.self_attn.q_proj.weight": (2048, 2048),
        "model.layers.0.self_attn.k_proj.weight": (512, 2048),
        "model.layers.3.mlp.down_proj.weight": (2048, 8192),
    },
    "qwen2.5-7b": {
        "lm_head.weight": (152064, 3584),
        "model.layers.0.self_attn.q_proj.weight": (3584, 3584),
        "model.layers.0.self_attn.q_proj.bias": (3584,),
        "model.layers.0.self_attn.v_proj.bias": (512,),
        "model.layers.0.self_attn.o_proj.weight": (3584, 3584),
        "model.layers.3.mlp.gate_proj.weight": (18944, 3584),
    },
    "mistral-7b-v0.1": {
        "lm_head.weight": (32000, 4096),
        "model.layers.0.self_attn.k_proj.weight": (1024, 4096),
        "model.layers.3.mlp.up_proj.weight": (14336, 4096),
    },
    "minimax-m2": {
        "model.embed_tokens.weight": (200064, 3072),
        "lm_head.weight": (200064, 3072),
        "model.layers.0.self_attn.q_proj.weight": (6144, 3072),
        "model.layers.0.self_attn.k_proj.weight": (1024, 3072),
        "model.layers.0.self_attn.o_proj.weight": (3072, 6144),
        "model.layers.0.self_attn.q_norm.weight": (6144,),
        "model.layers.3.self_attn.k_norm.weight": (1024,),
        "model.layers.0.block_sparse_moe.gate.weight": (256, 3072),
        "model.layers.0.block_sparse_moe.e_score_correction_bias": (256,),
        "model.layers.3.block_sparse_moe.experts.255.w1.weight": (1536, 3072),
        "model.layers.3.block_sparse_moe.experts.0.w2.weight": (3072, 1536),
    },
    "mixtral-8x7b": {
        "lm_head.weight": (32000, 4096),
        "model.layers.0.self_attn.v_proj.weight": (1024, 4096),
        "model.layers.0.block_sparse_moe.gate.weight": (8, 4096),
        "model.layers.0.block_sparse_moe.experts.7.w1.weight": (14336, 4096),
        "model.layers.3.block_sparse_moe.experts.0.w2.weight": (4096, 14336),
        "model.layers.3.block_sparse_moe.experts.0.w3.weight": (14336, 4096),
    },
}
"""Names and shapes in the published indexes of the presets."""


@pytest.mark.parametrize("preset", PRESETS)
def test_the_presets_are_what_is_published(preset: str) -> None:
    found = stored_shapes(preset_dir(preset), num_layers=4)
    assert found.items() >= PRESETS[preset].items()
    with_bias = {name.rpartition(".")[0].rpartition(".")[2] for name in found if "bias" in name}
    assert with_bias == {
        "deepseek-v3": {"gate"},
        "kimi-k2": {"gate"},
        "minimax-m2": {"block_sparse_moe"},
        "qwen2.5-7b": {"q_proj", "k_proj", "v_proj"},
    }.get(preset, set())
    assert ("lm_head.weight" in found) == (preset != "llama-3.2-1b")


QWEN = dict(
    hidden_act="silu",
    max_position_embeddings=40960,
    max_window_layers=2,
    num_hidden_layers=2,
    rms_norm_eps=1e-06,
    rope_theta=1000000.0,
    sliding_window=None,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    use_sliding_window=False,
    vocab_size=151936,
)
OTHERS: dict[str, tuple[dict, Index]] = {
    "Qwen3-8B": (
        QWEN
        | dict(model_type="qwen3", hidden_size=4096, intermediate_size=12288, head_dim=128, attention_bias=False)
        | dict(num_attention_heads=32, num_key_value_heads=8),
        qwen3(4096, 4096, 1024) | {"model.layers.1.mlp.gate_proj.weight": (12288, 4096)},
    ),
    "Qwen1.5-MoE-A2.7B": (
        QWEN
        | dict(model_type="qwen2_moe", hidden_size=2048, intermediate_size=5632, decoder_sparse_step=1)
        | dict(num_attention_heads=16, num_key_value_heads=16, num_experts=60, num_experts_per_tok=4)
        | dict(moe_intermediate_size=1408, shared_expert_intermediate_size=5632, norm_topk_prob=False),
        {
            "lm_head.weight": (151936, 2048),
            "model.layers.0.self_attn.q_proj.weight": (2048, 2048),
            "model.layers.0.self_attn.q_proj.bias": (2048,),
            "model.layers.0.self_attn.k_proj.bias": (2048,),
            "model.layers.0.self_attn.o_proj.weight": (2048, 2048),
            "model.layers.1.mlp.gate.weight": (60, 2048),
            "model.layers.1.mlp.experts.59.gate_proj.weight": (1408, 2048),
            "model.layers.1.mlp.experts.59.down_proj.weight": (2048, 1408),
            "model.layers.1.mlp.shared_expert.up_proj.weight": (5632, 2048),
            "model.layers.1.mlp.shared_expert_gate.weight": (1, 2048),
        },
    ),
}
"""Families without a preset: two layers of a published config, and what its index has of them."""


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_published_without_a_preset(name: str, tmp_path: Path) -> None:
    config, published = OTHERS[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = stored_shapes(tmp_path)
    assert found.items() >= published.items() and not any(n.endswith("o_proj.bias") for n in found)


CONFIGS: dict[str, Any] = json.loads(Path(__file__).with_name("published_configs.json").read_text())
"""config.json of published models and fine-tunes, by the repository that has it, with the fields that Weft ignores, or
the error for a field that transformers reads and Weft does not."""


@pytest.mark.parametrize("repository", CONFIGS)
def test_published_configs_load_or_are_refused_for_a_field_that_transformers_reads(
    repository: str, tmp_path: Path
) -> None:
    published = CONFIGS[repository]
    (tmp_path / "config.json").write_text(json.dumps(published["config"]))
    if "refused" in published:
        with pytest.raises(ModelError, match=published["refused"]):
            load_config(tmp_path)
        return
    config = load_config(tmp_path)
    assert sorted(config.ignored) == sorted(published.get("ignored", ()))
    found, vocabulary = stored_shapes(tmp_path, num_layers=4), config.vocab_size
    assert found[f"{config.prefix}.embed_tokens.weight"] == (vocabulary, config.hidden_size)
    assert ("lm_head.weight" in found) != config.tie_embeddings
