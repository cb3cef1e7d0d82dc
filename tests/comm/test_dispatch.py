"""Dispatch and combine against their definition: rows to the ranks of their experts, once each, and their sums back."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from support import run_world
from torch import Tensor

from comm.processes import run_processes, run_threads
from weft.comm.transport import Sizes, Transport
from weft.planner import exchange
from weft.planner.experts import RETURN, SEND, Dispatch, Permute
from weft.planner.spec import Mesh
from weft.stream.dispatch import Exchanging, all_to_allv

WIDTH, EXPERTS, K = 6, 8, 3
MESHES = [Mesh(4, 1, 4, 1), Mesh(2, 2, 2, 2), Mesh(1, 4, 1, 4), Mesh(1, 2, 2, 1), Mesh(8, 1, 8, 1)]
CASES = {
    "equal": lambda rank: 4,
    "ragged": lambda rank: (5, 0, 1, 17)[rank % 4],
    "one row": lambda rank: int(rank == 1),
    "none": lambda rank: 0,
    "all to one expert": lambda rank: 3 + rank,
}


def rows_of(case: str, rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """A rank's rows, and the weights and experts of each: chosen with a skew, a row's experts all different."""
    draw = torch.Generator().manual_seed(1000 * list(CASES).index(case) + rank)
    rows = CASES[case](rank)
    x = torch.randn(rows, WIDTH, generator=draw).to(dtype)
    x[:, 0] *= 100
    liking = torch.rand(rows, EXPERTS, generator=draw) / torch.arange(1, EXPERTS + 1)
    expert = liking.topk(K, dim=1).indices
    if case == "all to one expert":
        expert = torch.tensor([5, 4, 5]).expand(rows, K)  # that a row's experts differ is not relied on
    return x, torch.rand(rows, K, generator=draw).to(dtype), expert


def matrices() -> Tensor:
    return torch.randn(EXPERTS, WIDTH, WIDTH, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def dispatch(transport: Transport, mesh: Mesh, case: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return the rows that come back, twice, then the arrived rows. Tensors to send are poisoned before filling."""
    rank, world, held = transport.rank, tuple(range(mesh.world)), EXPERTS // mesh.ep
    parts = Dispatch.on(mesh, EXPERTS, K, WIDTH * dtype.itemsize).parts(mesh.world, 1)
    rows_sent = {part.what: part.sent_row_bytes for part, _ in parts if isinstance(part, Permute)}
    mine = range(rank // mesh.moe_tp * held, (rank // mesh.moe_tp + 1) * held)
    x, weight, expert = rows_of(case, rank, dtype)
    arrived = []

    def carry(name: str, x: Tensor, sizes: Sizes) -> Tensor:
        if name == SEND:
            assert x.shape[1] * x.element_size() == rows_sent[name]
        return transport.exchange(x, exchange.all_to_allv(mesh.world), world, sizes)

    def empty(name: str, *shape: int, like: Tensor) -> Tensor:
        assert name in (SEND, RETURN)
        return transport.empty(*shape, like=like).fill_(torch.nan)

    def work(rows: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        arrived.append(rows.clone())
        out = empty(RETURN, *rows.shape, like=rows)
        for i, (row, ws, es) in enumerate(zip(rows, weights, experts, strict=True)):
            chosen = zip(ws.double(), es.tolist(), strict=True)
            terms = [w * (row.double() @ matrices()[e]) for w, e in chosen if e in mine]
            assert terms, "a row came that has no expert here"
            out[i] = sum(terms) / mesh.moe_tp
        return out

    dispatcher = partial(all_to_allv, Exchanging(mesh, rank, (), carry, empty))
    return [*(dispatcher(x, weight, expert, EXPERTS, work) for _ in range(2)), arrived[0]]


def check(results: list[list[Tensor]], mesh: Mesh, case: str, dtype: torch.dtype = torch.float32) -> None:
    given = [rows_of(case, rank, dtype) for rank in range(mesh.world)]
    for rank, (once, again, arrived) in enumerate(results):
        x, weight, expert = given[rank]
        products = torch.einsum("tw,tkwv->tkv", x.double(), matrices()[expert])
        wanted = (weight.double()[..., None] * products).sum(1)
        exact = 1e-6 if dtype == torch.float32 else 0.02  # each rank's part is rounded, then the sum
        size = (weight.double()[..., None] * products).abs().sum(1)
        assert ((once.double() - wanted).abs() <= exact * size).all() and once.dtype == dtype
        assert torch.equal(once, again)
        held = EXPERTS // mesh.ep
        here = [x[(e // held == rank // mesh.moe_tp).any(1)] for x, _, e in given]
        assert torch.equal(arrived, torch.cat(here)), "each row once, in the order of ranks and rows"


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_every_row_gets_the_sum_of_its_experts(mesh: Mesh, case: str) -> None:
    check(run_world(mesh.world, lambda t: dispatch(t, mesh, case)), mesh, case)


@pytest.mark.parametrize("case", ["ragged", "all to one expert"])
def test_low_precision(case: str) -> None:
    mesh, dtype = Mesh(2, 2, 2, 2), torch.bfloat16
    check(run_world(mesh.world, lambda t: dispatch(t, mesh, case, dtype)), mesh, case, dtype)


@pytest.mark.parametrize("case", ["ragged", "one row"])
def test_shared_memory(case: str, tmp_path: Path) -> None:
    check(run_threads(MESHES[0], tmp_path, dispatch, case), MESHES[0], case)


def test_gloo(tmp_path: Path) -> None:
    mesh = Mesh(1, 2, 2, 1)
    check(run_processes("gloo", mesh, tmp_path, dispatch, "ragged"), mesh, "ragged")


def test_parts_are_added_in_float32() -> None:
    """256 and seven times 1, each from another rank: one by one in bfloat16 they would stay 256."""
    mesh = Mesh(8, 1, 8, 1)

    def rank_main(transport: Transport) -> Tensor:
        world = tuple(range(8))

        def work(rows: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
            return torch.full_like(rows, 256.0 if transport.rank == 0 else 1.0)

        def carry(name: str, x: Tensor, sizes: Sizes) -> Tensor:
            return transport.exchange(x, exchange.all_to_allv(8), world, sizes)

        by = Exchanging(mesh, transport.rank, (), carry, lambda name, *shape, like: transport.empty(*shape, like=like))
        x = torch.ones(1, 1, dtype=torch.bfloat16)
        return all_to_allv(by, x, torch.ones(1, 8), torch.arange(8)[None], 8, work)

    assert [out.item() for out in run_world(8, rank_main)] == [264.0] * 8  # 263, rounded to what bfloat16 has
