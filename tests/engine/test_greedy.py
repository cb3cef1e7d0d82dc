"""Families through the engine: chunked prompts, shared prefixes and many sequences at once give transformers' tokens.

Qwen2-MoE is that of most tests here; families whose layers differ have their own.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support import small_model

from engine.conftest import byte_tokenizer, greedy_outputs
from engine.test_engine import GREEDY, LAYOUTS, config, prompts
from weft.engine.engine import Engine

pytestmark = pytest.mark.usefixtures("planned_once")


@pytest.mark.parametrize(
    "family, layouts",
    [
        ("deepseek_v2", ("1x1", "2x2", "1x4")),  # a latent cache
        ("deepseek_v3", ("2x2",)),
        ("qwen3_moe", ("2x2",)),
        ("qwen3", ("1x4",)),
        ("llama", ("1x4",)),
        ("qwen2", ("2x2",)),
        ("mistral", ("1x4",)),  # a window in every layer
        ("mixtral", ("2x2",)),
        ("minimax_m2", ("1x4",)),  # norms over the heads of all ranks
    ],
)
def test_greedy_tokens_are_transformers(family: str, layouts: tuple[str, ...], tmp_path: Path) -> None:
    model = small_model(family, 4, tmp_path, seed=3, vocab_size=257, max_position_embeddings=256)
    byte_tokenizer(tmp_path)
    wanted = greedy_outputs(lambda tokens: model(tokens[None]).logits[0, -1], prompts(), GREEDY.max_tokens)
    assert len(set(wanted)) > 4, "outputs that are alike would show little"
    for layout in layouts:
        with Engine(config(tmp_path, **LAYOUTS[layout])) as engine:
            first = [result.token_ids for result in engine.generate(prompts(), GREEDY)]
            again = engine.generate(prompts(), GREEDY)
        assert first == wanted, layout
        assert [result.token_ids for result in again] == wanted, f"{layout}, from the prefix cache"
        assert any(result.cached_tokens for result in again)
