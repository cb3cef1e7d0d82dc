"""Steps by CUDA graph without the graph: the engine's loop over state that lies on the device.

On a machine without a GPU every replay runs the captured calls once more, so that joins, leaves, new pages, padding
and draws equal the real thing's; `tests/gpu/test_engine.py` does the same with graphs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import run_world, small_config, small_model

from dcp.interleaved import LiveReference
from engine.conftest import byte_model, byte_tokenizer, generate_together, lose_last_tokens
from engine.test_engine import GREEDY, config, prompts
from engine.test_families import PLUGIN, small_hybrid
from engine.test_hybrids import SIZES
from gpu.triton_checks.worker import INTERPRETED
from models.oss import small_gpt_oss
from models.qwen35 import small_qwen35
from speculation.draft_layers import add_draft_layer
from speculation.eagle3 import make_head
from speculation.test_draft_layers import drafts_noted
from speculation.toy import FixedPrices, Toy
from weft.comm.reference import ReferenceTransport, ReferenceWorld
from weft.engine.attention.backend_registry import TRITON
from weft.engine.attention.caches import cached_layers
from weft.engine.attention.captured_prompts import CapturedPrompts
from weft.engine.config.config import EngineError
from weft.engine.controller.engine import Engine
from weft.engine.kernels import delta_rule
from weft.engine.kernels.triton import delta_chunks
from weft.engine.messages.request import SamplingParams
from weft.engine.models.layers import deltanet
from weft.engine.models.load import dummy_model
from weft.engine.speculation import drafting as drafting_module
from weft.engine.speculation.draft_prices import Price
from weft.engine.speculation.drafting import Speculation
from weft.engine.worker import graph_inputs as inputs
from weft.engine.worker import model_runner as runner
from weft.engine.worker import step_graphs as graphs
from weft.engine.worker import worker
from weft.engine.worker.device_rows import DeviceRows
from weft.engine.worker.draft_chain import RowsKept
from weft.engine.worker.draft_graphs import CapturedPass, Pass
from weft.engine.worker.graph_inputs import Shape
from weft.engine.worker.held_drafts import HeldDrafts
from weft.engine.worker.memory import CacheNeed, measure
from weft.engine.worker.split_vocabulary import SplitVocabulary
from weft.engine.worker.step_graphs import StepGraphs
from weft.engine.worker.worker import Worker
from weft.planner.prices import BlockPrices
from weft.planner.recipes import Prompt
from weft.planner.spec import Mesh
from weft.stream.group import ContextGroup
from weft.stream.step_rows import CapturedRows, EqualRows, PaddedRows

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="stands in for graphs where there are none")
FEW = [prompt[:11] for prompt in prompts(4)]
PLAIN = replace(GREEDY, max_tokens=5)
SEEDED = SamplingParams(max_tokens=5, temperature=3.0, min_p=0.01, seed=5, ignore_eos=True)
CUT = replace(SEEDED, top_k=9, top_p=0.9, logprobs=1)


class Repeated:
    """Stand-in for a graph: a replay runs once more the step that was run last when this was captured."""

    seen: list[Shape]
    last = threading.local()  # ranks are threads

    @contextmanager
    def capturing(self, **_: Any) -> Iterator[None]:
        yield
        self.graphs, self.shape, self.counts, self.logits = self.last.step
        self.logits.fill_(float("nan"))
        self.read = self.read_by_drafts()

    def replay(self) -> None:
        self.seen.append(self.shape)
        self.logits.copy_(self.graphs._step(self.shape, self.counts))
        for to, found in zip(self.read, self.read_by_drafts(), strict=True):
            to.copy_(found)

    def read_by_drafts(self) -> tuple[torch.Tensor, ...]:
        """The tensors of the step that delayed rows copy."""
        kept = self.graphs._model
        return (
            (kept.batch.tokens, kept.rows)
            if isinstance(kept, RowsKept) and kept.batch and kept.rows is not None
            else ()
        )


class RepeatedPass:
    """Stand-in for the graph of a pass of a draft layer."""

    def __init__(self, counts: CapturedRows, run: Pass):
        self.counts, self.run, self.made = counts, run, run(counts)

    def replay(self) -> None:
        for to, found in zip(self.made, self.run(self.counts), strict=True):
            to.copy_(found)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[Shape]:
    """Every rank has graphs that are none, and draws as GPUs do; gives the shapes that were replayed."""
    seen: list[Shape] = []
    step, capture = StepGraphs._step, StepGraphs.capture

    def stepped(graphs: StepGraphs, shape: Shape, counts: CapturedRows) -> torch.Tensor:
        logits = step(graphs, shape, counts)
        Repeated.last.step = graphs, shape, counts, logits
        return logits

    def captured_in_full(graphs: StepGraphs, *progress: Any) -> None:
        capture(graphs, *progress)
        assert graphs._graphs.keys() == set(graphs.shapes)
        traces = graphs._rows.length.any(), (graphs._rows.last_token != -1).any()
        assert not any(traces), "steps of no rows leave no trace"

    def rows_of(transports: Any, mesh: Mesh, *capacity: Any) -> CapturedRows:
        return EqualRows(mesh, *capacity) if mesh.attn_dp > 1 else PaddedRows(mesh, *capacity)

    monkeypatch.setattr(Repeated, "seen", seen, raising=False)
    monkeypatch.setattr(StepGraphs, "_step", stepped)
    monkeypatch.setattr(StepGraphs, "capture", captured_in_full)

    def captured_pass(graphs: StepGraphs, counts: CapturedRows, run: Pass) -> CapturedPass:
        again = RepeatedPass(counts, run)
        kept = [x.untyped_storage().nbytes() for x in again.made if not x.numel()]
        assert not any(kept), "a view would keep the memory of all rows, or of their logits, in each graph"
        return CapturedPass(again, counts, again.made)

    monkeypatch.setattr(StepGraphs, "capture_pass", captured_pass)
    monkeypatch.setattr(graphs, "captured_rows", rows_of)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Repeated)
    monkeypatch.setattr(torch.cuda, "graph", Repeated.capturing)
    for name in ("graph_pool_handle", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    make = Worker.__init__

    def made(worker: Worker, *args: Any) -> None:
        make(worker, *args)
        worker.device_rows = worker.sampler.state = DeviceRows(
            worker.table, 64, worker.config.batch_sampled - worker.config.batch_sequences
        )
        if not worker.config.cuda_graphs:
            return
        worker.held = HeldDrafts(queues=True)
        worker.device_rows.entries.fill_(1 << 20)  # a page, or a slot, that was never told is none
        for states in (states for _, kept in worker.runner.caches.states for states in kept.states):
            states[:, :-2] = float("nan")  # what no sequence has left there, and not where every sequence begins
        worker.runner.capture(worker.device_rows, worker.config.batch_tokens)

    monkeypatch.setattr(inputs, "prompt_capacities", lambda limit: sorted({min(4, limit), limit}))
    monkeypatch.setattr(runner, "exchange_times", lambda *_: {})  # events and graphs of their own

    def gated_delta(*args: Any) -> None:
        traced = not args[4].is_contiguous()  # there, all elements of a weight are one
        (delta_rule if traced else delta_chunks).gated_delta(*args)

    monkeypatch.setattr(deltanet, "gated_delta", gated_delta)
    monkeypatch.setattr(Worker, "__init__", made)
    return seen


def decode_rows_of(shapes: list[Shape]) -> set[int]:
    return {shape.rows for shape in shapes if not shape.prompts}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model: Path) -> list[tuple[int, ...]]:
    """Greedy, without graphs."""
    with Engine(config(model, overlap=False)) as engine:
        return [r.token_ids for r in engine.generate(FEW, PLAIN)]


def test_outputs_of_replayed_steps(model: Path, captured: list[Shape], expected: list[tuple[int, ...]]) -> None:
    """Alone and in company, of many lengths, with preemption as pages are few, next to rows that draw at random."""
    with Engine(config(model, kv_tokens=24, max_batch_tokens=8)) as engine:
        assert [r.token_ids for r in generate_together(engine, FEW, PLAIN)] == expected
        assert len(decode_rows_of(captured)) > 1 and any(shape.prompts for shape in captured)
        for params in (SEEDED, CUT):
            [alone] = engine.generate(FEW[:1], params)
            crowd = generate_together(engine, FEW, params)
            assert crowd[0].token_ids == alone.token_ids and len(crowd[0].logprobs) == len(alone.logprobs)
        replayed = len(captured)
        mixed = generate_together(engine, FEW, [replace(PLAIN, prompt_logprobs=0), *[PLAIN] * (len(FEW) - 1)])
        assert [r.token_ids for r in mixed] == expected, "steps that score a prompt run eagerly, between graphs"
        assert 0 < len(captured) - replayed < engine.stats().steps
        assert engine.stats().failures == 0 and engine.stats().preemptions > 0
        engine.check_idle()


def test_drafts(
    model: Path, captured: list[Shape], expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of several tokens, alone and next to prompts, with parameters in the graph and beyond it."""
    options = dict(max_batch_tokens=16, max_running=3)
    with Engine(config(model, **options)) as engine:
        plain = [[r.token_ids for r in generate_together(engine, FEW, how)] for how in (PLAIN, SEEDED, CUT)]
    assert plain[0] == expected
    Toy([[*prompt, *tokens] for each in plain for prompt, tokens in zip(FEW, each, strict=True)], 0.7).use(monkeypatch)
    captured.clear()
    with Engine(config(model, speculative="ngram", **options)) as engine:
        for how, tokens in zip((PLAIN, SEEDED, CUT), plain, strict=True):
            assert [r.token_ids for r in generate_together(engine, FEW, how)] == tokens
        stats = engine.stats()
        assert stats.failures == 0 and len(captured) == stats.steps, "every step is a graph's"
        assert 0 < sum(stats.accepted) < sum(stats.drafted) and max(decode_rows_of(captured)) > 3
        engine.check_idle()


