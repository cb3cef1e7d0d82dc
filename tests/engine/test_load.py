"""Many requests at once: what a newcomer costs, who is refused, whose turn it is, and what goes before what."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest

from engine.conftest import WAIT_S
from engine.fake import Driver
from engine.stub import Client, World
from weft.engine.config.config import QueueFull
from weft.engine.controller.engine import NEWCOMERS_PER_STEP
from weft.engine.kv.cache_spec import CacheGroup, Rule
from weft.engine.kv.manager import CacheManager
from weft.engine.kv.tokens import token_array
from weft.engine.messages.request import SamplingParams, Sequence, Sharing
from weft.engine.scheduler.scheduled import Scheduled
from weft.engine.scheduler.scheduler import Scheduler
from weft.engine.scheduler.waiting_queue import WaitingQueue

GREEDY = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)


@pytest.fixture
def world(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(model_dir, monkeypatch)


def sequence(request: int, client: str = "", rows: int = 2, priority: int = 0) -> Sequence:
    sharing = Sharing(client, priority)
    return Sequence(request, token_array([1] * rows), rows, GREEDY, 0, 2, frozenset(), sharing=sharing)


def test_what_a_newcomer_costs_does_not_grow_with_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(Scheduler(CacheManager([CacheGroup(Rule(), 16)], 4), max_batch_tokens=16, max_running=4))
    for request in range(500):
        driver.add(request, [1, 2, 3], 2)
    driver.step()
    looks, left = [0], Sequence.left.fget

    def counted(s: Sequence) -> int:
        looks[0] += 1
        return left(s)

    monkeypatch.setattr(Sequence, "left", property(counted))
    assert driver.scheduler.queued_tokens == 496 * 3 + sum(left(s) for s in driver.scheduler.running)
    assert looks[0] <= 4, f"{looks[0]} sequences were looked at for one newcomer"


def test_clients_alternate_and_preempted_requests_come_first() -> None:
    waiting = WaitingQueue()
    for request in range(4):
        waiting.add(sequence(request, "crowd"))
    waiting.add(sequence(4, "single"))
    waiting.add(sequence(5, "pair", rows=7))
    waiting.add(sequence(6, "pair"))
    assert len(waiting) == 7 and waiting.rows == 6 * 2 + 7
    order = [s.request for s in waiting]
    assert waiting.first().request == order[0] == 0
    first = waiting.take()
    assert [s.request for s in waiting] == [4, 5, 1, 6, 2, 3]
    waiting.put_back(first)
    assert [s.request for s in waiting] == [0, 4, 5, 1, 6, 2, 3]
    assert [waiting.take().request for _ in range(3)] == [0, 4, 5]
    waiting.remove(next(s for s in waiting if s.request == 6))
    replayed = sequence(9, "single")
    replayed.admitted = 0.0
    waiting.add(replayed)
    assert [waiting.take().request for _ in range(4)] == [9, 1, 2, 3]
    assert not len(waiting) and waiting.rows == 0
    with pytest.raises(KeyError):
        waiting.remove(first)


def test_of_each_priority_clients_alternate_and_preempted_requests_come_first() -> None:
    waiting = WaitingQueue()
    for request, (client, priority) in enumerate([("a", 1), ("a", 0), ("a", 0), ("b", 0), ("b", 1), ("c", -7)]):
        waiting.add(sequence(request, client, priority=priority))
    assert [s.request for s in waiting] == [5, 1, 3, 2, 0, 4] and waiting.rows == 12
    first = [waiting.take() for _ in range(2)]
    waiting.put_back(low := sequence(6, "b", priority=1))
    waiting.put_back(first[1])
    assert [s.request for s in waiting] == [1, 3, 2, 6, 0, 4]
    for each in (low, first[1]):
        waiting.remove(each)
    waiting.remove(waiting.first())
    assert [waiting.take().request for _ in range(3)] == [2, 0, 4] and not len(waiting) and waiting.rows == 0


def test_one_client_with_many_requests_does_not_hold_up_another(world: World) -> None:
    with world.engine(max_running=1) as engine:
        world.go.clear()
        crowd, single = Client(engine, "crowd"), Client(engine, "single")
        for _ in range(20):
            crowd.ask([1, 2], 1)
        single.ask([3, 4], 1)
        world.go.set()
        single.wait(1)
        first = [len(s.groups[0].parts) and s.groups[0].parts[0].request for s in world.steps]
        assert first.index(single.at[0]) <= 2, "the second client's turn must come after the first's current request"
        crowd.wait(20)
        engine.check_idle()


def test_a_full_queue_refuses_at_once_and_all_or_none(world: World) -> None:
    with world.engine(max_running=2, max_waiting=3) as engine:
        world.go.clear()
        client = Client(engine)
        for _ in range(4):
            client.ask([1, 2], 2)
        with pytest.raises(QueueFull, match="4 requests wait or run already") as full:
            engine.submit_all([([5], GREEDY, lambda output: None)] * 2)
        assert full.value.retry_after_s >= 1
        client.ask([1, 2], 2)
        with pytest.raises(QueueFull):
            client.ask([1, 2], 2)
        assert engine.stats().rejected == 3 and engine.stats().running + engine.stats().waiting == 5
        world.go.set()
        for at in client.wait(5):
            client.check_whole(at, 2)
        assert client.ask([1, 2], 2) and client.wait(1)
        engine.check_idle()


def test_a_queue_that_one_client_fills_is_not_full_for_others(world: World) -> None:
    with world.engine(max_running=2, max_waiting=4) as engine:

        def fill(name: str, share: int) -> None:
            client = Client(engine, name)
            for _ in range(share):
                client.ask([1, 2], 2)
            with pytest.raises(QueueFull):
                client.ask([1, 2], 2)

        for clients in (("crowd", "second", "third"), ("second", "fourth")):  # nothing of those that ended counts
            world.go.clear()
            for number, name in enumerate(clients, 1):
                fill(name, 6 // number)
            with pytest.raises(QueueFull):
                Client(engine, clients[0]).ask([1, 2], 2)
            assert engine.stats().running + engine.stats().waiting == (11 if len(clients) == 3 else 9)
            world.go.set()
            assert engine._requests.wait_until_empty(WAIT_S)
        assert engine.stats().rejected == 4 + 3
        engine.check_idle()


@pytest.mark.parametrize(("waiting", "limit"), [(3, 5), (1024, 256)])
def test_what_the_queue_can_never_hold_is_refused_for_good(world: World, waiting: int, limit: int) -> None:
    with world.engine(max_running=2, max_waiting=waiting) as engine:
        refused = rf"{limit + 1} completions are asked for at once \(prompts × n\); the limit is {limit}"
        with pytest.raises(ValueError, match=refused):
            engine.submit_all([([5], GREEDY, lambda output: None)] * (limit + 1))
        engine.check_idle()


def test_generate_takes_more_prompts_than_the_queue_holds(world: World) -> None:
    with world.engine(max_running=2, max_waiting=1) as engine:
        assert len(engine.generate([[1, 2]] * 20, GREEDY)) == 20


def test_a_cancel_does_not_wait_behind_newcomers_nor_do_steps(world: World) -> None:
    """The first step is held until a crowd has come, and a cancel after it."""
    with world.engine(kv_tokens=4096) as engine:
        world.go.clear()
        first = Client(engine)
        first.ask([1, 2, 3], 50)
        crowd = Client(engine)
        for _ in range(4 * NEWCOMERS_PER_STEP):
            crowd.ask([4, 5], 1)
        last = crowd.at[-1]
        engine.cancel(last)
        engine.cancel(first.at[0])
        world.go.set()
        first.wait(1)
        assert first.last(0).finish_reason == "abort" and len(first.tokens(0)) <= 1
        assert crowd.increments[len(crowd.at) - 1][-1].finish_reason == "abort", "cancelled before it was ever taken in"
        crowd.wait(4 * NEWCOMERS_PER_STEP)
        seen = {p.request for s in world.steps for p in s.groups[0].parts}
        assert last not in seen
        engine.check_idle()


def test_newcomers_do_not_hold_up_steps(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many come, the number taken in between two steps is bounded."""
    with world.engine(kv_tokens=4096, max_waiting=4096) as engine:
        number, taken = (
            0,
            [],
        )  # how often a step has been scheduled, and had been when each newcomer was given to a group
        schedule, add = Scheduler.schedule, Scheduler.add

        def counted(scheduler: Scheduler, decodes: bool) -> Scheduled:
            nonlocal number
            number += 1
            return schedule(scheduler, decodes)

        def noted(scheduler: Scheduler, newcomer: Sequence) -> None:
            taken.append(number)
            add(scheduler, newcomer)

        monkeypatch.setattr(Scheduler, "schedule", counted)
        monkeypatch.setattr(Scheduler, "add", noted)
        world.go.clear()
        crowd = Client(engine)
        crowd.ask([1, 2, 3], 2)
        for _ in range(5 * NEWCOMERS_PER_STEP):
            crowd.ask([4, 5], 1)
        world.go.set()
        crowd.wait(5 * NEWCOMERS_PER_STEP + 1)
        assert max(Counter(taken).values()) <= NEWCOMERS_PER_STEP and len(taken) == 5 * NEWCOMERS_PER_STEP + 1


