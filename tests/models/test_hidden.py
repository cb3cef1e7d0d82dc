"""The rules of placements: what keeps them, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import run_world, small_model
from torch import Tensor
from transformers.models.step3p7.modeling_step3p7 import Step3p7RMSNorm

from comm.processes import run_threads
from weft.comm.transport import Transport
from weft.engine.attention.build_batch import SeqRows, build_batch
from weft.engine.kv.cache_spec import CacheGroup, Rule
from weft.engine.models.layers.basic import Builder, ColumnLinear, Embedding, Linear, Out, RMSNorm, RowLinear
from weft.engine.models.layers.mlp import GatedMLP, WholeMLP
from weft.engine.models.layers.moe import Experts, MoEConfig
from weft.engine.models.layers.routing import Router, Routing
from weft.engine.models.load import load_model
from weft.engine.models.registry import load_config
from weft.engine.worker.model_runner import ModelRunner
from weft.kernels import torch_reference
from weft.planner.spec import Mesh, PlacementError, Rows
from weft.stream.hidden import Hidden

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


OTHER_ROWS = Mesh(2, 2, 2, 2)


def of(mesh: Mesh, rows: Rows, **placement: str) -> Hidden:
    return Hidden(torch.ones(3, 4), mesh.placement(rows, **placement), mesh, f"block {rows.name}")


@pytest.mark.parametrize("factor", [dict(owes="world"), dict(split="world")], ids=str)
def test_a_factor_that_is_not_complete_is_refused(factor: dict[str, str]) -> None:
    """A gate that owes a sum would scale each rank's part by another number: fluent, wrong text."""
    for scaled in (hidden(4), hidden(4, owes="world")):
        with pytest.raises(PlacementError, match=r"a factor of block needs \(GROUP\), but block is \(GROUP, "):
            scaled.scale(hidden(4, **factor))


def test_a_factor_of_other_rows_is_refused() -> None:
    with pytest.raises(PlacementError, match=r"cannot scale block WORLD .* by block OWN .*: other rows"):
        of(OTHER_ROWS, Rows.WORLD, owes="world").scale(of(OTHER_ROWS, Rows.OWN))


@pytest.mark.parametrize("placement", [{}, dict(owes="world"), dict(split="world")], ids=str)
def test_a_scaled_value_owes_what_it_owed(placement: dict[str, str]) -> None:
    x, factor = hidden(4, **placement), hidden(1)
    wanted = x.value * factor.value
    y = x.scale(factor)
    assert y.placement == x.placement and torch.equal(y.value, wanted)


@pytest.mark.parametrize("other", [{}, dict(split="world")], ids=str)
def test_values_that_owe_otherwise_are_not_added(other: dict[str, str]) -> None:
    """Addition in place fails too, and nothing is overwritten."""
    x = hidden(4, owes="world")
    before = x.value.clone()
    with pytest.raises(PlacementError, match=r"cannot add block .* to block .*owe the same"):
        x + hidden(4, **other)
    with pytest.raises(PlacementError, match=r"cannot add block .* to block .*owe the same"):
        x += hidden(4, **other)
    assert torch.equal(x.value, before)


def test_values_of_other_rows_are_not_added() -> None:
    for other in (of(OTHER_ROWS, Rows.OWN), of(OTHER_ROWS, Rows.WORLD)):
        with pytest.raises(PlacementError, match="both must hold the same rows"):
            of(OTHER_ROWS, Rows.GROUP) + other


def test_two_sums_that_owe_the_same_owe_it_once() -> None:
    x, y = hidden(4, owes="world"), hidden(4, owes="attn_tp")  # one group here, by two names
    total = x + y
    assert total.placement == x.placement and torch.equal(total.value, x.value + y.value)
    x += y
    assert x.placement == total.placement and torch.equal(x.value, total.value)


