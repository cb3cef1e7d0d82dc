"""Exchanges: one description of a collective on rows, from which all else follows.

An `Exchange` is a row of the table of collectives. `parts` unfolds it into ranges of rows: which ranks sum a range, and
which want it. Transports, costs, expected results and the native kernels are built on `parts`, or tested against it.

| kind | direction | segments | span | combine |
|---|---|---|---|---|
| all_gatherv over n ranks | gather | n | 1 | none |
| all_reduce | gather | 1 | n | sum |
| reduce_scatterv | scatter | n | 1 | sum |
| all_reduce+all_gatherv (dp groups of tp ranks) | gather | dp | tp | sum |
| reduce_scatterv+all_reduce | scatter | dp | tp | sum |
| all_to_allv | permute | n | 1 | none |
| merge_scatterv over n ranks | scatter | n | 1 | softmax_merge |

A broadcast is an all_gatherv in which one rank alone has rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Literal, NamedTuple

Direction = Literal["gather", "scatter", "permute"]
Combine = Literal["none", "sum", "softmax_merge"]


class Exchange(NamedTuple):
    """A collective over `segments · span` ranks, which are numbered by their place in the group.

    The rows are cut into `segments` ranges, each shared by `span` neighbouring ranks. gather: the span's ranks hold the
    terms of their segment, and all ranks want all segments. scatter: all ranks hold a term of each segment, and the
    span's ranks want their own. permute: each rank holds a segment for each rank.

    combine: how the terms of a segment are combined: sum, or softmax_merge by their log-sum-exp (attention over parts
    of the keys, `weft.kernels.torch_reference.softmax_merge`); none where a segment has one source.
    """

    kind: str
    direction: Direction
    segments: int
    span: int
    combine: Combine

    @property
    def ranks(self) -> int:
        """Ranks that take part."""
        return self.segments * self.span


@cache
def all_gatherv(ranks: int) -> Exchange:
    """All ranks get all ranks' rows, in rank order."""
    return Exchange("all_gatherv", "gather", ranks, 1, "none")


@cache
def all_reduce(ranks: int) -> Exchange:
    """All ranks get the sum of all ranks' rows."""
    return Exchange("all_reduce", "gather", 1, ranks, "sum")


@cache
def reduce_scatterv(ranks: int) -> Exchange:
    """The i-th rank gets the i-th segment of the sum."""
    return Exchange("reduce_scatterv", "scatter", ranks, 1, "sum")


@cache
def all_reduce_all_gatherv(groups: int, ranks: int) -> Exchange:
    """All ranks get, for each group of `ranks` neighbours, the sum of their rows."""
    return Exchange("all_reduce+all_gatherv", "gather", groups, ranks, "sum")


@cache
def reduce_scatterv_all_reduce(groups: int, ranks: int) -> Exchange:
    """The ranks of the i-th group of `ranks` neighbours each get the i-th segment of the sum over all."""
    return Exchange("reduce_scatterv+all_reduce", "scatter", groups, ranks, "sum")


@cache
def all_to_allv(ranks: int) -> Exchange:
    """The j-th rank gets the j-th segment of each rank, in rank order."""
    return Exchange("all_to_allv", "permute", ranks, 1, "none")


@cache
def merge_scatterv(ranks: int) -> Exchange:
    """The i-th rank gets its own heads of attention over all ranks' keys; a row is one head of one token."""
    return Exchange("merge_scatterv", "scatter", ranks, 1, "softmax_merge")


class Part(NamedTuple):
    """A range of rows that is combined over its sources and that its readers want.

    sources, readers: places in the group, ascending. source_row: where the range begins in each source's input.
    reader_row: where it begins in each reader's result.
    """

    sources: tuple[int, ...]
    readers: tuple[int, ...]
    source_row: int
    reader_row: int
    rows: int


