"""The rules of placements: what keeps them, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import run_world, small_model
from torch import Tensor

from comm.processes import run_threads
from weft.comm.transport import Transport
from weft.engine.batch import SeqRows, build_batch
from weft.engine.runner import ModelRunner
from weft.hidden import Hidden
from weft.kv.spec import CacheGroup, Rule
from weft.models.layers import Builder, ColumnLinear, Out, RMSNorm, RowLinear
from weft.models.load import load_model
from weft.models.registry import load_config
from weft.place.spec import Mesh, PlacementError, Rows

MESH = Mesh(1, 2, 1, 2)  # attn_tp is the world
CPU = torch.device("cpu")


def hidden(width: int, **placement: str) -> Hidden:
    torch.manual_seed(0)
    return Hidden(torch.randn(3, width), MESH.placement(Rows.GROUP, **placement), MESH, "block")


def filled(layer: Any) -> Any:
    for weight in layer.parameters():
        torch.nn.init.normal_(weight)
    return layer


def test_a_norm_over_split_features_is_refused() -> None:
    """Each rank would divide by the root mean square of its own part: fluent, wrong text."""
    b = Builder(MESH, 0, torch.float32, CPU)
    up = filled(ColumnLinear(b, "mlp.up", 8, [Out("mlp.up", 8)], over="attn_tp"))
    norm = filled(RMSNorm(b, "mlp.norm", 4, 1e-6))
    with pytest.raises(PlacementError, match=r"mlp\.norm needs \(GROUP\), but mlp\.up is \(GROUP, features split over"):
        norm(up(hidden(8)))


def test_a_softmax_over_split_features_is_refused() -> None:
    with pytest.raises(PlacementError, match=r"router needs .*, but block is .*features split over"):
        hidden(4, split="world").rowwise(lambda x: x.softmax(-1), "router")


@pytest.mark.parametrize("kind", ["elementwise", "rowwise"])
def test_a_nonlinear_function_of_a_partial_sum_is_refused(kind: str) -> None:
    with pytest.raises(PlacementError, match=r"tanh .*block is .*owes sum over world"):
        getattr(hidden(4, owes="world"), kind)(torch.tanh, "tanh")


def test_elementwise_keeps_split_features_split() -> None:
    x = hidden(4, split="world")
    y = x.elementwise(torch.tanh, "tanh")
    assert y.placement == x.placement and torch.equal(y.value, x.value.tanh())


def test_a_norm_of_whole_rows() -> None:
    b = Builder(MESH, 0, torch.float32, CPU)
    norm, x = filled(RMSNorm(b, "norm", 8, 1e-6)), hidden(8)
    y = norm(x)
    assert y.placement == x.placement
    assert torch.allclose(y.value, torch.nn.functional.rms_norm(x.value, (8,), norm.weight, 1e-6), atol=1e-6)


def test_a_row_linear_of_unsplit_features_is_refused() -> None:
    b = Builder(MESH, 0, torch.float32, CPU)
    with pytest.raises(PlacementError, match=r"down needs .*features split over .*, but block is \(GROUP\)"):
        filled(RowLinear(b, "down", 8, 8, over="attn_tp"))(hidden(8))


def logits(transport: Transport, mesh: Mesh, directory: Path) -> tuple[Tensor, Tensor, str]:
    """Of a model whose embedding leaves its rows column by column in memory, and of one that does not; the steps."""
    torch.set_num_threads(1)
    out = []
    for strided in (False, True):
        model = load_model(directory, load_config(directory), mesh, transport.rank)
        runner = ModelRunner(model, mesh, transport.rank, [transport], [CacheGroup(Rule(), 4)], 4)
        embed = model.embed.forward
        if strided:
            model.embed.forward = lambda tokens, embed=embed: (
                (h := embed(tokens)) and replace(h, value=h.value.t().contiguous().t())
            )
        out.append(runner.forward(build_batch([3, 4, 5], [SeqRows(3, 0, [[0]], True)], 4), (3,)))
    return out[0], out[1], " ".join(s.step for s in runner.report())


@pytest.mark.parametrize("transport", ["reference", "shm"])
def test_a_residual_that_is_not_contiguous(transport: str, tmp_path: Path) -> None:
    small_model("qwen2_moe", 2, tmp_path)
    if transport == "shm":
        results = run_threads(MESH, tmp_path, logits, tmp_path)
    else:
        results = run_world(2, lambda t: logits(t, MESH, tmp_path))
    for straight, strided, steps in results:
        assert (straight - strided).norm() <= 1e-6 * straight.norm()  # sums over rows in another order round otherwise
        assert "norm" in steps, steps
