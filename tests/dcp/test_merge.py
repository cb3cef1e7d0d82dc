"""The merge of attention over shards against float64 over all tokens: its definition, and every way to it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import run_world
from torch import Tensor

from comm.processes import run_processes, run_threads
from dcp.shards import Shards, check, own, shards_of
from weft.comm.reference import ReferenceWorld
from weft.comm.transport import CommError, Transport, offer_of
from weft.kernels.torch_reference import merge_weights, softmax_merge
from weft.planner.cost import PRESETS, AlphaBeta, Offer, Table
from weft.planner.exchange import merge_scatterv
from weft.planner.op import BlockOp
from weft.planner.prices import BlockPrices
from weft.planner.recipes import Merge
from weft.planner.spec import LayoutError, Mesh
from weft.stream.block_exchanges import BlockExchanges, TraceExchanges, a2a, ag_rs
from weft.tune.cpu_costs import merges_to_price

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PAGE = 32


@pytest.mark.parametrize("run", [1, 16, PAGE])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_parts_of_any_length_merge_to_the_whole(ranks: int, run: int) -> None:
    edges = {around + by for around in (0, run, ranks * run, (ranks - 1) * run, PAGE * ranks) for by in (-1, 0, 1)}
    shards = shards_of(sorted(n for n in edges if n >= 0), ranks, 2, 8, torch.float64, seed=run, run=run)
    check(softmax_merge(shards.outs, shards.lses), (shards.out, shards.lse), f"{ranks} ranks, runs of {run}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [2, 5])
def test_each_part_empty_in_turn_and_all(ranks: int, dtype: torch.dtype) -> None:
    for seed in range(3):  # empty parts show it by −inf, +inf or NaN
        shards = shards_of([40] * (ranks + 1), ranks, 4, 16, dtype, seed=seed, empty=lambda r, t: t in (r, ranks))
        assert shards.outs.isnan().any()
        check(softmax_merge(shards.outs, shards.lses), (shards.out, shards.lse), f"{dtype}, seed {seed}")


def test_weights_of_unequal_parts() -> None:
    lses = torch.tensor([[0.0, 1000.0, -1000.0, -math.inf], [math.log(3.0), -1000.0, -1000.0, math.nan]])
    weights, lse = merge_weights(lses)
    torch.testing.assert_close(weights, torch.tensor([[0.25, 1.0, 0.5, 0.0], [0.75, 0.0, 0.5, 0.0]]))
    torch.testing.assert_close(lse, torch.tensor([math.log(4.0), 1000.0, -1000.0 + math.log(2), -math.inf]))


def test_base_two_is_converted_at_the_seam() -> None:
    shards = shards_of([50, 3, 1], 3, 2, 8, seed=4)
    by_two = shards.lses / math.log(2)
    check(softmax_merge(shards.outs, by_two * math.log(2)), (shards.out, shards.lse), "base 2")
    with pytest.raises(AssertionError, match="error"):
        check(softmax_merge(shards.outs, by_two), (shards.out, shards.lse), "not converted")


# --- every way, on every transport -----------------------------------------------------------------------------------


def options(transport: Transport, ranks: int) -> dict[str, Callable[..., tuple[Tensor, Tensor]]]:
    found: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
        "ag_rs": lambda out, lse, group: ag_rs(transport, out, lse, group),
        "a2a": lambda out, lse, group: a2a(transport, out, lse, group),
    }
    if transport.entry.offers(merge_scatterv(ranks)):
        found["fused"] = transport.merge_scatterv
    return found


def cases(ranks: int) -> list[Shards]:
    """Ragged lengths, each rank empty in turn, all empty, one token, none."""
    found = []
    for seed, dtype in enumerate(DTYPES):
        found.append(shards_of([1, 70, 0, 33, 2, ranks, 5], ranks, 2 * ranks, 24, dtype, seed=seed, run=16))
        each_and_all = [9] * (ranks + 1)
        found.append(shards_of(each_and_all, ranks, ranks, 5, dtype, seed=seed, empty=lambda r, t: t in (r, ranks)))
        found.append(shards_of([40, 9], ranks, 3 * ranks, 128, dtype, seed=seed, apart=1000))  # some weigh nothing
    return found


def merge_all(transport: Transport, mesh: Mesh, *args: object) -> dict[str, list[Tensor]]:
    """Every way on every case: right, the same bits on every run and in any company, the inputs left as they are."""
    group, found = mesh.peers("dcp", transport.rank), {}
    n, me = len(group), group.index(transport.rank)
    for name, merge in options(transport, n).items():
        found[name] = []
        for at, shards in enumerate(cases(n)):
            what = f"{name} on {transport.entry.name}, rank {transport.rank} of {group}, case {at}"
            out, lse = shards.outs[me], shards.lses[me]
            before = out.clone(), lse.clone()
            got = merge(out, lse, group)
            check(got, (own(shards.out, n, me), own(shards.lse, n, me)), what)
            assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(before, (out, lse), strict=True))
            found[name] += got
            heads_first = out.transpose(0, 1).contiguous().transpose(0, 1)
            again = merge(heads_first, lse.t().contiguous().t(), group)
            assert all(map(torch.equal, got, again)), f"another layout in memory, {what}"
            backwards = list(reversed(range(len(out))))
            rotated = merge(out[backwards], lse[backwards], group)
            assert all(torch.equal(a, b[backwards]) for a, b in zip(got, rotated, strict=True)), f"other order, {what}"
            alone = merge(out[-1:], lse[-1:], group)
            assert all(torch.equal(a[-1:], b) for a, b in zip(got, alone, strict=True)), f"alone, {what}"
    transport.barrier(mesh.peers("world", transport.rank))
    return found


MESHES = [Mesh(1, 2, 2, 1, dcp=2), Mesh(2, 4, 8, 1, dcp=2), Mesh(1, 3, 3, 1, dcp=3), Mesh(1, 4, 1, 4, dcp=4)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_on_the_reference(mesh: Mesh) -> None:
    run_world(mesh.world, lambda t: merge_all(t, mesh))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_on_shared_memory(mesh: Mesh, tmp_path: Path) -> None:
    run_threads(mesh, tmp_path, merge_all)


def test_over_gloo(tmp_path: Path) -> None:
    run_processes("gloo", Mesh(1, 4, 4, 1, dcp=2), tmp_path, merge_all)


def refused(transport: Transport, mesh: Mesh | None = None) -> None:
    out, lse, group = torch.ones(2, 4, 8), torch.ones(2, 4), (0, 1)
    exchange = merge_scatterv(2)
    if not transport.entry.offers(exchange):
        with pytest.raises(CommError, match="does not offer merge_scatterv"):
            transport.merge_scatterv(out, lse, group)
        return
    assert not transport.entry.offers(exchange, True)
    for wrong, match in (
        ((out[:, :3], lse[:, :3]), r"H a multiple of 2, not \[2, 3, 8\]"),
        ((out, lse[:1]), r"takes lse \[2, 4\] in float32, not \[1, 4\]"),
        ((out, lse.double()), "not .* in torch.float64"),
    ):
        with pytest.raises(CommError, match=match):
            transport.merge_scatterv(*wrong, group)
    with pytest.raises(CommError, match="takes lse too; it has a call of its own"):
        transport.exchange(torch.ones(4, 8), exchange, group, (2, 2))


def test_what_cannot_be_merged_is_refused() -> None:
    run_world(2, refused)


# --- the choice -----------------------------------------------------------------------------------------------------


def merge_by(transport: Transport, mesh: Mesh, option: str) -> tuple[Tensor, Tensor]:
    offer = offer_of(transport.entry, mesh, PRESETS["cpu-shm"])
    prices = BlockPrices(mesh, [offer], {Merge: option})
    merge = partial(BlockExchanges(mesh, transport.rank, {transport.entry.name: transport}, prices).merge, "dcp")
    shards = shards_of([30, 1, 8], mesh.dcp, 2 * mesh.dcp, 16)
    at = transport.rank % mesh.dcp
    got = merge(shards.outs[at], shards.lses[at])
    check(got, (own(shards.out, mesh.dcp, at), own(shards.lse, mesh.dcp, at)), option)
    none = merge(shards.outs[at, :0], shards.lses[at, :0])
    assert none[0].shape == (0, 2, 16) and none[1].shape == (0, 2)
    plan = prices.plan(Merge(2 * mesh.dcp, 16, 4), "dcp", 3)
    assert plan.recipe.name == (option if option != "auto" else "fused")
    with pytest.raises(CommError, match="3 heads do not divide over a group of 2 ranks"):
        merge(shards.outs[at, :0, :3], shards.lses[at, :0, :3])
    return got


@pytest.mark.parametrize("option", ["auto", "ag_rs", "a2a", "fused"])
def test_a_merge_takes_the_planned_recipe(option: str) -> None:
    mesh = Mesh(1, 4, 4, 1, dcp=2)
    run_world(4, lambda t: merge_by(t, mesh, option))


ALL = frozenset({"all_gatherv", "reduce_scatterv", "all_to_allv", "merge_scatterv"})


def offered(name: str, kinds: frozenset[str], us: float, gb_s: float, max_bytes: int | None = None) -> Offer:
    return Offer(name, kinds, frozenset(), AlphaBeta(name, us, 0.0, gb_s, 1.0, 1000.0), max_bytes)


def plan_merge(merge: Merge, ranks: int, tokens: int, offers: list[Offer], recipe: str = "auto") -> BlockOp:
    mesh = Mesh(1, ranks, ranks, 1, dcp=ranks)
    return BlockPrices(mesh, offers, {Merge: recipe}).cheapest(merge, "dcp", tokens)


def test_the_fastest_recipe_is_planned() -> None:
    merge = Merge(heads=64, dim=128, element_bytes=2)
    quick, wide = offered("quick", ALL, 2.0, 10.0), offered("wide", ALL - {"merge_scatterv"}, 20.0, 1000.0)
    assert plan_merge(merge, 4, 1, [quick, wide]).transport == "quick"
    many = plan_merge(merge, 4, 1 << 14, [quick, wide])
    assert many.transport == "wide" and many.recipe.name == "ag_rs"
    assert plan_merge(merge, 4, 1, [quick, wide]).recipe.name == "fused"
    assert plan_merge(merge, 4, 1, [wide]).recipe.name == "a2a"  # one collective where ag_rs takes two
    assert plan_merge(merge, 4, 1, [quick, wide], "ag_rs").recipe.name == "ag_rs"
    assert plan_merge(merge, 4, 2, [quick]).bytes == 2 * 64 * (128 * 2 + 4) * 3 // 4


def test_what_exceeds_the_capacity_goes_in_several_calls_and_what_has_no_recipe_is_refused() -> None:
    merge = Merge(64, 128, 2)
    capacity = merge.bytes(8, 2)
    small, other = (
        offered("small", ALL, 1.0, 10.0, capacity - 1),
        offered("other", frozenset({"all_to_allv"}), 9.0, 1.0),
    )
    whole = plan_merge(merge, 2, 8, [offered("large", ALL, 1.0, 10.0, capacity)], "fused")
    parts = plan_merge(merge, 2, 8, [small, other], "fused")
    assert (whole.max_call_rows, parts.max_call_rows, parts.bytes) == (8, 7, whole.bytes)
    seven, one = (plan_merge(merge, 2, n, [small], "fused").us for n in (7, 1))
    assert parts.us > whole.us and parts.us == pytest.approx(seven + one)
    none = replace(small, max_bytes=merge.bytes(1, 2) - 1)
    with pytest.raises(
        LayoutError, match=r"outputs by fused for 8 rows .*takes 16704 bytes; small has max_.*a2a on other"
    ):
        plan_merge(merge, 2, 8, [none, other], "fused")
    with pytest.raises(LayoutError, match="there are auto, ag_rs, a2a, fused"):
        plan_merge(merge, 2, 8, [small], "quickest")


def test_each_of_several_calls_has_its_own_live_tokens() -> None:
    """Five of eight tokens in calls of three are live: three in the first, two in the second, none after."""
    told: list[int] = []

    class Fused:
        def merge_scatterv(self, out: Tensor, lse: Tensor, group: Any, live: Tensor) -> tuple[Tensor, Tensor]:
            told.append(int(live))
            return out[:, :2], lse[:, :2]

    merge = Merge(4, 8, 4)
    offer = offered("small", ALL, 1.0, 10.0, merge.bytes(3, 2))
    mesh, transport = Mesh(1, 2, 2, 1, dcp=2), Fused()
    exchanges = BlockExchanges(mesh, 0, {"small": transport}, BlockPrices(mesh, [offer], {Merge: "fused"}))  # type: ignore[dict-item]
    out, lse = torch.randn(8, 4, 8), torch.randn(8, 4)
    own, total = exchanges.merge("dcp", out, lse, torch.tensor([5], dtype=torch.int32))
    assert told == [3, 2, 0] and torch.equal(own, out[:, :2]) and torch.equal(total, lse[:, :2])


def test_a_recipe_that_is_asked_for_need_not_have_been_measured() -> None:
    measured = {("all_gatherv", 2, 1): ((1.0, 5.0),), ("reduce_scatterv", 2, 1): ((1.0, 5.0),)}
    table = Table("table", measured, ((1.0, 1.0),), ((1.0, 1.0),))
    offer = Offer("peer", ALL, frozenset(), table)
    merge = Merge(64, 128, 2)
    assert plan_merge(merge, 2, 1, [offer]).recipe.name == "ag_rs"
    for option in ("a2a", "fused"):
        assert plan_merge(merge, 2, 1, [offer], option).recipe.name == option
    untimed = Offer("peer", frozenset({"all_to_allv"}), frozenset(), table)
    with pytest.raises(LayoutError, match="there is a2a on peer, not measured here by weft tune"):
        plan_merge(merge, 2, 1, [untimed])


def test_a_trace_counts_merges_by_shape() -> None:
    trace = TraceExchanges(Mesh(1, 2, 2, 1, dcp=2))
    given = torch.empty(0, 8, 16, dtype=torch.bfloat16, device="meta"), torch.empty(0, 8, device="meta")
    for _ in range(3):
        out, lse = trace.merge("dcp", *given)
        assert out.shape == (0, 4, 16) and lse.shape == (0, 4)
    assert [inside.value for inside in trace.found] == [Merge(8, 16, 2)] * 3


def priced(transport: Transport, mesh: Mesh) -> list[tuple[str, float]]:
    """Every call that weft tune times for merges, made once; their kinds and bytes."""
    found = []
    for exchange, x, call, row in merges_to_price(mesh, transport.rank, [1 << 10, 1 << 14], torch.empty(0)):
        assert transport.entry.offers(exchange) and row["ranks"] == exchange.ranks and row["world"] == mesh.world
        call(transport, x)
        found.append((f"{row['kind']} {row['ranks']}", float(row["bytes"])))
    return found


def test_tuning_prices_what_plans_of_merges_ask_for() -> None:
    found = run_world(ReferenceWorld(4, audit=False), lambda t: priced(t, Mesh(2, 2, 4, 1)))
    assert all(f == found[0] for f in found)
    assert {kind for kind, _ in found[0]} == {f"{k} {n}" for k in ("merge_scatterv", "all_to_allv") for n in (2, 4)}
    fused = plan_merge(Merge(2, 128, 4), 2, 1, [offered("any", ALL, 1.0, 10.0)], "fused")
    assert dict(reversed(found[0]))["merge_scatterv 2"] == fused.bytes
