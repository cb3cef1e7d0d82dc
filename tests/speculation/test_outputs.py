"""Outputs with drafts are those without: by parameter, layout, family, and rate of right drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support import small_model

from engine.conftest import byte_tokenizer, generate_together
from engine.test_engine import config, prompts
from engine.test_hybrids import FAMILIES as OTHERS
from speculation.draft_layers import add_draft_layer
from speculation.exact import fit, probabilities
from speculation.toy import Toy, recorded
from weft.engine.controller.engine import Engine
from weft.engine.grammar.grammar import grammar
from weft.engine.kv.cache_events import CacheEvents
from weft.engine.kv.cache_spec import Rule
from weft.engine.kv.tokens import token_bytes
from weft.engine.messages.rank_messages import Adjust, GroupRows, Join, Sampling, Step
from weft.engine.messages.request import Output, SamplingParams
from weft.engine.scheduler.scheduler import make_schedulers
from weft.engine.speculation.sources import SOURCES, DraftSource, NgramSource
from weft.engine.worker.row_table import RowTable
from weft.engine.worker.sampler import Sampler
from weft.engine.worker.worker import Worker

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
) -> tuple[list[list[Output]], Engine]:
    """Return the outputs of two rounds, the second one from the prefix cache, and the engine."""
    values = dict(speculative="ngram" if drafts else "off", seed=3, max_running=len(how), max_batch_tokens=40) | changes
    with Engine(config(model, **values)) as engine:
        rounds = [generate_together(engine, PROMPTS[: len(how)], how) for _ in range(2)]
        engine.check_idle()
    return rounds, engine


@cache
def without_drafts(model: Path) -> list[Output]:
    """Return the outputs of one rank without drafts."""
    return results(model, drafts=False)[0][0]


def same(found: Sequence[Output], wanted: Sequence[Output]) -> None:
    for prompt, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert one.token_ids == other.token_ids, prompt
        assert (one.text, one.finish_reason, one.error) == (other.text, other.finish_reason, other.error), prompt
        assert len(one.logprobs) == len(other.logprobs)
        for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
            assert mine.token_id == theirs.token_id and abs(mine.logprob - theirs.logprob) < 1e-3  # type: ignore[operator]
            assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]


@pytest.fixture(scope="module")
def plain(model_dir: Path) -> list[Output]:
    """Outputs without drafts, of one rank."""
    first = without_drafts(model_dir)
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
    model_dir: Path, plain: list[Output], monkeypatch: pytest.MonkeyPatch, layout: str, rate: float
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
    model_dir: Path, plain: list[Output], monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """Preempt in a cache that is too small, with sequences that pause, and with prompts in small chunks."""
    Toy(recorded(PROMPTS, plain), 0.6).use(monkeypatch)
    changes = LAYOUTS[layout] | dict(kv_tokens=96 if layout == "1x1" else 64, max_batch_tokens=17)
    rounds, engine = results(model_dir, **changes)
    for found in rounds:
        same(found, plain)
    assert engine.stats().preemptions and engine.speculation and sum(engine.speculation.accepted)


@pytest.mark.parametrize(
    "layout", ["1x2", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("2x2", "dcp 2", "two hosts"))]
)
def test_ranks_in_processes(model_dir: Path, plain: list[Output], monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """Exchange rows of drafts by shm, in memory for the largest step; across hosts by gloo."""
    Toy(recorded(PROMPTS, plain), 0.7).use(monkeypatch)
    changes = dict(executor="process", transport="shm", max_batch_tokens=64, speculative_tokens=5)
    changes |= LAYOUTS["2x2"] | dict(nnodes=2, transport="auto") if layout == "two hosts" else LAYOUTS[layout]
    rounds, engine = results(model_dir, **changes)
    for found in rounds:
        same(found, plain)
    assert not engine.eager and engine.speculation and sum(engine.speculation.accepted)


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
BY_DAY = [
    ("mistral", "2x1", "auto", [0.7]),
    ("deepseek_v2", "dcp 2", "fp8_e4m3", [0.7]),
    ("gpt_oss", "1x2", "auto", [0.3]),
    ("step3p5", "1x1", "auto", [1.0]),
]
WITH_DRAFT_LAYERS = ("qwen3_moe", "deepseek_v2", "deepseek_v3")
ALL = product([*FAMILIES, "gpt_oss", "step3p5"], LAYOUTS, ["auto", "fp8_e4m3"], [RATES])


@pytest.mark.usefixtures("never_pausing")
@pytest.mark.parametrize(
    ("family", "layout", "kv_dtype", "rates"),
    [*BY_DAY, *(pytest.param(*each, marks=pytest.mark.nightly) for each in ALL)],
)
def test_every_family(
    family: str,
    layout: str,
    kv_dtype: str,
    rates: Sequence[float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if family in OTHERS:
        OTHERS[family](tmp_path)
    else:
        small_model(family, 4, tmp_path, seed=3, vocab_size=257, max_position_embeddings=256)
    byte_tokenizer(tmp_path)
    how = [GREEDY, SEEDED, replace(SEEDED, top_p=0.9, seed=2), replace(GREEDY, max_tokens=30), GREEDY]
    changes = LAYOUTS[layout] | dict(kv_dtype=kv_dtype)
    (plain, _), _ = results(tmp_path, how, drafts=False, **changes)
    sources: list[DraftSource] = [Toy(recorded(PROMPTS[: len(how)], plain), rate) for rate in rates]
    preemptions, drafts_on_ranks = 0, len(rates) > 1 and family in WITH_DRAFT_LAYERS and layout != "ep 2"
    for source in [*sources, NgramSource(1, 3)][: 1 if len(rates) == 1 else None]:
        monkeypatch.setitem(SOURCES, "ngram", lambda *lengths, source=source: source)
        rounds, engine = results(tmp_path, how, **changes)
        for found in rounds:
            same(found, plain)
        speculation = engine.speculation
        assert speculation
        if isinstance(source, Toy):
            assert (sum(speculation.accepted) > 0) == (source.chance > 0)
        # Later sources run in a cache that is too small for all sequences.
        changes |= dict(kv_tokens=64, max_batch_tokens=17)
        preemptions += engine.stats().preemptions
    assert preemptions or len(rates) == 1 or family == "mistral"  # its windows free most pages
    if drafts_on_ranks:
        add_draft_layer(tmp_path)
        rounds, engine = results(tmp_path, how, **changes | dict(speculative="mtp"))
        for found in rounds:
            same(found, plain)
        assert engine.speculation and sum(engine.speculation.drafted) and engine.stats().preemptions


@pytest.mark.usefixtures("never_pausing")
def test_counts_of_accepted_drafts_are_those_of_one_rank(
    model_dir: Path, plain: list[Output], monkeypatch: pytest.MonkeyPatch
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


@pytest.mark.usefixtures("never_pausing")
def test_a_rank_that_is_lost_in_the_middle_of_drafts(
    model_dir: Path, plain: list[Output], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences go on from their accepted tokens."""
    Toy(recorded(PROMPTS, plain), 0.7).use(monkeypatch)
    step, lost = Worker.step, list[int]()

    def failing(worker: Worker, message: Step) -> Any:
        if worker.rank == 1 and message.groups[0].drafts and len(lost) < 2 and message.number % 7 == 0:
            lost.append(message.number)
            raise RuntimeError("a planted fault")
        return step(worker, message)

    monkeypatch.setattr(Worker, "step", failing)
    rounds, engine = results(model_dir, restart_backoff_s=0.0, **LAYOUTS["1x2"])
    for found in rounds:
        same(found, plain)
    assert len(lost) == 2 and engine.stats().failures == 2


