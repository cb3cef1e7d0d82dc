"""Ranks that are lost for good: the engine goes on with the others, and every request with its tokens."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.conftest import WAIT_S
from engine.test_agents import cluster, host, ranks_of
from engine.test_engine import config, prompts
from weft.engine.config.config import EngineConfig, EngineError
from weft.engine.controller import recovery
from weft.engine.controller.engine import Engine
from weft.engine.controller.recovery import smaller_layout
from weft.engine.hosts.agents import Agents
from weft.engine.messages.request import Output, SamplingParams
from weft.engine.output.request_output import RequestOutput
from weft.planner.spec import LayoutError, Mesh

__all__ = ["cluster"]
PARAMS = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)


def layout(mesh: Mesh) -> dict[str, Any]:
    return dict(attn_dp=mesh.attn_dp, attn_tp=mesh.attn_tp, ep=mesh.ep, moe_tp=mesh.moe_tp, dcp=mesh.dcp)


@pytest.mark.parametrize(
    "before, after",
    [
        (Mesh(1, 4, 1, 4), Mesh(1, 3, 1, 3)),
        (Mesh(1, 4, 4, 1), Mesh(1, 3, 3, 1)),
        (Mesh(4, 1, 4, 1), Mesh(3, 1, 3, 1)),
        (Mesh(2, 2, 4, 1), Mesh(1, 3, 3, 1)),
        (Mesh(2, 3, 2, 3), Mesh(1, 5, 1, 5)),
        (Mesh(1, 4, 1, 4, 4), Mesh(1, 3, 1, 3)),  # of its four query heads, three ranks hold unequally many
        (Mesh(1, 2, 1, 2, 2), Mesh()),
    ],
    ids=str,
)
def test_the_layout_of_one_rank_less_is_the_most_similar(model_dir: Path, before: Mesh, after: Mesh) -> None:
    given = config(model_dir, **layout(before), shrink=True)
    left = [rank for rank in range(before.world) if rank != 1]
    smaller = smaller_layout(given, given.read_model(), {0: left})
    assert (smaller.mesh, smaller.places) == (after, (tuple(left[: after.world]),))


@pytest.mark.parametrize(
    "left, places",
    [
        ([[0, 1], [1]], [[0], [1]]),  # equally many on each host
        ([[1], [0, 1]], [[1], [0]]),
        ([[0, 1], []], [[0, 1]]),
        ([[0, 2], [0, 1, 2]], [[0, 2], [0, 1]]),  # of three each
        ([[0, 1, 2], [2]], [[0, 1, 2]]),  # more than one on each
        ([[0, 1], [0], [0, 1]], [[0, 1], [], [0, 1]]),  # without node 1
        ([[0], [0, 1], [0, 1]], [[0], [0], [0]]),  # not without node 0
        ([[0], [], [0, 1], [1]], [[0], [], [0], [1]]),
    ],
    ids=str,
)
def test_hosts_run_equally_many_ranks_or_none(cluster: EngineConfig, left: Any, places: Any) -> None:
    most = max(map(len, left))
    given = replace(cluster, attn_dp=len(left), attn_tp=most, ep=None, moe_tp=None, nnodes=len(left), cpu_bind="off")
    smaller = smaller_layout(given, given.read_model(), dict(enumerate(left)))
    places += [[]] * (len(left) - len(places))
    assert smaller.places == tuple(map(tuple, places))
    assert smaller.mesh.world == sum(map(len, places)) and smaller.mesh.hosts == sum(map(bool, places))
    seats = {(node, place) for node, of_node in enumerate(places) for place in of_node}
    assert {smaller.seat_of(rank) for rank in range(smaller.mesh.world)} == seats
    for node, of_node in enumerate(places):
        assert [smaller.seat_of(rank) for rank in smaller.ranks_of(node)] == [(node, place) for place in of_node]


def test_hosts_cut_no_dp_group_in_unequal_parts(cluster: EngineConfig) -> None:
    """Three groups of two ranks would be more like the four before, on hosts of three ranks."""
    given = replace(cluster, attn_dp=4, attn_tp=2, ep=None, moe_tp=None, cpu_bind="off")
    smaller = smaller_layout(given, given.read_model(), {0: [0, 1, 2], 1: [0, 1, 2, 3]})
    assert smaller.mesh == Mesh(2, 3, 2, 3, hosts=2)


def test_a_smaller_layout_is_planned_once(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[Mesh] = []
    true = recovery.check_plans
    monkeypatch.setattr(recovery, "check_plans", lambda c, model: planned.append(c.mesh) or true(c, model))
    given = config(model_dir, attn_tp=3, shrink=True)
    resized: list[Mesh] = []
    executor: Any = SimpleNamespace(config=given, resize=lambda config: resized.append(config.mesh))
    ranks = recovery.Recovery(given, given, executor)
    for lost in range(given.max_restarts + 1):
        assert not ranks.lost_places
        ranks.failed(EngineError(f"failure {lost}", (1,)), given.read_model())
    assert ranks.lost_places == [(0, 1)] and planned == resized == [Mesh(1, 2, 1, 2)]


def test_no_place_of_a_lost_host_is_used_again(cluster: EngineConfig) -> None:
    """Node 1 has a place without a rank, after node 0 has lost one."""
    given = replace(cluster, shrink=True, max_restarts=0, cpu_bind="off")
    executor: Any = SimpleNamespace(config=given, resize=lambda config: setattr(executor, "config", config))
    ranks, model = recovery.Recovery(given, given, executor), given.read_model()
    ranks.failed(EngineError("rank 1 was killed", (1,)), model)
    assert executor.config.places == ((0,), (0,))
    ranks.failed(EngineError("node 1 did not come", (1,), for_good="hosts"), model)
    assert executor.config.places == ((0,), ()) and ranks.lost_places == [(0, 1), (1, 0)]


def test_cores_of_a_lost_rank_are_not_used(model_dir: Path) -> None:
    given = config(model_dir, attn_tp=3, shrink=True, cpu_bind="0|1|0-1")
    assert smaller_layout(given, given.read_model(), {0: [0, 2]}).cpu_bind == "0|0-1"


def test_no_fewer_ranks_than_asked_for(cluster: EngineConfig, model_dir: Path) -> None:
    given = config(model_dir, attn_tp=2, shrink=True, shrink_to=2)
    executor: Any = SimpleNamespace(config=given)
    with pytest.raises(
        EngineError, match="rank 1 of 2 is lost for good, and no smaller layout is possible: shrink_to=2"
    ):
        recovery.Recovery(given, replace(given, max_restarts=0), executor).failed(EngineError("x", (1,)), Any)
    with pytest.raises(LayoutError, match="node 0 has no rank left, and nobody serves without it"):
        smaller_layout(cluster, cluster.read_model(), {0: [], 1: [0, 1]})


def test_requests_go_on_with_fewer_and_fewer_ranks(model_dir: Path) -> None:
    """From three ranks to two and one: each time a rank dies at every start, while requests run."""
    few = [prompt[:20] for prompt in prompts(4)]
    with Engine(config(model_dir)) as engine:
        expected = [r.token_ids for r in engine.generate(few, PARAMS)]
    options: Any = dict(attn_tp=3, executor="process", shrink=True, max_restarts=1, restart_backoff_s=0.01)
    with Engine(config(model_dir, **options)) as engine:
        for ranks in (2, 1):
            run_while_a_rank_is_lost(engine, few, expected, lambda: kill_last(engine), ranks)
            assert engine.state == "degraded" and engine.healthy
            assert (engine.config.mesh.world, engine.stats().lost_ranks) == (ranks, 3 - ranks)
            assert [r.token_ids for r in engine.generate(few, PARAMS)] == expected
        engine.check_idle()


def kill_last(engine: Engine) -> None:
    """Kill the last rank of this host."""
    os.kill(engine._executor.processes[-1].pid, signal.SIGKILL)


def run_while_a_rank_is_lost(
    engine: Engine, few: Any, expected: Any, kill: Callable[[], object], ranks: int, *, at_starts: bool = True
) -> None:
    """Send requests, and kill a rank, also at each of its starts until the engine runs `ranks` ranks."""
    outputs: dict[int, list[Output]] = {at: [] for at in range(len(few))}
    ended, begun, killed = threading.Semaphore(0), threading.Event(), threading.Event()

    def submit(at: int, prompt: Any) -> None:
        def callback(output: RequestOutput) -> None:
            outputs[at].append(increment := output.take())
            begun.set()
            killed.wait(WAIT_S)
            if increment.finish_reason:
                ended.release()

        engine.submit(prompt, PARAMS, callback)

    start = type(engine._executor).start

    def lost(self: Any, *args: Any, **more: Any) -> None:
        start(self, *args, **more)
        if at_starts and self.mesh.world > ranks:
            kill()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(engine._executor), "start", lost)
        for at, prompt in enumerate(few):
            submit(at, prompt)
        assert begun.wait(WAIT_S)
        kill()
        killed.set()
        for _ in few:
            assert ended.acquire(timeout=WAIT_S)
    assert [tuple(t for o in outputs[at] for t in o.token_ids) for at in range(len(few))] == expected


def test_requests_go_on_with_equally_many_ranks_of_each_host(
    cluster: EngineConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Node 1 of two hosts loses one of its two ranks for good, then the other: its agent stays, without ranks."""
    few = [prompt[:20] for prompt in prompts(4)]
    with Engine(config(cluster.model)) as engine:
        expected = [r.token_ids for r in engine.generate(few, PARAMS)]
    few_restarts = replace(cluster, shrink=True, max_restarts=1, restart_backoff_s=0.01)
    with host(few_restarts, tmp_path / "said") as agent, Engine(few_restarts) as engine:

        def kill() -> None:
            os.kill(ranks_of(agent.pid)[-1], signal.SIGKILL)

        run_while_a_rank_is_lost(engine, few, expected, kill, 2)
        assert engine.config.mesh.hosts == 2 and len(ranks_of(agent.pid)) == 1
        assert "hosts=2, 1 on each of the nodes 0, 1; 1 more would run if hosts had equal numbers" in caplog.text
        with pytest.MonkeyPatch.context() as patched:  # two ranks on one host follow two on two
            patched.setattr(engine._executor, "start", dying_on(engine, kill))
            os.kill(ranks_of(agent.pid)[-1], signal.SIGKILL)
            assert [r.token_ids for r in engine.generate(few, PARAMS)] == expected
        assert (engine.config.mesh, engine.stats().lost_ranks) == (Mesh(2, 1, 2, 1), 2)
        assert engine.state == "degraded" and not ranks_of(agent.pid)
        engine.check_idle()
        engine.close()
        agent.join(WAIT_S)
        assert agent.exitcode == 0
    assert (tmp_path / "said").read_text().splitlines()[2:] == [
        "node 1: runs no ranks until all hosts start anew: others are lost for good",
        "node 1: node 0 has ended",
    ]


