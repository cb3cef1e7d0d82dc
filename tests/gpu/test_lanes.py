"""Who sends what to whom, as `call.h` lays it out, played through on plain lists: every exchange on 2 to 8 ranks.

The kernel does the same with what it is given: it pushes, waits, sums and writes, a unit at a time. What must come out
is what `weft.planner.exchange.parts` says. No GPU is needed.
"""

from __future__ import annotations

import ctypes
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from comm.builds import FLAGS
from weft.comm.peer import DIRECTIONS
from weft.comm.peer_launch import MAX_RANKS, UNIT_BYTES, inbox_bytes
from weft.kernels.build import CSRC
from weft.planner.exchange import (
    Exchange,
    all_gatherv,
    all_reduce,
    all_reduce_all_gatherv,
    all_to_allv,
    input_rows,
    parts,
    reduce_scatterv,
    reduce_scatterv_all_reduce,
)

Units = list[int]
Sizes = tuple[int, ...]


class Lanes(ctypes.Structure):
    """Struct of the same name in call.h."""

    _fields_ = (
        ("send", ctypes.c_uint32 * MAX_RANKS),
        ("from_", ctypes.c_uint32 * MAX_RANKS),
        ("receive", ctypes.c_uint32 * MAX_RANKS),
        ("begin", ctypes.c_uint32 * (MAX_RANKS + 1)),
        ("part", ctypes.c_uint32),
        ("part_from", ctypes.c_uint32),
        ("part_to", ctypes.c_uint32),
        ("out", ctypes.c_uint32),
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("lanes") / "lanes.so"
    source = Path(__file__).parent / "lanes.cc"
    flags = [*FLAGS, f"-I{CSRC / 'cuda'}", "-shared", "-fPIC"]
    subprocess.run(["g++", *flags, str(source), "-o", str(path)], check=True)
    found = ctypes.CDLL(str(path))
    assert found.max_ranks() == MAX_RANKS
    return found


def lay_out(
    library: Any, me: int, exchange: Exchange, row_units: int, sent: Sizes, received: Sizes, two: bool
) -> Lanes:
    found = Lanes()
    library.lanes(
        exchange.ranks,
        me,
        (ctypes.c_int * 4)(DIRECTIONS.index(exchange.direction), exchange.segments, exchange.span, int(two)),
        row_units,
        (ctypes.c_int64 * len(sent))(*sent),
        (ctypes.c_int64 * max(1, len(received)))(*received),
        ctypes.byref(found),
    )
    return found


def play(lanes: list[Lanes], exchange: Exchange, xs: list[Units], two: bool) -> list[Units]:
    """Every rank's result."""
    n, span, scatter = len(xs), exchange.span, exchange.direction == "scatter"
    inbox = [[xs[r][lanes[r].from_[me] :][: lanes[r].send[me]] for r in range(n)] for me in range(n)]
    for me in range(n):
        for r in range(n):
            if r != me:
                assert len(inbox[me][r]) == lanes[r].send[me] == lanes[me].receive[r], "sent and awaited"
        assert lanes[me].send[me] == 0

    read: set[tuple[int, int, int]] = set()

    def term(me: int, r: int, own: int, u: int) -> int:
        if r == me:
            return xs[me][own + u]
        assert (me, r, u) not in read, "a unit is read twice"
        read.add((me, r, u))
        return inbox[me][r][u]

    results: list[Units] = []
    if two:
        sums: list[dict[int, tuple[int, int]]] = [{} for _ in range(n)]  # by place: value, who summed it
        for r in range(n):
            group = range(r // span * span, (r // span + 1) * span)
            for u in range(lanes[r].part):
                total = sum(term(r, i, lanes[r].part_from, u) for i in (range(n) if scatter else group))
                for reader in group if scatter else range(n):
                    assert lanes[r].part_to + u not in sums[reader], "two ranks sum the same unit"
                    sums[reader][lanes[r].part_to + u] = total, r
        for me in range(n):
            for u in range(lanes[me].out):
                assert sums[me][u][1] == strip_of(lanes[me], n, u), "a strip is whose sums it holds"
            assert set(sums[me]) == set(range(lanes[me].out)), "sums that nobody reads"
            results.append([sums[me][u][0] for u in range(lanes[me].out)])
        check_read(lanes, read)
        return results
    summed = {"permute": 1, "scatter": n, "gather": span}[exchange.direction]
    for me in range(n):
        out, begin, own = [], lanes[me].begin, lanes[me].from_[me]
        for u in range(lanes[me].out):
            first = strip_of(lanes[me], n, u)
            if summed == 1:
                out.append(term(me, first, own, u - begin[first]))
            else:
                last = n if scatter else first + span
                out.append(sum(term(me, i, own, u - begin[first]) for i in range(first, last)))
        results.append(out)
    check_read(lanes, read)
    return results


def check_read(lanes: list[Lanes], read: set[tuple[int, int, int]]) -> None:
    """All that came was read, and with that taken out of the inbox."""
    n = len(lanes)
    came = {(me, r, u) for me in range(n) for r in range(n) if r != me for u in range(lanes[me].receive[r])}
    assert came == read


def strip_of(lanes: Lanes, n: int, u: int) -> int:
    assert list(lanes.begin) == sorted(lanes.begin) and set(lanes.begin[n:]) == {lanes.out}
    return sum(u >= lanes.begin[i] for i in range(1, n))


def exchanges_of(n: int) -> Iterator[tuple[Exchange, bool]]:
    """Each, and whether it may take two shots; for each way to cut n ranks into groups of `span`."""
    yield all_reduce(n), n > 2
    yield reduce_scatterv(n), False
    yield all_gatherv(n), False
    yield all_to_allv(n), False
    for span in range(2, n):
        if n % span == 0:
            yield all_reduce_all_gatherv(n // span, span), True
            yield reduce_scatterv_all_reduce(n // span, span), True


@pytest.mark.parametrize("n", range(2, MAX_RANKS + 1))
def test_every_exchange_on_every_layout(library: Any, n: int) -> None:
    draw = random.Random(n)
    patterns = [lambda: 3, lambda: draw.randrange(6), lambda: draw.choice((0, 0, 0, 0, 70)), lambda: 1, lambda: 0]
    cases = ((*case, pick, units) for case in exchanges_of(n) for pick in patterns for units in (1, 3))
    for exchange, may, pick, row_units in cases:
        permutes = exchange.direction == "permute"
        sizes = tuple(pick() for _ in range(n * n if permutes else exchange.segments))
        xs = [[draw.randrange(1 << 30) for _ in range(input_rows(exchange, sizes, me) * row_units)] for me in range(n)]
        wanted = definition(exchange, sizes, xs, row_units)
        for two in (False, True)[: 1 + may]:
            lanes = []
            for me in range(n):
                sent, received = (sizes[me * n : me * n + n], sizes[me::n]) if permutes else (sizes, ())
                lanes.append(lay_out(library, me, exchange, row_units, sent, received, two))
            largest = max(max(len(x) for x in xs), *(x.out for x in lanes)) * UNIT_BYTES
            capacity = inbox_bytes(n, largest) // UNIT_BYTES
            for x in lanes:
                assert max(1, *x.receive) <= capacity // (2 * n if two else n), f"{exchange}: a lane overruns, {sizes}"
                assert x.out <= capacity // 2 or not two, f"{exchange}: sums overrun, {sizes}"
            assert play(lanes, exchange, xs, two) == wanted, f"{exchange}, sizes {sizes}, two shots {two}"


def definition(exchange: Exchange, sizes: Sizes, xs: list[Units], row_units: int) -> list[Units]:
    """Every rank's result, as the parts of the exchange say."""
    results: list[Units] = []
    for me in range(exchange.ranks):
        rows: dict[int, Units] = {}
        for part in parts(exchange, sizes):
            if me not in part.readers:
                continue
            for row in range(part.rows):
                terms = [xs[r][(part.source_row + row) * row_units :][:row_units] for r in part.sources]
                assert part.reader_row + row not in rows, "a row is written twice"
                rows[part.reader_row + row] = [sum(column) for column in zip(*terms, strict=True)]
        results.append([unit for row in range(len(rows)) for unit in rows[row]])
    return results
