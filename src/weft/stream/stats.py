"""The exchanges of a rank's steps: calls, bytes and times."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch.profiler import record_function

from weft.comm.transport import COLLECTIVE
from weft.planner.chain import Counts
from weft.planner.op import Op
from weft.planner.plan import Plan, Planner
from weft.planner.show import fold
from weft.stream.step_stat import StepStat

MAX_EVENTS = 4096
"""Maximum number of timed calls kept before the finished ones are added up."""


StepKey = tuple[str, str]
"""Folded name of a read and text of a step."""


def step_key(site: str, op: Op) -> StepKey:
    """Return the key by which an op's calls are added up. site: of its read."""
    return fold(site), str(op)


class StepTimes:
    """Times of communicating steps, from the timed calls. On a GPU events time them; no thread waits for these."""

    def __init__(self, device: torch.device):
        self._gpu = device.type == "cuda"
        self._totals: dict[tuple[Counts, StepKey], tuple[int, float]] = {}
        self._events: deque[tuple[Counts, StepKey, torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextmanager
    def timed(self, counts: Counts, site: str, op: Op) -> Iterator[None]:
        """Time the calls inside the context, and mark them as a range in torch's profiler. counts: the plan's."""
        key = step_key(site, op)
        with record_function(f"{COLLECTIVE}{' + '.join(op.kinds)}"):
            if not self._gpu:
                began = time.perf_counter()
                yield
                self._add(counts, key, time.perf_counter() - began)
                return
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
        self._events.append((counts, key, begin, end))
        while len(self._events) > MAX_EVENTS and self._events[0][-1].query():
            self._read_event()

    def mean(self, counts: Counts, key: StepKey) -> float:
        """Return the seconds of a call; of other counts if none of these was timed; 0 if none was timed at all.

        Waits for the GPU's queued events.
        """
        while self._events:
            self._read_event()
        known = self._totals.get((counts, key))
        totals = [known] if known else [total for (_, k), total in self._totals.items() if k == key]
        return sum(seconds for _, seconds in totals) / max(1, sum(calls for calls, _ in totals))

    def _read_event(self) -> None:
        counts, key, begin, end = self._events.popleft()
        end.synchronize()
        self._add(counts, key, begin.elapsed_time(end) / 1e3)

    def _add(self, counts: Counts, key: StepKey, seconds: float) -> None:
        calls, total = self._totals.get((counts, key), (0, 0.0))
        self._totals[counts, key] = (calls + 1, total + seconds)


class Stats:
    """StepStats by step, in the order first seen, computed from plans and the number of walks along each."""

    def __init__(self) -> None:
        self._by_step: dict[StepKey, StepStat] = {}
        self._eager: Counter[tuple[StepKey, Counts]] = Counter()

    def record(
        self, planner: Planner, plan: Plan, counts: Counts, walks: int, alone: Mapping[StepKey, float] | None = None
    ) -> None:
        """Count walks along a plan, each with `counts` tokens in each DP group.

        For eager steps this counts the ops with bytes that follow from these counts; other ops are counted as they run.
        alone: for walks by a graph, seconds of a call of each op in isolation.
        """
        for site, op in plan.ops(optional=False):
            if not op.by_counts and alone is None:
                continue
            key, us = step_key(site, op), op.us if op.us < math.inf else 0.0
            seconds = walks * alone.get(key, 0.0) if alone else 0.0
            self.add(site, op, walks, walks * planner.received(op, counts), seconds, walks * us / 1e6)
            if alone is None:
                self._eager[key, plan.counts] += walks

    def add(self, site: str, op: Op, calls: int, moved: int, seconds: float, predicted: float) -> None:
        """Count `calls` of an op at `site`: `moved` bytes, `seconds` and `predicted` seconds are of all these calls."""
        key = step_key(site, op)
        stat = self._by_step.get(key, StepStat(*key, op.group))
        self._by_step[key] = replace(
            stat,
            count=stat.count + calls,
            bytes=stat.bytes + moved,
            seconds=stat.seconds + seconds,
            predicted=stat.predicted + predicted,
        )

    def table(self, times: StepTimes | None = None) -> list[StepStat]:
        """Return the totals so far. times: source of the seconds of eager calls; without them these seconds are 0."""
        totals = dict(self._by_step)
        if times is not None:
            for (key, counts), calls in self._eager.items():
                totals[key] = replace(totals[key], seconds=totals[key].seconds + calls * times.mean(counts, key))
        return list(totals.values())