def test_a_deadline_ends_a_request_wherever_it_is(world: World) -> None:
    with world.engine(max_running=1) as engine:
        first = Client(engine)
        first.ask([1, 2, 3], 100, timeout_s=0.0)  # due at once
        first.wait(1)
        assert first.last(0).finish_reason == "timeout" and first.last(0).error == (
            "the request did not end before its deadline"
        )
        world.go.clear()
        running, waiting = Client(engine), Client(engine)
        running.ask([1, 2, 3], 5)
        waiting.ask([1, 2, 3], 5, timeout_s=0.0)
        world.go.set()
        waiting.wait(1)
        running.wait(1)
        running.check_whole(0, 5)
        assert waiting.last(0).finish_reason == "timeout" and waiting.tokens(0) == []
        assert engine.stats().timeouts == 2
        engine.check_idle()


def test_the_time_in_the_queue_is_in_the_output(world: World) -> None:
    """The second request waits at least from when it was asked until the first one's step may run."""
    with world.engine(max_running=1) as engine:
        world.go.clear()
        client = Client(engine)
        begun = time.monotonic()
        client.ask([1, 2], 2)
        client.ask([1, 2], 2)
        asked = time.monotonic()
        time.sleep(0.01)  # makes the interval longer than the clock's resolution
        released = time.monotonic()
        world.go.set()
        client.wait(2)
        ended = time.monotonic()
        waits = [client.last(at).queue_s for at in (0, 1)]
        assert 0 <= waits[0] <= ended - begun
        assert released - asked <= waits[1] <= ended - begun
        assert abs(engine.stats().queue_seconds - sum(waits)) < 1e-6
