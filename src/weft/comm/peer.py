"""Transport peer: GPUs of one host, on Weft's own CUDA kernels over NVLink (`weft/kernels/csrc/cuda`).

On a mesh of several hosts it serves the groups inside a host; kernels number ranks by their place on it.

Each exchange is one kernel with no barrier: data is stored directly in the readers' memory and is its own flag. Small
sums use one shot, larger ones two (`weft.comm.peer_launch`). Calls are queued on torch's current stream and can be
captured in a CUDA graph; with row counts in device memory, one graph serves all counts up to the tensors' size.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, suppress
from ctypes import Structure, addressof, c_double, c_int64, sizeof
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from weft.comm.host_memory import NOTE_BYTES, HostMemory
from weft.comm.peer_launch import (
    MAX_NORMED_BYTES,
    MAX_RANKS,
    MAX_THREADS,
    UNIT_BYTES,
    PeerTuning,
    inbox_bytes,
    launch_of,
    merge_launch,
    two_shot_savings,
)
from weft.comm.transport import (
    CommError,
    CommTimeout,
    Epilogue,
    LiveSizes,
    NamedCalls,
    PeerLost,
    Ranks,
    Sizes,
    check_call,
    check_merge,
)
from weft.comm.transport_registry import PEER, Opening
from weft.kernels.build import KernelError, cuda_kernels
from weft.kernels.float8 import FLOAT8, Fp8Rows
from weft.planner.exchange import Exchange, result_rows
from weft.planner.spec import LayoutError, Mesh

MAX_BYTES = 8 << 20
"""Default of the maximum bytes of a call's largest tensor."""
TOO_MANY_ROWS = 0x80000000
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DIRECTIONS = ("gather", "scatter", "permute")
MANY_CALLS = 4096
"""Maximum number of kinds of calls that a transport caches."""


class ExchangeArguments(Structure):
    """Arguments of a call for the native `run`; `csrc/cuda/peer.cu` documents the fields."""

    _fields_ = (
        *((name, c_int64) for name in ("group", "direction", "segments", "span", "two_shot", "x", "x_rows", "out")),
        *((name, c_int64) for name in ("out_rows", "row_bytes", "width", "dtype", "device_counts", "residual")),
        *((name, c_int64) for name in ("residual_out", "weight", "wide_weight", "quantised", "scales", "quant_group")),
        *((name, c_int64) for name in ("push", "sum", "write", "cluster", "threads", "early", "stream")),
        *((name, c_int64 * MAX_RANKS) for name in ("rows", "received")),
        ("eps", c_double),
    )


class MergeArguments(Structure):
    """Arguments of a merge for the native `merge`."""

    _fields_ = (
        *((name, c_int64) for name in ("group", "x", "x_token", "x_head", "lse", "lse_token", "lse_head", "out")),
        *((name, c_int64) for name in ("out_lse", "live", "tokens", "heads", "dim", "dtype", "blocks", "threads")),
        *((name, c_int64) for name in ("early", "stream")),
    )


def layout() -> str:
    """Return this module's assumptions on structures and constants; the native module must report the same."""
    fields = ", ".join(
        " ".join(f"{field[0]}@{getattr(kind, field[0]).offset}" for field in kind._fields_) + f" size {sizeof(kind)}"
        for kind in (ExchangeArguments, MergeArguments)
    )
    limits = f"max_ranks {MAX_RANKS}, max_threads {MAX_THREADS}, unit_bytes {UNIT_BYTES}"
    limits += f", max_normed_bytes {MAX_NORMED_BYTES}, too_many_rows {TOO_MANY_ROWS}"
    return f"{fields}, {limits}"


class Host(Protocol):
    """Requirements on the connection between a host's processes: see HostMemory."""

    def barrier(self, group: Ranks) -> None:
        """Return once all ranks' hosts have called it; raises CommError."""
        ...

    def check(self) -> None:
        """Raise PeerLost if a rank's process is gone."""
        ...

    def close(self) -> None:
        """Leave the world."""
        ...


def check_peer_access(world: int, rank: int) -> None:
    """Raise LayoutError if this rank's GPU does not reach the memory of each of `world` GPUs."""
    for other in range(world):
        if other != rank and not torch.cuda.can_device_access_peer(rank, other):
            raise LayoutError(
                f"GPU {rank} does not reach the memory of GPU {other}, which transport peer needs; choose --transport "
                "nccl, or select GPUs that do with CUDA_VISIBLE_DEVICES"
            )


