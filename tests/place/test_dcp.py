"""From where decode context parallelism pays, against numbers worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support import small_config

from e2e.here import weft_here
from weft.place.cost import AlphaBeta, Offer
from weft.place.dcp import KEYS_SHARE, LATENT_SHARE, Dealt, Prompts
from weft.place.merge import Merge
from weft.place.spec import LayoutError

KINDS = frozenset(("all_gatherv", "merge_scatterv"))
# 10 µs a collective and 1 µs for 1,000 bytes; local work is free but for 1 µs for 2,000 bytes.
COST = AlphaBeta("made up", alpha_us=10.0, hop_us=0.0, gb_s=1.0, launch_us=0.0, mem_gb_s=2.0)
OFFER = Offer("made up", KINDS, frozenset(), COST)


def test_exchanges_and_reads_are_weighed() -> None:
    merge = Merge(heads=4, dim=10, element_bytes=2)
    dealt = Dealt(ranks=2, queries={50: 3}, merges={merge: 3}, tokens={200: 3}, kept_bytes=600, latent_bytes=300)
    # For a row: 50 bytes of queries come and 200 are touched; half of 96 bytes of outputs and lse come.
    row_us = 3 * (50 / 1e3 + 200 / 2e3) + 3 * (48 / 1e3)
    assert dealt.exchange_us(1, [OFFER]) == pytest.approx(60 + row_us)
    assert dealt.exchange_us(8, [OFFER]) == pytest.approx(60 + 8 * row_us)
    saved = 0.5 * (600 / KEYS_SHARE + 300 / LATENT_SHARE) / 2e3
    assert dealt.saved_us([OFFER]) == pytest.approx(saved)
    for batch in (1, 8):
        length = dealt.pays_from(batch, [OFFER])
        assert (length - 1) * batch * saved < dealt.exchange_us(batch, [OFFER]) <= length * batch * saved


def test_prompts_take_the_form_that_moves_less() -> None:
    merge = Merge(heads=4, dim=10, element_bytes=2)
    asked = Prompts(ranks=2, rows=8, seen=100, query_bytes=50, token_bytes=200, merge=merge)
    # 100 tokens of 200 bytes come, and are copied before; or 8 rows of queries, copied for both, and 8 · 96 / 2 bytes.
    assert asked.us("gather", [OFFER]) == pytest.approx(10 + 20 + 20)
    assert asked.us("merge", [OFFER]) == pytest.approx(10 + 0.4 + 0.8 + 10 + 0.384)
    assert replace(asked, query_bytes=0).us("merge", [OFFER]) == pytest.approx(10 + 0.384)
    assert asked.quickest([OFFER]) == "merge" and replace(asked, seen=20).quickest([OFFER]) == "gather"
    untimed = Offer("one", frozenset({"all_gatherv"}), frozenset(), COST)
    assert asked.quickest([untimed]) == "gather", "nothing merges here"
    dealt = Dealt(2, {50: 3}, {merge: 3}, {200: 3}, 600, 0)
    for rows in (1, 8, 100):
        cached = dealt.merges_from(rows, [OFFER])
        assert cached is not None
        for n in (cached - 1, cached):
            seen = -(-(n + rows) // 2)
            assert (replace(asked, rows=rows, seen=seen).quickest([OFFER]) == "merge") == (n >= cached)
    assert dealt.merges_from(8, [untimed]) is None


def test_a_transport_without_room_is_left_out() -> None:
    dealt = Dealt(2, {50: 1}, {}, {}, 600, 0)
    small = Offer("small", KINDS, frozenset(), COST, max_bytes=99)
    with pytest.raises(LayoutError, match="nothing gathers rows of 50 bytes over 2 ranks here"):
        dealt.exchange_us(1, [small])
    assert dealt.exchange_us(1, [small, OFFER]) == pytest.approx(10.15)
    some = replace(small, max_bytes=2 * 64 * 3)  # rows travel in units of 16 bytes
    assert dealt.exchange_us(4, [some]) == pytest.approx(2 * (10 + 3 * 0.05) + 4 * 0.1)


def test_the_plan_says_it(tmp_path: Path) -> None:
    small_config("deepseek_v2", 4).save_pretrained(tmp_path)
    ask = ("plan", str(tmp_path), "--layout", "1x2,2x1", "--tokens", "0,1,64")
    code, out, err = weft_here(*ask, "--dcp", "2")
    assert code == 0, err
    table = out[out.index("dcp=2: the cache of a DP group holds 2") :].splitlines()[2:]
    table, merges, prompts = table[:2], table[3:5], table[6:]
    (one, one_from, *_), (many, many_from, *_) = (line.replace(",", "").split() for line in table)
    assert (one, many) == ("1", "64") and int(many_from) < int(one_from)
    found = json.loads(weft_here(*ask, "--dcp", "2", "--json")[1])
    assert [f["dcp"]["pays_from"] for f in found] == [None, int(one_from), int(many_from)]
    planned = [merge for f in found for merge in f["dcp"]["merges"]]
    assert len(planned) == len(merges) == 2
    for line, merge in zip(merges, planned, strict=True):
        assert f"{merge['layers']} layers" in line and f"{merge['way']} on {merge['transport']}" in line
        assert merge["bytes"] > 0 and merge["transport"] in ("peer", "torchdist/nccl")
    from_ = [f["dcp"]["prompt_merges_from"] for f in found]
    assert from_[0] is None and [line.replace(",", "").split()[:2] for line in prompts] == [
        ["1", str(from_[1])],
        ["64", str(from_[2])],
    ]
    assert "dcp" not in weft_here(*ask)[1]
    code, _, err = weft_here("plan", "--layout", "1x4", "--dcp", "2")  # the embedded model
    assert code == 2 and "attn_tp=4 over 4 of them gives each to 1 rank(s)" in err and "attn_tp=8" in err
