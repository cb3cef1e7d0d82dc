"""Times of calls become the seconds of a report: in place for eager steps, alone for steps by graphs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from weft.comm.transport_registry import REFERENCE
from weft.engine.worker.exchange_times import exchange_times
from weft.planner.chain import Chain, Read
from weft.planner.cost import Offer, costs
from weft.planner.edges import legal_edges
from weft.planner.experts import Dispatch
from weft.planner.op import BlockValue
from weft.planner.plan import Planner
from weft.planner.spec import Mesh, Rows
from weft.stream import stats as stats_module
from weft.stream.stats import Stats, StepTimes, step_key
from weft.stream.step_rows import EqualRows, PaddedRows

MESH = Mesh(2, 1, 2, 1)
KINDS = frozenset(e.kind for edges in legal_edges(MESH).values() for e in edges if e.moves)
CPU = torch.device("cpu")


def planner(*names: str, kinds: frozenset[str] = KINDS) -> Planner:
    """Return the planner of three decoder layers, with attention data-parallel and experts over both ranks."""
    group, whole = MESH.placement(Rows.GROUP), MESH.placement(Rows.WORLD)
    experts = MESH.placement(Rows.WORLD, "world")
    reads = []
    for i in range(3):
        reads.append(Read(f"layers.{i}.input", group, (experts if i else group,)))
        reads.append(Read(f"layers.{i}.post", whole, (group,)))
    reads.append(Read("norm", group, (experts,)))
    offers = [Offer(name, kinds, kinds - {"all_gatherv"}, costs("h100-nvlink").of(name, 2)) for name in names]
    return Planner(MESH, Chain(tuple(reads), 8, 4), offers)


def timed(times: StepTimes, made: Planner, counts: tuple[int, ...], seconds: float, monkeypatch: Any) -> None:
    """Walk the plan of these counts, each call taking so long."""
    clock = iter(range(10**6))
    monkeypatch.setattr(stats_module.time, "perf_counter", lambda: next(clock) * seconds)
    plan = made.plan(counts)
    for read, step, _ in plan.moves():
        with times.timed(plan.counts, read.site, step):
            pass


def test_steps_of_other_sizes_take_other_times(monkeypatch: pytest.MonkeyPatch) -> None:
    made, stats, times = planner("peer"), Stats(), StepTimes(CPU)
    timed(times, made, (1, 1), 1.0, monkeypatch)
    timed(times, made, (64, 64), 100.0, monkeypatch)
    stats.record(made, made.plan((1, 1)), (1, 0), 5)
    stats.record(made, made.plan((64, 64)), (60, 64), 2)
    stats.record(made, made.plan((16, 16)), (16, 16), 3)  # never timed: the mean of what was
    moves = len(list(made.plan((1, 1)).moves()))
    assert all(len(list(made.plan((n, n)).moves())) == moves for n in (16, 64)), "or the sum below is another"
    assert sum(s.seconds for s in stats.table(times)) == pytest.approx(moves * (5 * 1 + 2 * 100 + 3 * 50.5))
    assert sum(s.seconds for s in stats.table()) == 0
    assert sum(s.seconds for s in stats.table(times)) == pytest.approx(moves * (5 * 1 + 2 * 100 + 3 * 50.5)), "twice"


def test_a_step_that_was_never_timed_with_these_counts_counts_as_with_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each step what it took itself, not what others did."""
    made, times, clock = planner("peer"), StepTimes(CPU), iter([0.0, 1.0, 0.0, 5.0, 0.0, 25.0])
    monkeypatch.setattr(stats_module.time, "perf_counter", lambda: next(clock))
    plan = made.plan((1, 1))
    steps = list({step_key(read.site, step): (read, step) for read, step, _ in plan.moves()}.values())
    assert len(steps) == 3
    for read, step in steps:
        with times.timed(plan.counts, read.site, step):
            pass
    for counts in (plan.counts, (16, 16)):
        assert [times.mean(counts, step_key(read.site, step)) for read, step in steps] == [1.0, 5.0, 25.0]