def dying_on(engine: Engine, kill: Callable[[], object]) -> Callable[..., None]:
    """Return a start of ranks that ends with a kill while there are two hosts."""
    start = engine._executor.start

    def lost(*args: Any, **more: Any) -> None:
        start(*args, **more)
        if engine._executor.mesh.hosts > 1:
            kill()

    return lost


@pytest.mark.nightly
def test_requests_go_on_without_a_host_that_does_not_come_back(
    cluster: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    few = [prompt[:20] for prompt in prompts(4)]
    with Engine(config(cluster.model)) as engine:
        expected = [r.token_ids for r in engine.generate(few, PARAMS)]
    shrinking = replace(cluster, shrink=True)
    with host(shrinking, tmp_path / "said") as agent, Engine(shrinking) as engine:
        wait = Agents.wait_for_all
        monkeypatch.setattr(Agents, "wait_for_all", lambda agents, timeout_s, waiting: wait(agents, 0.1, waiting))
        run_while_a_rank_is_lost(engine, few, expected, agent.kill, 2, at_starts=False)
        assert (engine.config.mesh, engine.stats().lost_ranks, engine.stats().failures) == (Mesh(2, 1, 2, 1), 2, 2)
        assert "ranks 2, 3 of 4 are lost for good; the engine goes on with attn_dp=2 attn_tp=1" in caplog.text
        assert "ep=2 moe_tp=1, 2 on each of the nodes 0" in caplog.text
        engine.check_idle()


def test_other_failures_than_of_one_rank_end_the_engine(model_dir: Path) -> None:
    """A rank that dies in turn with another is no lost device."""
    given: EngineConfig = config(model_dir, attn_tp=2, executor="process", shrink=True, max_restarts=1)
    with Engine(given) as engine:
        for rank in (0, 1):
            os.kill(engine._executor.processes[rank].pid, signal.SIGKILL)
            engine.submit([1, 2, 3], PARAMS, lambda output: None)
            if rank == 0:
                assert engine.generate([[1, 2, 3]], PARAMS)
        assert engine.wait(WAIT_S) and engine.state == "failed"
        assert engine.error is not None and "gave up after 2 failures" in engine.error
