"""Values that a block settles between ranks: what is exchanged, by which recipes, and what each costs.

A settlement leads from one type of value to another inside a block, so it is no read of the stream and leaves nothing
behind: the cheapest recipe on the cheapest transport is its plan.

| value | from | to | recipe | collectives | between them |
|---|---|---|---|---|---|
| Gather | a rank's rows | the rows of all ranks of the group | all_gatherv | all_gatherv | nothing |
| Merge | all heads of the group over a rank's keys, with log-sum-exp: owes a softmax merge | own heads, complete | ag_rs | all_gatherv of lse, reduce_scatterv | each rank scales its output by its weight, in the output's dtype |
| | | | a2a | all_to_allv of output and lse in one | pack before, combine in rank order and float32 after |
| | | | fused | merge_scatterv | nothing |

Queries of a dcp group, cached tokens that prompts see, logits and best tokens of a split vocabulary (an argmax over
the ranks) are gathers.
"""  # noqa: E501

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weft.place import exchange
from weft.place.cost import Offer
from weft.place.exchange import Exchange
from weft.place.spec import LayoutError, Mesh

LSE_BYTES, UNIT_BYTES = 4, 16


@dataclass(frozen=True, slots=True)
class Gather:
    """Rows of `row_bytes` bytes of each rank, for all ranks of the group. what: names them in plans.

    relaid: the rows that came are copied once more, to be laid out otherwise.
    """

    what: str
    row_bytes: int
    relaid: bool = False

    def bytes(self, rows: int, ranks: int) -> int:
        """Of no tensor of a call more: with every rank's rows, padded to units of 16 bytes."""
        return rows * ranks * (-(-self.row_bytes // UNIT_BYTES) * UNIT_BYTES)


@dataclass(frozen=True, slots=True)
class Merge:
    """Attention outputs of `heads` heads of the dcp group together, `dim` elements of so many bytes each; a row is a
    token.
    """

    heads: int
    dim: int
    element_bytes: int

    @property
    def what(self) -> str:
        """Names it in plans."""
        return "outputs"

    def row_bytes(self) -> int:
        """What a token's outputs and their lse take."""
        return self.heads * (self.dim * self.element_bytes + LSE_BYTES)

    def bytes(self, rows: int, ranks: int) -> int:
        """No tensor of any recipe's calls takes more: with every rank's lse, and padded to units of 16 bytes."""
        head = -(-self.dim * self.element_bytes // UNIT_BYTES) * UNIT_BYTES
        return rows * self.heads * (max(head, ranks * LSE_BYTES) + LSE_BYTES) + 2 * UNIT_BYTES * ranks


Value = Gather | Merge


class Recipe(NamedTuple):
    """One way to settle values of a kind.

    calls: for (value, ranks, rows) its collectives in order, each a kind and the bytes that a rank receives.
    touched: for the same the bytes that each kernel between the collectives goes over. once: touched is that of one
    kernel after all calls, where rows go in several.
    """

    name: str
    calls: Callable[[Value, int, int], list[tuple[str, float]]]
    touched: Callable[[Value, int, int], list[float]]
    once: bool = False


def _gather_calls(value: Value, ranks: int, rows: int) -> list[tuple[str, float]]:
    assert isinstance(value, Gather)
    return [("all_gatherv", float(rows * (ranks - 1) * value.row_bytes))]


def _gather_touched(value: Value, ranks: int, rows: int) -> list[float]:
    assert isinstance(value, Gather)
    return [2.0 * value.row_bytes * rows * ranks] if value.relaid else []


def _outputs(value: Value, rows: int) -> tuple[float, float]:
    """Bytes of a rank's outputs, and of their lse."""
    assert isinstance(value, Merge)
    lses = rows * value.heads * LSE_BYTES
    return rows * value.row_bytes() - lses, lses


def _ag_rs_calls(value: Value, ranks: int, rows: int) -> list[tuple[str, float]]:
    outs, lses = _outputs(value, rows)
    return [("all_gatherv", lses * (ranks - 1.0)), ("reduce_scatterv", outs * (ranks - 1) / ranks)]


def _ag_rs_touched(value: Value, ranks: int, rows: int) -> list[float]:
    outs, lses = _outputs(value, rows)
    return [2 * outs + ranks * lses]


def _at_once(kind: str) -> Callable[[Value, int, int], list[tuple[str, float]]]:
    return lambda value, ranks, rows: [(kind, sum(_outputs(value, rows)) * (ranks - 1) / ranks)]


def _a2a_touched(value: Value, ranks: int, rows: int) -> list[float]:
    whole = sum(_outputs(value, rows))
    return [2 * whole, whole + whole / ranks]


RECIPES: dict[type[Value], tuple[Recipe, ...]] = {
    Gather: (Recipe("all_gatherv", _gather_calls, _gather_touched, once=True),),
    Merge: (
        Recipe("ag_rs", _ag_rs_calls, _ag_rs_touched),
        Recipe("a2a", _at_once("all_to_allv"), _a2a_touched),
        Recipe("fused", _at_once("merge_scatterv"), lambda value, ranks, rows: []),
    ),
}
"""The table of recipes; `weft.comm.settle` has what carries each out."""


def merge_exchanges(ranks: int) -> set[Exchange]:
    """Every exchange by which `ranks` ranks can merge; none for a single one."""
    kinds = (exchange.all_gatherv, exchange.reduce_scatterv, exchange.all_to_allv, exchange.merge_scatterv)
    return {kind(ranks) for kind in kinds} if ranks > 1 else set()


@dataclass(frozen=True, slots=True, eq=False)
class Settled:
    """A recipe for `rows` rows of a value, who carries its collectives out, and predicted time.

    each: rows that a call takes at most; more go in several. Compared by identity, as it is counted by in every layer:
    `Settlements.plan` gives the same one for the same question.
    """

    value: Value
    group: str
    ranks: int
    rows: int
    recipe: Recipe
    transport: str
    us: float
    each: int

    def calls(self, capacity: int, live: int) -> list[tuple[str, int]]:
        """The collectives in order: kind, and bytes that a rank receives. capacity: rows of tensors; live: of these."""
        found: list[tuple[str, int]] = []
        for begin in range(0, capacity, self.each):
            rows = max(0, min(self.each, live - begin))
            found += [(kind, int(moved)) for kind, moved in self.recipe.calls(self.value, self.ranks, rows)]
        return found

    @property
    def bytes(self) -> int:
        """That a rank receives for all rows."""
        return sum(moved for _, moved in self.calls(self.rows, self.rows))

    def brief(self) -> str:
        """In few words, without who carries it out."""
        return self.call_name(" + ".join(kind for kind, _ in self.recipe.calls(self.value, self.ranks, 1)))

    def call_name(self, kind: str) -> str:
        """The same of one of its collectives."""
        by = "" if kind == self.recipe.name else f"{self.recipe.name}: "
        return f"{self.value.what}: {by}{kind} {self.group}"

    def __str__(self) -> str:
        return f"{self.brief()} · {self.transport}"


class Settlements:
    """Plans of the values that blocks of a model settle on a mesh, each for a number of rows.

    Plans are made for rows rounded up to a power of two, so that every rank of a group comes to the same from what all
    know. recipes: which to take of a kind of value, `auto` or left out: whichever costs least.
    """

    def __init__(self, mesh: Mesh, offers: Sequence[Offer], recipes: Mapping[type[Value], str] | None = None):
        self.mesh, self.offers, self._recipes = mesh, tuple(offers), dict(recipes or {})
        for kind, asked in self._recipes.items():
            known = ["auto", *(recipe.name for recipe in RECIPES[kind])]
            if asked not in known:
                raise LayoutError(
                    f"no recipe to {kind.__name__.lower()} is called {asked!r}; there are {', '.join(known)}"
                )
        self._plans: dict[tuple[Value, str, int], Settled] = {}

    def local_us(self, touched: float) -> float:
        """Of a kernel of a rank's own: what the first offer says."""
        return self.offers[0].cost.local_us(touched)

    def plan(self, value: Value, group: str, rows: int) -> Settled:
        """The plan to follow for up to so many rows of each rank of a group: `cheapest` for the rounded rows."""
        most = 1 << max(rows - 1, 0).bit_length()
        found = self._plans.get((value, group, most))
        if found is None:
            found = self._plans[value, group, most] = self.cheapest(value, group, most)
        return found

    def us(self, value: Value, group: str, rows: int) -> float:
        """What just so many rows take; infinite where there is no way."""
        try:
            return self.cheapest(value, group, rows).us
        except LayoutError:
            return math.inf

    def options(self, value: Value, group: str, rows: int) -> list[Settled]:
        """Every recipe on every transport that has it, serves the group and has room for a row; quickest first."""
        ranks, hosts = self.mesh.size(group), self.mesh.hosts_of(group)
        found = []
        for offer in self.offers:
            each = self._most_rows(value, ranks, rows, offer.max_bytes)
            if not each or not offer.serves(ranks, hosts):
                continue
            times = -(-rows // each)
            for recipe in RECIPES[type(value)]:
                calls = recipe.calls(value, ranks, each)
                if offer.kinds.issuperset(kind for kind, _ in calls):
                    us = times * sum(offer.cost.collective_us(kind, ranks, moved, hosts) for kind, moved in calls)
                    touched = recipe.touched(value, ranks, rows if recipe.once else each)
                    us += (1 if recipe.once else times) * sum(map(self.local_us, touched))
                    found.append(Settled(value, group, ranks, rows, recipe, offer.transport, us, each))
        return sorted(found, key=lambda plan: plan.us)

    def _most_rows(self, value: Value, ranks: int, rows: int, max_bytes: int | None) -> int:
        if max_bytes is None:
            return rows
        fixed = value.bytes(0, ranks)
        return int(min(rows, max(0, max_bytes - fixed) // (value.bytes(1, ranks) - fixed)))

    def cheapest(self, value: Value, group: str, rows: int) -> Settled:
        """The cheapest of the options, of the recipe that was asked for, which need not have been measured.

        Raises LayoutError where there is none, with what there is.
        """
        found, asked = self.options(value, group, rows), self._recipes.get(type(value), "auto")
        for plan in found:
            if asked == plan.recipe.name or (asked == "auto" and plan.us < math.inf):
                return plan
        room = ", ".join(f"{o.transport} has max_bytes={o.max_bytes}" for o in self.offers if o.max_bytes is not None)
        by = "" if asked == "auto" else f" by {asked}"
        untimed = ", none of which weft tune measured here" if found and asked == "auto" else ""
        names = ", ".join(o.transport for o in self.offers)
        raise LayoutError(
            f"nothing that {names} offer(s) settles {value.what}{by} for {rows} rows "
            f"over {group}={self.mesh.size(group)} (a row takes {value.bytes(1, self.mesh.size(group))} bytes"
            + (f"; {room}" if room else "")
            + "); there is "
            + (", ".join(f"{plan.recipe.name} on {plan.transport}" for plan in found) or "none")
            + untimed
        )


@dataclass(frozen=True, slots=True)
class Settlement:
    """A value that a traced model settles. after: how many reads of the stream come before; site: of the last of them.

    packed: the rows of a rank travel as one. asked: only in steps in which a row asks for it.
    """

    after: int
    site: str
    value: Value
    group: str
    packed: bool = False
    asked: bool = False

    def of(self, rows: int) -> tuple[Value, int]:
        """The value that is settled in a step of so many rows, and how many of it."""
        if self.packed and isinstance(self.value, Gather):
            return Gather(self.value.what, self.value.row_bytes * rows), 1
        return self.value, rows