def test_events_of_the_cache_hold_accepted_tokens_alone(
    model_dir: Path, plain: list[Output], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages that are published have tokens of prompts and outputs."""
    Toy(recorded(PROMPTS, plain), 0.5).use(monkeypatch)
    stored = list[tuple[Any, list[int], int]]()

    def note(events: CacheEvents, group: int, rule: Any, block: int, parent: Any, tokens: Any, salt: str) -> None:
        stored.append((parent, list(tokens), block))

    monkeypatch.setattr(CacheEvents, "stored", note)
    events = CacheEvents()
    monkeypatch.setattr(
        "weft.engine.controller.engine.make_schedulers",
        lambda config, groups, _, drafts: make_schedulers(config, groups, [events], drafts),
    )
    rounds, engine = results(model_dir)
    same(rounds[0], plain)
    texts, found = {block: tokens for _, tokens, block in stored}, 0
    parents = {block: parent for parent, _, block in stored}
    sequences = recorded(PROMPTS, plain)
    for block in texts:
        tokens, at = list[int](), block
        while at is not None and at in texts:
            tokens, at = texts[at] + tokens, parents[at]
        assert any(sequence[: len(tokens)] == tokens for sequence in sequences)
        found += 1
    assert found > 40 and engine.speculation and sum(engine.speculation.accepted)


SHAPINGS: list[dict[str, float]] = [
    dict(temperature=0.6),
    dict(top_k=4),
    dict(top_p=0.7),
    dict(min_p=0.2),
    dict(frequency_penalty=1.5),
    dict(logit_bias=2.0),
    dict(temperature=1.7, top_k=9, top_p=0.85, min_p=0.1, frequency_penalty=0.7, logit_bias=-1.5),
]


@pytest.mark.parametrize("rounds", [6, pytest.param(200, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("how", [dict(), *SHAPINGS], ids=str)
def test_sampled_tokens_have_the_distribution_of_one_token_a_step(how: dict[str, float], rounds: int) -> None:
    """10⁵ samples by rows with drafts, accepted or not: chi-square against the exact distribution of each position."""
    vocabulary, how = 12, dict(how)
    logits = torch.randn(3, vocabulary, generator=torch.Generator().manual_seed(1))
    drafts = logits[:2].argmax(-1).tolist()  # which no shaping excludes
    biased = drafts[1]
    penalty, bias = how.pop("frequency_penalty", 0), how.pop("logit_bias", 0)
    rows = 500
    table = RowTable(rows, [Rule()], 4, torch.device("cpu"))
    sampler, counts = Sampler(table), torch.zeros(3, vocabulary, dtype=torch.int64)
    added = [[(biased, bias)] * bool(bias) + [(d, -penalty) for d in drafts[:at] if penalty] for at in range(3)]
    adjust = [(at, Adjust(added=tuple(each))) for at, each in enumerate(added) if each]
    step = GroupRows(
        tuple(range(rows)),
        decode_tokens=(3,) * rows,
        drafts=token_bytes(drafts * rows),
        adjust=tuple((3 * row + at, how_at) for row in range(rows) for at, how_at in adjust),
    )
    for first in range(0, rows * rounds, rows):
        seeds = (Sampling(seed=first + row, **how) for row in range(rows))
        table.apply(GroupRows(joins=tuple(Join(row, row, 5, ((0,),), seeded) for row, seeded in enumerate(seeds))))
        table.last_token.fill_(1)
        table.advance(step)
        tokens = sampler.sample(step, logits.repeat(rows, 1))
        for row, count in enumerate(table.accept(step, tokens).counts):
            for at, token in enumerate(tokens[3 * row : 3 * row + count].tolist()):
                counts[at, token] += 1
    before = 1.0
    for at in range(3):
        own = logits[at].clone()
        own[drafts[:at]] -= penalty
        own[biased] += bias
        p, total = probabilities(own, **how), counts[at].sum().item()
        found = fit(counts[at], p)
        assert found.chance > 1e-6, (at, found)
        error = abs(total / (rows * rounds) - before)
        assert error < 3 / (rows * rounds) ** 0.5, "a draft is accepted with its probability"
        before *= p[drafts[at]].item() if at < 2 else 1.0
