"""Made-up weights: parts of one model whatever the layout, and sane as a model's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support import FAMILIES, small_config

from models import oss, qwen35, stepfun
from weft.engine.assets import embedded_model_dir, preset_dir, preset_names
from weft.engine.attention.caches import cached_layers
from weft.engine.config.config import EngineConfig
from weft.engine.controller.engine import Engine
from weft.engine.kv.cache_spec import Latent
from weft.engine.messages.request import SamplingParams
from weft.engine.models import load
from weft.engine.models.config_json.fields import ModelError
from weft.engine.models.families.deepseek import LatentAttention
from weft.engine.models.layers.basic import ColumnLinear, Linear
from weft.engine.models.layers.moe import SparseMoE
from weft.engine.models.load import build_model, dummy_checkpoint, dummy_model
from weft.engine.models.registry import load_config, read_config
from weft.planner.spec import Mesh


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_hold_parts_of_the_same_whole(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_config(small_config(family, 4).to_dict())
    whole = dummy_model(config, Mesh(), 0)
    monkeypatch.setattr(load, "DUMMY_BLOCK_CPU", 7)  # rows are made in blocks: their borders must not show
    mesh = Mesh(2, 2, 2, 2)
    ranks = [dummy_model(config, mesh, r) for r in range(4)]
    for layer, index in ((0, 3), (2, 0)):
        experts = [r.layers[layer].mlp.experts for r in ranks if isinstance(r.layers[layer].mlp, SparseMoE)]
        for e, expert in enumerate(experts):
            full = whole.layers[layer].mlp.experts
            mine = slice(4 * (e // 2), 4 * (e // 2) + 4)
            cut = slice(8 * (e % 2), 8 * (e % 2) + 8)
            gate, up = full.gate_up[mine].chunk(2, dim=1)
            assert torch.equal(expert.gate_up, torch.cat((gate[:, cut], up[:, cut]), dim=1))
            assert torch.equal(expert.down, full.down[mine][..., cut])
        out = whole.layers[layer].attention.out.weight
        half = out.shape[1] // 2
        for r in (0, index):
            part = ranks[r].layers[layer].attention.out.weight
            assert torch.equal(part, out[:, half * (r % 2) : half * (r % 2) + half])
    assert all(torch.equal(r.embed.weight, whole.embed.weight) for r in ranks)


@pytest.mark.parametrize("small", [oss.small_config, qwen35.small_config, stepfun.small_config])
def test_ranks_hold_parts_of_stacked_experts(small: Callable[[], dict], monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_config(small())
    whole = dummy_model(config, Mesh(), 0).layers[2].mlp.experts
    monkeypatch.setattr(load, "DUMMY_BLOCK_CPU", 7)
    held, size = len(whole.down) // 2, whole.down.shape[2] // 2
    for r in range(4):
        found = dummy_model(config, Mesh(2, 2, 2, 2), r).layers[2].mlp.experts
        mine, cut = slice(held * (r // 2), held * (r // 2 + 1)), slice(size * (r % 2), size * (r % 2 + 1))
        gate, up = whole.gate_up[mine].chunk(2, dim=1)
        assert torch.equal(found.gate_up, torch.cat((gate[:, cut], up[:, cut]), dim=1))
        assert torch.equal(found.down, whole.down[mine][..., cut])


def test_values_are_spread_and_unlike() -> None:
    config = read_config(small_config("qwen2_moe", 4).to_dict() | {"vocab_size": 5000, "hidden_size": 64})
    model = dummy_model(config, Mesh(), 0)
    seen: list[torch.Tensor] = []
    for name, weight in model.named_parameters():
        if "norm" in name:
            assert (weight == 1).all()
        elif weight.dim() > 1 and weight.numel() > 2000:
            values = weight.double().flatten() * weight.shape[-1] ** 0.5
            assert abs(values.mean()) < 0.1 and abs(values.std() - 1) < 0.05 and values.abs().max() <= 3**0.5, name
            assert values.unique().numel() > 0.99 * values.numel()
            assert all(abs((values[:2000] * other).mean()) < 0.1 for other in seen), name  # 4.5 standard errors
            seen.append(values[:2000])
    assert len(seen) > 10
    again = dict(dummy_model(config, Mesh(), 0, torch.bfloat16).named_parameters())
    assert all(torch.equal(again[name], weight.bfloat16()) for name, weight in model.named_parameters())


PUBLISHED = {
    "qwen3-30b-a3b": 30.53,
    "qwen3-235b-a22b": 235.09,
    "deepseek-v2": 235.74,
    "deepseek-v2-lite": 15.71,
    "deepseek-v3": 671.03,
    "glm-4.5-air": 106.85,
    "gpt-oss-20b": 20.91,
    "gpt-oss-120b": 116.83,
    "kimi-k2": 1026.41,
    "llama-3.1-8b": 8.03,
    "llama-3.2-1b": 1.24,
    "mistral-7b-v0.1": 7.24,
    "mixtral-8x7b": 46.70,
    "qwen2.5-7b": 7.62,
    "qwen3-next-80b-a3b": 79.67,
}


@pytest.mark.parametrize("name, billions", PUBLISHED.items())
def test_presets_have_the_published_number_of_parameters(name: str, billions: float) -> None:
    config = load_config(preset_dir(name))
    model = build_model(config, Mesh(), 0, torch.bfloat16, torch.device("meta"))
    assert abs(sum(p.numel() for p in model.parameters()) / 1e9 - billions) < 0.01


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-v3"])
def test_one_product_of_latent_attention_reads_the_hidden_state(name: str) -> None:
    config = load_config(preset_dir(name), num_layers=1)
    model = build_model(config, Mesh(1, 2, 2, 1), 0, torch.bfloat16, torch.device("meta"))
    (attention,) = (module for module in model.modules() if isinstance(module, LatentAttention))
    products = [m for m in attention.children() if isinstance(m, Linear | ColumnLinear)]
    assert sum(product.weight.shape[1] == config.hidden_size for product in products) == 1


@pytest.mark.parametrize(
    "mesh, heads", [(Mesh(), 128), (Mesh(1, 4, 4, 1), 32), (Mesh(1, 4, 4, 1, dcp=2), 64)], ids=["1", "tp 4", "dcp 2"]
)
def test_a_cache_of_latents_knows_the_heads_of_a_rank(mesh: Mesh, heads: int) -> None:
    config = load_config(preset_dir("deepseek-v3"), num_layers=1)
    model = build_model(config, mesh, 0, torch.bfloat16, torch.device("meta"))
    assert [spec.heads for spec in cached_layers(model).values() if isinstance(spec, Latent)] == [heads]


def test_fewer_layers() -> None:
    embedded = load_config(embedded_model_dir(), num_layers=2)
    assert embedded == replace(load_config(embedded_model_dir()), num_layers=2)
    with pytest.raises(ModelError, match="5 layers were requested; there are 4"):
        load_config(embedded_model_dir(), num_layers=5)


def test_the_engine_serves_made_up_weights() -> None:
    """Text from two layouts is the same, though no rank has ever seen a checkpoint."""
    model = EngineConfig(executor="thread", load_format="dummy", num_layers=2, kv_tokens=256)
    assert replace(model, model=preset_dir("qwen3-30b-a3b")).tokenizer == embedded_model_dir()
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    outputs = []
    for layout in ({}, {"attn_dp": 2, "attn_tp": 2, "ep": 4}):
        with Engine(replace(model, **layout)) as engine:
            outputs.append([result.token_ids for result in engine.generate([[5, 6, 7], [8]], params)])
    assert outputs[0] == outputs[1] and len(set(outputs[0][0])) > 1


def test_every_preset_is_readable() -> None:
    assert set(PUBLISHED) <= set(preset_names())
    for name in preset_names():
        assert load_config(preset_dir(name), num_layers=2).num_layers == 2


def test_a_checkpoints_norms_are_those_of_the_model() -> None:
    """Also where all heads have one."""
    config = read_config(small_config("minimax_m2", 2).to_dict())
    norms = [made for made in dummy_checkpoint(config) if "norm" in made.source.name]
    assert any("q_norm" in made.source.name for made in norms)
    for made in norms:
        assert (made.make(torch.float32, torch.device("cpu")) == 1).all(), made.source.name
