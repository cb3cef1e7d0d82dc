"""Properties of every plan: legal, never dearer than the naive plan, and equal to it in what it computes."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import BASIC, EVERY, SUMS, held, run_world

from planner.executed import WIDTH, execute, whole_result
from planner.meshes import layouts
from weft.planner.axes import GROUP_NAMES
from weft.planner.chain import Chain, Read
from weft.planner.cost import PRESETS, AlphaBeta, Offer
from weft.planner.edges import legal_edges, rows_received
from weft.planner.op import NORMED, RESIDUAL
from weft.planner.plan import Plan, Planner
from weft.planner.spec import NAMED_ROWS, LayoutError, Mesh, Placement, PlacementError, Rows

meshes = st.sampled_from(layouts(8))
costs = st.one_of(
    st.sampled_from(list(PRESETS.values())),
    st.builds(
        AlphaBeta,
        name=st.just("sampled"),
        alpha_us=st.floats(0.1, 300),
        hop_us=st.floats(0, 50),
        gb_s=st.floats(0.01, 1000),
        launch_us=st.floats(0, 50),
        mem_gb_s=st.floats(0.1, 5000),
    ),
)


@st.composite
def offers(draw: st.DrawFn) -> list[Offer]:
    """One transport or two, each with all edges or the basic ones, with epilogues or without."""
    kinds = st.sampled_from([EVERY, BASIC])
    made = []
    for name in draw(st.sampled_from([["one"], ["one", "two"]])):
        offered = draw(kinds)
        epilogues = draw(st.sampled_from([frozenset(), offered & SUMS]))
        made.append(Offer(name, offered, epilogues, draw(costs)))
    return made


@st.composite
def problems(draw: st.DrawFn) -> tuple[Mesh, Chain]:
    """A mesh and a chain of 1–4 reads whose deltas have any legal placements."""
    mesh = draw(meshes)
    legal = []
    for rows, owes in itertools.product(NAMED_ROWS, (None, *GROUP_NAMES)):
        try:
            legal.append(mesh.placement(rows, owes))
        except PlacementError:
            continue
    complete = [p for p in legal if p.owes is None]
    reads = []
    for i in range(draw(st.integers(1, 4))):
        deltas = draw(st.lists(st.sampled_from(legal), min_size=int(i == 0), max_size=2, unique=True))
        if i == 0:  # a stream begins with the embedding
            deltas = [draw(st.sampled_from(complete)), *(d for d in deltas if d.owes)]
        reads.append(Read(f"layers.{i}.norm", draw(st.sampled_from(complete)), tuple(deltas)))
    return mesh, Chain(tuple(reads), WIDTH, 8)


def check_legal(plan: Plan, offered: list[Offer]) -> None:
    """Replay the plan's placements, knowing only the rules."""
    mesh, residual = plan.mesh, None
    kinds = {o.transport: o.kinds for o in offered}
    epilogues = {o.transport: o.epilogues for o in offered}
    for read_plan in plan.reads:
        pending, normed = list(read_plan.read.deltas), None
        for step in read_plan.steps:
            if step.op == "move":
                assert step.edge in legal_edges(mesh)[step.edge.src]
                assert not step.edge.moves or step.edge.kind in kinds[step.transport]
                if step.operand == RESIDUAL:
                    assert residual == step.edge.src
                    residual = step.edge.dst
                elif step.operand == NORMED:
                    assert normed == step.edge.src
                    normed = step.edge.dst
                else:
                    assert pending[step.operand] == step.edge.src
                    pending[step.operand] = step.edge.dst
            elif step.op == "merge":
                assert pending[step.into] == pending.pop(step.operand)
            elif step.op == "absorb":
                delta = pending.pop(step.operand)
                assert delta.owes is None and residual in (None, delta)
                residual = delta
            elif step.op == "finish":
                assert step.edge in legal_edges(mesh)[step.edge.src] and step.edge.kind in epilogues[step.transport]
                assert pending == [step.edge.src] and residual == step.edge.dst and residual.owes is None
                pending, normed = [], residual
            else:
                assert not pending and residual is not None and residual.owes is None
                normed = residual
        assert normed == read_plan.read.target and residual == mesh.placement(read_plan.residual)


