"""Each class of fault that shipped in a widely used engine, injected here: it must end in PlacementError, not in text.

The classes are listed in docs/design/known-failures.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import EVERY, run_world, small_config, small_model
from torch import Tensor

from weft.comm.transport import CommError, Transport
from weft.engine.attention.build_batch import SeqRows, build_batch
from weft.engine.attention.caches import Caches
from weft.engine.attention.forward_batch import Batch
from weft.engine.kv.cache_spec import CacheGroup, Rule
from weft.engine.models.layers.basic import Builder, ColumnLinear, Linear, Out, RMSNorm, RowLinear
from weft.engine.models.layers.decoder import Decoder, DecoderLayer
from weft.engine.models.layers.mlp import GatedMLP
from weft.engine.models.layers.model_config import ModelConfig
from weft.engine.models.layers.moe import SparseMoE
from weft.engine.models.layers.routing import Router
from weft.engine.models.load import load_model, model_shape
from weft.engine.models.registry import load_config, read_config
from weft.engine.worker import planning
from weft.engine.worker.model_runner import ModelRunner
from weft.engine.worker.planning import trace
from weft.planner.cost import PRESETS, Offer
from weft.planner.plan import Planner
from weft.planner.spec import Mesh, PlacementError, Rows
from weft.stream.hidden import Hidden
from weft.stream.step_rows import StepRows
from weft.stream.stream import GROUP, WORLD, Stream, TraceStream

MESH = Mesh(2, 2, 2, 2)


def config() -> ModelConfig:
    return read_config(small_config("qwen2_moe", 4).to_dict())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    small_model("qwen2_moe", 4, directory)
    return directory


def run_broken(saved: Path, breaker: Callable[[Decoder, Transport], None]) -> None:
    """Run a prefill of two tokens in group 0 and none in group 1 of a model that `breaker` has tampered with."""

    def main(transport: Transport) -> None:
        model = load_model(saved, load_config(saved), MESH, transport.rank)
        breaker(model, transport)
        runner = ModelRunner(model, MESH, transport.rank, [transport], [CacheGroup(Rule(), 2)], page_size=4)
        if MESH.group_of(transport.rank) == 0:
            batch = build_batch([3, 4], [SeqRows(2, 0, [[0]], True)], 4)
        else:
            batch = build_batch([], [], 4)
        runner.forward(batch, (2, 0))

    run_world(MESH.world, main)


def test_the_untampered_model_runs(saved: Path) -> None:
    run_broken(saved, lambda model, transport: None)


def traced(monkeypatch: pytest.MonkeyPatch, breaker: Callable[[Decoder], None], mesh: Mesh = MESH) -> None:
    """Trace a model that `breaker` has tampered with."""
    build = model_shape

    def build_broken(*args: Any, **options: Any) -> Decoder:
        model = build(*args, **options)
        breaker(model)
        return model

    monkeypatch.setattr(planning, "model_shape", build_broken)
    trace(config(), mesh, torch.float32)


def raises(*parts: str) -> Any:
    """Expect a PlacementError whose text has all the parts, in order."""
    return pytest.raises(PlacementError, match=r"[\s\S]*".join(map(re.escape, parts)))


def settled(x: Hidden) -> Hidden:
    """Return the value of a block that reduces by itself: the same rows, owing nothing."""
    return replace(x, placement=x.mesh.placement(x.placement.rows))


# --- summed twice -------------------------------------------------------------------------------------------------


def test_a_block_that_reduces_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaker(model: Decoder) -> None:
        shared = model.layers[0].mlp.shared
        forward = shared.forward
        shared.forward = lambda x, gate: settled(forward(x, gate))

    with raises("layers.0.mlp.shared_expert", "(WORLD)", "layers.0.mlp.experts", "(WORLD, owes sum over world)"):
        traced(monkeypatch, breaker)


def test_a_block_that_reduces_by_itself_and_keeps_its_debt(saved: Path) -> None:
    """The placement lies, so only the run can tell: the reference transport sees a sum of equal values."""

    def breaker(model: Decoder, transport: Transport) -> None:
        out = model.layers[0].attention.out
        forward = out.forward
        group = MESH.peers("attn_tp", transport.rank)

        def reduced(x: Hidden) -> Hidden:
            partial = forward(x)
            return replace(partial, value=transport.all_reduce(partial.value, group))

        out.forward = reduced

    with raises("layers.0.self_attn.o_proj", "owes sum over attn_tp", "replicated, but declared partial"):
        run_broken(saved, breaker)


def test_a_dense_layer_in_a_sparse_model_that_reduces_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the block's own word is kept: it says that it owes nothing, so the plan sums nothing again."""

    def breaker(model: Decoder) -> None:
        dense = model.layers[1].mlp
        assert isinstance(dense, GatedMLP)
        forward = dense.forward
        dense.forward = lambda x: settled(forward(x))

    monkeypatch.setattr(planning, "model_shape", lambda *a, **b: (m := model_shape(*a, **b), breaker(m))[0])
    chain = trace(config(), MESH, torch.float32)
    planner = Planner(MESH, chain, [Offer("any", EVERY, frozenset(), PRESETS["cpu-gloo"])])
    after_dense = next(r for r in planner.plan((4, 4)).reads if r.read.site == "model.layers.2.input_layernorm")
    assert not [s for s in after_dense.steps if s.edge and "reduce" in s.edge.kind]


