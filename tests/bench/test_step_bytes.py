"""The bytes of a decode step, of small models whose tensors are counted by hand."""

from __future__ import annotations

from typing import Any

import torch
from support import small_config

from weft.engine.models.layers.model_config import ModelConfig
from weft.engine.models.load import build_model
from weft.engine.models.registry import read_config
from weft.kernels.float8 import FLOAT8
from weft.planner.spec import Mesh
from weft_bench.step_bytes import decode_step_bytes

ONE, BF16 = Mesh(1, 1, 1, 1), torch.bfloat16


def config_of(family: str, parts: int, **changes: Any) -> ModelConfig:
    return read_config(small_config(family, parts, **changes).to_dict())


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
