"""Ranks that fail: they start anew, and every request goes on as if nothing had been. And ends that are no fault."""

from __future__ import annotations

import logging
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from engine.conftest import WAIT_S
from engine.fake import expected_output
from engine.stub import Client, World
from engine.test_engine import GREEDY, config, prompts
from weft.engine.config.config import EngineError
from weft.engine.controller.engine import Engine
from weft.engine.controller.recovery import FaultWindow
from weft.engine.messages.request import SamplingParams
from weft.engine.worker.worker import Worker

pytestmark = pytest.mark.usefixtures("planned_once")


@pytest.fixture
def world(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(model_dir, monkeypatch)


@pytest.mark.parametrize("seed", range(6))
def test_no_token_is_lost_or_sampled_twice_whenever_ranks_fail(world: World, seed: int) -> None:
    """Random prompts, lengths, cancels and failures, in a cache that is too small for all."""
    rng, faults = random.Random(seed), random.Random(seed + 100)
    left = faults.randrange(1, 9)

    def fail(executor: Any, when: str) -> bool:
        """Fail after each number of starts and halves of steps: often enough, however requests fall into steps."""
        nonlocal left
        left -= when != "idle"
        if left:
            return False
        left = faults.randrange(1, 9)
        return True

    world.fail = fail
    while True:
        try:
            engine = world.engine(kv_tokens=64, attn_dp=2, ep=2, max_running=3, max_restarts=500, restart_backoff_s=0.0)
            break
        except EngineError:
            continue
    with engine:
        client, lengths = Client(engine), {}
        for _ in range(25):
            prompt = [7] * rng.randrange(9) + [rng.randrange(50) for _ in range(rng.randrange(1, 12))]
            length = rng.randrange(1, 20)
            lengths[client.ask(prompt, length)] = length
        cancelled = rng.sample(sorted(lengths), 5)
        for at in cancelled:
            engine.cancel(client.at[at])
        client.wait(25)
        for at, length in lengths.items():
            if at in cancelled and client.last(at).finish_reason == "abort":
                assert client.tokens(at) == expected_output(client.prompts[at], length)[: len(client.tokens(at))]
            else:
                client.check_whole(at, length)
        assert engine.stats().failures > 5 and engine.healthy
        world.fail = lambda executor, when: False
        engine.check_idle()


def test_ranks_that_fail_while_idle_start_anew(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.engine.controller.engine.IDLE_CHECK_S", 0.01)
    with world.engine() as engine:
        died = threading.Event()

        def once(executor: Any, when: str) -> bool:
            return when == "idle" and not died.is_set() and died.set() is None

        world.fail = once
        assert died.wait(WAIT_S)
        client = Client(engine)
        client.ask([1, 2], 3)
        client.wait(1)
        client.check_whole(0, 3)
        assert world.starts == 2 and engine.stats().failures == 1


def test_too_many_failures_end_in_one_report(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with world.engine(max_restarts=2, restart_backoff_s=0.0) as engine:
        world.go.clear()
        client = Client(engine)
        for _ in range(3):
            client.ask([1, 2], 3)
        world.fail = lambda executor, when: when == "before"
        world.go.set()
        client.wait(3)
        report = "gave up after 3 failures in 600 s (max_restarts=2): rank 1 was killed by signal 9 (3 times)"
        assert [client.last(at).finish_reason for at in range(3)] == ["error"] * 3
        assert client.last(0).error == report
        assert engine.wait(WAIT_S) and engine.state == "failed" and engine.error == report and not engine.healthy
        assert sum(r.getMessage() == f"the engine ends: {report}" for r in caplog.records) == 1
        with pytest.raises(EngineError, match="gave up"):
            client.ask([1, 2], 3)
    assert world.starts == 3 and world.closes >= 1


def test_failures_long_ago_do_not_count() -> None:
    now = [0.0]
    window = FaultWindow(2, 10.0, lambda: now[0])
    for second in (0, 5, 11, 16, 22):
        now[0] = second
        window.add("rank 1 was killed by signal 9")
    now[0] = 25
    with pytest.raises(EngineError, match=r"gave up after 3 failures in 10 s .*: rank 1 .* \(2 times\); rank 0 failed"):
        window.add("rank 0 failed")
    assert window.total == 6
    with pytest.raises(EngineError, match=r"^rank 5 failed$"):
        FaultWindow(0, 10.0).add("rank 5 failed")


def test_the_wait_doubles_until_a_step_succeeds() -> None:
    window = FaultWindow(100, 600.0, backoff_s=1.5)
    assert [window.add("x") for _ in range(9)] == [0, 1.5, 3, 6, 12, 24, 48, 60, 60]
    window.worked()
    assert [window.add("x") for _ in range(3)] == [0, 1.5, 3]
    assert all(window.add("x") <= 60 for _ in range(88)), "however many"
    assert [FaultWindow(9, 600.0).add("x")] == [0]


def test_ranks_that_fail_again_start_after_a_while(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Meanwhile requests come and go, and the engine can be closed."""
    caplog.set_level(logging.WARNING)
    engine = world.engine(max_restarts=9, restart_backoff_s=3600.0)
    world.fail = lambda executor, when: world.starts > 1 or when == "before"
    client = Client(engine)
    client.ask([1, 2], 3)
    while engine.stats().failures < 2:
        threading.Event().wait(0.01)
    client.ask([3, 4], 3)
    client.ask([5, 6], 3, timeout_s=0.0)
    engine.cancel(client.at[1])
    assert set(client.wait(2)) == {1, 2} and engine.state == "restarting"
    assert world.starts == 2, "the first restart comes at once, and the second not yet"
    engine.close()
    client.wait(1)
    assert client.last(0).finish_reason == "abort" and world.starts == 2
    said = [r.getMessage() for r in caplog.records if "ranks start anew" in r.getMessage()]
    assert [line.split(" ranks")[0].rpartition("; ")[2] for line in said] == ["in 0 s", "in 60 s"]


def test_while_ranks_start_anew_requests_come_and_go(world: World) -> None:
    with world.engine() as engine:
        failed = threading.Event()
        world.fail = lambda executor, when: when == "after" and not failed.is_set() and failed.set() is None
        world.may_start.clear()
        client = Client(engine)
        client.ask([1, 2], 3)
        assert failed.wait(WAIT_S)
        while engine.state != "restarting":
            threading.Event().wait(0.01)
        client.ask([3, 4], 3)
        client.ask([5, 6], 3)
        client.ask([7, 8], 3, timeout_s=0.0)
        with pytest.raises(EngineError, match="restarting"):
            engine.comm_report()
        engine.cancel(client.at[1])
        assert set(client.wait(2)) == {1, 3}, "cancelled and overdue ones end while the ranks are away"
        assert client.last(1).finish_reason == "abort" and client.last(3).finish_reason == "timeout"
        world.may_start.set()
        client.wait(2)
        client.check_whole(0, 3)
        client.check_whole(2, 3)
        assert engine.state == "serving"
        engine.check_idle()


@pytest.mark.parametrize("borne", [True, False])
def test_what_came_before_a_failure_is_heard_before_anything_else(world: World, borne: bool) -> None:
    """Callbacks are called for a step while the next one runs: also where that never does."""
    with world.engine(max_restarts=int(borne)) as engine:
        world.fail = lambda executor, when: when == "before" and world.run == 3
        world.may_start.clear()
        client = Client(engine)
        client.ask_together(([1, 2], 5), ([3, 4], 2))
        if borne:
            while engine.state != "restarting":
                threading.Event().wait(0.01)
            client.wait(1)
            client.check_whole(1, 2)
            assert client.tokens(0) == expected_output([1, 2], 5)[:2]
            world.may_start.set()
            client.wait(1)
            client.check_whole(0, 5)
        else:
            client.wait(2)
            client.check_whole(1, 2)
            assert client.tokens(0) == expected_output([1, 2], 5)[:2] and client.last(0).finish_reason == "error"


def test_an_engine_can_be_closed_while_its_ranks_start_anew(world: World) -> None:
    engine = world.engine()
    failed = threading.Event()
    world.fail = lambda executor, when: when == "before" and not failed.is_set() and failed.set() is None
    world.may_start.clear()
    client = Client(engine)
    client.ask([1, 2], 3)
    assert failed.wait(WAIT_S)
    engine.close()
    client.wait(1)
    assert client.last(0).finish_reason == "abort" and engine.state == "stopped"


def test_a_drain_lets_requests_end_and_takes_no_more(world: World) -> None:
    engine = world.engine()
    world.go.clear()
    client = Client(engine)
    for _ in range(3):
        client.ask([1, 2], 5)
    drained: list[int] = []
    thread = threading.Thread(target=lambda: drained.append(engine.drain(WAIT_S)))
    thread.start()
    while engine.state != "draining":
        threading.Event().wait(0.01)
    with pytest.raises(EngineError, match="shutting down"):
        client.ask([1, 2], 3)
    assert not engine.healthy
    world.go.set()
    thread.join(WAIT_S)
    assert drained == [0] and engine.state == "stopped"
    for at in client.wait(3):
        client.check_whole(at, 5)


def test_a_failure_during_a_drain_is_recovered_from(world: World) -> None:
    engine = world.engine()
    world.go.clear()
    client = Client(engine)
    client.ask([1, 2], 5)
    failed = threading.Event()
    world.fail = lambda executor, when: when == "after" and not failed.is_set() and failed.set() is None
    thread = threading.Thread(target=engine.drain, args=(WAIT_S,))
    thread.start()
    world.go.set()
    thread.join(WAIT_S)
    client.wait(1)
    client.check_whole(0, 5)
    assert engine.stats().failures == 1


def test_what_does_not_end_in_time_is_cut_short_also_in_a_step_that_hangs(world: World) -> None:
    engine = world.engine()
    world.go.clear()
    client = Client(engine)
    client.ask([1, 2], 5)
    client.ask([1, 2], 5)
    assert engine.drain(0.05) == 2
    client.wait(2)
    assert {client.last(at).finish_reason for at in (0, 1)} == {"abort"}
    assert client.last(0).error == "the engine was stopped before the completion ended"
    assert engine.stats().failures == 0
    engine.close()


@pytest.mark.parametrize("failing", [1, 3])
def test_greedy_and_seeded_outputs_of_a_model_survive_a_rank(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """A real model on four ranks; one fails in the middle of several outputs, others still wait for it."""
    seeded = SamplingParams(max_tokens=12, temperature=30.0, top_p=0.95, seed=7, ignore_eos=True, logprobs=0)
    layout = dict(attn_dp=2, attn_tp=2, ep=2, moe_tp=2)
    with Engine(config(model_dir, **layout)) as engine:
        expected = [engine.generate(prompts(), params) for params in (GREEDY, seeded)]
    step, due = Worker.step, {failing: 6}

    def break_once(worker: Worker, message: Any) -> Any:
        if due.get(worker.rank, 0) and (due.update({worker.rank: due[worker.rank] - 1}) or due[worker.rank] == 0):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return step(worker, message)

    monkeypatch.setattr(Worker, "step", break_once)
    with Engine(config(model_dir, **layout)) as engine:
        got = []
        for params in (GREEDY, seeded):
            due[failing] = 6
            got.append(engine.generate(prompts(), params))
        assert engine.stats().failures == 2
        assert [[(r.token_ids, r.text, r.finish_reason) for r in rs] for rs in got] == [
            [(r.token_ids, r.text, r.finish_reason) for r in rs] for rs in expected
        ]
        engine.check_idle()
