"""Shared memory: ranks of one host, on Weft's own CPU kernels (`weft/kernels/csrc/cpu`).

Small calls take one hop: every rank puts its rows where the others see them, and each sums for itself, in rank order.
Large sums take two: each rank sums a share, and copies the other shares. Inputs that lie in the shared arena, as every
result does, are read where they are. Every rank gets the same bits, on every run.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from weft.comm.meet import meet, pidfds
from weft.comm.transport import CommError, CommTimeout, PeerLost, Ranks, Sizes
from weft.kernels.build import KernelError, KernelPeerLost, KernelTimeout, cpu_kernels
from weft.place.edges import COLLECTIVES
from weft.place.spec import GROUP_NAMES, Mesh

MAX_RANKS = 16


class ShmTransport:
    """One rank of a world on one host; see `weft.comm.transport.Transport` for what each method gives.

    path: of the socket at which the ranks meet, in a folder of this user. Building one is collective. timeout_s: of the
    meeting and of each call. slot_bytes: of the staging buffer of a rank and group. arena_bytes: limit of the tensors
    that a rank holds in shared memory; untouched pages take none. two_hop_bytes: larger sums take two hops. spins: reads
    of a peer's flag before a rank gives up its core; None: many where each rank has a core. isa: auto, or one of scalar,
    avx2, avx512, neon. Sums take float32, bfloat16, float16 and float64; anything may be moved.

    Raises CommError where the ranks do not meet; calls raise PeerLost within a second of a rank's end, CommTimeout,
    and CommError for what cannot be done, on every rank that sees it.
    """

    kinds = frozenset(COLLECTIVES)
    name = "shm"

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        path: Path | str,
        *,
        timeout_s: float = 60.0,
        slot_bytes: int = 512 * 1024,
        arena_bytes: int = 1 << 30,
        two_hop_bytes: int = 16 * 1024,
        spins: int | None = None,
        isa: str = "auto",
    ):
        if mesh.world > MAX_RANKS:
            raise CommError(f"shm takes at most {MAX_RANKS} ranks, not {mesh.world}")
        self.rank, self._world = rank, tuple(range(mesh.world))
        every = dict.fromkeys(p for name in GROUP_NAMES for p in mesh.partitions[name])
        groups = [self._world, *(g for g in every if g != self._world)]
        self._ids = {g: i for i, g in enumerate(groups)}
        self._timeout_s = timeout_s
        self._kernels = kernels = cpu_kernels()
        crowded = mesh.world > len(os.sched_getaffinity(0))
        spins = (100 if crowded else 20_000) if spins is None else spins
        terms = [mesh.world, [list(g) for g in groups], slot_bytes, arena_bytes, two_hop_bytes]
        meeting = meet(
            Path(path),
            mesh.world,
            rank,
            terms,
            lambda: kernels.arena_bytes(mesh.world, len(groups), slot_bytes, arena_bytes),
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
                arena_bytes,
                self._pidfds,
                spins,
                50,
                timeout_s,
                two_hop_bytes,
                isa,
            )
            meeting.ready()
        except KernelError as error:
            self.close()
            self._explain(error, "start", self._world)
        finally:
            meeting.close()
        self._all_reduce = kernels.all_reduce

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

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An unfilled tensor in the arena: as an input, it is read where it lies. Raises CommError when full."""
        try:
            return self._kernels.empty(self._handle, shape, torch.empty(0, dtype=dtype))
        except KernelError as error:
            self._explain(error, "empty", ())

    def all_reduce(self, x: Tensor, group: Ranks) -> Tensor:
        try:
            return self._all_reduce(self._handle, self._ids[group], x if x.is_contiguous() else x.contiguous())
        except KernelError as error:
            self._explain(error, "all_reduce", group)

    def reduce_scatterv(self, x: Tensor, group: Ranks, sizes: Sizes) -> Tensor:
        try:
            return self._kernels.reduce_scatterv(self._handle, self._ids[group], x.contiguous(), sizes)
        except KernelError as error:
            self._explain(error, "reduce_scatterv", group)

    def all_gatherv(self, x: Tensor, group: Ranks, sizes: Sizes) -> Tensor:
        try:
            return self._kernels.all_gatherv(self._handle, self._ids[group], x.contiguous(), sizes)
        except KernelError as error:
            self._explain(error, "all_gatherv", group)

    def all_to_allv(self, x: Tensor, group: Ranks, send: Sizes, receive: Sizes) -> Tensor:
        try:
            return self._kernels.all_to_allv(self._handle, self._ids[group], x.contiguous(), send, receive)
        except KernelError as error:
            self._explain(error, "all_to_allv", group)

    def broadcast(self, x: Tensor, group: Ranks, root: int) -> Tensor:
        try:
            return self._kernels.broadcast(self._handle, self._ids[group], x.contiguous(), root)
        except KernelError as error:
            self._explain(error, "broadcast", group)

    def barrier(self, group: Ranks) -> None:
        try:
            self._kernels.barrier(self._handle, self._ids[group])
        except KernelError as error:
            self._explain(error, "barrier", group)

    def all_reduce_all_gatherv(self, x: Tensor, reduce: Ranks, gather: Ranks, sizes: Sizes) -> Tensor:
        try:
            return self._kernels.all_reduce_all_gatherv(self._handle, 0, x.contiguous(), len(reduce), sizes)
        except KernelError as error:
            self._explain(error, "all_reduce+all_gatherv", self._world)

    def reduce_scatterv_all_reduce(self, x: Tensor, scatter: Ranks, reduce: Ranks, sizes: Sizes) -> Tensor:
        try:
            return self._kernels.reduce_scatterv_all_reduce(self._handle, 0, x.contiguous(), len(reduce), sizes)
        except KernelError as error:
            self._explain(error, "reduce_scatterv+all_reduce", self._world)

    def _explain(self, error: KernelError, what: str, group: Ranks) -> NoReturn:
        if isinstance(error, KernelPeerLost):
            raise PeerLost(int(str(error)), by=self.rank) from None
        if isinstance(error, KernelTimeout):
            raise CommTimeout(
                f"rank {self.rank}: {what} over {group} waited {self._timeout_s:g} s for rank {error}"
            ) from None
        raise CommError(f"rank {self.rank}: {what} over {group}: {error}") from error
