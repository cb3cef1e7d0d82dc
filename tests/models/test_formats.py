"""Rows that travel in a format: the same bits as rows that are gathered first, wherever the plan has them travel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import run_world
from torch import Tensor

from comm.processes import run_threads
from engine.conftest import byte_tokenizer
from engine.test_engine import config
from gpu.emulation import run_emulated
from models.layouts import drive, sequences
from models.test_float8 import saved
from weft.comm.peer_launch import PeerTuning
from weft.comm.transport import Transport, offer_of
from weft.engine.config.config import EngineError
from weft.engine.controller import rank_executors as launch
from weft.engine.controller.engine import Engine
from weft.engine.models.layers.routing import Router
from weft.engine.worker.model_runner import ModelRunner
from weft.planner import plan as plan_module
from weft.planner.chain import Chain
from weft.planner.cost import AlphaBeta, Costs
from weft.planner.op import StreamOp
from weft.planner.plan import Plan, Planner
from weft.planner.row_formats import Format, Wire
from weft.planner.spec import Mesh, PlacementError, Rows
from weft.stream import formats
from weft.stream.formats import Float8
from weft.stream.hidden import Hidden
from weft.stream.step_rows import StepRows
from weft.stream.stream import Stream, TraceStream

SLOW_BYTES = AlphaBeta("slow", alpha_us=0.1, hop_us=0.0, gb_s=1e-3, launch_us=0.1, mem_gb_s=100.0)
"""Cost at which bytes are dear and calls are not: rows travel in the smallest format."""
World = Callable[[Mesh, Path, Callable[..., Any]], list[Any]]


def by_reference(mesh: Mesh, directory: Path, work: Callable[..., Any]) -> list[Any]:
    return run_world(mesh.world, work)


def by_shm(mesh: Mesh, directory: Path, work: Callable[..., Any]) -> list[Any]:
    directory.mkdir()
    return run_threads(mesh, directory, lambda transport, mesh: work(transport))


def by_emulated_peer(mesh: Mesh, directory: Path, work: Callable[..., Any]) -> list[Any]:
    found: dict[int, Any] = {}
    run_emulated(mesh, lambda t, mesh, device: found.update({t.rank: work(t)}), PeerTuning())
    return [found[rank] for rank in range(mesh.world)]


@pytest.fixture
def travelled(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the rows laid out to travel, by format."""
    true, found = formats.pack, Counter[str]()

    def counted(value: Any, extra: Tensor | None, wire: Wire, width: int) -> Tensor:
        found[str(wire)] += 1
        return true(value, extra, wire, width)

    monkeypatch.setattr(formats, "pack", counted)
    return found


