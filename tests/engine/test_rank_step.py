"""Host work of a rank for a decode step by a graph, apart from the graph's launch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weft.comm.reference import ReferenceWorld
from weft.engine.config.config import EngineConfig
from weft.engine.messages.rank_messages import (
    Adjust,
    AskReport,
    Entries,
    GroupRows,
    Join,
    Result,
    Sampling,
    Step,
    Stop,
    ToRank,
)
from weft.engine.worker import model_runner
from weft.engine.worker.staged_writes import PLACES, PinnedWrites
from weft.engine.worker.step_graphs import StepGraphs
from weft.engine.worker.worker import Worker
from weft.planner.cost import costs
from weft.planner.spec import Mesh, Rows
from weft.stream import step_rows
from weft.stream.step_rows import PaddedRows

SEQUENCES, STEPS, GREEDY = 5, 6, Sampling(temperature=0.0, seed=1)


class CountedOps(TorchDispatchMode):
    """Counts torch's operators: on a GPU each takes the host microseconds."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class NoGraph:
    def replay(self) -> None: ...


def no_capture(graphs: StepGraphs, progress: Any = None) -> None:
    for shape in graphs.shapes:
        graphs._counts[shape.rows] = PaddedRows(graphs._mesh, graphs._rank, shape.rows, graphs._device)
        graphs._graphs[shape] = (NoGraph(), torch.zeros(shape.sampled, 1))  # type: ignore[assignment]
    graphs.token_ring.rows.fill_(70)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    monkeypatch.setattr(StepGraphs, "capture", no_capture)
    monkeypatch.setattr(model_runner, "exchange_times", lambda *_: {})
    config = EngineConfig(executor="thread", max_running=SEQUENCES, max_model_len=64, kv_tokens=1024)
    made = Worker(config, [ReferenceWorld(1).transports()[0]], costs("cpu"), lambda message: None)
    made.capture(64)
    return made


def joins(*rows: int, how: Sampling = GREEDY) -> tuple[Join, ...]:
    return tuple(Join(row, row, 3, ((row,),), how) for row in rows)


