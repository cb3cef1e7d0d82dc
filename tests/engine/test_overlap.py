"""Steps that are sent before the tokens of the one before are back: the same outputs, and nothing is waited for."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from engine.conftest import WAIT_S, generate_together, lose_last_tokens
from engine.fake import expected_output
from engine.stub import Client, World
from engine.test_engine import GREEDY, config, prompts
from engine.test_scheduler import make
from weft.engine.config.config import EngineError
from weft.engine.controller.engine import Engine
from weft.engine.kv.cache_spec import Rule
from weft.engine.kv.tokens import token_bytes
from weft.engine.messages.rank_messages import Chunk, GroupRows, Join, Sampling
from weft.engine.messages.request import SamplingParams
from weft.engine.worker.row_table import NO_TOKEN, RowTable
from weft.engine.worker.sampler import Sampler
from weft.engine.worker.worker import Worker

SEEDED = SamplingParams(max_tokens=12, temperature=9.0, top_p=0.95, min_p=0.001, seed=7, ignore_eos=True, logprobs=1)
ENDS = SamplingParams(
    max_tokens=30, min_tokens=4, temperature=9.0, top_k=40, seed=3, stop_token_ids=tuple(range(0, 257, 3))
)
READS = replace(GREEDY, repetition_penalty=1.3, presence_penalty=0.5, bad_words=((248,), (75, 248)))


@pytest.fixture
def world(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(model_dir, monkeypatch)


def until(holds: Any) -> None:
    for _ in range(int(WAIT_S / 0.005)):
        if holds():
            return
        threading.Event().wait(0.005)
    raise AssertionError("a test waited too long")


@pytest.mark.parametrize("overlap", [True, False])
def test_a_prompt_is_cut_while_another_group_decodes(world: World, overlap: bool) -> None:
    with world.engine(attn_dp=2, max_batch_tokens=64, mixed_batch_tokens=8, overlap=overlap) as engine:
        world.go.clear()
        client = Client(engine)
        client.ask([1, 2], 9)
        until(lambda: len(world.steps) == 1 + overlap)
        client.ask(list(range(100)), 2)
        world.go.set()
        client.wait(2)
        client.check_whole(1, 2)
    counts = [tuple(group.count for group in step.groups) for step in world.steps]
    mixed, alone = ([rows for decoding, rows in counts if decoding == n and rows > 1] for n in (1, 0))
    assert set(mixed) == {8} and max(alone) > 8 and sum(mixed) + sum(alone) == 100, counts


@pytest.mark.parametrize("overlap", [True, False])
def test_one_step_is_sent_ahead_and_not_more(world: World, overlap: bool) -> None:
    with world.engine(overlap=overlap) as engine:
        world.go.clear()
        client = Client(engine)
        client.ask([1, 2], 6)
        until(lambda: len(world.steps) == 1 + overlap)
        assert world.run == 0
        if overlap:
            second = world.steps[1].groups[0].parts[0]
            assert second.tokens is None and second.context == 2, "it runs the token that nobody has seen yet"
        world.go.set()
        client.wait(1)
        client.check_whole(0, 6)
        assert len(world.steps) == 6, "an end by length is known beforehand"
        engine.check_idle()


def test_an_end_by_a_token_is_noticed_a_step_late_and_its_surplus_row_dropped(world: World) -> None:
    tokens = expected_output([1, 2], 6)
    end = next(i for i, token in enumerate(tokens) if token not in tokens[:i] and i > 1)
    with world.engine() as engine:
        client, other = Client(engine), Client(engine)
        heard = client.callback_for(0)
        world.go.clear()
        engine.submit([1, 2], SamplingParams(max_tokens=6, temperature=0, stop_token_ids=(tokens[end],)), heard)
        other.ask([3, 4, 5], 9)
        world.go.set()
        client.wait(1)
        other.wait(1)
        assert client.tokens(0) == tokens[: end + 1] and client.last(0).finish_reason == "stop"
        other.check_whole(0, 9)
        rows = sum(p.context >= 2 for step in world.steps for p in step.groups[0].parts if p.request == 1)
        assert rows == end + 1, "a row for every token but the first, the last one's among them"
        assert engine.stats().generated_tokens == end + 1 + 9
        engine.check_idle()


def test_a_row_and_its_pages_go_to_another_while_a_step_in_flight_names_them(world: World) -> None:
    """A request is cancelled while a step with its row runs: the next step gives its only row and pages to another."""
    with world.engine(max_running=1, kv_tokens=16, prefix_cache=False) as engine:
        world.go.clear()
        first, second = Client(engine), Client(engine)
        first.ask([1] * 10, 6)
        until(lambda: len(world.steps) == 2)
        second.ask([2] * 9, 5)
        engine.cancel(first.at[0])
        world.go.set()
        first.wait(1)
        second.wait(1)
        second.check_whole(0, 5)
        joined = next(i for i, step in enumerate(world.steps) if step.groups[0].parts[0].request == second.at[0])
        named = [set(step.groups[0].parts[0].tables[0]) for step in world.steps]
        assert named[joined] & named[joined - 1] and world.steps[joined - 1].groups[0].parts[0].request == first.at[0]
        engine.check_idle()


def test_a_token_for_a_sequence_that_was_preempted_and_came_back_meanwhile_is_dropped() -> None:
    """It has no pages of the step that sampled the token: it reads everything again, and samples the same once more."""
    driver = make(ahead=True, num_pages=32)
    sequence = driver.add(1, [1, 2, 3], 4)
    driver.step()
    assert sequence.pending == 1
    driver.scheduler._preempt(sequence)
    parts = driver.step()
    assert (
        [(p.context, p.rows) for p in parts.parts] == [(0, 3)] and sequence.pending == 1 and sequence.output_tokens == 0
    )
    driver.finish_all()
    assert driver.outputs[1] == expected_output([1, 2, 3], 4)
    driver.scheduler.check_idle()


def test_a_row_forgets_the_token_of_whom_it_belonged_to() -> None:
    table = RowTable(3, [Rule()], 4, torch.device("cpu"))
    sampler, greedy = Sampler(table), Sampling(temperature=0.0)
    logits = torch.eye(9)[[5, 7]]
    first = GroupRows(chunks=(Chunk(2, token_bytes([1, 2]), True), Chunk(0, token_bytes([1]), True)))
    first = structs.replace(first, joins=tuple(Join(row, 1, 0, ((row,),), greedy) for row in (2, 0)))
    table.apply(first)
    table.forget_tokens(first)
    assert sampler.sample(first, logits).tolist() == [5, 7] and table.last_token.tolist() == [7, NO_TOKEN, 5]
    second = GroupRows(joins=(Join(2, 2, 3, ((1,),), greedy),))
    table.apply(second)
    table.forget_tokens(second)
    decoding = GroupRows((0, 2))
    batch = table.batch(decoding)
    assert batch.tokens.tolist() == [7, 0] and batch.positions.tolist() == [0, 3]
    assert sampler.sample(decoding, logits).tolist() == [5, NO_TOKEN] and table.last_token.tolist() == [
        5,
        NO_TOKEN,
        NO_TOKEN,
    ]


@pytest.mark.usefixtures("planned_once")
@pytest.mark.parametrize("params", [GREEDY, SEEDED, ENDS, READS], ids=["greedy", "seeded", "ends", "reads"])
def test_outputs_are_those_of_steps_one_by_one(model_dir: Path, params: SamplingParams) -> None:
    """Alone and in company, in caches of every request's size and in one that is too small for all."""
    layout = dict(attn_dp=2, ep=2)
    with Engine(config(model_dir, overlap=False)) as engine:
        expected = generate_together(engine, prompts(), params)
    for changes in (layout, dict(kv_tokens=64, max_batch_tokens=8), dict(attn_tp=2, ep=2)):
        with Engine(config(model_dir, **changes)) as engine:
            got = generate_together(engine, prompts(), params)
            alone = engine.generate(prompts()[2:3], params)
            assert [r.token_ids for r in got] == [r.token_ids for r in expected]
            assert [r.finish_reason for r in got] == [r.finish_reason for r in expected]
            assert alone[0].token_ids == expected[2].token_ids
            assert (engine.stats().stalls > 0) == (params is READS)
            assert (engine.stats().preemptions > 0) == ("kv_tokens" in changes)
            assert engine.stats().failures == 0
            engine.check_idle()


