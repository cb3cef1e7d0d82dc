"""Shared memory: ranks of one host, on Weft's own CPU kernels (`weft/kernels/csrc/cpu`).

Small calls take one hop: every rank puts its rows where the others see them, and each sums for itself, in rank order.
Large sums take two: each rank sums a share, and copies the other shares. Inputs that lie in the shared arena, as every
result does, are read where they are. Every rank gets the same bits, on every run.
"""

from __future__ import annotations

import os
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from weft.comm.meet import meet, pidfds
from weft.comm.transport import CommError, CommTimeout, Epilogue, NamedCalls, PeerLost, Ranks, Sizes, check_call
from weft.kernels.build import KernelError, KernelPeerLost, KernelTimeout, cpu_kernels
from weft.place.exchange import Exchange
from weft.place.spec import GROUP_NAMES, Mesh

MAX_RANKS = 16


@dataclass(frozen=True)
class ShmTuning:
    """Sizes, in bytes, that are best on a host: measured by `weft tune`. The same on every rank.

    slot_bytes: staging buffer of a rank and group, two of each. two_hop_bytes: larger sums take two hops. chunk_bytes:
    pieces of a share that is read where it lies. zero_copy_bytes: smaller inputs are staged though they lie in the
    arena. stream_slot_bytes, stream_out_bytes: larger runs are staged, larger results stored, past the cache.
    """

    slot_bytes: int = 512 << 10
    two_hop_bytes: int = 16 << 10
    chunk_bytes: int = 256 << 10
    zero_copy_bytes: int = 8 << 10
    stream_slot_bytes: int = 1 << 30
    stream_out_bytes: int = 32 << 20


