"""Ranks that are lost for good: the engine goes on with the others, and every request with its tokens."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.conftest import WAIT_S
from engine.test_engine import config, prompts
from weft.engine.config.config import EngineConfig, EngineError
from weft.engine.controller import recovery
from weft.engine.controller.engine import Engine
from weft.engine.controller.recovery import without_rank
from weft.engine.messages.request import Output, SamplingParams
from weft.engine.output.request_output import RequestOutput
from weft.planner.spec import LayoutError, Mesh

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
    assert [found.mesh for found in without_rank(given, given.read_model(), 1)] == [after, after]


def test_a_smaller_layout_is_planned_once(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[Mesh] = []
    true = recovery.check_plans
    monkeypatch.setattr(recovery, "check_plans", lambda c, model: planned.append(c.mesh) or true(c, model))
    given = config(model_dir, attn_tp=3, shrink=True)
    resized: list[Mesh] = []
    executor: Any = SimpleNamespace(resize=lambda config: resized.append(config.mesh))
    ranks = recovery.Recovery(given, given, executor)
    for lost in range(given.max_restarts + 1):
        assert not ranks.lost_ranks
        ranks.failed(EngineError(f"failure {lost}", 1), given.read_model())
    assert ranks.lost_ranks == 1 and planned == resized == [Mesh(1, 2, 1, 2)]


def test_cores_of_a_lost_rank_are_not_used(model_dir: Path) -> None:
    given = config(model_dir, attn_tp=3, shrink=True, cpu_bind="0|1|0-1")
    assert without_rank(given, given.read_model(), 1)[0].cpu_bind == "0|0-1"


def test_no_fewer_ranks_than_asked_for(model_dir: Path) -> None:
    given = config(model_dir, attn_tp=2, shrink=True, shrink_to=2)
    with pytest.raises(
        EngineError, match="rank 1 of 2 is lost for good, and no smaller layout is possible: shrink_to=2"
    ):
        without_rank(given, given.read_model(), 1)
    with pytest.raises(LayoutError, match="--shrink runs on the CPUs of one host only"):
        Engine(config(model_dir, shrink=True, nnodes=2, attn_tp=2, master_addr="127.0.0.1", cluster_key="x" * 32))


def test_requests_go_on_with_fewer_and_fewer_ranks(model_dir: Path) -> None:
    """From three ranks to two and one: each time a rank dies at every start, while requests run."""
    few = [prompt[:20] for prompt in prompts(4)]
    with Engine(config(model_dir)) as engine:
        expected = [r.token_ids for r in engine.generate(few, PARAMS)]
    options: Any = dict(attn_tp=3, executor="process", shrink=True, max_restarts=1, restart_backoff_s=0.01)
    with Engine(config(model_dir, **options)) as engine:
        for ranks in (2, 1):
            run_while_a_rank_is_lost(engine, few, expected, ranks)
            assert engine.state == "degraded" and engine.healthy
            assert (engine.config.mesh.world, engine.stats().lost_ranks) == (ranks, 3 - ranks)
            assert [r.token_ids for r in engine.generate(few, PARAMS)] == expected
        engine.check_idle()


def run_while_a_rank_is_lost(engine: Engine, few: Any, expected: Any, ranks: int) -> None:
    """Send requests, and kill the last rank at each of its starts until the engine runs `ranks` ranks."""
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
        if self.mesh.world > ranks:
            os.kill(self.processes[-1].pid, signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(engine._executor), "start", lost)
        for at, prompt in enumerate(few):
            submit(at, prompt)
        assert begun.wait(WAIT_S)
        os.kill(engine._executor.processes[-1].pid, signal.SIGKILL)
        killed.set()
        for _ in few:
            assert ended.acquire(timeout=WAIT_S)
    assert [tuple(t for o in outputs[at] for t in o.token_ids) for at in range(len(few))] == expected


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
