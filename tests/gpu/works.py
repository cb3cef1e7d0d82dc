"""Checks of transport peer, wherever its kernels run: on GPUs, or emulated on a CPU."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from comm.oracle import check_calls, check_edges, check_epilogues, counts_of, groups_of
from weft.comm.peer import PeerTransport
from weft.comm.peer_launch import MAX_NORMED_BYTES, NEVER, PeerTuning, Split
from weft.comm.transport import CommError, CommTimeout, Epilogue, LiveSizes
from weft.planner.exchange import all_gatherv, all_to_allv, reduce_scatterv_all_reduce
from weft.planner.spec import Mesh

SUMMED = (torch.float32, torch.bfloat16, torch.float16)
ANY_BITS = (
    (torch.int32, 1),
    (torch.int32, 36),
    (torch.int64, 8),
    (torch.bfloat16, 40),
    (torch.float32, 7),
    (torch.uint8, 5),
    (torch.float8_e4m3fn, 64),
)
"""Dtypes and widths of rows that are sent unchanged: of whole units and of others."""
SPLIT = PeerTuning(
    split_one_shot=Split(0, 2, 0, 4, 128),
    split_two_shot=Split(0, 2, 1, 3, 128),
    split_one_shot_norm=Split(0, 2, 0, 4, 128),
    split_two_shot_norm=Split(0, 2, 1, 3, 128),
)
SHOTS = {
    "one shot": PeerTuning(one_shot_bytes=NEVER),
    "two shots": PeerTuning(one_shot_bytes=0),
    "one shot, split": replace(SPLIT, one_shot_bytes=NEVER),
    "two shots, split": replace(SPLIT, one_shot_bytes=0),
}


def everything(
    transport: PeerTransport, mesh: Mesh, device: torch.device, tunings: dict[str, PeerTuning], large: bool
) -> None:
    """Run the oracle matrix by each tuning; with more rows, and with wide ones that several blocks share.

    large: use many rows. Otherwise four ranks see few rows, of bfloat16 alone, and wide ones: a kernel's path through
    an exchange does not depend on the dtype, and three ranks run the same kernels as four. More than four see few rows.
    """
    full = large or mesh.world <= 3
    dtypes = SUMMED if full else SUMMED[1:2]
    clusters, widths = ((1, 2, 8), (1032, 7168, 32768)) if large else ((1, 2), (1032,))
    for name, tuning in tunings.items():
        transport.tuning = tuning
        check_calls(transport, mesh, dtypes if name == "one shot" else SUMMED[1:2], str(device))
        for counts in counts_of(mesh):
            check_edges(transport, mesh, counts, torch.float32, str(device))
        check_epilogues(transport, mesh, dtypes, str(device))
        if full:
            check_calls(transport, mesh, (torch.bfloat16,), str(device), scale=67 if large else 5)
            check_epilogues(transport, mesh, (torch.bfloat16,), str(device), scale=31 if large else 2)
        if large or mesh.world <= 4:
            for cluster in clusters:
                transport.tuning = replace(transport.tuning, cluster=cluster)
                check_epilogues(transport, mesh, (torch.bfloat16,), str(device), widths=widths)


def fill(transport: PeerTransport, mesh: Mesh, device: torch.device, tunings: dict[str, PeerTuning]) -> None:
    """Run calls of exactly max_bytes, with all rows on one rank or group, each in turn."""
    n, rank, group = mesh.world, transport.rank, tuple(range(mesh.world))
    rows = int(transport.entry.max_bytes or 0) // 4096
    base = (torch.arange(rows, device=device)[:, None] * 7 + torch.arange(1024, device=device)) % 13
    x = base.float() + rank
    summed = (n * base + n * (n - 1) / 2).float()
    of_groups = [(len(p) * base + sum(p)).float() for p in mesh.partitions["attn_tp"]]
    for tuning in tunings.values():
        transport.tuning = tuning
        assert torch.equal(transport.all_reduce(x, group), summed)
        for one in range(n):
            sizes = tuple(rows * (r == one) for r in group)
            mine = slice(0, sizes[rank])
            assert torch.equal(transport.reduce_scatterv(x, group, sizes), summed[mine])
            assert torch.equal(transport.all_gatherv(x[mine], group, sizes), base + one)
            send = tuple(rows * (r == (rank + one) % n) for r in group)
            receive = tuple(rows * (rank == (r + one) % n) for r in group)
            assert torch.equal(transport.all_to_allv(x, group, send, receive), base + (rank - one) % n)
        for one in range(mesh.attn_dp):
            sizes = tuple(rows * (g == one) for g in range(mesh.attn_dp))
            mine = slice(0, sizes[mesh.group_of(rank)])
            for given in (sizes, LiveSizes(sizes, torch.tensor(sizes, dtype=torch.int32, device=device))):
                exchange = reduce_scatterv_all_reduce(mesh.attn_dp, mesh.attn_tp)
                got = transport.exchange(x, exchange, group, given)
                assert torch.equal(got, summed[mine])
            got = transport.all_reduce_all_gatherv(x[mine], group, sizes)
            assert torch.equal(got, of_groups[one])


def any_bits(transport: PeerTransport, mesh: Mesh, device: torch.device, tunings: dict[str, PeerTuning]) -> None:
    """Check that rows without a sum arrive bit for bit: full of the mark for missing data, of the escape that is sent
    in its place, and of words next to them, in every dtype, by counts of the host and of the device. In between are
    sums."""
    rank = transport.rank
    for number, (tuning, group) in enumerate(itertools.product(tunings.values(), groups_of(mesh, rank))):
        transport.tuning, n, me = tuning, len(group), group.index(rank)
        for case, (dtype, width) in enumerate(ANY_BITS):
            rows = [(number + case + 3 * r) % 5 * (9 if case % 2 else 1) for r in range(n)]
            sent = [tricky_bits(sum(rows), width, dtype, 1000 * number + 10 * case + r) for r in group]
            what = f"rank {rank} of {group}, {rows} rows of {width} {dtype}"
            mine, wanted = sent[me][: rows[me]].to(device), torch.cat([x[:k] for x, k in zip(sent, rows, strict=True)])
            capacity = (max(rows),) * n
            padded = torch.nn.functional.pad(mine, (0, 0, 0, max(rows) - rows[me]))
            counts = torch.tensor(rows, dtype=torch.int32, device=device)
            same_bits(transport.all_gatherv(mine, group, tuple(rows)), wanted, f"all_gatherv, {what}")
            live = transport.exchange(padded, all_gatherv(n), group, LiveSizes(capacity, counts))
            same_bits(live[: sum(rows)], wanted, f"all_gatherv by live rows, {what}")
            matrix = [rows[i:] + rows[:i] for i in range(n)]  # rank i sends matrix[i][j] rows to rank j
            given = sent[me].to(device)
            receive = [matrix[i][me] for i in range(n)]
            wanted = torch.cat([sent[i].split(matrix[i])[me] for i in range(n)])
            got = transport.all_to_allv(given, group, tuple(matrix[me]), tuple(receive))
            same_bits(got, wanted, f"all_to_allv, {what}")
            one = torch.ones(1, 8, device=device)
            assert transport.all_reduce(one, group).eq(n).all(), what


def sums_in_order(transport: PeerTransport, mesh: Mesh, device: torch.device, tunings: dict[str, PeerTuning]) -> None:
    """Check that sums are in float32 and rank order, rounded once, so that all readers have the same bits. Large terms
    cancel each other, so that another order gives other bits."""
    rank = transport.rank
    for number, (tuning, dtype) in enumerate(itertools.product(tunings.values(), SUMMED)):
        transport.tuning = tuning
        terms = cancelling_terms(number, mesh.world, 24, 40, dtype)
        x = terms[rank].to(device)
        for group in groups_of(mesh, rank):
            n, me, what = len(group), group.index(rank), f"rank {rank} of {group}, {dtype}"
            wanted = in_order([terms[r] for r in group])
            assert n == 2 or not torch.equal(wanted, in_order([terms[r] for r in group[::-1]])), "any order would do"
            same_bits(transport.all_reduce(x, group), wanted, f"all_reduce, {what}")
            sizes = tuple(24 // n + (r == 0) * (24 % n) for r in range(n))
            got = transport.reduce_scatterv(x, group, sizes)
            same_bits(got, wanted.split(sizes)[me], f"reduce_scatterv, {what}")
        if mesh.attn_dp > 1 and mesh.attn_tp > 1:
            world, sizes = tuple(range(mesh.world)), (24 // mesh.attn_dp,) * mesh.attn_dp
            got = transport.exchange(x, reduce_scatterv_all_reduce(mesh.attn_dp, mesh.attn_tp), world, sizes)
            same_bits(got, in_order(terms).split(sizes)[mesh.group_of(rank)], f"reduce_scatterv+all_reduce, {dtype}")
            wanted = torch.cat([in_order([terms[r][: sizes[0]] for r in p]) for p in mesh.partitions["attn_tp"]])
            got = transport.all_reduce_all_gatherv(x[: sizes[0]], world, sizes)
            same_bits(got, wanted, f"all_reduce+all_gatherv, {dtype}")


def cancelling_terms(seed: int, ranks: int, rows: int, width: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return small numbers, but for two ranks of each element, which have a large one and its negative."""
    generator = torch.Generator().manual_seed(seed)
    terms = torch.randn(ranks, rows, width, generator=generator) / 256
    two = torch.rand(ranks, rows, width, generator=generator).argsort(0)[:2]
    terms.scatter_(0, two, torch.tensor([16384.0, -16384.0])[:, None, None].expand(2, rows, width))
    return list(terms.to(dtype))


