"""DeepSeek-V2 through the engine: chunked prompts, shared prefixes and many sequences at once, over a latent cache."""

from __future__ import annotations

from pathlib import Path

from support import small_model

from engine.conftest import byte_tokenizer, greedy_answers
from engine.test_engine import GREEDY, LAYOUTS, config, prompts
from weft.engine.engine import Engine


def test_greedy_tokens_are_transformers(tmp_path: Path) -> None:
    model = small_model("deepseek_v2", 4, tmp_path, seed=3, vocab_size=257, max_position_embeddings=256)
    byte_tokenizer(tmp_path)
    wanted = greedy_answers(lambda tokens: model(tokens[None]).logits[0, -1], prompts(), GREEDY.max_tokens)
    for layout in ("1x1", "2x2", "1x4"):
        with Engine(config(tmp_path, **LAYOUTS[layout])) as engine:
            first = [result.token_ids for result in engine.generate(prompts(), GREEDY)]
            again = engine.generate(prompts(), GREEDY)
        assert first == wanted, layout
        assert [result.token_ids for result in again] == wanted, f"{layout}, from the prefix cache"
        assert any(result.cached_tokens for result in again)
