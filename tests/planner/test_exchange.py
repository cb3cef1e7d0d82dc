"""`parts` against a plain definition of every named exchange, and an exchange that nobody knew before."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import run_world
from torch import Tensor

from weft.comm.reference import ReferenceTransport
from weft.planner import exchange as exchanges
from weft.planner.exchange import Exchange, Part, in_two_steps, input_rows, parts, result_rows, rows_received

WIDTH = 3
rows = st.integers(0, 7) | st.just(0)
groups = st.sampled_from([(dp, tp) for dp in range(1, 9) for tp in range(1, 9) if dp * tp <= 8])


def run(found: tuple[Part, ...], xs: list[Tensor]) -> list[Tensor]:
    """Return each rank's result: poisoned, then each part filled in by its own definition."""
    results = []
    for place in range(len(xs)):
        mine = [p for p in found if place in p.readers]
        out = torch.full((max((p.reader_row + p.rows for p in mine), default=0), WIDTH), float("nan")).double()
        for p in mine:
            terms = [xs[s][p.source_row : p.source_row + p.rows] for s in p.sources]
            assert all(len(t) == p.rows for t in terms)
            out[p.reader_row : p.reader_row + p.rows] = sum(terms)
        results.append(out)
    return results


def same(got: list[Tensor], wanted: list[Tensor]) -> None:
    for g, w in zip(got, wanted, strict=True):
        assert g.shape == w.shape and torch.equal(g, w)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Exchange, tuple[int, ...], list[Tensor], list[Tensor]]:
    """A named exchange, its sizes, every rank's input, and what every rank must get, in plain tensor terms."""
    dp, tp = draw(groups)
    n = dp * tp
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))

    def values(count: int) -> Tensor:  # whole numbers, so that sums are exact in any order
        return torch.randint(-99, 100, (count, WIDTH), generator=generator).double()

    sizes = tuple(draw(st.lists(rows, min_size=n, max_size=n)))
    per_group = sizes[:dp]
    kind = draw(st.sampled_from(["ar", "rs", "ag", "a2a", "ar+ag", "rs+ar"]))
    if kind == "ar":
        xs = [values(sizes[0]) for _ in range(n)]
        return exchanges.all_reduce(n), sizes[:1], xs, [torch.stack(xs).sum(0)] * n
    if kind == "rs":
        xs = [values(sum(sizes)) for _ in range(n)]
        return exchanges.reduce_scatterv(n), sizes, xs, list(torch.stack(xs).sum(0).split(sizes))
    if kind == "ag":
        xs = [values(size) for size in sizes]
        return exchanges.all_gatherv(n), sizes, xs, [torch.cat(xs)] * n
    if kind == "a2a":
        matrix = [draw(st.lists(rows, min_size=n, max_size=n)) for _ in range(n)]
        xs = [values(sum(row)) for row in matrix]
        wanted = [torch.cat([xs[i].split(matrix[i])[j] for i in range(n)]) for j in range(n)]
        return exchanges.all_to_allv(n), tuple(size for row in matrix for size in row), xs, wanted
    if kind == "ar+ag":
        xs = [values(per_group[r // tp]) for r in range(n)]
        whole = torch.cat([torch.stack(xs[d * tp : (d + 1) * tp]).sum(0) for d in range(dp)])
        return exchanges.all_reduce_all_gatherv(dp, tp), per_group, xs, [whole] * n
    xs = [values(sum(per_group)) for _ in range(n)]
    runs = torch.stack(xs).sum(0).split(per_group)
    return exchanges.reduce_scatterv_all_reduce(dp, tp), per_group, xs, [runs[r // tp] for r in range(n)]


@settings(max_examples=200)
@given(cases())
def test_parts_are_the_definition(case: tuple[Exchange, tuple[int, ...], list[Tensor], list[Tensor]]) -> None:
    exchange, sizes, xs, wanted = case
    same(run(parts(exchange, sizes), xs), wanted)
    for place in range(exchange.ranks):
        assert input_rows(exchange, sizes, place) == len(xs[place])
        assert result_rows(exchange, sizes, place) == len(wanted[place])
    first, second = in_two_steps(parts(exchange, sizes))
    same(run(second, run(first, xs)), wanted)


@given(groups, st.data())
def test_bytes_are_what_two_steps_move(group: tuple[int, int], data: st.DataObject) -> None:
    """No rank receives its own rows, and none receives a row twice: counted from the parts themselves."""
    dp, tp = group
    sizes = tuple(tp * size for size in data.draw(st.lists(st.integers(0, 5), min_size=dp, max_size=dp)))
    for exchange in (exchanges.all_reduce_all_gatherv(dp, tp), exchanges.reduce_scatterv_all_reduce(dp, tp)):
        for place in range(exchange.ranks):
            steps = in_two_steps(parts(exchange, sizes))
            moved = sum(
                p.rows * sum(1 for s in p.sources if s != place) for step in steps for p in step if place in p.readers
            )
            assert rows_received(exchange, sizes, place) == moved


@given(st.integers(2, 6), st.data())
def test_a_rank_needs_only_its_own_row_and_column_of_a_permute(n: int, data: st.DataObject) -> None:
    matrix = data.draw(st.lists(rows, min_size=n * n, max_size=n * n))
    exchange = exchanges.all_to_allv(n)
    for place in range(n):
        known = [rows if place in (i // n, i % n) else 0 for i, rows in enumerate(matrix)]
        whole, seen = parts(exchange, matrix), parts(exchange, known)
        for a, b in zip(whole, seen, strict=True):
            if place in a.sources:
                assert (a.source_row, a.rows) == (b.source_row, b.rows)
            if place in a.readers:
                assert (a.reader_row, a.rows) == (b.reader_row, b.rows)


PAIRS = Exchange("gather of pairs", "gather", 2, 2, "sum")
"""A new row of the table: the sums of two pairs of ranks, to all four. No transport has heard of it."""


def check_pairs(transport: ReferenceTransport) -> Tensor:
    sizes = (2, 3)
    x = torch.arange(sizes[transport.rank // 2] * WIDTH).view(-1, WIDTH).double() + 10 * transport.rank
    return transport.exchange(x, PAIRS, (0, 1, 2, 3), sizes)


def test_a_new_exchange_runs_on_the_reference_as_it_is() -> None:
    first, second = (torch.arange(n * WIDTH).view(-1, WIDTH).double() for n in (2, 3))
    for got in run_world(4, check_pairs):
        assert torch.equal(got, torch.cat((2 * first + 10, 2 * second + 50)))
