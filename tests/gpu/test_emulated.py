"""The kernels of transport peer, emulated on a CPU: every edge on up to eight ranks, divided in every way."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from gpu.emulation import run_emulated
from gpu.replays import Step, replay
from gpu.works import SHOTS, any_bits, everything, fill, refuse, sums_in_order, wait_in_vain
from weft.comm.peer import PeerTransport
from weft.comm.peer_launch import NEVER, SPLITS, PeerTuning
from weft.comm.transport import CommError, Epilogue, finish
from weft.planner.spec import Mesh


def fewer_threads(tuning: PeerTuning) -> PeerTuning:
    """They are sooner done, and a block that has few takes more turns."""
    blocks = {"blocks": 2, "threads": 32, "wide_blocks": 3, "wide_threads": 64, "norm_blocks": 4, "few_bytes": 1 << 10}
    return replace(tuning, **blocks, **{name: replace(getattr(tuning, name), threads=64) for name in SPLITS})


TUNINGS = {
    name: fewer_threads(tuning if name.endswith("split") else tuning.split_from(NEVER))
    for name, tuning in SHOTS.items()
}
TWO, THREE, FOUR = Mesh(1, 2, 2, 1), Mesh(3, 1, 3, 1), Mesh(2, 2, 2, 2)
FIVE, SIX, SEVEN = Mesh(5, 1, 5, 1), Mesh(2, 3, 3, 2), Mesh(1, 7, 7, 1)
EIGHT = Mesh(4, 2, 8, 1), Mesh(2, 4, 8, 1)
# Kernels are made for up to 2, 4 and 8 ranks. Three ranks, and in the matrix four, are held in each number of shots,
# split and not; eight take long: calls of full size by day, and the rest at night, with what four do in one shot, as
# two and three do. Five, six and seven ranks run the kernels for eight.
UNEVEN = [(FIVE, "one shot"), (SEVEN, "two shots")]
SOME = [(THREE, "one shot"), (THREE, "two shots, split")]
MATRIX = [*((TWO, name) for name in TUNINGS), *SOME, (FOUR, "two shots, split"), *UNEVEN]
AT_NIGHT = [
    (SIX, "one shot"),
    (SIX, "two shots, split"),
    (SEVEN, "one shot, split"),
    (FOUR, "one shot"),
    (EIGHT[0], "two shots"),
    (EIGHT[1], "one shot"),
]
CHANGES = [*((TWO, name) for name in TUNINGS), (FOUR, "two shots, split"), *SOME]
MORE_CHANGES = [
    (EIGHT[0], "two shots"),
    (EIGHT[1], "one shot, split"),
    (SIX, "two shots, split"),
    *UNEVEN,
    *((FOUR, name) for name in TUNINGS if name != "two shots, split"),
]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Limit torch to one thread, next to the ranks'."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("mesh", "name"), [*MATRIX, *(pytest.param(*case, marks=pytest.mark.nightly) for case in AT_NIGHT)], ids=str
)
def test_every_call_edge_and_epilogue(mesh: Mesh, name: str) -> None:
    one = {name: TUNINGS[name]}
    run_emulated(mesh, partial(everything, tunings=one, large=False), TUNINGS[name], max_bytes=1 << 20)


@pytest.mark.parametrize(
    ("mesh", "name"), [(TWO, "one shot"), pytest.param(THREE, "two shots", marks=pytest.mark.nightly)], ids=str
)
def test_the_plain_form_of_gpus_before_hopper(mesh: Mesh, name: str) -> None:
    """Results equal the reference's, and a call that needs Hopper ends the process."""
    one = {name: TUNINGS[name]}
    run_emulated(mesh, partial(everything, tunings=one, large=False), TUNINGS[name], True, max_bytes=1 << 20)


def norm_wide_rows(transport: PeerTransport, mesh: Mesh, device: torch.device, results: dict[int, Any]) -> None:
    """Rows that the blocks of a cluster share, where there are clusters."""
    generator = torch.Generator().manual_seed(transport.rank)  # the other ranks are threads
    x, residual, weight = torch.randn(2, 1024, generator=generator), torch.ones(2, 1024), torch.ones(1024)
    results[transport.rank] = (
        (transport.tuning.cluster, transport.tuning.early),
        transport.all_reduce(x, mesh.peers("world", transport.rank), Epilogue(residual, weight, 1e-6)),
    )


def test_both_forms_give_the_same_bits() -> None:
    forms: list[dict[int, Any]] = [{}, {}]
    for plain, results in enumerate(forms):
        run_emulated(TWO, partial(norm_wide_rows, results=results), PeerTuning(cluster=4), plain == 1)
    assert [form[0][0] for form in forms] == [(4, 1), (1, 0)]
    assert all(torch.equal(forms[0][rank][1], forms[1][rank][1]) for rank in range(TWO.world))


def same(transport: PeerTransport, step: Step) -> Step:
    return step


