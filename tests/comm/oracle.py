"""The oracle matrix: every call of a transport against what the definition says, computed in float64 from all inputs.

`check_calls` and `check_epilogues` run on every rank of any transport. Inputs are random by a seed that all ranks
share, so that each can work out what it must get.
"""

from __future__ import annotations

import itertools

import torch
from support import held
from torch import Tensor

from weft.comm.transport import Epilogue, Ranks, Sizes, Transport, finish
from weft.kernels import float8
from weft.planner.axes import GROUP_NAMES
from weft.planner.edges import legal_edges
from weft.planner.spec import Mesh
from weft.stream.step_rows import StepRows

WIDTHS = (1, 8, 33)
EDGE_WIDTH = 5
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def draw(seed: int, rank: int, rows: int, width: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """A rank's input: random, skewed (some values far larger), rounded to dtype."""
    generator = torch.Generator().manual_seed(seed * 64 + rank)
    x = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    x[:: max(1, rows // 3)] *= 50
    return x.to(dtype).to(device)


def close(got: Tensor, wanted: Tensor, what: str) -> None:
    """Same shape, every element written, and near what float64 says."""
    assert got.shape == wanted.shape, f"{what}: {tuple(got.shape)}, wanted {tuple(wanted.shape)}"
    if not got.numel():
        return
    wide = got.double()
    assert torch.isfinite(wide).all(), f"{what}: not every element was written"
    error = (wide - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-30)
    assert error <= TOLERANCE[got.dtype], f"{what}: error {error:.1e}"


def groups_of(mesh: Mesh, rank: int) -> list[Ranks]:
    """The distinct groups of more than one rank that a rank is in."""
    found = (mesh.peers(name, rank) for name in GROUP_NAMES)
    return [g for g in dict.fromkeys(found) if len(g) > 1]


def row_patterns(size: int, scale: int = 1) -> list[Sizes]:
    """Rows of each rank: equal, ragged, one empty, one row in all, none at all."""
    return [
        (4 * scale,) * size,
        tuple(scale * (1 + 3 * i % 7) for i in range(size)),
        tuple(0 if i == size // 2 else scale * (2 + i) for i in range(size)),
        tuple(int(i == size - 1) for i in range(size)),
        (0,) * size,
    ]


def check_calls(
    transport: Transport,
    mesh: Mesh,
    dtypes: tuple[torch.dtype, ...],
    device: str = "cpu",
    at_home: bool = False,
    scale: int = 1,
) -> int:
    """Every call over every group, size pattern, width and dtype; several groups run at once. Gives their number.

    at_home: inputs lie where the transport reads them fastest. scale: factor of the rows.
    """
    rank, calls = transport.rank, 0

    def place(x: Tensor) -> Tensor:
        return transport.empty(*x.shape, like=x).copy_(x) if at_home else x

    for group in groups_of(mesh, rank):
        me = group.index(rank)
        for sizes, width, dtype in itertools.product(row_patterns(len(group), scale), WIDTHS, dtypes):
            calls += 1
            total = sum(sizes)
            whole = {r: draw(calls, r, total, width, dtype, device) for r in group}
            whole[rank] = place(whole[rank])
            before = whole[rank].clone()
            summed = torch.stack([whole[r].double() for r in group]).sum(0)
            what = f"rank {rank} of {group}, sizes {sizes}, width {width}, {dtype}"
            close(transport.all_reduce(whole[rank], group), summed, f"all_reduce, {what}")
            close(
                transport.reduce_scatterv(whole[rank], group, sizes),
                summed.split(sizes)[me],
                f"reduce_scatterv, {what}",
            )
            parts = [draw(calls + 1000, r, n, width, dtype, device) for r, n in zip(group, sizes, strict=True)]
            close(transport.all_gatherv(place(parts[me]), group, sizes), torch.cat(parts), f"all_gatherv, {what}")
            # Rank i sends sizes[(i + j) mod n] rows to rank j.
            number = [sizes[i:] + sizes[:i] for i in range(len(group))]
            sent = [draw(calls + 2000, r, total, width, dtype, device) for r in group]
            wanted = torch.cat([sent[i].split(number[i])[me] for i in range(len(group))])
            received = tuple(number[i][me] for i in range(len(group)))
            close(transport.all_to_allv(place(sent[me]), group, number[me], received), wanted, f"all_to_allv, {what}")
            root = group[calls % len(group)]
            close(transport.broadcast(whole[rank], group, root), whole[root], f"broadcast, {what}")
            assert torch.equal(whole[rank], before), f"the input was changed, {what}"
        transport.barrier(group)
    return calls


def check_epilogues(
    transport: Transport,
    mesh: Mesh,
    dtypes: tuple[torch.dtype, ...],
    device: str = "cpu",
    scale: int = 1,
    widths: tuple[int, ...] = (8, 33, 200),
) -> int:
    """Every reduction that takes an epilogue, against the plain reduction and `finish`, on ragged rows."""
    rank, calls = transport.rank, 0
    for counts, width, dtype in itertools.product(counts_of(mesh, scale), widths, dtypes):
        for edge in itertools.chain.from_iterable(legal_edges(mesh).values()):
            if edge.exchange is None or not transport.entry.offers(edge.exchange, True) or edge.dst.owes:
                continue
            calls += 1
            rows = [mesh.row_count(p.rows, rank, counts) for p in (edge.src, edge.dst)]
            x = draw(calls, rank, rows[0], width, dtype, device)
            residual = draw(calls + 500, 63, rows[1], width, dtype, device)
            of = torch.float32 if calls % 3 == 0 else dtype  # a weight may be of more bits than the rows
            weight = draw(calls + 900, 63, 1, width, of, device)[0]
            group_size = (32, 64, 128)[calls // 2 % 3]
            quantised = float8.unfilled(residual, group_size) if calls % 2 else None
            if quantised:
                quantised.values.copy_(torch.tensor(float("nan")))
                quantised.scales.fill_(float("nan"))
            epilogue = Epilogue(residual.clone(), weight, 1e-6, quantised)
            step = StepRows(mesh, rank, counts)
            got = step.carry(edge, x, transport, epilogue)
            wanted = finish(step.carry(edge, x, transport), Epilogue(residual, weight, 1e-6))
            what = f"rank {rank}: {edge}, {counts}, width {width}, {dtype}"
            assert got.shape == (2, rows[1], width), what
            # A plain call of another size may sum in another order: one unit in the last place.
            close(got[0], wanted[0], f"residual, {what}")
            close(got[1], wanted[1], f"norm, {what}")
            assert torch.equal(epilogue.residual, residual), f"the residual was changed, {what}"
            if quantised:  # bit for bit
                eight = float8.quantise(got[1], group_size)
                assert torch.equal(quantised.values.view(torch.uint8), eight.values.view(torch.uint8)), f"FP8, {what}"
                assert torch.equal(quantised.scales, eight.scales), f"scales, {what}"
    return calls


def counts_of(mesh: Mesh, scale: int = 1) -> list[tuple[int, ...]]:
    """Tokens of each DP group: equal, ragged with an empty group, one token in all, none."""
    dp = mesh.attn_dp
    return [(3 * scale,) * dp, tuple(scale * (5 * g) % 97 for g in range(dp)), (1, *[0] * (dp - 1)), (0,) * dp]


def whole_and_part(
    mesh: Mesh, rank: int, owes: str | None, total: int, seed: int, device: str
) -> tuple[Tensor, Tensor]:
    """A value of `total` rows, and a rank's part of it: random parts that add up over every group of `owes`."""
    whole = draw(seed, 63, total, EDGE_WIDTH, torch.float64, device)
    if owes is None:
        return whole, whole
    *others, last = mesh.peers(owes, rank)
    parts = {r: draw(seed, r, total, EDGE_WIDTH, torch.float64, device) for r in others}
    return whole, whole - sum(parts.values()) if rank == last else parts[rank]


def check_edges(
    transport: Transport, mesh: Mesh, counts: tuple[int, ...], dtype: torch.dtype, device: str = "cpu"
) -> int:
    """Every legal edge on offer, from a value that means the same on every rank. Gives their number."""
    rank, edges = transport.rank, 0
    for edge in itertools.chain.from_iterable(legal_edges(mesh).values()):
        if edge.exchange and not transport.entry.offers(edge.exchange):
            continue
        edges += 1
        whole, part = whole_and_part(mesh, rank, edge.src.owes, sum(counts), edges, device)
        given = held(part, mesh, edge.src.rows, rank, counts).to(dtype)
        got = StepRows(mesh, rank, counts).carry(edge, given, transport)
        wanted = held(whole, mesh, edge.dst.rows, rank, counts)
        assert got.shape == wanted.shape, f"rank {rank}: {edge}"
        # What the edge left unsummed is settled here, so that the whole can be seen.
        if edge.dst.owes:
            got = transport.all_reduce(got.contiguous(), mesh.peers(edge.dst.owes, rank))
        if got.numel():
            error = (got.double() - wanted).abs().max()
            assert error <= TOLERANCE[dtype] * 1000, f"rank {rank}: {edge}: {error:.1e}"
    return edges
