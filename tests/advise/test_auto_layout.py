"""`--layout auto`: the layout is the best by kept times, else the cheapest by the table, and given options stay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from weft.engine.advise import advice
from weft.engine.advise.advice import choose_layout
from weft.engine.advise.candidates import Candidate, ClientLoad, find_candidates, no_layout
from weft.engine.advise.measure import grids, step_times
from weft.engine.config.config import EngineConfig
from weft.planner.spec import LayoutError
from weft.tune.step_table import StepTable

BASE = EngineConfig(device="cpu", executor="thread")


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch, empty_cache: Any) -> None:
    monkeypatch.setattr("weft.engine.advise.candidates.own_cores", lambda: {0: [0, 1]})


def test_without_times_the_cheapest_decode_step_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "decode_price", lambda footprint, planner, *more: 9.0 - planner.mesh.attn_dp)
    config, line = choose_layout(replace(BASE, max_waiting=7))
    assert config.attn_dp == 2 and config.max_waiting == 7
    assert line.startswith(f"layout {config.mesh}") and "priced 0.01 ms" in line and "run weft advise once" in line


def test_given_sizes_are_kept() -> None:
    for given in ({"attn_tp": 2}, {"attn_dp": 2}, {"attn_dp": 2, "ep": 1, "moe_tp": 2}, {"attn_tp": 2, "dcp": 2}):
        try:
            config, _ = choose_layout(replace(BASE, **given))  # type: ignore[arg-type]
        except LayoutError as error:
            assert "dcp" in given and "dcp=2" in str(error)
        else:
            assert {name: getattr(config, name) for name in given} == given


def test_the_best_by_kept_times_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of `weft advise` decide, for the load that it had; layouts without are not chosen."""
    load = ClientLoad(24, 8, 3)
    us = {2: 50.0, 1: 80.0}  # by attn_dp, of a step

    def fake(candidate: Candidate, load: ClientLoad, progress: Any) -> StepTable:
        decode, mixed = grids(candidate, load)
        value = us[candidate.config.attn_dp]
        return StepTable(dict.fromkeys(decode, value), dict.fromkeys(mixed, value), [0.1])

    monkeypatch.setattr("weft.engine.advise.measure.measure", fake)
    monkeypatch.setattr(advice, "decode_price", lambda *arguments: pytest.fail("times are kept"))
    candidates, _ = find_candidates(BASE, 2, load, one_server=True)
    for each in candidates:
        if each.config.mesh.world == 2:
            step_times(each, load, lambda what, part: None)
    config, line = choose_layout(BASE)
    assert config.attn_dp == 2 and "for 3 clients of 24 + 8 tokens" in line and "(measured steps)" in line
    us[2] = 100.0
    for each in candidates:
        step_times(each, load, lambda what, part: None, again=True)
    assert choose_layout(BASE)[0].attn_dp == 1
    monkeypatch.setattr("weft.engine.advise.measure.source_version", lambda omit: "1 (later)")
    monkeypatch.setattr(advice, "decode_price", lambda footprint, planner, *more: 9.0 - planner.mesh.attn_dp)
    config, line = choose_layout(BASE)
    assert config.attn_dp == 2 and "not used: weft was" in line and "and is 1 (later): run weft advise once" in line


def test_kept_times_of_requests_beyond_the_context_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server with a shorter context starts, with the layout of the cheapest decode step."""
    monkeypatch.setattr(advice, "kept_loads", lambda candidates: ([ClientLoad(256, 128)], ""))
    assert "priced" in choose_layout(replace(BASE, max_model_len=100))[1]


def test_nothing_that_fits_ends_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.engine.advise.candidates.available_bytes", lambda limit_gib: 1000)
    with pytest.raises(LayoutError, match=r"no layout of 2 rank.s. starts; of attn_dp=.*GiB.*use more ranks") as caught:
        choose_layout(BASE)
    assert "\n" not in str(caught.value)
    with pytest.raises(LayoutError, match="for one host"):
        choose_layout(EngineConfig(attn_tp=2, nnodes=2, device="cpu"))
    with pytest.raises(LayoutError, match="has the sizes that are given: omit them"):
        choose_layout(replace(BASE, attn_tp=3))
    error = no_layout(2, {"attn_tp=1": "9 GiB are missing", "attn_tp=2 dcp=2": "too few heads"})
    assert str(error) == "no layout of 2 rank(s) starts; of attn_tp=1: 9 GiB are missing"


def test_footprints_are_those_of_the_ranks() -> None:
    """Experts are shared by all ranks, and none is counted as dense."""
    found = {
        (c.config.mesh.ep, c.config.mesh.world): c.footprint for c in find_candidates(BASE, 2, ClientLoad(8, 8, 1))[0]
    }
    one, two = found[1, 1], found[2, 2]
    assert two.experts * 2 == one.experts > 0 and two.dense >= one.dense / 2 and one.caches and 0 < one.chosen < 1
