"""The residual stream: the only API that a model author meets.

    stream.add(self.attn(stream.read(self.input_norm, rows=GROUP)))
    stream.add(self.moe(stream.read(self.post_norm, rows=self.moe.takes)))

`add` records a delta with its debt. `read` settles the debts, brings the residual up to date, normalises, and delivers
the rows asked for. A model's forward runs once on a `TraceStream`, which writes down its chain of reads and adds; the
planner solves the chain; `Stream` then walks the plan by index, with no decisions left. Where a block takes rows in
several forms, `rows` names them all, a trace writes each down, and the plan says which it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from weft.comm.rows import StepRows
from weft.comm.settle import Settler, TraceSettler
from weft.comm.stats import StepTimes
from weft.comm.transport import Epilogue, Transport
from weft.hidden import Hidden
from weft.kernels import float8
from weft.kernels.rows import add_rms_norm, quantising, rms_norm
from weft.place.chain import Chain, Read
from weft.place.plan import Plan
from weft.place.spec import Mesh, Placement, PlacementError, Rows
from weft.place.step import NORMED, RESIDUAL, Step

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
    """Writes down what a model reads, settles and adds. Carries zero rows, which every block must take anyway.

    width: of the residual; dtype, device: of the activations. form: where a block takes rows in several forms, the
    number of the one to write down, or the last. forms: how many of them the model was seen to have.
    """

    def __init__(self, mesh: Mesh, width: int, dtype: torch.dtype, device: torch.device, form: int = 0):
        self.mesh, self._form, self.forms = mesh, form, 1
        self._empty = torch.empty(0, width, dtype=dtype, device=device)
        self._deltas = _Deltas()
        self._reads: list[Read] = []
        self.settler = TraceSettler(mesh)

    def add(self, delta: Hidden) -> None:
        """Records a delta and its debt."""
        self._deltas.add(delta)

    def read(self, norm: Norm, rows: Takes) -> Hidden:
        """Records a read. Raises PlacementError when nothing was ever added."""
        if not self._reads and not self._deltas.values:
            raise PlacementError(f"{norm.path} reads a stream to which nothing was added")
        self._end_read()
        targets = _targets(self.mesh, rows)
        self.forms = max(self.forms, len(targets))
        target, index = targets[min(self._form, len(targets) - 1)], len(self._reads)
        self._reads.append(Read(norm.path, target, tuple(self._deltas.placements)))
        self._deltas = _Deltas()

        def quantised(run: int) -> float8.Rows:
            read = self._reads[index]
            self._reads[index] = replace(read, run=read.run or run)
            return float8.quantise(self._empty, run)

        return Hidden(self._empty, target, self.mesh, norm.path, settler=self.settler, quantised=quantised)

    def _end_read(self) -> None:
        if self.settler.found:
            self._reads[-1] = replace(self._reads[-1], settles=tuple(self.settler.found))
            self.settler.found.clear()

    def chain(self) -> Chain:
        """The trace. Raises PlacementError where a delta was added after the last read: it would be lost."""
        if self._deltas.values:
            raise PlacementError(f"added after the last read, so never settled: {self._deltas.named()}")
        self._end_read()
        return Chain(tuple(self._reads), self._empty.shape[1], self._empty.element_size())


class Stream:
    """One forward pass of one rank along a plan.

    transports: by name, those that the planner was offered. rows: of this step; every rank passes the same counts.
    times: where this pass is to be timed. settler: carries out what blocks settle in between. Raises PlacementError
    where the model reads or adds otherwise than it was traced, naming the block and both placements, before it
    communicates.
    """

    def __init__(
        self,
        plan: Plan,
        transports: Mapping[str, Transport],
        rows: StepRows,
        times: StepTimes | None = None,
        settler: Settler | None = None,
    ):
        self.mesh, self._plan, self._transports, self._rows, self._times = plan.mesh, plan, transports, rows, times
        self._settler = settler
        if settler is not None:
            settler.begin(plan.counts, rows, times)
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
        if self._settler is not None:
            self._settler.serve(read_plan)
        (value, quantised), target = self._walk(read_plan.steps, traced, norm), traced.target
        live = self._live(target.rows, value)
        return Hidden(value, target, self.mesh, norm.path, live, self._settler, quantising(value, quantised))

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
