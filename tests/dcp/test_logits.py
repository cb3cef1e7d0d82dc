"""Logits with tokens sharded over ranks against transformers', on every layout of up to 8 ranks with dcp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import run_world, small_model

from models.test_logits import PAGE, Steps, compare, drive, texts_of
from planner.meshes import layouts
from weft.planner.spec import Mesh

SCATTERED = [
    Mesh(mesh.attn_dp, mesh.attn_tp, mesh.ep, mesh.moe_tp, dcp)
    for mesh in layouts(8)
    for dcp in range(2, mesh.attn_tp + 1)
    if mesh.attn_tp % dcp == 0
]
"""All that a latent cache can have, and keys and values of one head."""
SPLITS = [mesh for mesh in SCATTERED if mesh.attn_dp == mesh.moe_tp and mesh.world in (4, 8)]
"""Every split of attention over four ranks and eight, each in one layout."""
STEPS: Steps = {
    "prompts": lambda group: (5 + group, 2),
    "a chunk on top, and an answer": lambda group: (6, 1) if group % 2 else (1, 9),
    "answers": lambda group: (1, int(group != 1)),
}
LATENT, ONE_HEAD, TWO_HEADS = (
    ("deepseek_v2", dict(first_k_dense_replace=0)),
    ("qwen3_moe", dict(num_key_value_heads=1)),
    ("qwen3_moe", dict(num_key_value_heads=2)),
)
HALF = [mesh for at, mesh in enumerate(SCATTERED) if (at + at // 4) % 2 == 0]
"""Layouts by day of the latent cache, with every option that takes turns below."""
CASES = [(*LATENT, mesh) for mesh in HALF] + [(*ONE_HEAD, mesh) for mesh in SPLITS]
CASES += [(*TWO_HEADS, mesh) for mesh in (Mesh(1, 4, 2, 2, 2), Mesh(1, 8, 4, 2, 2), Mesh(1, 8, 2, 4, 4))]
# Norms over the heads of all ranks, of which some hold the same keys; in the second layout the same queries, too.
CASES += [("minimax_m2", dict(num_key_value_heads=2), mesh) for mesh in (Mesh(1, 4, 2, 2, 2), Mesh(2, 4, 2, 4, 2))]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[Any, tuple[Path, Any]] = {}

    def get(family: str, parts: int, **changes: int) -> tuple[Path, Any]:
        key = family, parts, *changes.items()
        if key not in made:
            directory = tmp_path_factory.mktemp(family)
            made[key] = directory, small_model(family, parts, directory, seed=parts, num_hidden_layers=1, **changes)
        return made[key]

    return get


NIGHTLY = [pytest.param(*LATENT, mesh, marks=pytest.mark.nightly) for mesh in SCATTERED if mesh not in HALF]


@pytest.mark.parametrize("family, changes, mesh", [*CASES, *NIGHTLY], ids=str)
def test_every_layout_gives_transformers_logits(
    saved: Any, planned_once: None, family: str, changes: dict[str, int], mesh: Mesh
) -> None:
    """A layer of each: layouts differ inside a layer. Runs of tokens, ways to merge, forms of prompts, and who makes
    queries, take turns.
    """
    directory, model = saved(family, mesh.world, **changes)
    at, texts = SCATTERED.index(mesh), texts_of(mesh, STEPS)
    recipes, prefills = ("auto", "ag_rs", "a2a", "fused"), ("gather", "merge")
    options: dict[str, Any] = dict(
        interleave=(PAGE, 1, 2)[at % 3], dcp_exchange=recipes[at % 4], dcp_prefill=prefills[at // 4 % 2]
    )
    options["replicate"] = at // 2 % 3 == 1
    compare(run_world(mesh.world, lambda t: drive(t, directory, mesh, texts, STEPS, **options)), texts, mesh, model)


@pytest.mark.parametrize("mesh", [Mesh(2, 2, 4, 1, 2), Mesh(1, 4, 2, 2, 4)], ids=str)
def test_layers_with_and_without_experts(planned_once: None, mesh: Mesh, tmp_path: Path) -> None:
    model, texts = small_model("deepseek_v2", mesh.world, tmp_path, seed=mesh.world), texts_of(mesh)
    compare(run_world(mesh.world, lambda t: drive(t, tmp_path, mesh, texts)), texts, mesh, model)
