"""`torch.ops.weft.*`: collectives that torch.compile can put into a graph, with the shapes of their results.

A graph holds strings and no objects, so each op takes its communicator's name; it is the same on all ranks and in all
runs of a program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from weft.comm.transport import CommError


class Collectives(Protocol):
    """The part of a communicator that the ops use: see `weft.library.communicator.Communicator`."""

    rank: int

    def all_reduce(self, x: Tensor) -> Tensor: ...

    def all_gatherv(self, x: Tensor, counts: Sequence[int]) -> Tensor: ...

    def reduce_scatterv(self, x: Tensor, counts: Sequence[int]) -> Tensor: ...

    def stacked_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor: ...


OPEN: WeakValueDictionary[str, Collectives] = WeakValueDictionary()
"""The open communicators of this process by name: the table in which ops find them."""


def named(name: str) -> Collectives:
    """The communicator of this name. Raises CommError where none is open."""
    found = OPEN.get(name)
    if found is None:
        known = ", ".join(sorted(OPEN)) or "none"
        raise CommError(f"no communicator {name!r} is open, only {known}; make it before the compiled code runs")
    return found


def _all_reduce(x: Tensor, comm: str) -> Tensor:
    """The sum of all ranks' x, of x's shape. comm: `Communicator.name`."""
    return named(comm).all_reduce(x)


def _all_gatherv(x: Tensor, counts: Sequence[int], comm: str) -> Tensor:
    """All ranks' rows, `[sum(counts), …]`; x `[counts[rank], …]`."""
    return named(comm).all_gatherv(x, counts)


def _reduce_scatterv(x: Tensor, counts: Sequence[int], comm: str) -> Tensor:
    """This rank's segment of the sum, `[counts[rank], …]`; x `[sum(counts), …]`."""
    return named(comm).reduce_scatterv(x, counts)


def _all_reduce_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, comm: str) -> Tensor:
    """`[2, …]`: residual plus the sum of all ranks' x, then its RMSNorm. It is one tensor, as an op's results must not
    share memory."""
    return named(comm).stacked_norm(x, residual, weight, eps)


_custom_op = torch.library.custom_op
all_reduce = _custom_op("weft::all_reduce", _all_reduce, mutates_args=(), schema="(Tensor x, str comm) -> Tensor")
all_gatherv = _custom_op(
    "weft::all_gatherv", _all_gatherv, mutates_args=(), schema="(Tensor x, SymInt[] counts, str comm) -> Tensor"
)
reduce_scatterv = _custom_op(
    "weft::reduce_scatterv", _reduce_scatterv, mutates_args=(), schema="(Tensor x, SymInt[] counts, str comm) -> Tensor"
)
all_reduce_add_rms_norm = _custom_op(
    "weft::all_reduce_add_rms_norm",
    _all_reduce_add_rms_norm,
    mutates_args=(),
    schema="(Tensor x, Tensor residual, Tensor weight, float eps, str comm) -> Tensor",
)


@all_reduce.register_fake
def _(x: Tensor, comm: str) -> Tensor:
    return x.new_empty(x.shape)


@all_gatherv.register_fake
def _(x: Tensor, counts: Sequence[int], comm: str) -> Tensor:
    return x.new_empty(sum(counts), *x.shape[1:])


@reduce_scatterv.register_fake
def _(x: Tensor, counts: Sequence[int], comm: str) -> Tensor:
    return x.new_empty(counts[named(comm).rank], *x.shape[1:])


@all_reduce_add_rms_norm.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float, comm: str) -> Tensor:
    return x.new_empty(2, *x.shape)
