"""The checksum by which ranks tell whether they ran the same step: it is of the plan that was followed."""

from __future__ import annotations

from pathlib import Path

from support import small_model

from weft.comm.reference import ReferenceWorld
from weft.engine.kv.cache_spec import CacheGroup, Rule
from weft.engine.models.load import load_model
from weft.engine.models.registry import load_config
from weft.engine.worker.graph_inputs import Shape
from weft.engine.worker.model_runner import ModelRunner
from weft.planner.plan import Choice
from weft.planner.spec import Mesh


def test_a_graphs_steps_report_the_plan_that_it_holds(tmp_path: Path) -> None:
    """It was made by a planner of its own, for all rows that the graph has room for."""
    small_model("qwen2_moe", 4, tmp_path)
    mesh = Mesh(2, 2, 2, 2)
    transport = ReferenceWorld(mesh.world).transports()[0]
    model = load_model(tmp_path, load_config(tmp_path), mesh, 0, workspace=transport.empty)

    def runner(plan: Choice) -> ModelRunner:
        return ModelRunner(model, mesh, 0, [transport], [CacheGroup(Rule(), 4)], 4, plan=plan)

    eager, other = runner("cheapest"), runner("naive")
    eager.stats.graph_planner = other.planner
    counts, shape = (3, 1), Shape(64, 64, False)
    replayed, capacity = eager.plan_checksum(counts, shape), (shape.rows,) * mesh.attn_dp
    assert replayed == other.plan_checksum(capacity)
    assert replayed not in (eager.plan_checksum(counts), eager.plan_checksum(capacity))
