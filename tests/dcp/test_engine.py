"""The engine with tokens sharded over ranks: the same greedy tokens as without, whatever happens to the requests."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from support import small_model

from engine.conftest import byte_tokenizer, greedy_outputs, outputs_of_some
from engine.test_engine import GREEDY, prompts
from weft.engine.config.config import EngineConfig
from weft.engine.controller.engine import Engine
from weft.engine.messages.request import SamplingParams
from weft.planner.spec import LayoutError
from weft_bench import word_problems

pytestmark = pytest.mark.usefixtures("planned_once")

SHAPES = {
    "two heads": ("qwen2_moe", dict(num_key_value_heads=2)),
    "one head": ("qwen3", dict(num_key_value_heads=1)),
    "latent": ("deepseek_v2", {}),
}
MERGED, REPLICATED = dict(dcp_prefill="merge"), dict(dcp_query="replicate")
CASES = [
    ("two heads", "thread", dict(attn_tp=4, ep=2, moe_tp=2, dcp=2, dcp_exchange="ag_rs", **MERGED, **REPLICATED)),
    ("two heads", "thread", dict(attn_dp=2, attn_tp=4, ep=8, dcp=2, dcp_interleave=1, dcp_prefill="gather")),
    ("one head", "thread", dict(attn_tp=4, moe_tp=4, dcp=4, dcp_interleave=2, dcp_exchange="fused", **MERGED)),
    ("latent", "thread", dict(attn_tp=4, ep=4, dcp=4, dcp_exchange="a2a", **MERGED)),
    ("latent", "thread", dict(attn_dp=2, attn_tp=2, ep=2, moe_tp=2, dcp=2, dcp_interleave=1, **REPLICATED)),
    ("latent", "process", dict(attn_dp=1, attn_tp=2, ep=2, moe_tp=1, dcp=2, dcp_interleave=2)),
]


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Save a model of each shape, and return it with transformers' greedy outputs."""
    made: dict[str, tuple[Path, list[tuple[int, ...]]]] = {}

    def get(shape: str) -> tuple[Path, list[tuple[int, ...]]]:
        if shape not in made:
            family, changes = SHAPES[shape]
            directory = tmp_path_factory.mktemp("dcp")
            changes = dict(vocab_size=257, max_position_embeddings=256, num_hidden_layers=2) | changes
            model = small_model(family, 4, directory, seed=3, **changes)
            byte_tokenizer(directory)
            answers = greedy_outputs(lambda tokens: model(tokens).logits, prompts(), GREEDY.max_tokens)
            made[shape] = directory, answers
        return made[shape]

    return get


def config(model: Path, **changes: Any) -> EngineConfig:
    """A rank's cache is small: pages of four tokens, which dcp makes eight or sixteen. Prompts are read in chunks."""
    values = dict(model=model, executor="thread", kv_tokens=256, page_size=4, max_batch_tokens=16, max_running=8)
    return EngineConfig(**values | changes)


@pytest.mark.parametrize("shape, executor, layout", CASES, ids=str)
def test_greedy_tokens_are_transformers(shapes: Any, shape: str, executor: str, layout: dict[str, Any]) -> None:
    directory, expected = shapes(shape)
    with Engine(config(directory, executor=executor, **layout)) as engine:
        asked = prompts()[: 3 if executor == "process" else None]
        cold, warm = engine.generate(asked, GREEDY), engine.generate(asked, GREEDY)
        assert [r.token_ids for r in cold] == [r.token_ids for r in warm] == expected[: len(asked)]
        assert [r.cached_tokens for r in warm] == [len(prompt) - 1 for prompt in asked], "partial pages too"
        assert sum(r.cached_tokens for r in cold) < sum(r.cached_tokens for r in warm)
        steps, (ran, naive) = engine.stats().steps, engine.comm_report()
        queries, merges, every = (
            [sum(s.count for s in found if s.group == "dcp" and s.step.startswith(what)) for found in (ran, naive)]
            for what in ("queries", "outputs", "")
        )
        assert every[0] == every[1] and merges[0] == merges[1], "the naive plan exchanges the same, as often"
        replicates = layout.get("dcp_query") == "replicate"
        assert merges[0] > 0 and queries[0] == (0 if replicates else merges[0]), "gathered unless each rank makes all"
        if layout.get("dcp_prefill") == "merge":
            assert merges[0] == 2 * steps, "in each of two layers, whatever a step has"
        engine.check_idle()


@pytest.mark.parametrize("shape, layout", [("two heads", CASES[0][2]), ("latent", CASES[4][2])])
def test_pages_run_out_and_requests_are_cancelled(shapes: Any, shape: str, layout: dict[str, Any]) -> None:
    directory, expected = shapes(shape)
    draw = random.Random(1)
    with Engine(config(directory, **layout, kv_tokens=32, max_batch_tokens=8)) as engine:
        cancelled = {at: draw.randrange(6) for at in draw.sample(range(7), 2)}
        reasons, answers = outputs_of_some(engine, prompts(), GREEDY, cancelled)
        for at in range(7):
            assert reasons[at] == ("abort" if at in cancelled else "length")
            assert answers[at] == expected[at][: len(answers[at])]
        engine.check_idle()
        assert engine.stats().preemptions > 0


def test_a_group_holds_dcp_times_as_many_tokens(shapes: Any) -> None:
    """A request that the cache of one rank has no room for."""
    directory, _ = shapes("latent")
    layout = dict(attn_tp=2, moe_tp=2, kv_tokens=32)
    prompt = prompts()[1][:20] * 2
    with Engine(config(directory, **layout, dcp=2)) as engine:
        assert len(engine.generate([prompt], GREEDY)[0].token_ids) == 12
    with Engine(config(directory, **layout)) as engine, pytest.raises(ValueError, match="40 in the prompt"):
        engine.generate([prompt], GREEDY)


def test_ranks_that_hold_other_heads_are_refused(shapes: Any) -> None:
    directory, _ = shapes("two heads")
    with pytest.raises(LayoutError, match=r"dcp=4: .* 8 heads with 2 key-value .*attn_tp=4 .*nearest dcp is 2.*=8"):
        Engine(config(directory, attn_tp=4, moe_tp=4, dcp=4))
    with pytest.raises(ValueError, match=r"dcp_interleave is 3; it must divide a page of 4 tokens; .*: 2 and 4"):
        config(directory, attn_tp=4, moe_tp=4, dcp=2, dcp_interleave=3)


def test_the_embedded_model_gives_the_same_outputs() -> None:
    """Eight ranks, of which two hold each key-value head; pages of 16 tokens stand for 32."""
    asked = word_problems.generate("heldout", 2, seed=5)
    params = SamplingParams(max_tokens=24, temperature=0.0)
    found = []
    for layout in (dict(), dict(attn_tp=8, ep=2, moe_tp=4, dcp=2)):
        with Engine(EngineConfig(executor="thread", kv_tokens=1024, **layout)) as engine:
            prompts = [
                engine.tokenizer.apply_chat_template(
                    word_problems.prompt(p.question), add_generation_prompt=True, return_dict=False
                )
                for p in asked
            ]
            found.append([result.token_ids for result in engine.generate(prompts, params)])
    assert found[0] == found[1]
