"""The planner for a model of one's own, and the examples as their pages say to run them."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import weft
from library.worlds import run_ranks, summed
from weft.kernels.torch_reference import rms_norm
from weft.library.communicator import Communicator

ROOT = Path(__file__).parents[2]
WIDTH = 16
GATHERED = "[0.0, 0.0, 1.0, 1.0, 1.0] [0.0, 0.0] [0.0, 0.0, 3.0, 3.0, 3.0]"
"""Output of `collectives`."""


def example(name: str) -> Any:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.nightly  # three processes import torch; by day it runs below
def test_an_example_runs_under_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    script = str(ROOT / "examples" / "collectives.py")
    ended = subprocess.run([*command, script], env=environment, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    assert GATHERED in ended.stdout


def run_example(name: str, folder: Path) -> None:
    """Run an example as torchrun does, in a process group that is there already."""
    with (
        open(folder / f"printed-{dist.get_rank()}", "w") as printed,
        contextlib.redirect_stdout(printed),
        mock.patch.multiple(dist, init_process_group=mock.DEFAULT, destroy_process_group=mock.DEFAULT),
    ):
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("collectives", GATHERED),
        ("tensor_parallel", "2 ranks compute what one does"),
        ("planned_model", "[3, 64]\nbefore second.norm: normed: all_gatherv"),
    ],
)
def test_examples(name: str, said: str, tmp_path: Path) -> None:
    run_ranks(2, tmp_path, run_example, name, tmp_path)
    assert said in (tmp_path / "printed-0").read_text()


def by_hand(model: Any, mesh: weft.Mesh, x: Tensor, rows: list[int]) -> Tensor:
    """The example's model, with every debt summed over all ranks at once, on the rows of all groups."""
    whole = torch.zeros(sum(rows), WIDTH)
    begin = sum(rows[: mesh.group_of(dist.get_rank())])
    whole[begin : begin + len(x)] = x
    whole = summed(whole) / mesh.attn_tp
    for block, term in ((model.first, mesh.attn_tp), (model.second, mesh.world)):
        normed = rms_norm(whole, block.norm.weight, block.norm.eps)
        part = block.down(block.up(normed).relu())
        if term == mesh.attn_tp:  # of this group's rows alone
            mine = torch.zeros_like(whole)
            mine[begin : begin + len(x)] = part[begin : begin + len(x)]
            part = mine
        whole = whole + summed(part)
    return rms_norm(whole, model.norm.weight, model.norm.eps)[begin : begin + len(x)]


def planned(mesh: weft.Mesh) -> None:
    module = example("planned_model")
    torch.manual_seed(dist.get_rank())
    model = module.Model(mesh, WIDTH)
    traced = weft.trace(model, mesh, torch.empty(0, WIDTH), width=WIDTH)
    with Communicator(max_bytes=1 << 20, mesh=mesh) as comm, torch.inference_mode():
        for rows in ([0, 3, 1][: mesh.attn_dp], [5] * mesh.attn_dp, [0] * mesh.attn_dp, [300, 1, 2][: mesh.attn_dp]):
            x = torch.randn(rows[mesh.group_of(comm.rank)], WIDTH)
            x = comm.broadcast(x) if mesh.attn_dp == 1 else x  # ranks of a group have the same rows
            plan = weft.plan(traced, rows, comm)
            assert plan is weft.plan(traced, rows, comm)
            stream = weft.Stream(plan, comm, rows)
            made = model(stream, x)
            stream.finish()
            torch.testing.assert_close(made, by_hand(model, mesh, x, rows), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mesh", [weft.Mesh(1, 2, 1, 2), weft.Mesh(2, 1, 2, 1), weft.Mesh(3, 1, 1, 3)], ids=str)
def test_a_model_of_ones_own_computes_what_it_does_by_hand(mesh: weft.Mesh, tmp_path: Path) -> None:
    run_ranks(mesh.world, tmp_path, planned, mesh)


def test_a_plan_without_ranks() -> None:
    """The planner prints what it would do for any number of ranks, also on GPUs."""
    mesh = weft.Mesh(4, 2, 8, 1)
    model = example("planned_model").Model(mesh, 64).bfloat16()
    traced = weft.trace(model, mesh, torch.empty(0, 64, dtype=torch.bfloat16), width=64, dtype=torch.bfloat16)
    ops = [str(op) for _, op in weft.plan(traced, 8, device="cuda", costs="h200x4").ops()]
    assert any("all_gatherv" in op for op in ops) and any("reduce_scatterv" in op for op in ops)
    for rows in ([1, 2], [1.0] * 4, 2.5, None, torch.ones(4, dtype=torch.int64)):
        with pytest.raises(ValueError, match="4 counts of 0 or more"):
            weft.plan(traced, rows)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="device is 'tpu'; a plan is for cpu or cuda"):
        weft.plan(traced, 1, device="tpu")  # type: ignore[arg-type]
    for name in ({"owes": "tp"}, {"split": "tp"}):
        with pytest.raises(weft.PlacementError, match="no group 'tp' of ranks; there are world, attn_tp"):
            mesh.placement(weft.GROUP, **name)
    with pytest.raises(weft.LayoutError, match="no cost preset 'moon'"):
        weft.plan(traced, 1, costs="moon")


def test_a_block_that_forgets_its_sum_is_found_by_the_trace() -> None:
    mesh = weft.Mesh(1, 2, 1, 2)

    def forgetful(stream: weft.Stream, x: Tensor) -> None:
        norm = example("planned_model").Norm("norm", 64)
        stream.add(weft.Hidden(x, mesh.placement(weft.GROUP), mesh, "input"))
        part = weft.Hidden(x, mesh.placement(weft.GROUP, owes="attn_tp"), mesh, "block")
        stream.add(part)
        stream.read(norm, rows=weft.GROUP)
        part.require_complete("head")

    with pytest.raises(weft.PlacementError, match=r"head needs \(GROUP\), but block is .*owes sum over world"):
        weft.trace(forgetful, mesh, torch.empty(0, 64), width=64)


def wrong_streams() -> None:
    mesh, module = weft.Mesh(), example("planned_model")
    traced = weft.trace(module.Model(mesh, WIDTH), mesh, torch.empty(0, WIDTH), width=WIDTH)
    with Communicator(max_bytes=1 << 16) as comm:
        plan = weft.plan(traced, 5, comm)
        with pytest.raises(ValueError, match="gradients do not pass"):
            weft.Stream(plan, comm, 5)
        with torch.inference_mode():
            with pytest.raises(ValueError, match=r"is for 8 tokens a group, this step has \[9\]"):
                weft.Stream(plan, comm, 9)
            weft.Stream(plan, comm, 7)
        other = weft.Mesh(2, 1, 2, 1)
        elsewhere = weft.trace(module.Model(other, WIDTH), other, torch.empty(0, WIDTH), width=WIDTH)
        with pytest.raises(ValueError, match="was traced on attn_dp=2"):
            weft.plan(elsewhere, 5, comm)


def test_streams_that_do_not_fit(tmp_path: Path) -> None:
    run_ranks(1, tmp_path, wrong_streams)
