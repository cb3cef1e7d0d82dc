"""Profiles of a window of steps on every rank: CPU time, or a full trace by torch's profiler.

Ranks begin a window at the same step, and end it by themselves (`weft.engine.worker.rank_profiler`). CPU time is
measured without the profiler, since its own time would count too.
"""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from weft.engine.config.config import EngineError
from weft.engine.controller.engine import Engine
from weft.engine.controller.executor import Executor
from weft.engine.messages.rank_messages import Profiled, StartProfile, StopProfile
from weft.planner.spec import Mesh

SKIPPED = 2
"""Steps at the beginning of a traced window that are not counted: the profilers of ranks start at different times."""
MIN_STEPS = 2
"""Minimum steps of a window: a step lasts until the next one begins."""
RECORDING = "recording.json"
"""File with a recording except its traces, which have a file each."""
POLL_S = 0.005
"""Interval of reading the number of steps; reading it delays the engine's thread a little."""


class ProfileError(EngineError):
    """Error of a window of steps that could not be profiled, on a working engine."""


@dataclass(frozen=True)
class ProfiledSteps:
    """A profiled window.

    Attributes:
        steps: number of steps on every rank.
        seconds: from the start of the first step to the end of the last, on rank 0.
        controller_cpu_s: CPU time of the engine's thread.
        ranks: profile of each rank, in order.
    """

    steps: int
    seconds: float
    controller_cpu_s: float
    ranks: tuple[Profiled, ...]


def watch(engine: Engine, steps: int, *, traced: bool = False) -> ProfiledSteps:
    """Profile the next steps of an engine, filled by running requests. The caller's thread waits.

    traced: record a trace of each rank by torch's profiler, instead of only CPU time. Raises ProfileError if too few
    steps follow, and EngineError.
    """
    if engine.config.executor == "thread":
        raise ProfileError("ranks that are threads have no CPU times of their own; profile them as processes")

    def begin(executor: Executor) -> tuple[int, float]:
        executor.ask_all(StartProfile(steps, traced), "the profilers")
        return engine.stats().steps, time.thread_time()

    def end(executor: Executor) -> tuple[int, float, list[Profiled]]:
        so_far, cpu = engine.stats().steps, time.thread_time()
        return so_far, cpu, executor.ask_all(StopProfile(), "the profiles")

    first, cpu_before = engine.ask_ranks(begin)
    deadline = time.monotonic() + engine.config.step_timeout_s
    while (now := engine.stats()).steps <= first + steps + 1 and now.running and time.monotonic() < deadline:
        time.sleep(POLL_S)
    last, cpu_after, results = engine.ask_ranks(end)
    if (seen := min(rank.steps for rank in results)) < steps:
        raise ProfileError(
            f"only {seen} steps were run while {steps} were to be watched; keep requests running meanwhile"
        )
    results.sort(key=lambda rank: rank.rank)
    cpu_s = (cpu_after - cpu_before) * steps / (last - first)
    return ProfiledSteps(steps, results[0].seconds, cpu_s, tuple(results))


@dataclass(frozen=True)
class Recording:
    """Two windows of a running engine, one after the other.

    Attributes:
        window: the window without the profiler, for the time and the CPU time of a step.
        traced: each rank's profile of the second window, in rank order, with its trace.
    """

    mesh: Mesh
    window: ProfiledSteps
    traced: tuple[Profiled, ...]

    @property
    def report(self) -> dict[str, Any]:
        """Return time and CPU time of a step without the profiler, in µs, for JSON."""
        window, us = self.window, 1e6 / self.window.steps
        cpu = {
            "controller": us * window.controller_cpu_s,
            "rank": [us * rank.thread_cpu_s for rank in window.ranks],
            "rank_process": [us * rank.process_cpu_s for rank in window.ranks],
            "rank_threads": [{name: us * s for name, s in rank.threads.items()} for rank in window.ranks],
        }
        return {"unprofiled_step_us": us * window.seconds, "cpu_us_a_step": cpu}

    def write(self, folder: Path) -> list[str]:
        """Write a Chrome trace of each rank and RECORDING into a folder; return the names of the files."""
        for rank in self.traced:
            (folder / trace_file(rank.rank)).write_bytes(rank.trace)
        bare = replace(self, traced=tuple(structs.replace(rank, trace=b"") for rank in self.traced))
        (folder / RECORDING).write_bytes(msgspec.json.encode(bare))
        return [RECORDING, *(trace_file(rank.rank) for rank in self.traced)]

    @classmethod
    def read(cls, folder: Path) -> Recording:
        """Read a recording written by `write`. Raises OSError, and ValueError for another file."""
        bare = msgspec.json.decode((folder / RECORDING).read_bytes(), type=cls)
        traces = ((folder / trace_file(rank.rank)).read_bytes() for rank in bare.traced)
        pairs = zip(bare.traced, traces, strict=True)
        return replace(bare, traced=tuple(structs.replace(rank, trace=trace) for rank, trace in pairs))


def trace_file(rank: int) -> str:
    """Return the name of a rank's trace in the folder of a recording."""
    return f"rank{rank}.json.gz"


def record(engine: Engine, steps: int) -> Recording:
    """Watch the next steps of an engine that runs requests: once for CPU time, and once with the profiler.

    steps: MIN_STEPS or more. Raises ProfileError if the requests end before the steps are over, and EngineError.
    """
    window = watch(engine, steps)
    return Recording(engine.config.mesh, window, watch(engine, steps + SKIPPED, traced=True).ranks)


def merge_traces(traces: Sequence[dict[str, Any]], shifts_us: Sequence[float], out: Path) -> None:
    """Merge `traces` of ranks into a gzipped Chrome trace `out`, a process each. shifts_us: added to ranks' clocks."""
    starts = [trace["baseTimeNanoseconds"] / 1e3 for trace in traces]
    events: list[dict[str, Any]] = []
    for rank, (trace, shift) in enumerate(zip(traces, shifts_us, strict=True)):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        for event in trace["traceEvents"]:
            if event.get("ph") == "M" and event.get("name") != "thread_name":
                continue
            moved = event | {"pid": rank}
            if "ts" in event:
                moved["ts"] = event["ts"] + starts[rank] - min(starts) + shift
            if "id" in event:  # ids of arrows from a launch to its kernel
                moved["id"] = f"{rank}.{event['id']}"
            events.append(moved)
    with gzip.open(out, "wt", compresslevel=3) as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)
