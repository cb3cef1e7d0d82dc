"""Plans of the values that blocks settle between ranks: the exchange, the recipes, and their costs.

A settlement turns a value into one of another type inside a block. It is no read of the stream and leaves no debt, so
its plan is the cheapest recipe on the cheapest transport. A recipe (`weft.planner.recipes`) may be made of other
values, each of which is settled by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from weft.planner.cost import Offer
from weft.planner.experts import Permute
from weft.planner.recipes import RECIPES, Gather, Recipe, Value
from weft.planner.spec import LayoutError, Mesh

Recipes = Mapping[type[Value], str]
"""The recipe for each kind of value, by name; `auto` or missing: the cheapest."""


@dataclass(frozen=True, slots=True, eq=False)
class Settled:
    """A recipe for `rows` rows of a value, with the transport of its collectives and the predicted time.

    each: maximum rows of a call; more rows go in several calls. parts: of a recipe that is made of other values. It
    compares by identity, as calls in all layers are counted by it: `Settlements.plan` returns the same object for the
    same arguments.
    """

    value: Value
    group: str
    ranks: int
    rows: int
    recipe: Recipe
    transport: str
    us: float
    each: int
    parts: tuple[Settled, ...] = ()

    def steps(self) -> Iterator[Settled]:
        """Itself, or its parts in order, each by one transport or on a rank alone."""
        if not self.parts:
            yield self
        for part in self.parts:
            yield from part.steps()

    def ops(self) -> Iterator[Settled]:
        """Those of its steps that exchange anything."""
        return (step for step in self.steps() if step.kinds)

    @property
    def kinds(self) -> tuple[str, ...]:
        """See `Recipe.kinds`."""
        return self.recipe.kinds(self.value, self.ranks)

    @property
    def by_counts(self) -> bool:
        """Whether its bytes follow from the rows of all DP groups, and not from the contents of the rows."""
        return isinstance(self.value, Permute)

    def received(self, counts: tuple[int, ...]) -> int:
        """Bytes that the busiest rank receives, for these rows in each DP group if its bytes depend on them."""
        live = self.value.alike(counts) if isinstance(self.value, Permute) else self.rows
        return sum(moved for _, moved in self.calls(self.rows, live))

    def calls(self, capacity: int, live: float) -> list[tuple[str, int]]:
        """The collectives in order: kind, and bytes that a rank receives. capacity: rows of tensors; live: of these."""
        found: list[tuple[str, int]] = []
        for begin in range(0, capacity, self.each):
            rows = max(0, min(self.each, live - begin))
            found += [(kind, int(moved)) for kind, moved in self.recipe.calls(self.value, self.ranks, rows)]
        return found

    @property
    def bytes(self) -> int:
        """Bytes that a rank receives for all rows."""
        return sum(moved for _, moved in self.calls(self.rows, self.rows))

    def brief(self) -> str:
        """The settlement in a few words, without its transport."""
        return self.call_name(" + ".join(self.kinds)) if self.kinds else self.value.what

    def call_name(self, kind: str) -> str:
        """`brief` of one of its collectives."""
        by = "" if kind == self.recipe.name else f"{self.recipe.name}: "
        return f"{self.value.what}: {by}{kind} {self.group}"

    def __str__(self) -> str:
        return f"{self.brief()} · {self.transport}"


class Settlements:
    """Plans of the values that blocks of a model settle on a mesh, each for a number of rows.

    Plans are made for rows rounded up to a power of two, so that all ranks of a group get the same plan from what all
    know. captured: for captured steps, in which only the device knows some sizes.
    """

    def __init__(
        self,
        mesh: Mesh,
        offers: Sequence[Offer],
        recipes: Recipes | None = None,
        captured: bool = False,
    ):
        self.mesh, self.offers, self.recipes, self._captured = mesh, tuple(offers), dict(recipes or {}), captured
        for kind, asked in self.recipes.items():
            known = ["auto", *(recipe.name for recipe in RECIPES[kind])]
            if asked not in known:
                raise LayoutError(
                    f"no recipe to {kind.__name__.lower()} is called {asked!r}; there are {', '.join(known)}"
                )
        self.find, self.naive = lru_cache(1 << 12)(self._find), lru_cache(1 << 12)(self._find_naive)

    def local_us(self, touched: float) -> float:
        """µs of a local kernel, by the first offer."""
        return self.offers[0].cost.local_us(touched)

    def plan(self, value: Value, group: str, rows: int) -> Settled:
        """The plan to follow for up to so many rows of each rank of a group: `cheapest` for the rounded rows."""
        return self.cheapest(value, group, 1 << max(rows - 1, 0).bit_length())

    def _find_naive(self, value: Value, group: str, rows: int) -> Settled:
        """The plan of other engines for so many rows: the first recipe of the table, by the fastest transport.

        It is for comparison and never fails: what no transport offers takes infinitely long, by `nobody`.
        """
        recipe = RECIPES[type(value)][0]
        nobody = Settled(value, group, self.mesh.size(group), rows, recipe, "nobody", math.inf, rows)
        return next((plan for plan in self.options(value, group, rows) if plan.recipe is recipe), nobody)

    def options(self, value: Value, group: str, rows: int) -> list[Settled]:
        """All recipes on all transports that have them, serve the group and have the capacity for a row; fastest first.

        A recipe that is made of other values takes the cheapest plan of each, on any transport.
        """
        ranks, hosts = self.mesh.size(group), self.mesh.hosts_of(group)
        found = []
        for recipe in RECIPES[type(value)]:
            if recipe.parts is not None:
                parts = [self.find(part, group, n) for part, n in recipe.parts(value, ranks, rows)]
                some = tuple(filter(None, parts))
                if len(some) == len(parts):
                    us = sum(part.us for part in some)
                    found.append(Settled(value, group, ranks, rows, recipe, "", us, rows, some))
                continue
            for offer in self.offers:
                each = self._max_rows(value, ranks, rows, offer.max_bytes)
                able = self._has(offer, recipe, value, ranks) and offer.serves(ranks, hosts)
                if not able or not each or (recipe.whole and each < rows):
                    continue
                us, cuts = 0.0, [(times, part) for times, part in ((rows // each, each), (1, rows % each)) if part]
                for times, part in cuts:
                    moves = recipe.calls(value, ranks, part)
                    us += times * sum(offer.cost.collective_us(kind, ranks, moved, hosts) for kind, moved in moves)
                for times, part in [(1, rows)] if recipe.once else cuts:
                    us += times * sum(map(self.local_us, recipe.touched(value, ranks, part)))
                by = offer.transport if recipe.kinds(value, ranks) else "local"
                found.append(Settled(value, group, ranks, rows, recipe, by, us, each))
        return sorted(found, key=lambda plan: plan.us)

    def _has(self, offer: Offer, recipe: Recipe, value: Value, ranks: int) -> bool:
        counting = offer.live_sizes or not (recipe.live and self._captured)
        counting &= offer.live_sizes or not (isinstance(value, Gather) and value.live)
        return counting and offer.kinds.issuperset(recipe.kinds(value, ranks))

    def _max_rows(self, value: Value, ranks: int, rows: int, max_bytes: int | None) -> int:
        if max_bytes is None or value.bytes(rows, ranks) <= max_bytes:
            return rows
        fixed = value.bytes(0, ranks)
        return int(min(rows, max(0, max_bytes - fixed) // (value.bytes(1, ranks) - fixed)))

    def _find(self, value: Value, group: str, rows: int) -> Settled | None:
        """The cheapest option of the requested recipe, which need not have been measured; None where there is none."""
        asked = self.recipes.get(type(value), "auto")
        for plan in self.options(value, group, rows):
            if asked == plan.recipe.name or (asked == "auto" and plan.us < math.inf):
                return plan
        return None

    def cheapest(self, value: Value, group: str, rows: int) -> Settled:
        """The plan of `_find`. Raises LayoutError where there is none, and says which there are."""
        found = self.find(value, group, rows)
        if found is None:
            raise LayoutError(self._refusal(value, group, rows))
        return found

    def _refusal(self, value: Value, group: str, rows: int, of: str = "") -> str:
        """of: the value that it is part of."""
        asked, ranks, hosts = self.recipes.get(type(value), "auto"), self.mesh.size(group), self.mesh.hosts_of(group)
        recipes = [recipe for recipe in RECIPES[type(value)] if asked in ("auto", recipe.name)]
        for part, n in recipes[0].parts(value, ranks, rows) if recipes[0].parts else ():
            if self.find(part, group, n) is None:
                return self._refusal(part, group, n, f" of {value.what}")
        kinds = " or ".join(" + ".join(recipe.kinds(value, ranks)) for recipe in recipes)
        kinds += " with row counts on the device" * (recipes[0].live and self._captured)
        whole, takes = recipes[0].whole, value.bytes(rows if recipes[0].whole else 1, ranks)
        why = [f"{f'{rows} rows take' if whole else 'a row takes'} {takes} bytes"] if takes else []
        for offer in self.offers:
            if not offer.serves(ranks, hosts):
                why.append(f"{offer.transport} serves fewer ranks or hosts")
            elif not any(self._has(offer, recipe, value, ranks) for recipe in recipes):
                why.append(f"{offer.transport} has no {kinds}")
            elif offer.max_bytes is not None:
                why.append(f"{offer.transport} has max_bytes={offer.max_bytes}")
        found, names = self.options(value, group, rows), ", ".join(offer.transport for offer in self.offers)
        by, because = "" if asked == "auto" else f" by {asked}", f" ({'; '.join(why)})" if why else ""
        return (
            f"nothing that {names} offer(s) settles {value.what}{of}{by} for {rows} rows "
            f"over {group}={ranks}{because}; there is "
            + (", ".join(f"{plan.recipe.name} on {plan.transport}" for plan in found) or "none")
            + (", none of which weft tune measured here" if found and asked == "auto" else "")
            + ("; leave --moe-exchange at auto, or plan for fewer tokens" if whole else "")
        )


@dataclass(frozen=True, slots=True)
class Settlement:
    """A value that a block settles after it has read the stream.

    packed: the rows of a rank travel as one. asked: only in steps in which a row asks for it. spares: without it, the
    value that rows ask for would be settled in all steps.
    """

    value: Value
    group: str
    packed: bool = False
    asked: bool = False
    spares: bool = False

    def of(self, tokens: int) -> tuple[Value, str, int]:
        """In a step of so many tokens in each DP group: the value, its group, and the number of its rows."""
        if self.packed and isinstance(self.value, Gather):
            return replace(self.value, row_bytes=self.value.row_bytes * tokens), self.group, 1
        return self.value, self.group, tokens


def by_default(settles: Sequence[Settlement]) -> tuple[Settlement, ...]:
    """The settlements that other engines run in all steps: those that only some rows ask for, and none that spares
    them."""
    return tuple(replace(settlement, asked=False) for settlement in settles if not settlement.spares)
