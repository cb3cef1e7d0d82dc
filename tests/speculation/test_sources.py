"""Sources of drafts, and what cannot draft."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from engine.conftest import byte_model, byte_tokenizer
from engine.test_engine import config
from engine.test_hybrids import FAMILIES
from speculation.draft_layers import add_draft_layer
from weft.engine.controller import startup
from weft.engine.controller.engine import Engine
from weft.engine.controller.startup import resolve_defaults
from weft.engine.kv.tokens import token_array
from weft.engine.speculation.sources import NgramSource
from weft.planner.spec import LayoutError


def looked_up(tokens: list[int], count: int, shortest: int, longest: int) -> list[int]:
    """Define prompt lookup: the last earlier occurrence of the longest end, by comparing lists."""
    for length in range(longest, shortest - 1, -1):
        for begin in range(len(tokens) - length - 1, -1, -1):
            if tokens[begin : begin + length] == tokens[-length:]:
                known = list(tokens)
                for at in range(count):
                    known.append(known[begin + length + at])
                return known[len(tokens) :]
    return []


def test_drafts_are_those_of_the_definition() -> None:
    rng, found = random.Random(5), 0
    for _ in range(3000):
        shortest = rng.randrange(1, 4)
        longest, count = rng.randrange(shortest, 6), rng.randrange(1, 7)
        # Tokens with equal bytes in other places: occurrences between two tokens are none.
        tokens = [rng.choice([0, 1, 256, 257, 65536, 1 << 24]) for _ in range(rng.randrange(1, 24))]
        drafts = NgramSource(shortest, longest).propose(token_array(tokens), count)
        assert drafts == looked_up(tokens, count, shortest, longest), (tokens, shortest, longest)
        found += bool(drafts)
    assert 500 < found < 2900


def test_an_occurrence_next_to_the_end_repeats() -> None:
    assert NgramSource(2, 4).propose(token_array([7, 5, 5, 5]), 4) == [5, 5, 5, 5]
    assert NgramSource(2, 4).propose(token_array([1, 2, 3, 1, 2, 3, 1, 2]), 5) == [3, 1, 2, 3, 1]
    assert NgramSource(2, 4).propose(token_array([1]), 5) == []


def test_what_cannot_draft_is_refused_in_one_line(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(kind: type[Exception], says: str, model: Path = model_dir, **changes: Any) -> None:
        with pytest.raises(kind, match=says) as error:
            Engine(config(model, **dict(speculative="ngram") | changes))
        assert "\n" not in str(error.value)

    refused(ValueError, "speculative is 'eagle'; it must be one of off, ngram", speculative="eagle")
    refused(ValueError, "speculative_tokens is 0; it must be above 0", speculative_tokens=0)
    refused(ValueError, "prompt_lookup_max=2 is below prompt_lookup_min=3", prompt_lookup_min=3, prompt_lookup_max=2)
    FAMILIES["qwen3_5_moe"](tmp_path)
    byte_tokenizer(tmp_path)
    refused(LayoutError, "--speculative ngram does not support models with recurrent states", model=tmp_path)


def test_auto_runs_a_draft_layer_that_is_a_small_part_of_the_model(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise it looks drafts up, and says where it cannot."""
    drafting, recurrent = tmp_path / "drafting", tmp_path / "recurrent"
    drafting.mkdir(), recurrent.mkdir()
    add_draft_layer(byte_model(drafting))
    FAMILIES["qwen3_5_moe"](recurrent)
    byte_tokenizer(recurrent)

    def chosen(model: Path, **changes: Any) -> str:
        return resolve_defaults(config(model, speculative="auto", **changes)).speculative

    assert [chosen(model_dir), chosen(drafting)] == ["ngram", "ngram"]
    assert not caplog.messages
    monkeypatch.setattr(startup, "MIN_LAYERS_OF_DRAFT", 1)
    assert [chosen(model_dir), chosen(drafting), chosen(drafting, num_layers=2)] == ["ngram", "mtp", "ngram"]
    assert chosen(recurrent) == "off"
    assert "--speculative auto is off: --speculative ngram does not support models with" in caplog.messages[0]