def in_order(terms: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum in float32, one term after the other."""
    total = terms[0].float()
    for term in terms[1:]:
        total = total + term.float()
    return total.to(terms[0].dtype)


def tricky_bits(rows: int, width: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return `[rows, width]`: of every aligned four bytes, most are all ones or one less."""
    generator = torch.Generator().manual_seed(seed)
    size = rows * width * dtype.itemsize
    words = torch.tensor([-1, -2, -1, -2, 0, 0x7FFFFFFF, 255, -256], dtype=torch.int32)
    sampled = words[torch.randint(0, len(words), (size // 4 + 1,), generator=generator)]
    return sampled.view(torch.uint8)[:size].view(dtype).view(rows, width)


def same_bits(got: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    assert got.dtype == wanted.dtype and got.shape == wanted.shape, what
    assert torch.equal(got.cpu().contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8)), what


def wait_in_vain(transport: PeerTransport, mesh: Mesh, device: torch.device) -> None:
    """Let rank 0 call alone: its kernel ends with an error."""
    if transport.rank == 0:
        with pytest.raises(CommTimeout, match="for rank"):
            transport.all_reduce(torch.ones(4, 64, device=device), tuple(range(mesh.world)))
            transport._synchronize()
            transport.check()
        transport._kernels.clear_error(transport._handle)


def refuse(transport: PeerTransport, mesh: Mesh, device: torch.device) -> None:
    group = tuple(range(mesh.world))
    with pytest.raises(CommError, match="max_bytes="):
        transport.all_reduce(torch.ones(1 << 20, 16, device=device), group)
    with pytest.raises(CommError, match=r"not torch\.int32"):
        transport.all_reduce(torch.ones(4, 64, device=device, dtype=torch.int32), group)
    counts = torch.full((mesh.world,), 99, dtype=torch.int32, device=device)
    elsewhere = () if device.type == "cpu" else (counts.cpu(),)
    capacity = (4,) * mesh.world
    for wrong in (counts.long(), counts[:1], *elsewhere):
        with pytest.raises(CommError, match=rf"counts in device memory must be torch.int32 \[{mesh.world}\]"):
            transport.all_gatherv(torch.ones(4, 64, device=device), group, LiveSizes(capacity, wrong))
    with pytest.raises(CommError, match="of 3 rows, but the sizes"):
        transport.all_gatherv(torch.ones(3, 64, device=device), group, LiveSizes(capacity, counts))
    matrix = LiveSizes((1,) * mesh.world**2, counts)
    with pytest.raises(CommError, match=rf"counts in device memory must be torch.int32 \[{2 * mesh.world}\]"):
        transport.exchange(torch.ones(mesh.world, 64, device=device), all_to_allv(mesh.world), group, matrix)
    x = torch.ones(4, 64, device=device)
    for residual, weight, what in (
        (x[:3], x[0], "the residual"),
        (x.half(), x[0], "the residual"),
        (x, x, "the norm's"),
    ):
        with pytest.raises(CommError, match=rf"{what}.* must be torch.float32 \["):
            transport.all_reduce(x, group, Epilogue(residual, weight, 1e-6))
    wide = torch.ones(1, MAX_NORMED_BYTES // 4 + 1, device=device)
    with pytest.raises(CommError, match=f"rows of at most {MAX_NORMED_BYTES} bytes"):
        transport.all_reduce(wide, group, Epilogue(wide, wide[0], 1e-6))
    with pytest.raises(CommError, match="exceed the rows of the tensors"):
        transport.all_gatherv(torch.ones(4, 64, device=device), group, LiveSizes(capacity, counts))
        transport._synchronize()
        transport.check()
    transport._kernels.clear_error(transport._handle)
