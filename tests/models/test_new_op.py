"""An op of the stream is its text, its price and a method of the walk: plans, reports and checksums follow."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import EVERY, run_world
from torch import Tensor

from weft.comm.transport import Transport
from weft.kernels.torch_reference import rms_norm
from weft.planner import op as ops
from weft.planner.chain import Chain, Read
from weft.planner.cost import PRESETS, Offer
from weft.planner.edges import Edge
from weft.planner.op import StreamOp
from weft.planner.plan import Planner
from weft.planner.prices import StreamPrices
from weft.planner.show import plan_dict, plan_text
from weft.planner.spec import Mesh, Rows
from weft.stream.hidden import Hidden
from weft.stream.stats import Stats
from weft.stream.step_rows import StepRows
from weft.stream.stream import ReadExecution, Stream

MESH, WIDTH = Mesh(1, 2, 2, 1), 6
GROUP, OWING = MESH.placement(Rows.GROUP), MESH.placement(Rows.GROUP, "attn_tp")
CHAIN = Chain((Read("first", GROUP, (GROUP,)), Read("second", GROUP, (OWING,))), WIDTH, 4)
COST = PRESETS["h200-nvlink"]
BIAS = torch.linspace(-1.0, 1.0, WIDTH)


class Norm:
    eps, weight = 1e-6, torch.linspace(0.5, 2.0, WIDTH)

    def __init__(self, path: str):
        self.path = path


def planner() -> Planner:
    return Planner(MESH, CHAIN, [Offer("reference", EVERY, frozenset(), COST)])


def add_a_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """A toy: sums of deltas add a bias in the same op."""
    monkeypatch.setitem(ops.EPILOGUES, "biased", " +bias")  # planner/op.py
    true = StreamPrices._move

    def move(self: StreamPrices, operand: int | str, edge: Edge, tokens: int) -> StreamOp:  # planner/prices.py
        op = true(self, operand, edge, tokens)
        if edge.src.owes is None or edge.dst.owes is not None:
            return op
        us = op.us + COST.epilogue_us(self._max_bytes(edge.dst, tokens))
        return replace(op, op="biased", us=us)  # type: ignore[arg-type]

    def biased(self: ReadExecution, op: StreamOp) -> None:  # stream.py
        self.move(op)
        assert isinstance(op.operand, int)
        self.deltas[op.operand] = self.deltas[op.operand] + BIAS

    monkeypatch.setattr(StreamPrices, "_move", move)
    monkeypatch.setattr(ReadExecution, "biased", biased, raising=False)


def start(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(3, 4, WIDTH, generator=generator)
    return values[0], values[1 + rank]


def test_an_epilogue_of_an_edge_is_added_in_three_files(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = planner().plan((4,))
    add_a_bias(monkeypatch)
    made = planner()
    plan = made.plan((4,))

    def rank_main(transport: Transport) -> Tensor:
        stream = Stream(plan, {"reference": transport}, StepRows(MESH, transport.rank, (4,)))
        first, term = start(transport.rank)
        stream.add(Hidden(first, GROUP, MESH, "embedding"))
        stream.read(Norm("first"), Rows.GROUP)
        stream.add(Hidden(term, OWING, MESH, "attention"))
        found = stream.read(Norm("second"), Rows.GROUP).require_complete("the test")
        stream.finish()
        return found

    (first, one), (_, other) = start(0), start(1)
    wanted = rms_norm(first + (one + other + BIAS), Norm.weight, Norm.eps)
    for found in run_world(2, rank_main):
        torch.testing.assert_close(found, wanted)
    [op] = [step for read in plan.reads for step in read.steps if step.op == "biased"]
    assert str(op).endswith(" +bias · reference") and f"{op.brief()} " in plan_text(made, (4,))
    assert any(step["op"] == "biased" for read in plan_dict(made, (4,))["plan"]["reads"] for step in read["steps"])
    stats = Stats()
    stats.record(made, plan, (4,), 3)
    assert [(stat.step, stat.count) for stat in stats.table() if "bias" in stat.step] == [(str(op), 3)]
    assert plan.checksum() != plain.checksum()
    assert plan.us == pytest.approx(plain.us + COST.epilogue_us(4 * WIDTH * 4), abs=1e-9) and plan.us > plain.us
