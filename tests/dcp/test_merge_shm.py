"""The merge on transport shm: in chunks, by every instruction set, and calls that do not fit each other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from comm.builds import ISAS
from comm.processes import run_processes, run_threads
from dcp.shards import check, own, shards_of
from dcp.test_merge import merge_all
from weft.comm.shm import ShmTransport, ShmTuning
from weft.comm.transport import CommError
from weft.planner.spec import Mesh

PAIR, THREE = Mesh(1, 2, 2, 1, dcp=2), Mesh(1, 3, 3, 1, dcp=3)


@pytest.mark.parametrize("mesh", [PAIR, THREE], ids=str)
def test_in_chunks(mesh: Mesh, tmp_path: Path) -> None:
    run_threads(mesh, tmp_path, merge_all, tuning=ShmTuning(slot_bytes=2048))


def test_processes(tmp_path: Path) -> None:
    run_processes("shm", PAIR, tmp_path, merge_all)


def merges(transport: ShmTransport, mesh: Mesh) -> list[Tensor]:
    found: list[Tensor] = []
    n, me = mesh.dcp, transport.rank
    for seed, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16)):
        shards = shards_of([3, 60, 0, 17], n, 2 * n, 37, dtype, seed=seed)
        shards.outs[:, 0, 0, :4] *= torch.tensor([1e-40, 6e-6, 3e38, 0.0]).to(dtype)
        found += transport.merge_scatterv(shards.outs[me], shards.lses[me], tuple(range(n)))
    return found


def test_every_instruction_set_gives_the_same_bits(tmp_path: Path) -> None:
    runs = [run_threads(THREE, tmp_path, merges, isa=isa) for isa in ISAS]
    for other in runs[1:]:
        for rank, (a, b) in enumerate(zip(runs[0], other, strict=True)):
            assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(a, b, strict=True)), rank


def misfits(transport: ShmTransport, mesh: Mesh) -> None:
    """Make misfits that all ranks find alike, and go on; then a call that only the others can tell is wrong."""
    group, me = (0, 1), transport.rank
    empty = transport.merge_scatterv(torch.empty(0, 4, 8), torch.empty(0, 4), group)
    assert empty[0].shape == (0, 2, 8) and empty[1].shape == (0, 2)
    with pytest.raises(CommError, match="float32, bfloat16 or float16, not float64"):
        transport.merge_scatterv(torch.ones(1, 2, 8).double(), torch.zeros(1, 2), group)
    with pytest.raises(CommError, match=r"slots of 2048 bytes .* heads of 4096 bytes; .*slot_bytes"):
        transport.merge_scatterv(torch.ones(1, 2, 1024), torch.zeros(1, 2), group)
    shards = shards_of([5], 2, 2, 8)
    got = transport.merge_scatterv(shards.outs[me], shards.lses[me], group)
    check(got, (own(shards.out, 2, me), own(shards.lse, 2, me)), "after what was refused")
    with pytest.raises(CommError, match="makes another call, or one of another size"):
        transport.merge_scatterv(torch.ones(1 + me, 2, 8), torch.zeros(1 + me, 2), group)


def test_calls_that_do_not_fit(tmp_path: Path) -> None:
    run_threads(PAIR, tmp_path, misfits, tuning=ShmTuning(slot_bytes=2048))
