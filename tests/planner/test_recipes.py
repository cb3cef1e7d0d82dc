"""Exchanges of blocks against every possible way, on worlds of up to 6 ranks and 8 on hosts; and a wrong one would be
found out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import small_config

from planner import recipes
from planner.exhaustive import Machine, minimum
from planner.meshes import layouts
from planner.recipes import Priced, Wanted, priced
from planner.test_exhaustive import ALL
from weft.engine.models.registry import load_config, registry
from weft.engine.worker.planning import trace
from weft.planner import recipes as table
from weft.planner import vocabulary
from weft.planner.chain import Chain, Read
from weft.planner.cost import Offer
from weft.planner.op import BlockOp, BlockValue
from weft.planner.plan import Plan, Planner
from weft.planner.prices import BlockPrices
from weft.planner.recipes import Gather, Merge, Recipe, Value
from weft.planner.spec import LayoutError, Mesh, PlacementError, Rows

SETTLES = frozenset({"all_gatherv", "reduce_scatterv", "all_to_allv", "merge_scatterv"})
RECIPES = {
    "ag_rs": ("all_gatherv", "reduce_scatterv"),
    "a2a": ("all_to_allv",),
    "fused": ("merge_scatterv",),
}
"""The collectives of each recipe of a merge."""
MESHES = tuple(
    replace(mesh, dcp=dcp, hosts=hosts)
    for mesh in layouts(8)
    for hosts in range(1, mesh.world + 1)
    for dcp in range(1, mesh.attn_tp + 1)
    if mesh.attn_tp > 1 and mesh.attn_tp % dcp == 0 and mesh.world % hosts == 0 and (mesh.world <= 6 or hosts == 2)
)
"""Meshes of 8 ranks are on 2 hosts: 2 × 2 × 2 is among them."""
ON_ONE = tuple(mesh for mesh in MESHES if mesh.hosts == 1)


@dataclass(frozen=True)
class Problem:
    """A value on a mesh, in a step of `rows` rows of each DP group. recipe: to take; `auto`: the cheapest.

    heads, dim, element_bytes: of attention on a rank; tokens: of the vocabulary.
    """

    mesh: Mesh
    what: str
    rows: int
    heads: int
    dim: int
    element_bytes: int
    tokens: int
    machines: tuple[Machine, ...] = ()
    recipe: str = "auto"

    @property
    def group(self) -> str:
        return "dcp" if self.what in ("outputs", "queries") else "attn_tp"

    @property
    def ranks(self) -> int:
        return self.mesh.dcp if self.group == "dcp" else self.mesh.attn_tp

    @property
    def bucket(self) -> int:
        """The rows that it is planned for."""
        return next(n for n in (1 << i for i in range(10)) if n >= self.rows)

    def value(self) -> BlockValue:
        """Return the value of a traced model."""
        if self.what == "best tokens":
            return BlockValue(vocabulary.best_tokens(1), self.group, packed=True, spares=True)
        if self.what == "logits":
            return BlockValue(vocabulary.logit_rows(self.tokens, self.ranks), self.group, optional=True)
        if self.what == "queries":
            row_bytes = self.heads * self.dim * self.element_bytes
            return BlockValue(Gather(self.what, row_bytes, relaid=True), self.group)
        return BlockValue(Merge(self.heads * self.ranks, self.dim, self.element_bytes), self.group)

    @cached_property
    def wanted(self) -> Wanted:
        """Return the value as the oracle takes it."""
        if self.what == "best tokens":
            return recipes.best_tokens(self.ranks, self.bucket)
        if self.what == "logits":
            return recipes.logits(self.ranks, self.tokens)
        of = recipes.queries if self.what == "queries" else recipes.attention
        return of(self.ranks, self.heads, self.dim, self.element_bytes)

    @cached_property
    def options(self) -> list[Priced]:
        rows = 1 if self.what == "best tokens" else self.bucket
        return priced(self.mesh, self.group, self.wanted, rows, list(self.machines))


def some_machines(chance: Random) -> tuple[Machine, ...]:
    """One or two transports, some of which lack a kind, have little capacity, or do not serve large groups or hosts."""
    found = []
    for name in chance.choice([["one"], ["one", "two"]]):
        network = chance.uniform(0.1, 300), chance.uniform(0, 50), 10 ** chance.uniform(0, 4)
        machine = Machine(
            name,
            kinds=chance.choice([SETTLES, SETTLES, *(SETTLES - {kind} for kind in sorted(SETTLES))]),
            fused=False,
            call_us=10 ** chance.uniform(-1, 2.5),
            doubling_us=chance.uniform(0, 50),
            bytes_us=10 ** chance.uniform(0, 4),
            local_us=10 ** chance.uniform(-1, 1.5),
            local_bytes_us=10 ** chance.uniform(0, 4),
            capacity=chance.choice([None, None, 64, 256, 1024, 4096, 16384]),
            max_ranks=chance.choice([None, None, None, 2]),
            max_hosts=chance.choice([None, None, 1]),
            network=chance.choice([None, network, network]),
        )
        found.append(machine)
    return tuple(found)


def a_problem(chance: Random) -> Problem:
    """Attention over dcp, queries for it, best tokens or logits of a vocabulary; the latter over attn_tp."""
    mesh = chance.choice(chance.choice([ON_ONE, MESHES]))
    what = chance.choice(["outputs", "outputs", "queries"] if mesh.dcp > 1 else ["best tokens", "logits"])
    return Problem(
        mesh,
        what,
        rows=chance.choice([1, 2, 3, 8, 20, 64]),
        heads=chance.randint(1, 3),
        dim=chance.choice([1, 3, 8, 64]),
        element_bytes=chance.choice([2, 4]),
        tokens=chance.randint(mesh.attn_tp, 99),
        machines=some_machines(chance),
        recipe=chance.choice(["auto", *RECIPES]) if what == "outputs" else "auto",
    )


def prices_of(problem: Problem) -> BlockPrices:
    return BlockPrices(problem.mesh, [m.offer() for m in problem.machines], {Merge: problem.recipe})


def check(problem: Problem) -> None:
    """The plan is a way that there is, takes what that takes, and none takes less; what is refused cannot be."""
    best = recipes.minimum(problem.options, RECIPES.get(problem.recipe))
    asked = problem.value().of(problem.rows if problem.what != "best tokens" else problem.bucket)
    try:
        op = prices_of(problem).plan(*asked)
    except LayoutError:
        assert best is None
        return
    assert best is not None and op.us == pytest.approx(best)
    check_op(op, problem.options)
    assert problem.recipe in ("auto", op.recipe.name)


def check_op(op: BlockOp, options: list[Priced]) -> None:
    """Its transport goes such a way, in as many calls of as many bytes, and in the time that it says."""
    kinds = RECIPES.get(op.recipe.name, ("all_gatherv",))
    option = next((option for option in options if (option.kinds, option.transport) == (kinds, op.transport)), None)
    assert option is not None, "no such way is legal"
    assert op.us == pytest.approx(option.us) and op.max_call_rows == option.max_call_rows
    assert op.calls(op.rows, op.rows) == list(option.calls)
    assert op.bytes == sum(size for _, size in option.calls)


@given(st.integers(0, 1 << 32))
@settings(max_examples=300, deadline=None)
def test_no_recipe_is_cheaper(seed: int) -> None:
    check(a_problem(Random(seed)))


def test_the_options_are_the_recipes_of_the_table() -> None:
    """Tried out from what ranks hold, with no list of recipes; each rank then has its own heads over all keys."""
    for n in (2, 3, 4):
        for wanted in (recipes.attention(n, 2, 3, 2), recipes.queries(n, 2, 3, 2)):
            found = {tuple(step.kind for step in option) for option in recipes.options(wanted)}
            merges = {
                ("all_gatherv", None, "reduce_scatterv"),
                (None, "all_to_allv", None),
                ("merge_scatterv",),
                ("all_gatherv", None, "all_to_allv", None),  # gathers what it then has no use for
            }
            assert found == ({("all_gatherv",)} if wanted.relaid else merges)


@pytest.mark.parametrize(
    "family, of_query, of_value", [("deepseek_v2", 6 + 4, 5), ("qwen2_moe", 4, 4), ("qwen3", 8, 8)]
)
def test_models_exchange_what_problems_have(family: str, of_query: int, of_value: int, tmp_path: Path) -> None:
    """Each of four ranks has two of eight heads; queries are gathered and outputs merged in each of three layers."""
    small_config(family, 4).save_pretrained(tmp_path)
    config = replace(load_config(tmp_path, registry(())), split_vocabulary=True)
    mesh = Mesh(2, 4, 8, 1, dcp=2)
    wanted = [("queries", of_query), ("outputs", of_value)] * 3 + [("best tokens", 0), ("logits", 0)]
    problems = [Problem(mesh, what, 1, heads=2, dim=dim, element_bytes=2, tokens=61) for what, dim in wanted]
    found = trace(config, mesh, torch.bfloat16).inside
    assert list(found) == [problem.value() for problem in problems]


Model = tuple[Mesh, list[tuple[int, Problem]], list[Machine], int]
"""Model of two reads: mesh, exchanges inside, each with the read that it follows, transports, rows per DP group."""


def a_model(chance: Random) -> Model:
    """Queries and outputs after each read, and a vocabulary in the end, each of them or not."""
    mesh = chance.choice([m for m in MESHES if m.dcp > 1 and m.world <= 4])
    tokens, heads, dim = chance.choice([1, 8, 64]), chance.randint(1, 2), chance.choice([2, 16])
    every = [(0, "queries"), (0, "outputs"), (1, "queries"), (1, "outputs"), (1, "best tokens"), (1, "logits")]
    asked = [(read, Problem(mesh, what, tokens, heads, dim, 2, 61)) for read, what in every if chance.random() < 0.5]
    offered = [replace(m, kinds=chance.choice([ALL | SETTLES, ALL])) for m in some_machines(chance)]
    return mesh, asked, offered, tokens


def check_model(model: Model) -> None:
    """A plan costs what its reads and the ops of every step inside blocks cost; it has all of them in their places."""
    mesh, asked, offered, tokens = model
    group, owing = mesh.placement(Rows.GROUP), mesh.placement(Rows.GROUP, "attn_tp")
    inside = [tuple(problem.value() for at, problem in asked if at == read) for read in (0, 1)]
    reads = (Read("first", group, (group,), inside[0]), Read("norm", group, (owing,), inside[1]))
    chain = Chain(reads, 6, 8)
    times, options = [minimum(mesh, chain, offered, tokens, False)], []
    for _, problem in asked:
        options.append(replace(problem, machines=tuple(offered)).options)
        best = recipes.minimum(options[-1])
        times += [math.inf] if best is None else [] if problem.what == "logits" else [best]
    planner = Planner(mesh, chain, [m.offer() for m in offered])
    check_naive(planner.naive((tokens,) * mesh.attn_dp), asked, options)
    try:
        plan = planner.plan((tokens,) * mesh.attn_dp)
    except (LayoutError, PlacementError):
        assert sum(times) == math.inf
        return
    assert plan.us == pytest.approx(sum(times))
    for op, found in zip((s for read in plan.reads for s in read.inside), options, strict=True):
        check_op(op, found)
        assert op.us == pytest.approx(recipes.minimum(found))
    inside = [(site, op.value.what) for site, op in plan.ops() if isinstance(op, BlockOp)]
    assert inside == [(reads[read].site, problem.what) for read, problem in asked]


def check_naive(plan: Plan, asked: list[tuple[int, Problem]], options: list[list[Priced]]) -> None:
    """Attention is merged by ag_rs, all logits are gathered in every step, and what nobody offers takes for ever."""
    times = []
    inside = [op for read in plan.reads for op in read.inside]
    of_every_step = [(problem.what, found) for (_, problem), found in zip(asked, options, strict=True)]
    of_every_step = [(what, found) for what, found in of_every_step if what != "best tokens"]
    for each, (what, found) in zip(inside, of_every_step, strict=True):
        best = recipes.minimum(found, RECIPES["ag_rs"] if what == "outputs" else ("all_gatherv",))
        times.append(math.inf if best is None else best)
        assert (each.value.what, each.optional) == (what, False) and each.us == pytest.approx(times[-1])
        assert (each.transport == "nobody") == (best is None) and each.recipe.name in ("ag_rs", "all_gatherv")
    assert plan.us == pytest.approx(sum(step.us for read in plan.reads for step in read.steps) + sum(times))


@given(st.integers(0, 1 << 32))
@settings(max_examples=60, deadline=None)
def test_no_plan_of_a_step_that_exchanges_inside_is_cheaper(seed: int) -> None:
    check_model(a_model(Random(seed)))


# --- planted faults -----------------------------------------------------------------------------------------------

Plant = Callable[[pytest.MonkeyPatch], None]


def recipe_changed(name: str, change: Callable[[Recipe], Recipe]) -> Plant:
    def plant(m: pytest.MonkeyPatch) -> None:
        for kind, known in table.RECIPES.items():
            changed = tuple(change(recipe) if recipe.name == name else recipe for recipe in known)
            m.setitem(table.RECIPES, kind, changed)

    return plant


def calls_changed(change: Callable[[list[tuple[str, float]], int], list[tuple[str, float]]]) -> Any:
    def changed(recipe: Recipe) -> Recipe:
        return recipe._replace(calls=lambda value, n, rows: change(recipe.calls(value, n, rows), n))

    return changed


def kernels_changed(change: Callable[[list[float]], list[float]]) -> Any:
    def changed(recipe: Recipe) -> Recipe:
        return recipe._replace(touched=lambda value, n, rows: change(recipe.touched(value, n, rows)))

    return changed


def offers_changed(change: Callable[[Offer], Offer]) -> Plant:
    def plant(m: pytest.MonkeyPatch) -> None:
        true = BlockPrices.__init__

        def init(self: BlockPrices, mesh: Mesh, offers: Any, *more: Any, **named: Any) -> None:
            true(self, mesh, [change(offer) for offer in offers], *more, **named)

        m.setattr(BlockPrices, "__init__", init)

    return plant


def method_changed(kind: type, name: str, changed: Any) -> Plant:
    return lambda m: m.setattr(kind, name, changed)


def first_that_is_found(self: BlockPrices, value: Value, group: str, rows: int) -> list[BlockOp]:
    return sorted(TRUE_OPTIONS(self, value, group, rows), key=lambda plan: plan.recipe.name)


def whole_capacity(self: BlockPrices, value: Value, ranks: int, rows: int, max_bytes: int | None) -> int:
    return rows if max_bytes is None or value.bytes(1, ranks) <= max_bytes else 0


TRUE_OPTIONS, TRUE_MAX = BlockPrices.options, BlockPrices._max_rows
PLANTED: dict[str, Plant] = {
    "ag_rs forgets the lse": recipe_changed("ag_rs", calls_changed(lambda calls, n: [(calls[0][0], 0.0), calls[1]])),
    "ag_rs scatters the outputs of all": recipe_changed(
        "ag_rs", calls_changed(lambda calls, n: [calls[0], (calls[1][0], calls[1][1] * n)])
    ),
    "ag_rs is one collective": recipe_changed("ag_rs", calls_changed(lambda calls, n: calls[1:])),
    "ag_rs scales for nothing": recipe_changed("ag_rs", kernels_changed(lambda touched: [])),
    "a2a receives its own part": recipe_changed(
        "a2a", calls_changed(lambda calls, n: [(kind, moved * n / (n - 1)) for kind, moved in calls])
    ),
    "a2a packs for nothing": recipe_changed("a2a", kernels_changed(lambda touched: touched[1:])),
    "a2a combines for nothing": recipe_changed("a2a", kernels_changed(lambda touched: touched[:1])),
    "a2a is offered with all_gatherv": recipe_changed(
        "a2a", calls_changed(lambda calls, n: [("all_gatherv", moved) for _, moved in calls])
    ),
    "fused receives from one rank": recipe_changed(
        "fused", calls_changed(lambda calls, n: [(kind, moved / (n - 1)) for kind, moved in calls])
    ),
    "fused takes a kernel": recipe_changed("fused", kernels_changed(lambda touched: [0.0])),
    "gathers receive their own rows": recipe_changed(
        "all_gatherv", calls_changed(lambda calls, n: [(kind, moved * n / (n - 1)) for kind, moved in calls])
    ),
    "queries lie as they came": recipe_changed("all_gatherv", kernels_changed(lambda touched: [])),
    "queries are laid out in every call": recipe_changed("all_gatherv", lambda recipe: recipe._replace(once=False)),
    "a transport has every kind": offers_changed(lambda offer: replace(offer, kinds=SETTLES)),
    "a transport has the second of two": offers_changed(
        lambda offer: replace(offer, kinds=offer.kinds | {"reduce_scatterv"})
    ),
    "max_bytes is ignored": offers_changed(lambda offer: replace(offer, max_bytes=None)),
    "a call of one row has the capacity, so all have": method_changed(BlockPrices, "_max_rows", whole_capacity),
    "max_ranks is ignored": offers_changed(lambda offer: replace(offer, max_ranks=None)),
    "max_hosts is ignored": offers_changed(lambda offer: replace(offer, max_hosts=None)),
    "hosts are no further apart": method_changed(Mesh, "hosts_of", lambda self, group: 1),
    "the last offer prices kernels": method_changed(
        BlockPrices, "local_us", lambda self, touched: self.offers[-1].cost.local_us(touched)
    ),
    "the first that is found": method_changed(BlockPrices, "options", first_that_is_found),
    "rows are not rounded": method_changed(
        BlockPrices, "plan", lambda self, value, group, rows: self.cheapest(value, group, rows)
    ),
    "a recipe is not what was asked for": lambda m: m.setattr(
        "planner.test_recipes.prices_of",
        lambda problem: BlockPrices(problem.mesh, [machine.offer() for machine in problem.machines]),
    ),
    "best tokens come without scores": lambda m: m.setattr(vocabulary, "BEST_BYTES", 4),
    "logits of the shortest run": lambda m: m.setattr(
        vocabulary, "logit_rows", lambda tokens, ranks: Gather("logits", tokens // ranks * 4)
    ),
    "logits in two bytes": lambda m: m.setattr(vocabulary, "LOGIT_BYTES", 2),
    "an lse in two bytes": lambda m: m.setattr(table, "LSE_BYTES", 2),
    "rows are not padded": lambda m: m.setattr(table, "UNIT_BYTES", 1),
    "best tokens travel row by row": method_changed(
        BlockValue, "of", lambda self, rows: (self.value, self.group, rows)
    ),
}


@cache
def some(make: Callable[[Random], Any], count: int) -> list[Any]:
    """So many problems or models, always the same."""
    return [make(Random(seed)) for seed in range(count)]


@pytest.mark.parametrize("plant", PLANTED.values(), ids=PLANTED)
def test_a_planted_fault_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        for problem in some(a_problem, 2000):
            check(problem)


def asked_in_every_step(
    self: Planner, values: tuple[BlockValue, ...], tokens: int
) -> tuple[float, tuple[BlockOp, ...]]:
    _, ops = TRUE_INSIDE(self, values, tokens)
    return sum(op.us for op in ops), ops


def nothing_inside(self: Planner, values: tuple[BlockValue, ...], tokens: int) -> tuple[float, tuple[BlockOp, ...]]:
    us, ops = TRUE_INSIDE(self, values, tokens)
    return us if us == math.inf else 0.0, ops


TRUE_INSIDE, TRUE_OF = Planner._find_inside, BlockValue.of
OF_STEPS: dict[str, Plant] = {
    "logits are paid in every step": method_changed(Planner, "_find_inside", asked_in_every_step),
    "what blocks exchange is free": method_changed(Planner, "_find_inside", nothing_inside),
    "every step exchanges one row": method_changed(BlockValue, "of", lambda self, rows: TRUE_OF(self, 1)),
}


@pytest.mark.parametrize("plant", OF_STEPS.values(), ids=OF_STEPS)
def test_a_fault_of_a_whole_step_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        for model in some(a_model, 100):
            check_model(model)


def test_without_a_fault_none_is_found() -> None:
    for problem in some(a_problem, 2000):
        check(problem)
    for model in some(a_model, 100):
        check_model(model)
