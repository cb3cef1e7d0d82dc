"""An exchange that no transport has heard of is one row of the table: nothing else has to know it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import run_world
from torch import Tensor

from comm.oracle import draw
from comm.processes import run_processes, run_threads
from weft.comm.shm import ShmTransport, ShmTuning
from weft.comm.transport import CommError, Transport
from weft.planner.exchange import Exchange
from weft.planner.spec import Mesh

WORLD = (0, 1, 2, 3)
SCATTERED = Exchange("scattered", "scatter", 4, 1, "none")  # the first rank's rows are scattered
TWINS = Exchange("twins", "gather", 2, 2, "none")  # neighbours hold the same rows; everyone gets both runs
HALVES = Exchange("halves", "scatter", 2, 2, "sum")  # each half of the ranks gets a half of the sum
MERGED = Exchange("merged", "scatter", 4, 1, "softmax_merge")
TUNINGS = [ShmTuning(), ShmTuning(slot_bytes=4096, two_shot_bytes=64, zero_copy_bytes=1)]


def rows_of(seed: int, rank: int, rows: int) -> Tensor:
    return draw(seed, rank, rows, 24, torch.float32)


def new_exchanges(transport: Transport, mesh: Mesh | None = None) -> None:
    me = transport.rank
    for sizes in ((3, 0, 40, 1), (0, 0, 0, 0), (9, 9, 9, 9)):
        got = transport.exchange(rows_of(1, me, sum(sizes)), SCATTERED, WORLD, sizes)
        assert torch.equal(got, rows_of(1, 0, sum(sizes)).split(sizes)[me])
    for pair in ((5, 2), (0, 70), (0, 0)):
        got = transport.exchange(rows_of(2, me // 2, pair[me // 2]), TWINS, WORLD, pair)
        assert torch.equal(got, torch.cat([rows_of(2, half, rows) for half, rows in enumerate(pair)]))
        got = transport.exchange(rows_of(3, me, sum(pair)), HALVES, WORLD, pair)
        wanted = torch.stack([rows_of(3, r, sum(pair)).double() for r in WORLD]).sum(0).split(pair)[me // 2]
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-4)
    assert not transport.entry.offers(MERGED)
    with pytest.raises(CommError, match=rf"{transport.entry.name} does not offer merged"):
        transport.exchange(rows_of(4, me, 4), MERGED, WORLD, (1, 1, 1, 1))
    transport.barrier(WORLD)


def test_on_the_reference() -> None:
    run_world(4, new_exchanges)


@pytest.mark.parametrize("tuning", TUNINGS, ids=["one shot", "two shots in chunks"])
def test_on_shared_memory(tuning: ShmTuning, tmp_path: Path) -> None:
    run_threads(Mesh(2, 2, 2, 2), tmp_path, new_exchanges, tuning=tuning)


def test_over_gloo(tmp_path: Path) -> None:
    """Rows that several ranks have are copied from the first, not summed."""
    run_processes("gloo", Mesh(2, 2, 2, 2), tmp_path, new_exchanges)


def other_groups(transport: ShmTransport, mesh: Mesh) -> None:
    """Calls that only this rank can tell to be wrong raise at once: the others never come."""
    me, x = transport.rank, torch.ones(2, 3)
    strange = (0, 1) if me > 1 else (2, 3)
    for call in (transport.all_reduce, transport.all_reduce_, lambda _, g: transport.barrier(g)):
        with pytest.raises(CommError, match=r"which it is not in"):
            call(x, strange)
    with pytest.raises(CommError, match=r"no group of the layout"):
        transport.all_reduce(x, tuple(sorted({me, 3 - me})))


def test_a_group_that_the_rank_is_not_in(tmp_path: Path) -> None:
    run_threads(Mesh(2, 2, 2, 2), tmp_path, other_groups, timeout_s=600)


def lazy_views(transport: ShmTransport, mesh: Mesh) -> None:
    """Views that torch negates or conjugates only when they are read."""
    numbers = torch.arange(24.0).reshape(6, 4)
    whole = torch.complex(numbers, numbers + transport.rank)
    negated, conjugated = whole.conj().imag, whole.conj()
    assert negated.is_neg() and conjugated.is_conj()
    wanted = -(4 * numbers + 6)
    assert torch.equal(transport.all_reduce(negated, WORLD), wanted)
    assert torch.equal(transport.all_reduce(negated.clone(), WORLD), wanted)
    gathered = transport.all_gatherv(conjugated, WORLD, (6,) * 4)
    assert torch.equal(gathered, torch.cat([torch.complex(numbers, -(numbers + r)) for r in WORLD]))
    with pytest.raises(CommError, match="negated"):
        transport.all_reduce_(negated, WORLD)
    for x in (whole, whole.to(torch.complex128)):
        name = str(x.dtype).removeprefix("torch.")
        with pytest.raises(CommError, match=f"sums take float32, .*, not {name}"):
            transport.all_reduce(x, WORLD)
    transport.barrier(WORLD)


def test_lazy_views_and_complex_numbers(tmp_path: Path) -> None:
    run_threads(Mesh(2, 2, 2, 2), tmp_path, lazy_views)


def many_sizes(transport: ShmTransport, mesh: Mesh) -> None:
    """More calls of other sizes than a rank keeps plans of."""
    for index in range(3):
        for rows in range(1, 60):
            x = torch.full((rows, 2), float(transport.rank + index))
            assert (transport.all_reduce(x, WORLD) == 6 + 4 * index).all()
            # Its plan is of any size and looked up elsewhere, but forgotten with these, by which the others are.
            gathered = transport.all_gatherv(x, WORLD, (rows,) * 4)
            assert (gathered.view(4, rows, 2) == torch.arange(4.0)[:, None, None] + index).all()
            assert (transport.all_reduce(x, WORLD) == 6 + 4 * index).all()
            assert len(transport._plans) <= 50


def test_plans_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.comm.shm.MAX_PLANS", 50)
    run_threads(Mesh(2, 2, 2, 2), tmp_path, many_sizes)
