"""Plans over several hosts: executed on `reference` against plain sums, priced by what crosses hosts, quickly found."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import EVERY, SUMS, held, run_world

from comm.oracle import check_edges
from planner.executed import WIDTH, execute, whole_result
from planner.meshes import layouts
from weft.planner.chain import Chain, Read
from weft.planner.cost import INFINIBAND, PRESETS, AlphaBeta, Network, Offer
from weft.planner.plan import Plan, Planner
from weft.planner.spec import LayoutError, Mesh, Placement, Rows

EIGHT = [replace(m, hosts=hosts) for m in layouts(8) if m.world == 8 for hosts in (2, 4)]
BY_DAY = EIGHT[::3]  # both numbers of hosts are among them
H200 = replace(PRESETS["h200-nvlink"], alpha_us=7.0, gb_s=368.0)


def layers(mesh: Mesh, count: int, width: int = WIDTH, element_bytes: int = 8) -> Chain:
    """A split embedding, then layers of attention and experts, as models trace them."""
    group, world = mesh.placement(Rows.GROUP), mesh.placement(Rows.WORLD)
    attention, experts = mesh.placement(Rows.GROUP, owes="attn_tp"), mesh.placement(Rows.WORLD, owes="world")
    reads = [Read("embed", group, (attention,)), Read("moe", world, (attention,))]
    for i in range(1, count):
        reads += [Read(f"layers.{i}.attention", group, (experts,)), Read(f"layers.{i}.moe", world, (attention,))]
    return Chain((*reads, Read("norm", group, (experts,))), width, element_bytes)


def offers(inside: AlphaBeta = H200) -> list[Offer]:
    """One transport inside hosts, one that goes anywhere."""
    basic = frozenset(("all_reduce", "all_gatherv", "reduce_scatterv"))
    return [
        Offer("peer", EVERY, EVERY & SUMS, inside, max_hosts=1),
        Offer("nccl", basic, frozenset(), replace(inside, alpha_us=15.0)),
    ]


def kinds(plan: Plan) -> list[str]:
    return [f"{edge.kind} {edge.group}" for _, _, edge in plan.moves()]


@pytest.mark.parametrize(
    "mesh", [pytest.param(m, marks=[] if m in BY_DAY else pytest.mark.nightly) for m in EIGHT], ids=str
)
def test_every_step_over_hosts_gives_plain_sums(mesh: Mesh) -> None:
    """Each edge, with ragged rows and an empty group; and plans that different networks make cheapest."""
    counts = tuple((5 * g + 3) % 7 if g != 1 else 0 for g in range(mesh.attn_dp))
    assert all(run_world(8, lambda t: check_edges(t, mesh, counts, torch.float64)))
    seen = set()
    for network in (INFINIBAND, Network(1e-3, 0.0, 1e-3), Network(500.0, 100.0, 100.0)):
        slow = replace(H200, alpha_us=1e-3, hop_us=0.0, gb_s=1e-2, network=network)
        for inside in (replace(H200, network=network), slow):
            plan = Planner(mesh, layers(mesh, 2), offers(inside)).plan(counts)
            if (known := (tuple(kinds(plan)), *(step.op for read in plan.reads for step in read.steps))) in seen:
                continue
            seen.add(known)
            assert all(step.transport != "peer" or mesh.hosts_of(edge.group) == 1 for _, step, edge in plan.moves())
            ours = run_world(8, lambda t, p=plan: execute(dict.fromkeys(("peer", "nccl"), t), p, counts, 1))
            for rank, found in enumerate(ours):
                for read, value, whole in zip(plan.reads, found, whole_result(plan, counts, 1), strict=True):
                    wanted = held(whole, mesh, read.read.target.rows, rank, counts)
                    assert torch.allclose(value, wanted, rtol=1e-12, atol=1e-12), f"rank {rank}: {read}"


def test_ranks_lie_on_hosts_so_that_rows_stay_in_order() -> None:
    """DP groups go to hosts in turn: a gather across hosts, then one inside them, gives rank order without a copy."""
    mesh = Mesh(16, 1, 16, 1, hosts=2)
    assert [mesh.host_of(rank) for rank in range(4)] == [0, 1, 0, 1]
    assert mesh.peers("rail", 5) == (4, 5) and mesh.peers("host", 1) == tuple(range(1, 16, 2))
    wide = Mesh(1, 16, 2, 8, hosts=2)  # a DP group over both hosts: neighbours share one
    assert wide.peers("host", 3) == tuple(range(8)) == wide.peers("moe_tp", 3)
    assert wide.peers("rail", 3) == (3, 11)
    assert Mesh(4, 2, 2, 4, hosts=2).peers("host", 0) == (0, 1, 2, 3), "runs of the longer of attn_tp and moe_tp"
    with pytest.raises(LayoutError, match="hosts=3 does not divide the 8 ranks; nearest that do: 2 and 4"):
        Mesh(4, 2, 4, 2, hosts=3)


def test_a_gather_goes_across_hosts_first_and_inside_then() -> None:
    mesh = Mesh(16, 1, 16, 1, hosts=2)
    plan = Planner(mesh, layers(mesh, 3, 7168, 2), offers()).plan((1,) * 16)
    gather, scatter = ["all_gatherv rail", "all_gatherv host"], ["reduce_scatterv host", "reduce_scatterv rail"]
    assert kinds(plan) == [*gather, *(scatter + gather) * 2, *scatter]
    assert all((step.transport == "peer") == (edge.group == "host") for _, step, edge in plan.moves())


def test_a_sum_over_a_tensor_parallel_group_of_two_hosts_crosses_once() -> None:
    mesh = Mesh(1, 16, 1, 16, hosts=2)
    for tokens in (1, 64):
        plan = Planner(mesh, layers(mesh, 2, 7168, 2), offers()).plan((tokens,))
        flat = Planner(mesh, layers(mesh, 2, 7168, 2), offers()[1:])
        flat_us = sum(step.us for read in flat.naive((tokens,)).reads for step in read.steps)
        crossing = [edge for _, _, edge in plan.moves() if mesh.hosts_of(edge.group) > 1]
        assert {edge.group for edge in crossing} == {"rail"} and plan.us < flat_us


def test_what_no_transport_carries_over_hosts_is_refused() -> None:
    mesh = Mesh(4, 1, 4, 1, hosts=2)
    with pytest.raises(LayoutError, match="peer"):
        Planner(mesh, layers(mesh, 2), offers()[:1]).plan((4,) * 4)


def test_cuts_that_do_not_divide_keep_their_named_groups() -> None:
    mesh = Mesh(3, 2, 2, 3, hosts=2)  # runs of 3 ranks are no axis of groups of 2
    assert mesh.axes("rail") is None and set(mesh.communicating) == {"world", "attn_tp", "attn_dp", "moe_tp", "ep"}
    assert mesh.hosts_of("attn_tp") == 2 and mesh.hosts_of("moe_tp") == 1
    counts = (3, 0, 2)
    assert all(run_world(6, lambda t: check_edges(t, mesh, counts, torch.float64)))


def test_a_debt_over_no_axes_is_settled_whole() -> None:
    mesh = Mesh(3, 2, 2, 3)
    owing = mesh.placement(Rows.WORLD, owes="ep")
    assert owing == Placement(Rows.WORLD, "ep")
    plan = Planner(mesh, Chain((Read("a", mesh.placement(Rows.WORLD), (owing,)),), WIDTH, 8), offers()).plan((4,) * 3)
    assert kinds(plan) == ["all_reduce ep"]


MANY = [Mesh(1024, 1, 1024, 1), Mesh(512, 8, 4096, 1), Mesh(512, 8, 512, 8, hosts=512)]


@pytest.mark.parametrize("mesh", MANY, ids=str)
def test_plans_of_many_ranks_ask_no_rank_one_by_one(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs follow from the sizes of groups: rows are counted for few ranks, however many there are."""
    counted, true = [0], Mesh.row_count

    def counts(self: Mesh, rows: Rows, rank: int, counts: tuple[int, ...]) -> int:
        counted[0] += 1
        return true(self, rows, rank, counts)

    monkeypatch.setattr(Mesh, "row_count", counts)
    planner = Planner(mesh, layers(mesh, 4, 7168, 2), offers())
    planner.plan((16,) * mesh.attn_dp)
    planner.naive((16,) * mesh.attn_dp)
    assert 0 < counted[0] < mesh.world / 2
