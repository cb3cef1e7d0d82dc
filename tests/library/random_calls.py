"""Random calls of every operation of a Communicator, on CPUs or GPUs, against torch.distributed and definitions."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from library.worlds import bits, poison, same_bits
from weft.kernels.torch_reference import rms_norm, softmax_merge
from weft.library.arguments import MOVED, dtypes_of
from weft.library.communicator import Communicator


@dataclass(frozen=True)
class Sizes:
    """Sizes that calls draw from: rows of one rank, widths of rows, and a communicator's max_bytes for each rank."""

    rows: tuple[int, ...] = (0, 0, 1, 2, 7)
    widths: tuple[int, ...] = (1, 3, 16, 65)
    max_bytes: int = 1 << 15


LARGE = Sizes((0, 1, 5, 64, 300), (1, 3, 16, 65, 1000, 2048), 16 << 20)
"""Sizes over several blocks and chunks of a GPU's kernels."""


def sampled(seed: int, rank: int, *shape: int, dtype: torch.dtype) -> Tensor:
    """A rank's small whole numbers, whose sums are exact in any order; every rank can work them out."""
    x = torch.randint(-7, 8, shape, generator=torch.Generator().manual_seed(seed + rank))
    return (x + rank).to(dtype)


def any_bits(seed: int, rank: int, *shape: int, dtype: torch.dtype) -> Tensor:
    """A rank's bytes, and in a third of the cases all ones: −1, and a NaN of every type."""
    size = torch.Size(shape).numel() * dtype.itemsize
    generator, most = torch.Generator().manual_seed(seed + rank), 2 if dtype == torch.bool else 256
    x = torch.randint(0, most, (size,), generator=generator, dtype=torch.uint8)
    if (seed + rank) % 3 == 0:
        x.fill_(most - 1)
    return x.view(dtype).view(shape)


def joined(tensors: list[Tensor], like: Tensor) -> Tensor:
    """The rows of all, bit for bit, of whatever dtype."""
    return torch.cat([bits(x) for x in tensors]).view(like.dtype).view(-1, *like.shape[1:])


def same(given: Tensor, expected: Tensor) -> bool:
    """Return whether a result, on whatever device, has the bits of `expected` on CPUs."""
    return same_bits(given.cpu(), expected)


def check_sums(comm: Communicator, draw: random.Random, counts: list[int], sizes: Sizes) -> None:
    rank, n, seed, device = comm.rank, comm.world_size, draw.randrange(1 << 30), comm.device
    dtype = draw.choice(dtypes_of("sum", device.type))
    width, rows, total = draw.choice(sizes.widths), draw.choice(sizes.rows), sum(counts)
    x = sampled(seed, rank, rows, width, dtype=dtype)
    expected = torch.stack([sampled(seed, r, rows, width, dtype=dtype) for r in range(n)]).sum(0)
    given, out = x.to(device), torch.full_like(x, float("nan"), device=device)
    assert comm.all_reduce(given, out=out) is out and same(out, expected)
    assert same(comm.all_reduce(given.t()), expected.t().contiguous())
    assert same(comm.all_reduce(given[:, 0]), expected[:, 0])
    dist.all_reduce(x)
    assert same_bits(x, expected)

    every = [sampled(seed, r, total, width, dtype=dtype) for r in range(n)]
    given, summed = every[rank].to(device), torch.stack(every).sum(0)
    mine = summed.split(counts)[rank]
    poison(comm)
    out = torch.full_like(mine, float("nan"), device=device)
    assert same(comm.reduce_scatterv(given, counts), mine)
    assert same(comm.reduce_scatterv(given, counts, out=out), mine) and same(out, mine)

    weight, residual = torch.rand(width).to(dtype) + 0.5, torch.rand_like(summed)
    own = residual.split(counts)[rank]
    on = weight.to(device), 1e-5
    for result, added in (
        (comm.all_reduce_add_rms_norm(given, residual.to(device), *on), residual + summed),
        (comm.reduce_scatterv_add_rms_norm(given, counts, own.to(device), *on), own + mine),
    ):
        assert same(result[1], added)
        normed = rms_norm(added, weight, 1e-5)  # both round twice
        torch.testing.assert_close(result[0].cpu(), normed, rtol=max(1e-2, 3 * torch.finfo(dtype).eps), atol=1e-5)


