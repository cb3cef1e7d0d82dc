"""The cheapest recipe for a value of a block, by trying everything: an oracle that shares nothing with `BlockPrices`.

What each rank of a group holds is written down tensor by tensor: of whose heads, or whose rows, over whose keys. The
steps are the table's in the documentation (`weft.planner.recipes`): each is legal by what the ranks hold, and
priced by the tensors that it takes and gives. Every sequence of steps on every transport that ends in what was asked
for is tried. A format of rows would be one more form of a tensor here, and the steps that lead to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from planner.exhaustive import Machine, hosts_of_ranks
from weft.planner.spec import Mesh


class Piece(NamedTuple):
    """A tensor: its form, whose heads or rows it has, and over whose keys."""

    form: str
    of: int
    over: frozenset[int] = frozenset()


Held = frozenset[Piece]
Ranks = tuple[Held, ...]
"""Pieces that each rank of a group holds."""


@dataclass(frozen=True)
class Wanted:
    """A value of a block. begin: what the ranks hold; ends: whether that is what each is to hold.

    row_bytes: of one row of a piece, by form. limit: for a number of rows, what the documentation says that no tensor
    of a call exceeds. relaid: what was gathered is copied once more, after all calls.
    """

    begin: Ranks
    ends: Callable[[Ranks], bool]
    row_bytes: dict[str, int]
    limit: Callable[[int], int]
    relaid: bool = False

    def size(self, pieces: Iterable[Piece]) -> int:
        """Bytes of one row of all these."""
        return sum(self.row_bytes[piece.form] for piece in pieces)


def padded(size: int) -> int:
    """Return a size in whole units of 16 bytes."""
    return (size + 15) // 16 * 16


def attention(n: int, own_heads: int, dim: int, element_bytes: int) -> Wanted:
    """A rank has outputs of the heads of all over its own keys; it needs outputs of its own heads over all keys."""
    everyone = frozenset(range(n))
    begin = tuple(
        frozenset(Piece(form, of, frozenset({place})) for of in everyone for form in ("output", "lse"))
        for place in everyone
    )

    def limit(rows: int) -> int:
        return rows * n * own_heads * (max(padded(dim * element_bytes), 4 * n) + 4) + 32 * n

    output, lse = own_heads * dim * element_bytes, own_heads * 4
    return Wanted(
        begin,
        lambda ranks: all(Piece("output", place, everyone) in held for place, held in enumerate(ranks)),
        {"output": output, "lse": lse, "term": output, "packed": output + lse},
        limit,
    )


def rows_of_all(n: int, row_bytes: int, relaid: bool = False) -> Wanted:
    """A rank has rows of its own; it needs all ranks' rows."""
    every = frozenset(Piece("rows", place) for place in range(n))
    begin = tuple(frozenset({Piece("rows", place)}) for place in range(n))
    wanted = {"rows": row_bytes}
    return Wanted(begin, lambda ranks: set(ranks) == {every}, wanted, lambda rows: rows * n * padded(row_bytes), relaid)


def queries(n: int, own_heads: int, dim: int, element_bytes: int) -> Wanted:
    """Queries of every rank's own heads, which are then laid out row by row."""
    return rows_of_all(n, own_heads * dim * element_bytes, relaid=True)


def best_tokens(n: int, rows: int) -> Wanted:
    """Best token of every rank's run of the vocabulary, with its score; all rows count as one."""
    token_bytes, score_bytes = 4, 4
    return rows_of_all(n, rows * (token_bytes + score_bytes))


def logits(n: int, vocabulary: int) -> Wanted:
    """Logits in float32 of every rank's run of the vocabulary, padded to the longest run."""
    return rows_of_all(n, 4 * max(len(range(place, vocabulary, n)) for place in range(n)))


# --- steps ------------------------------------------------------------------------------------------------------


def of_form(held: Held, *forms: str) -> Held:
    return frozenset(piece for piece in held if piece.form in forms)


def of_rank(ranks: Ranks, place: int, *forms: str) -> list[Piece]:
    """Return the pieces that all ranks have of one rank's heads, each as often as it is there."""
    return [piece for held in ranks for piece in held if piece.of == place and piece.form in forms]


