"""Size of a GPU's cache from figures of a pretended GPU; the steps by which it is measured run on CPUs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import run_world, small_config

from engine.test_families import CONFIG, PLUGIN
from weft.engine.attention.caches import Caches, cached_layers
from weft.engine.attention.expansion import MAX_ELEMENTS
from weft.engine.attention.sdpa import TorchPrompts
from weft.engine.config.config import EngineConfig
from weft.engine.config.engine_options import KV_TOKENS
from weft.engine.kv.cache_spec import CacheGroup, Latent, PagedKV, Recurrent, Rule, Spec, Window
from weft.engine.models.load import build_model, dummy_model
from weft.engine.worker.memory import GIB, CacheNeed, Memory, check_weights, measure, min_over_ranks, weight_bytes
from weft.engine.worker.model_runner import ModelRunner
from weft.engine.worker.worker import failure
from weft.kernels.float8 import FLOAT8
from weft.planner.prices import BlockPrices
from weft.planner.recipes import Prompt
from weft.planner.spec import LayoutError, Mesh
from weft.stream.group import ContextGroup

BF16 = torch.bfloat16
SPECS: dict[str, Spec] = {
    "a": PagedKV(2, 8),
    "b": PagedKV(2, 8),
    "c": Window(12, 2, 8),
    "d": Latent(24, 16),
    "e": Recurrent(((3, 5), (7,))),
}


@pytest.fixture(params=["qwen2_moe", "deepseek_v2", "hybrid"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> EngineConfig:
    """A model's configuration, two ranks."""
    config = CONFIG if request.param == "hybrid" else small_config(request.param, 2).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config))
    plugins = (PLUGIN,) if request.param == "hybrid" else ()
    sizes = dict(page_size=4, max_batch_tokens=16, max_running=6, attn_dp=2, ep=2)
    return EngineConfig(tmp_path, plugins=plugins, load_format="dummy", **sizes)


@pytest.mark.parametrize("dtype", [BF16, FLOAT8], ids=str)
@pytest.mark.parametrize("changes", [{}, {"attn_tp": 2, "moe_tp": 2, "dcp": 2}])
def test_bytes_are_those_of_the_tensors(changes: dict[str, int], dtype: torch.dtype) -> None:
    config = EngineConfig(page_size=4, kv_tokens=80, max_running=3, max_batch_tokens=16, **changes)
    need = CacheNeed(config, SPECS, dtype)
    groups = need.groups()
    caches = [Caches({name: SPECS[name]}, groups, config.page_size, dtype).bytes for name in SPECS if name != "c"]
    caches.append(Caches({"c": SPECS["c"]}, groups, config.interleave.span, dtype).bytes)
    assert need.bytes() == sum(caches)


def test_the_cache_takes_what_is_left_and_no_more() -> None:
    config = EngineConfig(page_size=4, gpu_memory_fraction=0.8)
    have = Memory(total=10_000_000, free=7_000_000, steps=600_000, graphs=400_000)
    capacity = 7_000_000 - 600_000 - 400_000 - 2_000_000
    assert have.capacity(0.8) == pytest.approx(capacity, abs=1)
    need = sized(config, SPECS, have)
    pages = need.config.num_pages
    assert need.bytes() == need.bytes(pages) <= capacity < need.bytes(pages + 1)
    assert need.config.kv_tokens == 4 * pages
    kept = {"a": PagedKV(2, 128)}
    counts = [sized(config, kept, have, dtype).config.cached_tokens for dtype in (FLOAT8, BF16)]
    assert 1.95 < counts[0] / counts[1] <= 2, "a cache in FP8 holds twice as many tokens"
    assert need.sized(have, lambda mine: mine - 7).config.num_pages == pages - 7
    assert sized(replace(config, gpu_memory_fraction=0.9), SPECS, have).config.num_pages > pages


def sized(config: EngineConfig, specs: dict[str, Spec], have: Memory, dtype: torch.dtype = BF16) -> CacheNeed:
    """The cache on one rank."""
    return CacheNeed(config, specs, dtype).sized(have, lambda mine: mine)


