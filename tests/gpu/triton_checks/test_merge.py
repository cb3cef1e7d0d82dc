"""Kernels around the merge's collectives against their twins: every rank's part, then each rank's result."""

from __future__ import annotations

import pytest
import torch

from dcp.shards import check, own, shards_of
from weft.kernels import torch_reference
from weft.kernels.triton import merge as kernels


@pytest.mark.parametrize(
    "ranks, dim, dtype, apart", [(2, 20, torch.bfloat16, 0.0), (3, 8, torch.float32, 0.0), (2, 8, torch.float32, 1e3)]
)
def test_the_parts_of_a_merge(ranks: int, dim: int, dtype: torch.dtype, apart: float, device: torch.device) -> None:
    shape = 4, ranks, dim
    shards = shards_of([1, 0, 30, 20], ranks, ranks, dim, dtype, apart=apart, empty=lambda r, t: (r, t) == (1, 3))
    outs, lses = shards.outs.to(device), shards.lses.to(device)
    size = torch_reference.packed_shards(ranks, *shape, dtype)[1]
    packed = torch.full((ranks, ranks, size), 77.0, dtype=dtype, device=device)
    by_rank = torch.full((ranks, ranks, 4 * dim), float("nan"), dtype=dtype, device=device)
    total = []
    for rank in range(ranks):
        out, lse = outs[rank], lses[rank]
        if rank % 2:  # heads first in memory
            out, lse = out.transpose(0, 1).contiguous().transpose(0, 1), lse.t().contiguous().t()
        theirs = packed[rank].clone()
        kernels.pack_shard(out, lse, packed[rank])
        torch_reference.pack_shard(out, lse, theirs)
        assert torch.equal(packed[rank].nan_to_num(7), theirs.nan_to_num(7))
        total.append(kernels.scale_shard(out, lses, rank, by_rank[rank]))
    for rank in range(ranks):
        wanted = own(shards.out, ranks, rank), own(shards.lse, ranks, rank)
        merged, lse = kernels.merge_packed(packed[:, rank].contiguous(), *shape)
        check((merged.cpu(), lse.cpu()), wanted, f"merged, rank {rank}")
        summed = by_rank[:, rank].float().sum(0).to(dtype).view(4, 1, dim)
        check((summed.cpu(), total[rank].cpu()), wanted, f"scaled, rank {rank}")
