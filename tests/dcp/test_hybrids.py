"""Families with windows, sinks, gates or recurrent states, where the tokens of the other layers are sharded."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.conftest import byte_tokenizer
from engine.test_engine import GREEDY, config, prompts
from engine.test_hybrids import FAMILIES
from weft.engine.controller.engine import Engine

pytestmark = pytest.mark.usefixtures("planned_once")
CHOICES = {"step3p5": ("replicate", "merge"), "gpt_oss": ("gather", "merge"), "qwen3_5_moe": ("replicate", "gather")}


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_one_rank(family: str, tmp_path: Path) -> None:
    """Windows and states are whole on every rank, in pages of as many tokens as the others' stand for."""
    FAMILIES[family](tmp_path)
    byte_tokenizer(tmp_path)
    with Engine(config(tmp_path)) as engine:
        alone = [r.token_ids for r in engine.generate(prompts(3), GREEDY)]
    assert len({t for a in alone for t in a}) > 10, "answers that hardly differ would show little"
    query, prefill = CHOICES[family]
    layout = dict(attn_tp=4, ep=4, dcp=2, dcp_interleave=2, dcp_query=query, dcp_prefill=prefill)
    with Engine(config(tmp_path, **layout)) as engine:
        assert [r.token_ids for r in engine.generate(prompts(3), GREEDY)] == alone
        assert any(stat.group == "dcp" for stat in engine.comm_report()[0])
        engine.check_idle()
