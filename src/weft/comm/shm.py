"""Transport shm: ranks of one host, on Weft's own CPU kernels (`weft/kernels/csrc/cpu`).

On a mesh of several hosts, each host's ranks have a segment of their own, for the groups inside that host.

Small calls use one shot: each rank writes its rows to shared memory, and each sums for itself, in rank order. Large
sums use two: each rank sums a share, and copies the other shares. Inputs in the shared arena, like all results, are
read in place. All ranks get the same bits, on every run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn
from weakref import finalize

import torch
from torch import Tensor

from weft.comm.cores import share_a_cache
from weft.comm.rendezvous import pidfds, rendezvous
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
    finish,
    place_in,
    sizes_on_host,
)
from weft.comm.transport_registry import SHM, SHM_RANKS, Opening
from weft.kernels.build import KernelError, KernelPeerLost, KernelTimeout, cpu_kernels
from weft.planner.exchange import Exchange, parts
from weft.planner.spec import Mesh

NEVER = 1 << 62
"""Threshold that no tensor reaches, in bytes."""
MAX_PLANS = 4096
"""Maximum number of cached calls. Sizes change from step to step, so the cache is emptied when it is full."""


@dataclass(frozen=True)
class ShmTuning:
    """Fastest sizes of a host in bytes, measured by `weft tune`. The same on all ranks.

    Attributes:
        stream_slot_bytes: larger pieces that peers read, staged or summed in two shots, are stored past the cache;
          None: 32 KiB, or never if one cache serves all cores of the ranks.
    """

    slot_bytes: int = 512 << 10  # staging buffer of a rank and group; there are two of each
    two_shot_bytes: int = 16 << 10  # larger sums use two shots
    chunk_bytes: int = 256 << 10  # pieces of a share that is read in place
    zero_copy_bytes: int = 8 << 10  # smaller inputs are staged even if they lie in the arena
    stream_slot_bytes: int | None = None
    stream_out_bytes: int = 32 << 20  # larger results are stored past the cache, for any reader


class ShmTransport(NamedCalls):
    """One rank of a host; see `weft.comm.transport.Transport` for the results of each method.

    Building the transport is collective. Raises CommError if the ranks do not meet. Calls raise PeerLost soon after a
    rank's process ends, CommTimeout, and CommError for an invalid call, on all ranks that see it. Sums accept float32,
    bfloat16, float16 and float64; other exchanges accept any dtype.

    Args:
        path: of the socket at which the host's ranks meet, in a folder of this user.
        timeout_s: limit of the meeting and of each call.
        blocks: maximum live results and tensors of `empty` of a rank; each occupies a block of shared memory.
        block_bytes: maximum bytes of such a tensor. Untouched pages cost no memory.
        tuning: the host's; None: the defaults.
        spins: reads of a peer's flag before a rank yields its core; None: many if each rank has a core.
        isa: auto, or one of scalar, avx2, avx512, neon.
    """

    entry = SHM

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
        self.rank, self._on_host = rank, mesh.peers("host", rank)
        world, place = len(self._on_host), self._on_host.index(rank)
        if world > SHM_RANKS:
            raise CommError(f"shm takes at most {SHM_RANKS} ranks of a host, not {world}")
        self.entry = replace(SHM, max_bytes=block_bytes // 2)  # an epilogue's result holds the residual and its norm
        groups = [group for group in mesh.groups if set(group) <= set(self._on_host)]
        self._ids = {g: i for i, g in enumerate(groups)}
        self._timeout_s = timeout_s
        self._kernels = kernels = cpu_kernels()
        tuning = tuning or ShmTuning()
        slot_bytes = tuning.slot_bytes
        terms = [self._on_host, groups, blocks, block_bytes, astuple(tuning)]
        meeting = rendezvous(
            Path(path),
            world,
            place,
            terms,
            lambda: kernels.arena_bytes(world, len(groups), slot_bytes, blocks, block_bytes),
            timeout_s,
        )
        self._held = resources = ExitStack()
        finalize(self, _leave, resources, os.getpid()).atexit = False
        try:
            watched = pidfds(meeting.pids)
            for fd in watched:
                if fd >= 0:
                    resources.callback(os.close, fd)
            cores = set[int]().union(*map(os.sched_getaffinity, meeting.pids))
            spins = (20 if world > len(cores) else 2000) if spins is None else spins
            if tuning.stream_slot_bytes is None:
                tuning = replace(tuning, stream_slot_bytes=NEVER if share_a_cache(cores) else 32 << 10)
            self._handle = kernels.create(
                meeting.fd,
                world,
                place,
                [[self._on_host.index(r) for r in g] for g in groups],
                slot_bytes,
                blocks,
                block_bytes,
                watched,
                spins,
                timeout_s,
                astuple(tuning)[1:],
                isa,
            )
            resources.callback(kernels.destroy, self._handle)
            meeting.ready()
        except KernelError as error:
            resources.close()
            self._explain(error, "start", self._on_host)
        finally:
            meeting.close()
        self._plans: dict[tuple[Exchange, Ranks, Sizes | LiveSizes], int] = {}
        self._all_reduces: dict[Ranks, int] = {}
        self._recorded: set[int] = set()  # plans of recorded calls, which are kept
        self._use(kernels)

    def _use(self, kernels: Any) -> None:
        self._kernels, self._exchange, self._exchange_norm = kernels, kernels.exchange, kernels.exchange_norm
        self._exchange_in_place = kernels.exchange_in_place

    def close(self) -> None:
        """Leave the world. Tensors in the arena stay valid; the transport must not be used after.

        A transport that is collected leaves too. A process that ends without it counts as lost.
        """
        self._held.close()
        self._handle = 0

    @property
    def isa(self) -> str:
        """Instruction set in use."""
        return self._kernels.isa(self._handle)

    def check(self) -> None:
        """Raise PeerLost if a rank's process is gone. It is not collective."""
        self._call("check", ())

    def offset_of(self, x: Tensor) -> int:
        """Return the byte offset of a tensor of this rank's arena in the segment, for any rank's `direct_sum`."""
        return int(self._kernels.offset_of(self._handle, x))

    def direct_sum(self, out: Tensor, offsets: Sizes, begin: int, count: int) -> None:
        """Store the sum of the tensors at `offsets` in `out[begin : begin + count]`, counted flat; no rank waits.

        A benchmark's lower bound: the rest of a collective's time is its protocol.
        """
        self._call("direct_sum", (), out, offsets, begin, count)

    @property
    def peak_blocks(self) -> int:
        """Maximum number of blocks that this rank used at once; the other blocks were never touched."""
        return int(self._kernels.peak_blocks(self._handle))

    def empty(self, *shape: int, like: Tensor) -> Tensor:
        """Return an unfilled tensor in the arena: as an input it is read in place.

        Raises CommError if it is larger than a block, or no block is free.
        """
        return self._call("empty", (), shape, like)

    def exchange(
        self, x: Tensor, exchange: Exchange, group: Ranks, sizes: Sizes | LiveSizes, epilogue: Epilogue | None = None
    ) -> Tensor:
        # A small call takes hardly longer than the Python code before it: keep that code short.
        plan = self._plans.get((exchange, group, sizes))
        if plan is None or (epilogue is not None and exchange.combine != "sum"):
            plan = self._prepare(x, exchange, group, sizes, epilogue)
        if x.is_neg() or x.is_conj():
            x = _plain(x)
        if epilogue is None:
            try:
                return self._exchange(self._handle, plan, x)
            except KernelError as error:
                if not x.is_contiguous():  # the kernel checks this before it does anything
                    return self.exchange(x.contiguous(), exchange, group, sizes)
                self._explain(error, exchange.kind, group)
        return self._normed(plan, x, epilogue, exchange.kind, group)

    def merge_scatterv(
        self, out: Tensor, lse: Tensor, group: Ranks, live: Tensor | None = None, tag: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Merge attention as `Transport.merge_scatterv`. tag: ranks with different tags raise CommError."""
        check_merge(self, out, lse, group)
        if out.stride(2) != 1 or out.is_neg():
            out = _plain(out)
        tokens, heads, dim = out.shape
        own_part = out.new_empty(tokens, heads // len(group), dim), lse.new_empty(tokens, heads // len(group))
        self._call("merge", group, self._id(group), out, lse.resolve_neg(), *own_part, tag)
        return own_part

    def barrier(self, group: Ranks) -> None:
        place_in(group, self.rank)
        self._call("barrier", group, self._id(group))

    def all_reduce(self, x: Tensor, group: Ranks, epilogue: Epilogue | None = None) -> Tensor:
        """Return the sum of all ranks' x. One plan serves all numbers of rows, so that short calls have few lookups."""
        plan = self._all_reduces.get(group) or self._prepare_all_reduce(group)
        if x.is_neg():
            x = _plain(x)
        if epilogue is not None:
            return self._normed(plan, x, epilogue, "all_reduce", group)
        try:
            return self._exchange(self._handle, plan, x)
        except KernelError as error:
            if not x.is_contiguous():  # the kernel checks this before it does anything
                return self.all_reduce(x.contiguous(), group)
            self._explain(error, "all_reduce", group)

    def all_reduce_(self, x: Tensor, group: Ranks) -> None:
        """Run all_reduce over x itself, which must be contiguous, without allocating a result."""
        if x.is_neg():
            raise CommError(f"rank {self.rank}: all_reduce_ over a lazily negated view; give it a tensor of its own")
        try:
            plan = self._all_reduces.get(group) or self._prepare_all_reduce(group)
            self._exchange_in_place(self._handle, plan, x)
        except KernelError as error:
            self._explain(error, "all_reduce_", group)

    @contextmanager
    def recorded(self, recorder: Any) -> Iterator[None]:
        kernels, recorder.explain = self._kernels, lambda error: self._explain(error, "a recorded step", self._on_host)
        self._use(_RecordedKernels(kernels, recorder, self._recorded))
        try:
            yield
        finally:
            self._use(kernels)

    def _normed(self, plan: int, x: Tensor, epilogue: Epilogue, what: str, group: Ranks) -> Tensor:
        """Run a call with its epilogue. The native call accepts one dtype: a wider weight is applied after the sum."""
        if epilogue.weight.dtype == torch.float32 != x.dtype:
            return finish(self._call("exchange_for_norm", group, plan, x.contiguous(), epilogue.eps), epilogue)
        residual, weight = epilogue.residual, epilogue.weight
        if residual.is_neg() or weight.is_neg():
            residual, weight = _plain(residual), _plain(weight)
        try:
            out = self._exchange_norm(self._handle, plan, x, residual, weight, epilogue.eps)
        except KernelError as error:
            if x.is_contiguous() and residual.is_contiguous() and weight.is_contiguous():
                self._explain(error, what, group)
            plain = replace(epilogue, residual=residual.contiguous(), weight=weight.contiguous())
            return self._normed(plan, x.contiguous(), plain, what, group)
        if epilogue.quantised is not None:
            epilogue.quantised.fill(out[1])
        return out

    def _prepare_all_reduce(self, group: Ranks) -> int:
        place_in(group, self.rank)
        everyone = _mask(tuple(range(len(group))))
        plan = int(self._call("prepare", group, self._id(group), False, True, [everyone, everyone, 0, 0, -1]))
        self._all_reduces[group] = plan
        return plan

    def _prepare(
        self, x: Tensor, exchange: Exchange, group: Ranks, sizes: Sizes | LiveSizes, epilogue: Epilogue | None
    ) -> int:
        """Return the kernel's plan of a call. Raises CommError for a call that this rank cannot make."""
        sizes = sizes_on_host(self, sizes)
        check_call(self, x, exchange, group, sizes, epilogue)
        plan = self._plans.get((exchange, group, sizes))
        if plan is None:
            if len(self._plans) == MAX_PLANS:
                self._plans = {call: number for call, number in self._plans.items() if number in self._recorded}
                self._all_reduces.clear()
                self._kernels.forget(self._handle, sorted(self._recorded))
            flat = [
                number
                for p in parts(exchange, sizes)
                for number in (_mask(p.sources), _mask(p.readers), p.source_row, p.reader_row, p.rows)
            ]
            permute, sums = exchange.direction == "permute", exchange.combine == "sum"
            plan = int(self._call("prepare", group, self._id(group), permute, sums, flat))
            self._plans[exchange, group, sizes] = plan
        return plan

    def _id(self, group: Ranks) -> int:
        """Return the group's number in the segment, which holds flags and slots for each group."""
        if group not in self._ids:
            raise CommError(
                f"rank {self.rank}: {group} is no group of the layout inside this host; there are {list(self._ids)}"
            )
        return self._ids[group]

    def _call(self, what: str, group: Ranks, *arguments: object) -> Any:
        try:
            return getattr(self._kernels, what)(self._handle, *arguments)
        except KernelError as error:
            self._explain(error, what, group)

    def _explain(self, error: KernelError, what: str, group: Ranks) -> NoReturn:
        if isinstance(error, KernelPeerLost):
            raise PeerLost(self._on_host[int(str(error))], by=self.rank) from None
        if isinstance(error, KernelTimeout):
            late = self._on_host[int(str(error))]
            raise CommTimeout(
                f"rank {self.rank}: {what} over {group} waited {self._timeout_s:g} s for rank {late}"
            ) from None
        raise CommError(f"rank {self.rank}: {what} over {group}: {error}") from error


class _RecordedKernels:
    """Kernels with calls that a recorder notes. plans: filled with the plans of these calls.

    Results of `empty` are not in the arena, since a recorded step would have to keep its blocks.
    """

    def __init__(self, kernels: Any, recorder: Any, plans: set[int]):
        self._kernels, self.merge = kernels, recorder.noted("merge_scatterv", kernels.merge)
        for name in ("exchange", "exchange_in_place", "exchange_norm", "exchange_for_norm"):
            noted = recorder.noted(name, getattr(kernels, name), lambda handle, plan, *_: plans.add(plan))
            setattr(self, name, noted)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def empty(self, handle: int, shape: Sizes, like: Tensor) -> Tensor:
        return like.new_empty(shape)


def open_transport(rank: Opening) -> ShmTransport:
    """Open transport shm: the `open` of its row in the table."""
    blocks, block_bytes = rank.arena()
    return ShmTransport(
        rank.mesh,
        rank.rank,
        rank.directory / f"shm-{rank.mesh.host_of(rank.rank)}",
        timeout_s=rank.timeout_s,
        blocks=blocks,
        block_bytes=block_bytes,
        tuning=rank.tuning("shm_tuning", ShmTuning),
    )


def _mask(places: Ranks) -> int:
    return sum(1 << place for place in places)


def _leave(held: ExitStack, owner: int) -> None:
    """Leave for a transport that nobody closed, in the process that made it."""
    if os.getpid() == owner and not sys.is_finalizing():
        held.close()


def _plain(x: Tensor) -> Tensor:
    """Return x, or a contiguous copy that is neither lazily negated nor conjugated."""
    if x.is_neg() or x.is_conj():
        x = x.resolve_neg().resolve_conj()
    return x.contiguous()
