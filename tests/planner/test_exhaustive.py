"""The planner against every plan there is, on worlds of up to 7 ranks; and that it would be found out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from planner.exhaustive import Machine, minimum, price, world
from planner.meshes import layouts
from weft.planner import plan as plan_module
from weft.planner.chain import Chain, Read
from weft.planner.cost import AlphaBeta, Offer
from weft.planner.edges import legal_edges
from weft.planner.plan import Planner
from weft.planner.row_formats import Wire
from weft.planner.spec import LayoutError, Mesh, Placement, PlacementError, Rows
from weft.stream.formats import Float8

WIDTH, ELEMENT_BYTES = 6, 8
ROW_BYTES = WIDTH * ELEMENT_BYTES
BASIC = frozenset({"all_reduce", "reduce_scatterv", "all_gatherv"})
ALL = BASIC | {"all_reduce+all_gatherv", "reduce_scatterv+all_reduce"}
FIXED = settings(
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
OVER_HOSTS = (
    Mesh(2, 1, 2, 1, hosts=2),
    Mesh(1, 2, 2, 1, hosts=2),
    Mesh(2, 2, 2, 2, hosts=2),
    Mesh(4, 1, 2, 2, hosts=2),
    Mesh(1, 4, 4, 1, hosts=2),
    Mesh(2, 2, 1, 4, hosts=4),
    Mesh(3, 2, 6, 1, hosts=3),
    Mesh(6, 1, 2, 3, hosts=2),
)
EIGHT_OVER_HOSTS = (Mesh(4, 2, 8, 1, hosts=2), Mesh(2, 4, 4, 2, hosts=2), Mesh(2, 4, 2, 4, hosts=4))
UNEVEN = tuple(mesh for mesh in layouts(7) if mesh.world in (3, 5, 6, 7))
UNEVEN_OVER_HOSTS = (
    Mesh(3, 1, 3, 1, hosts=3),
    Mesh(1, 3, 1, 3, hosts=3),
    Mesh(5, 1, 1, 5, hosts=5),
    Mesh(1, 6, 3, 2, hosts=3),
    Mesh(2, 3, 2, 3, hosts=2),
    Mesh(7, 1, 7, 1, hosts=7),
)
CROSSING = (
    Mesh(1, 6, 2, 3, hosts=3),
    Mesh(2, 3, 3, 2, hosts=2),
    Mesh(6, 1, 3, 2, hosts=2),
    Mesh(3, 2, 6, 1, hosts=2),
    Mesh(2, 3, 2, 3, hosts=3),
    Mesh(3, 2, 2, 3, hosts=2),
)
"""Layouts in which moe_tp crosses hosts or attn_tp, then those in which hosts cross attn_tp."""
Problem = tuple[Mesh, Chain, list[Machine], int, bool]


def placements(mesh: Mesh) -> list[Placement]:
    found = {}
    for rows, owes in itertools.product(mesh.row_kinds, (None, *mesh.communicating)):
        try:
            found[mesh.placement(rows, owes)] = None
        except PlacementError:
            continue
    return list(found)


@st.composite
def machines(draw: st.DrawFn, name: str) -> Machine:
    return Machine(
        name,
        kinds=draw(st.sampled_from([ALL, ALL, BASIC, ALL - {"all_reduce"}, frozenset({"all_gatherv", "all_reduce"})])),
        fused=draw(st.booleans()),
        call_us=draw(st.floats(0.1, 300)),
        doubling_us=draw(st.floats(0, 50)),
        bytes_us=draw(st.floats(1, 1e4)),
        local_us=draw(st.floats(0, 50)),
        local_bytes_us=draw(st.floats(1, 1e4)),
        capacity=draw(st.sampled_from([None, None, 64, 256, 1024, 4096])),
        norm_capacity=draw(st.sampled_from([None, None, ROW_BYTES, ROW_BYTES - 1])),
        max_ranks=draw(st.sampled_from([None, None, None, 2])),
        max_hosts=draw(st.sampled_from([None, None, 1])),
        network=draw(st.none() | st.tuples(st.floats(0.1, 300), st.floats(0, 50), st.floats(1, 1e4))),
    )


READERS = st.sampled_from(
    [
        {},
        {"normed": False},
        {"wire": Wire(Float8(4)), "plain": True},
        {"wire": Wire(Float8(4)), "plain": False},
        {"wire": Wire(Float8(4), extra=12), "plain": False},
    ]
)
"""Forms in which a block reads its rows: as they are; without a norm; in FP8 too; in FP8 alone; in FP8 with columns
computed before."""


@st.composite
def problems(draw: st.DrawFn, meshes: tuple[Mesh, ...], most_deltas: int = 3) -> Problem:
    """A mesh, a chain of 1 or 2 reads of some deltas, equal ones too, a transport or two, a bucket of tokens, and
    whether slices copy.
    """
    mesh = draw(st.sampled_from(meshes))
    legal = placements(mesh)
    complete = [p for p in legal if p.owes is None]
    reads = []
    for i in range(draw(st.integers(1, 2))):
        deltas = draw(st.lists(st.sampled_from(legal), min_size=int(i == 0), max_size=most_deltas))
        if i == 0:  # a stream begins with the embedding
            deltas[0] = draw(st.sampled_from(complete))
        reads.append(Read(f"layers.{i}.norm", draw(st.sampled_from(complete)), tuple(deltas), **draw(READERS)))
    offered = [draw(machines(name)) for name in draw(st.sampled_from([["one"], ["one", "two"]]))]
    chain, tokens = Chain(tuple(reads), WIDTH, ELEMENT_BYTES), draw(st.sampled_from([1, 2, 8, 64]))
    return mesh, chain, offered, tokens, draw(st.booleans())


def check(problem: Problem) -> None:
    """The plan is legal, takes what it says, and nothing takes less; what is refused cannot be."""
    mesh, chain, offered, tokens, slices_copy = problem
    best = minimum(mesh, chain, offered, tokens, slices_copy)
    planner = Planner(mesh, chain, [m.offer() for m in offered], slices_copy=slices_copy)
    try:
        plan = planner.plan((tokens,) * mesh.attn_dp)
    except (LayoutError, PlacementError):
        assert best == math.inf
        return
    assert plan.us == pytest.approx(best)
    assert price(plan, offered, slices_copy) == pytest.approx(plan.us)


@pytest.mark.parametrize("examples", [80, pytest.param(400, marks=pytest.mark.nightly)])
def test_no_plan_is_cheaper(examples: int) -> None:
    @given(problems(layouts(6)) | problems(OVER_HOSTS))
    @settings(max_examples=examples, deadline=None)
    def any_problem(problem: Problem) -> None:
        check(problem)

    any_problem()


@pytest.mark.parametrize(
    "examples, most_deltas", [(40, 2), pytest.param(600, 3, marks=[pytest.mark.nightly, pytest.mark.timeout(3600)])]
)
def test_no_plan_of_ranks_with_uneven_shares_is_cheaper(examples: int, most_deltas: int) -> None:
    """No number of tokens divides evenly over five or seven ranks: collectives cost what the largest share does."""

    @given(problems(UNEVEN, most_deltas) | problems(UNEVEN_OVER_HOSTS + CROSSING, most_deltas=1))
    @settings(max_examples=examples, deadline=None)
    def any_problem(problem: Problem) -> None:
        check(problem)

    any_problem()


@given(problems(EIGHT_OVER_HOSTS, most_deltas=1))
@settings(max_examples=30, deadline=None)
def test_no_plan_of_eight_ranks_over_hosts_is_cheaper(problem: Problem) -> None:
    """2 × 2 × 2 among them; deltas that are summed before they move take the oracle minutes."""
    check(problem)


@st.composite
def problems_with_forms(draw: st.DrawFn) -> Problem:
    """A chain of 2 or 3 reads in 2 or 3 forms. Some forms of a read are alike but for what is added after it."""
    mesh = draw(st.sampled_from([m for m in layouts(4) if m.world > 1]))
    legal = placements(mesh)
    complete = [p for p in legal if p.owes is None]
    count, targets = draw(st.integers(2, 3)), []
    for _ in range(count):
        targets.append(draw(st.lists(st.sampled_from(complete), min_size=1, max_size=2)))
    first = (draw(st.sampled_from(complete)),)  # the embedding, before any form was chosen
    forms = []
    for _ in range(draw(st.integers(2, 3))):
        reads = [Read("layers.0.norm", draw(st.sampled_from(targets[0])), first, **draw(READERS))]
        for i in range(1, count):
            deltas = draw(st.lists(st.sampled_from(legal), min_size=1, max_size=2))
            reads.append(Read(f"layers.{i}.norm", draw(st.sampled_from(targets[i])), tuple(deltas), **draw(READERS)))
        forms.append(tuple(reads))
    offered = [draw(machines("one"))]
    return (
        mesh,
        Chain(forms[0], WIDTH, ELEMENT_BYTES, tuple(forms[1:])),
        offered,
        draw(st.sampled_from([1, 8, 64])),
        True,
    )


def check_forms(problem: Problem) -> None:
    """Run `check` over every choice of a form for each read: a value added after a read follows from its form."""
    mesh, chain, offered, tokens, slices_copy = problem
    single = set()
    for chosen in itertools.product(range(len(chain.forms)), repeat=len(chain.reads)):
        reads = (replace(chain.forms[f][i], deltas=chain.forms[b][i].deltas) for i, f, b in _steps(chosen))
        single.add(Chain(tuple(reads), chain.width, chain.element_bytes))
    best = min(minimum(mesh, one, offered, tokens, slices_copy) for one in single)
    planner = Planner(mesh, chain, [m.offer() for m in offered], slices_copy=slices_copy)
    try:
        plan = planner.plan((tokens,) * mesh.attn_dp)
    except (LayoutError, PlacementError):
        assert best == math.inf
        return
    assert plan.us == pytest.approx(best)
    assert Chain(tuple(r.read for r in plan.reads), chain.width, chain.element_bytes) in single
    assert price(plan, offered, slices_copy) == pytest.approx(plan.us)


def _steps(chosen: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """(a read, its form, the form of the read before)."""
    return zip(range(len(chosen)), chosen, (0, *chosen), strict=False)


@given(problems_with_forms())
@settings(max_examples=60, deadline=None)
def test_no_choice_of_forms_is_cheaper(problem: Problem) -> None:
    check_forms(problem)


def test_forms_that_leave_other_deltas_are_two() -> None:
    """Alike in what is read: in one the sum over all ranks is still to be made, in the other nothing is."""
    mesh, machine = Mesh(2, 1, 2, 1), Machine("one", ALL, True, 2.0, 0.5, 1e2, 4.0, 50.0)
    whole, owed = mesh.placement(Rows.WORLD), mesh.placement(Rows.WORLD, "world")
    first = Read("layers.0.norm", whole, (whole,))
    forms = [(first, Read("layers.1.norm", whole, (left,))) for left in (owed, whole)]
    for several in (forms, forms[::-1]):
        check_forms((mesh, Chain(several[0], WIDTH, ELEMENT_BYTES, (several[1],)), [machine], 8, True))


@pytest.mark.parametrize("mesh", [*layouts(7), *OVER_HOSTS, *UNEVEN_OVER_HOSTS, *EIGHT_OVER_HOSTS, *CROSSING], ids=str)
def test_the_legal_steps_are_those_of_the_algebra(mesh: Mesh) -> None:
    w = world(mesh)
    theirs = {(e.kind, w.value(e.src), w.value(e.dst)) for edges in legal_edges(mesh).values() for e in edges}
    assert theirs == {(h.kind, h.src, h.dst) for hops in w.hops.values() for h in hops}


SHM = Machine("shm", ALL, True, 1.5, 0.5, 12e3, 4.0, 8e3, max_hosts=1)
GLOO = Machine("gloo", BASIC, False, 300.0, 300.0, 1e3, 4.0, 8e3, network=(300.0, 300.0, 1e3))


SMALLEST = CROSSING[1], CROSSING[3]
"""One of each kind, by day."""


@pytest.mark.parametrize(
    "mesh", [pytest.param(m, marks=[pytest.mark.nightly] * (m not in SMALLEST)) for m in CROSSING], ids=str
)
def test_steps_over_groups_that_cross_others_save_where_hosts_cross_attn_tp_alone(mesh: Mesh) -> None:
    """Plans of a model with experts have no such steps: they cost nothing but where hosts cut DP groups in two."""
    group, world_rows = mesh.placement(Rows.GROUP), mesh.placement(Rows.WORLD)
    attention = Read("layers.0.mlp_norm", world_rows, (mesh.placement(Rows.GROUP, "attn_tp"),))
    experts = Read("layers.1.attn_norm", group, (mesh.placement(Rows.WORLD, "world"),))
    chain = Chain((Read("layers.0.attn_norm", group, (group,)), attention, experts), 4096, 2)
    us = Planner(mesh, chain, [SHM.offer(), GLOO.offer()], slices_copy=False).plan((64,) * mesh.attn_dp).us
    of_host = mesh.world // mesh.hosts
    saved = us / minimum(mesh, chain, [SHM, GLOO], 64, False, crossing=True) - 1
    if of_host % mesh.attn_tp and mesh.attn_tp % of_host:
        assert 0.1 < saved < 0.8
    else:
        assert abs(saved) < 1e-6


def free_epilogues(m: pytest.MonkeyPatch) -> None:
    m.setattr(AlphaBeta, "epilogue_us", lambda *_: 0.0)


def no_epilogue_priced(m: pytest.MonkeyPatch) -> None:
    true = Planner._price

    def priced(self: Planner, edge: Any, counts: int, finish: bool = False) -> tuple[float, str]:
        asked = true(self, edge, counts, finish)
        return asked if asked[1] == "nobody" else true(self, edge, counts)

    m.setattr(Planner, "_price", priced)


def another_offers_local_steps(m: pytest.MonkeyPatch) -> None:
    def local_us(self: Planner, rows: Rows, touches: int, counts: tuple[int, ...]) -> float:
        return self.offers[-1].cost.local_us(touches * self._max_bytes(rows, counts))

    m.setattr(Planner, "_local_us", local_us)


def cheapest_offers_local_steps(m: pytest.MonkeyPatch) -> None:
    def local_us(self: Planner, rows: Rows, touches: int, counts: tuple[int, ...]) -> float:
        return min(o.cost.local_us(touches * self._max_bytes(rows, counts)) for o in self.offers)

    m.setattr(Planner, "_local_us", local_us)


def capacity_for_the_result_only(m: pytest.MonkeyPatch) -> None:
    m.setattr(Planner, "_needed_bytes", lambda self, edge, counts: self._max_bytes(edge.dst, counts))


def capacity_for_the_source_only(m: pytest.MonkeyPatch) -> None:
    m.setattr(Planner, "_needed_bytes", lambda self, edge, counts: self._max_bytes(edge.src, counts))


def rows_of_any_width_are_normalised(m: pytest.MonkeyPatch) -> None:
    true = Planner.__init__

    def init(self: Planner, mesh: Mesh, chain: Chain, offers: list[Offer], **how: Any) -> None:
        true(self, mesh, chain, [replace(o, max_normed_bytes=None) for o in offers], **how)

    m.setattr(Planner, "__init__", init)


def rows_on_the_wire_are_plain(m: pytest.MonkeyPatch) -> None:
    m.setattr(Planner, "_row_bytes", lambda self, wire=None: self.chain.width * self.chain.element_bytes)


def rows_travel_in_a_format_that_some_take_plain(m: pytest.MonkeyPatch) -> None:
    true = Planner._make_delivery
    m.setattr(Planner, "_make_delivery", lambda self, at, wire, plain, tokens: true(self, at, wire, False, tokens))


def rows_never_travel_in_a_format(m: pytest.MonkeyPatch) -> None:
    m.setattr(plan_module, "wire_edges", lambda mesh, wire: {})


def quantising_is_free(m: pytest.MonkeyPatch) -> None:
    m.setattr(Planner, "_format_bytes", lambda *_: 0)


def laying_out_is_free(m: pytest.MonkeyPatch) -> None:
    m.setattr(Planner, "_laid_out_us", lambda *_: 0.0)


def what_is_beside_is_forgotten(m: pytest.MonkeyPatch) -> None:
    true = Wire.row_bytes
    m.setattr(Wire, "row_bytes", lambda self, width: true(Wire(self.format), width))


def adding_is_free(m: pytest.MonkeyPatch) -> None:
    true = Planner._local_us
    m.setattr(Planner, "_local_us", lambda self, rows, touches, counts: touches != 3 and true(self, rows, 2, counts))


def bytes_of_the_first_rank(m: pytest.MonkeyPatch) -> None:
    true = Planner._max_bytes
    m.setattr(Planner, "_max_bytes", lambda self, rows, counts: true(self, rows, counts) // self.mesh.attn_dp)


def rows_of_the_smallest_share(m: pytest.MonkeyPatch) -> None:
    def max_rows(self: Planner, rows: Rows, tokens: int) -> int:
        gathered, groups = self.mesh.gathered(rows), self.mesh.gathered(self.mesh.rows(Rows.GROUP))
        peers = self.mesh.peers(self.mesh.named(gathered & groups), self.mesh.attn_tp - 1)
        own = sum(self.mesh.row_count(Rows.OWN, rank, (tokens,)) for rank in peers)
        return self.mesh.extent(gathered & ~groups) * own

    m.setattr(Planner, "_max_rows", max_rows)


def hosts_are_no_further_apart(m: pytest.MonkeyPatch) -> None:
    m.setattr(Mesh, "hosts_of", lambda self, group: 1)


def groups_of_any_size_are_served(m: pytest.MonkeyPatch) -> None:
    m.setattr(Offer, "serves", lambda self, ranks, hosts: self.max_hosts is None or hosts <= self.max_hosts)


def groups_on_any_hosts_are_served(m: pytest.MonkeyPatch) -> None:
    m.setattr(Offer, "serves", lambda self, ranks, hosts: self.max_ranks is None or ranks <= self.max_ranks)


def rows_are_reordered_for_nothing(m: pytest.MonkeyPatch) -> None:
    m.setattr(Planner, "_reorder_us", lambda self, edge, tokens: 0.0)


def slices_are_always_views(m: pytest.MonkeyPatch) -> None:
    true = Planner._price
    m.setattr(
        Planner, "_price", lambda self, e, *how, **more: true(self, e, *how, **more) if e.moves else (0.0, "local")
    )


def a_norm_after_a_sum_costs_as_any(m: pytest.MonkeyPatch) -> None:
    true = Planner._norm
    m.setattr(Planner, "_norm", lambda self, rows, counts, added: true(self, rows, counts, False))


PLANTED = [
    slices_are_always_views,
    a_norm_after_a_sum_costs_as_any,
    free_epilogues,
    no_epilogue_priced,
    another_offers_local_steps,
    cheapest_offers_local_steps,
    capacity_for_the_result_only,
    capacity_for_the_source_only,
    rows_of_any_width_are_normalised,
    adding_is_free,
    bytes_of_the_first_rank,
    rows_of_the_smallest_share,
    groups_of_any_size_are_served,
    rows_on_the_wire_are_plain,
    rows_travel_in_a_format_that_some_take_plain,
    rows_never_travel_in_a_format,
    quantising_is_free,
    laying_out_is_free,
    what_is_beside_is_forgotten,
]


OF_HOSTS = [hosts_are_no_further_apart, rows_are_reordered_for_nothing, groups_on_any_hosts_are_served]
RARE = {rows_of_any_width_are_normalised, rows_travel_in_a_format_that_some_take_plain, capacity_for_the_source_only}
"""Faults that show in few problems; three quarters of the time of all."""


@pytest.mark.parametrize(
    "plant",
    [
        pytest.param(plant, id=plant.__name__, marks=[pytest.mark.nightly] * (plant in RARE))
        for plant in (*PLANTED, *OF_HOSTS)
    ],
)
def test_a_planted_fault_is_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)

    @given(problems(OVER_HOSTS if plant in OF_HOSTS else layouts(6)))
    @settings(FIXED, max_examples=5000)  # it ends with the first that is found
    def some_problem(problem: Problem) -> None:
        check(problem)

    with pytest.raises(AssertionError):
        some_problem()


def test_many_deltas_are_planned() -> None:
    """A read of every placement that a mesh has, and one of many equal deltas: no search of all orders would end."""
    mesh = Mesh(2, 4, 4, 2)
    every, whole = placements(mesh), mesh.placement(Rows.WORLD)
    assert len(every) > 8
    machine = Machine("one", ALL, True, 2.0, 0.5, 1e4, 4.0, 8e3)
    for deltas in (tuple(every[:8]), (every[-1],) * 40):
        chain = Chain((Read("embed", whole, (whole,)), Read("norm", whole, deltas)), WIDTH, ELEMENT_BYTES)
        plan = Planner(mesh, chain, [machine.offer()]).plan((64, 64))
        assert price(plan, [machine]) == pytest.approx(plan.us)


@pytest.mark.parametrize("mesh", [Mesh(2, 1, 2, 1), Mesh(1, 2, 1, 2), Mesh(2, 2, 2, 2)], ids=str)
def test_four_deltas_as_cheap_as_can_be(mesh: Mesh) -> None:
    legal, machine = placements(mesh), Machine("one", ALL, True, 2.0, 0.5, 1e2, 4.0, 50.0)
    owed = mesh.placement(Rows.WORLD, "world")  # two of it are summed before anything moves
    for deltas in ((legal[-1],) * 4, tuple((legal * 2)[:4]), (owed,) * 2, (owed,) * 3):
        chain = Chain((Read("embed", legal[0], (legal[0],)), Read("norm", legal[0], deltas)), WIDTH, ELEMENT_BYTES)
        check((mesh, chain, [machine], 64, True))
