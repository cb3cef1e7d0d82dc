"""Bytes of a step and operations of its products, of small models whose tensors are counted by hand."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from support import small_config

from weft.engine.kv.cache_spec import Latent, Recurrent, Window
from weft.engine.models.layers.model_config import ModelConfig
from weft.engine.models.load import build_model
from weft.engine.models.registry import read_config
from weft.engine.worker.footprint import Footprint, Products, decode_step_bytes
from weft.kernels.float8 import FLOAT8
from weft.planner.spec import Mesh
from weft.tune.step_table import StepShape

ONE, BF16, PRODUCTS = Mesh(1, 1, 1, 1), torch.bfloat16, Products(50, 0, 500, 0)


def config_of(family: str, parts: int, **changes: Any) -> ModelConfig:
    return read_config(small_config(family, parts, **changes).to_dict())


def footprint_of(config: ModelConfig, mesh: Mesh) -> Footprint:
    return Footprint.of(build_model(config, mesh, 0, BF16, torch.device("meta")), config, mesh, BF16)


def whole_weights(config: ModelConfig) -> int:
    """Numbers of weights that every rank has whole, except for the embedding and the head."""
    one, two = (build_model(config, mesh, 0, BF16, torch.device("meta")) for mesh in (ONE, Mesh(1, 2, 1, 2)))
    whole = dict(two.named_parameters())
    return sum(
        w.numel()
        for name, w in one.named_parameters()
        if w.shape == whole[name].shape and "embed" not in name and "head" not in name
    )


def weights(config: ModelConfig, mesh: Mesh, part: str = "") -> int:
    model = build_model(config, mesh, 0, BF16, torch.device("meta"))
    return sum(w.numel() * w.element_size() for name, w in model.named_parameters() if part in name)


def test_each_weight_is_read_once_and_each_cached_token() -> None:
    config = config_of("llama", 2, tie_word_embeddings=False)
    read = weights(config, ONE) - weights(config, ONE, "embed")
    token = 2 * config.num_kv_heads * config.head_dim * config.num_layers * 2
    assert decode_step_bytes(config, ONE, BF16, 1, 0) == read
    assert decode_step_bytes(config, ONE, BF16, 5, 7) == read + 5 * 7 * token
    vectors = 2 * config.num_kv_heads * config.num_layers
    assert decode_step_bytes(config, ONE, BF16, 5, 7, FLOAT8) == read + 5 * 7 * vectors * (config.head_dim + 1)
    groups = Mesh(2, 1, 2, 1)
    read = weights(config, groups) - weights(config, groups, "embed")
    assert decode_step_bytes(config, groups, BF16, 5, 7) == read + 3 * 7 * token, "sequences of one group"


def test_a_tied_head_reads_the_embedding() -> None:
    config = config_of("llama", 2, tie_word_embeddings=True)
    assert decode_step_bytes(config, ONE, BF16, 1, 0) == weights(config, ONE)


def test_experts_are_read_that_are_expected_to_be_chosen() -> None:
    config = config_of("qwen3_moe", 1)
    experts, total = weights(config, ONE, "experts"), weights(config, ONE)
    embed = 0 if config.tie_embeddings else weights(config, ONE, "embed")
    one, many = (decode_step_bytes(config, ONE, BF16, n, 0) for n in (1, 1000))
    k, n = 2, 4
    assert one == total - embed - experts + round(experts * k / n)
    assert many == total - embed


def test_a_window_is_read_up_to_its_size() -> None:
    """Sliding windows hold 4 tokens of each sequence, on every rank of a dcp group."""
    config = config_of("mistral", 2)
    read = weights(config, ONE) - weights(config, ONE, "embed")
    token = 2 * config.num_kv_heads * config.head_dim * config.num_layers * 2
    for context, tokens in ((3, 3), (4, 4), (50, 4)):
        assert decode_step_bytes(config, ONE, BF16, 5, context) == read + 5 * tokens * token


def test_caches_of_a_step_with_prompts() -> None:
    """Chunks read the tokens before them once, states are read and written, and dcp ranks share whole sequences."""
    latent, window, state = Latent(10, 8), Window(6, 1, 4), Recurrent(((3, 2), (5,)))
    footprint = Footprint(3, 100, 1000, PRODUCTS, 0.25, 2, ((latent, 2), (window, 1), (state, 3)), BF16, dcp=2)

    def cached(shape: StepShape) -> float:
        return footprint.bytes_read(shape, 1) - 100 - 250

    assert cached(StepShape(2, 30)) == 2 * 2 * 30 * 20 / 2 + 2 * 6 * 16 + 3 * 2 * 2 * 44
    assert cached(StepShape(0, 0, 7, 40)) == 2 * 47 * 20 / 2 + (6 + 7) * 16 + 3 * 2 * 44
    assert cached(StepShape(0, 0, 7, 40, 2)) == 2 * 87 * 20 / 2 + (12 + 7) * 16 + 3 * 2 * 2 * 44
    assert cached(StepShape(1, 3, 7, 2)) == 2 * (3 + 9) * 20 / 2 + (3 + 9) * 16 + 3 * 2 * 2 * 44


@pytest.mark.parametrize(("rows", "ep"), [(1, 2), (4, 2), (4, 8), (16, 4), (400, 4)])
def test_the_rank_with_the_most_chosen_experts_counts(rows: int, ep: int) -> None:
    """Compared with the mean of 500 random choices."""
    experts, chosen, random = 128, 8, Random(0)
    config = config_of("qwen3_moe", 1, num_experts=experts, num_experts_per_tok=chosen)
    mesh = Mesh(ep, 1, ep, 1)
    footprint = footprint_of(config, mesh)
    most = 0
    for _ in range(500):
        hit = {expert for _ in range(rows) for expert in random.sample(range(experts), chosen)}
        most += max(sum(expert * ep // experts == rank for expert in hit) for rank in range(ep))
    assert footprint.products.experts == footprint.experts / 2
    found = (footprint.bytes_read(StepShape(1), rows) - footprint.dense) / footprint.experts * experts / ep
    assert found == pytest.approx(most / 500, rel=0.07)


def test_attention_of_prompts_counts_as_operations() -> None:
    """Rows of two prompts attend to 40 cached tokens, and to half of their own prompt; windows to 6 tokens."""
    window, state = Window(6, 1, 4), Recurrent(((3, 2), (5,)))
    for latent, width in ((Latent(10, 8), 18), (Latent(10, 8, (3, 5)), 3 + 2 + 5)):
        footprint = Footprint(3, 100, 1000, PRODUCTS, 0.25, 2, ((latent, 2), (window, 1), (state, 3)), BF16)
        products = 7 * 50 + 7 * 500 * 0.25
        expected = 2 * (products + 7 * 2 * (2 * 41.75 * width + 6 * 8))
        assert footprint.operations(StepShape(0, 0, 7, 40, 2), 7) == pytest.approx(expected)


def test_rows_choose_experts_of_all_groups() -> None:
    footprint = Footprint(2, 100, 1000, Products(20, 30, 500, 7), 0.25, 1, (), BF16)
    assert footprint.bytes_read(StepShape(1, 10), 2) == 100 + 1000 * (1 - 0.75**2)
    assert footprint.operations(StepShape(3, 10), 6) == 2 * (3 * 20 + 3 * 7 + 6 * (30 + 500 * 0.25))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("tied", [False, True])
def test_operations_are_those_of_the_configuration(family: str, tied: bool) -> None:
    """Products of two prompts of 400 rows, and one row of the head for each; counted from the configuration."""
    config, rows = config_of(family, 2, tie_word_embeddings=tied), 800
    given = small_config(family, 2).to_dict()
    width, heads, layers = (given[name] for name in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    dense = 3 * width * given["intermediate_size"]
    if family == "deepseek_v3":
        nope, rope, value = (given[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        rank, q_rank = given["kv_lora_rank"], given["q_lora_rank"]
        attention = width * (q_rank + rank + rope) + q_rank * heads * (nope + rope)
        attention += heads * (rank * (nope + value) + value * width)
        pair = heads * (nope + rope + value)
        experts = given["n_routed_experts"] + 3 * given["moe_intermediate_size"] * (2 + given["n_shared_experts"])
    else:
        dim = config.head_dim
        attention, pair = width * dim * (2 * heads + 2 * config.num_kv_heads), heads * 2 * dim
        experts = given.get("num_experts", 0) + 2 * 3 * given.get("moe_intermediate_size", 0)
    routed = {"llama": 0, "qwen3_moe": 2, "deepseek_v3": 2}[family]  # of three layers
    weights_of_row = layers * attention + (layers - routed) * dense + routed * width * experts
    found = footprint_of(config, ONE).operations(StepShape(0, 0, rows, 0, 2), rows)
    expected = 2 * (rows * weights_of_row + 2 * width * given["vocab_size"] + layers * pair * rows * 200)
    assert found == pytest.approx(expected, rel=0.02)  # norms and biases count, too


@pytest.mark.parametrize("family", ["llama", "qwen2_moe", "deepseek"])
@pytest.mark.parametrize("mesh", [Mesh(1, 2, 1, 2), Mesh(2, 1, 2, 1), Mesh(2, 2, 4, 1), Mesh(1, 4, 2, 2)])
def test_ranks_share_the_operations_of_one(family: str, mesh: Mesh) -> None:
    """Only what every rank computes itself counts more than once: routers, latent vectors, norms."""
    config, rows = config_of(family, 4, num_key_value_heads=8), 400
    prompts = StepShape(0, 0, rows // mesh.attn_dp, 30, 4 // mesh.attn_dp)
    one = footprint_of(config, ONE).operations(StepShape(0, 0, rows, 30, 4), rows)
    parts = footprint_of(config, mesh).operations(prompts, rows) * mesh.world
    whole = 2 * rows * whole_weights(config) * (mesh.world - 1)
    assert one * 0.99 < parts < one * 1.01 + whole
