"""Faults of ranks, of requests and of the engine itself: a clear error that names the cause, never a hang."""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.conftest import WAIT_S, sleeping_fork
from engine.test_engine import GREEDY, config, prompts
from weft.engine.config.config import EngineConfig, EngineError, QueueFull
from weft.engine.controller.engine import Engine
from weft.engine.controller.executor import Executor
from weft.engine.controller.rank_executors import ProcessExecutor, make_executor
from weft.engine.controller.request_queue import RequestQueue
from weft.engine.kv.cache_spec import CacheGroup, Rule
from weft.engine.kv.tokens import token_bytes
from weft.engine.messages.rank_messages import Chunk, GroupRows, Join, Sampling, Step
from weft.engine.messages.request import Output, SamplingParams
from weft.engine.output.request_output import OutputCallback, RequestOutput
from weft.engine.processes import rank_processes
from weft.engine.worker.model_runner import ModelRunner

pytestmark = pytest.mark.usefixtures("planned_once")

RANKS = dict(attn_dp=2, attn_tp=2, ep=4)


def prompt_rows(*tokens: int, context: int = 0) -> GroupRows:
    """A new request with one page, in row 0."""
    join = Join(0, 1, context, ((0,),), Sampling(temperature=0.0))
    return GroupRows(chunks=(Chunk(0, token_bytes(tokens), False),), joins=(join,))


def wait_until(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + WAIT_S
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.05)
    return holds()


def test_killed_ranks_are_replaced_and_every_request_goes_on(model_dir: Path) -> None:
    """One rank while requests run, then one while nothing does; without a restart allowed, one report. Meanwhile a
    forked process holds copies of the ranks' connections."""
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    few = [prompt[:20] for prompt in prompts(4)]
    ranks: Any = dict(attn_dp=2, ep=2)
    with Engine(config(model_dir, **ranks)) as engine:
        expected = [r.token_ids for r in engine.generate(few, params)]
    options: Any = dict(executor="process", max_restarts=2, step_timeout_s=WAIT_S, **ranks)
    with Engine(config(model_dir, **options)) as engine, sleeping_fork():
        outputs: dict[int, list[Output]] = {at: [] for at in range(4)}
        ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        begun, killed = threading.Event(), threading.Event()

        def callback_for(at: int) -> OutputCallback:
            def callback(output: RequestOutput) -> None:  # on the engine's thread: no output ends before the rank
                outputs[at].append(increment := output.take())
                begun.set()
                killed.wait(WAIT_S)
                if increment.finish_reason:
                    ended.put(at)

            return callback

        for at, prompt in enumerate(few):
            engine.submit(prompt, params, callback_for(at))
        assert begun.wait(WAIT_S)
        first = list(engine._executor.processes)
        os.kill(first[1].pid, signal.SIGKILL)
        killed.set()
        for _ in range(4):
            ended.get(timeout=WAIT_S)
        assert [tuple(t for o in outputs[at] for t in o.token_ids) for at in range(4)] == expected
        assert engine.stats().failures == 1 and all(p.poll() is not None for p in first)
        os.kill(engine._executor.processes[0].pid, signal.SIGKILL)
        assert wait_until(lambda: engine.stats().failures == 2), "an idle engine must look after its ranks"
        assert [r.token_ids for r in engine.generate(few, params)] == expected
        third, directory = engine._executor.processes, engine._executor.directory
        os.kill(third[1].pid, signal.SIGKILL)
        assert engine.wait(WAIT_S) and engine.state == "failed"
        assert "gave up after 3 failures" in engine.error and "rank 1 was killed by signal 9" in engine.error
        assert all(p.poll() is not None for p in third) and not directory.exists()
        with pytest.raises(EngineError, match="rank 1 was killed"):
            engine.generate(few, params)


def test_a_message_to_a_dead_rank_does_not_block(model_dir: Path) -> None:
    """The window between two looks: the step itself must find out."""
    executor = make_executor(config(model_dir, executor="process", **RANKS))
    assert isinstance(executor, ProcessExecutor)
    executor.start()
    os.kill(executor.processes[3].pid, signal.SIGKILL)
    executor.processes[3].wait()
    with pytest.raises(EngineError, match="rank 3 was killed by signal 9"):  # not that there was no reply in time
        executor.send(Step(1, (prompt_rows(5), GroupRows())))
        executor.collect()
    executor.close()
    assert all(p.poll() is not None for p in executor.processes)


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_the_rank_that_failed_is_named_not_one_that_failed_with_it(model_dir: Path, kind: Any) -> None:
    executor = make_executor(config(model_dir, executor=kind, **RANKS))
    executor.start()
    good = Step(1, (prompt_rows(5, 6), prompt_rows(7)))
    bad = Step(1, (good.groups[0], prompt_rows(7, context=4)))  # its page table is too short
    try:
        for rank in range(4):
            executor._send(rank, bad if rank == 2 else good)
        with pytest.raises(EngineError, match=r"rank 2 failed: ValueError: 1 pages of 4 do not hold 5 tokens"):
            executor._await(object, time.monotonic() + WAIT_S, "step 1")  # type: ignore[type-var]
    finally:
        executor.close()


