"""Families whose layers differ, through the engine: greedy tokens are transformers', come what may."""

from __future__ import annotations

import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.conftest import WAIT_S, byte_tokenizer, generate_together, greedy_outputs
from engine.test_engine import GREEDY, LAYOUTS, config, prompts
from models.oss import small_gpt_oss
from models.qwen35 import small_qwen35
from models.stepfun import small_step
from weft.engine.controller.engine import Engine

pytestmark = pytest.mark.usefixtures("planned_once")
Oracle = Callable[[torch.Tensor], torch.Tensor]
SIZES = dict(vocab_size=257, max_position_embeddings=256)
FAMILIES: dict[str, Callable[[Path], Oracle]] = {
    "step3p5": lambda directory: small_step(directory, seed=3, **SIZES),
    "gpt_oss": lambda directory: small_gpt_oss(directory, seed=3, **SIZES),
    "qwen3_5_moe": lambda directory: small_qwen35(directory, seed=3, **SIZES),
}


@pytest.fixture(scope="module", params=FAMILIES)
def served(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[int, ...]]]:
    """A model, and transformers' greedy outputs."""
    directory = tmp_path_factory.mktemp(request.param)
    oracle = FAMILIES[request.param](directory)
    byte_tokenizer(directory)
    outputs = greedy_outputs(lambda tokens: torch.stack([*map(oracle, tokens)]), prompts(), GREEDY.max_tokens)
    assert len({t for a in outputs for t in a}) > 20, "outputs that hardly differ would show little"
    return directory, outputs


def test_greedy_tokens_are_transformers(served: tuple[Path, list[tuple[int, ...]]]) -> None:
    """Prompts are cut into chunks; the second time they start from a cached prefix."""
    directory, wanted = served
    with Engine(config(directory, **LAYOUTS["1x4"])) as engine:
        cold, warm = engine.generate(prompts(), GREEDY), engine.generate(prompts(), GREEDY)
        assert [r.token_ids for r in cold] == [r.token_ids for r in warm] == wanted
        assert sum(r.cached_tokens for r in warm) > sum(r.cached_tokens for r in cold)
        engine.check_idle()


def test_requests_that_are_preempted_say_the_same(served: tuple[Path, list[tuple[int, ...]]]) -> None:
    """Requests cancelled before them, at their first token, leave nothing behind."""
    directory, wanted = served
    with Engine(config(directory, kv_tokens=64, max_batch_tokens=8, attn_dp=2, attn_tp=2, ep=4, moe_tp=1)) as engine:
        seen: queue.SimpleQueue[int] = queue.SimpleQueue()
        ids = [engine.submit(prompt, GREEDY, lambda _, at=at: seen.put(at)) for at, prompt in enumerate(prompts()[:2])]
        left = {0, 1}
        while left:
            at = seen.get(timeout=WAIT_S)
            engine.cancel(ids[at])
            left.discard(at)
        assert [r.token_ids for r in generate_together(engine, prompts(), GREEDY)] == wanted
        assert engine.stats().preemptions > 0
        engine.check_idle()