def drafting(folder: Path, source: str) -> dict[str, Any]:
    """Make a small model in a folder, with a source of drafts. Returns its options."""
    byte_model(folder)
    if source == "mtp":
        add_draft_layer(folder)
        return dict(speculative="mtp")
    if source == "draft":
        return dict(speculative="draft", draft_model=folder)
    make_head(folder / "head", folder)
    return dict(speculative="eagle3", draft_model=folder / "head")


@pytest.mark.parametrize("pauses", [False, True])
@pytest.mark.parametrize(
    "source", ["mtp", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("eagle3", "draft"))]
)
def test_drafts_of_ranks(
    source: str, pauses: bool, captured: list[Shape], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts are the same as behind recorded steps on CPUs, after prompts in chunks, accepted and rejected drafts."""
    monkeypatch.setattr(drafting_module, "StepPrices", FixedPrices)
    monkeypatch.setattr(FixedPrices, "value", Price(50.0, 50.0) if pauses else Price(0.0, -1e-3))
    monkeypatch.setattr(Speculation, "pause", 6)
    monkeypatch.setattr(drafting_module, "PROBED", 1e9)  # however much drafts cost
    options, found = dict(max_batch_tokens=8, max_running=3, **drafting(tmp_path, source)), []
    asked = [FEW[0][:7], FEW[1][:1], *FEW[2:]]  # graphs have the row of the second one first
    for captures in (False, True):
        with drafts_noted(monkeypatch) as noted, Engine(config(tmp_path, cuda_graphs=captures, **options)) as engine:
            outputs = [
                result.token_ids
                for how in (replace(PLAIN, max_tokens=12), SEEDED)
                for result in (*engine.generate(asked[:1], how), *generate_together(engine, asked, how))
            ]
            assert engine.stats().failures == 0 and engine.speculation and engine.speculation.drafted[0]
            engine.check_idle()
        found.append((outputs, noted[:]))
    assert captured and any(shape.prompts for shape in captured)
    assert found[0] == found[1] and len(found[0][1]) > 6


FEW_HEADS = dict(
    num_hidden_layers=2,
    layer_types=["linear_attention", "full_attention"],
    linear_num_key_heads=1,
    linear_num_value_heads=2,
)
"""The interpreter takes long for each."""
FAMILIES: dict[str, Callable[[Path], Any]] = {
    "latents, windows, states": small_hybrid,
    "windows and sinks": lambda directory: small_gpt_oss(directory, seed=3, **SIZES),
    "gated delta rule": lambda directory: small_qwen35(directory, seed=3, **SIZES | FEW_HEADS),
}


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.nightly] * (name == "gated delta rule")) for name in FAMILIES]
)
def test_caches_of_every_kind(family: str, captured: list[Shape], tmp_path: Path) -> None:
    """Prompts are cut at pages' borders, where states are kept for others; the second time they go on from there."""
    FAMILIES[family](tmp_path)
    byte_tokenizer(tmp_path)
    options, asked, params = dict(plugins=(PLUGIN,)), FEW[1:], replace(PLAIN, max_tokens=4)
    with Engine(config(tmp_path, cuda_graphs=False, **options)) as engine:
        expected = [r.token_ids for r in engine.generate(asked, params)]
    assert len({t for tokens in expected for t in tokens}) > 6, "answers that hardly differ would show little"
    assert not captured
    with Engine(config(tmp_path, **options)) as engine:
        cold, warm = engine.generate(asked, params), engine.generate(asked, params)
        assert [r.token_ids for r in cold] == [r.token_ids for r in warm] == expected
        assert sum(r.cached_tokens for r in warm) > sum(r.cached_tokens for r in cold)
        assert engine.generate(asked[:1], params)[0].token_ids == expected[0]
        assert {1, 4} <= decode_rows_of(captured), "of several capacities"
        prompts = any(shape.prompts for shape in captured)
        assert prompts != (family == "latents, windows, states"), "the plugin's states need to know the prompts"
        assert engine.stats().failures == 0
        engine.check_idle()


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize(
    "family, live, groups",
    [("qwen3_moe", True, 1), pytest.param("qwen3_moe", False, 1, marks=pytest.mark.nightly)]
    + [pytest.param("deepseek_v2", live, 1, marks=pytest.mark.nightly) for live in (True, False)]
    + [pytest.param("qwen3_moe", True, 2, marks=pytest.mark.nightly)],
)
def test_sharded_tokens(
    family: str, live: bool, groups: int, captured: list[Shape], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode context parallelism: the table's pages stand for a page of either rank; attention makes them its own.

    Prompts that see few tokens gather them, others are merged. live: whether transports take counts on the device,
    without which all are merged. groups: of data parallelism; each decides by its own prompts.
    """
    sizes = dict(vocab_size=257, max_position_embeddings=256, num_hidden_layers=1 + (family == "deepseek_v2"))
    small_model(family, 2 * groups, tmp_path, seed=3, num_key_value_heads=4 if family == "deepseek_v2" else 1, **sizes)
    byte_tokenizer(tmp_path)
    few = replace(PLAIN, max_tokens=2)
    with Engine(config(tmp_path, cuda_graphs=False)) as engine:
        expected = [r.token_ids for r in engine.generate(FEW[:3], few)]
    assert not captured
    gathered, expanded, find, attend = list[bool](), list[bool](), BlockPrices._find, CapturedPrompts.attend

    def few_are_gathered(self: BlockPrices, value: Any, *step: Any) -> Any:
        if not isinstance(value, Prompt):
            return find(self, value, *step)
        name = "merge" if value.seen > 9 else "gather"
        return next(plan for plan in self.options(value, *step) if plan.recipe.name == name)

    def watched(prompts: CapturedPrompts, *layer: Any) -> Any:
        gathered.append(prompts._tokens is not None and bool(prompts._tokens.own))
        expansion = prompts._tokens and prompts._tokens.plan.prompts.expansion
        expanded.append(bool(expansion) and bool((expansion.bases >= 0).any()))
        return attend(prompts, *layer)

    def transports(world: ReferenceWorld, make: Any = ReferenceWorld.transports) -> list[ReferenceTransport]:
        return [LiveReference(t) if live else t for t in make(world)]

    monkeypatch.setattr(BlockPrices, "_find", few_are_gathered)
    monkeypatch.setattr(CapturedPrompts, "attend", watched)
    monkeypatch.setattr(ReferenceWorld, "transports", transports)
    monkeypatch.setattr(worker, "attention_backend", lambda *_, **__: replace(TRITON, device="any"))
    layout = dict(attn_dp=groups, attn_tp=2, ep=groups, moe_tp=2)
    with Engine(config(tmp_path, dcp=2, dcp_interleave=2, **layout)) as engine:
        assert [r.token_ids for r in engine.generate(FEW[:3], few)] == expected
        assert decode_rows_of(captured) and any(shape.prompts for shape in captured)
        assert {*gathered} == {False, live} and any(expanded) == (live and family == "deepseek_v2")
        assert engine.stats().failures == 0
        engine.check_idle()


@pytest.mark.usefixtures("ranks")
def test_sharded_tokens_are_measured_as_graphs_have_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes to measure have as many tokens as may be gathered, next to the steps without prompts in graphs."""
    sizes = dict(vocab_size=257, max_position_embeddings=256, num_hidden_layers=1, num_key_value_heads=1)
    small_config("qwen3_moe", 2, **sizes).save_pretrained(tmp_path)
    of_ranks = dict(
        attn_tp=2, moe_tp=2, dcp=2, load_format="dummy", max_running=2, max_batch_tokens=4, max_model_len=32
    )
    made = config(tmp_path, **of_ranks)
    model, seen, make = made.read_model(), list[tuple[bool, int]](), CapturedPrompts.__init__

    def watched(prompts: CapturedPrompts, local: Any, group: Any, batch: Any, pages: Any, *limits: Any) -> None:
        make(prompts, local, group, batch, pages, *limits)
        seen.append((batch.spans is None, len(prompts._tokens.slots)))

    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name, value in (("memory_allocated", 0), ("max_memory_allocated", 9), ("mem_get_info", (300, 400))):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(CapturedPrompts, "__init__", watched)

    def rank_main(transport: Any) -> None:
        weights = dummy_model(model, made.mesh, transport.rank)

        def runner_of(groups: Any) -> runner.ModelRunner:
            among = [LiveReference(transport)], groups, made.page_size
            return runner.ModelRunner(weights, made.mesh, transport.rank, *among, attention=TRITON)

        measure(runner_of, CacheNeed(made, cached_layers(weights), model.dtype), model)

    monkeypatch.setattr(ContextGroup, "prefill", lambda *_: "gather")
    run_world(2, rank_main)
    assert seen == [(True, 2 * 32 // 2)] * 2


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(dict(attn_dp=2, ep=2), id="2x1"),
        pytest.param(dict(attn_dp=2, attn_tp=2, ep=4), id="2x2", marks=pytest.mark.nightly),
        pytest.param(dict(attn_dp=2, attn_tp=2, ep=4, nnodes=2), id="2x2 over hosts", marks=pytest.mark.nightly),
    ],
)
def test_groups_that_exchange_equal_rows(layout: dict[str, int], captured: list[Shape], tmp_path: Path) -> None:
    """Groups with unequal numbers of rows, or none, exchange over a transport without counts on the device."""
    small_model("qwen3_moe", 4, tmp_path, seed=3, vocab_size=257, max_position_embeddings=256, num_hidden_layers=1)
    byte_tokenizer(tmp_path)
    with Engine(config(tmp_path, cuda_graphs=False)) as engine:
        expected = [r.token_ids for r in engine.generate(FEW[:3], PLAIN)]
    with Engine(config(tmp_path, **layout)) as engine:
        assert [r.token_ids for r in engine.generate(FEW[:3], PLAIN)] == expected
        assert engine.generate(FEW[2:3], PLAIN)[0].token_ids == expected[2]
        assert {1, 2} <= decode_rows_of(captured) and any(s.prompts for s in captured) and engine.stats().failures == 0
        engine.check_idle()


@pytest.mark.usefixtures("ranks")
def test_a_vocabulary_that_is_split(captured: list[Shape], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens equal one rank's: greedy and by temperature, for which no logits travel, and with all other parameters,
    for which the logits of the asking rows do.
    """
    small_model("qwen3", 2, tmp_path, seed=3, vocab_size=257, max_position_embeddings=256, num_hidden_layers=1)
    byte_tokenizer(tmp_path)
    warm = SamplingParams(max_tokens=3, temperature=1.5, seed=5, ignore_eos=True)
    plain = [replace(PLAIN, max_tokens=3), warm]
    mixed = [warm, replace(warm, top_k=9, logprobs=1), plain[0], replace(warm, min_p=0.3)]
    with Engine(config(tmp_path)) as engine:
        expected = [[r.token_ids for r in engine.generate(FEW[:2], params)] for params in plain]
        wanted = generate_together(engine, FEW, mixed)
    captured.clear()
    gathered: list[int] = []
    gather = SplitVocabulary.gather_logits

    def counted(split: SplitVocabulary, logits: torch.Tensor) -> torch.Tensor:
        gathered.append(len(logits))
        return gather(split, logits)

    with Engine(config(tmp_path, attn_tp=2, moe_tp=2, split_vocabulary="on")) as engine:
        with monkeypatch.context() as patched:
            patched.delattr(SplitVocabulary, "gather_logits")
            for params, tokens in zip(plain, expected, strict=True):
                assert [r.token_ids for r in engine.generate(FEW[:2], params)] == tokens
            patched.undo()
            patched.setattr(SplitVocabulary, "gather_logits", counted)
            found = generate_together(engine, FEW, mixed)
        for ours, theirs, params in zip(found, wanted, mixed, strict=True):
            assert ours.token_ids == theirs.token_ids and len(ours.logprobs) == len(theirs.logprobs), params
            for value, truth in zip(ours.logprobs, theirs.logprobs, strict=True):
                assert value.logprob == pytest.approx(truth.logprob, abs=1e-4)
        assert len(found[1].logprobs) == 3 and 2 in gathered, "a step of four rows gathers the two that ask"
        assert captured and engine.stats().failures == 0
        engine.check_idle()


def test_a_stale_last_token_is_seen(model: Path, captured: list[Shape], monkeypatch: pytest.MonkeyPatch) -> None:
    lose_last_tokens(monkeypatch)
    found = "was stepped without a last token"
    with Engine(config(model, max_restarts=0)) as engine, pytest.raises(EngineError, match=found):
        engine.generate(FEW[:2], PLAIN)