@pytest.mark.parametrize(
    ("mesh", "name"), [*CHANGES, *(pytest.param(*case, marks=pytest.mark.nightly) for case in MORE_CHANGES)], ids=str
)
def test_counts_change_from_call_to_call(mesh: Mesh, name: str) -> None:
    run_emulated(mesh, partial(replay, rounds=4, again=same), TUNINGS[name], max_bytes=1 << 20)


@pytest.mark.parametrize(
    ("mesh", "name"),
    [*CHANGES, MORE_CHANGES[0], *(pytest.param(*case, marks=pytest.mark.nightly) for case in MORE_CHANGES[1:])],
    ids=str,
)
def test_calls_may_be_as_large_as_max_bytes(mesh: Mesh, name: str) -> None:
    run_emulated(mesh, partial(fill, tunings={name: TUNINGS[name]}), TUNINGS[name], max_bytes=1 << 15)


@pytest.mark.parametrize(
    "mesh",
    [TWO, THREE, FOUR, SEVEN, *(pytest.param(m, marks=pytest.mark.nightly) for m in (EIGHT[0], FIVE, SIX))],
    ids=str,
)
def test_what_is_not_summed_arrives_bit_for_bit(mesh: Mesh) -> None:
    tunings = {name: TUNINGS[name] for name in ("one shot", "one shot, split")}
    run_emulated(mesh, partial(any_bits, tunings=tunings), TUNINGS["one shot"], max_bytes=1 << 16)


@pytest.mark.parametrize(
    "mesh", [THREE, FOUR, SEVEN, *(pytest.param(m, marks=pytest.mark.nightly) for m in (FIVE, SIX))], ids=str
)
def test_sums_are_in_rank_order(mesh: Mesh) -> None:
    run_emulated(mesh, partial(sums_in_order, tunings=TUNINGS), TUNINGS["one shot"], max_bytes=1 << 16)


def test_a_wait_in_vain_ends() -> None:
    run_emulated(TWO, wait_in_vain, TUNINGS["one shot"], timeout_s=0.2)


def test_what_cannot_be_is_refused() -> None:
    run_emulated(FOUR, refuse, TUNINGS["one shot"])


INSIDE_HOSTS: dict[Mesh, set[tuple[int, ...]]] = {
    Mesh(4, 1, 4, 1, hosts=2): {(0, 2), (1, 3)},  # every other rank
    Mesh(3, 2, 2, 3, hosts=2): {(0, 1, 2), (3, 4, 5)},  # attn_tp crosses: none of its groups is of peer
    Mesh(4, 2, 4, 2, hosts=2): {(0, 1), (2, 3), (4, 5), (6, 7), (0, 4), (1, 5), (2, 6), (3, 7)}
    | {(0, 1, 4, 5), (2, 3, 6, 7)},
}
"""The groups inside hosts. Ranks go to hosts round-robin in blocks of max(attn_tp, moe_tp),
or are neighbours where such a block does not fit a host."""


def inside_hosts(transport: PeerTransport, mesh: Mesh, device: torch.device) -> None:
    rank, hosts = transport.rank, INSIDE_HOSTS[mesh]
    assert {group for r in range(mesh.world) for group in mesh.groups_on_host(r) if len(group) > 1} == hosts
    for group in (group for group in mesh.groups_on_host(rank) if len(group) > 1):
        assert rank in group
        mine, everyone = torch.full((1, 8), float(rank)), torch.tensor(group, dtype=torch.float32)
        assert torch.equal(transport.all_gatherv(mine, group, (1,) * len(group))[:, 0], everyone)
        assert torch.equal(transport.all_reduce(mine, group), everyone.sum().expand(1, 8))
    with pytest.raises(CommError, match="is no group of the layout inside this host"):
        transport.all_reduce(torch.ones(2, 8), tuple(range(mesh.world)))


@pytest.mark.parametrize("mesh", INSIDE_HOSTS, ids=str)
def test_each_host_has_memory_of_its_own(mesh: Mesh) -> None:
    run_emulated(mesh, inside_hosts, TUNINGS["one shot"], max_bytes=1 << 16)


def norm_about_one(transport: PeerTransport, mesh: Mesh, device: torch.device) -> None:
    """Check that only the product of a float32 weight is rounded: rounded before it, most elements differ."""
    torch.manual_seed(0)
    x, residual = torch.randn(2, 40, 64).bfloat16()
    weight, group = torch.rand(64) + 0.5, mesh.peers("world", transport.rank)
    _, normed = transport.all_reduce(x, group, Epilogue(residual, weight, 1e-6))
    _, wanted = finish(transport.all_reduce(x, group), Epilogue(residual, weight, 1e-6))
    assert (normed != wanted).float().mean() < 0.01  # squares are summed in another order


def test_a_weight_in_float32_is_not_rounded_first() -> None:
    run_emulated(TWO, norm_about_one, TUNINGS["one shot"])
