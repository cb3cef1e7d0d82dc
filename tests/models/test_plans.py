"""Output of `weft plan` for every published config that comes with Weft: its collectives, by the read before which they
run, for eight tokens in each DP group on four ranks.
"""

from __future__ import annotations

import pytest

from models.layouts import planned
from weft.engine.assets import preset_names
from weft.planner.spec import Mesh

LAYERS = {
    "deepseek-v2": 60,
    "deepseek-v2-lite": 27,
    "deepseek-v3": 61,
    "minimax-m2": 62,
    "glm-4.5-air": 46,
    "gpt-oss-20b": 24,
    "gpt-oss-120b": 36,
    "kimi-k2": 61,
    "llama-3.1-8b": 32,
    "llama-3.2-1b": 16,
    "mistral-7b-v0.1": 32,
    "mixtral-8x7b": 32,
    "qwen2.5-7b": 28,
    "qwen3-30b-a3b": 48,
    "qwen3-next-80b-a3b": 48,
    "qwen3-235b-a22b": 94,
    "qwen3.5-35b-a3b": 40,
    "qwen3.5-397b-a17b": 60,
    "step-3.5-flash": 45,
}
"""Whatever they are made of, dense or sparse, with a shared expert or without, attention or a recurrent state, layers
are planned alike: what they add is summed once, and its sum is what the next read needs.
"""
HEADS, WHOLE, BOTH = Mesh(1, 4, 4, 1), Mesh(4, 1, 4, 1), Mesh(2, 2, 2, 2)
CASES = [(preset, mesh) for preset in LAYERS for mesh in (HEADS, BOTH)] + [("step-3.5-flash", WHOLE)]


def expected(mesh: Mesh, path: str, layers: int) -> dict[str, int]:
    attention, experts, last = f"{path}.layers.*.input_layernorm", f"{path}.layers.*.post_attention_layernorm", path
    if mesh == HEADS:  # two sums a layer, each with the residual's addition and the norm in the same call
        sums = {attention: layers - 1, experts: layers, f"{last}.norm": 1}
        return {f"{read} all_reduce world finish": count for read, count in sums.items()}
    first, gather, scatter = (
        ("all_gatherv world", "all_gatherv world", "reduce_scatterv world")
        if mesh == WHOLE  # one sum a layer, and rows normed before they are gathered
        else ("all_gatherv attn_dp", "all_reduce+all_gatherv world", "reduce_scatterv+all_reduce world")
    )
    return {
        f"{experts} {first} move": 1,  # of embeddings, which owe nothing
        f"{experts} {gather} finish": layers - (mesh == WHOLE),
        f"{attention} all_reduce world finish": layers - 1,
        f"{last}.norm {scatter} finish": 1,
    }


@pytest.mark.parametrize("preset, mesh", CASES, ids=str)
def test_collectives(preset: str, mesh: Mesh) -> None:
    path = "model.language_model" if preset.startswith("qwen3.5") else "model"
    assert planned(preset, mesh) == expected(mesh, path, LAYERS[preset])


def test_every_preset_has_a_plan_here() -> None:
    assert set(preset_names()) == LAYERS.keys()
