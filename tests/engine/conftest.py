"""A small random Qwen2-MoE with a real tokenizer, shared by the engine's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import small_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def byte_tokenizer(directory: Path) -> None:
    """A tokenizer with one token for each byte, so that characters and stop strings span tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<eos>": 0} | {c: i + 1 for i, c in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(directory)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("engine-model")
    small_model("qwen2_moe", 4, directory, seed=3, vocab_size=257, max_position_embeddings=256)
    byte_tokenizer(directory)
    return directory
