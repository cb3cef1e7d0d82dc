"""Waiting for increments: woken by what happens, never by a clock."""

from __future__ import annotations

import asyncio
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from server.conftest import QuietEngine, output
from weft.engine.messages.request import Output, SamplingParams
from weft.serve.http.engine_client import EngineClient, IncrementQueue
from weft.serve.http.errors import ApiError
from weft.serve.http.metrics import Metrics


class Said:
    """A completion of which an increment has come."""

    end = None

    def __init__(self, increment: Output):
        self._increment = increment

    def take(self, count: int) -> Output:
        return self._increment


async def waiting(engine: Any, gone: asyncio.Event, count: int) -> asyncio.Task[list[str]]:
    """Requests of `count` choices, all submitted; the task gives the texts that came."""

    async def receive() -> dict[str, str]:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def collect() -> list[str]:
        state, url = SimpleNamespace(small=True), SimpleNamespace(path="/")
        request: Any = SimpleNamespace(receive=receive, state=state, url=url, scope={"state": {}})
        stream = EngineClient(engine, Metrics(engine)).generate(request, [[1]] * count, [SamplingParams()] * count)
        return [output.text async for _, output in stream]

    task = asyncio.create_task(collect())
    while len(engine.listeners) < count and not task.done():
        await asyncio.sleep(0)
    return task


def test_a_waiting_request_sets_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        engine, timers = QuietEngine(), []
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "call_at", lambda *args, **kwargs: timers.append(args))
        task = await waiting(engine, asyncio.Event(), 2)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not timers, "a request that waits polls"
        engine.say(output("a"), 0)
        engine.say(output("b", "stop"), 1)
        engine.say(output("c", "stop"), 0)
        assert await task == ["a", "b", "c"] and not engine.cancelled

    asyncio.run(main())


@pytest.mark.parametrize("choices, limit", [(1, 8192), (16, 16384)])
def test_what_a_client_does_not_read_is_bounded(choices: int, limit: int) -> None:
    async def main() -> None:
        engine = QuietEngine()
        state, url = SimpleNamespace(small=True), SimpleNamespace(path="/")
        request: Any = SimpleNamespace(receive=asyncio.Event().wait, state=state, url=url, scope={"state": {}})
        params = [SamplingParams()] * choices
        stream = EngineClient(engine, Metrics(engine)).generate(request, [[1]] * choices, params)
        first = asyncio.create_task(anext(stream))
        while len(engine.listeners) < choices:
            await asyncio.sleep(0)
        increment = output("a")
        unread = weakref.WeakSet[Any]()

        def say(at: int) -> None:
            completion = Said(increment)
            unread.add(completion)
            engine.listeners[at % choices](completion)

        engine.say(increment, 0)
        assert (await first)[1].text == "a"
        for at in range(limit):
            say(at)
        await asyncio.sleep(0)
        assert not engine.cancelled and len(unread) == limit
        for at in range(10):
            say(at)
        await asyncio.sleep(0)
        assert engine.cancelled == list(range(choices)) and len(unread) == 10
        with pytest.raises(ApiError, match=f"{limit} increments were not read in time"):
            await anext(stream)

    asyncio.run(main())


def test_increments_of_a_waiting_stream_are_written_without_its_task() -> None:
    """Unless its client does not read, or it ends; what waits is written at once, in order."""
    written: list[bytes] = []
    reads = True

    def write(piece: bytes) -> bool:
        if reads and piece:
            written.append(piece)
        return reads

    async def main() -> None:
        nonlocal reads
        seen: list[str] = []
        state = {"write": write, "events": lambda choice, output: output.text.encode()}
        increments = IncrementQueue(2, state, lambda choice, output: seen.append(output.text))
        task = asyncio.create_task(increments.get())
        await asyncio.sleep(0)
        for choice, text in ((0, "a"), (1, "b"), (0, "c")):
            increments.put(choice, Said(output(text)))  # type: ignore[arg-type]
        increments.hand_over()
        await asyncio.sleep(0)
        assert written == [b"abc"] and seen == ["a", "b", "c"] and not task.done()
        reads = False
        increments.put(0, Said(output("d")))  # type: ignore[arg-type]
        increments.hand_over()
        assert (await task)[1].text == "d" and written == [b"abc"] and seen[-1] == "d"  # type: ignore[index]
        reads, task = True, asyncio.create_task(increments.get())
        await asyncio.sleep(0)
        increments.put(0, Said(output("e")))  # type: ignore[arg-type]
        increments.put(0, Said(output("f", "stop")))  # type: ignore[arg-type]
        increments.hand_over()
        assert (await task)[1].text == "f" and written == [b"abc", b"e"]  # type: ignore[index]

    asyncio.run(main())


def test_a_client_that_leaves_wakes_its_request() -> None:
    async def main() -> None:
        engine, gone = QuietEngine(), asyncio.Event()
        task = await waiting(engine, gone, 2)
        engine.say(output("a", "stop"), 0)
        await asyncio.sleep(0)
        gone.set()
        assert await task == ["a"] and engine.cancelled == [1]

    asyncio.run(main())


def test_a_caller_that_stops_leaves_nothing_behind() -> None:
    async def main() -> None:
        engine = QuietEngine()
        task = await waiting(engine, asyncio.Event(), 1)
        task.cancel()
        await asyncio.wait([task])
        assert engine.cancelled == [0]
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1, "a task still waits for the client to leave"

    asyncio.run(main())
