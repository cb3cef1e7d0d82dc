"""The steps by which kernels are compiled before requests come: they run on CPUs too, and leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from engine.conftest import byte_tokenizer
from engine.test_engine import prompts
from engine.test_hybrids import SIZES
from models.qwen35 import small_qwen35
from weft.engine.config.config import EngineConfig
from weft.engine.controller.engine import Engine
from weft.engine.kv.cache_spec import CacheGroup, Rule
from weft.engine.messages.rank_messages import Step
from weft.engine.messages.request import SamplingParams
from weft.engine.worker.warmup import sizes, warm_steps
from weft.engine.worker.worker import Worker

GROUPS = (CacheGroup(Rule(), 4), CacheGroup(Rule(state=True), 3))
LAYOUTS: dict[str, dict[str, Any]] = {
    "2x1": dict(attn_dp=2, ep=2),
    "split": dict(attn_tp=2, ep=2, split_vocabulary="on"),
    "dcp": dict(attn_tp=4, ep=4, dcp=2, dcp_prefill="merge"),
}


def test_sizes_lie_on_both_sides_of_what_kernels_tell_apart() -> None:
    assert sizes(1) == [1] and sizes(2) == [1, 2]
    assert sizes(2048)[:8] == [1, 2, 3, 4, 5, 8, 9, 16] and sizes(2048)[-5:] == [513, 1023, 1024, 1025, 2048]
    assert sizes(1100)[-1] == 1100
    for k in (1, 2, 4, 6, 8, 10):  # pairs of rows and experts are told apart at powers of two, rows where tiles change
        limits = {0, 4, 16, 64, 128, 256, 1023, 4096, *((1 << i) // k for i in range(16))}
        last = sorted(limit for limit in limits if limit <= 4096)
        for low, high in pairwise(last):
            assert any(low < n <= high for n in sizes(4096)), f"{k} experts, {low + 1} to {high} rows"


def rows_of(config: EngineConfig, longest: int = 64, **more: Any) -> list[Step]:
    steps = warm_steps(config, GROUPS, longest, **more)
    for step in steps:
        for group in step.groups:
            joined = {join.row: join for join in group.joins}
            assert len(joined) == len(group.joins) <= config.batch_sequences and group.count <= config.batch_tokens
            rows = dict(group.decode_each) | {chunk.row: chunk.count for chunk in group.chunks}
            assert rows.keys() == joined.keys() and max(joined, default=0) < config.batch_sequences
            for row, count in rows.items():
                tokens, (pages, slots) = joined[row].context + count, joined[row].tables
                assert tokens <= longest and slots == (-1, -1)
                assert len(pages) == -(-tokens // config.interleave.span) and set(pages) <= set(range(4))
    return steps


def test_steps_have_every_number_of_rows_with_decode_rows_among_them() -> None:
    config = EngineConfig(attn_dp=2, ep=2, max_batch_tokens=300, max_running=9)
    steps = rows_of(config)
    assert [sum(step.counts) for step in steps] == sizes(600)
    assert all(max(step.counts) - min(step.counts) <= 1 for step in steps)
    assert {len(step.groups[0].decode_rows) for step in steps} >= {0, 1, 2, 4, 8 - 300 // 64}
    assert {len(step.groups[0].sampled_rows) for step in steps} >= {1, 2, 3, 4, 9}
    assert {bool(group.joins) for step in steps for group in step.groups} == {True, False}
    merged = rows_of(config, longest=200, merges_from=lambda rows: 50)
    contexts = [chunk for step in merged for chunk in step.groups[0].joins[-1:] if chunk.context == 50]
    assert 0 < len(contexts) < len(steps)
    shared = rows_of(config, split=True)
    asked = [{join.sampling.min_p > 0 for group in step.groups for join in group.joins} for step in shared]
    assert asked == [{bool(number % 2)} for number in range(len(shared))]
    rows_of(EngineConfig(max_running=1, max_batch_tokens=8), longest=2)


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("recurrent")
    small_qwen35(directory, seed=3, **SIZES)
    byte_tokenizer(directory)
    return directory


@pytest.mark.parametrize("layout", [*LAYOUTS, "recurrent"])
def test_outputs_are_the_same_behind_them(
    layout: str, model_dir: Path, recurrent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = recurrent if layout == "recurrent" else model_dir
    values = dict(executor="thread", max_running=5, max_batch_tokens=24, kv_tokens=128, page_size=4)
    given = EngineConfig(model=directory, **values, **LAYOUTS.get(layout, dict(attn_tp=2, ep=2)))
    sampled = SamplingParams(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True)
    serve: Callable[..., None] = Worker.serve
    warmed: list[int] = []

    def warm_and_serve(worker: Worker, receive: Any, send: Any) -> None:
        worker.warm_up(worker.config.cached_tokens, lambda done, total: warmed.append(total))
        assert not worker.table.rows and not worker.runner.stats.report()
        serve(worker, receive, send)

    found = []
    for how in (serve, warm_and_serve):
        monkeypatch.setattr(Worker, "serve", how)
        with Engine(given) as engine:
            found.append([result.token_ids for result in engine.generate(prompts(), sampled)])
            engine.check_idle()
    assert found[0] == found[1] and warmed
