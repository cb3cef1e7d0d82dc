"""Measure what the server adds to the time to first tokens when many prompts arrive at once. No GPU.

The server, its engine's thread and the scheduler are `weft serve`'s, with ranks that reply after a made-up time (as on
an H200 with 24 layers of Qwen3-30B-A3B, unless --row-us and --step-ms say otherwise). The clients are `weft bench
serving`, another process. Prints a line of JSON: times to the first token in ms, their mean, 99th percentile, and their
mean if they come evenly; how long the ranks had no step until the last prompt was sent to them; how long after the
first request the first step came that is at least half full; intervals between tokens in ms, and tokens per second; CPU
seconds of each process; with API processes also the seconds until all have started, and the means of the CPU seconds
that each needs for that and of its memory in MB, resident and its own alone. --switch-ms sets the interval after which
a thread that waits for Python's lock asks for it, which `weft serve` shortens.

    python bench/scripts/burst.py --clients 256 --input-len 1024

    git worktree add ../before COMMIT
    python bench/scripts/burst.py --trees ../before/src src --runs 3

runs two source trees in turn, each by its own checkout's copy of this script, and prints the medians of their runs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from step_cpu import TOKEN, MadeUpRanks
from weft.engine.assets import embedded_model_dir
from weft.engine.config.config import EngineConfig
from weft.engine.controller.engine import Engine
from weft.engine.messages.rank_messages import AskReport, GroupRows, Ran, Report, Result, Step, decode_from_rank, encode
from weft.serve import app
from weft.serve.http import run
from weft.serve.http.api_processes import ApiProcesses
from weft.serve.http.engine_client import EngineClient
from weft.serve.http.loading import bind
from weft.serve.http.metrics import Metrics
from weft.serve.http.options import Options
from weft.serve.http.shared import Shared
from weft_bench.trees import alternate, copy_of, run_python


class TimedRanks(MadeUpRanks):
    """Rank that replies with the same token for every row when its step is over.

    without_step: seconds between steps, up to the step with the last prompt. full_step: time of the first step that is
    at least half full.
    """

    def __init__(self, config: EngineConfig, seconds: Callable[[GroupRows], float]):
        super().__init__(config)
        self._replies = deque[tuple[float, bytes]]()
        self._seconds, self._free, self._pauses, self.without_step = seconds, 0.0, 0.0, 0.0
        self.full_step = float("nan")

    def _send_all(self, message: Any) -> None:
        if not isinstance(message, Step):
            return
        encode(message)
        now, rows = time.monotonic(), message.groups[0]
        if math.isnan(self.full_step) and 2 * rows.count >= self.config.batch_tokens:
            self.full_step = now
        self._pauses += max(0.0, now - self._free) if self._free else 0.0
        self._free = max(now, self._free) + self._seconds(rows)
        self.without_step = self._pauses if rows.joins else self.without_step
        ran = Ran(message.number, message.counts, 7, 9)
        self._replies.append((self._free, encode(Result(0, ran, (TOKEN,) * len(rows.sampled_rows)))))

    def _receive(self, *_: float) -> Any:
        if not self._replies:
            time.sleep(0.001)
            return None
        over, reply = self._replies.popleft()
        time.sleep(max(0.0, over - time.monotonic()))
        return decode_from_rank(reply)

    def _send(self, rank: int, message: Any) -> None:
        if isinstance(message, AskReport):
            self._replies.append((0.0, encode(Report((), ()))))


def measure(asked: argparse.Namespace) -> dict[str, float]:
    """Return the figures of one burst."""

    def seconds(rows: GroupRows) -> float:
        if rows.chunks:
            return (asked.step_ms + asked.row_us * rows.count / 1e3) / 1e3
        return 0.0015 + 0.00012 * min(len(rows.decode_rows), 60)

    with tempfile.TemporaryDirectory(prefix="weft-") as folder:
        model = Path(shutil.copytree(embedded_model_dir(), Path(folder) / "model"))
        changed = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 1 << 15}
        (model / "config.json").write_text(json.dumps(changed))
        length = asked.input_len + asked.output_len + 8
        config = EngineConfig(
            model=model, executor="thread", max_running=asked.clients, max_batch_tokens=asked.batch_tokens,
            max_model_len=length, kv_tokens=(asked.clients + 8) * (length + 16),
        )  # fmt: skip
        options, servers, began = Options(), asked.api_servers, time.monotonic()
        with (
            bind("127.0.0.1", 0) as listener,
            nullcontext() if servers == 1 else ApiProcesses(servers, listener) as processes,
            Engine(config, executor=lambda given: TimedRanks(given, seconds)) as engine,
        ):
            ranks: Any = engine._executor
            shared = Shared(engine, metrics := Metrics(engine), options, "burst")
            if processes is None:
                client = EngineClient(engine, metrics, None)
                server: Any = run.Server(app.create_app(client, shared, "burst", options), client, options)
            else:
                server, setup = processes, {"options": options.to_dict(), "model_name": "burst"}
                processes.prepare(shared, setup | {"log_format": "text", "log_level": "warning"})
            started = time.monotonic() - began
            pids = [os.getpid()] if processes is None else [os.getpid(), *processes.pids]
            run.prepare_interpreter()
            if asked.switch_ms is not None:
                sys.setswitchinterval(asked.switch_ms / 1e3)
            arrivals, submit_all = [], engine.submit_all

            def submit(*given: Any, **more: Any) -> list[int]:
                arrivals.append(time.monotonic())
                return submit_all(*given, **more)

            engine.submit_all = submit  # type: ignore[method-assign]
            serving = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
            serving.start()
            before, memory = [cpu_s(pid) for pid in pids], list(map(memory_mb, pids[1:]))
            found = _load(f"http://127.0.0.1:{listener.getsockname()[1]}", asked)
            cpu = [cpu_s(pid) - earlier for pid, earlier in zip(pids, before, strict=True)]
            server.stop()
            serving.join()
    mean, last = found["mean_ttft_ms"], found["p99_ttft_ms"]
    figures = {"ttft_mean_ms": mean, "ttft_p99_ms": last, "ttft_shared_ms": 2 * mean - last}
    figures |= {"ranks_idle_ms": 1e3 * ranks.without_step, "full_step_ms": 1e3 * (ranks.full_step - arrivals[0])}
    figures |= {"itl_p50_ms": found["median_itl_ms"], "itl_p99_ms": found["p99_itl_ms"]}
    figures |= {"tokens_per_s": found["output_throughput"], "server_cpu_s": sum(cpu)}
    figures |= {f"cpu_s_{'engine' if at == 0 else at}": seconds for at, seconds in enumerate(cpu)}
    figures["cores_per_1000_tokens_s"] = 1000 * sum(cpu) / (asked.clients * asked.output_len)
    if memory:
        resident, own = map(statistics.mean, zip(*memory, strict=True))
        figures |= {"start_s": started, "start_cpu_s": statistics.mean(before[1:])}
        figures |= {"resident_mb": resident, "own_mb": own}
    return {name: round(value, 4) for name, value in figures.items()}


def cpu_s(pid: int) -> float:
    """Return the seconds of CPU time that a process has used."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def memory_mb(pid: int) -> tuple[float, float]:
    """Return the MB of memory that a process maps and uses, and the part that no other process shares."""
    lines = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    kb = {name: float(value) for name, value, _ in lines}
    return kb["Rss:"] / 1e3, (kb["Private_Clean:"] + kb["Private_Dirty:"]) / 1e3


