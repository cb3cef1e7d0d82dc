"""Rows laid out by rank, their lists where they arrive, and the sum of what comes back, against the definition."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support import run_world
from torch import Tensor

from comm.test_dispatch import CASES, WIDTH, matrices, rows_of
from comm.test_dispatch import EXPERTS as EIGHT
from comm.test_dispatch import check as compare
from gpu import definitions
from weft.comm.reference import ReferenceTransport
from weft.comm.transport import LiveSizes, Sizes, to_and_from
from weft.engine.models.layers.basic import Builder
from weft.engine.models.layers.moe import Experts, MoEConfig
from weft.engine.models.layers.routing import Routing
from weft.engine.models.weights.float8_weights import Float8Format
from weft.kernels import stream_ops
from weft.kernels.triton import moe_permute as kernels
from weft.planner.exchange import all_to_allv
from weft.planner.shards import owner
from weft.planner.spec import Mesh
from weft.stream.dispatch import Exchanging, on_device

EXPERTS, K = 8, 3


def chosen(rows: int, live: int, skewed: bool) -> Tensor:
    """Experts of rows; those behind the live ones have none."""
    expert = torch.stack([torch.randperm(EXPERTS)[:K] for _ in range(rows)]) if rows else torch.empty(0, K)
    if skewed:
        expert[:] = torch.tensor([5, 4, 5])
    expert[live:] = -1
    return expert.int()


@pytest.mark.parametrize(
    "span, width, dtype, sizes, skewed",
    [
        pytest.param(1, 20, torch.bfloat16, [(3, 3), (7, 2), (0, 0), (20, 17)], False, id="ragged"),
        pytest.param(2, 16, torch.float32, [(5, 0), (4, 4), (1, 1), (2, 2)], False, id="shared experts"),
        pytest.param(1, 1100, torch.float32, [(4, 4), (3, 3)], True, id="all to one"),
        pytest.param(1, 8, torch.float16, [(2, 0), (1, 0)], False, id="none live"),
        pytest.param(1, 20, torch.bfloat16, [(3, 3), (7, 2), (9, 8)], False, id="uneven shares"),
        pytest.param(2, 16, torch.float32, [(5, 5), (4, 4), (1, 1), (2, 2), (3, 3), (6, 4)], False, id="shared uneven"),
    ],
)
def test_rows_go_and_come_back(
    span: int, width: int, dtype: torch.dtype, sizes: list[tuple[int, int]], skewed: bool, device: torch.device
) -> None:
    """Every rank's part, with the exchanges between them done here. What is not to be read is NaN."""
    torch.manual_seed(3)
    ranks = len(sizes)
    parts, listed = ranks // span, 8 * K // dtype.itemsize
    space = sum(rows for rows, _ in sizes)
    nan = {"fill_value": torch.nan, "dtype": dtype, "device": device}
    given, packs = [], []
    for rows, live in sizes:
        x, weight, expert = torch.randn(rows, width).to(dtype), torch.rand(rows, K), chosen(rows, live, skewed)
        x[live:] = torch.nan
        x, weight, expert = x.to(device), weight.to(device), expert.to(device)
        place, counts = kernels.places(expert, ranks, EXPERTS, span)
        packed = torch.full((ranks * rows, width + listed), **nan)
        kernels.pack(x, weight, expert, place, counts, packed)
        given.append((x, weight, expert, place, counts))
        packs.append(packed)
    sent = torch.stack([counts for *_, counts in given]).cpu()  # by source, by reader
    goes = [
        torch.stack([((owner(e.cpu(), EXPERTS, parts) == r // span) & (e.cpu() >= 0)).any(1) for r in range(ranks)], 1)
        for _, _, e, *_ in given
    ]
    assert torch.equal(sent, torch.stack([g.sum(0) for g in goes]).int())
    back = [torch.full((ranks * rows, width), **nan) for rows, _ in sizes]
    for reader in range(ranks):
        came = torch.full((space, width + listed), **nan)
        at = 0
        for source, packed in enumerate(packs):
            begin, count = int(sent[source, :reader].sum()), int(sent[source, reader])
            came[at : at + count] = packed[begin : begin + count]
            at += count
        weight, expert = kernels.lists(came, width, K, sent[:, reader].contiguous().to(device))
        rows = [given[s][0][goes[s][:, reader].to(device)] for s in range(ranks)]
        wanted = [[torch.cat([given[s][i][goes[s][:, reader].to(device)] for s in range(ranks)])] for i in (1, 2)]
        assert torch.equal(came[:at, :width], torch.cat(rows))
        assert torch.equal(weight[:at], wanted[0][0]) and torch.equal(expert[:at], wanted[1][0])
        assert (expert[at:] == -1).all() and (weight[at:] == 0).all()
        made = came[:, :width].float() * (reader + 1)
        at = 0
        for source in range(ranks):
            begin, count = int(sent[source, :reader].sum()), int(sent[source, reader])
            back[source][begin : begin + count] = made[at : at + count].to(dtype)
            at += count
    for (x, _, _, place, counts), source, g in zip(given, back, goes, strict=True):
        out = kernels.add(source, place, counts)
        terms = [(x.float() * (r + 1)).to(dtype).float() * g[:, r : r + 1].to(device) for r in range(ranks)]
        total = torch.zeros(len(x), width, device=device)
        for term, there in zip(terms, g.t(), strict=True):
            total = torch.where(there[:, None].to(device), total + term, total)
        # The interpreter cuts bfloat16 off where a GPU rounds it.
        torch.testing.assert_close(out, total.to(dtype), rtol=1 / 128 if dtype == torch.bfloat16 else 0, atol=0)


def test_places_of_more_rows_than_a_block(device: torch.device) -> None:
    torch.manual_seed(5)
    expert = chosen(600, 590, False)
    place, counts = kernels.places(expert.to(device), 4, EXPERTS, 1)
    goes = torch.stack([(expert // 2 == rank).any(1) & (expert >= 0).any(1) for rank in range(4)], 1)
    assert torch.equal(place.cpu(), (goes.cumsum(0) - 1).where(goes, -1).int())
    assert torch.equal(counts.cpu(), goes.sum(0).int())


@pytest.mark.parametrize(
    "mesh, case",
    [(Mesh(4, 1, 4, 1), "ragged"), (Mesh(2, 2, 2, 2), "all to one expert"), (Mesh(4, 1, 4, 1), "none")],
    ids=str,
)
def test_ranks_dispatch_as_on_cpus(
    mesh: Mesh, case: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts are on the device, with room for every row; each rank's rows behind its live ones are NaN."""
    interpreter = threading.Lock()  # Triton's takes one thread at a time
    for name in ("places", "pack", "lists", "add"):
        monkeypatch.setattr(kernels, name, _one_at_a_time(getattr(kernels, name), interpreter))
    space = tuple(CASES[case](rank) + rank % 2 for rank in range(mesh.world))
    world, n = tuple(range(mesh.world)), mesh.world
    permute = all_to_allv(n)

    def rank_main(transport: ReferenceTransport) -> list[Tensor]:
        rank, held = transport.rank, EIGHT // mesh.ep
        mine = range(rank // mesh.moe_tp * held, (rank // mesh.moe_tp + 1) * held)
        x, weight, expert = (t.to(device) for t in rows_of(case, rank, torch.float32))
        padding = space[rank] - len(x)
        x = torch.cat((x, x.new_full((padding, WIDTH), torch.nan)))
        weight = torch.cat((weight, weight.new_full((padding, K), torch.nan)))
        expert = torch.cat((expert.int(), expert.new_full((padding, K), -1).int()))
        arrived = []

        def carry(name: str, x: Tensor, sizes: Sizes | LiveSizes) -> Tensor:
            if not isinstance(sizes, LiveSizes):
                return transport.exchange(x, permute, world, sizes)
            assert len(x) == sum(sizes.capacity[rank * n : (rank + 1) * n])
            live = sizes.live.tolist()
            out = transport.exchange(x[: sum(live[:n])], permute, world, to_and_from(live[:n], live[n:], rank))
            return torch.cat((out, out.new_full((sum(sizes.capacity[rank::n]) - len(out), out.shape[1]), torch.nan)))

        def work(rows: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
            out = torch.full_like(rows, torch.nan)
            for i, (row, ws, es) in enumerate(zip(rows.cpu(), weights.cpu(), experts.tolist(), strict=True)):
                terms = [w * (row.double() @ matrices()[e]) for w, e in zip(ws.double(), es, strict=True) if e in mine]
                if terms:
                    out[i] = sum(terms) / mesh.moe_tp
            arrived.append(rows[(experts >= 0).any(1)].cpu())
            return out

        dispatcher = partial(on_device, Exchanging(mesh, rank, space, carry, transport.empty))
        found = [dispatcher(x, weight, expert, EIGHT, work).cpu()[: space[rank] - padding] for _ in range(2)]
        return [*found, arrived[0]]

    compare(run_world(n, rank_main), mesh, case)


def _one_at_a_time(call: Callable[..., Any], lock: threading.Lock) -> Callable[..., Any]:
    def locked(*args: Any) -> Any:
        with lock:
            return call(*args)

    return locked


def test_experts_in_float8_take_rows_as_they_arrive(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the lists of their experts, which are no part of a row; of what lies behind the live ones all is NaN."""
    torch.manual_seed(7)
    rows, live, width = 40, 33, 128
    builder = Builder(Mesh(4, 1, 4, 1), 1, torch.float32, device, format_of=lambda name: Float8Format((128, 128)))
    layer = Experts(builder, "experts", width, MoEConfig(EXPERTS, 128, Routing(K)))
    for name in ("gate_up", "down"):
        weight, scales = layer.get_parameter(name).data, layer.get_parameter(f"{name}_scales").data
        weight.copy_((torch.randn(weight.shape) * 60).to(weight.dtype))
        scales.copy_(torch.rand(scales.shape) / 300 + 1e-3)
    came = torch.full((rows, width + 2 * K), torch.nan, device=device)
    came[:live, :width] = torch.randn(live, width, device=device)
    expert, weight = chosen(rows, live, False).to(device), torch.rand(rows, K, device=device)
    monkeypatch.setattr(stream_ops, "on_gpu", lambda x: True)
    out = layer._sum_of_chosen(came[:, :width], weight, expert)
    held = EXPERTS // 4
    local = (expert - held).where((expert >= held) & (expert < 2 * held), -1)
    given = (layer.declared("gate_up"), layer.declared("down"))
    wanted = definitions.experts(came[:live, :width].double(), weight[:live], local[:live], *given)
    some = (local[:live] >= 0).any(1)
    assert 8 < some.sum() < live and (out[:live][~some] == 0).all()
    error = (out[:live] - wanted)[some].norm(dim=1) / wanted[some].norm(dim=1)
    assert error.square().mean().sqrt() <= 6e-3  # where a sum in another order turns the rounding between two products
