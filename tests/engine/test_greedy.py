"""Families through the engine: chunked prompts, shared prefixes and many sequences at once give transformers' tokens.

Qwen2-MoE is that of most tests here; families whose layers differ have their own.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGMLQuantizationType
from support import small_model

from engine.conftest import byte_tokenizer, greedy_outputs
from engine.test_engine import GREEDY, LAYOUTS, config, prompts
from models.gguf_files import byte_tokens, small_gguf
from weft.engine.config.config import EngineConfig
from weft.engine.controller.engine import Engine
from weft.engine.hosts.digests import facts

pytestmark = pytest.mark.usefixtures("planned_once")
AT_NIGHT = [("deepseek_v2", "1x1"), ("deepseek_v2", "2x2"), ("deepseek_v3", "2x2"), ("qwen3", "1x4"), ("llama", "1x4")]
AT_NIGHT += [("qwen2", "2x2"), ("mixtral", "2x2")]
"""Families whose layers are to the engine as another's, and more layouts. Logits of each are compared by day."""


@pytest.mark.parametrize(
    "family, layout",
    [
        ("deepseek_v2", "1x4"),  # a latent cache
        ("qwen3_moe", "2x2"),
        ("mistral", "1x4"),  # a window in every layer
        ("minimax_m2", "1x4"),  # norms over the heads of all ranks
        *(pytest.param(family, layout, marks=pytest.mark.nightly) for family, layout in AT_NIGHT),
    ],
)
def test_greedy_tokens_are_transformers(family: str, layout: str, tmp_path: Path) -> None:
    model = small_model(family, 4, tmp_path, seed=3, vocab_size=257, max_position_embeddings=256)
    byte_tokenizer(tmp_path)
    wanted = greedy_outputs(lambda tokens: model(tokens).logits, prompts(), GREEDY.max_tokens)
    assert len(set(wanted)) > 4, "outputs that are alike would show little"
    with Engine(config(tmp_path, **LAYOUTS[layout])) as engine:
        first = [result.token_ids for result in engine.generate(prompts(), GREEDY)]
        again = engine.generate(prompts(), GREEDY)
    assert first == wanted
    assert [result.token_ids for result in again] == wanted, "from the prefix cache"
    assert any(result.cached_tokens for result in again)


UNEVEN = {
    "1x3": dict(attn_tp=3, ep=3, moe_exchange="dispatch"),
    "3x1": dict(attn_dp=3, moe_tp=3),
    "1x5": dict(attn_tp=5, ep=5),
    "2x3": dict(attn_dp=2, attn_tp=3, ep=3, moe_tp=2),
    "1x6": dict(attn_tp=6, ep=2, moe_tp=3),
    "1x7": dict(attn_tp=7, split_vocabulary="on"),
}
"""Layouts over which 8 heads, 8 experts and 257 tokens do not divide."""


@pytest.fixture(scope="module")
def eight_heads(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[int, ...]]]:
    """Return a model, and transformers' outputs of it."""
    directory = tmp_path_factory.mktemp("eight_heads")
    model = small_model("qwen2_moe", 4, directory, seed=3, vocab_size=257, max_position_embeddings=256)
    byte_tokenizer(directory)
    return directory, greedy_outputs(lambda tokens: model(tokens).logits, prompts(9), GREEDY.max_tokens)


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.nightly] * (name in ("1x5", "1x6"))) for name in UNEVEN]
)
def test_greedy_tokens_of_uneven_layouts(eight_heads: tuple[Path, list[tuple[int, ...]]], layout: str) -> None:
    """Compare tokens while prompts are preempted, and with prefixes that are used again."""
    directory, wanted = eight_heads
    with Engine(config(directory, kv_tokens=72, **UNEVEN[layout])) as engine:
        first = [result.token_ids for result in engine.generate(prompts(9), GREEDY)]
        assert engine.stats().preemptions > 0
        again = engine.generate(prompts(9), GREEDY)
        engine.check_idle()
    assert first == wanted
    assert [result.token_ids for result in again] == wanted
    assert any(result.cached_tokens for result in again)


def test_a_gguf_file_is_a_model_of_its_own(tmp_path: Path) -> None:
    """Its config, its weights and its tokenizer; other files of its folder are ignored."""
    tokens = byte_tokens(300)
    changes = dict(seed=3, vocab_size=300, max_position_embeddings=256)
    file, model = small_gguf("llama", tmp_path / "other", GGMLQuantizationType.Q8_0, tokens, **changes)
    for other in ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"):
        (tmp_path / other).write_text("{}")
    wanted = greedy_outputs(lambda tokens: model(tokens).logits, prompts(), GREEDY.max_tokens)
    with Engine(config(file, **LAYOUTS["1x4"])) as engine:
        found = [result.token_ids for result in engine.generate(prompts(), GREEDY)]
        processor, tokenizer = engine.text_processor, engine.tokenizer
    assert found == wanted and len(set(wanted)) > 4
    assert processor.ends == {0} and tokenizer.eos_token == tokens[0]
    # Digits are apart before spaces are: else one of the two would go to the digit.
    text = "ab  1<|end|>"
    assert [tokens[token] for token in tokenizer.encode(text)] == ["ab", "ĠĠ", "1", "<|end|>"]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "user: hi<|end|>assistant:"
    assert {"config.json", "weights"} < facts(EngineConfig(model=file)).keys()