def joined(pieces: list[Piece]) -> frozenset[int] | None:
    """The keys of all pieces together; None where there are none, or one would count twice."""
    keys = [key for piece in pieces for key in piece.over]
    return frozenset(keys) if keys and len(keys) == len(set(keys)) else None


def gather(form: str) -> Callable[[Ranks], Ranks | None]:
    """Return the step that gives each rank's pieces of a form to all."""

    def step(ranks: Ranks) -> Ranks | None:
        every = frozenset(piece for held in ranks for piece in of_form(held, form))
        return tuple(held | every for held in ranks)

    return step


def reduce_scatter(ranks: Ranks) -> Ranks | None:
    """Terms over different keys are summed, each rank's heads on it."""
    keys = [joined(of_rank(ranks, place, "term")) for place in range(len(ranks))]
    return tuple(frozenset({Piece("output", p, over)}) for p, over in enumerate(keys) if over) if all(keys) else None


def all_to_all(ranks: Ranks) -> Ranks | None:
    """Packed pieces go to the rank whose heads they have."""
    return tuple(frozenset(of_rank(ranks, place, "packed")) for place in range(len(ranks)))


def merge_scatter(ranks: Ranks) -> Ranks | None:
    """Outputs of each rank's heads, with their lse, are merged on it."""
    keys = [joined(of_rank(ranks, place, "output")) for place in range(len(ranks))]
    if any(over is None or over != joined(of_rank(ranks, p, "lse")) for p, over in enumerate(keys)):
        return None
    return tuple(frozenset({Piece("output", p, over), Piece("lse", p, over)}) for p, over in enumerate(keys) if over)


def scale(ranks: Ranks) -> Ranks | None:
    """Each rank makes its outputs terms of a sum, by their share of the weight of all keys: it needs the lse of all."""
    keys = frozenset(key for held in ranks for piece in held for key in piece.over)
    outputs = [piece for held in ranks for piece in of_form(held, "output")]
    if not outputs or any(piece.over == keys for piece in outputs):
        return None
    for held in ranks:
        of = {piece.of for piece in of_form(held, "output")}
        if any(joined([piece for piece in of_form(held, "lse") if piece.of == head]) != keys for head in of):
            return None
    return tuple(frozenset(piece._replace(form="term") for piece in of_form(held, "output")) for held in ranks)


def pack(ranks: Ranks) -> Ranks | None:
    """Each rank lays outputs and their lse next to each other."""
    for held in ranks:
        if any(piece._replace(form="lse") not in held for piece in of_form(held, "output")):
            return None
    return tuple(frozenset(piece._replace(form="packed") for piece in of_form(held, "output")) for held in ranks)


def combine(ranks: Ranks) -> Ranks | None:
    """Each rank makes one of what it has packed over different keys."""
    after = []
    for held in ranks:
        over, of = joined(list(of_form(held, "packed"))), {piece.of for piece in held}
        if over is None or len(of) != 1:
            return None
        after.append(frozenset({Piece("output", *of, over), Piece("lse", *of, over)}))
    return tuple(after)


STEPS: tuple[tuple[str | None, Callable[[Ranks], Ranks | None], tuple[str, ...], tuple[str, ...]], ...] = (
    ("all_gatherv", gather("rows"), ("rows",), ("rows",)),
    ("all_gatherv", gather("lse"), ("lse",), ("lse",)),
    (None, scale, ("output", "lse"), ("term",)),
    ("reduce_scatterv", reduce_scatter, ("term",), ("output",)),
    (None, pack, ("output", "lse"), ("packed",)),
    ("all_to_allv", all_to_all, ("packed",), ("packed",)),
    (None, combine, ("packed",), ("output", "lse")),
    ("merge_scatterv", merge_scatter, ("output", "lse"), ("output", "lse")),
)
"""Each collective, or kernel of a rank's own: what it leads to, and the forms of what it takes and of what it gives."""


class Taken(NamedTuple):
    """Step that was taken, for one row.

    kind: of a collective, or None for a kernel. bytes: received by a rank, or touched by the kernel. largest: bytes of
    the collective's largest tensor.
    """

    kind: str | None
    bytes: int
    largest: int


