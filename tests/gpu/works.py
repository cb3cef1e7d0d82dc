"""What is asked of transport peer, wherever its kernels run: on GPUs of their own, on one GPU, or emulated on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from comm.oracle import check_calls, check_edges, check_epilogues, counts_of
from gpu.streams import few
from weft.comm.peer import NEVER, PeerTransport, PeerTuning, Split
from weft.comm.transport import CommError, CommTimeout, Epilogue
from weft.place.spec import Mesh

SUMMED = (torch.float32, torch.bfloat16, torch.float16)
SPLIT = PeerTuning(
    split_one_hop=Split(0, 2, 0, 4, 128),
    split_two_hops=Split(0, 2, 1, 3, 128),
    split_one_hop_norm=Split(0, 2, 0, 4, 128),
    split_two_hops_norm=Split(0, 2, 1, 3, 128),
)
HOPS = {
    "one hop": PeerTuning(one_hop_bytes=NEVER),
    "two hops": PeerTuning(one_hop_bytes=0),
    "one hop, split": replace(SPLIT, one_hop_bytes=NEVER),
    "two hops, split": replace(SPLIT, one_hop_bytes=0),
}
FEW = {name: few(tuning if name.endswith("split") else tuning.split_from(NEVER)) for name, tuning in HOPS.items()}
"""For ranks whose kernels share a GPU."""

Step = Callable[[], None]


def everything(
    transport: PeerTransport, mesh: Mesh, device: torch.device, tunings: dict[str, PeerTuning], large: bool
) -> None:
    """The oracle matrix by each tuning; large: also on many rows, and on wide ones that several blocks share."""
    for name, tuning in tunings.items():
        transport.tuning = tuning
        check_calls(transport, mesh, SUMMED if name == "one hop" else SUMMED[1:2], str(device))
        for counts in counts_of(mesh):
            check_edges(transport, mesh, counts, torch.float32, str(device))
        check_epilogues(transport, mesh, SUMMED, str(device))
        check_calls(transport, mesh, (torch.bfloat16,), str(device), scale=67 if large else 5)
        check_epilogues(transport, mesh, (torch.bfloat16,), str(device), scale=31 if large else 2)
        for cluster in (1, 2, 8) if large else (1, 2):
            transport.tuning = replace(transport.tuning, cluster=cluster)
            widths = (1032, 7168, 32768) if large else (1032,)
            check_epilogues(transport, mesh, (torch.bfloat16,), str(device), widths=widths)


def replay(
    transport: PeerTransport, mesh: Mesh, device: torch.device, turns: int, again: Callable[[PeerTransport, Step], Step]
) -> None:
    """Six calls, made again with other counts and contents each time; every time is checked, exactly.

    again: what makes these calls again, such as a graph of them, replayed. Inputs are small whole numbers, so that
    sums are exact. Neighbouring turns differ in every row: what is stale shows.
    """
    n, rank, group, most, width, cases = mesh.world, transport.rank, tuple(range(mesh.world)), 8, 256, 61
    generator = torch.Generator().manual_seed(11)
    sizes = torch.randint(0, most + 1, (cases, n), generator=generator)
    sizes[::7, 1] = 0
    sizes[0], sizes[1] = 0, most
    x = torch.randint(-8, 9, (cases, n, n * most, width), generator=generator).bfloat16()
    residual = torch.randint(-8, 9, (n * most, width), generator=generator).bfloat16()
    wanted = torch.full((cases, 6, n * most, width), float("nan"), dtype=torch.bfloat16)  # NaN: no matter what
    for k in range(cases):
        total, start = int(sizes[k].sum()), int(sizes[k, :rank].sum())
        summed = x[k].float().sum(0).bfloat16()
        wanted[k, 0, :total] = torch.cat([x[k, r, : sizes[k, r]] for r in group])
        wanted[k, 1, : sizes[k, rank]] = summed[start : start + sizes[k, rank]]
        wanted[k, 2] = summed
        per_group, mine = sizes[k, : mesh.attn_dp], mesh.group_of(rank)
        sums = [
            x[k, list(p)].float().sum(0).bfloat16()[:c]
            for p, c in zip(mesh.partitions["attn_tp"], per_group, strict=True)
        ]
        wanted[k, 3, : int(per_group.sum())] = torch.cat(sums)
        before = int(per_group[:mine].sum())
        wanted[k, 4, : per_group[mine]] = summed[before : before + per_group[mine]]
        wanted[k, 5, : sizes[k, rank]] = wanted[k, 1, : sizes[k, rank]] + residual[: sizes[k, rank]]
    sizes, x, wanted = sizes.to(device, torch.int32), x.to(device), wanted.to(device)
    anything = wanted.isnan()
    counts, group_counts = sizes[0].clone(), sizes[0, : mesh.attn_dp].clone()
    own, every = x[0, rank, :most].clone(), x[0, rank].clone()
    outs = torch.empty_like(wanted[0])
    epilogue = Epilogue(residual.to(device), torch.ones(width, device=device).bfloat16(), 1e-6)
    bad = torch.zeros((), dtype=torch.int64, device=device)

    def step() -> None:
        results = [
            transport.all_gatherv(own, group, counts),
            transport.reduce_scatterv(every, group, counts),
            transport.all_reduce(every, group),
            transport.all_reduce_all_gatherv(own, group, group_counts),
            transport.reduce_scatterv_all_reduce(every, group, group_counts),
            transport.reduce_scatterv(every, group, counts, epilogue)[0],
        ]
        for out, result in zip(outs, results, strict=True):
            out[: result.shape[0]].copy_(result)

    repeat = again(transport, step)
    for turn in range(turns):
        k = turn * 17 % cases
        counts.copy_(sizes[k])
        group_counts.copy_(sizes[k, : mesh.attn_dp])
        own.copy_(x[k, rank, :most])
        every.copy_(x[k, rank])
        outs.fill_(float("inf"))
        repeat()
        bad += ((outs != wanted[k]) & ~anything[k]).any() * (turn + 1)
        if turn % 1000 == 999 or turn == turns - 1:
            transport.check()
            assert int(bad) == 0, f"a wrong result up to turn {turn}"


def fill(transport: PeerTransport, mesh: Mesh, device: torch.device, tunings: dict[str, PeerTuning]) -> None:
    """Calls of exactly max_bytes, in which one rank or group has all rows, each in turn."""
    n, rank, group = mesh.world, transport.rank, tuple(range(mesh.world))
    rows = int(transport.max_bytes or 0) // 4096
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
            for counts in (sizes, torch.tensor(sizes, dtype=torch.int32, device=device)):
                got = transport.reduce_scatterv_all_reduce(x, group, counts)
                assert torch.equal(got[mine], summed[mine])
            got = transport.all_reduce_all_gatherv(x[mine], group, sizes)
            assert torch.equal(got, of_groups[one])


def wait_in_vain(transport: PeerTransport, mesh: Mesh, device: torch.device) -> None:
    """Rank 0 calls, the others do not: its kernel ends, and says so."""
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
    with pytest.raises(CommError, match="not int32"):
        transport.all_reduce(torch.ones(4, 64, device=device, dtype=torch.int32), group)
    counts = torch.full((mesh.world,), 99, dtype=torch.int32, device=device)
    elsewhere = () if device.type == "cpu" else (counts.cpu(),)
    for wrong in (counts.long(), counts[:1], *elsewhere):
        with pytest.raises(CommError, match=rf"counts in device memory must be torch.int32 \[{mesh.world}\]"):
            transport.all_gatherv(torch.ones(4, 64, device=device), group, wrong)
    x = torch.ones(4, 64, device=device)
    for residual, weight, what in (
        (x[:3], x[0], "the residual"),
        (x.half(), x[0], "the residual"),
        (x, x, "the norm's"),
    ):
        with pytest.raises(CommError, match=rf"{what}.* must be torch.float32 \["):
            transport.all_reduce(x, group, Epilogue(residual, weight, 1e-6))
    with pytest.raises(CommError, match="more rows than the tensors hold"):
        transport.all_gatherv(torch.ones(4, 64, device=device), group, counts)
        transport._synchronize()
        transport.check()
    transport._kernels.clear_error(transport._handle)
