"""Collectives of a torch ProcessGroup with all ranks on one host: `weft.Communicator`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.forks import Forked, ProcessBound
from weft.comm.meeting import meeting_place
from weft.comm.peer import PeerTransport
from weft.comm.peer_launch import MAX_RANKS, PeerTuning
from weft.comm.shm import ShmTransport, ShmTuning
from weft.comm.transport import CommError
from weft.comm.transport_registry import SHM_RANKS
from weft.kernels.build import cpu_kernels, cuda_kernels
from weft.library.arguments import Arguments, Counts, check_out, integers, rows_of
from weft.library.custom_ops import OPEN, with_rank
from weft.planner import exchange as exchanges
from weft.planner.cost import host_table, read_tuning
from weft.planner.spec import Mesh

ADDRESSES = 1 << 47
"""Bytes that a process can address on most hosts. Sizes that pass 64 bits would wrap around in the kernels."""
MAX_WAIT_S = 1_000_000
"""Longest `timeout_s`, 11 days: what the waits of sockets and selectors accept."""


class Communicator(ProcessBound):
    """One rank's end of a ProcessGroup's collectives; ranks have their numbers in the group. Building it is collective.

    All ranks make the same calls in the same order, also with zero rows, each from one thread; on GPUs on one stream at
    a time, with `device` as torch's current device. Results are new tensors; inputs do not change. There are no
    gradients. All methods raise ValueError for arguments that this rank finds wrong, before it communicates, and
    CommError (PeerLost, CommTimeout) for errors between ranks, after `close`, and in a forked child.

    Args:
        group: any ProcessGroup of up to 16 ranks on CPUs, 8 on GPUs, all on one host; None: the whole world.
        max_bytes: maximum of the larger of a call's input and result.
        device: of all tensors; None: the current GPU if torch has one, else the CPU. CPU tensors use shared memory,
          CUDA tensors peer memory.
        mesh: layout of plans to follow; None: tensor parallel over all ranks.
        timeout_s: seconds until a call fails if its peers have not arrived.
        blocks: on CPUs, maximum live results of this rank; unused ones cost no memory.
        name: shared by all ranks, for `torch.ops.weft`; None: the group's name and the device. The attribute `name`
          also holds the rank.
    """

    fork_error = CommError

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        max_bytes: int = 8 << 20,
        device: torch.device | str | None = None,
        mesh: Mesh | None = None,
        timeout_s: float = 600.0,
        blocks: int = 1024,
        name: str | None = None,
    ):
        group = _process_group(group)
        self.rank, self.world_size = group.rank(), group.size()
        self.max_bytes, refused = max_bytes, None
        try:
            self.device = _device(device)
        except (RuntimeError, ValueError) as error:  # the other ranks learn it when they meet
            self.device, refused = torch.device("cpu"), error
        self.mesh = mesh or Mesh(1, self.world_size, 1, self.world_size)
        self._name = name or f"{group.group_name}:{self.device.type}"
        on_gpu = self.device.type == "cuda"
        terms = {
            "max_bytes": max_bytes,
            "device": self.device.type,
            "mesh": str(self.mesh),
            "timeout_s": timeout_s,
            "blocks": blocks,
            "name": self._name,
        }

        def prepare() -> None:
            if refused is not None:
                raise refused
            self._check_options(timeout_s, blocks)
            (cuda_kernels if on_gpu else cpu_kernels)()  # may compile, which can fail

        with meeting_place(group, terms, self.device, prepare) as directory:
            self._begin(self._peer(directory, timeout_s) if on_gpu else self._shm(directory, timeout_s, blocks))

    def _begin(self, transport: ShmTransport | PeerTransport) -> None:
        self._open: ShmTransport | PeerTransport | None = transport
        self._everyone = tuple(range(self.world_size))
        limits = self.max_bytes, transport.entry.max_normed_bytes, transport.entry.takes_live_sizes
        self.name = with_rank(self._name, self.rank, self.world_size)
        self._takes = Arguments(self._name, self.rank, self.world_size, self.device, *limits)
        OPEN[self._name] = self

    def _forked(self, copy: Forked) -> None:
        # The object stays what it is: a `with` block that a child leaves still finds its end here.
        OPEN.pop(self._name, None)
        self._open = self._takes = copy  # type: ignore[assignment]

    def _check_options(self, timeout_s: float, blocks: int) -> None:
        limit = SHM_RANKS if self.device.type == "cpu" else MAX_RANKS
        if self.world_size > limit:
            raise ValueError(f"a communicator on {self.device.type} takes at most {limit} ranks, not {self.world_size}")
        if self.mesh.world != self.world_size or self.mesh.hosts != 1:
            raise ValueError(
                f"the mesh ({self.mesh}) is of {self.mesh.world} ranks on {self.mesh.hosts} host(s), the group has "
                f"{self.world_size} on one; give a mesh with attn_dp × attn_tp = ep × moe_tp = {self.world_size}"
            )
        for what, value in {"max_bytes": self.max_bytes, "blocks": blocks}.items():
            if not isinstance(value, int) or value <= 0:
                raise ValueError(f"{what} is {value!r}; it must be an integer of more than 0")
        if not isinstance(timeout_s, int | float) or not 0 < timeout_s <= MAX_WAIT_S:
            raise ValueError(f"timeout_s is {timeout_s!r}; it must be more than 0, and at most {MAX_WAIT_S}")
        arena = 2 * self.max_bytes * (blocks * self.world_size if self.device.type == "cpu" else 1)
        if arena > ADDRESSES:
            raise ValueError(
                f"max_bytes={self.max_bytes} and blocks={blocks} make {arena} bytes on {self.world_size} ranks, more "
                f"than a process can address ({ADDRESSES}); lower one of them"
            )
        if self._name in OPEN:
            raise ValueError(f"a communicator {self._name!r} is open already; close it, or give this one another name=")

    def _shm(self, directory: Path, timeout_s: float, blocks: int) -> ShmTransport:
        return ShmTransport(
            self.mesh,
            self.rank,
            directory / "shm",
            timeout_s=timeout_s,
            blocks=blocks,
            block_bytes=2 * self.max_bytes,  # a norm's result is two tensors
            tuning=read_tuning(host_table(), "shm_tuning", ShmTuning),
        )

    def _peer(self, directory: Path, timeout_s: float) -> PeerTransport:
        return PeerTransport(
            self.mesh,
            self.rank,
            directory / "peer",
            self.device,
            max_bytes=self.max_bytes,
            timeout_s=timeout_s,
            tuning=read_tuning(host_table(gpus=True), "peer_tuning", PeerTuning),
        )

    @property
    def transport(self) -> ShmTransport | PeerTransport:
        """Transport of the calls. Raises CommError after `close`."""
        if self._open is None:
            raise CommError(f"communicator {self._name!r} is closed; make a new one")
        return self._open

    # --- operations -------------------------------------------------------------------------------------------

    def all_reduce(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the sum of all ranks' x, of any shape; the same bits on all ranks. out: destination of a copy."""
        x = self._takes.input("all_reduce", x)
        check_out("all_reduce", out, x, x.shape)
        if torch.compiler.is_compiling():
            return _into(out, torch.ops.weft.all_reduce(x, self.name))
        total = self.transport.all_reduce(_as_rows(x), self._everyone)
        return _into(out, total if x.dim() > 1 else total.view(x.shape))

    def all_reduce_add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return (normed, residual): residual + the sum of all ranks' `x`, and its RMSNorm, `[…, width]` each.

        residual: in x's shape and dtype; weight: `[width]`, in x's dtype or float32; eps: added to the mean square.
        """
        added, normed = self.stacked_norm(x, residual, weight, eps).unbind(0)
        return normed, added

    def stacked_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Run `all_reduce_add_rms_norm` into one tensor `[2, …, width]`, the new residual first."""
        x = self._takes.input("all_reduce_add_rms_norm", x)
        epilogue = self._takes.epilogue("all_reduce_add_rms_norm", x, x.shape, residual, weight, eps)
        if torch.compiler.is_compiling():
            return torch.ops.weft.all_reduce_add_rms_norm(x, residual, epilogue.weight, eps, self.name)
        rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
        given = self.transport.all_reduce(rows, self._everyone, epilogue)
        return given.view(2, *x.shape)

    def all_gatherv(
        self, x: Tensor, counts: Counts, capacity: int | Sequence[int] | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Return all ranks' rows in rank order, `[sum(counts), …]`.

        On GPUs counts may be on the device; a CUDA graph reads them in each replay. Then x has capacity rows, and the
        result has the sum of the capacities; live rows lie at the front, and rows after them are neither read nor
        written.

        Args:
            x: `[counts[rank], …]`.
            counts: rows of each rank.
            capacity: of all ranks, or a list with one for each.
            out: destination of a copy.
        """
        x, sizes = self._takes.input("all_gatherv", x), self._takes.sizes("all_gatherv", counts, capacity)
        rows = rows_of(sizes)
        self._takes.check_rows("all_gatherv", x, rows[self.rank])
        self._takes.check_result("all_gatherv", x, sum(rows))
        check_out("all_gatherv", out, x, (sum(rows), *x.shape[1:]))
        if torch.compiler.is_compiling() and sizes is rows:
            return _into(out, torch.ops.weft.all_gatherv(x, rows, self.name))
        return _into(out, self.transport.exchange(x, exchanges.all_gatherv(self.world_size), self._everyone, sizes))

    def reduce_scatterv(
        self, x: Tensor, counts: Counts, capacity: int | Sequence[int] | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Return this rank's segment of the sum of all ranks' x `[sum(counts), …]`: `[counts[rank], …]`.

        counts, capacity, out: as for `all_gatherv`.
        """
        x, sizes = self._takes.input("reduce_scatterv", x), self._takes.sizes("reduce_scatterv", counts, capacity)
        rows = rows_of(sizes)
        self._takes.check_rows("reduce_scatterv", x, sum(rows))
        check_out("reduce_scatterv", out, x, (rows[self.rank], *x.shape[1:]))
        if torch.compiler.is_compiling() and sizes is rows:
            return _into(out, torch.ops.weft.reduce_scatterv(x, rows, self.name))
        return _into(out, self.transport.exchange(x, exchanges.reduce_scatterv(self.world_size), self._everyone, sizes))

    def reduce_scatterv_add_rms_norm(
        self,
        x: Tensor,
        counts: Counts,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        capacity: int | Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (normed, residual) of this rank's segment of rows, `[counts[rank], width]` each.

        x: `[sum(counts), width]`. See `reduce_scatterv` and `all_reduce_add_rms_norm`.
        """
        op = "reduce_scatterv_add_rms_norm"
        x, sizes = self._takes.input(op, x), self._takes.sizes(op, counts, capacity)
        self._takes.check_rows(op, x, sum(rows_of(sizes)))
        shape = (rows_of(sizes)[self.rank], *x.shape[1:])
        epilogue = self._takes.epilogue(op, x, shape, residual, weight, eps)
        exchange = exchanges.reduce_scatterv(self.world_size)
        added, normed = self.transport.exchange(x, exchange, self._everyone, sizes, epilogue).unbind(0)
        return normed, added

    def all_to_allv(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Send `send[i]` rows of `x` to rank i, segment by segment; return `receive[i]` rows of each rank i."""
        x, n = self._takes.input("all_to_allv", x), self.world_size
        sent, received = integers("all_to_allv", "send", send, n), integers("all_to_allv", "receive", receive, n)
        if sent[self.rank] != received[self.rank]:
            raise ValueError(
                f"all_to_allv: rank {self.rank} sends itself {sent[self.rank]} rows, but receives "
                f"{received[self.rank]}; make send[{self.rank}] and receive[{self.rank}] equal"
            )
        self._takes.check_rows("all_to_allv", x, sum(sent))
        self._takes.check_result("all_to_allv", x, sum(received))
        return self.transport.all_to_allv(x, self._everyone, sent, received)

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        """Return the x of rank `root`; all ranks pass a tensor of that shape and dtype."""
        if not isinstance(root, int) or not 0 <= root < self.world_size:
            raise ValueError(f"broadcast: root is {root!r}, but ranks are 0 to {self.world_size - 1}")
        x = self._takes.input("broadcast", x)
        return self.transport.broadcast(_as_rows(x), self._everyone, root).view(x.shape)

    def lse_reduce_scatter(
        self, out: Tensor, lse: Tensor, lse_base: Literal["e", "2"] = "e", live: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Merge attention over the ranks' parts of the keys; each rank gets its own heads, `[T, H/n, D]` and `[T,
        H/n]`.

        Args:
            out: `[T, H, D]`, all heads over this rank's part of the keys. T is the same on all ranks.
            lse: float32 `[T, H]`, the logarithm of its sum of exponentials.
            lse_base: base of lse, and of the result's lse.
            live: int32 `[1]` on a GPU: number of tokens in use; None: all T.
        """
        if lse_base not in ("e", "2"):
            raise ValueError(f"lse_reduce_scatter: lse_base is {lse_base!r}; it must be 'e' or '2'")
        out = self._takes.input("lse_reduce_scatter", out)
        self._takes.check_lse("lse_reduce_scatter", out, lse, live)
        if lse_base == "e":
            return self.transport.merge_scatterv(out, lse.resolve_neg(), self._everyone, live)
        merged, total = self.transport.merge_scatterv(out, lse * math.log(2), self._everyone, live, tag=2)
        return merged, total / math.log(2)

    def all_reduce_all_gatherv(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the sums of x over each group of neighbours, gathered in group order, `[sum(counts), …]`, in one call.

        counts: rows of each of len(counts) groups of equal size; x has its group's rows.
        """
        op = "all_reduce_all_gatherv"
        x, sizes = self._takes.input(op, x), self._takes.groups(op, counts)
        self._takes.check_rows(op, x, sizes[self.rank * len(sizes) // self.world_size])
        self._takes.check_result(op, x, sum(sizes))
        return self.transport.all_reduce_all_gatherv(x, self._everyone, sizes)

    def reduce_scatterv_all_reduce(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the group's segment of the sum of all ranks' x `[sum(counts), …]`, `[counts[group], …]`, in one call.

        counts: as for `all_reduce_all_gatherv`.
        """
        op = "reduce_scatterv_all_reduce"
        x, sizes = self._takes.input(op, x), self._takes.groups(op, counts)
        self._takes.check_rows(op, x, sum(sizes))
        return self.transport.reduce_scatterv_all_reduce(x, self._everyone, sizes)

    def supports(self, op: str, tensor: Tensor) -> bool:
        """Return True if an operation accepts a tensor of this dtype, device, size and width as its input.

        Raises ValueError for an unknown name.
        """
        return self._takes.refusal(op, tensor) is None

    def barrier(self) -> None:
        """Return once all ranks have called it; on GPUs, once all queued calls have run."""
        self.transport.barrier(self._everyone)

    def check(self) -> None:
        """Raise the errors of queued calls that have run since on a GPU, and PeerLost if a rank is gone."""
        self.transport.check()

    def close(self) -> None:
        """Leave the group; on GPUs collective. Results stay valid. A second call does nothing.

        A `with` block that ends by an error does not wait for the other ranks, not even on GPUs: they may be waiting
        elsewhere.
        """
        transport, self._open = self._open, None
        if transport is not None:
            OPEN.pop(self._name, None)
            transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and isinstance(self._open, PeerTransport):
            self._open = None  # the end of the process frees its memory
            OPEN.pop(self._name, None)
        self.close()


def _process_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if group is None:
        if not dist.is_initialized():
            raise ValueError(
                "torch.distributed is not initialised; start with torchrun and call init_process_group first"
            )
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError("this process is no rank of the group; make the communicator on its ranks alone")
    return group


def _device(device: torch.device | str | None) -> torch.device:
    found = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"a communicator takes tensors on cpu or cuda, not {found}")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"torch sees no GPU for device={str(found)!r}; use device='cpu', or a torch with CUDA")
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if found.type == "cpu" else found


def _as_rows(x: Tensor) -> Tensor:
    """Return x of any shape as rows of many elements: over peer memory a row occupies whole units of 16 bytes."""
    return x if x.dim() > 1 else x.reshape(1, x.numel())


def _into(out: Tensor | None, result: Tensor) -> Tensor:
    """Return the result, or out filled with it."""
    return result if out is None else out.copy_(result)
