"""The residual stream: the only API that a model author meets.

    stream.add(self.attn(stream.read(self.input_norm, rows=GROUP)))
    stream.add(self.moe(stream.read(self.post_norm, rows=self.moe.takes)))

`add` records a delta with its debt. `read` settles the debts, brings the residual up to date, normalises, and delivers
the rows asked for. A model's forward runs once on a `TraceStream`, which writes down its chain of reads and adds; the
planner solves the chain; `Stream` then walks the plan by index, with no decisions left. Where a block takes rows in
several forms, `rows` names them all, a trace writes each down, and the plan says which it is.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.profiler import record_function

from weft.comm.dispatch import DeviceDispatcher, Dispatcher, Dispatching, Work, no_rows
from weft.comm.rows import StepRows
from weft.comm.transport import COLLECTIVE, Epilogue, LiveSizes, Sizes, Transport
from weft.hidden import Hidden
from weft.kernels import float8
from weft.kernels.rows import add_rms_norm, quantising, rms_norm
from weft.place.experts import SEND, Dispatch
from weft.place.plan import Chain, Counts, Plan, Planner, Read, ReadPlan
from weft.place.show import fold
from weft.place.spec import Mesh, Placement, PlacementError, Rows
from weft.place.step import NORMED, RESIDUAL, Step

MOST_EVENTS = 4096
"""How many timed calls are kept before those that have ended are added up."""
OWN, GROUP, WORLD = Rows.OWN, Rows.GROUP, Rows.WORLD
Takes = Rows | tuple[Rows, ...]
"""The rows that a block reads; several: any of these, whichever serves the whole model best."""


class Norm(Protocol):
    """An RMSNorm's name, weight and eps: the stream normalises, in the last step of a plan where a kernel can."""

    path: str
    eps: float

    @property
    def weight(self) -> Tensor: ...


def _targets(mesh: Mesh, rows: Takes) -> tuple[Placement, ...]:
    """What a read may give, each placement once."""
    return tuple(dict.fromkeys(mesh.placement(r) for r in (rows if isinstance(rows, tuple) else (rows,))))


class _Deltas:
    """What was added since the last read: one tensor for each placement, summed as it comes."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []
        self.placements: list[Placement] = []
        self.origins: list[str] = []

    def add(self, delta: Hidden) -> None:
        if delta.placement.split:
            raise PlacementError(f"{delta.origin}: a stream takes whole rows, not {delta.placement}")
        if delta.placement in self.placements:
            at = self.placements.index(delta.placement)
            self.values[at] = self.values[at] + delta.value
            self.origins[at] += f" + {delta.origin}"
        else:
            self.values.append(delta.value)
            self.placements.append(delta.placement)
            self.origins.append(delta.origin)

    def named(self) -> str:
        return ", ".join(f"{o} {p}" for o, p in zip(self.origins, self.placements, strict=True)) or "nothing"


class TraceStream:
    """Writes down what a model reads and adds. Carries zero rows, which every block must take anyway.

    width: of the residual; dtype, device: of the activations. form: where a block takes rows in several forms, the
    number of the one to write down, or the last. forms: how many of them the model was seen to have.
    """

    def __init__(self, mesh: Mesh, width: int, dtype: torch.dtype, device: torch.device, form: int = 0):
        self.mesh, self._form, self.forms = mesh, form, 1
        self._empty = torch.empty(0, width, dtype=dtype, device=device)
        self._deltas = _Deltas()
        self._reads: list[Read] = []

    @property
    def reads(self) -> int:
        """How many there were so far."""
        return len(self._reads)

    def add(self, delta: Hidden) -> None:
        """Records a delta and its debt."""
        self._deltas.add(delta)

    def read(self, norm: Norm, rows: Takes) -> Hidden:
        """Records a read. Raises PlacementError when nothing was ever added."""
        if not self._reads and not self._deltas.values:
            raise PlacementError(f"{norm.path} reads a stream to which nothing was added")
        targets = _targets(self.mesh, rows)
        self.forms = max(self.forms, len(targets))
        target, index = targets[min(self._form, len(targets) - 1)], len(self._reads)
        self._reads.append(Read(norm.path, target, tuple(self._deltas.placements)))
        self._deltas = _Deltas()

        def quantised(run: int) -> float8.Rows:
            read = self._reads[index]
            self._reads[index] = replace(read, run=read.run or run)
            return float8.quantise(self._empty, run)

        def dispatch(x: Tensor, weight: Tensor, expert: Tensor, experts: int, work: Work) -> Tensor:
            if self._reads[index].dispatch is not None:
                raise PlacementError(f"what {norm.path} gives is dispatched twice; read the stream once for each block")
            self._reads[index] = replace(self._reads[index], dispatch=Dispatch(experts, expert.shape[1]))
            return work(x, weight, expert)

        return Hidden(self._empty, target, self.mesh, norm.path, dispatch=dispatch, quantised=quantised)

    def chain(self) -> Chain:
        """The trace. Raises PlacementError where a delta was added after the last read: it would be lost."""
        if self._deltas.values:
            raise PlacementError(f"added after the last read, so never settled: {self._deltas.named()}")
        return Chain(tuple(self._reads), self._empty.shape[1], self._empty.element_size())


@dataclass(frozen=True)
class StepStat:
    """Totals of one communicating step. site: the read it serves, layers folded into `*`.

    step: edge and placements; group: the group's name; count: calls; bytes: that the busiest rank must receive for it
    (`weft.place.exchange.rows_received`), whatever the transport's algorithm moves beyond. seconds: in the calls of
    steps that ran eagerly, as far as those that were timed in place tell, waiting for peers included; and in the calls
    of replayed graphs, what each takes alone, entered by all ranks together. predicted: seconds by the cost model.
    """

    site: str
    step: str
    group: str
    count: int = 0
    bytes: int = 0
    seconds: float = 0.0
    predicted: float = 0.0


StepKey = tuple[str, str]
"""A read's folded name and a step's text."""


def step_key(site: str, step: Step) -> StepKey:
    """By which a step's calls are added up. site: of its read."""
    return fold(site), str(step)


