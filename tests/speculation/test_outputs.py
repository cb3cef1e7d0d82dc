"""Outputs with drafts are those without: by parameter, layout, family, and rate of right drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from support import small_model

from engine.conftest import byte_tokenizer, generate_together
from engine.test_engine import config, prompts
from engine.test_hybrids import FAMILIES as OTHERS
from speculation.toy import Toy, recorded
from weft.engine.controller.engine import Engine
from weft.engine.grammar.grammar import grammar
from weft.engine.messages.request import SamplingParams
from weft.engine.output.results import GenerationResult

pytestmark = pytest.mark.usefixtures("planned_once")
LAYOUTS: dict[str, dict[str, Any]] = {
    "1x1": dict(),
    "2x1": dict(attn_dp=2, ep=2),
    "1x2": dict(attn_tp=2, moe_tp=2),
    "2x2": dict(attn_dp=2, attn_tp=2, ep=2, moe_tp=2),
    "dcp 2": dict(attn_tp=4, moe_tp=4, dcp=2, dcp_interleave=2),
    "ep 2": dict(attn_tp=2, ep=2, split_vocabulary="on"),
    "dispatch": dict(attn_dp=2, ep=2, moe_exchange="dispatch"),
}
GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=1.5, seed=11)
HOW = [
    GREEDY,
    SEEDED,
    replace(SEEDED, top_k=7, logprobs=3),
    replace(SEEDED, top_p=0.8, seed=12),
    replace(SEEDED, min_p=0.05, seed=2**61 + 5),
    replace(SEEDED, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.2, logprobs=0),
    replace(GREEDY, repetition_penalty=1.3, frequency_penalty=1.0),
    replace(SEEDED, logit_bias=((70, 3.0), (71, 3.0)), seed=6),
    replace(SEEDED, temperature=0.4, bad_words=((248,), (75, 248), (19, 122)), seed=4),
    replace(SEEDED, ignore_eos=False, min_tokens=6, stop_token_ids=tuple(range(0, 257, 4)), seed=5),
    replace(SEEDED, grammar=grammar("regex", "([a-e]{2,3}[0-9]){3,9}"), logprobs=1),
    replace(SEEDED, stop=("b", "5"), seed=8),
    replace(SEEDED, allowed_token_ids=tuple(range(60, 90)), max_tokens=9),
    replace(SEEDED, prompt_logprobs=0, max_tokens=5, seed=9),
    replace(SEEDED, max_tokens=1),
    SEEDED,
]
"""Parameters of each prompt."""
PROMPTS = prompts(len(HOW))
RATES = (0.0, 0.3, 0.7, 1.0)


def results(
    model: Path, how: Sequence[SamplingParams] = HOW, drafts: bool = True, **changes: Any
) -> tuple[list[list[GenerationResult]], Engine]:
    """Return the outputs of two rounds, the second one from the prefix cache, and the engine."""
    values = dict(speculative="ngram" if drafts else "off", seed=3, max_running=len(how), max_batch_tokens=40) | changes
    with Engine(config(model, **values)) as engine:
        rounds = [generate_together(engine, PROMPTS[: len(how)], how) for _ in range(2)]
        engine.check_idle()
    return rounds, engine


def same(found: Sequence[GenerationResult], wanted: Sequence[GenerationResult]) -> None:
    for prompt, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert one.token_ids == other.token_ids, prompt
        assert (one.text, one.finish_reason, one.error) == (other.text, other.finish_reason, other.error), prompt
        assert len(one.logprobs) == len(other.logprobs)
        for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
            assert mine.token_id == theirs.token_id and abs(mine.logprob - theirs.logprob) < 1e-3  # type: ignore[operator]
            assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]


@pytest.fixture(scope="module")
def plain(model_dir: Path) -> list[GenerationResult]:
    """Outputs without drafts, of one rank."""
    (first, _), _ = results(model_dir, HOW, drafts=False)
    assert len({tokens for r in first for tokens in r.token_ids}) > 60
    assert {r.finish_reason for r in first} == {"stop", "length"}
    return first


@pytest.mark.usefixtures("never_pausing")
@pytest.mark.parametrize(
    ("layout", "rate"),
    [("1x1", 1.0), ("1x1", 0.0), ("2x1", 0.3), ("1x2", 0.7), ("2x2", 0.7), ("dcp 2", 0.7), ("ep 2", 0.7)]
    + [pytest.param(layout, rate, marks=pytest.mark.nightly) for layout in LAYOUTS for rate in RATES],
)
def test_every_parameter(
    model_dir: Path, plain: list[GenerationResult], monkeypatch: pytest.MonkeyPatch, layout: str, rate: float
) -> None:
    toy = Toy(recorded(PROMPTS, plain), rate).use(monkeypatch)
    rounds, engine = results(model_dir, **LAYOUTS[layout])
    for found in rounds:
        same(found, plain)
    assert any(result.cached_tokens for result in rounds[1])
    speculation = engine.speculation
    assert speculation is not None and toy.calls > 50 and speculation.drafted[0] > 50
    right = sum(speculation.accepted) / sum(speculation.drafted)
    assert right == 0 if rate == 0 else right > 0.15 * rate


@pytest.mark.parametrize("layout", ["1x1", pytest.param("2x2", marks=pytest.mark.nightly)])
def test_sequences_that_are_preempted(
    model_dir: Path, plain: list[GenerationResult], monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """In a cache that is too small, with sequences that pause, and with prompts in small chunks."""
    Toy(recorded(PROMPTS, plain), 0.6).use(monkeypatch)
    changes = LAYOUTS[layout] | dict(kv_tokens=96 if layout == "1x1" else 64, max_batch_tokens=17)
    rounds, engine = results(model_dir, **changes)
    for found in rounds:
        same(found, plain)
    assert engine.stats().preemptions and engine.speculation and sum(engine.speculation.accepted)


def test_several_choices_and_priorities(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices of one prompt have other seeds, and tokens of their own."""
    how = [replace(SEEDED, seed=seed) for seed in range(4)]
    outputs = []
    for drafts in (False, True):
        with Engine(config(model_dir, speculative="ngram" if drafts else "off")) as engine:
            outputs.append([r.token_ids for r in generate_together(engine, [PROMPTS[1]] * 4, how)])
        Toy([[*PROMPTS[1], *tokens] for tokens in outputs[0]], 0.8).use(monkeypatch)
    assert outputs[0] == outputs[1] and len(set(outputs[0])) == 4
    assert engine.speculation and sum(engine.speculation.accepted)


