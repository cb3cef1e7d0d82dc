"""A rank's profile of a window of steps: CPU time, or a full trace by torch's profiler.

Every rank sees the same steps in the same order, so all begin a window at the same step, and each ends it by itself.
"""

from __future__ import annotations

import gzip
import json
import tempfile
import time
from pathlib import Path

import msgspec
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from weft.engine.config.threads import cpu_by_thread
from weft.engine.messages.rank_messages import Profiled, StartProfile
from weft.engine.worker.graph_inputs import Shape
from weft.engine.worker.model_runner import ModelRunner
from weft.engine.worker.run_stats import RunStats
from weft.planner.chain import Counts

STEP = "weft step "
"""Prefix of a step's range in a trace, before the step's number."""


class RankProfiler:
    """Profiler of a window of steps on one rank. `begin` is called for every step; outside a window it does nothing."""

    def __init__(self, runner: ModelRunner):
        self._runner, self._wanted = runner, 0
        self._profiler: profile | None = None
        self._range: record_function | None = None
        self._done = Profiled(runner.rank, 0, 0.0, 0.0, 0.0)

    def start(self, message: StartProfile) -> Profiled:
        """Begin a window. The profiler runs when this returns, so no step waits for its start."""
        self._wanted = message.steps
        self._steps: list[tuple[int, Counts, Shape | None]] = []
        self._done = Profiled(self._runner.rank, 0, 0.0, 0.0, 0.0)
        if message.traced:
            on_gpu = self._runner.model.embed.weight.device.type == "cuda"
            self._profiler = profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu])
            self._profiler.start()
            self._runner.stats.timing_interval = 1  # give each exchange its range
        return self._done

    def begin(self, number: int, counts: Counts, shape: Shape | None) -> None:
        """Note the beginning of a step, and the end of the previous one. counts: rows of every DP group. shape: of the
        step's graph, if any.
        """
        if not self._wanted:
            return
        if not self._steps:
            self._threads = cpu_by_thread()
            self._began = self._clocks()
        if len(self._steps) == self._wanted:
            self._end()
            return
        self._steps.append((number, counts, shape))
        if self._profiler is not None:
            self._close_range()
            self._range = record_function(f"{STEP}{number}")
            self._range.__enter__()

    def stop(self) -> Profiled:
        """End the window, if it has not ended, and add the profiler's trace."""
        if self._wanted:
            self._end()
        if self._profiler is not None:
            with tempfile.TemporaryDirectory(prefix="weft-profile-") as folder:
                file = Path(folder) / "trace.json"
                self._profiler.export_chrome_trace(str(file))
                trace = gzip.compress(file.read_bytes(), compresslevel=3)
            kinds = list({(counts, shape) for _, counts, shape in self._steps})
            steps = [(number, kinds.index((counts, shape))) for number, counts, shape in self._steps]
            about = {
                "rank": self._runner.rank,
                "steps": steps,
                "moves": [self._runner.stats.moves(*kind) for kind in kinds],
            }
            self._profiler = None
            return msgspec.structs.replace(self._done, trace=trace, about=json.dumps(about))
        return self._done

    def _end(self) -> None:
        self._wanted = 0
        if self._steps:
            wall, thread, process = (now - then for now, then in zip(self._clocks(), self._began, strict=True))
            seconds = {name: cpu - self._threads.get(name, 0.0) for name, cpu in cpu_by_thread().items()}
            self._done = Profiled(self._runner.rank, len(self._steps), wall, thread, process, seconds)
        if self._profiler is not None:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            self._close_range()
            self._profiler.stop()
            self._runner.stats.timing_interval = RunStats.timing_interval

    def _close_range(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    @staticmethod
    def _clocks() -> tuple[float, float, float]:
        return time.perf_counter(), time.thread_time(), time.process_time()