class ShmTransport(NamedCalls):
    """One rank of a world on one host; see `weft.comm.transport.Transport` for what each method gives.

    path: of the socket at which the ranks meet, in a folder of this user. Building one is collective. timeout_s: of the
    meeting and of each call. blocks, block_bytes: results, and what `empty` gives, take a block of shared memory each;
    so many tensors of a rank may be alive at once, and none may be larger. Untouched pages take no memory. tuning: the
    host's; None: the defaults. spins: reads of a peer's flag before a rank gives up its core; None: many where each
    rank has a core. isa: auto, or one of scalar, avx2, avx512, neon. Sums take float32, bfloat16, float16 and float64;
    anything may be moved.

    Raises CommError where the ranks do not meet; calls raise PeerLost soon after a rank's end, CommTimeout, and
    CommError for what cannot be done, on every rank that sees it.
    """

    name = "shm"

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        path: Path | str,
        *,
        timeout_s: float = 60.0,
        blocks: int = 64,
        block_bytes: int = 128 << 20,
        tuning: ShmTuning | None = None,
        spins: int | None = None,
        isa: str = "auto",
    ):
        if mesh.world > MAX_RANKS:
            raise CommError(f"shm takes at most {MAX_RANKS} ranks, not {mesh.world}")
        self.rank, self._world = rank, tuple(range(mesh.world))
        self.max_bytes: int | None = block_bytes // 2  # an epilogue's result holds the residual and its norm
        every = dict.fromkeys(p for name in GROUP_NAMES for p in mesh.partitions[name])
        groups = [self._world, *(g for g in every if g != self._world)]
        self._ids = {g: i for i, g in enumerate(groups)}
        self._timeout_s = timeout_s
        self._kernels = kernels = cpu_kernels()
        crowded = mesh.world > len(os.sched_getaffinity(0))
        spins = (20 if crowded else 2000) if spins is None else spins
        tuning = tuning or ShmTuning()
        slot_bytes, *sizes = astuple(tuning)
        terms = [mesh.world, groups, blocks, block_bytes, slot_bytes, sizes]
        meeting = meet(
            Path(path),
            mesh.world,
            rank,
            terms,
            lambda: kernels.arena_bytes(mesh.world, len(groups), slot_bytes, blocks, block_bytes),
            timeout_s,
        )
        self._handle = 0
        self._pidfds: list[int] = []
        try:
            self._pidfds = pidfds(meeting.pids)
            self._handle = kernels.create(
                meeting.fd,
                mesh.world,
                rank,
                [list(g) for g in groups],
                slot_bytes,
                blocks,
                block_bytes,
                self._pidfds,
                spins,
                timeout_s,
                sizes,
                isa,
            )
            meeting.ready()
        except KernelError as error:
            self.close()
            self._explain(error, "start", self._world)
        finally:
            meeting.close()
        self._all_reduce, self._all_reduce_ = kernels.all_reduce, kernels.all_reduce_

    @staticmethod
    def offers(exchange: Exchange, epilogue: bool = False) -> bool:
        return exchange.combine == "sum" or (exchange.combine == "none" and not epilogue)

    def close(self) -> None:
        """Leaves the world. Tensors in the arena stay valid; the transport is of no use after."""
        if self._handle:
            self._kernels.destroy(self._handle)
        for fd in self._pidfds:
            if fd >= 0:
                os.close(fd)
        self._handle, self._pidfds = 0, []

    @property
    def isa(self) -> str:
        """The instruction set that runs."""
        return self._kernels.isa(self._handle)

    def check(self) -> None:
        """Raises PeerLost where a rank's process is gone; needs no call from the others."""
        self._call("check", ())

    def offset_of(self, x: Tensor) -> int:
        """Where a tensor of this rank's arena lies in the shared segment, in bytes; for `direct_sum` on any rank."""
        return int(self._kernels.offset_of(self._handle, x))

    def direct_sum(self, out: Tensor, offsets: Sizes, begin: int, count: int) -> None:
        """out[begin : begin + count] = the sum of the tensors at offsets, elements counted flat; no rank waits.

        A benchmark's floor: what a collective takes beyond it is its protocol.
        """
        self._call("direct_sum", (), out, offsets, begin, count)

    @property
    def peak_blocks(self) -> int:
        """The most blocks that this rank had in use at once; the others were never touched."""
        return int(self._kernels.peak_blocks(self._handle))

    def empty(self, *shape: int, like: Tensor) -> Tensor:
        """An unfilled tensor in the arena: as an input, it is read where it lies.

        Raises CommError where it is larger than a block, or no block is free.
        """
        return self._call("empty", (), shape, like)

    def exchange(
        self, x: Tensor, exchange: Exchange, group: Ranks, sizes: Sizes, epilogue: Epilogue | None = None
    ) -> Tensor:
        if exchange.kind == "all_reduce" and epilogue is None:
            try:  # the shortest way from here to the kernel: small calls take no longer than the way
                return self._all_reduce(self._handle, self._ids[group], x)
            except KernelError as error:
                if not x.is_contiguous():
                    return self.exchange(x.contiguous(), exchange, group, sizes)
                self._explain(error, "all_reduce", group)
        place, n = check_call(self, x, exchange, group, sizes, epilogue), len(group)
        if exchange.kind == "all_to_allv":
            send, receive = sizes[place * n : (place + 1) * n], sizes[place::n]
            return self._call("all_to_allv", group, self._ids[group], x.contiguous(), send, receive)
        arguments: dict[str, tuple[object, ...]] = {
            "all_reduce": (),
            "reduce_scatterv": (sizes,),
            "all_gatherv": (sizes,),
            "all_reduce+all_gatherv": (exchange.span, sizes),
            "reduce_scatterv+all_reduce": (exchange.span, sizes),
        }
        what = exchange.kind.replace("+", "_")
        return self._reduce(what, group, x, arguments[exchange.kind], epilogue)

    def barrier(self, group: Ranks) -> None:
        self._call("barrier", group, self._ids[group])

    def all_reduce_(self, x: Tensor, group: Ranks) -> None:
        """all_reduce over x itself, which must be contiguous: no result is allocated."""
        try:
            self._all_reduce_(self._handle, self._ids[group], x)
        except KernelError as error:
            self._explain(error, "all_reduce_", group)

    def _reduce(
        self, what: str, group: Ranks, x: Tensor, sizes: tuple[object, ...], epilogue: Epilogue | None
    ) -> Tensor:
        x = x.contiguous()
        if epilogue is None:
            return self._call(what, group, self._ids[group], x, *sizes)
        residual, weight = epilogue.residual.contiguous(), epilogue.weight.contiguous()
        out = self._call(f"{what}_norm", group, self._ids[group], x, *sizes, residual, weight, epilogue.eps)
        if epilogue.quantised is not None:
            epilogue.quantised.fill(out[1])
        return out

    def _call(self, what: str, group: Ranks, *arguments: object) -> Any:
        try:
            return getattr(self._kernels, what)(self._handle, *arguments)
        except KernelError as error:
            self._explain(error, what, group)

    def _explain(self, error: KernelError, what: str, group: Ranks) -> NoReturn:
        if isinstance(error, KernelPeerLost):
            raise PeerLost(int(str(error)), by=self.rank) from None
        if isinstance(error, KernelTimeout):
            raise CommTimeout(
                f"rank {self.rank}: {what} over {group} waited {self._timeout_s:g} s for rank {error}"
            ) from None
        raise CommError(f"rank {self.rank}: {what} over {group}: {error}") from error