@given(problems(), offers(), st.integers(0, 10_000))
@settings(max_examples=150, deadline=None)
def test_plans_are_legal_and_never_dearer_than_naive(problem, offered, tokens) -> None:
    mesh, chain = problem
    planner = Planner(mesh, chain, offered)
    plan, naive = planner.plan((tokens,) * mesh.attn_dp), planner.naive((tokens,) * mesh.attn_dp)
    check_legal(plan, offered)
    check_legal(naive, offered)
    assert plan.us == pytest.approx(sum(s.us for r in plan.reads for s in r.steps))
    assert plan.us <= naive.us * (1 + 1e-9)


@given(problems(), offers(), st.integers(1, 10_000))
@settings(max_examples=150, deadline=None)
def test_no_two_collectives_that_one_edge_does(problem, offered, tokens) -> None:
    """On one transport: two on a quick one may well cost less than one on a slow one."""
    mesh, chain = problem
    plan = Planner(mesh, chain, offered).plan((tokens,) * mesh.attn_dp)
    kinds = {o.transport: o.kinds for o in offered}
    for read_plan in plan.reads:
        for first, second in itertools.pairwise(read_plan.steps):
            if first.edge is None or second.edge is None or first.operand != second.operand:
                continue
            if first.edge.moves and second.edge.moves and first.transport == second.transport:
                edges, known = legal_edges(mesh)[first.edge.src], kinds[first.transport]
                direct = [e for e in edges if e.dst == second.edge.dst and e.kind in known]
                assert not direct, f"{first} then {second}, but there is {direct[0]}"


@given(problems(), offers(), st.data())
@settings(max_examples=60, deadline=None)
def test_plans_compute_what_the_naive_plan_computes(problem, offered, data) -> None:
    mesh, chain = problem
    counts = tuple(data.draw(st.lists(st.integers(0, 9), min_size=mesh.attn_dp, max_size=mesh.attn_dp)))
    planner = Planner(mesh, chain, offered)
    plan, naive = planner.plan(counts), planner.naive(counts)
    seed = data.draw(st.integers(0, 99))
    names = [offer.transport for offer in offered]
    ours = run_world(mesh.world, lambda t: execute(dict.fromkeys(names, t), plan, counts, seed))
    theirs = run_world(mesh.world, lambda t: execute(dict.fromkeys(names, t), naive, counts, seed))
    whole = whole_result(plan, counts, seed)
    for rank, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        for i, (a, b) in enumerate(zip(mine, other, strict=True)):
            wanted = held(whole[i], mesh, plan.reads[i].read.target.rows, rank, counts)
            assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)
            assert torch.allclose(a, wanted, rtol=1e-12, atol=1e-12)


def test_two_deltas_that_are_merged_are_both_in_the_sum() -> None:
    """Random plans may have no such step, by chance."""
    mesh, counts = Mesh(2, 2, 4, 1), (3, 2)
    deltas = mesh.placement(Rows.GROUP, "attn_tp"), mesh.placement(Rows.WORLD, "world")
    complete = mesh.placement(Rows.GROUP)
    chain = Chain((Read("first", complete, (complete,)), Read("second", complete, deltas)), WIDTH, 8)
    plan = Planner(mesh, chain, [Offer("one", EVERY, frozenset(), AlphaBeta("slow", 0.1, 0, 0.01, 0.1, 5000))]).plan(
        counts
    )
    assert any(step.op == "merge" for step in plan.reads[1].steps)
    whole = whole_result(plan, counts, 0)[1]
    results = run_world(mesh.world, lambda t: execute({"one": t}, plan, counts, 0))
    for rank, found in enumerate(results):
        assert torch.allclose(found[1], held(whole, mesh, Rows.GROUP, rank, counts), rtol=1e-12, atol=1e-12)


@given(meshes, st.data())
@settings(deadline=None)
def test_rows_of_the_ranks_tile_the_world(mesh, data) -> None:
    counts = tuple(data.draw(st.lists(st.integers(0, 20), min_size=mesh.attn_dp, max_size=mesh.attn_dp)))
    own = [mesh.row_range(Rows.OWN, r, counts) for r in range(mesh.world)]
    assert [start for start, _ in own] == [0, *(stop for _, stop in own[:-1])] and own[-1][1] == sum(counts)
    for r in range(mesh.world):
        group = mesh.row_range(Rows.GROUP, r, counts)
        peers = mesh.peers("attn_tp", r)
        assert group == (own[peers[0]][0], own[peers[-1]][1])
        sizes = [own[p][1] - own[p][0] for p in peers]
        assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