class PeerTransport(NamedCalls):
    """One of the GPUs of the ranks `on_host`; see `weft.comm.transport.Transport` for the results of each method.

    Sums accept float32, bfloat16 and float16, and add in rank order and float32: the same bits on all ranks. A NaN may
    become another NaN. Exchanges without a sum deliver any dtype bit for bit.

    Args:
        path: meeting place of the processes of a host's ranks (`weft.comm.host_memory`).
        max_bytes: maximum of the larger of a call's input and result, for any split of rows over ranks. Each rank of
          each group of this rank costs a little more than twice as much memory.
        timeout_s: limit of a kernel's wait, after which `check`, or the next call, raises PeerLost or CommTimeout.
    """

    entry = PEER

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        path: Path | str,
        device: torch.device,
        *,
        max_bytes: int = MAX_BYTES,
        timeout_s: float = 10.0,
        tuning: PeerTuning | None = None,
    ):
        self.rank, self.device, self.on_host = rank, device, mesh.peers("host", rank)
        if len(self.on_host) > MAX_RANKS:
            raise CommError(f"peer takes at most {MAX_RANKS} ranks of a host, not {len(self.on_host)}")
        groups = mesh.groups_on_host(rank)
        self._ids = {g: i for i, g in reversed([*enumerate(groups)])}
        self._timeout_s = timeout_s
        self._calls: dict[tuple[object, ...], tuple[ExchangeArguments, int]] = {}
        self._kernels = self._load()
        if (compiled := self._kernels.layout()) != (declared := layout()):
            raise CommError(f"the compiled kernels do not match: they say {compiled!r}, this module {declared!r}")
        with self._on_device():
            inboxes = [inbox_bytes(len(g), max_bytes) for g in groups]
            places = [[self.on_host.index(r) for r in g] for g in groups]
            self._handle = self._kernels.create(self.on_host.index(rank), places, inboxes, int(timeout_s * 1e9))
            self.tuning = tuning or PeerTuning()
            self._host = self._connect(mesh, path)
        self.entry = replace(PEER, max_bytes=max_bytes)
        self._host.barrier(self.on_host)

    @property
    def tuning(self) -> PeerTuning:
        """Tuning; may change between calls, equally on all ranks. The plain form has no clusters or early launch."""
        return self._tuning

    @tuning.setter
    def tuning(self, tuning: PeerTuning) -> None:
        self._tuning = replace(tuning, cluster=1, early=0) if self._kernels.plain(self._handle) else tuning
        self._calls.clear()

    def _load(self) -> Any:
        return cuda_kernels()

    def _on_device(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.device)

    def _stream(self) -> int:
        return torch._C._cuda_getCurrentRawStream(self.device.index)  # torch.cuda.current_stream makes an object

    def _synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def _connect(self, mesh: Mesh, path: Path | str) -> Host:
        """Map the memory of the host's ranks into this process; return the hosts' own connection."""
        host = HostMemory(mesh, self.rank, path, max(120.0, self._timeout_s))
        own_note = torch.empty(NOTE_BYTES, dtype=torch.uint8)
        self._kernels.export_handle(self._handle, own_note)
        notes = b"".join(host.gather_notes(own_note.numpy().tobytes()))
        self._kernels.connect(self._handle, torch.frombuffer(bytearray(notes), dtype=torch.uint8).view(-1, NOTE_BYTES))
        return host

    def close(self) -> None:
        """Leave the world once all ranks do, as they may write until then; after a lost peer nothing is freed."""
        if self._handle:
            self._synchronize()
            with suppress(CommError):
                self._host.barrier(self.on_host)
                self._kernels.destroy(self._handle)
            self._host.close()
        self._handle = 0

    def check(self) -> None:
        """Raise the errors of kernels that have run: PeerLost, CommTimeout, or more rows than a tensor holds."""
        code = self._kernels.error(self._handle)
        if not code:
            return
        if code == TOO_MANY_ROWS:
            raise CommError(
                f"rank {self.rank}: the counts in device memory exceed the rows of the tensors or of an inbox"
            )
        deadline = time.monotonic() + 1.0  # a process takes a moment to end
        while time.monotonic() < deadline:
            self._host.check()
            time.sleep(0.02)
        raise CommTimeout(f"rank {self.rank}: a kernel waited {self._timeout_s:g} s for rank {code - 1} of its group")

    def empty(self, *shape: int, like: Tensor) -> Tensor:
        return like.new_empty(shape)

    def exchange(
        self, x: Tensor, exchange: Exchange, group: Ranks, sizes: Sizes | LiveSizes, epilogue: Epilogue | None = None
    ) -> Tensor:
        """Run an exchange as one kernel. With LiveSizes, rows after the live ones are neither read nor written."""
        self.check()
        x = x.contiguous()
        live, capacity = (sizes.live, sizes.capacity) if isinstance(sizes, LiveSizes) else (None, sizes)
        key = (exchange, group, capacity, x.shape, x.dtype, live is None, epilogue is None)
        call = self._calls.get(key)
        if call is None:
            if len(self._calls) >= MANY_CALLS:
                self._calls.clear()
            call = self._calls[key] = self._prepare(x, exchange, group, capacity, live is not None, epilogue)
        arguments, rows = call
        arguments.stream, arguments.x = self._stream(), x.data_ptr()
        if live is not None:
            counted = 2 * exchange.ranks if exchange.direction == "permute" else exchange.segments
            self._expect(live, "counts in device memory", torch.int32, counted)
            arguments.device_counts = live.data_ptr()
        if epilogue is None:
            result = out = x.new_empty(rows, *x.shape[1:])
        else:
            result = x.new_empty(2, rows, *x.shape[1:])
            out = result[1]
            residual, weight = epilogue.residual.contiguous(), epilogue.weight.contiguous()
            arguments.wide_weight = weight.dtype != x.dtype
            self._expect(residual, "the residual", x.dtype, *out.shape)
            self._expect(weight, "the norm's weight", torch.float32 if arguments.wide_weight else x.dtype, *x.shape[1:])
            arguments.residual, arguments.weight = residual.data_ptr(), weight.data_ptr()
            arguments.residual_out, arguments.eps = result.data_ptr(), epilogue.eps
            arguments.quantised = 0
            if isinstance(epilogue.quantised, Fp8Rows):
                values, scales, group_size = epilogue.quantised
                self._expect(values, "quantised rows", FLOAT8, *out.shape)
                self._expect(scales, "their scales", torch.float32, rows, -(-values.shape[1] // group_size))
                arguments.quantised, arguments.scales = values.data_ptr(), scales.data_ptr()
                arguments.quant_group = group_size
        arguments.out = out.data_ptr()
        try:
            self._kernels.run(self._handle, addressof(arguments))
        except KernelError as error:
            raise CommError(f"rank {self.rank}: {error}") from error
        if epilogue is not None and epilogue.quantised is not None and not arguments.quantised:
            epilogue.quantised.fill(out)
        return result

    def _prepare(
        self, x: Tensor, exchange: Exchange, group: Ranks, sizes: Sizes, live: bool, epilogue: Epilogue | None
    ) -> tuple[ExchangeArguments, int]:
        """Return the arguments shared by all calls like this one, and the result's rows. Raises CommError."""
        place = check_call(self, x, exchange, group, sizes, epilogue)
        direction, n = exchange.direction, len(group)
        if exchange.combine == "sum" and x.dtype not in DTYPES:
            raise CommError(f"peer sums {', '.join(map(str, DTYPES))}, not {x.dtype}")
        rows, width = result_rows(exchange, sizes, place), x.shape[1:].numel()
        row_bytes = -(-width * x.element_size() // UNIT_BYTES) * UNIT_BYTES  # on the wire
        largest = max(rows, x.shape[0]) * row_bytes
        self._check_bytes(largest)
        sent, received = sizes, sizes[:0]
        if direction == "permute":
            sent, received = sizes[place * n : (place + 1) * n], sizes[place::n]
        segment = max((*sent, *received), default=0) * row_bytes  # largest piece between two ranks in one shot
        shared = n > 2 and exchange.combine == "sum" and exchange.span > 1
        two_shot = shared and two_shot_savings(exchange, segment) > self._tuning.one_shot_bytes
        launch = launch_of(self._tuning, largest, two_shot, rows if epilogue is not None else 0, row_bytes)
        arguments = ExchangeArguments(
            group=self._id(group),
            direction=DIRECTIONS.index(direction),
            segments=exchange.segments,
            span=exchange.span,
            two_shot=two_shot,
            x_rows=x.shape[0],
            out_rows=rows,
            row_bytes=width * x.element_size(),
            width=width,
            dtype=DTYPES.index(x.dtype) if exchange.combine == "sum" else 0,
            cluster=launch.cluster,
            threads=launch.threads,
            early=self._tuning.early,
        )
        arguments.push, arguments.sum, arguments.write = launch.blocks
        arguments.rows[: len(sent)], arguments.received[: len(received)] = sent, received
        return arguments, rows

    def merge_scatterv(
        self, out: Tensor, lse: Tensor, group: Ranks, live: Tensor | None = None, tag: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Merge attention in one kernel, as `Transport.merge_scatterv`. Rows after the live ones are not written.

        Heads that are not whole units of 16 bytes are copied to padded heads, and back. tag: not compared between
        ranks, as kernels exchange no notes.
        """
        self.check()
        check_merge(self, out, lse, group)
        if out.dtype not in DTYPES:
            raise CommError(f"peer takes {', '.join(map(str, DTYPES))}, not {out.dtype}")
        size, (tokens, heads, dim) = out.element_size(), out.shape
        if lacks := -dim % (UNIT_BYTES // size):
            own_units, total = self.merge_scatterv(pad(out, (0, lacks)), lse, group, live)
            return own_units[..., :dim].contiguous(), total
        self._check_bytes(out.numel() * size)
        if out.stride(2) != 1 or any(stride * size % UNIT_BYTES for stride in out.stride()[:2]):
            out = out.contiguous()
        if live is not None:
            self._expect(live, "the number of live tokens", torch.int32, 1)
        own_part = out.new_empty(tokens, heads // len(group), dim), lse.new_empty(tokens, heads // len(group))
        blocks, threads = merge_launch(self._tuning, own_part[0].nbytes)
        arguments = MergeArguments(
            group=self._id(group),
            x=out.data_ptr(),
            x_token=out.stride(0) * size,
            x_head=out.stride(1) * size,
            lse=lse.data_ptr(),
            lse_token=lse.stride(0) * lse.element_size(),
            lse_head=lse.stride(1) * lse.element_size(),
            out=own_part[0].data_ptr(),
            out_lse=own_part[1].data_ptr(),
            live=0 if live is None else live.data_ptr(),
            tokens=tokens,
            heads=heads,
            dim=dim,
            dtype=DTYPES.index(out.dtype),
            blocks=blocks,
            threads=threads,
            early=self._tuning.early,
            stream=self._stream(),
        )
        try:
            self._kernels.merge(self._handle, addressof(arguments))
        except KernelError as error:
            raise CommError(f"rank {self.rank}: {error}") from error
        return own_part

    def _check_bytes(self, largest: int) -> None:
        if (limit := self.entry.max_bytes) is not None and largest > limit:
            raise CommError(f"rank {self.rank}: peer has max_bytes={limit}; this call takes {largest}")

    def _id(self, group: Ranks) -> int:
        """Return the group's number in the kernels."""
        if group not in self._ids:
            raise CommError(
                f"rank {self.rank}: {group} is no group of the layout inside this host; there are {list(self._ids)}"
            )
        return self._ids[group]

    def barrier(self, group: Ranks) -> None:
        self._synchronize()
        self._host.barrier(group)

    def _expect(self, given: Tensor, what: str, dtype: torch.dtype, *shape: int) -> None:
        """Raise CommError for a tensor that does not match: the kernel would read it unchecked."""
        fits = (
            given.dtype == dtype
            and given.shape == shape
            and given.is_contiguous()
            and given.device.type == self.device.type
        )
        if not fits:
            raise CommError(
                f"rank {self.rank}: {what} must be {dtype} {list(shape)}, contiguous, on {self.device.type}; "
                f"not {given.dtype} {list(given.shape)} on {given.device}"
            )


def open_transport(rank: Opening) -> PeerTransport:
    """Open transport peer: the `open` of its row in the table. Raises LayoutError."""
    on_host = rank.mesh.peers("host", rank.rank)
    check_peer_access(len(on_host), on_host.index(rank.rank))
    tuning = rank.tuning("peer_tuning", PeerTuning)
    path = rank.directory / f"peer-{rank.mesh.host_of(rank.rank)}"
    return PeerTransport(rank.mesh, rank.rank, path, rank.device, max_bytes=rank.max_bytes(), tuning=tuning)


__all__ = ["MAX_NORMED_BYTES", "MAX_RANKS", "PeerLost", "PeerTransport", "PeerTuning"]