def test_what_is_missing_is_said() -> None:
    have = Memory(total=10 * GIB, free=2 * GIB, steps=GIB // 2, graphs=GIB // 2)
    with pytest.raises(LayoutError, match=r"8.0 GiB of weights .* steps take 1.0 GiB.* GiB are missing; raise --gpu"):
        sized(EngineConfig(), SPECS, have)
    enough = replace(have, steps=0, graphs=0)
    assert sized(EngineConfig(gpu_memory_fraction=1.0), SPECS, enough).config.num_pages > 100
    longest = EngineConfig(gpu_memory_fraction=1.0, max_model_len=100_000_000)
    with pytest.raises(LayoutError, match="a sequence of 100000000 tokens"):
        sized(longest, SPECS, enough)
    with pytest.raises(LayoutError, match=r"GiB are missing|another rank"):  # another rank has no room for a page
        CacheNeed(EngineConfig(gpu_memory_fraction=1.0), SPECS, BF16).sized(enough, lambda mine: 0)


def test_the_minimum_over_ranks_counts() -> None:
    pages = [70_000, 12_345_678, 69_999]

    def rank_main(transport: Any) -> int:
        return min_over_ranks([transport], Mesh(1, 3, 3, 1), torch.device("cpu"))(pages[transport.rank])

    assert run_world(3, rank_main) == [69_999] * 3
    assert run_world(1, lambda t: min_over_ranks([t], Mesh(), torch.device("cpu"))(5)) == [5]


def test_steps_are_measured_with_a_cache_that_just_holds_them(
    made: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CPUs, with counters that pretend: the n-th step is said to take 1000 · n bytes beyond what was there."""
    model = made.read_model()
    monkeypatch.setattr(TorchPrompts, "copies", model.family == "qwen2_moe")  # as over keys and values on some GPUs
    rows: list[list[tuple[int, ...]]] = [[], []]

    class Runner(ModelRunner):
        def forward(self, batch: Any, counts: tuple[int, ...]) -> Any:
            rows[self.rank].append((counts[0], len(batch.lengths), int(batch.lengths.max())))
            logits = super().forward(batch, counts)
            assert logits.isfinite().all() and len(logits) == len(batch.lengths)
            return logits

    steps = iter(range(1000, 10_000, 1000))
    for name, value in (
        ("synchronize", lambda: None),
        ("reset_peak_memory_stats", lambda: None),
        ("empty_cache", lambda: None),
        ("memory_allocated", lambda: 50),
        ("mem_get_info", lambda: (300, 400)),
    ):
        monkeypatch.setattr(torch.cuda, name, value)

    def rank_main(transport: Any) -> Memory:
        weights = dummy_model(model, made.mesh, transport.rank)
        if transport.rank == 0:
            monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 50 + next(steps))

        def make(groups: Any) -> ModelRunner:
            return Runner(weights, made.mesh, transport.rank, [transport], groups, made.page_size)

        return measure(make, CacheNeed(made, cached_layers(weights), model.dtype), model)

    found = run_world(2, rank_main)[0]
    assert rows[0] == rows[1] == [(16, 1, 16), (16, 6, 3), (6, 6, model.max_position)]
    assert (found.total, found.free) == (400, 300)
    # Prompts' tokens that are expanded or copied, which are not measured.
    expanded = MAX_ELEMENTS * 4 * (model.family in ("deepseek_v2", "qwen2_moe"))
    assert found.steps >= 3000 + expanded  # both ranks sample from the same counter
    prompts = not made.plugins  # the hybrid's, whose states' prompts are not captured
    logits = (1 + 2 + 4 + 6 + 6 * prompts) * model.vocab_size * 4
    assert found.graphs == found.steps * (1 + prompts) - expanded + logits, "the last step is said to take most"


@pytest.mark.parametrize("most", [64, 20])
def test_merged_prompts_are_measured_where_there_may_be_some(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pretended plan merges a prompt's 16 rows on top of 29 tokens or more: never where every sequence has fewer."""
    config = small_config("deepseek_v2", 2, max_position_embeddings=256)
    config.save_pretrained(tmp_path)
    sizes = dict(page_size=4, max_batch_tokens=16, max_running=6, attn_tp=2, ep=2, dcp=2, max_model_len=most)
    made = EngineConfig(tmp_path, load_format="dummy", **sizes)
    model, seen = made.read_model(), list[tuple[int, str | None]]()
    find = BlockPrices._find

    def pretended(self: BlockPrices, value: Any, group: str, rows: int) -> Any:
        if not isinstance(value, Prompt):
            return find(self, value, group, rows)
        name = "merge" if value.seen >= 23 else "gather"
        return next(plan for plan in self.options(value, group, rows) if plan.recipe.name == name)

    monkeypatch.setattr(BlockPrices, "_find", pretended)
    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name, value in (("memory_allocated", 0), ("max_memory_allocated", 9), ("mem_get_info", (300, 400))):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)

    chosen: dict[int, str | None] = {}
    prefill = ContextGroup.prefill

    def watched(self: ContextGroup, what: Prompt, rows: int) -> str:
        chosen[self.place] = name = prefill(self, what, rows)
        return name

    monkeypatch.setattr(ContextGroup, "prefill", watched)

    class Runner(ModelRunner):
        def forward(self, batch: Any, counts: tuple[int, ...]) -> Any:
            chosen[self.rank] = None
            logits = super().forward(batch, counts)
            if self.rank == 0:
                seen.append((int(batch.lengths[0]), chosen[0]))
            return logits

    def rank_main(transport: Any) -> Memory:
        weights = dummy_model(model, made.mesh, transport.rank)

        def make(groups: Any) -> ModelRunner:
            return Runner(weights, made.mesh, transport.rank, [transport], groups, made.page_size)

        return measure(make, CacheNeed(made, cached_layers(weights), model.dtype), model)

    assert [found.steps for found in run_world(2, rank_main)] == [9, 9]
    expected = [(16, "gather"), (3, "gather"), (most, None)]
    assert seen == ([(45, "merge")] if most == 64 else []) + expected


def test_weights_that_do_not_fit(made: EngineConfig) -> None:
    model = made.read_model()
    weights = build_model(model, made.mesh, 1, torch.bfloat16, torch.device("meta")).parameters()
    need = sum(w.numel() * 2 for w in weights)
    assert weight_bytes(model, made.mesh, 1, torch.bfloat16) == need
    check_weights(need, 1, need)
    with pytest.raises(LayoutError, match=r"the weights of rank 1 take .* GiB are missing; spread the model"):
        check_weights(need, 1, need - 1)


def test_a_cache_that_was_asked_for_and_does_not_fit() -> None:
    config = EngineConfig(page_size=4, kv_tokens=8_000_000)
    cache = CacheNeed(config, SPECS, BF16)
    need = cache.bytes()
    cache.check(need)
    with pytest.raises(LayoutError, match=r"a cache of 8000000 tokens takes .* GiB are missing; lower --kv-tokens"):
        cache.check(need - GIB)
    with pytest.raises(LayoutError, match=r"a rank of this host has .* GiB are missing; lower --kv-tokens$"):
        CacheNeed(replace(config, kv_tokens=4_000_000_000_000), SPECS, BF16).check()
    small = replace(config, kv_tokens=1 << 16)
    need = CacheNeed(small, SPECS, BF16).bytes()
    CacheNeed(replace(small, host_memory_gib=need / GIB), SPECS, BF16).check()
    with pytest.raises(LayoutError, match=r"a rank of this host has .*lower --kv-tokens$"):
        CacheNeed(replace(small, host_memory_gib=(need - 1) / GIB), SPECS, BF16).check()


def test_memory_that_runs_out_later_is_said_in_one_line() -> None:
    found = failure(1, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nMore lines."))
    assert (
        found.text.endswith(
            "Tried to allocate 9 GiB.; lower --kv-tokens, --max-batch-tokens or --max-running, or use more ranks"
        )
        and "\n" not in found.text
    )


def test_ranks_that_start_anew_keep_the_size() -> None:
    assert EngineConfig().cached_tokens == KV_TOKENS
    found = EngineConfig().with_cache([CacheGroup(Rule(window=9), 3), CacheGroup(Rule(), 77)])
    assert found.kv_tokens == 77 * 16 and found.cached_tokens == 77 * 16
    assert EngineConfig(kv_tokens=640).with_cache([CacheGroup(Rule(state=True), 3)]).kv_tokens == 640


@pytest.mark.parametrize("fraction", [0.0, 1.1, -1.0])
def test_fractions_that_are_none(fraction: float) -> None:
    with pytest.raises(ValueError, match=r"gpu_memory_fraction is .*; it must be above 0 and at most 1"):
        EngineConfig(gpu_memory_fraction=fraction)