def test_equal_placements_compare_equal() -> None:
    tp4 = Mesh(1, 4, 2, 2)
    assert tp4.placement(Rows.WORLD, "world") == tp4.placement(Rows.GROUP, "attn_tp")
    assert Mesh(4, 1, 4, 1).placement(Rows.GROUP) == Mesh(4, 1, 4, 1).placement(Rows.OWN)
    assert Mesh(2, 2, 2, 2).placement(Rows.GROUP, "moe_tp") == Mesh(2, 2, 2, 2).placement(Rows.GROUP, "attn_tp")
    assert Mesh().placement(Rows.WORLD, "world") == Placement(Rows.OWN)


def test_bad_layouts_say_what_to_change() -> None:
    with pytest.raises(LayoutError, match=r"attn_dp × attn_tp = 2×2 = 4 ranks, but ep × moe_tp = 3×1 = 3"):
        Mesh(2, 2, 3, 1)
    with pytest.raises(LayoutError, match="ep is 0"):
        Mesh(ep=0)
    with pytest.raises(LayoutError, match="dcp=3 does not divide attn_tp=8; nearest that do: 2 and 4"):
        Mesh(1, 8, 8, 1, dcp=3)
    with pytest.raises(LayoutError, match=r"dcp=5 does not divide attn_tp=2; nearest that do: 2$"):
        Mesh(2, 2, 2, 2, dcp=5)


def test_dcp_groups_are_neighbours_within_attn_tp() -> None:
    mesh = Mesh(2, 4, 8, 1, dcp=2)
    assert mesh.partitions["dcp"] == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.canonical("dcp") == "dcp" and mesh.peers("dcp", 5) == (4, 5) and (4, 5) in mesh.groups
    assert Mesh(2, 4, 8, 1, dcp=4).canonical("dcp") == "attn_tp"
    assert str(mesh).endswith(" dcp=2")


@pytest.mark.parametrize("mesh", layouts(8), ids=str)
def test_without_dcp_nothing_is_different(mesh: Mesh) -> None:
    others = {group for name in GROUP_NAMES[:5] for group in mesh.partitions[name]}
    assert mesh.canonical("dcp") is None and "dcp" not in str(mesh)
    assert mesh.groups[0] == tuple(range(mesh.world)) and sorted(mesh.groups) == sorted(others)
    for dcp in (n for n in range(2, mesh.attn_tp + 1) if mesh.attn_tp % n == 0):
        split = replace(mesh, dcp=dcp)
        assert legal_edges(split) == legal_edges(mesh) and set(split.groups) == others | set(split.partitions["dcp"])


def test_bytes_are_those_of_the_bandwidth_optimal_algorithms() -> None:
    mesh, counts = Mesh(2, 2, 2, 2), (8, 4)
    received = {
        (e.kind, e.src.rows.name, e.dst.rows.name): rows_received(e, mesh, 0, counts)
        for edges in legal_edges(mesh).values()
        for e in edges
        if e.src.owes in (None, "world", "attn_tp") and e.dst.owes is None
    }
    assert received["all_reduce", "WORLD", "WORLD"] in (2 * 12 * 3 / 4, 2 * 12 / 2)
    assert received["reduce_scatterv", "WORLD", "OWN"] == 4 * 3
    assert received["all_gatherv", "GROUP", "WORLD"] == 4
    assert received["all_gatherv", "OWN", "WORLD"] == 8
    assert received["all_reduce+all_gatherv", "GROUP", "WORLD"] == 4 + 8
    assert received["reduce_scatterv+all_reduce", "WORLD", "GROUP"] == 4 * 3 + 4


