"""Collectives of a model on a layout, with their bytes: planned, and as the transport saw them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import BASIC, EVERY, FAMILIES, run_world, small_config, small_model

from weft.comm.reference import ReferenceTransport
from weft.engine.attention.build_batch import SeqRows, build_batch
from weft.engine.kv.cache_spec import CacheGroup, Rule
from weft.engine.models.load import load_model
from weft.engine.models.registry import load_config, read_config
from weft.engine.worker.model_runner import ModelRunner
from weft.engine.worker.planning import plan_model
from weft.planner.cost import PRESETS, Offer
from weft.planner.exchange import Exchange
from weft.planner.spec import Mesh

LAYERS = 3
AR, RS, AG = "all_reduce", "reduce_scatterv", "all_gatherv"
ALL = EVERY

# (mesh, edges on offer, tokens a group) → collectives of a three-layer model, on the H200 cost model.
EXPECTED = [
    (Mesh(), ALL, 8, {}),
    (Mesh(1, 4, 1, 4), BASIC, 8, {AR: 2 * LAYERS}),
    (Mesh(1, 4, 4, 1), ALL, 8, {AR: 2 * LAYERS}),
    # Long prefill, tensor parallel: reduce-scatter, norm on OWN rows, gather, as in sequence parallelism.
    (Mesh(1, 4, 1, 4), BASIC, 1 << 20, {RS: 2 * LAYERS, AG: 2 * LAYERS}),
    # Data parallel attention: never an all-reduce; the experts' sum is scattered to its owners.
    (Mesh(4, 1, 4, 1), BASIC, 8, {AG: LAYERS, RS: LAYERS}),
    (Mesh(4, 1, 1, 4), ALL, 4096, {AG: LAYERS, RS: LAYERS}),
    # Both at once: one fused edge a block where the transport has it.
    (Mesh(2, 2, 2, 2), ALL, 8, {AR: 2, "all_reduce+all_gatherv": 3, "reduce_scatterv+all_reduce": 1, AG: 1}),
    (Mesh(2, 2, 2, 2), BASIC, 8, {AR: 2 * LAYERS, AG: LAYERS}),
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mesh, kinds, tokens, expected", EXPECTED, ids=[f"{mesh}, {n}" for mesh, _, n, _ in EXPECTED])
def test_planned_collectives(family: str, mesh: Mesh, kinds: frozenset[str], tokens: int, expected: dict) -> None:
    config = read_config(small_config(family, 4).to_dict())
    planner = plan_model(config, mesh, torch.bfloat16, [Offer("any", kinds, frozenset(), PRESETS["h200-nvlink"])])
    plan = planner.plan((tokens,) * mesh.attn_dp)
    assert Counter(edge.kind for _, _, edge in plan.moves()) == expected


class Recording:
    """A reference transport that offers `kinds`, without epilogues, and writes down its calls."""

    def __init__(self, transport: ReferenceTransport, kinds: frozenset[str]):
        self._transport, self._kinds, self.calls = transport, kinds, Counter()
        self.rank, self.entry = transport.rank, replace(transport.entry, offers=self.offers)

    def offers(self, exchange: Exchange, epilogue: bool = False) -> bool:
        return exchange.kind in self._kinds and not epilogue

    def exchange(self, x: torch.Tensor, exchange: Exchange, *args: Any) -> torch.Tensor:
        out = self._transport.exchange(x, exchange, *args)
        self.calls[exchange.kind, x.shape[0], out.shape[0]] += 1
        return out


def test_what_runs_is_what_was_planned(tmp_path: Path) -> None:
    """Ragged rows, one group with a single token: the seed's case, reduce_scatterv instead of all-reduce and slice."""
    small_model("qwen2_moe", 4, tmp_path)
    mesh, counts = Mesh(4, 1, 4, 1), (3, 1, 0, 2)

    def main(reference: ReferenceTransport) -> tuple[Counter, list, list]:
        transport = Recording(reference, BASIC)
        model = load_model(tmp_path, load_config(tmp_path), mesh, reference.rank)
        runner = ModelRunner(model, mesh, reference.rank, [transport], [CacheGroup(Rule(), 1)], page_size=4)
        n = counts[reference.rank]
        seqs = [SeqRows(n, 0, [[0]], True)] if n else []
        runner.forward(build_batch(list(range(1, n + 1)), seqs, 4), counts)
        return transport.calls, runner.stats.report(), runner.stats.naive_report()

    for rank, (calls, report, naive) in enumerate(run_world(4, main)):
        n = counts[rank]
        assert calls == {("all_gatherv", n, 6): LAYERS, ("reduce_scatterv", 6, n): LAYERS}
        assert sum(s.count for s in report) == 2 * LAYERS and sum(s.count for s in naive) == 2 * LAYERS
        row = 32 * 4  # float32 rows of width 32; the busiest ranks receive 6 - 0 and 3 · 3 rows; the all-reduce 9
        assert {s.bytes for s in report} == {LAYERS * 6 * row, 1 * 9 * row, 2 * 9 * row}
        assert sum(s.bytes for s in naive) == LAYERS * (6 + 9) * row
