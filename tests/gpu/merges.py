"""Checks of the merge on transport peer, wherever its kernel runs: on GPUs, or emulated on a CPU."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from dcp.shards import Shards, check, own, shards_of
from weft.comm.peer import PeerTransport
from weft.comm.transport import CommError, offer_of
from weft.planner.cost import PRESETS
from weft.planner.prices import BlockPrices
from weft.planner.recipes import Merge
from weft.planner.spec import Mesh
from weft.stream.block_exchanges import BlockExchanges, a2a, ag_rs

BF16 = torch.bfloat16
Step = Callable[[], object]


def shapes(ranks: int, large: bool) -> list[tuple[int, int, torch.dtype]]:
    """Heads of a rank, dim, dtype: rows of a part of a team, of a team, of several, of pieces that are not full, and of
    what is not whole units."""
    half, single = torch.float16, torch.float32
    few = [(1, 8, BF16), (2, 64, BF16), (1, 128, half), (1, 192, BF16), (1, 20, single), (2, 512, BF16)]
    few += [(1, 576, single), (2, 5, BF16)]
    return [*few, (128 // ranks, 512, BF16), (64 // ranks, 128, BF16)] if large else few


def given(shards: Shards, at: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return shards.outs[at].to(device), shards.lses[at].to(device)


def merge_everything(transport: PeerTransport, mesh: Mesh, device: torch.device, large: bool) -> None:
    """Right by float64; the same bits on every run, in any company and from any layout in memory; and so are the ways
    that are built from other exchanges."""
    group = mesh.peers("dcp", transport.rank)
    n, me = len(group), group.index(transport.rank)
    for seed, (heads, dim, dtype) in enumerate(shapes(n, large)):
        lengths = [1, 70, 0, 33, 2, n, 5] * (9 if large else 1)
        cases = [shards_of(lengths, n, heads * n, dim, dtype, seed=seed, run=4)]
        nothing = [6] * (n + 1)
        cases.append(shards_of(nothing, n, heads * n, dim, dtype, seed=seed, empty=lambda r, t: t in (r, n)))
        cases.append(shards_of([30, 9], n, heads * n, dim, dtype, seed=seed, apart=1000))  # some parts weigh nothing
        assert cases[-1].outs.isnan().any() and not cases[-1].lses.isinf().any()
        for shards in cases:
            what = f"rank {transport.rank}, {heads} heads of {dim}, {dtype}"
            out, lse = given(shards, me, device)
            wanted = own(shards.out, n, me), own(shards.lse, n, me)
            before = out.clone(), lse.clone()
            got = transport.merge_scatterv(out, lse, group)
            check((got[0].cpu(), got[1].cpu()), wanted, what)
            assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(before, (out, lse), strict=True))
            rotated = out.flip(0).transpose(0, 1).contiguous().transpose(0, 1), lse.flip(0).t().contiguous().t()
            again = transport.merge_scatterv(*rotated, group)
            assert all(torch.equal(a, b.flip(0)) for a, b in zip(got, again, strict=True)), f"turned, {what}"
            alone = transport.merge_scatterv(out[-1:], lse[-1:], group)
            assert all(torch.equal(a[-1:], b) for a, b in zip(got, alone, strict=True)), f"alone, {what}"
            for recipe in (ag_rs, a2a):
                built = recipe(transport, out, lse, group)
                check((built[0].cpu(), built[1].cpu()), wanted, f"{recipe.__name__}, {what}")
    transport.barrier(transport.on_host)


def merge_live_rows(
    transport: PeerTransport,
    mesh: Mesh,
    device: torch.device,
    turns: int,
    again: Callable[[PeerTransport, Step], Step],
) -> None:
    """One capture serves every number of live tokens, none among them, with other exchanges of the group in between.

    again: captures a step, or gives it as it is. What lies behind the live rows is poisoned, and stays as it was.
    """
    group = mesh.peers("dcp", transport.rank)
    n, me = len(group), group.index(transport.rank)
    capacity, heads, dim = 6, 2 * n, 64
    out = torch.empty(capacity, heads, dim, dtype=torch.bfloat16, device=device)
    lse = torch.empty(capacity, heads, device=device)
    live = torch.zeros(1, dtype=torch.int32, device=device)
    summed = torch.ones(3, 24, device=device)
    results: list[Tensor] = []

    def step() -> None:
        results[:] = [*transport.merge_scatterv(out, lse, group, live), transport.all_reduce(summed, group)]

    run = again(transport, step)
    draw = random.Random(5)  # the same on every rank
    for step_index in range(turns):
        tokens = draw.choice((0, 1, capacity, draw.randrange(capacity + 1)))
        shards = shards_of([draw.randrange(40) for _ in range(tokens)], n, heads, dim, torch.bfloat16, seed=step_index)
        out.fill_(math.nan)
        lse.fill_(math.nan)
        if tokens:
            out[:tokens], lse[:tokens] = given(shards, me, device)
        live.fill_(tokens)
        run()
        transport._synchronize()
        transport.check()
        got = results[0][:tokens].cpu(), results[1][:tokens].cpu()
        check(got, (own(shards.out, n, me), own(shards.lse, n, me)), f"turn {step_index}, {tokens} tokens")
        assert (results[2] == n).all()


def merge_in_pieces(transport: PeerTransport, mesh: Mesh, device: torch.device) -> None:
    """More tokens than a call takes go in several, by every way and with live tokens that end in any of them."""
    group = mesh.peers("dcp", transport.rank)
    n, me, tokens = len(group), group.index(transport.rank), 7
    offer = offer_of(transport.entry, mesh, PRESETS["h200-nvlink"])
    for dim, dtype in ((16, BF16), (5, torch.float32), (7, BF16)):  # with what is padded counted, lse the larger part
        shards = shards_of([9, 1, 30, 0, 4, 17, n], n, 2 * n, dim, dtype, seed=dim, run=2)
        out, lse = given(shards, me, device)
        wanted = own(shards.out, n, me), own(shards.lse, n, me)
        for recipe in ("ag_rs", "a2a", "fused"):
            prices = BlockPrices(mesh, [offer], {Merge: recipe})
            transports = {transport.entry.name: transport}
            merge = partial(BlockExchanges(mesh, transport.rank, transports, prices).merge, "dcp")
            each = prices.plan(Merge(2 * n, dim, dtype.itemsize), "dcp", tokens).max_call_rows
            assert 1 <= each < tokens, "one call takes all"
            got = merge(out, lse)
            check((got[0].cpu(), got[1].cpu()), wanted, f"{recipe} of heads of {dim}")
            for count in range(tokens + 1) if recipe == "fused" else ():
                live = torch.full((1,), count, dtype=torch.int32, device=device)
                behind = out.clone(), lse.clone()
                for x in behind:
                    x[count:] = math.nan
                some = merge(*behind, live)
                assert all(torch.equal(a[:count], b[:count]) for a, b in zip(got, some, strict=True)), count
    transport._synchronize()
    transport.check()


def refuse_merges(transport: PeerTransport, mesh: Mesh, device: torch.device) -> None:
    group = mesh.peers("dcp", transport.rank)
    n = len(group)

    def ones(tokens: int, heads: int, dim: int, **options: torch.dtype) -> tuple[Tensor, Tensor]:
        return torch.ones(tokens, heads, dim, device=device, **options), torch.zeros(tokens, heads, device=device)

    with pytest.raises(CommError, match="max_bytes="):
        transport.merge_scatterv(*ones(4096, n, 512), group)
    with pytest.raises(CommError, match=r"not torch\.float64"):
        transport.merge_scatterv(*ones(1, n, 16, dtype=torch.float64), group)
    with pytest.raises(CommError, match=f"H a multiple of {n}"):
        transport.merge_scatterv(*ones(1, n + 1, 16), group)
    wrong = torch.ones(1, dtype=torch.int64, device=device)
    with pytest.raises(CommError, match=r"the number of live tokens must be torch.int32 \[1\]"):
        transport.merge_scatterv(*ones(1, n, 16), group, wrong)
    with pytest.raises(CommError, match="exceed the rows of the tensors"):
        transport.merge_scatterv(*ones(1, n, 16), group, torch.full((1,), 2, dtype=torch.int32, device=device))
        transport._synchronize()
        transport.check()
    transport._kernels.clear_error(transport._handle)