def test_what_no_transport_has_the_capacity_for_is_refused_with_the_number_that_would_do() -> None:
    mesh = Mesh(2, 2, 2, 2)
    whole, owing = mesh.placement(Rows.WORLD), mesh.placement(Rows.WORLD, "world")
    reads = (Read("layers.0.norm", whole, (mesh.placement(Rows.GROUP),)), Read("layers.1.norm", whole, (owing,)))
    cost = PRESETS["h200-nvlink"]
    every = EVERY
    small, large = Offer("small", every, frozenset(), cost, 4 * 8 * WIDTH), Offer("large", every, frozenset(), cost)
    chain = Chain(reads, WIDTH, 8)
    assert Planner(mesh, chain, [small]).plan((2, 2)).us < math.inf
    needed = 2 * 8 * 8 * WIDTH
    with pytest.raises(LayoutError, match=rf"8 tokens a group.*small has max_bytes=.*give it max_bytes={needed}, or"):
        Planner(mesh, chain, [small]).plan((8, 8))
    used = {step.transport for _, step, _ in Planner(mesh, chain, [small, large]).plan((8, 8)).moves()}
    assert used == {"large"}


def test_an_epilogue_takes_no_row_that_is_wider_than_its_transport_says() -> None:
    mesh = Mesh(1, 2, 2, 1)
    whole, owing = mesh.placement(Rows.GROUP), mesh.placement(Rows.GROUP, "attn_tp")
    for width, fused in ((WIDTH, True), (WIDTH + 1, False)):
        offer = Offer("narrow", EVERY, EVERY, PRESETS["h200-nvlink"], max_normed_bytes=8 * WIDTH)
        chain = Chain((Read("first", whole, (whole,)), Read("second", whole, (owing,))), width, 8)
        plan = Planner(mesh, chain, [offer]).plan((4,))
        assert any(step.op == "finish" for _, step, _ in plan.moves()) == fused


@pytest.mark.parametrize("kinds", [frozenset({"all_gatherv", "reduce_scatterv"}), EVERY])
def test_the_naive_plan_never_fails(kinds: frozenset[str]) -> None:
    """Steps that no transport offers, or has room for, cost infinity in it; the plan avoids them."""
    mesh = Mesh(2, 2, 2, 2)
    group, owing = mesh.placement(Rows.GROUP), mesh.placement(Rows.WORLD, "world")
    chain = Chain((Read("a", group, (group,)), Read("b", mesh.placement(Rows.OWN), (owing,))), WIDTH, 8)
    capacity = 2 * 4 * 8 * WIDTH
    planner = Planner(mesh, chain, [Offer("one", kinds, frozenset(), PRESETS["h200-nvlink"], capacity)])
    assert planner.plan((4, 4)).us < math.inf
    for counts in ((4, 4), (8, 8)):
        naive = planner.naive(counts)
        anyone = Offer("nobody", EVERY, frozenset(), PRESETS["h200-nvlink"])
        check_legal(naive, [anyone, *planner.offers])
        offered = "all_reduce" in kinds and counts == (4, 4)
        assert (naive.us < math.inf) == offered
        [by] = {step.transport for _, step, edge in naive.moves() if edge.src == owing}
        assert by == ("one" if offered else "nobody")


@pytest.mark.parametrize("mesh", [Mesh(2, 2, 4, 1, hosts=2), Mesh(4, 2, 2, 4, hosts=2)], ids=str)
def test_the_naive_plan_never_fails_over_hosts(mesh: Mesh) -> None:
    """Values also lie on rows there that no step joins to a DP group's."""
    group, offered = mesh.placement(Rows.GROUP), [Offer("one", EVERY, frozenset(), PRESETS["h200-nvlink"])]
    for rows, delta in itertools.product(mesh.row_kinds, legal_edges(mesh)):
        chain = Chain((Read("a", group, (group,)), Read("b", mesh.placement(rows), (delta,))), WIDTH, 8)
        check_legal(Planner(mesh, chain, offered).naive((4,) * mesh.attn_dp), offered)


@given(meshes, st.data())
@settings(deadline=None)
def test_the_busiest_rank_is_of_the_fullest_or_the_emptiest_group(mesh: Mesh, data: st.DataObject) -> None:
    counts = tuple(data.draw(st.lists(st.integers(0, 50), min_size=mesh.attn_dp, max_size=mesh.attn_dp)))
    planner = Planner(mesh, Chain((), WIDTH, 8), [])
    for edge in (e for found in legal_edges(mesh).values() for e in found):
        limit = max(rows_received(edge, mesh, rank, counts) for rank in range(mesh.world))
        assert planner.bytes_received(edge, counts) == pytest.approx(limit * WIDTH * 8)
