"""Logits with tokens dealt out over ranks against transformers', prefill and decode."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import run_world, small_model

from models.test_logits import compare, drive, texts_of
from weft.place.spec import Mesh

MESHES = [Mesh(1, 2, 2, 1, 2), Mesh(2, 2, 4, 1, 2), Mesh(1, 4, 1, 4, 2), Mesh(1, 4, 2, 2, 4), Mesh(1, 8, 4, 2, 8)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_deepseek_gives_transformers_logits(mesh: Mesh, tmp_path: Path) -> None:
    model, texts = small_model("deepseek_v2", mesh.world, tmp_path, seed=mesh.world), texts_of(mesh)
    compare(run_world(mesh.world, lambda t: drive(t, tmp_path, mesh, texts)), texts, mesh, model)
