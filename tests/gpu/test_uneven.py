"""Heads, experts and tokens that do not divide over two GPUs: greedy tokens in graphs equal a CPU's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import small_model

from engine.conftest import byte_tokenizer
from gpu.test_engine import greedy_of

LAYOUTS: dict[str, dict[str, Any]] = {
    "1x2 ep 2": dict(attn_tp=2, ep=2),
    "1x2 moe_tp 2": dict(attn_tp=2, moe_tp=2, split_vocabulary="on"),
    "1x2 nccl": dict(attn_tp=2, ep=2, transport="nccl"),
    "2x1 ep 2": dict(attn_dp=2, ep=2),
    "1x2 ep 2, eager": dict(attn_tp=2, ep=2, cuda_graphs=False),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[int, ...]]]:
    """Return a model of 3 key-value heads, 9 query heads and 7 experts, and a CPU's outputs of it."""
    directory = tmp_path_factory.mktemp("odd")
    heads = dict(num_attention_heads=9, num_key_value_heads=3, head_dim=16, num_experts=7)
    small_model("qwen3_moe", 4, directory, seed=11, vocab_size=257, max_position_embeddings=256, **heads)
    byte_tokenizer(directory)
    return directory, greedy_of(directory, "cpu")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_greedy_tokens_equal_a_cpus(model: tuple[Path, list[tuple[int, ...]]], layout: str) -> None:
    directory, wanted = model
    assert len(set(wanted)) > 4, "outputs that are alike would show little"
    assert greedy_of(directory, "cuda", page_size=4, **LAYOUTS[layout]) == wanted