@pytest.mark.parametrize("placement", [dict(owes="world"), dict(split="world")], ids=str)
def test_whole_rows_are_required(placement: dict[str, str]) -> None:
    x = hidden(4, **placement)
    for use in (x.require_complete, lambda reader: x.rowwise(torch.tanh, reader)):
        with pytest.raises(PlacementError, match=r"reader needs \(GROUP\), but block is \(GROUP, "):
            use("reader")
    with pytest.raises(PlacementError, match=r"reader needs \(GROUP\), but block is"):
        x.require_placement(MESH.placement(Rows.GROUP), "reader")
    x.require_placement(x.placement, "reader")
    assert torch.equal(hidden(4).require_complete("reader"), hidden(4).value)


LAYERS: dict[str, Callable[[Builder], Any]] = {
    "linear": lambda b: Linear(b, "layer", 8, 4),
    "column": lambda b: ColumnLinear(b, "layer", 8, [Out("layer", 8)], over="attn_tp"),
    "norm": lambda b: RMSNorm(b, "layer", 8, 1e-6),
    "experts": lambda b: Experts(b, "layer", 8, MoEConfig(4, 4, Routing(1))),
    "router": lambda b: Router(b, "layer", 8, 4, Routing(2)),
    "mlp": lambda b: GatedMLP(b, "layer", 8, 8),
    "whole mlp": lambda b: WholeMLP(b, "layer", 8, 8),
}

ROUTER = filled(Router(Builder(MESH, 0, torch.float32, CPU), "gate", 8, 4, Routing(2)))


