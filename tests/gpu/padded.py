"""A stream walked with capacity's tensors and live counts in device memory, against the reference on the live rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from support import run_world
from torch import Tensor

from weft.comm.peer import PeerTransport
from weft.comm.transport import Transport, offer_of
from weft.kernels import float8
from weft.planner.chain import Chain, Read
from weft.planner.cost import AlphaBeta
from weft.planner.plan import Plan, Planner
from weft.planner.row_formats import Wire
from weft.planner.spec import Mesh, Placement, Rows
from weft.stream.formats import Float8
from weft.stream.hidden import Hidden
from weft.stream.step_rows import PaddedRows, StepRows
from weft.stream.stream import Stream

WIDTH, GROUP, CAPACITY = 40, 16, 5
COUNTS = {2: [(5, 5), (3, 0), (0, 0), (0, 4), (1, 5), (2, 2)], 1: [(5,), (1,), (0,), (4,), (3,)]}
FEW_CALLS = AlphaBeta("few calls", alpha_us=100, hop_us=0, gb_s=1e4, launch_us=5, mem_gb_s=1e3)
FEW_BYTES = AlphaBeta("few bytes", alpha_us=0.1, hop_us=0, gb_s=1e-4, launch_us=0.1, mem_gb_s=1e3)
Step = Callable[[], None]


@dataclass(frozen=True)
class Norm:
    path: str
    weight: Tensor
    eps: float = 1e-6

    def __call__(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


WIRE = Wire(Float8(GROUP), extra=4 * GROUP)
"""Rows in FP8, with their first columns unquantised next to them."""


def chain_of(mesh: Mesh, plain: bool) -> Chain:
    """Attention and experts in turn: what a mixture of experts reads and adds, and a read of every kind of rows.

    plain: rows are read as they are, and in FP8 too; else in FP8 alone.
    """
    group, own = mesh.placement(Rows.GROUP), mesh.placement(Rows.OWN)
    world = mesh.placement(Rows.WORLD)
    by_attention, by_experts = mesh.placement(Rows.GROUP, "attn_tp"), mesh.placement(Rows.WORLD, "world")
    reads: list[tuple[Placement, tuple[Placement, ...]]] = [(group, (group,))]
    for target in (group, own, world):
        reads += [(world, (by_attention,)), (target, (by_experts,))]
    norms = (Read(f"{i}.norm", target, deltas, wire=WIRE, plain=plain) for i, (target, deltas) in enumerate(reads))
    return Chain(tuple(norms), WIDTH, 4)


def sampled(mesh: Mesh, plan: Plan, counts: tuple[int, ...], seed: int) -> list[Tensor]:
    """Return the delta of each read: each rank's term on WORLD rows, small whole numbers, so that sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    shape = (mesh.world, sum(counts), WIDTH)
    return [torch.randint(-4, 5, shape, generator=generator).float() for _ in plan.reads]


def term(mesh: Mesh, rank: int, placement: Placement, whole: Tensor, counts: tuple[int, ...]) -> Tensor:
    """A rank's rows of a delta; complete ones are the same on every rank."""
    start, stop = mesh.row_range(placement.rows, rank, counts)
    return whole[rank if placement.owes else 0, start:stop]


Got = tuple[Tensor, Tensor, Tensor]
"""Result of a read: its rows, and the FP8 rows as bytes with their scales."""


def walk(stream: Stream, plan: Plan, deltas: list[Tensor], norms: list[Norm]) -> list[Got]:
    out = []
    for read_plan, delta, norm in zip(plan.reads, deltas, norms, strict=True):
        [placement] = read_plan.read.deltas
        stream.add(Hidden(delta, placement, plan.mesh, norm.path))
        x = stream.read(norm, read_plan.read.target.rows, extra)
        assert x.in_format is not None
        made = x.in_format(Float8(GROUP))
        rows = x.value
        if x.extra is not None:
            rows = torch.cat((x.extra.view(torch.float32), float8.dequantise(made)[:, GROUP:]), dim=1)
        out.append((rows, made.values.view(torch.uint8), made.scales))
    stream.finish()
    return out


def extra(x: Hidden) -> Tensor:
    """The first columns."""
    return x.require_complete("extra")[:, :GROUP].contiguous().view(torch.int32)


def norms_of(plan: Plan, device: torch.device) -> list[Norm]:
    generator = torch.Generator().manual_seed(5)
    return [Norm(r.read.site, torch.rand(WIDTH, generator=generator).to(device) + 0.5) for r in plan.reads]