# --- not summed ---------------------------------------------------------------------------------------------------


def test_a_norm_of_a_partial_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaker(model: Decoder) -> None:
        block = model.layers[0].attention
        forward = block.forward
        block.forward = lambda *args: forward(*args).elementwise(torch.tanh, f"{block.path}.extra_activation")

    with raises("layers.0.self_attn.extra_activation", "layers.0.self_attn.o_proj", "(GROUP, owes sum over attn_tp)"):
        traced(monkeypatch, breaker)


def test_a_router_fed_with_a_partial_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaker(model: Decoder) -> None:
        block = model.layers[0].mlp
        block.forward = lambda x: block.router.choose(block.shared(x))

    with raises("layers.0.mlp.gate needs", "(WORLD)", "layers.0.mlp.shared_expert", "owes sum over world"):
        traced(monkeypatch, breaker)


def test_the_last_layer_is_never_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaker(model: Decoder) -> None:
        forward = model.forward

        def late(stream: Any, batch: Batch, caches: Caches) -> Tensor:
            logits = forward(stream, batch, caches)
            stream.add(model.layers[2].mlp(Hidden(stream._empty, MESH.placement(WORLD), MESH, "late")))
            return logits

        model.forward = late

    with raises("never settled", "layers.2.mlp.experts", "(WORLD, owes sum over world)"):
        traced(monkeypatch, breaker)


# --- wrong group --------------------------------------------------------------------------------------------------


def test_a_weight_split_over_one_group_and_summed_over_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaker(model: Decoder) -> None:
        model.layers[0].mlp.shared.down.over = "attn_tp"

    with raises(
        "layers.0.mlp.shared_expert.down_proj needs",
        "split over attn_tp",
        "layers.0.mlp.shared_expert",
        "split over world",
    ):
        traced(monkeypatch, breaker)


