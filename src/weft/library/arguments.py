"""Arguments of a communicator's calls, and the errors for wrong ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from weft.comm.transport import Epilogue, LiveSizes, Sizes

Counts = Sequence[int] | Tensor
"""Rows of each rank: integers, or on GPUs int32 `[ranks]` on the device, with capacities."""
Combine = Literal["move", "sum", "norm", "merge"]
OPS: dict[str, Combine] = {
    "all_reduce": "sum",
    "all_reduce_add_rms_norm": "norm",
    "all_gatherv": "move",
    "reduce_scatterv": "sum",
    "reduce_scatterv_add_rms_norm": "norm",
    "all_to_allv": "move",
    "broadcast": "move",
    "lse_reduce_scatter": "merge",
    "all_reduce_all_gatherv": "sum",
    "reduce_scatterv_all_reduce": "sum",
}
"""Each operation, and how it combines the ranks' data."""
VERBS: dict[Combine, str] = {"move": "moves", "sum": "sums", "norm": "sums", "merge": "merges"}
NARROW = (torch.float32, torch.bfloat16, torch.float16)
MOVED = (
    *(*NARROW, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.uint16, torch.uint32, torch.uint64, torch.complex32, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
)
"""Dtypes that arrive bit for bit."""
DIMS = {"all_reduce": 0, "broadcast": 0, "reduce_scatterv_add_rms_norm": 2, "lse_reduce_scatter": 3}
"""Minimum dimensions of an operation's input; the default is 1."""
NO_GRADIENTS = "requires gradients, which do not pass through; call it under torch.no_grad()"
MANY_SHAPES = 4096
"""Maximum number of input shapes that are cached as valid."""


def dtypes_of(combine: Combine, device: str) -> tuple[torch.dtype, ...]:
    """Return the dtypes that an operation accepts on cpu or cuda."""
    if combine == "move":
        return MOVED
    return (*NARROW, torch.float64) if device == "cpu" and combine != "merge" else NARROW


@dataclass(frozen=True)
class Arguments:
    """Valid arguments of a communicator of this name, rank and device. All methods raise ValueError."""

    name: str
    rank: int
    world_size: int
    device: torch.device
    max_bytes: int  # maximum of a call's input and result
    max_normed_bytes: int | None  # maximum of a row with a norm; None: no limit
    live: bool  # counts may be on the device
    accepted: set[tuple[object, ...]] = field(default_factory=set)

    def input(self, op: str, x: Tensor) -> Tensor:
        """Return the input, neither lazily negated nor conjugated."""
        if not isinstance(x, Tensor):
            raise ValueError(f"{op}: the input is a {type(x).__name__}; pass a torch.Tensor")
        if self.device.type == "cuda" and torch.cuda.current_device() != self.device.index:
            raise ValueError(
                f"{op}: torch's current GPU is another than that of communicator {self.name!r}; call "
                f"torch.cuda.set_device({self.device.index}) before"
            )
        if torch.compiler.is_compiling():  # shapes may be symbols, and a graph's ops resolve lazy bits themselves
            return self._accepted(op, x)
        key = op, x.dtype, x.shape, x.device, x.layout, x.requires_grad and torch.is_grad_enabled()
        if key not in self.accepted:
            self._accepted(op, x)
            if len(self.accepted) == MANY_SHAPES:
                self.accepted.clear()
            self.accepted.add(key)
        return x.resolve_conj().resolve_neg() if x.is_conj() or x.is_neg() else x

    def _accepted(self, op: str, x: Tensor) -> Tensor:
        if (refusal := self.refusal(op, x)) is not None:
            raise ValueError(f"{op}: {refusal}")
        return x

    def refusal(self, op: str, x: Tensor) -> str | None:
        """Return one line on why an operation rejects an input, and what to do; None if it accepts it."""
        if op not in OPS:
            raise ValueError(f"there is no operation {op!r}; there are {', '.join(OPS)}")
        combine, size = OPS[op], x.numel() * x.element_size()
        if _has_grad(x):
            return f"the tensor {NO_GRADIENTS}"
        if x.layout != torch.strided or x.dim() > 8:
            return f"the tensor is {x.layout} of {x.dim()} dimensions; it takes dense tensors of up to 8"
        taken = dtypes_of(combine, self.device.type)
        if x.dtype not in taken:
            return f"it {VERBS[combine]} {', '.join(str(d).removeprefix('torch.') for d in taken)}, not {x.dtype}"
        if x.device != self.device:
            where = f"communicator {self.name!r} is on {self.device}"
            return f"the tensor is on {x.device}, but {where}; move it there, or make a communicator for its device"
        dims = DIMS.get(op, 1)
        if x.dim() < dims or (combine == "merge" and (x.dim() > 3 or x.shape[1] % self.world_size)):
            heads = f"[tokens, heads, dim] with heads a multiple of {self.world_size}"
            shapes = ("", "[…, width]" if op == "all_reduce_add_rms_norm" else "[rows, …]", "[rows, width]", heads)
            return f"it takes {shapes[dims]}, not {list(x.shape)}"
        if size > self.max_bytes:
            return (
                f"the tensor has {size} bytes, more than max_bytes={self.max_bytes}; make the communicator with "
                f"max_bytes={size}"
            )
        row = x.shape[-1] * x.element_size() if combine == "norm" else 0
        if self.max_normed_bytes is not None and row > self.max_normed_bytes:
            return f"rows have {row} bytes, and a norm takes up to {self.max_normed_bytes}; sum first, then normalise"
        return None

    def check_rows(self, op: str, x: Tensor, rows: int) -> None:
        """Check that the input `x` of `op` has the `rows` given by the counts."""
        if x.shape[0] != rows:
            raise ValueError(f"{op}: the tensor of rank {self.rank} has {x.shape[0]} rows, but the counts say {rows}")

    def check_result(self, op: str, x: Tensor, rows: int) -> None:
        """Check that `rows` rows like the rows of `x` have at most max_bytes, for `op`."""
        size = rows * x.shape[1:].numel() * x.element_size()
        if size > self.max_bytes:
            raise ValueError(
                f"{op}: the result has {size} bytes, more than max_bytes={self.max_bytes}; make the communicator with "
                f"max_bytes={size}"
            )

    def sizes(self, op: str, counts: Counts, capacity: int | Sequence[int] | None) -> Sizes | LiveSizes:
        """Return the counts of all ranks in the transports' type."""
        if not isinstance(counts, Tensor):
            if capacity is not None:
                raise ValueError(f"{op}: capacity goes with counts on the device; omit it")
            return integers(op, "counts", counts, self.world_size)
        if not self.live:
            raise ValueError(f"{op}: counts in a tensor are for GPUs; on CPUs pass counts.tolist()")
        if counts.dtype != torch.int32 or counts.shape != (self.world_size,) or counts.device != self.device:
            raise ValueError(
                f"{op}: counts must be int32 [{self.world_size}] on {self.device}, not {counts.dtype} "
                f"{list(counts.shape)} on {counts.device}"
            )
        if capacity is None:
            raise ValueError(f"{op}: counts on the device need capacity=, the maximum rows of each rank")
        each = (capacity,) * self.world_size if isinstance(capacity, int) else capacity
        return LiveSizes(integers(op, "capacity", each, self.world_size), counts.contiguous())

    def groups(self, op: str, counts: Sequence[int]) -> Sizes:
        """Return the counts of groups of equally many ranks."""
        if not len(counts) or self.world_size % len(counts):
            raise ValueError(
                f"{op}: {len(counts)} counts for groups of {self.world_size} ranks; groups have equal sizes, so the "
                f"number of counts must divide {self.world_size}"
            )
        return integers(op, "counts", counts, len(counts))

    def epilogue(
        self, op: str, x: Tensor, shape: Sequence[int], residual: Tensor, weight: Tensor, eps: float
    ) -> Epilogue:
        """Return the epilogue of an `op`'s sum of this `shape` `[…, width]`, of tensors like `x`.

        `residual`, `weight`, `eps`: of the norm. The weight may be a parameter; it gets no gradient.
        """
        width = x.shape[-1]
        _expect(op, "residual", residual, (x.dtype,), shape, x.device)
        weight = weight.detach() if isinstance(weight, Tensor) else weight
        _expect(op, "weight", weight, (x.dtype, torch.float32), (width,), x.device)
        rows = residual.resolve_neg().reshape(residual.shape[:-1].numel(), width)
        return Epilogue(rows, weight.resolve_neg(), eps)

    def check_lse(self, op: str, out: Tensor, lse: Tensor, live: Tensor | None) -> None:
        """Check `lse` and `live` rows of attention out `[tokens, heads, dim]` that `op` is to merge."""
        _expect(op, "lse", lse, (torch.float32,), out.shape[:2], out.device)
        if live is None:
            return
        if not self.live:
            raise ValueError(f"{op}: a live count is for GPUs; on CPUs pass the live tokens alone")
        _expect(op, "live", live, (torch.int32,), (1,), out.device)


def integers(op: str, what: str, counts: Sequence[int], n: int) -> Sizes:
    """Return `counts` as `n` integers. Raises ValueError with `op` and `what`."""
    found = tuple(counts) if isinstance(counts, Iterable) else ()
    whole = all(isinstance(count, int) for count in found)
    if not whole or len(found) != n or any(count < 0 for count in found):
        arrays = "" if whole else "; of a tensor or an array pass .tolist()"
        raise ValueError(f"{op}: {what} must be {n} integers of 0 or more, not {list(found) or counts}{arrays}")
    return found


def rows_of(sizes: Sizes | LiveSizes) -> Sizes:
    """Return the rows of the tensors for each rank."""
    return sizes.capacity if isinstance(sizes, LiveSizes) else sizes


def check_out(op: str, out: Tensor | None, x: Tensor, shape: Sequence[int]) -> None:
    """Check that `op`'s result of this `shape`, of tensors like `x`, can be copied to `out`. Raises ValueError."""
    if out is not None:
        _expect(op, "out", out, (x.dtype,), shape, x.device)


def _has_grad(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


def _expect(
    op: str, what: str, given: Tensor, dtypes: Sequence[torch.dtype], shape: Sequence[int], device: torch.device
) -> None:
    if not isinstance(given, Tensor):
        raise ValueError(f"{op}: {what} is a {type(given).__name__}; pass a torch.Tensor")
    if _has_grad(given):
        raise ValueError(f"{op}: {what} {NO_GRADIENTS}")
    if given.dtype not in dtypes or given.shape != tuple(shape) or given.device != device:
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(dtypes))
        raise ValueError(
            f"{op}: {what} must be {kinds} {list(shape)} on {device}, not {given.dtype} {list(given.shape)} on "
            f"{given.device}"
        )
