"""The layouts that families with longer tests of their own leave out: models of two layers, in two steps. Rows are
ragged, of chunks, of whole prompts and of single tokens; a group has none in the first step, and another in either.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from support import small_model
from torch import Tensor

from models import glm, oss, qwen35, stepfun
from models.layouts import MESHES, Oracle, check, in_two_steps, over
from models.test_logits import splits
from planner.meshes import layouts
from weft.planner.spec import Mesh

Saved = Callable[[str, int], tuple[Path, Oracle]]
MODELS: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[dict[str, Any]], Any]]] = {
    "step3p5": (stepfun.small_config, stepfun.Step),
    "qwen3_5_moe": (qwen35.small_config, qwen35.Qwen35),
    "gpt_oss": (oss.small_config, oss.GptOss),
    "glm4_moe": (glm.small_config, glm.Glm),
}
EVERY = {
    (family, mesh): i + j
    for i, family in enumerate((*MODELS, "deepseek_v3"))
    for j, mesh in enumerate(layouts(8))
    if family == "deepseek_v3" or mesh not in MESHES
}
CASES = [case for case, at in EVERY.items() if at % 6 == 0]
"""Cases by day. The rest is for the night: how splits are combined matters to collectives, which know no family, and
`test_logits.py` has combinations."""
# Every split of attention, and of the experts that one has, each in one layout.
CASES += [(family, mesh) for family in ("llama", "mixtral") for mesh in splits(8)]
CASES += [("minimax_m2", mesh) for mesh in MESHES]
NIGHTLY = [case for case, at in EVERY.items() if at % 6]
NIGHTLY += [(family, mesh) for family in ("qwen2", "mistral") for mesh in splits(8)]  # Llama's layers
NIGHTLY += [("minimax_m2", mesh) for mesh in splits(8) if mesh not in MESHES]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    made: dict[tuple[str, int], tuple[Path, Oracle]] = {}

    def get(family: str, parts: int) -> tuple[Path, Oracle]:
        if (family, parts) not in made:
            directory = tmp_path_factory.mktemp(f"{family}-{parts}")
            made[family, parts] = directory, save(family, parts, directory)
        return made[family, parts]

    return get


def save(family: str, parts: int, directory: Path) -> Oracle:
    if family not in MODELS:
        whole = small_model(family, parts, directory, seed=parts, num_hidden_layers=2)

        def oracle(tokens: Tensor) -> Tensor:
            return whole(tokens[None]).logits[0]

        return oracle
    config, model_of = MODELS[family]
    values = over(config(), parts)
    model = model_of(values)
    save_file(
        {name: tensor.contiguous() for name, tensor in model.published().items()}, directory / "model.safetensors"
    )
    (directory / "config.json").write_text(json.dumps(values))
    return model


@pytest.mark.parametrize(
    "family, mesh", [*CASES, *(pytest.param(*case, marks=pytest.mark.nightly) for case in NIGHTLY)], ids=str
)
def test_logits_are_transformers(saved: Saved, family: str, mesh: Mesh) -> None:
    parts = {1: 2, 2: 2, 3: 6}.get(mesh.world, mesh.world)
    directory, oracle = saved(family, parts)
    check(directory, mesh, oracle, 61, steps=in_two_steps)
