"""Peer memory: GPUs of one host, on Weft's own CUDA kernels over NVLink (`weft/kernels/csrc/cuda`).

Every edge is one kernel with no barrier: data is stored straight into the readers' memory and is its own flag. Small
calls take one hop, larger sums two. Calls are queued on torch's current stream and can be captured in a CUDA graph;
with row counts in device memory, one graph serves every count up to the tensors' size.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from weft.comm.shm import ShmTransport
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
    place_in,
)
from weft.kernels.build import KernelError, cuda_kernels
from weft.place.exchange import Exchange, result_rows
from weft.place.spec import GROUP_NAMES, Mesh

MAX_RANKS, MAX_THREADS = 8, 480
MAX_BYTES = 8 << 20
"""Of a call's largest tensor, unless told otherwise."""
UNIT_BYTES = 16
TOO_MANY_ROWS = 0x80000000
NEVER = 1 << 40
"""More bytes than any call has."""
Counts = Sizes | Tensor | LiveSizes
"""Rows of each rank: numbers, or int32 in device memory, read when the kernel runs."""


class Host(Protocol):
    """What a rank's host needs of its peers: see ShmTransport."""

    def barrier(self, group: Ranks) -> None:
        """Returns once every rank's host is here; raises CommError."""
        ...

    def check(self) -> None:
        """Raises PeerLost."""
        ...

    def close(self) -> None:
        """Leaves."""
        ...


@dataclass(frozen=True)
class Split:
    """A call of from_bytes or more gives its blocks, of up to `threads` threads, a kind of work each."""

    from_bytes: int
    push: int
    sum: int  # none with one hop, where those that write sum
    write: int
    threads: int


@dataclass(frozen=True)
class PeerTuning:
    """What depends on the machine. Sizes are bytes of a call's larger tensor.

    one_hop_bytes: sums take two hops where that spares a rank more bytes of what it receives. few_bytes: up to here at
    most `blocks` blocks of `threads` threads or as many more as it takes for a unit each; beyond, wide_blocks of
    wide_threads; where rows are normalised, norm_blocks. Of these, as many as the GPU holds at a time; all do all work.
    split_…: large calls, by hops and with rows to be normalised or none. cluster: blocks that may share a row to be
    normalised, a power of two up to 8. Threads come in multiples of 32, up to MAX_THREADS. early: 1: a call's blocks
    take their places before the kernel before it ends (programmatic dependent launch).
    """

    one_hop_bytes: int = 192 << 10
    few_bytes: int = 128 << 10
    blocks: int = 24
    threads: int = 128
    wide_blocks: int = 128
    wide_threads: int = 480
    norm_blocks: int = 256
    split_one_hop: Split = Split(1 << 20, 32, 0, 96, 480)
    split_two_hops: Split = Split(2 << 20, 128, 224, 176, 224)
    split_one_hop_norm: Split = Split(4 << 20, 32, 0, 96, 480)
    split_two_hops_norm: Split = Split(6 << 20, 64, 96, 368, 224)
    cluster: int = 8
    early: int = 1

    def __post_init__(self) -> None:
        """Takes what JSON makes of a Split."""
        for name in SPLITS:
            if isinstance(given := getattr(self, name), dict):
                object.__setattr__(self, name, Split(**given))

    def split_from(self, size: int) -> PeerTuning:
        """The same, with calls of `size` bytes or more split, whatever the edge."""
        return replace(self, **{name: replace(getattr(self, name), from_bytes=size) for name in SPLITS})


SPLITS = tuple(f.name for f in fields(PeerTuning) if f.type == "Split")


@dataclass(frozen=True)
class Launch:
    """blocks: that push, sum and write; the last alone: that many do all. cluster: of blocks that share a row."""

    blocks: tuple[int, int, int]
    threads: int
    cluster: int = 1


