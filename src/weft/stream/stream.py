"""The residual stream: the only API that a model author meets.

    stream.add(self.attn(stream.read(self.input_norm, rows=GROUP)))
    stream.add(self.moe(stream.read(self.post_norm, rows=self.moe.takes)))

`add` records a delta with its debt. `read` settles the debts, brings the residual up to date, normalises, and returns
the rows that the block asks for. A model's forward runs once on a `TraceStream`, which records its chain of reads and
adds; the planner solves the chain; `Stream` then walks the plan by index and decides nothing. Where a block takes rows
in several forms, `rows` names them all, there is a trace for each form, and the plan says which form it uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from weft.comm.transport import Epilogue, Transport
from weft.kernels import float8
from weft.kernels.stream_ops import add_rms_norm, rms_norm
from weft.planner.chain import Chain, Read
from weft.planner.op import NORMED, RESIDUAL, StreamOp
from weft.planner.plan import Plan
from weft.planner.row_formats import Format, Wire
from weft.planner.spec import Mesh, Placement, PlacementError, Rows
from weft.stream import formats
from weft.stream.block_exchanges import BlockExchanges, TraceExchanges
from weft.stream.hidden import Hidden
from weft.stream.stats import StepTimes
from weft.stream.step_rows import StepRows

NORMS = "norm", "finish"
"""Steps that normalise."""

OWN, GROUP, WORLD = Rows.OWN, Rows.GROUP, Rows.WORLD
Takes = Rows | tuple[Rows, ...]
"""The rows that a block reads; several: any of these, and the plan uses those that serve the whole model best."""
Beside = Callable[[Hidden], Tensor | None]
"""What a block computes row by row from its input, as int32 `[rows, n]`, before rows travel in a format: it travels
beside them. None: nothing."""
Observer = Callable[[str, Hidden], None]
"""Gets the site of a read and its rows, before the block does."""


class Norm(Protocol):
    """An RMSNorm's name, weight and eps: the stream normalises, in the last step of a plan where a kernel can."""

    path: str
    eps: float

    @property
    def weight(self) -> Tensor: ...


def _targets(mesh: Mesh, rows: Takes) -> tuple[Placement, ...]:
    """The placements that a read may return, each once."""
    return tuple(dict.fromkeys(mesh.placement(r) for r in (rows if isinstance(rows, tuple) else (rows,))))


class _Deltas:
    """The deltas added since the last read: one tensor for each placement, summed as they come."""

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
    """Records reads, exchanges inside blocks, and adds of a model. It has zero rows, which all blocks must take anyway.

    width: of the residual. dtype, device: of the activations. form: where a block takes rows in several forms, the
    number of the form to record, or the last one. forms: how many of them the model has.
    """

    def __init__(self, mesh: Mesh, width: int, dtype: torch.dtype, device: torch.device, form: int = 0):
        self.mesh, self._form, self.forms = mesh, form, 1
        self._empty = torch.empty(0, width, dtype=dtype, device=device)
        self._deltas = _Deltas()
        self._reads: list[Read] = []
        self.exchanges = TraceExchanges(mesh)

    def add(self, delta: Hidden) -> None:
        """Records a delta and its debt."""
        self._deltas.add(delta)

    def keep(self, rows: Tensor | slice) -> bool:
        """As `Stream.keep`. Plans are of all rows, so it records nothing."""
        return False

    def read(self, norm: Norm, rows: Takes, beside: Beside | None = None) -> Hidden:
        """Records a read. Raises PlacementError where nothing was added before."""
        if not self._reads and not self._deltas.values:
            raise PlacementError(f"{norm.path} reads a stream to which nothing was added")
        self._end_read()
        targets = _targets(self.mesh, rows)
        self.forms = max(self.forms, len(targets))
        target, index = targets[min(self._form, len(targets) - 1)], len(self._reads)
        self._reads.append(Read(norm.path, target, tuple(self._deltas.placements), plain=False))
        self._deltas = _Deltas()

        made = beside(Hidden(self._empty, target, self.mesh, norm.path)) if beside else None
        bytes_beside = made.shape[1] * made.element_size() if made is not None else 0

        def in_format(format: Format) -> Any:
            read, wire = self._reads[index], Wire(format, bytes_beside)
            another = read.wire not in (None, wire)  # rows travel in one format at most
            self._reads[index] = replace(read, wire=read.wire or wire, plain=read.plain or another)
            return formats.make(self._empty, format)

        def on_plain() -> None:
            self._reads[index] = replace(self._reads[index], plain=True)

        hidden = Hidden(self._empty, target, self.mesh, norm.path, exchanges=self.exchanges)
        return replace(hidden, in_format=in_format, beside=made, on_plain=on_plain)

    def _end_read(self) -> None:
        if self.exchanges.found:
            self._reads[-1] = replace(self._reads[-1], inside=tuple(self.exchanges.found))
            self.exchanges.found.clear()

    def chain(self) -> Chain:
        """The trace. Raises PlacementError where a delta was added after the last read: it would be lost."""
        if self._deltas.values:
            raise PlacementError(f"added after the last read, so never settled: {self._deltas.named()}")
        self._end_read()
        reads = (replace(read, plain=read.plain or read.wire is None) for read in self._reads)
        return Chain(tuple(reads), self._empty.shape[1], self._empty.element_size())


