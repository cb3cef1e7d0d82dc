"""Failures around shared memory: ranks that die, stop or leave, and calls that cannot be answered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from comm import faults
from comm.forks import Nursery
from comm.oracle import draw
from comm.processes import run_threads
from weft.comm.shm import ShmTransport, ShmTuning
from weft.comm.transport import CommError, Epilogue, finish
from weft.planner.spec import Mesh

MESH = Mesh(1, 3, 3, 1)
WORLD = (0, 1, 2)
SMALL = ShmTuning(slot_bytes=8192, two_shot_bytes=4096, zero_copy_bytes=2048, chunk_bytes=8192)


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery(Path(__file__).parents[1])
    yield nursery
    nursery.close()


@pytest.mark.parametrize(
    "scenario",
    [
        faults.one_is_killed,
        faults.one_is_killed_early,
        faults.all_are_killed,
        faults.one_is_stopped,
        faults.interrupted,
        faults.groups_end_apart,
        faults.host_memory_waits,
        faults.host_memory_loses,
        faults.one_leaves,
        faults.two_worlds,
        faults.only_memfd,
    ],
    ids=lambda scenario: scenario.__name__,
)
def test_processes(scenario: Callable[[Path], Any], nursery: Nursery, tmp_path: Path) -> None:
    nursery.run(scenario, tmp_path)


def error_of(call: Callable[[], object]) -> str:
    """The text of the CommError that a call must raise."""
    with pytest.raises(CommError) as error:
        call()
    return str(error.value)


def strided(transport: ShmTransport, mesh: Mesh) -> None:
    rank = transport.rank
    whole = torch.arange(96.0 * 80).reshape(96, 80) % 50 + rank
    for x in (whole.T, whole[::2], whole[:, 3:40], whole[:1].expand(96, 80), whole.T[::3, ::5]):
        assert not x.is_contiguous()
        sizes = tuple(x.shape[0] * (r == 1) for r in WORLD)
        total = 3 * (x - rank) + 3
        assert torch.equal(transport.all_reduce(x, WORLD), total)
        assert torch.equal(transport.reduce_scatterv(x, WORLD, sizes), total if rank == 1 else total[:0])
        gathered = transport.all_gatherv(x, WORLD, (x.shape[0],) * 3)
        assert torch.equal(gathered, torch.cat([x - rank + r for r in WORLD]))
        assert torch.equal(transport.broadcast(x, WORLD, 2), x - rank + 2)
    assert "contiguous" in error_of(lambda: transport.all_reduce_(whole.T, WORLD))
    assert torch.equal(transport.all_reduce(torch.ones(2, 2), WORLD), torch.full((2, 2), 3.0))


def test_strided_tensors(tmp_path: Path) -> None:
    run_threads(MESH, tmp_path, strided, tuning=SMALL)


WHOLE = (torch.int32, torch.bool, torch.int64, torch.uint8, torch.int8, torch.int16)
MOVED = (*WHOLE, torch.complex64, torch.float64, torch.float8_e4m3fn)


def whole_numbers(transport: ShmTransport, mesh: Mesh) -> None:
    """Sums of them are refused by name; moves are exact. Refusals leave the ranks in step."""
    for dtype in WHOLE:
        x = torch.ones(4, 5, dtype=dtype)
        name = str(dtype).removeprefix("torch.")
        assert name in error_of(partial(transport.all_reduce, x, WORLD))
        assert name in error_of(partial(transport.all_reduce_, x, WORLD))
        assert name in error_of(partial(transport.reduce_scatterv, x, WORLD, (2, 1, 1)))
    for dtype in MOVED:
        seeds = [torch.Generator().manual_seed(seed) for seed in WORLD]
        every = [torch.randint(0, 256, (9, 8 * 7), dtype=torch.uint8, generator=seed) for seed in seeds]
        if dtype == torch.bool:
            every = [x & 1 for x in every]
        every = [x.view(dtype) for x in every]
        x = every[transport.rank]
        bits = [y.view(torch.uint8) for y in every]

        def same(got: Tensor, wanted: Tensor, dtype: torch.dtype = dtype) -> None:
            assert got.dtype == dtype and torch.equal(got.view(torch.uint8), wanted)

        same(transport.all_gatherv(x, WORLD, (9, 9, 9)), torch.cat(bits))
        same(transport.broadcast(x, WORLD, 1), bits[1])
        place = transport.rank * 3
        sent = transport.all_to_allv(x, WORLD, (3, 3, 3), (3, 3, 3))
        same(sent, torch.cat([y[place : place + 3] for y in bits]))


def test_whole_numbers(tmp_path: Path) -> None:
    run_threads(MESH, tmp_path, whole_numbers, tuning=SMALL)


def ones(rows: int = 30, width: int = 64, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(rows, width, dtype=dtype)


USUAL = {
    "all_reduce": lambda t: t.all_reduce(ones(), WORLD),
    "all_reduce, small": lambda t: t.all_reduce(ones(1), WORLD),
    "all_reduce, in place": lambda t: t.all_reduce_(ones(2), WORLD),
    "reduce_scatterv": lambda t: t.reduce_scatterv(ones(), WORLD, (10, 10, 10)),
    "all_gatherv": lambda t: t.all_gatherv(ones(), WORLD, (30, 30, 30)),
    "broadcast": lambda t: t.broadcast(ones(), WORLD, 0),
    "barrier": lambda t: t.barrier(WORLD),
}
OTHER = {
    "size": lambda t: t.all_reduce(ones(31), WORLD),
    "shape": lambda t: t.all_reduce(ones(64, 30), WORLD),
    "dtype": lambda t: t.all_reduce(ones(dtype=torch.bfloat16), WORLD),
    "as large": lambda t: t.all_reduce(ones(15, dtype=torch.float64), WORLD),
    "epilogue": lambda t: t.all_reduce(ones(), WORLD, Epilogue(ones(), ones(1)[0], 1e-6)),
    "sizes": lambda t: t.reduce_scatterv(ones(), WORLD, (9, 11, 10)),
    "width": lambda t: t.all_gatherv(ones(width=63), WORLD, (30, 30, 30)),
    "rows": lambda t: t.all_gatherv(ones(29), WORLD, (30, 30, 29)),
    "root": lambda t: t.broadcast(ones(), WORLD, 1),
    "kind": lambda t: t.all_to_allv(ones(), WORLD, (10, 10, 10), (10, 10, 10)),
    **{f"usual {name}": call for name, call in USUAL.items()},
}


def out_of_step(transport: ShmTransport, mesh: Mesh, usual: str, other: str) -> None:
    """Rank 2 errs after some calls that leave notes and rows of usual calls behind; then all refuse to go on."""
    for _ in range(3):
        USUAL[usual](transport)
    call = (OTHER[other] if transport.rank == 2 else USUAL[usual], USUAL[usual])
    assert "another call" in error_of(lambda: call[0](transport))
    assert "out of step" in error_of(lambda: call[1](transport))


@pytest.mark.parametrize("usual", USUAL)
def test_ranks_that_make_different_calls(usual: str, tmp_path: Path) -> None:
    for other in OTHER:
        if other != f"usual {usual}":
            run_threads(MESH, tmp_path, out_of_step, usual, other, tuning=SMALL)


def uneven(transport: ShmTransport, mesh: Mesh, sent: int) -> str:
    """Rank 2 sends rank 0 other rows than that expects; gives what each rank finds, if it finds something."""
    x, rank = ones(40), transport.rank
    for _ in range(2):
        transport.all_to_allv(x[:30], WORLD, (10, 10, 10), (10, 10, 10))
    send = (sent, 10, 10) if rank == 2 else (10, 10, 10)
    try:
        transport.all_to_allv(x[: sum(send)], WORLD, send, (10, 10, 10))
    except CommError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("sent", [0, 9, 20])
def test_rows_that_nobody_expects(sent: int, tmp_path: Path) -> None:
    errors = run_threads(MESH, tmp_path, uneven, sent, tuning=SMALL)
    assert f"rank 2 sends {sent * 64} elements where this rank expects 640" in errors[0] and "all_to_allv" in errors[0]
    for error in errors[1:]:  # they may have had all they wanted before rank 0 left
        assert not error or "rank 0" in error


def alone(path: Path, **options: Any) -> ShmTransport:
    return ShmTransport(Mesh(), 0, path, **options)


def test_an_arena_that_is_full(tmp_path: Path) -> None:
    transport = alone(tmp_path / "meet", blocks=4, block_bytes=1 << 20)
    kept = [transport.all_reduce(ones(1000), (0,)) for _ in range(4)]
    assert "give the transport more blocks" in error_of(lambda: transport.all_reduce(ones(1000), (0,)))
    assert "larger block_bytes" in error_of(lambda: transport.empty(1 << 40, 1 << 10, like=ones()))
    del kept[0]
    assert torch.equal(transport.all_reduce(ones(1000), (0,)), ones(1000))
    transport.close()


def wide_rows(transport: ShmTransport, mesh: Mesh) -> None:
    """Rows of which no slot holds a whole one are normalised all the same, in one shot and in two."""
    for rows, width, dtype in ((1, 1000, torch.float32), (5, 3001, torch.float32), (3, 700, torch.float64)):
        every = [draw(rows, r, rows, width, dtype) for r in (*WORLD, 3)]
        epilogue = Epilogue(every[3], every[3][0] + 1, 1e-6)
        got = transport.all_reduce(every[transport.rank], WORLD, epilogue)
        wanted = finish(torch.stack([x.double() for x in every[:3]]).sum(0).to(dtype), epilogue)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("two_shot_bytes", [1 << 40, 0])
def test_rows_wider_than_a_slot(two_shot_bytes: int, tmp_path: Path) -> None:
    tuning = replace(SMALL, slot_bytes=2048, two_shot_bytes=two_shot_bytes)
    run_threads(MESH, tmp_path, wide_rows, tuning=tuning)


def test_slots_that_are_too_small(tmp_path: Path) -> None:
    transport = alone(tmp_path / "meet", tuning=replace(SMALL, slot_bytes=128))
    assert "give the transport a larger slot_bytes" in error_of(lambda: transport.all_reduce(ones(), (0,)))
    transport.close()


def churn(transport: ShmTransport, mesh: Mesh, rounds: int) -> None:
    """Results of a MiB each, far more than the arena holds, of which a few are kept and must stay as they are."""
    group, kept = (0, 1), []
    x = torch.empty(1 << 18)
    for i in range(rounds):
        got = transport.empty(1 << 18, like=x) if i % 10 else transport.all_reduce(x.fill_(i % 100), group)
        if i % 10 == 0:
            kept = [*kept[-3:], (2 * (i % 100), got)]
            assert all((tensor == value).all() for value, tensor in kept)


def test_memory_is_used_again(tmp_path: Path) -> None:
    run_threads(Mesh(1, 2, 2, 1), tmp_path, churn, 2_000, blocks=6, block_bytes=1 << 20)


def leaves_results(transport: ShmTransport, mesh: Mesh) -> list[Tensor]:
    x = ones(300) * (transport.rank + 1)
    empty = transport.empty(300, 64, like=x).copy_(x)
    return [transport.all_reduce(x, WORLD), empty, transport.all_reduce(empty, WORLD)]


def test_results_outlive_the_transport(tmp_path: Path) -> None:
    for rank, tensors in enumerate(run_threads(MESH, tmp_path, leaves_results, tuning=SMALL)):
        for tensor, value in zip(tensors, (6, rank + 1, 6), strict=True):
            assert (tensor == value).all()
            assert (tensor.fill_(7) == 7).all()


def test_stale_files_at_the_meeting_place(tmp_path: Path) -> None:
    path = tmp_path / "shm"
    for _ in range(2):
        path.write_text("of another run")
        assert len(run_threads(MESH, tmp_path, leaves_results)) == 3
        assert not list(tmp_path.iterdir())
    path.mkdir()
    assert "cannot meet" in error_of(lambda: alone(path))
    assert "cannot meet" in error_of(lambda: alone(tmp_path / "no folder" / "shm"))
    assert "cannot meet" in error_of(lambda: alone(tmp_path / ("long" * 40)))


def test_sizes_that_are_no_whole_pages(tmp_path: Path) -> None:
    """Counters that straddle cache lines are no longer atomic, and streamed stores to odd places end the process."""
    tuning = replace(SMALL, slot_bytes=10_001, stream_slot_bytes=0, stream_out_bytes=0)
    run_threads(MESH, tmp_path, strided, tuning=tuning, block_bytes=100_003)


def test_ranks_with_other_sizes_do_not_meet(tmp_path: Path) -> None:
    def meets(transport: ShmTransport, mesh: Mesh) -> None:
        text = error_of(
            lambda: ShmTransport(mesh, transport.rank, tmp_path / "b", timeout_s=240, block_bytes=size(transport))
        )
        assert ("another layout or other sizes", "rejected this rank")[transport.rank] in text

    def size(transport: ShmTransport) -> int:
        return (1 << 20) * (1 + transport.rank)

    run_threads(Mesh(1, 2, 2, 1), tmp_path, meets)
