"""Savings of a split vocabulary, against numbers worked out by hand, and the engine's choice of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support import small_config

from e2e.here import weft_here
from weft.comm.transport_registry import PEER
from weft.engine.config.config import EngineConfig
from weft.engine.controller import startup
from weft.planner.cost import AlphaBeta, Offer
from weft.planner.prices import BlockPrices
from weft.planner.spec import Mesh
from weft.planner.vocabulary import SMALL_KERNELS, SplitHead, split_step

KINDS = frozenset(("all_gatherv",))
# 10 µs a collective and 1 µs for 1,000 bytes; a local kernel takes 2 µs and 1 µs for 2,000 bytes.
COST = AlphaBeta("made up", alpha_us=10.0, hop_us=0.0, gb_s=1.0, launch_us=2.0, mem_gb_s=2.0)
OFFER = Offer("made up", KINDS, frozenset(), COST)


def test_what_is_saved_and_what_it_takes() -> None:
    found = split_step(SplitHead(ranks=4, tokens=1001, token_bytes=200), 5, 7.0, BlockPrices(Mesh(1, 4, 4, 1), [OFFER]))
    assert (found.best_bytes, found.logits_bytes) == (5 * 3 * 8, 5 * 3 * 251 * 4)
    assert found.best.us == pytest.approx(10 + found.best_bytes / 1e3)
    assert found.logits.us == pytest.approx(10 + found.logits_bytes / 1e3)
    kernels = SMALL_KERNELS * (2 + 5 * 8 * 4 / 2e3)
    product = (1001 - 251) * 200 / 2e3
    assert found.saved_us == pytest.approx(product - kernels - found.best.us - 7)


def test_the_plan_says_it(tmp_path: Path) -> None:
    small_config("qwen3_moe", 4).save_pretrained(tmp_path)
    options = "--attn-tp 4 --ep 2 --tokens 0,1,64 --split-vocabulary on"
    ask = ("plan", str(tmp_path), *options.split())
    code, out, err = weft_here(*ask)
    assert code == 0, err
    [head, _, one, many, _, one_whole, many_whole] = out[out.index("vocabulary: ") :].splitlines()
    assert head == "vocabulary: 61 tokens split over attn_tp=4: cost and saving per decode step"
    nothing, *found = (f["vocabulary"] for f in json.loads(weft_here(*ask, "--json")[1]))
    assert nothing is None and [f["rows"] for f in found] == [1, 64]
    for step, line, whole in zip(found, (one, many), (one_whole, many_whole), strict=True):
        assert line.endswith(f"{step['saved_us']:,.1f} µs".replace("-", "−")) and step["saved_us"] < 0
        assert step["embedding_us"] > 0 and step["best_bytes"] == 24 * step["rows"]
        assert step["logits_bytes"] == 3 * 16 * 4 * step["rows"] and step["logits"]["transport"] in whole


@pytest.mark.parametrize("preset, found", [("qwen3-30b-a3b", "on"), (None, "off")])
def test_auto_splits_where_steps_are_quicker_by_it(
    preset: str | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CPUs and on pretended GPUs a head of 622 MB is worth a split; the embedded model's is not."""
    from weft.engine.assets import preset_dir

    model = {"model": preset_dir(preset), "load_format": "dummy"} if preset else {}
    config = EngineConfig(attn_tp=2, ep=2, cost="h200x4", split_vocabulary="auto", **model)
    assert startup.resolve_defaults(replace(config, device="cpu", cost="cpu")).split_vocabulary == found
    monkeypatch.setattr(startup, "on_gpus", lambda config: True)
    monkeypatch.setattr(startup, "enabled_transports", lambda config: (PEER,))
    assert startup.resolve_defaults(config).split_vocabulary == found
    assert startup.resolve_defaults(replace(config, split_vocabulary="off")).split_vocabulary == "off"
    assert startup.resolve_defaults(replace(config, attn_tp=1, ep=1)).split_vocabulary == "off"