def parts(exchange: Exchange, sizes: Sequence[int]) -> tuple[Part, ...]:
    """The parts of an exchange, in the order of the result.

    sizes: rows of each segment; for permute the rows from rank i to rank j at `i · ranks + j`. A rank that knows only
    its own sends and receives passes zeros elsewhere: the parts that concern it are the same. Raises ValueError where
    the sizes are too many, too few, or negative.
    """
    _check(exchange, sizes)
    n, span = exchange.ranks, exchange.span
    everyone = tuple(range(n))
    if exchange.direction == "permute":
        sent, received, found = [0] * n, [0] * n, []
        for i in everyone:
            for j in everyone:
                rows = sizes[i * n + j]
                found.append(Part((i,), (j,), sent[i], received[j], rows))
                sent[i] += rows
                received[j] += rows
        return tuple(found)
    found, begin = [], 0
    for segment, rows in enumerate(sizes):
        shared = everyone[segment * span : (segment + 1) * span]
        if exchange.direction == "gather":
            found.append(Part(shared, everyone, 0, begin, rows))
        else:
            found.append(Part(everyone, shared, begin, 0, rows))
        begin += rows
    return tuple(found)


def in_two_steps(found: Sequence[Part]) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """The parts as two steps, in even shares: (each share is combined by one rank, each share goes to all readers).

    A part with several sources is cut into a share for each rank that both holds a term and wants the result. In the
    second step a rank's input is its shares, one after the other in the order of the parts. No row is then received
    twice (Rabenseifner's algorithm, doi:10.1007/978-3-540-24685-5_1).
    """
    first: list[Part] = []
    second: list[Part] = []
    held: dict[int, int] = {}
    for part in found:
        owners = [r for r in part.readers if r in part.sources] or [part.sources[0]]
        each, more = divmod(part.rows, len(owners))
        begin = 0
        for at, owner in enumerate(owners):
            rows, place = each + (at < more), held.get(owner, 0)
            first.append(Part(part.sources, (owner,), part.source_row + begin, place, rows))
            second.append(Part((owner,), part.readers, place, part.reader_row + begin, rows))
            held[owner] = place + rows
            begin += rows
    return tuple(first), tuple(second)


def input_rows(exchange: Exchange, sizes: Sequence[int], place: int) -> int:
    """Rows of the input of the rank at `place`: those of `parts`, in time linear in the sizes, like the next two."""
    _check(exchange, sizes)
    if exchange.direction == "permute":
        return sum(sizes[place * exchange.ranks : (place + 1) * exchange.ranks])
    return sizes[place // exchange.span] if exchange.direction == "gather" else sum(sizes)


def result_rows(exchange: Exchange, sizes: Sequence[int], place: int) -> int:
    """Rows of the result of the rank at `place`."""
    _check(exchange, sizes)
    if exchange.direction == "permute":
        return sum(sizes[place :: exchange.ranks])
    return sum(sizes) if exchange.direction == "gather" else sizes[place // exchange.span]


def rows_received(exchange: Exchange, sizes: Sequence[float], place: int) -> float:
    """Rows that the rank at `place` must receive, by the algorithm that is optimal in bandwidth.

    A segment with several terms is combined in even shares, one for each rank that both holds a term and wants the
    result. That rank receives the other terms of its share, and all readers then receive the shares of the others (for
    an all_reduce: Thakur et al., doi:10.1177/1094342005051521). sizes may be fractions.
    """
    if exchange.direction == "permute":
        return sum(sizes[place :: exchange.ranks]) - sizes[place * exchange.ranks + place]
    gathers, rows = exchange.direction == "gather", sizes[place // exchange.span]
    terms, share = exchange.span if gathers else exchange.ranks, rows / exchange.span
    return (terms - 1) * share + (sum(sizes) if gathers else rows) - share


def _check(exchange: Exchange, sizes: Sequence[float]) -> None:
    wanted = exchange.ranks**2 if exchange.direction == "permute" else exchange.segments
    if len(sizes) != wanted or min(sizes, default=0) < 0:
        takes = f"{exchange.kind} over {exchange.ranks} ranks takes {wanted} sizes of 0 or more"
        raise ValueError(f"{takes}, not {list(sizes)}")