class Stream:
    """One forward pass of one rank along a plan.

    transports: by name, those that the planner was offered. rows: of this step; all ranks pass the same counts.
    times: not None where this pass is timed. exchanges: those inside blocks. observer: called with the site and the
    rows of each read. Raises PlacementError, before it communicates, where the model reads or adds otherwise than in
    its trace; the text names the block and both placements.
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
        self._deltas = _Deltas()
        self._residual: Tensor | None = None
        self._asked: dict[Takes, tuple[Placement, ...]] = {}
        self._all_live: dict[Rows, Tensor] = {}

    def add(self, delta: Hidden) -> None:
        """Adds a block's output to the stream; its debt is settled by the next read."""
        have = self._rows.capacity_of(delta.placement.rows)
        if delta.value.shape[0] != have:
            raise PlacementError(
                f"{delta.origin} adds {delta.value.shape[0]} rows as {delta.placement}, which means {have} rows here"
            )
        self._deltas.add(delta)

    def keep(self, rows: Tensor | slice) -> bool:
        """Goes on with these rows alone where they are fewer than all and no exchange counts rows: on one rank. Returns
        whether it does. rows: int64 `[S]`, or a slice.
        """
        if self.mesh.world > 1 or isinstance(rows, slice) or len(rows) >= self._rows.capacity_of(GROUP):
            return False
        assert self._residual is not None, "kept after a read"
        self._residual = self._residual.index_select(0, rows)
        self._deltas.values = [value.index_select(0, rows) for value in self._deltas.values]
        self._rows, self._all_live = StepRows(self.mesh, self._rows.rank, (len(rows),)), {}
        return True

    def read(self, norm: Norm, rows: Takes, beside: Beside | None = None) -> Hidden:
        """The normalised residual with all deltas so far, complete, on the requested rows; of several, the plan's.

        beside: its result for these rows travels with them where the plan has rows travel in a format
            (`Hidden.beside`).
        """
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
        if self._exchanges is not None:
            self._exchanges.serve(read_plan)
        found = self._walk(read_plan.steps, traced, norm, beside)
        if self._observer is not None:
            self._observer(norm.path, found)
        return found

    def finish(self) -> None:
        """Checks that the whole plan was walked. Raises PlacementError where the model stopped early."""
        if self._index != len(self._plan.reads):
            missed = self._plan.reads[self._index].read.site
            raise PlacementError(f"the model stopped before {missed}, where its peers would wait for ever")
        if self._deltas.values:
            raise PlacementError(f"added after the last read, so never settled: {self._deltas.named()}")

    def _walk(self, steps: tuple[StreamOp, ...], read: Read, norm: Norm, beside: Beside | None) -> Hidden:
        """The normalised rows; also, or only, in a format, where products take it."""
        site, deltas, origins = read.site, self._deltas.values, self._deltas.origins
        residual, normed, self._deltas = self._residual, None, _Deltas()
        made: Any = None  # the rows in a format
        wire: Tensor | None = None  # the rows as they travel
        came: Hidden | None = None  # the received rows

        def with_norm(x: Tensor) -> float8.Fp8Rows | None:
            """Unfilled rows in a format for a norm of x, where the next step of the plan makes them."""
            after = next((step.wire for norm, step in pairwise(steps) if step.wire and norm.op in NORMS), None)
            return formats.unfilled(x, after.format) if after else None

        for step, then in zip(steps, (*steps[1:], None), strict=True):
            if step.op == "move":
                if step.operand == RESIDUAL:
                    assert residual is not None
                    residual = self._move(step, residual, site, RESIDUAL)
                elif wire is not None:
                    wire = self._move(step, wire, site, norm.path)
                elif step.operand == NORMED:
                    assert normed is not None
                    normed = self._move(step, normed, site, norm.path)
                else:
                    assert isinstance(step.operand, int)
                    deltas[step.operand] = self._move(step, deltas[step.operand], site, origins[step.operand])
            elif step.op == "norm":
                assert residual is not None
                if normed is None:
                    made = with_norm(residual)
                    normed = rms_norm(residual, norm.weight, norm.eps, quantised=made)
            elif step.op == "finish":
                assert residual is not None
                made = with_norm(residual)
                epilogue = Epilogue(residual, norm.weight, norm.eps, made)
                residual, normed = self._move(step, deltas.pop(), site, origins.pop(), epilogue).unbind(0)
            elif step.op == "unpack":
                assert wire is not None and step.wire is not None and residual is not None
                came = self._unpacked(wire, step, residual, norm.path)
            elif step.wire is not None:
                assert normed is not None
                if made is None:
                    made = formats.make(normed, step.wire.format)
                if step.op == "pack":
                    here = self._hidden(normed, self.mesh.placement(step.rows), norm.path)
                    listed = beside(here) if beside and step.wire.beside else None
                    wire = formats.pack(made, listed, step.wire, normed.shape[1])
            else:
                assert isinstance(step.operand, int)
                delta, origin = deltas.pop(step.operand), origins.pop(step.operand)
                if step.op == "merge":
                    deltas[step.into] = deltas[step.into] + delta
                    origins[step.into] += f" + {origin}"
                elif residual is None:
                    residual = delta
                elif then is not None and then.op == "norm":
                    made = with_norm(residual)
                    residual, normed = add_rms_norm(residual, delta, norm.weight, norm.eps, quantised=made)
                else:
                    residual = residual + delta
        assert normed is not None and residual is not None
        self._residual = residual
        if came is not None:
            return came
        known = {} if made is None else {read.wire.format if read.wire else None: made}

        def in_format(format: Format) -> Any:
            if format not in known:
                known[format] = formats.make(normed, format)
            return known[format]

        return replace(self._hidden(normed, read.target, norm.path), in_format=in_format)

    def _unpacked(self, wire: Tensor, step: StreamOp, like: Tensor, origin: str) -> Hidden:
        """Rows that travelled in a format, and stay in it. like: of the activations."""
        assert step.wire is not None
        wire_format = step.wire.format
        made, beside = formats.unpack(wire, step.wire, like.shape[1])
        placement = replace(self.mesh.placement(step.rows), wire=step.wire)

        def in_format(format: Format) -> Any:
            if format != wire_format:
                raise PlacementError(f"{origin} is {placement}, but a block takes it in {format}")
            return made

        no_elements = like.new_empty(1, 1).expand(len(wire), like.shape[1])
        return replace(self._hidden(no_elements, placement, origin), in_format=in_format, beside=beside)

    def _hidden(self, value: Tensor, placement: Placement, origin: str) -> Hidden:
        return Hidden(value, placement, self.mesh, origin, self._live(placement.rows, value), self._exchanges)

    def _live(self, rows: Rows, value: Tensor) -> Tensor | None:
        """See `Hidden.live`; on a GPU never None, as kernels ask for it in all layers."""
        live = self._rows.live(rows)
        if live is None and value.is_cuda:
            live = self._all_live.get(rows)
            if live is None:
                live = self._all_live[rows] = torch.full((1,), len(value), dtype=torch.int32, device=value.device)
        return live

    def _move(self, step: StreamOp, x: Tensor, site: str, origin: str, epilogue: Epilogue | None = None) -> Tensor:
        edge = step.edge
        assert edge is not None
        if not edge.moves:
            return self._rows.carry(edge, x, self._local)
        if self._rows.idle:  # no rank has a row, and all ranks know it
            rows = self._rows.capacity_of(edge.dst.rows)
            return x.new_empty((2, rows, x.shape[1]) if epilogue else (rows, x.shape[1]))
        try:
            with nullcontext() if self._times is None else self._times.timed(self._plan.counts, site, step):
                return self._rows.carry(edge, x, self._transports[step.transport], epilogue)
        except PlacementError as error:
            raise PlacementError(f"{origin}, before {site}: {edge}: {error}") from error
