"""Exchanges of a step: the plan's, attention's among the stream's, equal the calls that its transports receive."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import run_world, small_model

from weft.comm.reference import ReferenceTransport
from weft.comm.transport_registry import REFERENCE
from weft.engine.attention.build_batch import SeqRows, build_batch
from weft.engine.kv.cache_spec import CacheGroup, Rule
from weft.engine.models.load import load_model
from weft.engine.models.registry import load_config, registry
from weft.engine.worker.model_runner import ModelRunner
from weft.planner.exchange import rows_received
from weft.planner.spec import Mesh

PAGE = 4


class Asked(ReferenceTransport):
    """Writes down each call: its kind, and the bytes that its rank receives."""

    def __init__(self, transport: ReferenceTransport, max_bytes: int | None):
        self.__dict__.update(transport.__dict__)
        self.entry, self.calls = replace(REFERENCE, max_bytes=max_bytes), list[tuple[str, int, int]]()

    def exchange(self, x: Any, exchange: Any, group: Any, sizes: Any, epilogue: Any = None) -> Any:
        received = rows_received(exchange, sizes, group.index(self.rank)) * x.shape[1] * x.element_size()
        self.calls.append((exchange.kind, len(group), int(received)))
        return super().exchange(x, exchange, group, sizes, epilogue)

    def merge_scatterv(self, out: Any, lse: Any, group: Any, live: Any = None) -> Any:
        own = out.numel() * out.element_size() + lse.numel() * 4
        self.calls.append(("merge_scatterv", len(group), own * (len(group) - 1) // len(group)))
        return super().merge_scatterv(out, lse, group, live)


@pytest.mark.parametrize(
    "recipe, calls, max_bytes",
    [("fused", 2, None), ("ag_rs", 3, None), ("a2a", 2, None), ("fused", 4, 2048), ("replicate", 1, None)],
)
def test_of_decode_rows(recipe: str, calls: int, max_bytes: int | None, tmp_path: Path) -> None:
    mesh, counts = Mesh(2, 2, 4, 1, dcp=2), (7, 0)
    small_model("deepseek_v2", 4, tmp_path)
    model = replace(load_config(tmp_path, registry(())), replicate_queries=recipe == "replicate")
    exchange = "fused" if recipe == "replicate" else recipe

    def rank_main(transport: ReferenceTransport) -> None:
        asked = Asked(transport, max_bytes)
        decoder = load_model(tmp_path, model, mesh, asked.rank)
        runner = ModelRunner(decoder, mesh, asked.rank, [asked], [CacheGroup(Rule(), 16)], PAGE, dcp_exchange=exchange)
        rows = counts[mesh.group_of(asked.rank)]
        batch = build_batch(
            [5] * rows, [SeqRows(1, 6 + at, [[2 * at, 2 * at + 1]], 1) for at in range(rows)], 2 * PAGE, [Rule()]
        )
        runner.forward(batch, counts)
        moves = runner.stats.moves(counts, None)
        assert len(moves) == len(asked.calls)
        for (site, what, group, size), (kind, ranks, received) in zip(moves, asked.calls, strict=True):
            assert kind in what
            if group == "dcp":
                assert what.endswith(f": {kind} dcp · reference") and (ranks, size) == (2, received)
                assert site.endswith("input_layernorm"), "of the read that attention is served by"
        inside = sum(group == "dcp" for *_, group, _ in moves)
        assert inside == (model.num_layers * calls if rows else 0), "queries, and what merges; nothing of an idle group"

    run_world(mesh.world, rank_main)


def test_of_a_split_vocabulary(tmp_path: Path) -> None:
    """The embedding's sum is among the stream's; the gather of best tokens comes last, in a group that has rows."""
    mesh, counts = Mesh(2, 2, 4, 1), (3, 0)
    small_model("deepseek_v2", 4, tmp_path)
    model = replace(load_config(tmp_path, registry(())), split_vocabulary=True)

    def rank_main(transport: ReferenceTransport) -> None:
        asked = Asked(transport, None)
        runner = ModelRunner(
            load_model(tmp_path, model, mesh, asked.rank), mesh, asked.rank, [asked], [CacheGroup(Rule(), 16)], PAGE
        )
        rows = counts[mesh.group_of(asked.rank)]
        batch = build_batch([5] * rows, [SeqRows(1, 2, [[at]], 1) for at in range(rows)], PAGE, [Rule()])
        best = runner.forward(batch, counts, full=False).max(-1)
        assert runner.vocabulary is not None
        runner.vocabulary.best(best.values, best.indices)
        moves = runner.stats.moves(counts, None)
        for (_, what, *_), (kind, *_) in zip(moves, asked.calls, strict=True):
            assert kind in what
        if rows:
            what = "best tokens: all_gatherv attn_tp · reference"
            assert moves[-1] == ("model.norm", what, "attn_tp", asked.calls[-1][2])

    run_world(mesh.world, rank_main)


def test_of_dispatched_experts(tmp_path: Path) -> None:
    """Counts, rows and results in their places; each once a layer of experts, in one order in plan, moves and calls."""
    mesh, counts = Mesh(2, 2, 4, 1), (3, 0)
    small_model("deepseek_v2", 4, tmp_path)
    model = replace(load_config(tmp_path, registry(())), experts="dispatch")

    def rank_main(transport: ReferenceTransport) -> list[tuple[str, str, int, float]]:
        asked = Asked(transport, None)
        runner = ModelRunner(
            load_model(tmp_path, model, mesh, asked.rank), mesh, asked.rank, [asked], [CacheGroup(Rule(), 16)], PAGE
        )
        rows = counts[mesh.group_of(asked.rank)]
        batch = build_batch([5] * rows, [SeqRows(1, 2, [[at]], 1) for at in range(rows)], PAGE, [Rule()])
        runner.forward(batch, counts)
        moves = runner.stats.moves(counts, None)
        assert len(moves) == len(asked.calls)
        for (_, what, *_), (kind, *_) in zip(moves, asked.calls, strict=True):
            assert kind in what
        assert [what for _, what, *_ in moves] == [str(op) for _, op in runner.planner.plan(counts).ops()]
        sent = [what.partition(":")[0] for _, what, *_ in moves if "all_to_allv" in what]
        assert sent == ["counts", "dispatch", "combine"] * (model.num_layers - 1), "the first layer has no experts"
        report = [stat for stat in runner.stats.report() if "all_to_allv" in stat.step]
        assert all(stat.count == model.num_layers - 1 and stat.seconds > 0 for stat in report)
        moved = {what: size for _, what, _, size in moves}
        assert all(stat.bytes == stat.count * moved[stat.step] for stat in report)
        return [(stat.site, stat.step, stat.bytes, stat.predicted) for stat in report]

    found = run_world(mesh.world, rank_main)
    assert len(found[0]) == 3 and all(each == found[0] for each in found), "the busiest rank's, on every rank"
