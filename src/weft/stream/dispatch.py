"""Dispatch and combine: rows to the ranks of their experts and back.

A row goes once to each rank that has any of its experts, with the list of its experts and their weights. A rank returns
one row for each that it received: the sum over its experts, in the rows' dtype. The row's own rank adds these sums in
rank order and float32, and rounds once: the bits are the same on every run. Ranks first exchange the number of rows
that they send; a rank may receive all rows of the world. On CPUs the host reads these counts, and tensors have exactly
these rows. On GPUs counts stay on the device, and tensors have the capacity for all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.comm.transport import LiveSizes, Sizes, to_and_from
from weft.planner.experts import COUNTS, RETURN, SEND, listed_bytes
from weft.planner.shards import owner
from weft.planner.spec import Mesh

Carry = Callable[[str, Tensor, Sizes | LiveSizes], Tensor]
"""Function that runs the named exchange over the world (`weft.planner.experts`): all_to_allv of rows, with these
sizes."""
Work = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A rank's experts: rows `[R, width]`, weights `[R, k]`, experts `[R, k]` → `[R, width]`, each row's sum over local
experts."""


@dataclass(frozen=True)
class Exchanging:
    """A rank's end of a dispatch.

    capacity: maximum rows of each rank. carry: runs an exchange; on GPUs with LiveSizes. empty: makes a tensor for the
    named exchange.
    """

    mesh: Mesh
    rank: int
    capacity: Sizes
    carry: Carry
    empty: Callable[..., Tensor]


def all_to_allv(by: Exchanging, x: Tensor, weight: Tensor, expert: Tensor, experts: int, work: Work) -> Tensor:
    """Send rows to the ranks of their experts and back, as `on_host`, by the recipe of this name."""
    return (on_device if x.is_cuda else on_host)(by, x, weight, expert, experts, work)


def on_host(by: Exchanging, x: Tensor, weight: Tensor, expert: Tensor, experts: int, work: Work) -> Tensor:
    """Send rows to the ranks of their experts, and return the results `[T, width]`, on CPUs. All ranks must call it.

    Args:
        by: its exchanges move the rows.
        x: `[T, width]`, this rank's own rows.
        weight, expert: float and int64 `[T, k]`.
        experts: total number of experts.
        work: each rank calls it with the rows that it received. The ranks of moe_tp that share an expert all get its
          rows, and each returns its part.
    """
    mesh, carry, (rows, width), (_, k), n = by.mesh, by.carry, x.shape, expert.shape, by.mesh.world
    goes = torch.zeros(rows, mesh.ep, dtype=torch.bool, device=x.device)
    goes.scatter_(1, owner(expert, experts, mesh.ep), True)
    goes = goes.repeat_interleave(mesh.moe_tp, dim=1)  # by rank
    row = goes.t().nonzero()[:, 1]  # rank by rank, a rank's rows in order
    counts = goes.sum(0, dtype=torch.int32)[:, None]
    send = tuple(counts.flatten().tolist())
    receive = tuple(carry(COUNTS, counts, (1,) * n**2).flatten().tolist())
    listed = listed_bytes(k) // x.element_size()
    packed = by.empty(SEND, len(row), width + listed, like=x)
    packed[:, :width] = x.index_select(0, row)
    lists = torch.cat((expert.int(), weight.float().view(torch.int32)), dim=1)
    packed[:, width:] = lists.view(x.dtype).index_select(0, row)
    received = carry(SEND, packed, to_and_from(send, receive, by.rank))
    experts_of, weights = received[:, width:].contiguous().view(torch.int32).split(k, dim=1)
    outputs = work(received[:, :width], weights.contiguous().view(torch.float32).to(weight.dtype), experts_of.long())
    back = carry(RETURN, outputs, to_and_from(receive, send, by.rank))
    total = x.new_zeros(rows, width, dtype=torch.promote_types(x.dtype, torch.float32))
    for at, run in zip(row.split(send), back.split(send), strict=True):
        total.index_add_(0, at, run.to(total.dtype))
    return total.to(x.dtype)


def on_device(by: Exchanging, x: Tensor, weight: Tensor, expert: Tensor, experts: int, work: Work) -> Tensor:
    """Run `on_host` for GPUs: the host does not wait, so that a CUDA graph may capture it.

    Expert −1 means none, as for padding rows. `work` gets the capacity for all rows of the world; rows after the live
    ones have no expert.
    """
    from weft.kernels.triton import moe_permute as kernels  # GPUs only: a CPU need not have Triton

    mesh, carry, (rows, width), k, n = by.mesh, by.carry, x.shape, expert.shape[1], by.mesh.world
    place, sent = kernels.places(expert, n, experts, mesh.moe_tp)
    received = carry(COUNTS, sent[:, None], (1,) * n**2).flatten()
    packed = x.new_empty(n * rows, width + listed_bytes(k) // x.element_size())
    kernels.pack(x, weight, expert, place, sent, packed)
    send_rows, back = tuple(rows for rows in by.capacity for _ in range(n)), by.capacity * n
    came = carry(SEND, packed, LiveSizes(send_rows, torch.cat((sent, received))))
    outputs = work(came[:, :width], *kernels.lists(came, width, k, received))
    returned = carry(RETURN, outputs, LiveSizes(back, torch.cat((received, sent))))
    return kernels.add(returned, place, sent)
