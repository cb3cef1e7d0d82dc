"""Values that a block settles between ranks: what is exchanged, by which recipes, and what each costs.

A settlement leads from one type of value to another inside a block, so it is no read of the stream and leaves nothing
behind: the cheapest recipe on the cheapest transport is its plan. A recipe may be made of other values, each of which is
settled by itself.

| value | from | to | recipe | collectives | between them |
|---|---|---|---|---|---|
| Gather | a rank's rows | the rows of all ranks of the group | all_gatherv | all_gatherv | nothing |
| Merge | all heads of the group over a rank's keys, with log-sum-exp: owes a softmax merge | own heads, complete | ag_rs | all_gatherv of lse, reduce_scatterv | each rank scales its output by its weight, in the output's dtype |
| | | | a2a | all_to_allv of output and lse in one | pack before, combine in rank order and float32 after |
| | | | fused | merge_scatterv | nothing |
| Permute | rows of each rank for others | those that others have for it | all_to_allv | all_to_allv | nothing |
| Kernel | what lies on a rank | what it makes of it | local | none | itself |
| Dispatch | own rows, whose experts are anywhere | own rows, with their experts' sums | all_to_allv | three Permutes: counts, rows with their experts, results | two Kernels: pack before, add after |

Queries of a dcp group, cached tokens that prompts see, logits and best tokens of a split vocabulary (an argmax over
the ranks) are gathers.
"""  # noqa: E501

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from weft.place import exchange
from weft.place.cost import Offer
from weft.place.exchange import Exchange
from weft.place.experts import Dispatch, Kernel, Permute
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


Value = Gather | Merge | Permute | Kernel | Dispatch
Calls = list[tuple[str, float]]
"""Collectives in order: each a kind and the bytes that a rank receives."""


class Recipe(NamedTuple):
    """One way to settle values of a kind.

    calls: its collectives for (value, ranks, rows). touched: for the same the bytes that each kernel between them goes
    over. once: touched is that of one kernel after all calls, where rows go in several. whole: rows never do. live: in
    a captured step only the device knows the sizes, so transports must take `LiveSizes`. parts: the values that it is
    made of, for (value, ranks); it has no calls of its own then.
    """

    name: str
    calls: Callable[[Any, int, float], Calls] = lambda value, ranks, rows: []
    touched: Callable[[Any, int, int], list[float]] = lambda value, ranks, rows: []
    once: bool = False
    whole: bool = False
    live: bool = False
    parts: Callable[[Any, int], Sequence[Value]] | None = None


def _gather_calls(value: Gather, ranks: int, rows: float) -> Calls:
    return [("all_gatherv", rows * (ranks - 1) * value.row_bytes)]


def _gather_touched(value: Gather, ranks: int, rows: int) -> list[float]:
    return [2.0 * value.row_bytes * rows * ranks] if value.relaid else []


def _outputs(value: Merge, rows: float) -> tuple[float, float]:
    """Bytes of a rank's outputs, and of their lse."""
    lses = rows * value.heads * LSE_BYTES
    return rows * value.row_bytes() - lses, lses


def _ag_rs_calls(value: Merge, ranks: int, rows: float) -> Calls:
    outs, lses = _outputs(value, rows)
    return [("all_gatherv", lses * (ranks - 1.0)), ("reduce_scatterv", outs * (ranks - 1) / ranks)]


def _ag_rs_touched(value: Merge, ranks: int, rows: int) -> list[float]:
    outs, lses = _outputs(value, rows)
    return [2 * outs + ranks * lses]


def _at_once(kind: str) -> Callable[[Merge, int, float], Calls]:
    return lambda value, ranks, rows: [(kind, sum(_outputs(value, rows)) * (ranks - 1) / ranks)]


def _a2a_touched(value: Merge, ranks: int, rows: int) -> list[float]:
    whole = sum(_outputs(value, rows))
    return [2 * whole, whole + whole / ranks]


def _permute_calls(value: Permute, ranks: int, tokens: float) -> Calls:
    return [("all_to_allv", (ranks - 1) * (value.fixed_bytes + tokens / value.shared * value.row_bytes))]