def test_walks_of_graphs_take_what_each_exchange_takes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made, stats, times = planner("peer"), Stats(), StepTimes(CPU)
    timed(times, made, (4, 4), 7.0, monkeypatch)
    plan = made.plan((4, 4))
    alone = {step_key(read.site, step): 2.0 for read, step, _ in plan.moves()}
    stats.record(made, plan, (3, 4), 10, alone)
    stats.record(made, plan, (3, 4), 1)
    calls = len(list(plan.moves()))
    found = stats.table(times)
    assert sum(s.seconds for s in found) == pytest.approx(calls * (10 * 2 + 7))
    assert sum(s.count for s in found) == calls * 11
    walked = sum(int(made.bytes_received(edge, (3, 4))) for _, _, edge in plan.moves())
    assert walked > 0 and sum(s.bytes for s in found) == 11 * walked
    us = sum(step.us for _, step, _ in plan.moves())
    assert sum(s.predicted for s in found) == pytest.approx(11 * us / 1e6)


def test_what_nobody_offers_is_not_predicted() -> None:
    made, stats = planner("peer", kinds=KINDS - {"all_reduce"}), Stats()
    naive = made.naive((4, 4))
    assert math.inf in [step.us for _, step, _ in naive.moves()]
    stats.record(made, naive, (4, 4), 1)
    assert 0 < sum(s.predicted for s in stats.table()) < math.inf


class Recorder:
    """A transport that carries nothing and notes what it was given."""

    def __init__(self, live: bool):
        self.entry = replace(REFERENCE, takes_live_sizes=live)
        self.calls: list[tuple[Any, ...]] = []

    def exchange(self, x: Any, exchange: Any, group: Any, sizes: Any, epilogue: Any = None) -> Any:
        self.calls.append((exchange.kind, tuple(x.shape), x.dtype, epilogue and tuple(epilogue.residual.shape)))
        return x


@pytest.mark.parametrize("live", [True, False])
def test_each_exchange_is_timed_once_with_full_tensors(live: bool) -> None:
    made, transport = planner("peer"), Recorder(live)
    rows = (PaddedRows if live else EqualRows)(MESH, 1, 6, CPU)
    rows.fill((6, 6))
    plan, asked = made.plan((6, 6)), []

    def timer(call: Any) -> float:
        call()
        asked.append(call)
        return float(len(asked))

    like = torch.zeros(3, 8, dtype=torch.bfloat16)
    found = exchange_times(plan, {"peer": transport}, rows, like, timer)  # type: ignore[dict-item]
    moves = list(plan.moves())
    assert set(found) == {step_key(read.site, step) for read, step, _ in moves}
    distinct = {(edge, step.op == "finish") for _, step, edge in moves}
    assert len(asked) == len(distinct) == len(transport.calls) < len(moves)
    for kind, shape, dtype, residual in transport.calls:
        gathers = kind == "all_gatherv"
        assert dtype == torch.bfloat16 and shape == ((6, 8) if gathers else (12, 8))
        assert residual in (None, (6, 8))
    assert {bool(residual) for *_, residual in transport.calls} == {step.op == "finish" for _, step, _ in moves}
    assert exchange_times(plan, {}, rows, like, timer) == {}


def test_rows_sent_to_experts_are_timed_as_many_as_are_expected() -> None:
    """Half of six own rows a rank go to each of two ranks, with one expert a row."""
    own = MESH.placement(Rows.OWN)
    reads = (Read("norm", own, (own,), (BlockValue(Dispatch.on(MESH, 8, 1, row_bytes=16), "world"),)),)
    offers = [Offer("peer", KINDS | {"all_to_allv"}, frozenset(), costs("h100-nvlink").of("peer", 2))]
    made, given = Planner(MESH, Chain(reads, 8, 2), offers), []

    class Permutes(Recorder):
        def exchange(self, x: Any, exchange: Any, group: Any, sizes: Any, epilogue: Any = None) -> Any:
            given.append((tuple(x.shape), sizes))
            return x

    rows = PaddedRows(MESH, 1, 6, CPU)
    found = exchange_times(made.plan((6, 6)), {"peer": Permutes(True)}, rows, torch.zeros(1, 8).bfloat16(), _once)  # type: ignore[dict-item]
    assert len(found) == 3
    (counts, one), (sent, there), (back, again) = given
    assert counts == (2, 1) and one == (1,) * 4
    assert sent == (12, 8 + 4) and back == (12, 8), "room for every row, with eight bytes more for its expert"
    assert there.capacity == again.capacity == (6,) * 4 and there.live.tolist() == again.live.tolist() == [3] * 4


def _once(call: Any) -> float:
    call()
    return 1.0