def received(
    ranks: Ranks, place: int, takes: tuple[str, ...], after: Held, gives: tuple[str, ...], wanted: Wanted
) -> int:
    """Return the bytes that a rank receives: pieces that it lacks; for sums or merges, the others' terms."""
    given = of_form(after, *gives)
    if given <= frozenset(piece for held in ranks for piece in held):
        return wanted.size(given - ranks[place])
    return wanted.size(p for p in of_rank(ranks, place, *takes) if p not in ranks[place])


def following(ranks: Ranks, wanted: Wanted) -> Iterator[tuple[Taken, Ranks]]:
    """Every legal step that changes what ranks hold."""
    for kind, step, takes, gives in STEPS:
        if not any(of_form(held, *takes) for held in ranks):
            continue
        after = step(ranks)
        if after is None or after == ranks:
            continue
        tensors = [wanted.size(of_form(held, form)) for held in ranks for form in takes]
        tensors += [wanted.size(of_form(held, form)) for held in after for form in gives]
        each = []
        for place, (held, now) in enumerate(zip(ranks, after, strict=True)):
            if kind is None:
                each.append(wanted.size(of_form(held, *takes)) + wanted.size(of_form(now, *gives)))
            else:
                each.append(received(ranks, place, takes, now, gives, wanted))
        yield Taken(kind, max(each), max(tensors)), after


def options(wanted: Wanted) -> list[tuple[Taken, ...]]:
    """Every sequence of steps that ends in what is wanted, and holds nothing twice on its way."""
    found: list[tuple[Taken, ...]] = []
    begun: list[tuple[tuple[Taken, ...], tuple[Ranks, ...]]] = [((), (wanted.begin,))]
    while begun:
        steps, seen = begun.pop()
        if wanted.ends(seen[-1]):
            found.append(steps)
            continue
        begun += [((*steps, step), (*seen, after)) for step, after in following(seen[-1], wanted) if after not in seen]
    return found


# --- prices -----------------------------------------------------------------------------------------------------


class Priced(NamedTuple):
    """Way by a transport. calls: its collectives, with bytes that a rank receives; max_call_rows: rows of a call."""

    us: float
    kinds: tuple[str, ...]
    transport: str
    calls: tuple[tuple[str, int], ...]
    max_call_rows: int


def members(mesh: Mesh, group: str, rank: int) -> list[int]:
    """Return the ranks of a rank's group: runs of neighbours, as many as the group has ranks."""
    n = {"dcp": mesh.dcp, "attn_tp": mesh.attn_tp}[group]
    return [r for r in range(mesh.world) if r // n == rank // n]


def priced(mesh: Mesh, group: str, wanted: Wanted, rows: int, machines: list[Machine]) -> list[Priced]:
    """Every way on every transport that can go it, for `rows` rows of each rank."""
    groups = [members(mesh, group, rank) for rank in range(mesh.world)]
    host = hosts_of_ranks(mesh)[1]
    n, hosts = len(groups[0]), max(len({host[r] for r in ranks}) for ranks in groups)
    found = []
    for machine in machines:
        each = next(
            (r for r in range(rows, 0, -1) if machine.capacity is None or wanted.limit(r) <= machine.capacity), 0
        )
        if not each or not machine.serves(n, hosts):
            continue
        cut = [min(each, rows - begin) for begin in range(0, rows, each)]
        for recipe in options(wanted):
            kinds = tuple(step.kind for step in recipe if step.kind)
            if not machine.kinds.issuperset(kinds):
                continue
            assert (
                machine.capacity is None or max(step.largest * each for step in recipe if step.kind) <= machine.capacity
            )
            us = sum(
                machine.collective(n, hosts, step.bytes * r) if step.kind else machines[0].kernel(step.bytes * r)
                for r in cut
                for step in recipe
            )
            if wanted.relaid:
                us += machines[0].kernel(2 * rows * n * wanted.size(wanted.begin[0]))
            calls = tuple((step.kind, step.bytes * r) for r in cut for step in recipe if step.kind)
            found.append(Priced(us, kinds, machine.name, calls, each))
    return found


def minimum(found: list[Priced], asked: tuple[str, ...] | None = None) -> float | None:
    """The least time of all ways; None where there is none. asked: the collectives of the way to take, which need not
    have been measured.
    """
    times = [recipe.us for recipe in found if (recipe.kinds == asked if asked else recipe.us < math.inf)]
    return min(times, default=None)
