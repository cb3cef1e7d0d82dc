"""The residual stream: the only API that a model author needs.

    stream.add(self.attn(stream.read(self.input_norm, rows=GROUP)))
    stream.add(self.moe(stream.read(self.post_norm, rows=self.moe.takes)))

`add` records a delta with its debt. `read` pays the debts, brings the residual up to date, normalises, and returns
the rows that the block asks for. A model's forward runs once on a `TraceStream`, which records its chain of reads and
adds; the planner solves the chain; `Stream` then walks the plan by index and decides nothing. A block with several
forms names the rows of each in `rows`: there is a trace for each form, and the plan chooses one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from weft.comm.transport import Epilogue, Transport
from weft.kernels.stream_ops import add_rms_norm, rms_norm
from weft.kernels.torch_reference import UnfilledRows
from weft.planner.chain import Chain, Read
from weft.planner.op import RESIDUAL, StreamOp
from weft.planner.plan import Plan
from weft.planner.row_formats import Wire
from weft.planner.spec import Mesh, Placement, PlacementError, Rows
from weft.stream import formats
from weft.stream.block_exchanges import BlockExchanges, TraceExchanges
from weft.stream.hidden import Hidden, ReadInfo
from weft.stream.stats import StepTimes
from weft.stream.step_rows import StepRows

OWN, GROUP, WORLD = Rows.OWN, Rows.GROUP, Rows.WORLD
Takes = Rows | tuple[Rows, ...]
"""Rows that a block reads; several: any of these, and the plan uses the one that serves the whole model best."""
Extra = Callable[[Hidden], Tensor | None]
"""Function of a block's input, row by row, to int32 `[rows, n]`, sent along with rows in a format. None: nothing."""
Observer = Callable[[str, Hidden], None]
"""Callback with the site of a read and its rows, before the block gets them."""


class Norm(Protocol):
    """Name, weight and eps of an RMSNorm: the stream normalises, in the last step of a plan if a kernel can."""

    path: str
    eps: float

    @property
    def weight(self) -> Tensor: ...


class Site(NamedTuple):
    """Name of a read without a norm: the block gets the residual itself."""

    path: str


def _targets(mesh: Mesh, rows: Takes) -> tuple[Placement, ...]:
    """Return the placements that a read may return, each once."""
    return tuple(dict.fromkeys(mesh.placement(r) for r in (rows if isinstance(rows, tuple) else (rows,))))


class _Deltas:
    """Deltas added since the last read: one tensor for each placement, summed as they arrive."""

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
    """Recorder of a model's reads, exchanges inside blocks, and adds, with zero rows, which all blocks accept.

    Args:
        width: of the residual.
        dtype, device: of the activations.
        form: number of the form to record of blocks with several forms; the last one if a block has fewer.
    """

    def __init__(self, mesh: Mesh, width: int, dtype: torch.dtype, device: torch.device, form: int = 0):
        self.mesh, self._form, self.forms = mesh, form, 1
        self._empty = torch.empty(0, width, dtype=dtype, device=device)
        self._deltas = _Deltas()
        self._reads: list[Read] = []
        self._given: list[ReadInfo] = []
        self.exchanges = TraceExchanges(mesh)

    def add(self, delta: Hidden) -> None:
        """Record a delta and its debt."""
        self._deltas.add(delta)

    def keep(self, rows: Tensor | slice) -> bool:
        """Record nothing: plans are of all rows (see `Stream.keep`)."""
        return False

    def read(self, norm: Norm | Site, rows: Takes, extra: Extra | None = None) -> Hidden:
        """Record a read. Raises PlacementError if nothing was added before."""
        if not self._reads and not self._deltas.values:
            raise PlacementError(f"{norm.path} reads a stream to which nothing was added")
        self._end_read()
        targets = _targets(self.mesh, rows)
        self.forms = max(self.forms, len(targets))
        target = targets[min(self._form, len(targets) - 1)]
        normed = not isinstance(norm, Site)
        self._reads.append(Read(norm.path, target, tuple(self._deltas.placements), normed=normed))
        self._deltas = _Deltas()
        made = extra(Hidden(self._empty, target, self.mesh, norm.path)) if extra else None
        self._given.append(ReadInfo(self.exchanges, extra=made))
        return Hidden(self._empty, target, self.mesh, norm.path, self._given[-1])

    def _end_read(self) -> None:
        if self.exchanges.found:
            self._reads[-1] = replace(self._reads[-1], inside=tuple(self.exchanges.found))
            self.exchanges.found.clear()

    def chain(self) -> Chain:
        """Return the trace. Raises PlacementError if a delta was added after the last read: it would be lost."""
        if self._deltas.values:
            raise PlacementError(f"added after the last read, so never settled: {self._deltas.named()}")
        self._end_read()
        reads = (replace(read, **_taken(info)) for read, info in zip(self._reads, self._given, strict=True))
        return Chain(tuple(reads), self._empty.shape[1], self._empty.element_size())