@pytest.fixture
def row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers whose products have the same bits in any company, which a BLAS does not promise."""
    true = Router.logits

    def logits(self: Router, x: Hidden) -> Tensor:
        each = [true(self, replace(x, value=row[None])) for row in x.require_complete(self.path)]
        return torch.cat(each) if each else true(self, x)

    monkeypatch.setattr(Router, "logits", logits)


@pytest.mark.parametrize(
    ("by", "family", "mesh"),
    [
        (by_reference, "qwen3", Mesh(2, 2, 2, 2)),
        (by_reference, "deepseek_v3", Mesh(2, 2, 2, 2)),
        (by_reference, "deepseek_v3", Mesh(4, 1, 4, 1)),
        (by_reference, "qwen3_moe", Mesh(1, 4, 4, 1)),
        (by_shm, "deepseek_v3", Mesh(2, 2, 4, 1)),
        (by_emulated_peer, "deepseek_v3", Mesh(2, 1, 2, 1)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_logits_are_those_of_rows_that_are_gathered_first(
    by: World,
    family: str,
    mesh: Mesh,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    travelled: Counter[str],
    row_by_row: None,
) -> None:
    saved(family, tmp_path)
    run = sequences(mesh, 61)

    def logits(transport: Transport, name: str) -> dict[tuple[int, int], Tensor]:
        costs = Costs(name, {"*": {0: replace(SLOW_BYTES, name=name)}})  # plans are kept by what they are made of
        return drive(transport, tmp_path, mesh, run, float8=True, costs=costs)

    found = by(mesh, tmp_path / "formats", partial(logits, name="formats"))
    assert travelled["fp8/128"]
    assert (len(travelled) > 1) == (family != "qwen3"), "what routers choose travels with the rows"
    travelled.clear()
    monkeypatch.setattr(plan_module, "wire_edges", lambda mesh, wire: {})
    wanted = by(mesh, tmp_path / "plain", partial(logits, name="plain"))
    assert not travelled
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


@dataclass(frozen=True)
class Half(Format):
    """A toy: rows as float16."""

    def __str__(self) -> str:
        return "half"

    def parts(self, width: int) -> tuple[int, ...]:
        return (2 * width,)

    def make(self, x: Tensor) -> Tensor:
        return x.half()

    def tensors(self, rows: Tensor) -> tuple[Tensor, ...]:
        return (rows,)

    def rows(self, *tensors: Tensor) -> Tensor:
        return tensors[0].view(torch.float16)

    def dequantise(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        return rows.to(dtype)


WIDTH = 22  # whose scales begin at no multiple of their size


class Norm:
    path, eps, weight = "norm", 1e-6, torch.linspace(0.5, 2.0, WIDTH)


def model(stream: Stream | TraceStream, mesh: Mesh, start: Tensor, kind: Format, plain: bool) -> Tensor:
    """Reads WORLD rows in a format, with the row's sum appended; with `plain` as they are, too."""
    stream.add(Hidden(start, mesh.placement(Rows.GROUP), mesh, "embed"))

    def sums(x: Hidden) -> Tensor:
        return x.require_complete("sums").sum(1, keepdim=True).view(torch.int32)

    x = stream.read(Norm(), Rows.WORLD, extra=sums)
    extra = sums(x) if x.extra is None else x.extra
    assert x.in_format is not None
    made = x.in_format(kind)
    rows = kind.dequantise(made, torch.float32)
    if plain:
        rows = rows + x.require_complete("plain")
    return torch.cat((rows, extra.view(torch.float32)), dim=1)


def read(kind: Format, plain: bool, counts: tuple[int, int] = (3, 0)) -> list[tuple[Tensor, Plan]]:
    mesh = Mesh(2, 1, 2, 1)

    def rank_main(transport: Transport) -> tuple[Tensor, Plan]:
        trace = TraceStream(mesh, WIDTH, torch.float32, torch.device("cpu"))
        model(trace, mesh, torch.empty(0, WIDTH), kind, plain)
        chain: Chain = trace.chain()
        plan = Planner(mesh, chain, [offer_of(transport.entry, mesh, SLOW_BYTES)]).plan((4, 4))
        start = torch.randn(counts[transport.rank], WIDTH, generator=torch.Generator().manual_seed(transport.rank))
        stream = Stream(plan, {transport.entry.name: transport}, StepRows(mesh, transport.rank, counts))
        found = model(stream, mesh, start, kind, plain)
        stream.finish()
        return found, plan

    return run_world(2, rank_main)


def test_a_format_is_added_by_one_class(monkeypatch: pytest.MonkeyPatch, travelled: Counter[str]) -> None:
    """Plans take it, rows travel in it, and what readers get has the bits of rows that were gathered first."""
    found = read(Half(), plain=False)
    assert travelled == {"half + 4 bytes": 2}
    [text] = {str(step) for _, plan in found for _, step, _ in plan.moves()}
    assert text == "normed: all_gatherv world → WORLD in half + 4 bytes · reference"
    monkeypatch.setattr(plan_module, "wire_edges", lambda mesh, wire: {})
    wanted = read(Half(), plain=False)
    assert found[0][1].checksum() != wanted[0][1].checksum(), "ranks that differ in a format would be found"
    assert all(torch.equal(ours[0], theirs[0]) for ours, theirs in zip(found, wanted, strict=True))
    assert travelled == {"half + 4 bytes": 2} and len(found[0][0]) == 3 and len(found[1][0]) == 3


