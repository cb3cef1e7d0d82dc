"""`torch.ops.weft.*`: collectives that torch.compile can put into a graph, with the shapes of their results.

A graph holds strings and no objects, so each op gets its communicator's name, which includes the rank: shapes follow
only from an op's arguments, and a compiler's cache never gives a rank another rank's graph. The ops are registered as
effects, since other ranks wait for them: compilers keep them in order even if their results are empty or unread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from torch._library.effects import EffectType

from weft.comm.transport import CommError
from weft.library.inductor import keep_order


class Collectives(Protocol):
    """Part of a communicator that the ops use: see `weft.library.communicator.Communicator`."""

    rank: int

    def all_reduce(self, x: Tensor) -> Tensor: ...

    def all_gatherv(self, x: Tensor, counts: Sequence[int]) -> Tensor: ...

    def reduce_scatterv(self, x: Tensor, counts: Sequence[int]) -> Tensor: ...

    def stacked_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor: ...


OPEN: WeakValueDictionary[str, Collectives] = WeakValueDictionary()
"""Open communicators of this process by name, without the rank: the ops look them up here."""


def with_rank(name: str, rank: int, world_size: int) -> str:
    """Return the name that a rank passes to ops."""
    return f"{name}@{rank}/{world_size}"


def place_in(comm: str) -> tuple[int, int]:
    """Return the rank and the number of ranks from a name. Raises ValueError."""
    rank, slash, world_size = comm.rpartition("@")[2].partition("/")
    if not (slash and rank.isdecimal() and world_size.isdecimal()):
        raise ValueError(f"{comm!r} names no rank, on which this op's shape depends; pass Communicator.name")
    return int(rank), int(world_size)


def named(comm: str) -> Collectives:
    """Return the communicator of this name, ignoring the rank in it. Raises CommError if none is open."""
    found = OPEN.get(comm.rpartition("@")[0] or comm)
    if found is None:
        known = ", ".join(sorted(OPEN)) or "none"
        raise CommError(
            f"no communicator {comm!r} is open in this process, only {known}; make it before the compiled code runs"
        )
    return found


def _all_reduce(x: Tensor, comm: str) -> Tensor:
    """Return the sum of all ranks' x, in x's shape. comm: `Communicator.name`."""
    return named(comm).all_reduce(x)


def _all_gatherv(x: Tensor, counts: Sequence[int], comm: str) -> Tensor:
    """Return all ranks' rows, `[sum(counts), …]`; x `[counts[rank], …]`."""
    return named(comm).all_gatherv(x, counts)


def _reduce_scatterv(x: Tensor, counts: Sequence[int], comm: str) -> Tensor:
    """Return this rank's segment of the sum, `[counts[rank], …]`; x `[sum(counts), …]`."""
    found, (rank, _) = named(comm), place_in(comm)
    if found.rank != rank:
        raise CommError(f"a graph of rank {rank} runs on rank {found.rank}; trace it on the rank that runs it")
    return found.reduce_scatterv(x, counts)


def _all_reduce_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, comm: str) -> Tensor:
    """Return `[2, …]`: residual plus the sum of all ranks' x, then its RMSNorm.

    One tensor, as an op's results must not share memory.
    """
    return named(comm).stacked_norm(x, residual, weight, eps)


def _collective(function: Callable[..., Tensor], arguments: str) -> CustomOpDef:
    name = f"weft::{function.__name__.removeprefix('_')}"
    op = torch.library.custom_op(name, function, mutates_args=(), schema=f"({arguments}, str comm) -> Tensor")
    op.register_effect(EffectType.ORDERED)
    return op


all_reduce = _collective(_all_reduce, "Tensor x")
all_gatherv = _collective(_all_gatherv, "Tensor x, SymInt[] counts")
reduce_scatterv = _collective(_reduce_scatterv, "Tensor x, SymInt[] counts")
all_reduce_add_rms_norm = _collective(_all_reduce_add_rms_norm, "Tensor x, Tensor residual, Tensor weight, float eps")


OPS = tuple(
    getattr(torch.ops.weft, name).default
    for name in ("all_reduce", "all_gatherv", "reduce_scatterv", "all_reduce_add_rms_norm")
)


def _empty(x: Tensor, *shape: int) -> Tensor:
    keep_order(OPS)  # every compiler calls this before it lowers a graph
    return x.new_empty(shape)


@all_reduce.register_fake
def _(x: Tensor, comm: str) -> Tensor:
    return _empty(x, *x.shape)


@all_gatherv.register_fake
def _(x: Tensor, counts: Sequence[int], comm: str) -> Tensor:
    return _empty(x, sum(counts), *x.shape[1:])


@reduce_scatterv.register_fake
def _(x: Tensor, counts: Sequence[int], comm: str) -> Tensor:
    return _empty(x, counts[place_in(comm)[0]], *x.shape[1:])


@all_reduce_add_rms_norm.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float, comm: str) -> Tensor:
    return _empty(x, 2, *x.shape)