def _taken(given: ReadInfo) -> dict[str, Any]:
    """Return the fields of a traced read: the format that its readers require, and whether they also read plain
    rows."""
    extra = 0 if given.extra is None else given.extra.shape[1] * given.extra.element_size()
    wire = next((Wire(format, extra) for format in given.made), None)
    return {"wire": wire, "plain": given.plain or len(given.made) != 1}  # rows travel in one format at most


class ReadExecution:
    """Values of a read, and a method for each op (`weft.planner.op.StreamOp`) that runs it on them.

    The residual `[rows, width]` is None before the first delta.
    """

    normed: Tensor  # normalised rows `[rows, width]`, or these rows on the wire
    absorbed: Tensor | None = None  # delta still to be added to the residual, so that one kernel may add and normalise
    received: Tensor | None = None  # int32 `[rows, n]`, sent along with rows in a format
    made: Any = None  # normalised rows in a format

    def __init__(self, stream: Stream, site: str, norm: Norm | Site, extra: Extra | None):
        self._stream, self._site, self._norm, self._extra = stream, site, norm, extra
        self.residual, self.deltas, self.origins = stream.residual, stream.deltas.values, stream.deltas.origins

    def sum(self) -> Tensor:
        """Return the residual with all deltas that it absorbed."""
        assert self.residual is not None
        if self.absorbed is not None:
            self.residual, self.absorbed = self.residual + self.absorbed, None
        return self.residual

    def move(self, op: StreamOp) -> None:
        at = op.operand
        if isinstance(at, int):
            self.deltas[at] = self._stream.carry(op, self.deltas[at], self._site, self.origins[at])
        elif at == RESIDUAL:
            self.residual = self._stream.carry(op, self.sum(), self._site, RESIDUAL)
        else:
            self.normed = self._stream.carry(op, self.normed, self._site, self._norm.path)

    def merge(self, op: StreamOp) -> None:
        delta, origin = self._delta(op)
        self.deltas[op.into] = self.deltas[op.into] + delta
        self.origins[op.into] += f" + {origin}"

    def absorb(self, op: StreamOp) -> None:
        delta, _ = self._delta(op)
        if self.residual is None:
            self.residual = delta
        else:
            self.sum()
            self.absorbed = delta

    def norm(self, op: StreamOp) -> None:
        assert self.residual is not None
        weight, eps, made = self._norm_with(op)
        if self.absorbed is None:
            self.normed = rms_norm(self.residual, weight, eps, quantised=made)
        else:
            self.residual, self.normed = add_rms_norm(self.residual, self.absorbed, weight, eps, quantised=made)
            self.absorbed = None

    def read(self, op: StreamOp) -> None:
        self.normed = self.sum()

    def finish(self, op: StreamOp) -> None:
        epilogue = Epilogue(self.sum(), *self._norm_with(op))
        both = self._stream.carry(op, self.deltas.pop(), self._site, self.origins.pop(), epilogue)
        self.residual, self.normed = both.unbind(0)

    def quantise(self, op: StreamOp) -> None:
        if self.made is None:
            assert op.wire is not None
            self.made = op.wire.format.make(self.normed)

    def pack(self, op: StreamOp) -> None:
        self.quantise(op)
        assert op.wire is not None
        packed_rows = self._stream.hidden(self.normed, self._stream.mesh.placement(op.rows), self._norm.path)
        listed = self._extra(packed_rows) if self._extra and op.wire.extra else None
        self.normed = formats.pack(self.made, listed, op.wire, self.normed.shape[1])

    def unpack(self, op: StreamOp) -> None:
        assert op.wire is not None and self.residual is not None
        width = self.residual.shape[1]
        self.made, self.received = formats.unpack(self.normed, op.wire, width)
        self.normed = self.residual.new_empty(1, 1).expand(len(self.normed), width)

    def _delta(self, op: StreamOp) -> tuple[Tensor, str]:
        assert isinstance(op.operand, int)
        return self.deltas.pop(op.operand), self.origins.pop(op.operand)

    def _norm_with(self, op: StreamOp) -> tuple[Tensor, float, UnfilledRows | None]:
        """Return weight and eps, and unfilled rows in the op's format, if the norm's kernel can fill them."""
        assert self.residual is not None and not isinstance(self._norm, Site)
        self.made = op.wire.format.unfilled(self.residual) if op.wire else None
        return self._norm.weight, self._norm.eps, self.made


