"""Measure the CPU time of a decode step in the controller and in a rank, without the model: nothing is computed.

The controller's loop runs as it is, with messages encoded and decoded, against ranks that reply at once with a token
per row; a rank runs the steps that the controller sent, with graphs that do nothing when replayed. Sockets, launches of
kernels and the work of callbacks are omitted. Both are the CPU time of one thread, the minimum over rounds, as all
other work of the machine only adds to it. Prints a line of JSON for each number of sequences.

--take: callbacks get every increment at once. Its making, which a server does on another thread, is then in the
controller's time.

    python bench/scripts/step_cpu.py --sequences 1 16 64 256 --pause-ms 2

--pause-ms: both sleep before each step, as they do while a GPU runs; caches are cold then, and a step takes two or
three times as long as without.

    git worktree add ../before COMMIT
    python bench/scripts/step_cpu.py --trees ../before/src src --runs 4 --json step_cpu.json

runs two source trees in turn, so a disturbance of the machine affects both, prints medians of their runs with the
ratio, and writes all runs. Each tree is measured by its own checkout's copy of this script.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from weft.comm.reference import ReferenceWorld
from weft.engine.config.config import EngineConfig
from weft.engine.controller.engine import Engine
from weft.engine.controller.executor import Executor
from weft.engine.kv.cache_spec import CacheGroup, Rule
from weft.engine.messages.rank_messages import Ran, Result, Step, decode_from_rank, decode_to_rank, encode
from weft.engine.messages.request import SamplingParams
from weft.engine.output.request_output import RequestOutput
from weft.engine.worker import model_runner as runner_module
from weft.engine.worker.step_graphs import StepGraphs
from weft.engine.worker.worker import Worker
from weft.planner.cost import costs
from weft.stream.step_rows import PaddedRows
from weft.tune.host import describe_host
from weft_bench.trees import alternate, copy_of, run_python

ROUND = 128
"""Steps that are timed together: a multiple of the steps between two pages of a sequence."""
TOKEN = 70


class MadeUpRanks(Executor):
    """Ranks that need neither start nor end."""

    def __init__(self, config: EngineConfig):
        super().__init__(config)
        self.groups = (CacheGroup(Rule(), config.num_pages),)

    def start(self, progress: Any = None, poll: Callable[[], None] = lambda: None) -> None:
        self._results = [type(self._in_flight)() for _ in range(self.mesh.world)]

    def _launch(self, poll: Any) -> None: ...
    def _stop_ranks(self, grace_s: float) -> None: ...
    def _send(self, rank: int, message: Any) -> None: ...
    def _dead(self, *, killed: bool = False) -> None: ...


class InstantRanks(MadeUpRanks):
    """Ranks that reply with the same token for every row. rounds, own: CPU seconds of a step, and of their part."""

    def __init__(self, config: EngineConfig, rounds: int, pause_s: float):
        super().__init__(config)
        self._replies: list[bytes] = []
        self.sent: list[bytes] = []
        self.rounds: list[float] = []
        self.own: list[float] = []
        self._most, self._pause_s, self._steps, self._began = rounds, pause_s, 0, 0.0
        self.done = threading.Event()

    def _send_all(self, message: Any) -> None:
        self.sent.append(encode(message))
        if message.groups[0].chunks or message.groups[0].joins:
            self._steps = 0
        elif self._steps % ROUND:
            self._steps += 1
        else:  # the clock is a system call, and slow: it is asked twice a round
            elapsed = time.thread_time() - self._began
            for _ in range(ROUND):
                self._replies_to(message)
            self.own.append((time.thread_time() - self._began - elapsed) / ROUND)
            if self._steps:
                self.rounds.append(elapsed / ROUND)
            self._steps += 1
            self._began = time.thread_time()
            if len(self.rounds) == self._most:
                self.done.set()
        self._replies += self._replies_to(message)
        time.sleep(self._pause_s)

    def _replies_to(self, message: Step) -> list[bytes]:
        replies = []
        for rank in range(self.mesh.world):
            group = self.mesh.group_of(rank)
            leads = rank == self.mesh.leader(group)
            ran = Ran(message.number, message.counts, 7, 9)
            tokens = (TOKEN,) * len(message.groups[group].sampled_rows)
            replies.append(encode(Result(rank, ran, tokens if leads else ())))
        return replies

    def _receive(self, *_: float) -> Any:
        return decode_from_rank(self._replies.pop(0))


def controller(
    config: EngineConfig, sequences: int, rounds: int, pause_s: float, take: bool
) -> tuple[float, list[bytes]]:
    """Return the seconds of a step, and the first messages that were sent."""
    params = SamplingParams(max_tokens=config.max_model_len - 32, temperature=0.0, ignore_eos=True)

    def listen(output: Any) -> None:
        if take and isinstance(output, RequestOutput):
            output.take()

    with Engine(config, executor=lambda given: InstantRanks(given, rounds, pause_s)) as engine:
        ranks: Any = engine._executor
        engine.submit_all([([5 + i % 200] * (9 + i % 7), params, listen) for i in range(sequences)])
        assert ranks.done.wait(60), "too many rounds for the model's context"
    return min(ranks.rounds) - min(ranks.own), ranks.sent[: 3 * ROUND]


class NoGraph:
    def replay(self) -> None: ...


def no_capture(graphs: StepGraphs, progress: Any = None) -> None:
    for shape in graphs.shapes:
        graphs._counts[shape.rows] = PaddedRows(graphs._mesh, graphs._rank, shape.rows, graphs._device)
        logits = torch.zeros(shape.sampled, graphs._model.config.vocab_size)
        graphs._graphs[shape] = (NoGraph(), logits)  # type: ignore[assignment]
    graphs.token_ring.rows.fill_(TOKEN)


@torch.inference_mode()
def rank(config: EngineConfig, sequences: int, messages: list[bytes], pause_s: float) -> float:
    """Return the seconds of a step, of the first thread alone."""
    StepGraphs.capture = no_capture  # type: ignore[method-assign]
    runner_module.exchange_times = lambda *_: {}  # type: ignore[assignment]
    world = ReferenceWorld(config.mesh.world)
    worker = Worker(config, [world.transports()[0]], costs("cpu"), lambda message: None)
    worker.capture(config.max_model_len)
    assert worker.device_rows is not None
    worker.table.last_token.fill_(TOKEN)
    times: list[float] = []
    for message in messages:
        time.sleep(pause_s)
        began = time.thread_time()
        step = decode_to_rank(message)
        assert isinstance(step, Step)
        if any(group.chunks for group in step.groups):  # a prompt's step: only its news count here
            rows = step.groups[worker.mesh.group_of(worker.rank)]
            worker.table.apply(rows)
            worker.device_rows.apply(rows)
            worker.table.advance(rows)
            worker.device_rows.ran(worker.table, rows)
            worker.table.last_token.fill_(TOKEN)
            continue
        finish = worker.step(step)
        if len(step.groups[0].decode_rows) == sequences // config.attn_dp:
            times.append(time.thread_time() - began)
        finish()  # on a GPU another thread does
    return min(statistics.mean(times[i : i + ROUND]) for i in range(0, len(times) - ROUND + 1, ROUND))


def compare(asked: argparse.Namespace) -> None:
    """Run both trees in turn, print the medians of their figures, and write all runs."""
    options = ["--rounds", str(asked.rounds), "--world", str(asked.world), "--pause-ms", str(asked.pause_ms)]
    options += ["--sequences", *map(str, asked.sequences), *["--take"] * asked.take]

    def run(tree: Path) -> list[dict[str, Any]]:
        return [json.loads(line) for line in run_python(tree, copy_of(__file__, tree), *options).splitlines()]

    found = alternate(asked.runs, asked.trees, run)
    runs = {name: list(itertools.chain.from_iterable(of)) for name, of in found.items()}
    for sequences in asked.sequences:
        for what in ("controller_us", "rank_us"):
            of_runs = ([r[what] for r in of if r["sequences"] == sequences] for of in runs.values())
            before, after = map(statistics.median, of_runs)
            print(f"{sequences:4} sequences, {what:14}{before:8.1f}{after:8.1f}{before / after:7.2f}")
    if asked.json:
        about = {"what": "bench/scripts/step_cpu.py", "host": describe_host()}
        about |= {"pause_ms": asked.pause_ms, "take": asked.take}
        asked.json.write_text(json.dumps(about | runs) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--world", type=int, default=2, help="ranks of the controller, attn_tp")
    parser.add_argument("--pause-ms", type=float, default=0.0)
    parser.add_argument("--take", action="store_true", help="callbacks get their increments")
    parser.add_argument("--trees", type=Path, nargs=2, help="source folders of two checkouts: before, after")
    parser.add_argument("--runs", type=int, default=4, help="runs of each tree")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.trees:
        return compare(asked)
    torch.set_num_threads(1)
    for sequences in asked.sequences:
        shape = dict(max_running=sequences, max_model_len=1024, max_batch_tokens=8192, kv_tokens=sequences * 1088)
        together = EngineConfig(executor="thread", attn_tp=asked.world, ep=asked.world, **shape)
        taken, messages = controller(together, sequences, asked.rounds, asked.pause_ms / 1e3, asked.take)
        of_rank = rank(EngineConfig(executor="thread", **shape), sequences, messages, asked.pause_ms / 1e3)
        line = dict(sequences=sequences, controller_us=round(1e6 * taken, 1), rank_us=round(1e6 * of_rank, 1))
        print(json.dumps(line | {"bytes": statistics.median(map(len, messages))}), flush=True)


if __name__ == "__main__":
    main()
