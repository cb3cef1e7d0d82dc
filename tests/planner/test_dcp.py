"""From where decode context parallelism pays, against numbers worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support import small_config

from e2e.here import weft_here
from weft.planner.cost import AlphaBeta, Offer
from weft.planner.dcp import KEYS_SHARE, LATENT_SHARE, ShardedContext
from weft.planner.prices import BlockPrices
from weft.planner.recipes import Gather, Merge, Prompt
from weft.planner.spec import LayoutError, Mesh

KINDS = frozenset(("all_gatherv", "merge_scatterv"))
# 10 µs a collective and 1 µs for 1,000 bytes; local work is free but for 1 µs for 2,000 bytes.
COST = AlphaBeta("made up", alpha_us=10.0, hop_us=0.0, gb_s=1.0, launch_us=0.0, mem_gb_s=2.0)
OFFER = Offer("made up", KINDS, frozenset(), COST)
MESH = Mesh(1, 2, 2, 1, dcp=2)
PRICED = BlockPrices(MESH, [OFFER])
QUERIES = Gather("queries", 50, relaid=True)


def test_exchanges_and_reads_are_weighed() -> None:
    merge = Merge(heads=4, dim=10, element_bytes=2)
    context = ShardedContext(2, [QUERIES, merge] * 3, tokens={200: 3}, kept_bytes=600, latent_bytes=300)
    # For a row: 50 bytes of queries come and 200 are touched; half of 96 bytes of outputs and lse come.
    row_us = 3 * (50 / 1e3 + 200 / 2e3) + 3 * (48 / 1e3)
    assert context.exchange_us(1, PRICED) == pytest.approx(60 + row_us)
    assert context.exchange_us(8, PRICED) == pytest.approx(60 + 8 * row_us)
    saved = 0.5 * (600 / KEYS_SHARE + 300 / LATENT_SHARE) / 2e3
    assert context.saved_us(PRICED) == pytest.approx(saved)
    for batch in (1, 8):
        length = context.pays_from(batch, PRICED)
        assert (length - 1) * batch * saved < context.exchange_us(batch, PRICED) <= length * batch * saved


def test_what_only_the_device_counts_goes_by_transports_that_read_it_there() -> None:
    """The quickest does not; and of many rows a call takes as many as fit."""
    quick, able = replace(OFFER, live_sizes=False), replace(OFFER, transport="able", max_bytes=64 * 2 * 10)
    prices, live = BlockPrices(MESH, [quick, able]), replace(QUERIES, live=True)
    assert prices.cheapest(QUERIES, "dcp", 16).transport == "made up"
    found = prices.cheapest(live, "dcp", 16)
    assert (found.transport, found.max_call_rows) == ("able", 10)
    assert BlockPrices(MESH, [quick]).find(live, "dcp", 16) is None


def test_prompts_take_the_form_that_moves_less() -> None:
    merge = Merge(heads=4, dim=10, element_bytes=2)
    asked = Prompt(seen=100, query_bytes=50, token_bytes=200, merge=merge)

    def us(value: Prompt) -> dict[str, float]:
        return {plan.recipe.name: plan.us for plan in PRICED.options(value, "dcp", 8)}

    def taken(value: Prompt, prices: BlockPrices = PRICED, rows: int = 8) -> str:
        return prices.cheapest(value, "dcp", rows).recipe.name

    # 100 tokens of 200 bytes come, and are copied before; or 8 rows of queries, copied for both, and 8 · 96 / 2 bytes.
    by_merge = 10 + 0.4 + 0.8 + 10 + 0.384
    assert us(asked) == {"gather": pytest.approx(10 + 20 + 20), "merge": pytest.approx(by_merge)}
    assert us(replace(asked, query_bytes=0))["merge"] == pytest.approx(10 + 0.384)
    assert [step.brief() for step in PRICED.cheapest(asked, "dcp", 8).steps()] == [
        "queries: all_gatherv dcp",
        "outputs: fused: merge_scatterv dcp",
    ]
    assert [step.brief() for step in PRICED.cheapest(replace(asked, seen=20), "dcp", 8).steps()] == [
        "copy cached tokens",
        "cached tokens: all_gatherv dcp",
    ]
    untimed = BlockPrices(MESH, [Offer("one", frozenset({"all_gatherv"}), frozenset(), COST)])
    assert taken(asked, untimed) == "gather", "nothing merges here"
    for recipe in ("gather", "merge"):
        forced = BlockPrices(MESH, [OFFER], {Prompt: recipe})
        assert {taken(replace(asked, seen=n), forced) for n in (1, 20, 10000)} == {recipe}
    with pytest.raises(LayoutError, match=r"outputs of what prompts see for 8 rows .*one has no .* or merge_scatterv"):
        taken(asked, BlockPrices(MESH, untimed.offers, {Prompt: "merge"}))
    with pytest.raises(LayoutError, match="no recipe to prompt is called 'mix'; there are auto, gather, merge"):
        BlockPrices(MESH, [OFFER], {Prompt: "mix"})
    context = ShardedContext(2, [QUERIES, merge] * 3, {200: 3}, 600, 0)
    for rows in (1, 8, 100):
        cached = context.merges_from(rows, PRICED)
        assert cached is not None
        for n in (cached - 1, cached):
            seen = -(-(n + rows) // 2)
            assert (taken(replace(asked, seen=seen), rows=rows) == "merge") == (n >= cached)
    assert context.merges_from(8, untimed) is None
    assert context.merges_from(8, BlockPrices(MESH, [OFFER], {Prompt: "gather"})) is None
    assert context.merges_from(8, BlockPrices(MESH, [OFFER], {Prompt: "merge"})) == 0


def test_a_transport_without_the_capacity_is_left_out() -> None:
    context = ShardedContext(2, [QUERIES], {}, 600, 0)
    small = Offer("small", KINDS, frozenset(), COST, max_bytes=99)
    with pytest.raises(LayoutError, match=r"\(small\) can run queries for 1 rows over dcp=2 .*max_bytes=99"):
        context.exchange_us(1, BlockPrices(MESH, [small]))
    assert context.exchange_us(1, BlockPrices(MESH, [small, OFFER])) == pytest.approx(10.15)
    some = replace(small, max_bytes=2 * 64 * 3)  # rows travel in units of 16 bytes
    assert context.exchange_us(4, BlockPrices(MESH, [some])) == pytest.approx(2 * 10 + 4 * 0.05 + 4 * 0.1)


def test_the_plan_says_it(tmp_path: Path) -> None:
    small_config("deepseek_v2", 4).save_pretrained(tmp_path)
    ask = ("plan", str(tmp_path), "--attn-tp", "2", "--ep", "2", "--tokens", "0,1,64")
    code, out, err = weft_here(*ask, "--dcp", "2")
    assert code == 0, err
    table = out[out.index("dcp=2: the cache of a DP group holds 2") :].splitlines()[2:]
    table, prompts = table[:2], table[3:]
    (one, one_from, *_), (many, many_from, *_) = (line.replace(",", "").split() for line in table)
    assert (one, many) == ("1", "64") and int(many_from) < int(one_from)
    found = json.loads(weft_here(*ask, "--dcp", "2", "--json")[1])
    assert [f["dcp"]["pays_from"] for f in found] == [None, int(one_from), int(many_from)]
    inside = [s for f in found for read in f["plan"]["reads"] for s in read["steps"] if s["op"] == "settle"]
    assert {s["value"] for s in inside} == {"queries", "outputs"} and len(inside) == 3 * 2 * 3
    assert all(s["bytes"] > 0 and s["transport"] in ("peer", "torchdist/nccl") for s in inside)
    for s in inside:
        recipe = f"{s['value']}: {s['recipe']}"
        assert recipe in out and s["group"] == "dcp"
    from_ = [f["dcp"]["prompt_merges_from"] for f in found]
    assert from_[0] is None and [line.replace(",", "").split()[:2] for line in prompts] == [
        ["1", str(from_[1])],
        ["64", str(from_[2])],
    ]
    assert "dcp" not in weft_here(*ask)[1]
    code, _, err = weft_here("plan", "--attn-tp", "4", "--dcp", "2")  # the embedded model
    assert code == 2 and "8 heads with 4 key-value heads on attn_tp=4" in err and "attn_tp=8" in err