def test_rows_that_a_block_takes_in_two_formats_are_gathered_as_they_are() -> None:
    """They travel in one format at most."""

    def plain(*kinds: Format) -> bool:
        mesh = Mesh(2, 1, 2, 1)
        trace = TraceStream(mesh, WIDTH, torch.float32, torch.device("cpu"))
        trace.add(Hidden(torch.empty(0, WIDTH), mesh.placement(Rows.GROUP), mesh, "embed"))
        hidden = trace.read(Norm(), Rows.WORLD)
        assert hidden.in_format is not None
        for kind in kinds:
            hidden.in_format(kind)
        [read] = trace.chain().reads
        assert read.wire == (Wire(kinds[0], 0) if kinds else None)
        return read.plain

    one, other = Float8(8), Float8(16)
    assert plain() and not plain(one) and not plain(one, one)
    assert plain(one, other) and plain(one, other, one) and plain(one, one, other)


def test_a_single_row_in_float8(monkeypatch: pytest.MonkeyPatch, travelled: Counter[str]) -> None:
    found = read(Float8(8), plain=False, counts=(0, 1))
    assert travelled == {"fp8/8 + 4 bytes": 2}
    monkeypatch.setattr(plan_module, "wire_edges", lambda mesh, wire: {})
    wanted = read(Float8(8), plain=False, counts=(0, 1))
    assert all(torch.equal(ours[0], theirs[0]) for ours, theirs in zip(found, wanted, strict=True))


def test_rows_that_a_block_takes_plain_travel_plain(travelled: Counter[str]) -> None:
    [first, second] = read(Float8(8), plain=True)
    assert not travelled and torch.equal(first[0], second[0])


def test_a_block_that_takes_plain_what_came_in_a_format_is_refused() -> None:
    mesh, wire = Mesh(2, 1, 2, 1), Wire(Float8(128))
    placement = replace(mesh.placement(Rows.WORLD), wire=wire)
    x = Hidden(torch.empty(1, 1).expand(3, 8), placement, mesh, "norm")
    for take in (
        lambda: x.require_complete("gate"),
        lambda: x.rowwise(torch.tanh, "gate"),
        lambda: x.elementwise(torch.tanh, "gate"),
        lambda: x + x,
        lambda: x.scale(Hidden(torch.ones(3, 1), mesh.placement(Rows.WORLD), mesh, "score")),
    ):
        with pytest.raises(PlacementError, match=r"needs \(WORLD\), but norm is \(WORLD in fp8/128\)"):
            take()


def test_a_rank_with_rows_in_another_format_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the engine takes a request."""
    saved("qwen3", tmp_path)
    byte_tokenizer(tmp_path)
    monkeypatch.setattr(launch, "costs", lambda name: Costs("slow", {"*": {0: SLOW_BYTES}}))
    checksum = ModelRunner.plan_checksum

    def other(self: ModelRunner, counts: tuple[int, ...], shape: Any = None, passes: Any = ()) -> int:
        if shape is not None:
            return checksum(self, counts, shape)
        plan = self.planner.plan(counts)
        assert any(edge.src.wire for _, _, edge in plan.moves())
        if self.rank != 1:
            return checksum(self, counts, shape)
        reads = [replace(read, steps=tuple(map(plain, read.steps))) for read in plan.reads]
        return replace(plan, reads=tuple(reads)).checksum()

    def plain(step: StreamOp) -> StreamOp:
        if step.edge is None or step.edge.src.wire is None:
            return step
        ends = (replace(end, wire=None) for end in (step.edge.src, step.edge.dst))
        return replace(step, edge=replace(step.edge, **dict(zip(("src", "dst"), ends, strict=True))))

    monkeypatch.setattr(ModelRunner, "plan_checksum", other)
    layout = dict(attn_dp=2, attn_tp=2, ep=2, moe_tp=2, float8="on")
    with pytest.raises(EngineError, match=r"ranks diverge: rank 1 plans steps .*, where rank 0 plans"):
        Engine(config(tmp_path, **layout))
