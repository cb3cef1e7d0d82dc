"""Sequences that are sampled through drafts have the distribution of the model: chi-square of their first tokens."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support import small_model
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from engine.conftest import generate_together
from engine.test_engine import config
from speculation.exact import fit, probabilities
from weft.engine.controller.engine import Engine
from weft.engine.messages.request import SamplingParams
from weft.engine.speculation.sources import SOURCES

VOCABULARY, LENGTH = 6, 4
PROMPT = (1, 2)
Logits = dict[tuple[int, ...], Tensor]
"""The model's next logits by the tokens after the prompt."""
TOGETHER = 250
"""Sequences of a step."""
TEMPERATURE = SamplingParams(max_tokens=LENGTH, temperature=0.7, ignore_eos=True)
PLAIN = replace(TEMPERATURE, temperature=1.0)
HOW = {
    "temperature": TEMPERATURE,
    "top_k": replace(PLAIN, top_k=3),
    "top_p": replace(PLAIN, top_p=0.7),
    "min_p": replace(PLAIN, min_p=0.15),
    "presence_penalty": replace(PLAIN, presence_penalty=1.5),
    "frequency_penalty": replace(PLAIN, frequency_penalty=1.2),
    "repetition_penalty": replace(PLAIN, repetition_penalty=2.5),
    "logit_bias": replace(PLAIN, logit_bias=((2, 3.0), (3, -1.5))),
    "all": replace(
        PLAIN,
        temperature=1.6,
        top_k=5,
        top_p=0.9,
        min_p=0.1,
        presence_penalty=-0.5,
        frequency_penalty=1.0,
        repetition_penalty=1.3,
        logit_bias=((0, 2.0), (5, -1.0)),
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Logits]:
    """A model of six tokens, and its logits by transformers."""
    directory = tmp_path_factory.mktemp("model-of-six-tokens")
    saved = small_model("qwen3", 2, directory, seed=3, vocab_size=VOCABULARY, num_hidden_layers=1)
    tokenizer = Tokenizer(models.BPE({"abcdef"[token]: token for token in range(VOCABULARY)}, merges=[]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="a").save_pretrained(directory)
    logits: Logits = {}
    for length in range(LENGTH):
        each = list(product(range(VOCABULARY), repeat=length))
        with torch.no_grad():
            rows = saved(torch.tensor([PROMPT + tokens for tokens in each])).logits[:, -1]
        logits |= zip(each, rows, strict=True)
    return directory, logits


def conditionals(logits: Logits, how: SamplingParams) -> dict[tuple[int, ...], Tensor]:
    """Return the probabilities of the next token by the tokens after the prompt."""
    found = {}
    for tokens, row in logits.items():
        own, r = row.clone(), how.repetition_penalty
        repeated = list({*PROMPT, *tokens})
        own[repeated] = torch.where(own[repeated] > 0, own[repeated] / r, own[repeated] * r)
        for token, bias in how.logit_bias:
            own[token] += bias
        for token in set(tokens):
            own[token] -= how.presence_penalty + how.frequency_penalty * tokens.count(token)
        found[tokens] = probabilities(own, how.temperature, how.top_k, how.top_p, how.min_p)
    return found


class Guesses:
    """Drafts that are the most probable tokens `best` with a chance of 0.7, and otherwise any tokens."""

    def __init__(self, best: dict[tuple[int, ...], int]):
        self._best, self._random = best, random.Random(5)

    def propose(self, tokens: array[int], count: int) -> list[int]:
        known = tuple(tokens[len(PROMPT) :])
        for _ in range(count):
            probable = self._random.random() < 0.7
            known += (self._best[known] if probable else self._random.randrange(VOCABULARY),)
        return list(known[-count:])


CASES = [
    *(pytest.param(name, {}, 2_000, id=name) for name in HOW),
    *(pytest.param(name, {}, 100_000, id=f"{name}-many", marks=pytest.mark.nightly) for name in HOW),
    pytest.param("all", dict(attn_tp=2, split_vocabulary="on"), 20_000, id="all-split", marks=pytest.mark.nightly),
]


@pytest.mark.usefixtures("never_pausing")
@pytest.mark.parametrize(("name", "layout", "sequences"), CASES)
def test_sequences_have_the_exact_distribution(
    model: tuple[Path, Logits], monkeypatch: pytest.MonkeyPatch, name: str, layout: dict[str, Any], sequences: int
) -> None:
    """The joint one of the first two, three and four tokens, so that each depends on the tokens before it."""
    directory, logits = model
    each, p = conditionals(logits, HOW[name]), torch.ones((VOCABULARY,) * LENGTH, dtype=torch.float64)
    for tokens, after in each.items():
        p[tokens] *= after.view(-1, *(1,) * (LENGTH - len(tokens) - 1))
    best = {tokens: int(after.argmax()) for tokens, after in each.items()}
    monkeypatch.setitem(SOURCES, "ngram", lambda *lengths: Guesses(best))
    values = dict(speculative="ngram", prefix_cache=False, page_size=8, kv_tokens=16 * TOGETHER)
    values |= dict(max_running=TOGETHER, max_batch_tokens=LENGTH * TOGETHER, max_choices=TOGETHER)
    counts = torch.zeros((VOCABULARY,) * LENGTH, dtype=torch.int64)
    with Engine(config(directory, **values | layout)) as engine:
        for first in range(0, sequences, TOGETHER):
            how = [replace(HOW[name], seed=seed) for seed in range(first, first + TOGETHER)]
            for result in generate_together(engine, [PROMPT] * TOGETHER, how):
                counts[result.token_ids] += 1
    assert engine.speculation and counts.sum() == sequences
    drafted, accepted = engine.speculation.drafted, engine.speculation.accepted
    assert 0.1 * sequences < accepted[1] < accepted[0] < 0.8 * drafted[0]
    for later in (2, 1, 0):
        behind = tuple(range(LENGTH - later, LENGTH))
        found = fit(counts.sum(behind), p.sum(behind)) if later else fit(counts, p)
        assert found.chance > 1e-6, (LENGTH - later, found)