def test_rows_that_need_their_token_sit_out_beside_rows_that_do_not(model_dir: Path) -> None:
    with Engine(config(model_dir, overlap=False)) as engine:
        expected = [
            engine.generate([prompt], params)[0].token_ids for prompt in prompts(3) for params in (READS, GREEDY)
        ]
    with Engine(config(model_dir)) as engine:
        results: dict[int, list[int]] = {}
        done: list[threading.Event] = []
        asked = []
        for at, (prompt, params) in enumerate((p, params) for p in prompts(3) for params in (READS, GREEDY)):
            results[at], event = [], threading.Event()
            done.append(event)

            def callback(output: Any, at: int = at, event: threading.Event = event) -> None:
                increment = output.take()
                results[at].extend(increment.token_ids)
                if increment.finish_reason:
                    event.set()

            asked.append((prompt, params, callback))
        engine.submit_all(asked)
        assert all(event.wait(WAIT_S) for event in done)
        assert [tuple(results[at]) for at in range(6)] == expected and engine.stats().stalls > 0


def test_a_row_without_its_last_token_is_found_out(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lose_last_tokens(monkeypatch)
    found = "was stepped without a last token"
    with Engine(config(model_dir, max_restarts=0)) as engine, pytest.raises(EngineError, match=found):
        engine.generate(prompts()[:2], GREEDY)


def test_ranks_of_a_group_that_sample_other_tokens_are_found_out(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Worker.step

    def off(worker: Worker, message: Any) -> Any:
        if message.number == 4 and worker.rank == 1:
            sample = worker.sampler.sample
            worker.sampler.sample = lambda *given: sample(*given) ^ 1  # type: ignore[method-assign]
        return step(worker, message)

    monkeypatch.setattr(Worker, "step", off)
    diverged = r"ranks diverge: rank 1 ran step 4 .* with tokens"
    with (
        Engine(config(model_dir, max_restarts=0, attn_tp=2, ep=2, cuda_graphs=False)) as engine,
        pytest.raises(EngineError, match=diverged),
    ):
        engine.generate(prompts()[:2], GREEDY)