def _load(url: str, asked: argparse.Namespace) -> Any:
    command = [sys.executable, "-m", "weft.serve.cli.main", "bench", "serving", "--base-url", url, "--num-warmups", "0"]
    command += ["--num-prompts", str(asked.clients), "--random-input-len", str(asked.input_len)]
    command += ["--random-output-len", str(asked.output_len), "--ignore-eos", "--json"]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def compare(asked: argparse.Namespace) -> None:
    """Run both trees in turn and print the medians of their figures."""
    options = [
        f"--{name.replace('_', '-')}={value}"
        for name, value in vars(asked).items()
        if name not in ("trees", "runs") and value is not None
    ]
    runs = alternate(
        asked.runs, asked.trees, lambda tree: json.loads(run_python(tree, copy_of(__file__, tree), *options))
    )
    for figure in runs["before"][0]:
        before, after = (statistics.median(each[figure] for each in of) for of in runs.values())
        print(f"{figure:24}{before:10.2f}{after:10.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--step-ms", type=float, default=3.0, help="time of a step with prompts, without its rows")
    parser.add_argument("--row-us", type=float, default=4.5, help="time per row of a step with prompts")
    parser.add_argument("--api-servers", type=int, default=1, help="processes that serve HTTP; 1: the engine's")
    parser.add_argument("--switch-ms", type=float, help="defaults to that of weft serve; Python's own is 5")
    parser.add_argument("--trees", type=Path, nargs=2, help="source folders of two checkouts: before, after")
    parser.add_argument("--runs", type=int, default=3, help="runs of each tree")
    asked = parser.parse_args()
    compare(asked) if asked.trees else print(json.dumps(measure(asked)))


if __name__ == "__main__":
    main()
