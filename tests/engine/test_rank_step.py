"""What a rank does on the host for a decode step by a graph, besides the graph's launch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weft.comm.reference import ReferenceWorld
from weft.comm.step_rows import PaddedRows
from weft.engine.config import EngineConfig
from weft.engine.messages import GroupRows, Join, Result, Sampling, Step, Stop, ToRank
from weft.engine.worker import model_runner
from weft.engine.worker.step_graphs import StepGraphs
from weft.engine.worker.worker import Worker
from weft.place.cost import costs

SEQUENCES, STEPS = 5, 6


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


def test_a_decode_step_that_changes_nothing_runs_no_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it enter inference mode, which the loop of a rank is in for good."""
    monkeypatch.setattr(StepGraphs, "capture", no_capture)
    monkeypatch.setattr(model_runner, "exchange_times", lambda *_: {})
    entered: list[object] = []
    enter = torch.inference_mode.__enter__
    monkeypatch.setattr(torch.inference_mode, "__enter__", lambda mode: (entered.append(mode), enter(mode))[1])
    config = EngineConfig(executor="thread", max_running=SEQUENCES, max_model_len=64, kv_tokens=1024)
    worker = Worker(config, [ReferenceWorld(1).transports()[0]], costs("cpu"), lambda message: None)
    worker.capture(64)
    rows, ops, sent = tuple(range(SEQUENCES)), CountedOps(), []
    joins = tuple(Join(row, row, 3, ((row,),), Sampling(0.0, 1.0, 0, 1)) for row in rows)

    def messages() -> Iterator[ToRank]:
        yield Step(1, (GroupRows(rows, joins=joins),))
        entered.clear()
        with ops:
            for number in range(2, 2 + STEPS):
                yield Step(number, (GroupRows(rows),))
        yield Stop()

    worker.serve(messages().__next__, sent.append)
    results = [message for message in sent if isinstance(message, Result)]
    assert [result.tokens for result in results] == [(70,) * SEQUENCES] * (1 + STEPS)
    assert worker.table.rows[0].length == 3 + 1 + STEPS
    assert (ops.count, len(entered)) == (0, 0)