@pytest.mark.parametrize("placement", [dict(owes="world"), dict(split="world")], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_takes_complete_rows_alone(name: str, placement: dict[str, str]) -> None:
    layer, x = filled(LAYERS[name](Builder(MESH, 0, torch.float32, CPU))), hidden(8, **placement)
    uses = {"experts": [lambda: layer(x, ROUTER)], "router": [lambda: layer.logits(x), lambda: layer.choose(x)]}
    uses["column"] = [lambda: layer(x), lambda: layer.feed(x, torch.tanh, "attention")]
    for use in uses.get(name, [lambda: layer(x)]):
        with pytest.raises(PlacementError, match=r"layer.* needs \(GROUP\), but block is \(GROUP, "):
            use()


def test_what_layers_leave() -> None:
    """Their outputs, put together over the ranks, equal the whole product's; a bias is in the sum once."""
    x, outputs, partial = hidden(8), [], []
    for rank in range(2):
        b = Builder(MESH, rank, torch.float32, CPU)
        column = ColumnLinear(b, "up", 8, [Out("up", 6)], over="attn_tp", bias=True)
        row = RowLinear(b, "down", 6, 4, over="attn_tp", bias=True)
        torch.manual_seed(1)
        whole = {"up": torch.randn(6, 8), "up bias": torch.randn(6), "down": torch.randn(4, 6), "bias": torch.randn(4)}
        mine = slice(3 * rank, 3 * rank + 3)
        column.weight.data.copy_(whole["up"][mine])
        column.bias.data.copy_(whole["up bias"][mine])
        row.weight.data.copy_(whole["down"][:, mine])
        assert (row.bias is None) == (rank == 1)
        if row.bias is not None:
            row.bias.data.copy_(whole["bias"])
        inner = column(x)
        assert inner.placement == MESH.placement(Rows.GROUP, split="attn_tp")
        fed = column.feed(x, torch.tanh, "attention")
        assert fed.placement == inner.placement and torch.equal(fed.value, inner.value.tanh())
        out = row(inner)
        assert out.placement == MESH.placement(Rows.GROUP, owes="attn_tp")
        outputs.append(inner.value)
        partial.append(out.value)
    wanted = torch.nn.functional.linear(x.value, whole["up"], whole["up bias"])
    assert torch.allclose(torch.cat(outputs, 1), wanted, atol=1e-5)
    wanted = torch.nn.functional.linear(wanted, whole["down"], whole["bias"])
    assert torch.allclose(partial[0] + partial[1], wanted, atol=1e-5)


def test_features_are_split_only_where_ranks_hold_the_same_rows() -> None:
    """Over the world only rows of the world: other ranks' features would belong to other tokens."""
    b = Builder(OTHER_ROWS, 0, torch.float32, CPU)
    column = filled(ColumnLinear(b, "up", 4, [Out("up", 8)], over="world"))
    for use in (column, lambda x: column.feed(x, torch.tanh, "attention")):
        with pytest.raises(PlacementError, match=r"up reads block GROUP \(GROUP\)"):
            use(of(OTHER_ROWS, Rows.GROUP))
    assert column(of(OTHER_ROWS, Rows.WORLD)).placement.split


def test_experts_take_rows_that_every_rank_holds() -> None:
    b = Builder(OTHER_ROWS, 0, torch.float32, CPU)
    experts = filled(Experts(b, "experts", 4, MoEConfig(4, 4, Routing(1))))
    router = filled(Router(b, "gate", 4, 4, Routing(2)))
    for rows in (Rows.OWN, Rows.GROUP):
        with pytest.raises(PlacementError, match=rf"experts needs \(WORLD\), but block {rows.name} is"):
            experts(of(OTHER_ROWS, rows), router)
    out = experts(of(OTHER_ROWS, Rows.WORLD), router)
    assert out.placement == OTHER_ROWS.placement(Rows.WORLD, owes="world")


def test_a_row_linear_takes_features_that_are_split_over_its_own_group() -> None:
    b = Builder(OTHER_ROWS, 0, torch.float32, CPU)
    down = filled(RowLinear(b, "down", 8, 4, over="world"))
    with pytest.raises(PlacementError, match=r"down needs \(WORLD, features split over world\), but block WORLD is"):
        down(of(OTHER_ROWS, Rows.WORLD, split="attn_tp"))


def test_an_embedding_that_is_split_owes_the_sum() -> None:
    tokens, whole = torch.tensor([0, 4, 2, 3]), torch.randn(5, 4)
    found = []
    for rank in range(2):
        embed = Embedding(Builder(MESH, rank, torch.float32, CPU), "embed", 5, 4, split=True)
        embed.weight.data.copy_(whole[embed.share])
        out = embed(tokens)
        assert out.placement == MESH.placement(Rows.GROUP, owes="attn_tp")
        found.append(out.value)
    assert torch.equal(found[0] + found[1], whole[tokens])
    one = Embedding(Builder(MESH, 1, torch.float32, CPU), "embed", 5, 4)
    assert one(tokens).placement == MESH.placement(Rows.GROUP)


def test_a_norm_about_one_is_rounded_once() -> None:
    """Bit by bit transformers': normalised rows are not rounded before the product with a weight in float32."""
    torch.manual_seed(0)
    norm = RMSNorm(Builder(MESH, 0, torch.bfloat16, CPU), "norm", 64, 1e-5, less_one=True)
    theirs = Step3p7RMSNorm(64, 1e-5)
    theirs.weight.data.uniform_(-0.5, 0.5)
    norm.weight.data.copy_(1 + theirs.weight.data)
    x = Hidden(torch.randn(200, 64).bfloat16(), MESH.placement(Rows.GROUP), MESH, "block")
    assert norm.weight.dtype == torch.float32 and torch.equal(norm(x).value, theirs(x.value))
    assert torch.equal(torch_reference.rms_norm(x.value, norm.weight, 1e-5), theirs(x.value)), "where no kernel runs"
    rounded_first = (norm.weight * theirs._norm(x.value.float()).bfloat16()).bfloat16()
    assert not torch.equal(rounded_first, theirs(x.value)), "or this test would show nothing"


def logits(transport: Transport, mesh: Mesh, directory: Path) -> tuple[Tensor, Tensor, str]:
    """Return the logits of a model, the logits of one whose embedding's rows are strided, and the steps."""
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
    return out[0], out[1], " ".join(s.step for s in runner.stats.report())


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