def test_a_decode_step_that_changes_nothing_runs_no_operator(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it enter inference mode, which the loop of a rank is in for good."""
    entered: list[object] = []
    enter = torch.inference_mode.__enter__
    monkeypatch.setattr(torch.inference_mode, "__enter__", lambda mode: (entered.append(mode), enter(mode))[1])
    rows, ops, sent = tuple(range(SEQUENCES)), CountedOps(), []

    def messages() -> Iterator[ToRank]:
        yield Step(1, (GroupRows(rows, joins=joins(*rows)),))
        entered.clear()
        with ops:
            for number in range(2, 2 + STEPS):
                yield Step(number, (GroupRows(rows),))
        yield Step(2 + STEPS, (GroupRows(rows[:1]),))
        yield Stop()

    worker.serve(messages().__next__, sent.append)
    results = [message for message in sent if isinstance(message, Result)]
    assert [result.tokens for result in results] == [*[(70,) * SEQUENCES] * (1 + STEPS), (70,)]
    assert worker.table.rows[0].length == 3 + 1 + STEPS + 1
    assert (ops.count, len(entered)) == (0, 0)


def test_counts_that_were_there_before_are_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts of steps of a few groups are kept; with many groups the number kept does not grow."""
    monkeypatch.setattr(step_rows, "MAX_FILLED", 4)
    mesh, computed = Mesh(2, 2, 4, 1), list[Any]()
    rows = PaddedRows(mesh, 3, 8, torch.device("cpu"))
    values = rows._values
    monkeypatch.setattr(rows, "_values", lambda counts: (computed.append(counts), values(counts))[1])
    some = [(5, 3), (0, 8), (5, 2)]
    expected = []
    for counts in some:
        rows.fill(counts)
        expected.append(rows._device.tolist())
    for counts, wanted in list(zip(some, expected, strict=True)) * 3:
        rows.fill(counts)
        assert rows._device.tolist() == wanted and rows.live(Rows.WORLD).item() == sum(counts)
    assert computed == some
    for first in range(8):
        rows.fill((first, 1))
        assert len(rows._filled) <= 4
    with pytest.raises(ValueError, match="do not fit"):
        rows.fill((9, 0))
    assert (9, 0) not in rows._filled


@torch.inference_mode()
def test_changes_before_a_decode_step_take_one_launch_and_no_operator(worker: Worker) -> None:
    """New pages, other rows and counts, and rows that sequences take: on a GPU each would be several operators."""
    replays, rows, ops = list[int](), tuple(range(SEQUENCES)), CountedOps()

    class Writes(NoGraph):
        def replay(self) -> None:
            replays.append(writes._staged)

    assert worker.device_rows is not None
    writes = worker.device_rows.writes = PinnedWrites(worker.device_rows._all)
    writes._graphs = [Writes()] * PLACES  # type: ignore[list-item]
    pages = tuple(Entries(row, 0, 1, (10 + row, 20 + row)) for row in rows)
    steps = [
        (GroupRows(rows, joins=joins(*rows)), 7 * SEQUENCES + SEQUENCES),
        (GroupRows(rows, entries=pages), 2 * SEQUENCES),
        (GroupRows(rows[1:]), len(rows[1:])),
        (GroupRows(rows[1:3], entries=(Entries(1, 0, 3, (30,)),), joins=joins(3)), 1 + 7),
    ]
    for _ in "ab":  # once for each number of rows, views of outputs are made
        replays.clear()
        ops.count = 0
        with ops:
            for number, (group_rows, _) in enumerate(steps):
                worker.step(Step(number, (group_rows,)))()
                writes._counts.fill(0)  # as the kernel does
    assert len(replays) == len(steps) and ops.count == 0
    assert all(staged >= least for staged, (_, least) in zip(replays, steps, strict=True))


def test_a_step_like_the_last_one_looks_nothing_up(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is one replay, as each step is, also with new pages; what else differs from the last step is looked up."""
    runner, sent, calls, counted = worker.runner, list[Any](), list[tuple[str, int]](), list[int]()
    two, three, cut = GroupRows((0, 1)), GroupRows((0, 1, 2)), Sampling(top_k=2, seed=1)
    logprobs = GroupRows((0, 1), adjust=((1, Adjust(logprobs=0)),))
    steps = {
        1: GroupRows((0, 1), joins=joins(0, 1)),
        2: GroupRows((0, 1), joins=joins(0, 1)),  # they begin anew
        3: two,
        4: two,
        5: GroupRows((0, 1), entries=(Entries(0, 0, 1, (5,)),)),
        6: two,
        7: two,
        8: GroupRows((1, 0)),
        9: GroupRows((1, 0)),
        10: two,
        11: logprobs,
        12: logprobs,  # the same, but it takes more than a replay
        13: two,
        14: GroupRows((0, 1, 2), joins=joins(2, how=cut)),
        15: three,
        16: three,  # row 2 is cut in each step
        17: two,
        18: two,
    }

    def watch(thing: Any, name: str) -> None:
        call = getattr(thing, name)
        monkeypatch.setattr(thing, name, lambda *args: (calls.append((name, numbers[-1])), call(*args))[1])

    watch(runner, "replay")
    watch(runner, "repeat")
    report = runner.stats.report
    monkeypatch.setattr(runner.stats, "report", lambda: (counted.append(runner.stats.steps.total()), report())[1])
    numbers: list[int] = []

    def messages() -> Iterator[ToRank]:
        for number, rows in steps.items():
            numbers.append(number)
            yield Step(number, (rows,))
        yield AskReport()
        yield Step(19, (GroupRows((2,)),))
        yield Stop()

    worker.serve(messages().__next__, sent.append)
    repeated = [number for name, number in calls if name == "repeat"]
    assert repeated == [3, 4, 5, 6, 7, 9, 18]
    assert worker.device_rows is not None
    assert worker.table.rows[0].tables == [[0, 5]] and worker.device_rows.entries[0].tolist() == [0, 5, -1, -1]
    assert [number for name, number in calls if name == "replay"] == [n for n in steps if n not in repeated] + [18]
    assert counted == [len(steps)], "a report knows of all steps"
    results = [message for message in sent if isinstance(message, Result)]
    assert [(r.ran.number, len(r.tokens)) for r in results[:-1]] == [(n, len(r.decode_rows)) for n, r in steps.items()]
    assert [worker.table.rows[row].length for row in range(3)] == [3 + 17, 3 + 17, 3 + 3 + 1]