def plans_of(transport: Transport, mesh: Mesh) -> list[tuple[Planner, Plan]]:
    """Return plans by two prices, with epilogues and without: between them every exchange of the mesh is walked. If
    bytes cost much, rows that are read in FP8 alone travel in it.
    """
    found = []
    for cost, plain in ((FEW_CALLS, True), (FEW_BYTES, True), (FEW_BYTES, False)):
        offer = replace(offer_of(transport.entry, mesh, cost), max_bytes=None)
        for offered in (offer, replace(offer, epilogues=frozenset())):
            planner = Planner(mesh, chain_of(mesh, plain), [offered])
            found.append((planner, planner.plan((CAPACITY,) * mesh.attn_dp)))
    assert mesh.world == 1 or any(edge.src.wire for _, _, edge in found[-1][1].moves())
    return found


@cache
def wanted(mesh: Mesh, plan: Plan, counts: tuple[int, ...], seed: int) -> list[list[Got]]:
    """Return the rows that each rank must read, by the reference transport on the live rows alone."""

    def main(reference: Transport) -> list[Got]:
        whole = sampled(mesh, plan, counts, seed)
        deltas = [
            term(mesh, reference.rank, r.read.deltas[0], w, counts) for r, w in zip(plan.reads, whole, strict=True)
        ]
        transports = {step.transport: reference for _, step, _ in plan.moves()} or {"reference": reference}
        stream = Stream(plan, transports, StepRows(mesh, reference.rank, counts))
        return walk(stream, plan, deltas, norms_of(plan, torch.device("cpu")))

    return run_world(mesh.world, main)


def walk_into(
    outs: list[Got], transport: Transport, plan: Plan, rows: StepRows, deltas: list[Tensor], norms: list[Norm]
) -> None:
    results = walk(Stream(plan, {transport.entry.name: transport}, rows), plan, deltas, norms)
    for out, result in zip(outs, results, strict=True):
        for to, made in zip(out, result, strict=True):
            to.copy_(made)


def got_by(rows: int, device: torch.device) -> Got:
    """Return empty tensors for the rows of a read."""
    x = torch.empty(rows, WIDTH, device=device)
    values, scales, _ = float8.unfilled(x, GROUP)
    return x, values.view(torch.uint8), scales


def check_padded(
    transport: PeerTransport, mesh: Mesh, device: torch.device, again: Callable[[PeerTransport, Step], Step]
) -> None:
    """Each plan, made once with capacity's tensors, then made again with other live counts and contents.

    again: what makes the calls of a step again, such as a graph of them, replayed. Padding is NaN before every turn.
    Rows in FP8 equal, bit by bit, their definition's result for the rows that were read next to them.
    """
    rank = transport.rank
    seen = set()
    for number, (_, plan) in enumerate(plans_of(transport, mesh)):
        seen |= {edge.kind for _, _, edge in plan.moves()}
        rows = PaddedRows(mesh, rank, CAPACITY, device)
        given = [torch.empty(rows.capacity_of(r.read.deltas[0].rows), WIDTH, device=device) for r in plan.reads]
        outs = [got_by(rows.capacity_of(r.read.target.rows), device) for r in plan.reads]
        norms = norms_of(plan, device)
        rows.fill((CAPACITY,) * mesh.attn_dp)

        for tensor in given:
            tensor.zero_()
        repeat = again(transport, partial(walk_into, outs, transport, plan, rows, given, norms))
        for index, counts in enumerate(COUNTS[mesh.attn_dp]):
            seed = 100 * number + index
            for tensor, r, whole in zip(given, plan.reads, sampled(mesh, plan, counts, seed), strict=True):
                tensor.fill_(float("nan"))
                mine = term(mesh, rank, r.read.deltas[0], whole, counts)
                tensor[: len(mine)].copy_(mine)
            for out in outs:
                for to in out:
                    to.fill_(255)
            rows.fill(counts)
            repeat()
            if device.type == "cuda":
                torch.cuda.synchronize()
            transport.check()
            expected = wanted(mesh, plan, counts, seed)[rank]
            for read, out, right in zip(plan.reads, outs, expected, strict=True):
                got, values, scales = (part[: len(right[0])].cpu() for part in out)
                what = (rank, read.read.site, counts, plan)
                travelled = any(step.op == "unpack" for step in read.steps)
                exact, groups = (GROUP, 1) if travelled else (WIDTH, len(scales[0]) if len(scales) else 0)
                assert torch.allclose(got[:, :exact], right[0][:, :exact], rtol=1e-5, atol=1e-6), what
                assert torch.allclose(got, right[0], rtol=0.15, atol=1e-3), what  # half of FP8's last bit, twice
                eight = float8.quantise(got[:, :exact], GROUP)
                assert torch.equal(values[:, :exact], eight.values.view(torch.uint8)), what
                assert torch.equal(scales[:, :groups], eight.scales[:, :groups]), what
    if mesh.attn_dp > 1 and mesh.attn_tp > 1:
        assert seen >= {"all_reduce+all_gatherv", "reduce_scatterv+all_reduce", "all_gatherv"}, seen
