"""Inputs of graphs of steps with prompts against an eager step's: the same rows, the same logits."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import small_model

from engine.conftest import byte_tokenizer
from engine.test_hybrids import SIZES
from engine.test_rank_step import CountedOps
from gpu import definitions
from models.oss import small_gpt_oss
from models.qwen35 import small_qwen35
from models.stepfun import small_step
from weft.comm.reference import ReferenceWorld
from weft.engine.attention.backend_registry import TORCH, BackendEntry
from weft.engine.attention.caches import Caches
from weft.engine.attention.forward_batch import PageTables, StateSlots
from weft.engine.attention.sdpa import TorchPrompts
from weft.engine.config.config import EngineConfig
from weft.engine.kv.cache_spec import CacheGroup, PagedKV, Recurrent, Rule, Spec, Window, rule
from weft.engine.kv.tokens import token_array, token_bytes
from weft.engine.messages.rank_messages import PARAMETERS, Chunk, Entries, GroupRows, Join, Result, Sampling, Step
from weft.engine.messages.request import SamplingParams, Sequence
from weft.engine.scheduler.scheduler import make_schedulers
from weft.engine.worker.device_rows import DeviceRows
from weft.engine.worker.graph_inputs import PromptInputs, Shape, captures_prompts, decode_capacities, prompt_capacities
from weft.engine.worker.row_table import NO_TOKEN, RowTable
from weft.engine.worker.worker import Worker
from weft.planner.cost import costs
from weft.planner.prices import BlockPrices
from weft.planner.recipes import Prompt
from weft.planner.spec import Mesh, Rows
from weft.stream.block_exchanges import BlockExchanges
from weft.stream.group import context_group
from weft.stream.interleave import Interleave
from weft.stream.step_rows import PaddedRows
from weft.stream.stream import Stream

MAX_ROWS, GREEDY = 24, SamplingParams(temperature=0.0)
MODELS: dict[str, Callable[[Path], Any]] = {
    "windows and sinks": lambda directory: small_gpt_oss(directory, seed=3, **SIZES),
    "windows and all tokens": lambda directory: small_step(directory, seed=3, **SIZES),
    "gated delta rule": lambda directory: small_qwen35(directory, seed=3, **SIZES),
    "latents": lambda directory: small_model(
        "deepseek_v2", 2, directory, seed=3, vocab_size=257, max_position_embeddings=256, num_hidden_layers=2
    ),
}


def test_a_graph_is_never_much_larger_than_its_step() -> None:
    assert prompt_capacities(16) == [16] and prompt_capacities(100) == [64, 100]
    assert prompt_capacities(2048) == [64, 128, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048]
    assert prompt_capacities(5000)[-3:] == [3584, 4096, 5000]
    for rows in range(513, 5000, 7):
        capacity = next(n for n in prompt_capacities(5000) if n >= rows)
        assert (capacity - rows) / capacity < 0.25
    assert decode_capacities(6) == [1, 2, 4, 6] and decode_capacities(150)[-3:] == [64, 128, 150]
    assert decode_capacities(64) == [1, 2, 4, 8, 16, 32, 64] and decode_capacities(300)[-3:] == [192, 256, 300]
    assert decode_capacities(1024)[6:] == [64, 128, 192, 256, 384, 512, 768, 1024]


def test_which_prompts_are_captured() -> None:
    paged, window, state = PagedKV(1, 8), Window(8, 1, 8), Recurrent(((2, 2),))

    class Captured(TorchPrompts):
        captures_sharded = True

    def caches(*specs: Spec, backend: BackendEntry = TORCH, dcp: int = 1) -> Caches:
        mesh = Mesh(1, dcp, 1, dcp, dcp)
        group = context_group(Interleave(dcp, 4, 4), BlockExchanges(mesh, 0, {}, BlockPrices(mesh, [])))
        groups = [CacheGroup(r, 1) for r in dict.fromkeys(map(rule, specs))]
        layers = {str(i): spec for i, spec in enumerate(specs)}
        return Caches(layers, groups, 4 * dcp, torch.float32, "cpu", backend.make, group)

    assert captures_prompts(caches(paged, window, replace(state, by_starts=True)), {})
    assert not captures_prompts(caches(paged, state), {})
    sharded = caches(paged, window, backend=replace(TORCH, prompts=Captured), dcp=2)
    assert captures_prompts(sharded, {Prompt: "auto"}) and captures_prompts(sharded, {Prompt: "merge"})
    assert not captures_prompts(sharded, {Prompt: "gather"}), "as many tokens as a step may see"
    assert not captures_prompts(caches(paged, dcp=2), {}), "a backend that cannot"


class Ranks:
    """Two that get the same steps: one runs them eagerly, the other as a graph with room for more would."""

    def __init__(self, model: Path, **sizes: int):
        values = dict(page_size=4, kv_tokens=160, max_running=6, max_batch_tokens=MAX_ROWS, cuda_graphs=False) | sizes
        self.config = EngineConfig(model=model, executor="thread", **values)
        self.eager, self.roomy = (
            Worker(self.config, [ReferenceWorld(1).transports()[0]], costs("cpu"), lambda message: None)
            for _ in range(2)
        )
        for _, backend in self.roomy.runner.caches.paged:
            backend.cache.keys.fill_(torch.nan), backend.cache.values.fill_(torch.nan)
        for states in (states for _, kept in self.roomy.runner.caches.states for states in kept.states):
            states.fill_(torch.nan)
        self.rows = DeviceRows(self.roomy.table, 40)
        self.rows.entries.fill_(1 << 20)  # a page that was never sent is none
        self.inputs = PromptInputs(self.rows, self.roomy.runner.rules, self.config.page_size, MAX_ROWS)
        self.inputs._copied.fill_(1 << 20)

    @torch.inference_mode()
    def step(self, number: int, group_rows: GroupRows, shape: Shape) -> tuple[int, ...]:
        """Run it on both, compare their inputs and results, and return the sampled tokens."""
        eager, ours = self.eager, self.roomy
        logits: list[torch.Tensor] = []
        forward = eager.runner.forward
        eager.runner.forward = lambda *given: logits.append(forward(*given)) or logits[0]  # type: ignore[method-assign, func-returns-value]
        result: Result = eager.step(Step(number, (group_rows,)))()
        eager.runner.forward = forward  # type: ignore[method-assign]
        ours.table.apply(group_rows)
        self.rows.apply(group_rows)
        wanted = ours.table.batch(group_rows)
        assert self.inputs.put(group_rows) == len(group_rows.sampled_rows)
        counts = PaddedRows(Mesh(), 0, shape.rows, torch.device("cpu"))
        counts.fill((group_rows.count,))
        batch, sampled = self.inputs.batch(shape, counts.live(Rows.GROUP))
        self.compare(wanted, batch, group_rows)
        stream = Stream(ours.runner.planner.plan((shape.rows,)), ours.runner.transports, counts)
        found = ours.runner.model(stream, batch, ours.runner.caches.plan(batch))[: len(group_rows.sampled_rows)]
        if group_rows.sampled_rows:
            torch.testing.assert_close(found, logits[0], rtol=1e-4, atol=1e-4)
        live, tokens = int(sampled.live), torch.zeros(8, dtype=torch.int32)
        assert live == len(group_rows.sampled_rows) and sampled.rows[:live].tolist() == group_rows.sampled_rows
        best_tokens = torch.zeros(1, shape.sampled, 1, 2)
        best_tokens[0, :live, 0, 1] = found.argmax(-1).float()
        decode_count, rows = int(sampled.decode_count), self.rows
        state = rows.last_token, rows.length, tokens, rows.steps, torch.zeros(2, 8, dtype=torch.int32)
        definitions.step_out(sampled.rows, live, decode_count, best_tokens, sampled.lengths, *state)
        ours.table.advance(group_rows)
        for at, row in ours.table.rows.items():
            assert int(rows.length[at]) == row.length
        assert tuple(tokens[:live].tolist()) == result.tokens
        return result.tokens

    def compare(self, wanted: Any, found: Any, group_rows: GroupRows) -> None:
        """Sequences come in another order: sequences of one row first."""
        live, counts = (
            group_rows.count,
            [count for _, count in group_rows.decode_each] + [chunk.count for chunk in group_rows.chunks],
        )
        order = sorted(range(len(counts)), key=lambda at: counts[at] > 1)
        rows = torch.arange(live).split(counts)
        at = torch.cat([rows[i] for i in order])
        for name in ("tokens", "positions"):
            assert torch.equal(getattr(found, name)[:live], getattr(wanted, name)[at]), name
            assert not getattr(found, name)[live:].any()
        assert torch.equal(found.lengths[: len(order)], wanted.lengths[order]) and not found.lengths[len(order) :].any()
        assert found.starts.diff()[: len(order)].tolist() == [counts[i] for i in order] and found.starts[-1] == live
        assert torch.equal(at[found.sample_rows[: len(group_rows.sampled_rows)]], wanted.sample_rows)
        assert found.spans is None and len(found.sample_rows) == len(found.lengths)
        for ours, theirs in zip(found.tables, wanted.tables, strict=True):
            if isinstance(ours, StateSlots):
                kept = ours.after[: len(order)], theirs.after[order]
                assert torch.equal(*kept) and torch.equal(ours.before[: len(order)], theirs.before[order])
                assert (ours.after[len(order) :] == -1).all()
                continue
            assert isinstance(ours, PageTables) and (ours.slots[live:] == -1).all()
            assert torch.equal(ours.slots[:live], theirs.slots[at])
            width = theirs.pages.shape[1]
            known = (torch.arange(width) < -(-wanted.lengths[order] // self.config.page_size)[:, None]).bool()
            assert torch.equal(ours.pages[: len(order), :width][known], theirs.pages[order][known])


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_eager_steps(name: str, tmp_path: Path) -> None:
    """Ragged prompts come and go, some with prefixes that are cached; the larger graph serves every step, the smaller
    those that fit."""
    MODELS[name](tmp_path)
    byte_tokenizer(tmp_path)
    ranks = Ranks(tmp_path)
    [scheduler] = make_schedulers(ranks.config, ranks.eager.groups)
    rng, seen, cached = random.Random(7), Counter[str](), 0
    shared = [rng.randrange(1, 250) for _ in range(12)]
    left, number = 16, 0
    while left or scheduler.running or scheduler.waiting:
        for _ in range(min(left, rng.choice([0, 0, 0, 1, 1, 3]))):
            prompt = [rng.randrange(1, 250) for _ in range(rng.choice([1, 1, 2, 5, 9, 30]))]
            prompt = (shared[: rng.choice([4, 8, 12])] if rng.random() < 0.4 else []) + prompt
            left, most = left - 1, rng.randrange(1, 8)
            scheduler.add(Sequence(left, token_array(prompt), len(prompt), GREEDY, 3, most, frozenset()))
        scheduled = scheduler.schedule()
        group_rows = scheduled.rows
        if not group_rows.count:
            continue
        cached += sum(join.context for join in group_rows.joins)
        lengths = [chunk.count for chunk in group_rows.chunks]
        seen["decode rows"] += bool(group_rows.decode_rows) and not lengths
        seen["prompts"] += not group_rows.decode_rows
        seen["decode rows and a prompt"] += bool(group_rows.decode_rows) and len(lengths) == 1
        seen["a row behind a prompt"] += any(n == 1 for n in lengths[1:]) and lengths[0] > 1
        seen["nothing sampled"] += not all(chunk.samples for chunk in group_rows.chunks)
        small = group_rows.count <= 8 and rng.random() < 0.7
        number += 1
        tokens = ranks.step(number, group_rows, Shape(8, 6, True) if small else Shape(MAX_ROWS, 6, True))
        seen["small"] += small
        for sequence, token, _ in scheduled.take_tokens(Result(0, None, tokens)):  # type: ignore[arg-type]
            sequence.tokens.append(token)
            if len(sequence.tokens) == sequence.prompt_tokens + sequence.max_tokens:
                scheduler.finish(sequence)
    scheduler.check_idle()
    assert cached and min(seen.values()) > 0 and len(seen) == 6, dict(seen)


def test_many_that_join_at_once_cost_the_host_no_more_operators_than_one() -> None:
    rules = [Rule(), Rule(state=True)]
    samplings = [Sampling(temperature=0.5 * row, top_k=row, min_p=0.25 * row, seed=2**62 - 1 - row) for row in range(4)]
    joins = [Join(row, row, 3 + row, ((row, 9), (7, 8)), how) for row, how in enumerate(samplings)]
    chunk = Chunk(3, token_bytes([5, 6]), True)
    counts = []
    for joined in (joins[3:], joins):
        table = RowTable(5, rules, 4, torch.device("cpu"))
        rows = DeviceRows(table, 6)
        table.last_token.fill_(77)
        news = GroupRows(
            chunks=(chunk,), joins=tuple(joined), entries=(Entries(3, 0, 2, (11, 12)), Entries(3, 1, 0, (4,)))
        )
        with CountedOps() as counted:
            table.apply(news)
            rows.apply(news)
        counts.append(counted.count)
        at = [join.row for join in joined]
        assert rows.length[at].tolist() == [join.context for join in joined]
        assert rows.seed[at].tolist() == [join.sampling.seed for join in joined]
        for name in PARAMETERS:
            assert rows.parameters[name][at].tolist() == [getattr(join.sampling, name) for join in joined]
        assert rows.entries[3].tolist() == [3, 9, 11, 12, -1, -1, 4, 8]
        assert table.last_token.tolist() == [77 if row not in at else NO_TOKEN for row in range(5)]
        assert rows.length[4] == 0 and (rows.entries[4] == -1).all()
    assert counts[0] == counts[1]
