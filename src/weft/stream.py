"""The residual stream: the only API that a model author meets.

    stream.add(self.attn(stream.read(self.input_norm, rows=GROUP)))
    stream.add(self.moe(stream.read(self.post_norm, rows=WORLD)))

`add` records a delta with its debt. `read` settles the debts, brings the residual up to date, normalises, and delivers
the rows asked for. A model's forward runs once on a `TraceStream`, which writes down its chain of reads and adds; the
planner solves the chain; `Stream` then walks the plan by index, with no decisions left.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from weft.comm.transport import Epilogue, Transport, carry_out
from weft.hidden import Hidden
from weft.kernels.plain import rms_norm
from weft.place.plan import Chain, Counts, Plan, Planner, Read
from weft.place.show import fold
from weft.place.spec import Mesh, Placement, PlacementError, Rows
from weft.place.step import NORMED, RESIDUAL, Step

OWN, GROUP, WORLD = Rows.OWN, Rows.GROUP, Rows.WORLD


class Norm(Protocol):
    """An RMSNorm's name, weight and eps: the stream normalises, in the last step of a plan where a kernel can."""

    path: str
    eps: float

    @property
    def weight(self) -> Tensor: ...


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

    width: of the residual; dtype, device: of the activations (the `meta` device needs no weights in memory).
    """

    def __init__(self, mesh: Mesh, width: int, dtype: torch.dtype, device: torch.device):
        self.mesh = mesh
        self._empty = torch.empty(0, width, dtype=dtype, device=device)
        self._deltas = _Deltas()
        self._reads: list[Read] = []

    def add(self, delta: Hidden) -> None:
        """Records a delta and its debt."""
        self._deltas.add(delta)

    def read(self, norm: Norm, rows: Rows) -> Hidden:
        """Records a read. Raises PlacementError when nothing was ever added."""
        if not self._reads and not self._deltas.values:
            raise PlacementError(f"{norm.path} reads a stream to which nothing was added")
        target = self.mesh.placement(rows)
        self._reads.append(Read(norm.path, target, tuple(self._deltas.placements)))
        self._deltas = _Deltas()
        return Hidden(self._empty, target, self.mesh, norm.path)

    def chain(self) -> Chain:
        """The trace. Raises PlacementError where a delta was added after the last read: it would be lost."""
        if self._deltas.values:
            raise PlacementError(f"added after the last read, so never settled: {self._deltas.named()}")
        return Chain(tuple(self._reads), self._empty.shape[1], self._empty.element_size())


@dataclass
class StepStat:
    """Running totals of one communicating step. site: the read it serves, layers folded into `*`.

    step: edge and placements; group: the group's name; count: calls; bytes: that the busiest rank must receive for it
    (`weft.place.edges.rows_received`), whatever the transport's algorithm moves beyond; seconds: spent by this rank,
    waiting for its peers included.
    """

    site: str
    step: str
    group: str
    count: int = 0
    bytes: int = 0
    seconds: float = 0.0


class Stats:
    """StepStats by step, in the order first seen."""

    def __init__(self) -> None:
        self._by_step: dict[tuple[str, object], StepStat] = {}

    def record(self, site: str, step: Step, bytes_moved: float, seconds: float, calls: int = 1) -> None:
        """Counts a call, or several that moved as much and took as long each."""
        assert step.edge is not None
        site = fold(site)
        operand = step.operand if isinstance(step.operand, str) else "delta"
        key = (site, (step.op, step.edge, operand, step.transport))
        stat = self._by_step.get(key)
        if stat is None:
            stat = self._by_step[key] = StepStat(site, str(step), step.edge.group or "")
        stat.count += calls
        stat.bytes += calls * int(bytes_moved)
        stat.seconds += calls * seconds

    def table(self) -> list[StepStat]:
        """The totals so far."""
        return list(self._by_step.values())


class Stream:
    """One forward pass of one rank along a plan.

    transports: by name, those that the planner was offered. counts: this step's tokens of each DP group; every rank
    passes the same. Raises PlacementError where the model
    reads or adds otherwise than it was traced, naming the block and both placements, before it communicates.
    """

    def __init__(self, plan: Plan, planner: Planner, transports: Mapping[str, Transport], counts: Counts, stats: Stats):
        self.mesh, self._plan, self._planner = plan.mesh, plan, planner
        self._transports, self._counts, self._stats = transports, counts, stats
        self._local = next(iter(transports.values()))
        self._idle = sum(counts) == 0
        self._index = 0
        self._deltas = _Deltas()
        self._residual: Tensor | None = None

    def add(self, delta: Hidden) -> None:
        """Adds a block's output to the stream; its debt is settled by the next read."""
        have = self.mesh.row_count(delta.placement.rows, self._local.rank, self._counts)
        if delta.value.shape[0] != have:
            raise PlacementError(
                f"{delta.origin} adds {delta.value.shape[0]} rows as {delta.placement}, which means {have} rows here"
            )
        self._deltas.add(delta)

    def read(self, norm: Norm, rows: Rows) -> Hidden:
        """The normalised residual with everything added so far, complete, on the asked rows."""
        reads = self._plan.reads
        read_plan = reads[self._index] if self._index < len(reads) else None
        target = self.mesh.placement(rows)
        traced = read_plan.read if read_plan else None
        if traced is None or (traced.site, traced.target) != (norm.path, target):
            expected = f"{traced.site} to read {traced.target}" if traced else "the end"
            raise PlacementError(f"{norm.path} reads {target}, but the trace has {expected} here")
        if traced.deltas != tuple(self._deltas.placements):
            wanted = ", ".join(map(str, traced.deltas)) or "nothing"
            raise PlacementError(f"before {norm.path} the trace added {wanted}; now {self._deltas.named()} was added")
        assert read_plan is not None
        self._index += 1
        value = self._walk(read_plan.steps, traced.site, norm)
        return Hidden(value, target, self.mesh, norm.path)

    def finish(self) -> None:
        """Checks that the whole plan was walked. Raises PlacementError where the model stopped early."""
        if self._index != len(self._plan.reads):
            missed = self._plan.reads[self._index].read.site
            raise PlacementError(f"the model stopped before {missed}, where its peers would wait for ever")
        if self._deltas.values:
            raise PlacementError(f"added after the last read, so never settled: {self._deltas.named()}")

    def _walk(self, steps: tuple[Step, ...], site: str, norm: Norm) -> Tensor:
        deltas, origins = self._deltas.values, self._deltas.origins
        residual, normed = self._residual, None
        self._deltas = _Deltas()
        for step in steps:
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
                normed = rms_norm(residual, norm.weight, norm.eps)
            elif step.op == "finish":
                assert residual is not None
                epilogue = Epilogue(residual, norm.weight, norm.eps)
                residual, normed = self._move(step, deltas.pop(), site, origins.pop(), epilogue).unbind(0)
            else:
                assert isinstance(step.operand, int)
                delta, origin = deltas.pop(step.operand), origins.pop(step.operand)
                if step.op == "merge":
                    deltas[step.into] = deltas[step.into] + delta
                    origins[step.into] += f" + {origin}"
                else:
                    residual = delta if residual is None else residual + delta
        assert normed is not None and residual is not None
        self._residual = residual
        return normed

    def _move(self, step: Step, x: Tensor, site: str, origin: str, epilogue: Epilogue | None = None) -> Tensor:
        edge = step.edge
        assert edge is not None
        if not edge.moves:
            return carry_out(edge, x, self.mesh, self._local, self._counts)
        transport = self._transports[step.transport]
        began = time.perf_counter()
        if self._idle:  # no rank holds a row, and every rank knows it
            rows = self.mesh.row_count(edge.dst.rows, transport.rank, self._counts)
            out = x.new_empty((2, rows, x.shape[1]) if epilogue else (rows, x.shape[1]))
        else:
            try:
                out = carry_out(edge, x, self.mesh, transport, self._counts, epilogue)
            except PlacementError as error:
                raise PlacementError(f"{origin}, before {site}: {edge}: {error}") from error
        seconds = time.perf_counter() - began
        self._stats.record(site, step, self._planner.bytes_received(edge, self._counts), seconds)
        return out