class PeerTransport(NamedCalls):
    """One GPU of a host; see `weft.comm.transport.Transport` for what each method gives.

    path: where the ranks meet, as for ShmTransport, which carries what the hosts say to each other. device: this
    rank's. With counts in device memory, tensors have room for the most rows there may be.
    max_bytes: of the larger of a call's input and result, however uneven the ranks' shares; twice as much is taken at
    the start for each rank of each group that this one is in. timeout_s: of a kernel's wait; past it the kernel ends,
    and `check`, or the next call, raises PeerLost or CommTimeout. tuning: an attribute, which may be changed between
    calls, on every rank alike.

    Sums take float32, bfloat16 and float16, in rank order and float32, the same bits on every rank.
    """

    name = "peer"
    takes_live_sizes = True

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
        if mesh.world > MAX_RANKS:
            raise CommError(f"peer takes at most {MAX_RANKS} ranks, not {mesh.world}")
        self.rank, self.device, self.world = rank, device, tuple(range(mesh.world))
        partitions = dict.fromkeys([(self.world,), *(mesh.partitions[name] for name in GROUP_NAMES)])
        groups = [next(g for g in partition if rank in g) for partition in partitions]  # on every rank in this order
        self._ids = {g: i for i, g in reversed([*enumerate(groups)])}
        self.tuning, self._timeout_s = tuning or PeerTuning(), timeout_s
        self._nothing = torch.empty(0, dtype=torch.int32)
        self._kernels = self._load()
        with self._on_device():
            inboxes = [inbox_bytes(len(g), max_bytes) for g in groups]
            self._handle = self._kernels.create(rank, [list(g) for g in groups], inboxes, int(timeout_s * 1e9))
            self._host = self._connect(mesh, path)
        self.max_bytes: int | None = max_bytes
        self._host.barrier(self.world)

    def _load(self) -> Any:
        return cuda_kernels()

    def _on_device(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.device)

    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def _synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def _connect(self, mesh: Mesh, path: Path | str) -> Host:
        """Maps every rank's memory into this process; what the hosts can say to each other from then on."""
        host = ShmTransport(mesh, self.rank, path, timeout_s=120.0)
        mine = torch.empty(1, 64, dtype=torch.uint8)
        self._kernels.export_handle(self._handle, mine)
        self._kernels.connect(self._handle, host.all_gatherv(mine, self.world, (1,) * mesh.world))
        return host

    @staticmethod
    def offers(exchange: Exchange, epilogue: bool = False) -> bool:
        return exchange.combine == "sum" or (exchange.combine == "none" and not epilogue)

    def close(self) -> None:
        """Leaves the world once every rank does: none may free memory that another still writes to.

        After a lost peer nothing is freed: the end of the process does that.
        """
        if self._handle:
            self._synchronize()
            with suppress(CommError):
                self._host.barrier(self.world)
                self._kernels.destroy(self._handle)
            self._host.close()
        self._handle = 0

    def check(self) -> None:
        """Raises what kernels that have run met: PeerLost, CommTimeout, or rows beyond a tensor's size."""
        code = self._kernels.error(self._handle)
        if not code:
            return
        if code == TOO_MANY_ROWS:
            raise CommError(
                f"rank {self.rank}: the counts in device memory ask for more rows than the tensors hold, or an inbox"
            )
        deadline = time.monotonic() + 1.0  # a process that ends takes a moment to be gone
        while time.monotonic() < deadline:
            self._host.check()
            time.sleep(0.02)
        raise CommTimeout(f"rank {self.rank}: a kernel waited {self._timeout_s:g} s for rank {code - 1} of its group")

    def empty(self, *shape: int, like: Tensor) -> Tensor:
        return like.new_empty(shape)

    def exchange(
        self, x: Tensor, exchange: Exchange, group: Ranks, sizes: Counts, epilogue: Epilogue | None = None
    ) -> Tensor:
        """sizes may be int32 `[segments]` in device memory; the result then has room for the most rows there may be."""
        counts: Sizes | Tensor
        if isinstance(sizes, LiveSizes):
            place = check_call(self, x, exchange, group, sizes.capacity, epilogue)
            rows, counts = result_rows(exchange, sizes.capacity, place), sizes.live
        elif isinstance(sizes, Tensor):
            place, gathers = place_in(group, self.rank), exchange.direction == "gather"
            rows, counts = exchange.segments * x.shape[0] if gathers else x.shape[0], sizes
        else:
            place = check_call(self, x, exchange, group, sizes, epilogue)
            rows, counts = result_rows(exchange, sizes, place), sizes
        if exchange.direction == "permute":
            n, known = len(group), tuple(counts)
            edge = (n, 1, 0, -1, 1)
            return self._run(group, edge, x, rows, known[place * n : (place + 1) * n], received=known[place::n])
        edge = (exchange.segments, exchange.span, int(exchange.direction == "scatter"), -1, 0)
        shared = exchange.combine == "sum" and exchange.span > 1
        return self._run(group, edge, x, rows, counts, epilogue=epilogue, sums=shared)

    def barrier(self, group: Ranks) -> None:
        self._synchronize()
        self._host.barrier(group)

    def _run(
        self,
        group: Ranks,
        edge: tuple[int, ...],
        x: Tensor,
        rows: int,
        counts: Sizes | Tensor,
        received: Sizes = (),
        epilogue: Epilogue | None = None,
        sums: bool = False,
    ) -> Tensor:
        """edge: segments, span, scatter, root, exchange (`call.h`). rows: of the result. sums: two hops may pay."""
        self.check()
        x, n = x.contiguous(), len(group)
        row_bytes = -(-x.shape[1:].numel() * x.element_size() // UNIT_BYTES) * UNIT_BYTES  # as they travel
        largest = max(rows, x.shape[0]) * row_bytes
        if self.max_bytes is not None and largest > self.max_bytes:
            raise CommError(f"rank {self.rank}: peer has max_bytes={self.max_bytes}; this call takes {largest}")
        host_counts: Sizes = ()
        device_counts = self._nothing
        if isinstance(counts, Tensor):
            device_counts = counts
            self._expect(counts, "counts in device memory", torch.int32, edge[0])
        else:
            host_counts = counts
        segment = max((*host_counts, *received), default=x.shape[0]) * row_bytes  # that a rank gets from one in one hop
        two_hops = sums and n > 2 and spared_by_two_hops(edge, n, segment) > self.tuning.one_hop_bytes
        residual = weight = residual_out = quantised = scale = self._nothing
        if epilogue is None:
            given = out = x.new_empty(rows, *x.shape[1:])
        else:
            given = x.new_empty(2, rows, *x.shape[1:])
            residual_out, out = given[0], given[1]
            residual, weight = epilogue.residual.contiguous(), epilogue.weight.contiguous()
            self._expect(residual, "the residual", x.dtype, *out.shape)
            self._expect(weight, "the norm's weight", x.dtype, *x.shape[1:])
            if epilogue.quantised is not None:
                quantised, scale = epilogue.quantised.out, epilogue.quantised.scale
                self._expect(quantised, "quantised rows", torch.float8_e4m3fn, *out.shape)
                self._expect(scale, "their scale", torch.float32, 1)
                quantised = quantised.view(torch.uint8)
        launch = launch_of(self.tuning, largest, two_hops, rows if epilogue is not None else 0, row_bytes)
        arguments: tuple[Any, ...] = (
            host_counts,
            received,
            device_counts,
            residual,
            residual_out,
            weight,
            quantised,
            scale,
            epilogue.eps if epilogue else 0.0,
            int(two_hops),
            launch.blocks,
            launch.cluster,
            launch.threads,
            self.tuning.early,
            self._stream(),
        )
        try:
            self._kernels.run(self._handle, self._ids[group], edge, x, out, *arguments)
        except KernelError as error:
            raise CommError(f"rank {self.rank}: {error}") from error
        return given

    def _expect(self, given: Tensor, what: str, dtype: torch.dtype, *shape: int) -> None:
        """Raises CommError: a kernel would take whatever lies there."""
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


def launch_of(t: PeerTuning, largest: int, two_hops: bool, normed_rows: int, row_bytes: int) -> Launch:
    """largest: bytes of the larger of input and result. normed_rows: 0 without an epilogue."""
    if normed_rows:
        split = t.split_two_hops_norm if two_hops else t.split_one_hop_norm
    else:
        split = t.split_two_hops if two_hops else t.split_one_hop
    units = -(-row_bytes // UNIT_BYTES)
    if largest >= split.from_bytes:
        threads = split.threads if not normed_rows else threads_for(units, split.threads)
        return Launch((split.push, split.sum, split.write), threads)
    few = largest <= t.few_bytes
    wide = t.norm_blocks if normed_rows else t.wide_blocks
    most, threads = (t.blocks, t.threads) if few else (wide, t.wide_threads)
    if few:  # a unit a thread
        threads = min(MAX_THREADS, max(threads, -(-largest // (32 * UNIT_BYTES * most)) * 32))
    wanted = max(1, min(most, -(-largest // (threads * UNIT_BYTES))))
    if not normed_rows:
        return Launch((0, 0, wanted), threads)
    cluster = t.cluster
    while cluster > 1 and (cluster * normed_rows > most or units < 64 * cluster):
        cluster //= 2
    blocks = min(most, max(wanted, normed_rows * cluster)) // cluster * cluster
    return Launch((0, 0, blocks), threads_for(-(-units // cluster), MAX_THREADS), cluster)


def threads_for(units: int, most: int) -> int:
    """Of a block with so many units of a row, in whole warps: all with equally many, which are a few or one."""
    warps = max(1, -(-units // 32))
    turns = -(-32 * warps // most)
    return 32 * -(-warps // turns)


def inbox_bytes(ranks: int, max_bytes: int) -> int:
    """What an inbox of a group takes, whatever the shares of a call's rows.

    One hop fills a lane a rank, each with max_bytes at most, or a token. Two hops have half of it for parts of what a
    rank holds or wants, which at least two ranks share, and half for the sums.
    """
    return ranks * (max_bytes + 2 * UNIT_BYTES)


def spared_by_two_hops(edge: tuple[int, ...], ranks: int, segment: int) -> float:
    """Bytes that a rank receives less of segments of so many if they are summed in parts.

    edge: segments, span, scatter, … as in `call.h`.
    """
    segments, span, scatter = edge[:3]
    second = span - 1 if scatter else segments * span - 1  # parts of summed segments
    first = ranks - 1 if scatter else span - 1  # parts of terms
    return segment * (ranks - 1 - (first + second) / span)


__all__ = ["PeerLost", "PeerTransport"]
