"""Who sends what to whom, as `call.h` lays it out, played through on plain lists: every edge on 2 to 8 ranks, no GPU.

The kernel does the same with what it is given: it pushes, waits, sums and writes, a unit at a time.
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
from weft.comm.peer import MAX_RANKS, UNIT_BYTES, inbox_bytes
from weft.kernels.build import CSRC

Units = list[int]
Edge = tuple[int, int, int, int, int]  # segments, span, scatter, root, exchange


class Lanes(ctypes.Structure):
    """As in call.h."""

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
    library: Any, n: int, me: int, edge: Edge, row_units: int, counts: Units, received: Units, two: bool
) -> Lanes:
    found = Lanes()
    library.lanes(
        n,
        me,
        (ctypes.c_int * 6)(*edge, int(two)),
        row_units,
        (ctypes.c_int64 * len(counts))(*counts),
        (ctypes.c_int64 * max(1, len(received)))(*received),
        ctypes.byref(found),
    )
    return found


def play(lanes: list[Lanes], edge: Edge, xs: list[Units], two: bool) -> list[Units]:
    """Every rank's result."""
    n, span, scatter = len(xs), edge[1], edge[2]
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
    summed = 1 if edge[3] >= 0 or edge[4] else n if scatter else span
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


def edges_of(n: int) -> Iterator[tuple[str, Edge, bool]]:
    """Name, edge, whether it may take two hops; of each way to cut n ranks into groups of `span`."""
    yield "all_reduce", (1, n, 0, -1, 0), n > 2
    yield "reduce_scatterv", (n, 1, 1, -1, 0), False
    yield "all_gatherv", (n, 1, 0, -1, 0), False
    yield "all_to_allv", (n, 1, 0, -1, 1), False
    yield from (("broadcast", (1, n, 0, root, 0), False) for root in range(n))
    for span in range(2, n):
        if n % span == 0:
            yield "all_reduce_all_gatherv", (n // span, span, 0, -1, 0), True
            yield "reduce_scatterv_all_reduce", (n // span, span, 1, -1, 0), True


@pytest.mark.parametrize("n", range(2, MAX_RANKS + 1))
def test_every_edge_on_every_layout(library: Any, n: int) -> None:
    draw = random.Random(n)
    patterns = [lambda: 3, lambda: draw.randrange(6), lambda: draw.choice((0, 0, 0, 0, 70)), lambda: 1, lambda: 0]
    for (name, edge, may), pick, row_units in ((e, p, u) for e in edges_of(n) for p in patterns for u in (1, 3)):
        segments, span, scatter = edge[:3]
        table = [[pick() for _ in range(n)] for _ in range(n)]  # all_to_all: rows from each to each
        counts = [pick() for _ in range(segments)]
        total = sum(counts)
        for two in (False, True)[: 1 + may]:
            xs, lanes = [], []
            for me in range(n):
                rows = sum(table[me]) if edge[4] else total if scatter else counts[me // span]
                xs.append([draw.randrange(1 << 30) for _ in range(rows * row_units)])
                given, received = (table[me], [table[r][me] for r in range(n)]) if edge[4] else (counts, [])
                lanes.append(lay_out(library, n, me, edge, row_units, given, received, two))
            largest = max(max(len(x) for x in xs), *(x.out for x in lanes)) * UNIT_BYTES
            room = inbox_bytes(n, largest) // UNIT_BYTES
            for x in lanes:
                assert max(1, *x.receive) <= room // (2 * n if two else n), f"{name}: a lane overruns, {counts}"
                assert x.out <= room // 2 or not two, f"{name}: sums overrun, {counts}"
            got = play(lanes, edge, xs, two)
            for me in range(n):
                wanted = definition(name, edge, xs, [c * row_units for c in counts], me)
                if edge[4]:
                    starts = [sum(table[r][:me]) * row_units for r in range(n)]
                    wanted = [v for r in range(n) for v in xs[r][starts[r] :][: table[r][me] * row_units]]
                assert got[me] == wanted, f"{name} {edge}, counts {counts}, two hops {two}, rank {me} of {n}"


def definition(name: str, edge: Edge, xs: list[Units], units: Units, me: int) -> Units:
    n, span = len(xs), edge[1]
    total = [sum(column) for column in zip(*xs, strict=True)] if len({len(x) for x in xs}) == 1 else []
    if name == "all_reduce":
        return total
    if name == "broadcast":
        return xs[edge[3]]
    if name == "all_gatherv":
        return [v for x in xs for v in x]
    if name == "all_reduce_all_gatherv":
        groups = [xs[g : g + span] for g in range(0, n, span)]
        return [sum(column) for group in groups for column in zip(*group, strict=True)]
    begin = sum(units[: me // span])
    return total[begin : begin + units[me // span]]