FAMILIES = ["qwen3_moe", "qwen3", "deepseek_v2", "deepseek_v3", "llama", "qwen2", "mistral", "mixtral", "minimax_m2"]
"""Families with `small_model`: with latents, windows, and all other kinds of layers."""
BY_DAY = {("mistral", "2x1", 0.7), ("deepseek_v2", "dcp 2", 0.7), ("gpt_oss", "1x2", 0.3), ("step3p5", "1x1", 1.0)}


@pytest.mark.usefixtures("never_pausing")
@pytest.mark.parametrize(
    ("family", "layout", "rate"),
    [
        pytest.param(*each, marks=() if each in BY_DAY else pytest.mark.nightly)
        for each in product([*FAMILIES, "gpt_oss", "step3p5"], LAYOUTS, RATES)
    ],
)
@pytest.mark.parametrize("kv_dtype", ["auto", pytest.param("fp8_e4m3", marks=pytest.mark.nightly)])
def test_every_family(
    family: str, layout: str, rate: float, kv_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if family in OTHERS:
        OTHERS[family](tmp_path)
    else:
        few = dict(num_key_value_heads=1) if layout == "dcp 2" and "deepseek" not in family else {}
        small_model(family, 4, tmp_path, seed=3, vocab_size=257, max_position_embeddings=256, **few)
    byte_tokenizer(tmp_path)
    how = [GREEDY, SEEDED, replace(SEEDED, top_p=0.9, seed=2), replace(GREEDY, max_tokens=30), GREEDY]
    changes = LAYOUTS[layout] | dict(kv_dtype=kv_dtype)
    (plain, _), _ = results(tmp_path, how, drafts=False, **changes)
    Toy(recorded(PROMPTS[: len(how)], plain), rate).use(monkeypatch)
    rounds, engine = results(tmp_path, how, **changes)
    for found in rounds:
        same(found, plain)
    assert engine.speculation and (sum(engine.speculation.accepted) > 0) == (rate > 0)


@pytest.mark.usefixtures("never_pausing")
def test_counts_of_accepted_drafts_are_those_of_one_rank(
    model_dir: Path, plain: list[GenerationResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draft by draft. Groups without a sequence have no rows."""
    counts = []
    for layout in ("1x1", "2x1", "dcp 2", "ep 2"):
        Toy(recorded(PROMPTS, plain), 0.7).use(monkeypatch)
        with Engine(config(model_dir, speculative="ngram", prefix_cache=False, **LAYOUTS[layout])) as engine:
            for prompt, params in zip(PROMPTS[:3], HOW, strict=False):
                engine.generate([prompt], params)
            assert engine.speculation
            counts.append((engine.speculation.drafted, engine.speculation.accepted))
    assert all(each == counts[0] for each in counts) and sum(counts[0][1]) > 10


def test_prompt_lookup(model_dir: Path) -> None:
    """Prompts that repeat themselves, and greedy outputs that do."""
    how = [replace(GREEDY, max_tokens=60, logit_bias=((40, 9.0), (41, 9.0), (42, 9.0))) for _ in range(3)]
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12] * 3, PROMPTS[2], [40, 41, 42, 40, 41]]
    outputs = []
    for speculative in ("off", "ngram"):
        with Engine(config(model_dir, speculative=speculative, speculative_tokens=4)) as engine:
            outputs.append([r.token_ids for r in generate_together(engine, prompts, how)])
            steps = engine.stats().steps
    assert outputs[0] == outputs[1]
    assert engine.speculation and sum(engine.speculation.accepted) > 20 and steps < 60