class StepTimes:
    """What communicating steps take, from the calls that were timed: on a GPU by events, which nobody waits for."""

    def __init__(self, device: torch.device):
        self._gpu = device.type == "cuda"
        self._totals: dict[tuple[Counts, StepKey], tuple[int, float]] = {}
        self._events: deque[tuple[Counts, StepKey, torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextmanager
    def timed(self, counts: Counts, site: str, step: Step) -> Iterator[None]:
        """Times what happens inside, as a range in torch's profiler too. counts: that the plan was made for."""
        kind = step.edge.kind if step.edge is not None else ""
        with record_function(f"{COLLECTIVE}{kind}"):
            yield from self._timed(counts, step_key(site, step))

    def _timed(self, counts: Counts, key: StepKey) -> Iterator[None]:
        if self._gpu:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            self._events.append((counts, key, begin, end))
            while len(self._events) > MOST_EVENTS and self._events[0][-1].query():
                self._read_event()
        else:
            began = time.perf_counter()
            yield
            self._add(counts, key, time.perf_counter() - began)

    def mean(self, counts: Counts, key: StepKey) -> float:
        """Seconds of a call, of steps with other counts where none was timed of these; 0 where none was timed at all.

        Waits for what a GPU has not yet done.
        """
        while self._events:
            self._read_event()
        known = self._totals.get((counts, key))
        found = [known] if known else [total for (_, k), total in self._totals.items() if k == key]
        return sum(seconds for _, seconds in found) / max(1, sum(calls for calls, _ in found))

    def _read_event(self) -> None:
        counts, key, begin, end = self._events.popleft()
        end.synchronize()
        self._add(counts, key, begin.elapsed_time(end) / 1e3)

    def _add(self, counts: Counts, key: StepKey, seconds: float) -> None:
        calls, total = self._totals.get((counts, key), (0, 0.0))
        self._totals[counts, key] = (calls + 1, total + seconds)


class Stats:
    """StepStats by step, in the order first seen, worked out from plans and how often each was walked."""

    def __init__(self) -> None:
        self._by_step: dict[StepKey, StepStat] = {}
        self._eager: Counter[tuple[StepKey, Counts]] = Counter()

    def record(
        self, planner: Planner, plan: Plan, counts: Counts, walks: int, alone: Mapping[StepKey, float] | None = None
    ) -> None:
        """Counts walks along a plan, each with `counts` tokens in each DP group.

        alone: of walks by a graph, the seconds that a call of each step takes alone.
        """
        for read, step, edge in plan.moves():
            key = step_key(read.site, step)
            stat = self._by_step.get(key, StepStat(*key, edge.group or ""))
            self._by_step[key] = replace(
                stat,
                count=stat.count + walks,
                bytes=stat.bytes + walks * int(planner.bytes_received(edge, counts)),
                seconds=stat.seconds + (walks * alone.get(key, 0.0) if alone else 0.0),
                predicted=stat.predicted + (walks * step.us / 1e6 if step.us < math.inf else 0.0),
            )
            if alone is None:
                self._eager[key, plan.counts] += walks

    def table(self, times: StepTimes | None = None) -> list[StepStat]:
        """The totals so far. times: of calls, to work out the seconds of eager steps by; without them these are 0."""
        found = dict(self._by_step)
        if times is not None:
            for (key, counts), calls in self._eager.items():
                found[key] = replace(found[key], seconds=found[key].seconds + calls * times.mean(counts, key))
        return list(found.values())


class Stream:
    """One forward pass of one rank along a plan.

    transports: by name, those that the planner was offered. rows: of this step; every rank passes the same counts.
    times: where this pass is to be timed. Raises PlacementError where the model reads or adds otherwise than it was
    traced, naming the block and both placements, before it communicates.
    """

    def __init__(self, plan: Plan, transports: Mapping[str, Transport], rows: StepRows, times: StepTimes | None = None):
        self.mesh, self._plan, self._transports, self._rows, self._times = plan.mesh, plan, transports, rows, times
        self._local = next(iter(transports.values()))
        self._index = 0
        self._deltas = _Deltas()
        self._residual: Tensor | None = None
        self._asked: dict[Takes, tuple[Placement, ...]] = {}
        self._all_live: dict[Rows, Tensor] = {}

    def add(self, delta: Hidden) -> None:
        """Adds a block's output to the stream; its debt is settled by the next read."""
        have = self._rows.room(delta.placement.rows)
        if delta.value.shape[0] != have:
            raise PlacementError(
                f"{delta.origin} adds {delta.value.shape[0]} rows as {delta.placement}, which means {have} rows here"
            )
        self._deltas.add(delta)

    def read(self, norm: Norm, rows: Takes) -> Hidden:
        """The normalised residual with everything added so far, complete, on the asked rows: of several, the plan's."""
        reads = self._plan.reads
        read_plan = reads[self._index] if self._index < len(reads) else None
        targets = self._asked.get(rows)
        if targets is None:
            targets = self._asked[rows] = _targets(self.mesh, rows)
        traced = read_plan.read if read_plan else None
        if traced is None or traced.site != norm.path or traced.target not in targets:
            expected = f"{traced.site} to read {traced.target}" if traced else "the end"
            asked = " or ".join(map(str, targets))
            raise PlacementError(f"{norm.path} reads {asked}, but the trace has {expected} here")
        if traced.deltas != tuple(self._deltas.placements):
            wanted = ", ".join(map(str, traced.deltas)) or "nothing"
            raise PlacementError(f"before {norm.path} the trace added {wanted}; now {self._deltas.named()} was added")
        assert read_plan is not None
        self._index += 1
        (value, quantised), target = self._walk(read_plan.steps, traced, norm), traced.target
        live, dispatch = self._live(target.rows, value), self._dispatch(read_plan, value.is_cuda)
        return Hidden(value, target, self.mesh, norm.path, live, dispatch, quantising(value, quantised))

    def finish(self) -> None:
        """Checks that the whole plan was walked. Raises PlacementError where the model stopped early."""
        if self._index != len(self._plan.reads):
            missed = self._plan.reads[self._index].read.site
            raise PlacementError(f"the model stopped before {missed}, where its peers would wait for ever")
        if self._deltas.values:
            raise PlacementError(f"added after the last read, so never settled: {self._deltas.named()}")

    def _walk(self, steps: tuple[Step, ...], read: Read, norm: Norm) -> tuple[Tensor, float8.Rows | None]:
        """The normalised rows; in FP8 too, where products take them so and nothing moves them once they are made."""
        site, run = read.site, read.run if steps[-1].op in ("norm", "finish") else 0
        deltas, origins = self._deltas.values, self._deltas.origins
        residual, normed, rows = self._residual, None, None
        self._deltas = _Deltas()

        def in_float8(x: Tensor) -> float8.Rows | None:
            return float8.unfilled(x, run) if run else None

        for step, then in zip(steps, (*steps[1:], None), strict=True):
            if step.op == "move":
                if step.operand == RESIDUAL:
                    assert residual is not None
                    residual = self._move(step, residual, site, RESIDUAL)
                elif step.operand == NORMED:
                    assert normed is not None
                    normed = self._move(step, normed, site, norm.path)
                else:
                    assert isinstance(step.operand, int)
                    deltas[step.operand] = self._move(step, deltas[step.operand], site, origins[step.operand])
            elif step.op == "norm":
                assert residual is not None
                if normed is None:
                    rows = in_float8(residual)
                    normed = rms_norm(residual, norm.weight, norm.eps, rows)
            elif step.op == "finish":
                assert residual is not None
                rows = in_float8(residual)
                epilogue = Epilogue(residual, norm.weight, norm.eps, rows)
                residual, normed = self._move(step, deltas.pop(), site, origins.pop(), epilogue).unbind(0)
            else:
                assert isinstance(step.operand, int)
                delta, origin = deltas.pop(step.operand), origins.pop(step.operand)
                if step.op == "merge":
                    deltas[step.into] = deltas[step.into] + delta
                    origins[step.into] += f" + {origin}"
                elif residual is None:
                    residual = delta
                elif then is not None and then.op == "norm":
                    rows = in_float8(residual)
                    residual, normed = add_rms_norm(residual, delta, norm.weight, norm.eps, rows)
                else:
                    residual = residual + delta
        assert normed is not None and residual is not None
        self._residual = residual
        return normed, rows

    def _live(self, rows: Rows, value: Tensor) -> Tensor | None:
        """As `Hidden.live`; on a GPU always, where kernels ask for it in every layer."""
        live = self._rows.live(rows)
        if live is None and value.is_cuda:
            live = self._all_live.get(rows)
            if live is None:
                live = self._all_live[rows] = torch.full((1,), len(value), dtype=torch.int32, device=value.device)
        return live

    def _dispatch(self, read_plan: ReadPlan, on_gpu: bool) -> Dispatching | None:
        """What takes the rows of a read to their experts, by the plan's transports; None where they stay."""
        if not read_plan.inside:
            return None
        steps = {step.operand: step for step in read_plan.inside if step.op == "exchange"}
        if self._rows.idle:
            return no_rows
        site, world = read_plan.read.site, tuple(range(self.mesh.world))

        def carry(name: str, x: Tensor, sizes: Sizes | LiveSizes) -> Tensor:
            step = steps[name]
            assert step.edge is not None
            exchange: Callable[..., Tensor] = self._transports[step.transport].exchange
            with nullcontext() if self._times is None else self._times.timed(self._plan.counts, site, step):
                return exchange(x, step.edge.exchange, world, sizes)

        if on_gpu:
            room = tuple(self.mesh.row_count(Rows.OWN, rank, self._rows.capacity) for rank in world)
            return DeviceDispatcher(self.mesh, room, carry)
        return Dispatcher(self.mesh, self._rows.rank, carry, self._transports[steps[SEND].transport].empty)

    def _move(self, step: Step, x: Tensor, site: str, origin: str, epilogue: Epilogue | None = None) -> Tensor:
        edge = step.edge
        assert edge is not None
        if not edge.moves:
            return self._rows.carry(edge, x, self._local)
        if self._rows.idle:  # no rank holds a row, and every rank knows it
            rows = self._rows.room(edge.dst.rows)
            return x.new_empty((2, rows, x.shape[1]) if epilogue else (rows, x.shape[1]))
        try:
            with nullcontext() if self._times is None else self._times.timed(self._plan.counts, site, step):
                return self._rows.carry(edge, x, self._transports[step.transport], epilogue)
        except PlacementError as error:
            raise PlacementError(f"{origin}, before {site}: {edge}: {error}") from error