class Stream:
    """One forward pass of one rank along a plan.

    Raises PlacementError, before it communicates, if the model deviates from its trace; the message names the block and
    both placements.

    Args:
        transports: by name, as offered to the planner.
        rows: of this step; all ranks pass the same counts.
        times: not None if this pass is timed.
        observer: called with the site and the rows of each read.
    """

    def __init__(
        self,
        plan: Plan,
        transports: Mapping[str, Transport],
        rows: StepRows,
        times: StepTimes | None = None,
        exchanges: BlockExchanges | None = None,
        observer: Observer | None = None,
    ):
        self.mesh, self._plan, self._transports, self._rows, self._times = plan.mesh, plan, transports, rows, times
        self._exchanges, self._observer = exchanges, observer
        if exchanges is not None:
            exchanges.begin(plan.counts, rows, times)
        self._local = next(iter(transports.values()))
        self._index = 0
        self.deltas = _Deltas()
        self.residual: Tensor | None = None
        self._asked: dict[Takes, tuple[Placement, ...]] = {}
        self._all_live: dict[Rows, Tensor] = {}

    def add(self, delta: Hidden) -> None:
        """Add a block's output to the stream; the next read pays its debt."""
        have = self._rows.capacity_of(delta.placement.rows)
        if delta.value.shape[0] != have:
            raise PlacementError(
                f"{delta.origin} adds {delta.value.shape[0]} rows as {delta.placement}, which means {have} rows here"
            )
        self.deltas.add(delta)

    def keep(self, rows: Tensor | slice) -> bool:
        """Continue with only these rows, if they are fewer than all and no exchange counts rows: on one rank.

        Returns True if it does. rows: int64 `[S]`, or a slice.
        """
        if self.mesh.world > 1 or isinstance(rows, slice) or len(rows) >= self._rows.capacity_of(GROUP):
            return False
        assert self.residual is not None, "kept after a read"
        self.residual = self.residual.index_select(0, rows)
        self.deltas.values = [value.index_select(0, rows) for value in self.deltas.values]
        self._rows, self._all_live = StepRows(self.mesh, self._rows.rank, (len(rows),)), {}
        return True

    def read(self, norm: Norm | Site, rows: Takes, extra: Extra | None = None) -> Hidden:
        """Return the normalised residual with all deltas so far, complete, on the requested rows; of several, the
        plan's. A `Site` in place of the norm: the residual itself, not to be written.

        extra: its result for these rows is sent with them if the plan sends rows in a format (`Hidden.extra`).
        """
        reads = self._plan.reads
        read_plan = reads[self._index] if self._index < len(reads) else None
        targets = self._asked.get(rows)
        if targets is None:
            targets = self._asked[rows] = _targets(self.mesh, rows)
        traced = read_plan.read if read_plan else None
        if traced is None or traced.site != norm.path or traced.target not in targets:
            expected = f"{traced.site} to read {traced.target}" if traced else "the end"
            requested = " or ".join(map(str, targets))
            raise PlacementError(f"{norm.path} reads {requested}, but the trace has {expected} here")
        if traced.deltas != tuple(self.deltas.placements):
            wanted = ", ".join(map(str, traced.deltas)) or "nothing"
            raise PlacementError(f"before {norm.path} the trace added {wanted}; now {self.deltas.named()} was added")
        assert read_plan is not None
        self._index += 1
        if self._exchanges is not None:
            self._exchanges.serve(read_plan)
        execution, self.deltas = ReadExecution(self, traced.site, norm, extra), _Deltas()
        for op in read_plan.steps:
            getattr(execution, op.op)(op)
        self.residual = execution.residual
        travelled = read_plan.steps[-1].op == "unpack"
        placement = replace(traced.target, wire=traced.wire) if travelled else traced.target
        made = {traced.wire.format: execution.made} if traced.wire and execution.made is not None else {}
        hidden = self.hidden(execution.normed, placement, norm.path, extra=execution.received, made=made)
        if self._observer is not None:
            self._observer(norm.path, hidden)
        return hidden

    def finish(self) -> None:
        """Check that the whole plan was walked. Raises PlacementError if the model stopped early."""
        if self._index != len(self._plan.reads):
            missed = self._plan.reads[self._index].read.site
            raise PlacementError(f"the model stopped before {missed}, where its peers would wait for ever")
        if self.deltas.values:
            raise PlacementError(f"added after the last read, so never settled: {self.deltas.named()}")

    def hidden(self, x: Tensor, placement: Placement, origin: str, **more: Any) -> Hidden:
        """Return rows of this step. more: fields of `ReadInfo`."""
        return Hidden(x, placement, self.mesh, origin, ReadInfo(self._exchanges, self._live(placement.rows, x), **more))

    def _live(self, rows: Rows, value: Tensor) -> Tensor | None:
        """See `ReadInfo.live`; on a GPU never None, as kernels ask for it in all layers."""
        live = self._rows.live(rows)
        if live is None and value.is_cuda:
            live = self._all_live.get(rows)
            if live is None:
                live = self._all_live[rows] = torch.full((1,), len(value), dtype=torch.int32, device=value.device)
        return live

    def carry(self, op: StreamOp, x: Tensor, site: str, origin: str, epilogue: Epilogue | None = None) -> Tensor:
        """Send rows `x` along an op's edge. site: of the read; origin: of the rows. Raises PlacementError with both."""
        edge = op.edge
        assert edge is not None
        if not edge.moves:
            return self._rows.carry(edge, x, self._local)
        if self._rows.idle:  # no rank has a row, and all ranks know it
            rows = self._rows.capacity_of(edge.dst.rows)
            return x.new_empty((2, rows, x.shape[1]) if epilogue else (rows, x.shape[1]))
        try:
            with nullcontext() if self._times is None else self._times.timed(self._plan.counts, site, op):
                return self._rows.carry(edge, x, self._transports[op.transport], epilogue)
        except PlacementError as error:
            raise PlacementError(f"{origin}, before {site}: {edge}: {error}") from error
