"""Caches in FP8 through the engine: the embedded model solves its word problems as without, alike on every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import small_model

from engine.conftest import byte_tokenizer
from engine.test_engine import config, prompts
from engine.test_hybrids import FAMILIES
from weft.engine.config.config import EngineConfig
from weft.engine.controller.engine import Engine
from weft.engine.messages.request import SamplingParams
from weft_bench import word_problems

pytestmark = pytest.mark.usefixtures("planned_once")
GREEDY = SamplingParams(max_tokens=90, temperature=0.0)
PROBLEMS = word_problems.generate("heldout", 4, seed=11)
LAYOUTS: dict[str, dict[str, Any]] = {
    "2x2": dict(attn_dp=2, attn_tp=2, ep=2, moe_tp=2),
    "dcp": dict(attn_tp=8, ep=2, moe_tp=4, dcp=2, dcp_interleave=4, dcp_prefill="gather"),
    "dcp merge": dict(attn_tp=8, ep=2, moe_tp=4, dcp=2, dcp_prefill="merge"),
}


def solutions(**options: Any) -> list[str]:
    """Outputs of the problems, each twice: the second time a prefix is reused. Prompts are read in chunks."""
    made = EngineConfig(executor="thread", kv_tokens=2048, max_batch_tokens=48, max_running=8, **options)
    with Engine(made) as engine:
        chats = [word_problems.prompt(p.question) for p in PROBLEMS]
        encode = engine.text_processor.tokenizer.apply_chat_template
        tokens = [encode(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
        first, again = (engine.generate(tokens, GREEDY) for _ in range(2))
        assert [r.token_ids for r in first] == [r.token_ids for r in again]
        assert all(r.cached_tokens for r in again)
        engine.check_idle()
    return [r.text for r in first]


@pytest.fixture(scope="module")
def alone() -> list[str]:
    return solutions(kv_dtype="fp8_e4m3")


def test_word_problems_are_solved_as_with_an_unrounded_cache(alone: list[str]) -> None:
    right = [
        [word_problems.extract(text) == p.answer for text, p in zip(texts, PROBLEMS, strict=True)]
        for texts in (alone, solutions())
    ]
    assert right[0] == right[1] and any(right[0])


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.nightly] * (name != "2x2")) for name in LAYOUTS]
)
def test_the_same_tokens_on_every_layout(layout: str, alone: list[str]) -> None:
    assert solutions(kv_dtype="fp8_e4m3", **LAYOUTS[layout]) == alone


@pytest.mark.parametrize("family", ["deepseek_v2", "gpt_oss", pytest.param("qwen3_5_moe", marks=pytest.mark.nightly)])
def test_latents_windows_and_states(family: str, tmp_path: Path) -> None:
    """Also with sinks, and with states, which stay float32. Models of random weights have hardly a favourite among
    tokens, so rounding changes some; ranks that share tokens round alike.
    """
    if family in FAMILIES:
        FAMILIES[family](tmp_path)
    else:
        small_model(family, 4, tmp_path, seed=3, vocab_size=257, max_position_embeddings=256)
    byte_tokenizer(tmp_path)
    greedy, found = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True), []
    sharded = dict(attn_tp=4, ep=4, dcp=2, dcp_interleave=2, kv_dtype="fp8_e4m3")
    for options in ({}, dict(kv_dtype="fp8_e4m3"), sharded):
        with Engine(config(tmp_path, **options)) as engine:
            found.append([r.token_ids for r in engine.generate(prompts(), greedy)])
    plain, rounded, of_shards = found
    same = [sum(a == b for a, b in zip(rounded, others, strict=True)) for others in (plain, of_shards)]
    begun = sum(a[0] == b[0] for a, b in zip(plain, rounded, strict=True))
    assert same[0] < len(plain), "it is in FP8"
    assert begun >= len(plain) - 2 and same[1] >= len(plain) - 1
