"""torchdist over gloo with real processes: the oracle matrix, and a model's logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import small_model

from comm.oracle import check_calls, check_edges
from comm.processes import run_processes
from models.test_logits import Texts, compare, drive, texts_of
from weft.comm.torchdist import TorchDistTransport
from weft.comm.transport import CommError
from weft.planner.spec import Mesh


def calls_and_edges(transport: TorchDistTransport, mesh: Mesh) -> int:
    calls = check_calls(transport, mesh, (torch.float32, torch.bfloat16))
    for counts in ([3] * mesh.attn_dp, [(5 * g) % 7 for g in range(mesh.attn_dp)], [1] + [0] * (mesh.attn_dp - 1)):
        calls += check_edges(transport, mesh, tuple(counts), torch.float64)
    return calls


@pytest.mark.parametrize("rounds", ["one round", "two rounds"])
@pytest.mark.parametrize("mesh", [Mesh(2, 2, 2, 2), Mesh(1, 2, 2, 1), Mesh(3, 1, 1, 3)], ids=str)
def test_every_call_and_edge(mesh: Mesh, rounds: str, tmp_path: Path) -> None:
    limit = 1 << 30 if rounds == "one round" else 0
    assert all(run_processes("gloo", mesh, tmp_path, calls_and_edges, one_round_bytes=limit))


def summed_in_place(transport: TorchDistTransport, mesh: Mesh) -> bool:
    x = torch.full((3, 2), float(transport.rank + 1))
    found = transport.all_reduce(x, tuple(range(mesh.world)))
    assert (found == 3).all()
    return found.data_ptr() == x.data_ptr()


def test_sums_may_take_the_place_of_the_input(tmp_path: Path) -> None:
    for name, in_place in (("in place", True), ("apart", False)):
        (directory := tmp_path / name).mkdir()
        found = run_processes("gloo", Mesh(1, 2, 2, 1), directory, summed_in_place, in_place=in_place)
        assert found == [in_place] * 2


def logits(transport: TorchDistTransport, mesh: Mesh, directory: Path, texts: Texts) -> Any:
    return drive(transport, directory, mesh, texts)


@pytest.mark.parametrize(
    "family, mesh",
    [("qwen2_moe", Mesh(2, 2, 2, 2)), ("qwen3_moe", Mesh(1, 4, 4, 1)), ("qwen3", Mesh(4, 1, 1, 4))],
    ids=str,
)
def test_a_model_gives_transformers_logits(family: str, mesh: Mesh, tmp_path: Path) -> None:
    model, texts = small_model(family, 4, tmp_path / "model"), texts_of(mesh)
    compare(run_processes("gloo", mesh, tmp_path, logits, tmp_path / "model", texts), texts, mesh, model)


def test_ranks_that_never_meet_raise(tmp_path: Path) -> None:
    with pytest.raises(CommError, match="rank 0: no gloo group of 2 ranks"):
        TorchDistTransport(Mesh(2, 1, 2, 1), 0, f"file://{tmp_path}/alone", timeout_s=1)