def test_experts_summed_over_moe_tp_only(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = Mesh(1, 4, 2, 2)

    def breaker(model: Decoder) -> None:
        block = model.layers[0].mlp
        forward = block.experts.forward

        def half(x: Hidden, router: Router, shared: Callable[[], Hidden]) -> Hidden:
            out = forward(x, router)
            out = Hidden(out.value, mesh.placement(WORLD, "moe_tp"), mesh, out.origin)
            out += shared()
            return out

        block.experts.forward = half

    with raises("layers.0.mlp.shared_expert", "owes sum over world", "layers.0.mlp.experts", "owes sum over moe_tp"):
        traced(monkeypatch, breaker, mesh)


# --- wrong rows ---------------------------------------------------------------------------------------------------


def read_rows(block_of: Callable[[DecoderLayer], Any], norm: str, rows: Rows) -> Callable[[Decoder], None]:
    def breaker(model: Decoder) -> None:
        layer = model.layers[0]

        def forward(stream: TraceStream, rotary: Any, attention: Any, wanted: Any) -> None:
            block = block_of(layer)
            x = stream.read(getattr(layer, norm), rows=rows)
            stream.add(block(x, rotary, attention) if block is layer.attention else block(x))

        layer.forward = forward

    return breaker


def test_experts_on_the_rows_of_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    with raises("layers.0.mlp.experts needs (WORLD)", "(GROUP)"):
        traced(monkeypatch, read_rows(lambda layer: layer.mlp, "post_norm", GROUP))


def test_attention_on_everyones_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    with raises("layers.0.self_attn needs (GROUP)", "(WORLD)"):
        traced(monkeypatch, read_rows(lambda layer: layer.attention, "input_norm", WORLD))


def test_world_sharded_weights_on_the_rows_of_one_group() -> None:
    b = Builder(MESH, 0, torch.float32, torch.device("cpu"))
    column = ColumnLinear(b, "layers.7.mlp.gate_up", 8, [Out("up", 16)], over="world")
    with raises("layers.7.mlp.gate_up", "(GROUP)", "the ranks of world hold different tokens"):
        column(Hidden(torch.randn(3, 8), MESH.placement(GROUP), MESH, "layers.7.post_norm"))


def test_values_of_other_rows_are_not_added() -> None:
    one = Hidden(torch.randn(4, 8), MESH.placement(GROUP), MESH, "layers.0.mlp.here")
    other = Hidden(torch.randn(4, 8), MESH.placement(WORLD), MESH, "layers.0.mlp.there")
    with raises("layers.0.mlp.there", "(WORLD)", "layers.0.mlp.here", "(GROUP)"):
        one + other
    with raises("cannot scale layers.0.mlp.here", "(GROUP)", "layers.0.mlp.there", "(WORLD)"):
        one.scale(other)


def test_padding_rows_are_not_tokens(saved: Path) -> None:
    """A block that pads its rows gives more rows than its placement has."""

    def breaker(model: Decoder, transport: Transport) -> None:
        block = model.layers[0].attention
        forward = block.forward

        def padded(*args: Any) -> Hidden:
            out = forward(*args)
            return replace(out, value=torch.cat((out.value, torch.zeros_like(out.value))))

        block.forward = padded

    with raises("layers.0.self_attn.o_proj adds 4 rows", "(GROUP, owes sum over attn_tp)", "2 rows here"):
        run_broken(saved, breaker)


# --- replicated taken for partial ---------------------------------------------------------------------------------


def test_a_replicated_shared_expert_beside_partial_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaker(model: Decoder) -> None:
        block: SparseMoE = model.layers[0].mlp
        width = model.config.hidden_size
        b = Builder(MESH, 0, torch.float32, torch.device("cpu"))
        block.shared = Linear(b, f"{block.path}.replicated_shared_expert", width, width)
        monkeypatch.setattr(block, "forward", lambda x: block.experts(x, block.router, lambda: block.shared(x)))

    with raises("replicated_shared_expert", "(WORLD)", "layers.0.mlp.experts", "(WORLD, owes sum over world)"):
        traced(monkeypatch, breaker)


def test_a_replicated_shared_expert_declared_partial() -> None:
    """Its weights are whole on every rank, yet it says that it owes a sum: the oracle refuses the sum."""
    mesh = Mesh(1, 2, 1, 2)

    def main(transport: Transport) -> None:
        b = Builder(mesh, transport.rank, torch.float32, torch.device("cpu"))
        shared = Linear(b, "layers.3.mlp.shared_expert", 4, 4)
        shared.weight.data.copy_(torch.arange(16.0).view(4, 4))
        norm = RMSNorm(b, "layers.4.input_layernorm", 4, eps=1e-6)
        norm.weight.data.fill_(1.0)

        def forward(stream: Stream | TraceStream, rows: int) -> None:
            x = Hidden(torch.ones(rows, 4), mesh.placement(WORLD), mesh, "embed")
            stream.add(x)
            lie = shared(stream.read(norm, rows=WORLD))
            stream.add(Hidden(lie.value, mesh.placement(WORLD, "world"), mesh, lie.origin))
            stream.read(norm, rows=WORLD)

        tracer = TraceStream(mesh, 4, torch.float32, torch.device("cpu"))
        forward(tracer, 0)
        planner = Planner(mesh, tracer.chain(), [Offer("any", EVERY, frozenset(), PRESETS["cpu-gloo"])])
        forward(Stream(planner.plan((3,)), {"any": transport}, StepRows(mesh, transport.rank, (3,))), 3)

    with raises("layers.3.mlp.shared_expert", "owes sum over world", "replicated, but declared partial"):
        run_world(2, main)


# --- hang ---------------------------------------------------------------------------------------------------------


LEAVING = {
    "returns early": r"stopped before model.layers.0.input_layernorm",
    "skips a layer": r"model.layers.2.input_layernorm reads \(GROUP\), but the trace has model.layers.1",
    "adds more": r"before model.layers.1.input_layernorm the trace added .*owes sum over world.* now .*embed_tokens",
}


@pytest.mark.parametrize("fault", LEAVING)
def test_a_rank_that_leaves_the_plan_raises_instead_of_hanging(saved: Path, fault: str) -> None:
    def breaker(model: Decoder, transport: Transport) -> None:
        if MESH.group_of(transport.rank) == 0:
            return  # only the idle group takes another path
        layer = model.layers[1]
        forward = layer.forward

        def adds_more(stream: Stream, *args: Any) -> None:
            stream.add(model.embed(torch.empty(0, dtype=torch.int64)))
            forward(stream, *args)

        if fault == "returns early":
            model.forward = lambda stream, batch, attention: torch.empty(0)
        else:
            layer.forward = adds_more if fault == "adds more" else lambda *args: None

    with pytest.raises(PlacementError, match=LEAVING[fault]):
        run_broken(saved, breaker)


def test_ranks_that_call_different_collectives_raise() -> None:
    def main(transport: Transport) -> Tensor:
        x = torch.randn(4, 3)
        return transport.all_reduce(x, (0, 1)) if transport.rank else transport.all_gatherv(x, (0, 1), (4, 4))

    with pytest.raises(CommError, match="different calls"):
        run_world(2, main)


# --- key-value heads ----------------------------------------------------------------------------------------------


def test_row_linear_wants_the_split_that_its_weight_has() -> None:
    b = Builder(MESH, 0, torch.float32, torch.device("cpu"))
    row = RowLinear(b, "layers.0.mlp.down_proj", 16, 8, over="world")
    with raises("layers.0.mlp.down_proj needs", "features split over world", "layers.0.mlp.act", "(WORLD)"):
        row(Hidden(torch.randn(3, 4), MESH.placement(WORLD), MESH, "layers.0.mlp.act"))
