"""The protocol of transports, and the one place that turns a planned edge into a call.

Rows are ragged: sizes differ by rank, may be zero, and change every step. Every rank of a group makes the same calls in
the same order, also with zero rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from weft.place import edges
from weft.place.edges import Edge
from weft.place.plan import Counts
from weft.place.spec import Mesh, Rows

Ranks = tuple[int, ...]
"""A group: its global ranks, ascending, the caller's included."""
Sizes = tuple[int, ...]
"""Rows of each rank of a group, in rank order."""


class CommError(RuntimeError):
    """A collective failed or timed out: the text names the rank, the call and, where known, the lost peer."""


class PeerLost(CommError):
    """The process of global rank `rank` is gone."""

    def __init__(self, rank: int, by: int):
        super().__init__(f"rank {by}: rank {rank} is gone")
        self.rank = rank


class CommTimeout(CommError):
    """A collective took longer than the transport's timeout."""


@dataclass(frozen=True, slots=True)
class Quantised:
    """Where an epilogue puts its normalised rows in eight bits too, for a product that takes them so.

    out: float8_e4m3fn `[rows, width]` (OCP 8-bit floating point, E4M3); scale: float32 `[1]`, of every element.
    """

    out: Tensor
    scale: Tensor

    def fill(self, normed: Tensor) -> None:
        """out = normed / scale, saturated, rounded to even."""
        most = torch.finfo(torch.float8_e4m3fn).max
        self.out.copy_((normed.float() / self.scale).clamp(-most, most))


@dataclass(frozen=True, slots=True)
class Epilogue:
    """What a reduction goes on to do with its rows while they are at hand: residual add, then RMSNorm.

    residual: `[rows, width]` for the result's rows; weight: `[width]`; both of the input's dtype. See `finish`.
    """

    residual: Tensor
    weight: Tensor
    eps: float
    quantised: Quantised | None = None


def finish(delta: Tensor, epilogue: Epilogue) -> Tensor:
    """What a reduction with an epilogue gives instead of delta `[rows, width]`: `[2, rows, width]`.

    First the new residual, residual + delta; then its RMSNorm (arXiv 1910.07467), in float32 at least, rounded, times
    weight.
    """
    residual = epilogue.residual + delta
    wide = residual.to(torch.promote_types(residual.dtype, torch.float32))
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epilogue.eps)).to(delta.dtype)
    normed = epilogue.weight * normed
    if epilogue.quantised is not None:
        epilogue.quantised.fill(normed)
    return torch.stack((residual, normed))


class Transport(Protocol):
    """One rank's end. Tensors are `[rows, width]`, contiguous; inputs are left as they are, results are new tensors.

    name: as plans and reports print it. kinds: the planned edges on offer (`weft.place.edges`); epilogues: those of
    them that take an epilogue, and then give `[2, rows, width]` as `finish` says. max_bytes: of the larger of a call's
    input and result; None: any. What a transport lacks it says here, at plan time, and never falls back on its own. All
    methods raise CommError.
    """

    name: str
    rank: int
    kinds: frozenset[str]
    epilogues: frozenset[str]
    max_bytes: int | None

    def close(self) -> None:
        """Leaves the world; the transport is of no use after."""
        ...

    def empty(self, *shape: int, like: Tensor) -> Tensor:
        """An unfilled tensor of like's dtype and device, where this transport reads its inputs fastest."""
        ...

    def all_reduce(self, x: Tensor, group: Ranks, epilogue: Epilogue | None = None) -> Tensor:
        """Sum of every rank's x."""
        ...

    def reduce_scatterv(self, x: Tensor, group: Ranks, sizes: Sizes, epilogue: Epilogue | None = None) -> Tensor:
        """Sum of every rank's x `[sum(sizes), width]`, of which the i-th rank gets the i-th run of rows."""
        ...

    def all_gatherv(self, x: Tensor, group: Ranks, sizes: Sizes) -> Tensor:
        """Every rank's rows, in rank order: `[sum(sizes), width]`; the i-th rank puts in `sizes[i]` rows."""
        ...

    def all_to_allv(self, x: Tensor, group: Ranks, send: Sizes, receive: Sizes) -> Tensor:
        """Sends the i-th run of rows to the i-th rank; gives the runs received, in rank order."""
        ...

    def broadcast(self, x: Tensor, group: Ranks, root: int) -> Tensor:
        """The x of global rank `root`; every rank passes a tensor of that shape."""
        ...

    def barrier(self, group: Ranks) -> None:
        """Returns once every rank of the group has called it."""
        ...

    def all_reduce_all_gatherv(
        self, x: Tensor, reduce: Ranks, gather: Ranks, sizes: Sizes, epilogue: Epilogue | None = None
    ) -> Tensor:
        """`all_gatherv(all_reduce(x, reduce), gather, sizes)` in one traversal; only where `kinds` offers it."""
        ...

    def reduce_scatterv_all_reduce(
        self, x: Tensor, scatter: Ranks, reduce: Ranks, sizes: Sizes, epilogue: Epilogue | None = None
    ) -> Tensor:
        """`all_reduce(reduce_scatterv(x, scatter, sizes), reduce)` in one traversal; only where `kinds` offers it."""
        ...


def carry_out(
    edge: Edge, x: Tensor, mesh: Mesh, transport: Transport, counts: Counts, epilogue: Epilogue | None = None
) -> Tensor:
    """Takes x `[rows, width]` along an edge. counts: this step's tokens of each DP group."""
    rank = transport.rank
    if edge.kind == edges.SLICE:
        (start, stop), (base, _) = (mesh.row_range(p.rows, rank, counts) for p in (edge.dst, edge.src))
        return x[start - base : stop - base]
    x = x.contiguous()
    if edge.kind in (edges.ALL_REDUCE_ALL_GATHERV, edges.REDUCE_SCATTERV_ALL_REDUCE):
        tp, dp = mesh.peers("attn_tp", rank), mesh.peers("attn_dp", rank)
        sizes = mesh.segment_sizes(Rows.GROUP, "attn_dp", rank, counts)
        if edge.kind == edges.ALL_REDUCE_ALL_GATHERV:
            return transport.all_reduce_all_gatherv(x, tp, dp, sizes, epilogue)
        return transport.reduce_scatterv_all_reduce(x, dp, tp, sizes, epilogue)
    group = mesh.peers(edge.group, rank)
    if edge.kind == edges.ALL_REDUCE:
        return transport.all_reduce(x, group, epilogue)
    assert edge.group is not None
    if edge.kind == edges.REDUCE_SCATTERV:
        sizes = mesh.segment_sizes(edge.dst.rows, edge.group, rank, counts)
        return transport.reduce_scatterv(x, group, sizes, epilogue)
    assert epilogue is None, f"{edge.kind} sums nothing, so it takes no epilogue"
    return transport.all_gatherv(x, group, mesh.segment_sizes(edge.src.rows, edge.group, rank, counts))