def _kernel_touched(value: Kernel, ranks: int, tokens: int) -> list[float]:
    return [-(-tokens // value.shared) * value.row_bytes, *[0.0] * value.launches]


RECIPES: dict[type[Value], tuple[Recipe, ...]] = {
    Gather: (Recipe("all_gatherv", _gather_calls, _gather_touched, once=True),),
    Merge: (
        Recipe("ag_rs", _ag_rs_calls, _ag_rs_touched),
        Recipe("a2a", _at_once("all_to_allv"), _a2a_touched),
        Recipe("fused", _at_once("merge_scatterv")),
    ),
    Permute: (Recipe("all_to_allv", _permute_calls, whole=True, live=True),),
    Kernel: (Recipe("local", touched=_kernel_touched),),
    Dispatch: (Recipe("all_to_allv", parts=Dispatch.parts),),
}
"""The table of recipes; `weft.comm.settle` has what carries each out."""


def merge_exchanges(ranks: int) -> set[Exchange]:
    """Every exchange by which `ranks` ranks can merge; none for a single one."""
    kinds = (exchange.all_gatherv, exchange.reduce_scatterv, exchange.all_to_allv, exchange.merge_scatterv)
    return {kind(ranks) for kind in kinds} if ranks > 1 else set()


@dataclass(frozen=True, slots=True, eq=False)
class Settled:
    """A recipe for `rows` rows of a value, who carries its collectives out, and predicted time.

    each: rows that a call takes at most; more go in several. parts: of a recipe that is made of other values. Compared
    by identity, as it is counted by in every layer: `Settlements.plan` gives the same one for the same question.
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
        """What it is made of, in order: itself, or its parts, each by one transport or on a rank alone."""
        if not self.parts:
            yield self
        for part in self.parts:
            yield from part.steps()

    def ops(self) -> Iterator[Settled]:
        """Those of its steps that exchange anything."""
        return (step for step in self.steps() if step.kinds)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of its collectives, where nothing goes in several calls."""
        return tuple(kind for kind, _ in self.recipe.calls(self.value, self.ranks, 1))

    @property
    def by_counts(self) -> bool:
        """Whether its bytes follow from the rows of all DP groups, and not from what the rows are."""
        return isinstance(self.value, Permute)

    def received(self, counts: tuple[int, ...]) -> int:
        """Bytes that the busiest rank receives, for these rows in each DP group if it goes by them."""
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
        """That a rank receives for all rows."""
        return sum(moved for _, moved in self.calls(self.rows, self.rows))

    def brief(self) -> str:
        """In few words, without who carries it out."""
        return self.call_name(" + ".join(self.kinds)) if self.kinds else self.value.what

    def call_name(self, kind: str) -> str:
        """The same of one of its collectives."""
        by = "" if kind == self.recipe.name else f"{self.recipe.name}: "
        return f"{self.value.what}: {by}{kind} {self.group}"

    def __str__(self) -> str:
        return f"{self.brief()} · {self.transport}"


class Settlements:
    """Plans of the values that blocks of a model settle on a mesh, each for a number of rows.

    Plans are made for rows rounded up to a power of two, so that every rank of a group comes to the same from what all
    know. recipes: which to take of a kind of value, `auto` or left out: whichever costs least. captured: of steps that
    are, where some sizes only the device knows.
    """

    def __init__(
        self,
        mesh: Mesh,
        offers: Sequence[Offer],
        recipes: Mapping[type[Value], str] | None = None,
        captured: bool = False,
    ):
        self.mesh, self.offers, self._recipes, self._captured = mesh, tuple(offers), dict(recipes or {}), captured
        for kind, asked in self._recipes.items():
            known = ["auto", *(recipe.name for recipe in RECIPES[kind])]
            if asked not in known:
                raise LayoutError(
                    f"no recipe to {kind.__name__.lower()} is called {asked!r}; there are {', '.join(known)}"
                )
        self._plans: dict[tuple[Value, str, int], Settled | None] = {}

    def local_us(self, touched: float) -> float:
        """Of a kernel of a rank's own: what the first offer says."""
        return self.offers[0].cost.local_us(touched)

    def plan(self, value: Value, group: str, rows: int) -> Settled:
        """The plan to follow for up to so many rows of each rank of a group: `cheapest` for the rounded rows."""
        return self.planned(value, group, rows) or self.cheapest(value, group, _rounded(rows))

    def planned(self, value: Value, group: str, rows: int) -> Settled | None:
        """The same; None where there is none."""
        key = value, group, _rounded(rows)
        if key not in self._plans:
            self._plans[key] = self.find(*key)
        return self._plans[key]

    def us(self, value: Value, group: str, rows: int) -> float:
        """What just so many rows take; infinite where there is no way."""
        found = self.find(value, group, rows)
        return math.inf if found is None else found.us

    def options(self, value: Value, group: str, rows: int) -> list[Settled]:
        """Every recipe on every transport that has it, serves the group and has room for a row; quickest first.

        Of a recipe that is made of others each is the cheapest, on whichever transport.
        """
        ranks, hosts = self.mesh.size(group), self.mesh.hosts_of(group)
        found = []
        for recipe in RECIPES[type(value)]:
            if recipe.parts is not None:
                parts = [self.find(part, group, rows) for part in recipe.parts(value, ranks)]
                some = tuple(filter(None, parts))
                if len(some) == len(parts):
                    us = sum(part.us for part in some)
                    found.append(Settled(value, group, ranks, rows, recipe, "", us, rows, some))
                continue
            for offer in self.offers:
                each = self._most_rows(value, ranks, rows, offer.max_bytes)
                calls = recipe.calls(value, ranks, each)
                if not each or (recipe.whole and each < rows) or not self._has(offer, recipe, calls):
                    continue
                if not offer.serves(ranks, hosts):
                    continue
                us, cuts = 0.0, [(times, part) for times, part in ((rows // each, each), (1, rows % each)) if part]
                for times, part in cuts:
                    moves = recipe.calls(value, ranks, part)
                    us += times * sum(offer.cost.collective_us(kind, ranks, moved, hosts) for kind, moved in moves)
                for times, part in [(1, rows)] if recipe.once else cuts:
                    us += times * sum(map(self.local_us, recipe.touched(value, ranks, part)))
                by = offer.transport if calls else "local"
                found.append(Settled(value, group, ranks, rows, recipe, by, us, each))
        return sorted(found, key=lambda plan: plan.us)

    def _has(self, offer: Offer, recipe: Recipe, calls: Calls) -> bool:
        counting = offer.live_sizes or not (recipe.live and self._captured)
        return counting and offer.kinds.issuperset(kind for kind, _ in calls)

    def _most_rows(self, value: Value, ranks: int, rows: int, max_bytes: int | None) -> int:
        if max_bytes is None or value.bytes(rows, ranks) <= max_bytes:
            return rows
        fixed = value.bytes(0, ranks)
        return int(min(rows, max(0, max_bytes - fixed) // (value.bytes(1, ranks) - fixed)))

    def find(self, value: Value, group: str, rows: int) -> Settled | None:
        """The cheapest of the options, of the recipe that was asked for, which need not have been measured; or None."""
        asked = self._recipes.get(type(value), "auto")
        for plan in self.options(value, group, rows):
            if asked == plan.recipe.name or (asked == "auto" and plan.us < math.inf):
                return plan
        return None

    def cheapest(self, value: Value, group: str, rows: int) -> Settled:
        """As `find`. Raises LayoutError where there is none, with what there is."""
        found = self.find(value, group, rows)
        if found is None:
            raise LayoutError(self._refusal(value, group, rows))
        return found

    def _refusal(self, value: Value, group: str, rows: int, of: str = "") -> str:
        """of: the value that it is part of."""
        asked, ranks, hosts = self._recipes.get(type(value), "auto"), self.mesh.size(group), self.mesh.hosts_of(group)
        recipes = [recipe for recipe in RECIPES[type(value)] if asked in ("auto", recipe.name)]
        for part in recipes[0].parts(value, ranks) if recipes[0].parts else ():
            if self.find(part, group, rows) is None:
                return self._refusal(part, group, rows, f" of {value.what}")
        calls, whole = [recipe.calls(value, ranks, rows) for recipe in recipes], recipes[0].whole
        kinds = " or ".join(" + ".join(kind for kind, _ in each) for each in calls)
        kinds += " with row counts on the device" * (recipes[0].live and self._captured)
        takes = value.bytes(rows if whole else 1, ranks)
        why = [f"{f'{rows} rows take' if whole else 'a row takes'} {takes} bytes"] if takes else []
        for offer in self.offers:
            if not offer.serves(ranks, hosts):
                why.append(f"{offer.transport} serves fewer ranks or hosts")
            elif not any(itertools.starmap(partial(self._has, offer), zip(recipes, calls, strict=True))):
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
            + ("; leave experts at auto, or plan for fewer tokens" if whole else "")
        )


def _rounded(rows: int) -> int:
    return 1 << max(rows - 1, 0).bit_length()


@dataclass(frozen=True, slots=True)
class Settlement:
    """A value that a block settles once it has read the stream.

    packed: the rows of a rank travel as one. asked: only in steps in which a row asks for it.
    """

    value: Value
    group: str
    packed: bool = False
    asked: bool = False

    def of(self, tokens: int) -> tuple[Value, str, int]:
        """In a step of so many tokens in each DP group: the value, its group, and how many rows of it."""
        if self.packed and isinstance(self.value, Gather):
            return replace(self.value, row_bytes=self.value.row_bytes * tokens), self.group, 1
        return self.value, self.group, tokens