def test_ranks_that_do_not_execute_the_same_are_found_in_that_step(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that one rank missed, and a plan that one rank alone has chosen: the collectives ran, and mean nothing."""
    step = Step(4, (prompt_rows(5, 6), prompt_rows(7)))
    executor = make_executor(config(model_dir, executor="thread", **RANKS))
    executor.start()

    def run() -> None:
        executor.send(step)
        executor.collect()

    try:
        run()
        send, checksum = executor._send, ModelRunner.plan_checksum
        executor._send = lambda rank, m: send(rank, Step(3, m.groups) if rank == 2 else m)
        with pytest.raises(EngineError, match=r"rank 2 ran step 3 of \(2, 1\) rows .*, where step 4 of \(2, 1\) rows"):
            run()
        executor._send = send
        monkeypatch.setattr(
            ModelRunner, "plan_checksum", lambda runner, *step: checksum(runner, *step) ^ (runner.rank == 3)
        )
        with pytest.raises(
            EngineError, match=r"ranks diverge: rank 3 ran .* plan [0-9a-f]{8} .*, where .* as on others"
        ):
            run()
    finally:
        executor.close()


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


STARTS = """
import json, os, signal, sys
from pathlib import Path
from weft.engine.config.config import EngineConfig
from weft.engine.controller.rank_executors import make_executor
from weft.engine.grammar.grammar_sandbox import GrammarSandbox
from weft.serve.chat.templates import Templates
sandbox = GrammarSandbox(lambda: {"tokenizer": "byte", "vocabulary": 257, "ends": []})
e = make_executor(EngineConfig(Path(sys.argv[1]), executor="process", kv_tokens=512, attn_dp=2, ep=2))
e._launch(lambda: None); started = {f"rank {rank}": p.pid for rank, p in enumerate(e.processes)}
process, templates = sandbox._start(), Templates({})
started |= {"grammars": process.pid, "chat templates": templates._process.pid}
sleeper = os.fork() or signal.pause()
print(json.dumps([sleeper, started, str(e.directory)]), flush=True); signal.pause()
"""
"""Starts processes, forks one that holds copies of all descriptors and sleeps, and names them and the ranks' folder."""


@pytest.mark.nightly
def test_processes_of_a_killed_one_leave_before_they_are_up_and_though_its_forks_live(model_dir: Path) -> None:
    """Ranks take the controller's folder along."""
    with subprocess.Popen(
        [sys.executable, "-c", STARTS, str(model_dir)], cwd=Path(__file__).parents[2], stdout=subprocess.PIPE
    ) as controller:
        assert controller.stdout is not None
        sleeper, started, directory = json.loads(controller.stdout.readline())
        controller.kill()
    try:
        assert len(started) == 4
        wait_until(lambda: all(map(gone, started.values())) and not Path(directory).exists())
        assert not [what for what, pid in started.items() if not gone(pid)] and not Path(directory).exists()
        assert not gone(sleeper)
    finally:
        for pid in (sleeper, *started.values()):
            if not gone(pid):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(directory, ignore_errors=True)


def in_a_fork(work: Callable[[], Any]) -> str:
    """Its result, or its error in a line."""
    results, there = multiprocessing.Pipe(duplex=False)

    def main() -> None:
        try:
            there.send(repr(work()))
        except Exception as error:
            there.send(f"{type(error).__name__}: {error}")

    process = multiprocessing.get_context("fork").Process(target=main)
    process.start()
    try:
        assert results.poll(WAIT_S), "it hangs"
        return str(results.recv())
    finally:
        process.kill()
        process.join()


def test_a_forked_process_has_no_engine_and_leaves_its_parents_alone(model_dir: Path) -> None:
    params = SamplingParams(max_tokens=2, temperature=0)
    with Engine(config(model_dir, executor="process", attn_dp=2, ep=2)) as engine:
        expected = engine.generate([[1, 2]], params)[0].token_ids
        belongs = f"this Engine belongs to process {os.getpid()}, from which this process was forked"
        for name in ("generate", "comm_report", "wait", "reset_cache", "state", "drain"):
            assert in_a_fork(lambda name=name: getattr(engine, name)).startswith(f"EngineError: {name}: {belongs}")
        assert in_a_fork(lambda: engine.close()) == "None"
        assert engine.generate([[1, 2]], params)[0].token_ids == expected
        assert engine.state == "serving" and engine.stats().failures == 0


@pytest.mark.parametrize("ids", [(257,), (-1,), (2**70,)])
def test_stop_tokens_that_no_rank_could_ban_are_refused(model_dir: Path, ids: tuple[int, ...]) -> None:
    with Engine(config(model_dir)) as engine:
        with pytest.raises(ValueError, match="stop_token_ids: its tokens must be between 0 and 256"):
            engine.generate([[1]], SamplingParams(min_tokens=2, max_tokens=3, stop_token_ids=ids))
        assert engine.generate([[1]], GREEDY)[0].finish_reason == "length"


def test_extreme_parameters_do_not_end_the_engine(model_dir: Path) -> None:
    with pytest.raises(ValueError, match="top_k"):
        SamplingParams(top_k=2**31)
    with Engine(config(model_dir)) as engine:
        for extreme in (dict(seed=2**80), dict(seed=-(2**80)), dict(top_k=2**31 - 1), dict(temperature=1e-30)):
            assert len(engine.generate([[1, 2]], SamplingParams(max_tokens=3, ignore_eos=True, **extreme))[0].token_ids)
        assert engine.healthy


class Broken(Executor):
    """An executor without ranks whose first step waits for `go` and then fails."""

    def __init__(self, config: EngineConfig, go: threading.Event, closed: threading.Event):
        self.config, self.go, self.closed, self.groups = config, go, closed, (CacheGroup(Rule(), 128),)

    def prepare(self) -> None: ...

    def start(self, progress: Any = None, poll: Any = None) -> None:
        pass

    def send(self, step: Step) -> None: ...

    def collect(self) -> Any:
        self.go.wait(WAIT_S)
        raise RuntimeError("no step today")

    def check(self) -> None:
        pass

    def interrupt(self) -> None: ...

    def close(self, grace_s: float = 5.0) -> None:
        self.closed.set()

    def _launch(self, poll: Any) -> None: ...
    def _stop_ranks(self, grace_s: float) -> None: ...
    def _send(self, rank: int, message: Any) -> None: ...
    def _receive(self) -> None: ...
    def _dead(self, *, killed: bool = False) -> None: ...


def test_a_fault_ends_every_request_also_those_that_come_at_the_same_moment(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each submit either raises or gets its last output; none is lost between the look and the queue."""
    go, closed = threading.Event(), threading.Event()
    monkeypatch.setattr("weft.engine.controller.engine.make_executor", lambda config: Broken(config, go, closed))
    engine = Engine(config(model_dir, max_restarts=0))
    ended: queue.SimpleQueue[str] = queue.SimpleQueue()
    accepted, several = [], threading.Event()

    def callback(output: RequestOutput) -> None:
        increment = output.take()
        if increment.finish_reason:
            ended.put(increment.finish_reason)

    def client() -> None:
        while True:
            try:
                accepted.append(engine.submit([1, 2, 3], GREEDY, callback))
            except QueueFull:
                pass
            except EngineError:
                return
            if len(accepted) > 3:
                several.set()
            time.sleep(0.001)

    clients = [threading.Thread(target=client) for _ in range(3)]
    for thread in clients:
        thread.start()
    assert several.wait(WAIT_S)
    go.set()
    for thread in clients:
        thread.join()
    engine.close()
    assert {ended.get(timeout=WAIT_S) for _ in accepted} == {"error"}
    assert closed.is_set() and engine.error == "RuntimeError: no step today"
    with pytest.raises(EngineError, match="no step today"):
        engine.comm_report()


def test_an_idle_engine_does_not_spin(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits once, for whatever comes, however long that takes."""
    monkeypatch.setattr("weft.engine.controller.engine.IDLE_CHECK_S", 3600.0)
    waits, wait = [], RequestQueue.wait
    monkeypatch.setattr(RequestQueue, "wait", lambda queue, seconds: (waits.append(seconds), wait(queue, seconds))[1])
    with Engine(config(model_dir)) as engine:
        engine.generate([[1, 2]], GREEDY)
        engine.check_idle()
        seen, steps = len(waits), engine.stats().steps
        time.sleep(0.2)
        assert len(waits) <= seen + 1 and engine.stats().steps == steps


def test_ranks_share_the_memory_of_what_is_imported(model_dir: Path) -> None:
    """A collection that looked through it would copy two thirds."""
    with Engine(config(model_dir, executor="process")) as engine:
        lines = Path(f"/proc/{engine._executor.processes[0].pid}/smaps_rollup").read_text().splitlines()[1:]
    kib = {name: int(size.split()[0]) for name, size in (line.split(":") for line in lines)}
    assert kib["Private_Dirty"] < 0.4 * kib["Shared_Dirty"]


def test_ranks_of_tests_have_the_sessions_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whichever test is the first to start the process that forks them."""
    stands_in: Any = rank_processes.ForkServer
    monkeypatch.setattr(stands_in, "shared", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    stands_in(tmp_path)
    try:
        while not (environment := Path(f"/proc/{stands_in.shared._process.pid}/environ").read_bytes()):
            time.sleep(0.01)  # it has not been started yet
        assert b"PATH=" in environment and os.fsencode(tmp_path) not in environment
    finally:
        stands_in.shared.close()
