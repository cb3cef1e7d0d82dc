"""Exchanges: one description of each collective on rows, from which all else follows.

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

A broadcast is an all_gatherv with rows on one rank only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Literal, NamedTuple

Direction = Literal["gather", "scatter", "permute"]
Combine = Literal["none", "sum", "softmax_merge"]


class Exchange(NamedTuple):
    """Collective over `segments · span` ranks, numbered by their place in the group.

    The rows are cut into `segments` ranges, each shared by `span` neighbouring ranks.

    Attributes:
        direction: `gather`: the span's ranks hold the terms of their segment, and all ranks want all segments;
          `scatter`: all ranks hold a term of each segment, and the span's ranks want their own; `permute`: each rank
          holds a segment for each rank.
        combine: `sum` of a segment's terms, `softmax_merge` (`weft.kernels.torch_reference`), or the first: `none`.
    """

    kind: str  # name of the collective
    direction: Direction
    segments: int
    span: int
    combine: Combine

    @property
    def ranks(self) -> int:
        """Number of ranks that take part."""
        return self.segments * self.span


@cache
def all_gatherv(ranks: int) -> Exchange:
    """Return the exchange that gives all ranks the rows of all ranks, in rank order."""
    return Exchange("all_gatherv", "gather", ranks, 1, "none")


@cache
def all_reduce(ranks: int) -> Exchange:
    """Return the exchange that gives all ranks the sum of all ranks' rows."""
    return Exchange("all_reduce", "gather", 1, ranks, "sum")


@cache
def reduce_scatterv(ranks: int) -> Exchange:
    """Return the exchange that gives the i-th rank the i-th segment of the sum."""
    return Exchange("reduce_scatterv", "scatter", ranks, 1, "sum")


@cache
def all_reduce_all_gatherv(groups: int, ranks: int) -> Exchange:
    """Return the exchange that sums the rows of each group of `ranks` neighbours and gives all sums to all ranks."""
    return Exchange("all_reduce+all_gatherv", "gather", groups, ranks, "sum")


@cache
def reduce_scatterv_all_reduce(groups: int, ranks: int) -> Exchange:
    """Return the exchange that gives each rank of the i-th group of `ranks` neighbours the i-th segment of the sum."""
    return Exchange("reduce_scatterv+all_reduce", "scatter", groups, ranks, "sum")


@cache
def all_to_allv(ranks: int) -> Exchange:
    """Return the exchange that gives the j-th rank the j-th segment of each rank, in rank order."""
    return Exchange("all_to_allv", "permute", ranks, 1, "none")


@cache
def merge_scatterv(ranks: int) -> Exchange:
    """Return the exchange that merges attention over all ranks' keys and gives the i-th rank its own heads.

    A row is one head of one token.
    """
    return Exchange("merge_scatterv", "scatter", ranks, 1, "softmax_merge")


class Part(NamedTuple):
    """Range of rows that is combined over its sources and sent to its readers."""

    sources: tuple[int, ...]  # places in the group, ascending
    readers: tuple[int, ...]  # places in the group, ascending
    source_row: int  # start of the range in each source's input
    reader_row: int  # start of the range in each reader's result
    rows: int


def parts(exchange: Exchange, sizes: Sequence[int]) -> tuple[Part, ...]:
    """Return the parts of an exchange, in the order of the result.

    sizes: rows of each segment; for permute, the rows from rank i to rank j at `i · ranks + j`. A rank that knows only
    its own sends and receives passes zeros elsewhere: its own parts stay the same. Raises ValueError for a wrong number
    of sizes or a negative size.
    """
    _check(exchange, sizes)
    n, span = exchange.ranks, exchange.span
    everyone = tuple(range(n))
    if exchange.direction == "permute":
        sent, received, result = [0] * n, [0] * n, []
        for i in everyone:
            for j in everyone:
                rows = sizes[i * n + j]
                result.append(Part((i,), (j,), sent[i], received[j], rows))
                sent[i] += rows
                received[j] += rows
        return tuple(result)
    result, begin = [], 0
    for segment, rows in enumerate(sizes):
        shared = everyone[segment * span : (segment + 1) * span]
        if exchange.direction == "gather":
            result.append(Part(shared, everyone, 0, begin, rows))
        else:
            result.append(Part(everyone, shared, begin, 0, rows))
        begin += rows
    return tuple(result)


def in_two_steps(found: Sequence[Part]) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """Split the parts into two steps: each share is combined by one rank, then sent to all readers.

    A part with several sources is cut into even shares, one for each rank that both holds a term and wants the result.
    In the second step a rank's input is its shares, one after the other in the order of the parts. No row is then
    received twice (Rabenseifner's algorithm, doi:10.1007/978-3-540-24685-5_1).
    """
    first: list[Part] = []
    second: list[Part] = []
    rows_held: dict[int, int] = {}
    for part in found:
        owners = [r for r in part.readers if r in part.sources] or [part.sources[0]]
        share, more = divmod(part.rows, len(owners))
        begin = 0
        for at, owner in enumerate(owners):
            rows, place = share + (at < more), rows_held.get(owner, 0)
            first.append(Part(part.sources, (owner,), part.source_row + begin, place, rows))
            second.append(Part((owner,), part.readers, place, part.reader_row + begin, rows))
            rows_held[owner] = place + rows
            begin += rows
    return tuple(first), tuple(second)


def input_rows(exchange: Exchange, sizes: Sequence[int], place: int) -> int:
    """Return the input rows of the rank at `place`: linear in the sizes, unlike a walk over `parts`."""
    _check(exchange, sizes)
    if exchange.direction == "permute":
        return sum(sizes[place * exchange.ranks : (place + 1) * exchange.ranks])
    return sizes[place // exchange.span] if exchange.direction == "gather" else sum(sizes)


def result_rows(exchange: Exchange, sizes: Sequence[int], place: int) -> int:
    """Return the result rows of the rank at `place`."""
    _check(exchange, sizes)
    if exchange.direction == "permute":
        return sum(sizes[place :: exchange.ranks])
    return sum(sizes) if exchange.direction == "gather" else sizes[place // exchange.span]


def rows_received(exchange: Exchange, sizes: Sequence[float], place: int) -> float:
    """Return the rows that the rank at `place` must receive with the bandwidth-optimal algorithm.

    A segment with several terms is combined in even shares, one for each rank that both holds a term and wants the
    result. That rank receives the other terms of its share; all readers then receive the other ranks' shares (for an
    all_reduce: Thakur et al., doi:10.1177/1094342005051521). sizes may be fractions.
    """
    if exchange.direction == "permute":
        return sum(sizes[place :: exchange.ranks]) - sizes[place * exchange.ranks + place]
    gathers, rows = exchange.direction == "gather", sizes[place // exchange.span]
    terms, share = exchange.span if gathers else exchange.ranks, rows / exchange.span
    return (terms - 1) * share + (sum(sizes) if gathers else rows) - share


def _check(exchange: Exchange, sizes: Sequence[float]) -> None:
    expected = exchange.ranks**2 if exchange.direction == "permute" else exchange.segments
    if len(sizes) != expected or min(sizes, default=0) < 0:
        takes = f"{exchange.kind} over {exchange.ranks} ranks takes {expected} sizes of 0 or more"
        raise ValueError(f"{takes}, not {list(sizes)}")
