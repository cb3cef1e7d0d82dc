"""The shared-memory transport with real processes: the oracle matrix on every path through it, and a model's logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import small_model

from comm.builds import ISAS
from comm.oracle import check_calls, check_edges, check_epilogues, counts_of, draw
from comm.processes import run_processes, run_threads
from models.test_logits import Texts, compare, drive, texts_of
from weft.comm.shm import ShmTransport, ShmTuning
from weft.comm.transport import CommError
from weft.planner.spec import Mesh

SUMMED = (torch.float32, torch.bfloat16, torch.float16)
# Which path a size takes is a matter of tuning: make each take all of them, and small slots cut all into chunks.
TUNINGS = {
    "one shot": ShmTuning(two_shot_bytes=1 << 40, zero_copy_bytes=1 << 40),
    "one shot, in chunks": ShmTuning(slot_bytes=8192, two_shot_bytes=1 << 40, zero_copy_bytes=1 << 40),
    "one shot, zero copy": ShmTuning(two_shot_bytes=1 << 40, zero_copy_bytes=1),
    "two shots": ShmTuning(two_shot_bytes=-1, zero_copy_bytes=1 << 40, stream_slot_bytes=0, stream_out_bytes=0),
    "two shots, in chunks": ShmTuning(slot_bytes=8192, two_shot_bytes=-1, zero_copy_bytes=1 << 40, stream_slot_bytes=0),
    "two shots, zero copy": ShmTuning(two_shot_bytes=-1, zero_copy_bytes=1, chunk_bytes=1024, stream_out_bytes=0),
}


def everything(transport: ShmTransport, mesh: Mesh, one_dtype: bool = False) -> int:
    """The oracle matrix. More than four ranks see one dtype of each: how an exchange goes does not depend on it."""
    summed = SUMMED[1:2] if one_dtype or mesh.world > 4 else SUMMED
    calls = check_calls(transport, mesh, summed)
    calls += check_calls(transport, mesh, (torch.bfloat16, torch.float64)[: len(summed)], at_home=True)
    for counts in counts_of(mesh):
        calls += check_edges(transport, mesh, counts, torch.float64)
    return calls + check_epilogues(transport, mesh, summed)


EVERY_DTYPE = {"one shot", "two shots", "two shots, zero copy"}
"""Ways that are tested in every dtype by day. The others cut and place the same sums otherwise."""


@pytest.mark.parametrize(
    ("name", "one_dtype"),
    [(name, name not in EVERY_DTYPE) for name in TUNINGS]
    + [pytest.param(name, False, marks=pytest.mark.nightly) for name in TUNINGS if name not in EVERY_DTYPE],
)
def test_every_call_edge_and_epilogue(name: str, one_dtype: bool, tmp_path: Path) -> None:
    assert all(run_threads(Mesh(2, 2, 2, 2), tmp_path, everything, one_dtype, tuning=TUNINGS[name]))


def many_rows(transport: ShmTransport, mesh: Mesh) -> int:
    calls = check_calls(transport, mesh, (torch.bfloat16,), scale=67)
    calls += check_calls(transport, mesh, (torch.float32,), at_home=True, scale=67)
    return calls + check_epilogues(transport, mesh, (torch.float16, torch.float32), scale=31)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.nightly] * (n != "one shot, in chunks")) for n in TUNINGS]
)
def test_many_rows(name: str, tmp_path: Path) -> None:
    """Compare calls of many rows with the oracle."""
    assert all(run_threads(Mesh(2, 2, 2, 2), tmp_path, many_rows, tuning=TUNINGS[name]))


def in_place(transport: ShmTransport, mesh: Mesh) -> bool:
    """Sums over an ordinary tensor, over one in the arena, and where ranks differ in that."""
    group = mesh.peers("world", transport.rank)
    for at_home in ((), group, group[::2]):
        mine = draw(1, transport.rank, 50, 67, torch.bfloat16)
        want = sum(draw(1, rank, 50, 67, torch.bfloat16).float() for rank in group).bfloat16()
        x = transport.empty(50, 67, like=mine).copy_(mine) if transport.rank in at_home else mine
        transport.all_reduce_(x, group)
        assert torch.equal(x, want)
    return True


@pytest.mark.parametrize("tuning", TUNINGS.values(), ids=list(TUNINGS))
def test_in_place(tuning: ShmTuning, tmp_path: Path) -> None:
    assert all(run_threads(Mesh(1, 3, 3, 1), tmp_path, in_place, tuning=tuning))


def in_shared_memory(transport: ShmTransport, mesh: Mesh) -> int:
    transport.all_reduce_(torch.ones(4000, dtype=torch.float64), mesh.peers("world", transport.rank))
    return transport.peak_blocks


def test_a_sum_in_place_takes_one_block_where_peers_read_it(tmp_path: Path) -> None:
    assert run_threads(Mesh(1, 2, 2, 1), tmp_path, in_shared_memory) == [1, 1]


EIGHT = pytest.param(Mesh(4, 2, 2, 4), marks=pytest.mark.nightly)


@pytest.mark.parametrize("mesh", [Mesh(1, 2, 2, 1), Mesh(3, 1, 1, 3), Mesh(2, 3, 6, 1), EIGHT], ids=str)
def test_other_worlds(mesh: Mesh, tmp_path: Path) -> None:
    assert all(run_processes("shm", mesh, tmp_path, everything, tuning=ShmTuning(two_shot_bytes=300, slot_bytes=8192)))


def test_processes(tmp_path: Path) -> None:
    assert all(run_processes("shm", Mesh(2, 2, 4, 1), tmp_path, everything))


def sixteen(transport: ShmTransport, mesh: Mesh) -> int:
    return check_calls(transport, mesh, (torch.bfloat16,)) + check_edges(transport, mesh, (2, 0, 1, 3), torch.float32)


def test_sixteen_ranks(tmp_path: Path) -> None:
    assert all(run_threads(Mesh(4, 4, 4, 4), tmp_path, sixteen))


def sums(transport: ShmTransport, mesh: Mesh) -> list[torch.Tensor]:
    """Sums of awkward values (subnormal, huge, infinite, NaN), large and small, in every dtype."""
    group, found = mesh.peers("world", transport.rank), []
    for seed, dtype in enumerate(SUMMED):
        x = draw(seed, transport.rank, 40, 333, torch.float64)
        x[0], x[1], x[2] = x[0] * 1e-40, x[1] * 6e-6, x[2] * 3e38
        x[3, :9] = torch.tensor([torch.inf, -torch.inf, torch.nan] * 3)
        for rows in (1, 40):
            found.append(transport.all_reduce(x[:rows].to(dtype), group))
            in_place = x[:rows].to(dtype)
            transport.all_reduce_(in_place, group)
            assert torch.equal(in_place.nan_to_num(), found[-1].nan_to_num())
            at_home = transport.empty(rows, 333, like=in_place).copy_(x[:rows])
            transport.all_reduce_(at_home, group)
            assert torch.equal(at_home.nan_to_num(), found[-1].nan_to_num())
    return found


def test_every_rank_run_and_instruction_set_gives_the_same_bits(tmp_path: Path) -> None:
    mesh = Mesh(1, 3, 3, 1)
    runs = []
    for isa in [*ISAS, "auto"]:
        runs += run_threads(mesh, tmp_path, sums, isa=isa)
    for other in runs[1:]:
        for a, b in zip(runs[0], other, strict=True):
            assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
    for i, dtype in enumerate(SUMMED):  # and they are torch's own, summed in float32 in rank order
        inputs = [draw(i, r, 40, 333, torch.float64) for r in range(3)]
        for x in inputs:
            x[0], x[1], x[2] = x[0] * 1e-40, x[1] * 6e-6, x[2] * 3e38
            x[3, :9] = torch.tensor([torch.inf, -torch.inf, torch.nan] * 3)
        a, b, c = (x.to(dtype).float() for x in inputs)
        assert torch.equal(runs[0][2 * i + 1].nan_to_num(), (a + b + c).to(dtype).nan_to_num())


def test_the_widest_instruction_set_is_taken(tmp_path: Path) -> None:
    assert run_threads(Mesh(), tmp_path, lambda transport, _: transport.isa) == ISAS[-1:]


def logits(transport: ShmTransport, mesh: Mesh, directory: Path, texts: Texts) -> Any:
    return drive(transport, directory, mesh, texts)


@pytest.mark.parametrize(
    "family, mesh",
    [("qwen2_moe", Mesh(2, 2, 2, 2)), ("qwen3_moe", Mesh(1, 4, 4, 1)), ("qwen3", Mesh(4, 1, 1, 4))],
    ids=str,
)
def test_a_model_gives_transformers_logits(family: str, mesh: Mesh, tmp_path: Path) -> None:
    model, texts = small_model(family, 4, tmp_path / "model"), texts_of(mesh)
    compare(run_processes("shm", mesh, tmp_path, logits, tmp_path / "model", texts), texts, mesh, model)


def test_ranks_that_never_meet_raise(tmp_path: Path) -> None:
    with pytest.raises(CommError, match="did not all arrive"):
        ShmTransport(Mesh(2, 1, 2, 1), 0, tmp_path / "alone", timeout_s=0.3)
    with pytest.raises(CommError, match="did not all arrive"):
        ShmTransport(Mesh(2, 1, 2, 1), 1, tmp_path / "alone", timeout_s=0.3)
    assert not list(tmp_path.iterdir())
