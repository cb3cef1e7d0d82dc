"""Greedy tokens with tokens sharded over ranks equal dcp 1's, over the product of what can be chosen.

A run of a configuration has everything in it at once: prompts of a few tokens and of more than a page, read in chunks
next to answers, sequences whose answers begin another page when there is none, so that one is preempted, and prefixes
that are reused to the token. Ranks are threads, on the reference transport.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support import small_model

from engine.conftest import byte_tokenizer, generate_together
from weft.engine.assets import embedded_model_dir
from weft.engine.config.config import EngineConfig
from weft.engine.controller.engine import Engine
from weft.engine.messages.request import SamplingParams

pytestmark = pytest.mark.usefixtures("planned_once")
PAGE = 32
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
BRIEF = replace(GREEDY, max_tokens=2)
DCP, EXCHANGE, INTERLEAVE, ATTN_DP = (2, 4), ("ag_rs", "a2a", "fused"), (1, 16, PAGE), (1, 2)
PREFILL, QUERY = ("auto", "gather", "merge"), ("gather", "replicate")


def latent_cases() -> Iterator[dict[str, Any]]:
    """Every three choices of the first four meet: half of the product."""
    for dcp, exchange, interleave in itertools.product(range(2), range(3), range(3)):
        chosen = dict(dcp=DCP[dcp], dcp_exchange=EXCHANGE[exchange], dcp_interleave=INTERLEAVE[interleave])
        attn_dp, prefill = ATTN_DP[(dcp + exchange + interleave) % 2], PREFILL[(exchange + interleave) % 3]
        chosen |= dict(attn_dp=attn_dp, dcp_prefill=prefill, dcp_query=QUERY[(exchange + 3 * interleave) // 2 % 2])
        yield chosen | dict(attn_tp=DCP[dcp], ep=attn_dp * DCP[dcp])


def embedded_cases() -> Iterator[dict[str, Any]]:
    """Every two choices meet. Two ranks hold each of the four key-value heads, so that dcp is 2."""
    for at, (exchange, interleave) in enumerate(itertools.product(range(3), range(3))):
        chosen = dict(dcp=2, dcp_exchange=EXCHANGE[exchange], dcp_interleave=INTERLEAVE[interleave])
        attn_dp = ATTN_DP[at in (2, 3, 7)]
        chosen |= dict(
            attn_dp=attn_dp,
            dcp_prefill=PREFILL[(exchange + interleave) % 3],
            dcp_query=QUERY[(exchange + 3 * interleave) // 2 % 2],
        )
        yield chosen | dict(attn_tp=8, ep=2 * attn_dp, moe_tp=4)


def met(cases: list[dict[str, Any]], names: tuple[str, ...]) -> set[tuple[Any, ...]]:
    """Return the combinations of these names' choices that occur."""
    return {tuple(case[name] for name in names) for case in cases}


def prompts(span: int, vocabulary: int) -> list[list[int]]:
    """span: tokens that a page stands for. The answer to the first needs another page when the others have the rest."""
    draw = random.Random(span)
    return [[draw.randrange(3, vocabulary) for _ in range(n)] for n in (span - 2, 17, span - 3, 3, span + 9)]


@dataclass(frozen=True)
class Outputs:
    """tokens: of each prompt, of the last once more, and of one that begins like it. cached: what of these two was
    found in the cache. preemptions: how often there was no page.
    """

    tokens: list[tuple[int, ...]]
    cached: list[int]
    preemptions: int


def output(model: Path, span: int, **layout: Any) -> Outputs:
    sizes = dict(page_size=PAGE, max_batch_tokens=56, max_running=6, num_layers=1)
    with Engine(EngineConfig(model=model, executor="thread", **sizes, **layout)) as engine:
        asked = prompts(span, engine.model_config.vocab_size)
        found = generate_together(engine, asked, GREEDY)
        preemptions = engine.stats().preemptions
        again = [engine.generate([prompt], BRIEF)[0] for prompt in (asked[-1], [*asked[-1][:-4], 7])]
        engine.check_idle()
    return Outputs([r.token_ids for r in found + again], [r.cached_tokens for r in again], preemptions)


@cache
def alone(model: Path, span: int) -> Outputs:
    """Return the outputs of one rank with room for everything."""
    return output(model, span, kv_tokens=32 * PAGE)


def check(model: Path, layout: dict[str, Any]) -> None:
    span, pages = PAGE * layout["dcp"], 3 if layout["attn_dp"] == 1 else 2
    sharded, expected = output(model, span, kv_tokens=pages * PAGE, **layout), alone(model, span)
    assert sharded.tokens == expected.tokens
    assert sharded.cached == expected.cached == [span + 8, span + 5], "to the token"
    assert sharded.preemptions > expected.preemptions == 0


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("latent")
    changes = dict(vocab_size=257, max_position_embeddings=512, first_k_dense_replace=0)
    small_model("deepseek_v2", 4, directory, seed=3, num_hidden_layers=1, **changes)
    byte_tokenizer(directory)
    return directory


LATENT, EMBEDDED = list(latent_cases()), list(embedded_cases())
BY_DAY = [LATENT[at] for at in (0, 1, 2, 5, 8, 11, 12, 13, 15, 16)]
BY_DAY += [each for each in EMBEDDED if each["attn_dp"] == 1 and each["dcp_interleave"] == 32]
"""Latent cases, as few as every two choices meet in, and the embedded model's of one group with whole pages."""


def all_at_night(cases: list[dict[str, Any]]) -> pytest.MarkDecorator:
    marked = [pytest.param(each, marks=[pytest.mark.nightly] * (each not in BY_DAY)) for each in cases]
    return pytest.mark.parametrize("layout", marked, ids=str)


def test_choices_meet() -> None:
    choices = dict(dcp=DCP, dcp_exchange=EXCHANGE, dcp_interleave=INTERLEAVE, attn_dp=ATTN_DP)
    for three in itertools.combinations(choices, 3):
        assert met(LATENT, three) == set(itertools.product(*(choices[name] for name in three))), three
    choices |= dict(dcp_prefill=PREFILL, dcp_query=QUERY)
    for two in itertools.combinations(choices, 2):
        wanted = set(itertools.product(*(choices[name] for name in two)))
        assert met(LATENT, two) == met([each for each in LATENT if each in BY_DAY], two) == wanted, two
        assert "dcp" in two or met(EMBEDDED, two) == wanted, two


@all_at_night(LATENT)
def test_a_latent_cache(latent: Path, layout: dict[str, Any]) -> None:
    check(latent, layout)


@all_at_night(EMBEDDED)
def test_the_embedded_model(layout: dict[str, Any]) -> None:
    """The first of its layers: `dcp.test_engine` has all."""
    check(embedded_model_dir(), layout)