def check_moves(comm: Communicator, draw: random.Random, counts: list[int], sizes: Sizes) -> None:
    rank, n, seed, dtype = comm.rank, comm.world_size, draw.randrange(1 << 30), draw.choice(MOVED)
    shape, device = draw.choice(((), (1,), (3,), (2, 5), (33,), sizes.widths[-1:])), comm.device
    every = [any_bits(seed, r, rows, *shape, dtype=dtype) for r, rows in enumerate(counts)]
    given, expected = every[rank].to(device), joined(every, every[rank])
    poison(comm)
    assert same(comm.all_gatherv(given, counts), expected)
    out = torch.zeros_like(expected).to(device)
    assert same(comm.all_gatherv(given, counts, out=out), expected) and same(out, expected)

    matrix = [[draw.choice(sizes.rows) for _ in range(n)] for _ in range(n)]
    every = [any_bits(seed, r, sum(row), *shape, dtype=dtype) for r, row in enumerate(matrix)]
    runs = [x.split(row)[rank] for x, row in zip(every, matrix, strict=True)]
    received = comm.all_to_allv(every[rank].to(device), matrix[rank], [row[rank] for row in matrix])
    assert same(received, joined(runs, every[rank]))

    root = draw.randrange(n)
    received = comm.broadcast(any_bits(seed, rank, *shape, dtype=dtype).to(device), root)
    assert same(received, any_bits(seed, root, *shape, dtype=dtype))


def check_mixed(comm: Communicator, draw: random.Random, sizes: Sizes) -> None:
    rank, n, seed, device = comm.rank, comm.world_size, draw.randrange(1 << 30), comm.device
    groups = draw.choice([g for g in range(1, n + 1) if n % g == 0])
    each, counts = n // groups, [draw.choice(sizes.rows) for _ in range(groups)]
    dtype, width = draw.choice(dtypes_of("sum", device.type)), draw.choice(sizes.widths)
    every = [sampled(seed, r, counts[r // each], width, dtype=dtype) for r in range(n)]
    expected = torch.cat([torch.stack(every[g * each : (g + 1) * each]).sum(0) for g in range(groups)])
    assert same(comm.all_reduce_all_gatherv(every[rank].to(device), counts), expected)
    every = [sampled(seed, r, sum(counts), width, dtype=dtype) for r in range(n)]
    expected = torch.stack(every).sum(0).split(counts)[rank // each]
    assert same(comm.reduce_scatterv_all_reduce(every[rank].to(device), counts), expected)

    shape, dtype = (draw.choice(sizes.rows), 2 * n), draw.choice(dtypes_of("merge", device.type))
    outs = [sampled(seed, r, *shape, 16, dtype=dtype) for r in range(n)]
    lses = [sampled(seed + n, r, *shape, dtype=torch.float32) for r in range(n)]
    for lse in lses:
        lse[lse == 1] = -float("inf")  # no keys
    merged, total = softmax_merge(torch.stack(outs).double(), torch.stack(lses).double())
    mine, tolerance = slice(rank * 2, rank * 2 + 2), max(1e-5, torch.finfo(dtype).eps)
    for base, log in (("e", 1.0), ("2", 0.6931471805599453)):
        lse = (lses[rank] / log).to(device)
        result = comm.lse_reduce_scatter(outs[rank].to(device), lse, lse_base=base)  # type: ignore[arg-type]
        close = dict(rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(result[0].cpu().float(), merged[:, mine].float(), **close)
        torch.testing.assert_close(result[1].cpu() * log, total[:, mine].float(), rtol=1e-5, atol=1e-5)


def random_calls(rounds: int, sizes: Sizes = Sizes()) -> None:
    """Make `rounds` times all calls; every rank draws the same, from the same seed."""
    with Communicator(max_bytes=sizes.max_bytes * dist.get_world_size()) as comm:
        draw = random.Random(rounds)
        for number in range(rounds):
            counts = [draw.choice(sizes.rows) for _ in range(comm.world_size)] if number else [0] * comm.world_size
            check_sums(comm, draw, counts, sizes)
            check_moves(comm, draw, counts, sizes)
            check_mixed(comm, draw, sizes)
        comm.barrier()
        comm.check()
