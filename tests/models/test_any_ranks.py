"""Logits of layouts over which heads, experts, features and vocabulary do not divide, against transformers'."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support import MODELS as OF_TRANSFORMERS
from support import run_world

from models import qwen3_next, test_every_layout
from models.layouts import Oracle, check, in_two_steps
from models.test_every_layout import save
from models.test_logits import compare, drive, texts_of
from planner.meshes import layouts
from weft.engine.models.layers.basic import Builder
from weft.planner.spec import Mesh

PARTS = 4
"""Sizes are multiples of 4 or 8: 8 query heads, 2 key-value heads or 8, 8 experts, 61 tokens."""
FAMILIES = [*test_every_layout.MODELS, *OF_TRANSFORMERS, "qwen3_next"]
UNEVEN = [mesh for mesh in layouts(7) if mesh.world in (3, 5, 6, 7)]
ALL = [(family, mesh) for family in FAMILIES for mesh in UNEVEN]
DAILY = [(family, UNEVEN[(3 * i + j) % len(UNEVEN)]) for i, family in enumerate(FAMILIES) for j in range(3)]
"""Three layouts of each family, which with the families together are all."""
DISPATCHED = [Mesh(3, 1, 3, 1), Mesh(1, 3, 1, 3), Mesh(2, 3, 3, 2), Mesh(1, 5, 5, 1), Mesh(7, 1, 7, 1)]
Saved = Callable[[str], tuple[Path, Oracle]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    made: dict[str, tuple[Path, Oracle]] = {}

    def get(family: str) -> tuple[Path, Oracle]:
        if family not in made:
            directory = tmp_path_factory.mktemp(family)
            if family == "qwen3_next":
                made[family] = directory, qwen3_next.small_qwen3_next(directory)
            else:
                made[family] = directory, save(family, PARTS, directory)
        return made[family]

    return get


def test_every_layout_is_a_daily_one_of_some_family() -> None:
    assert {str(mesh) for _, mesh in DAILY} == set(map(str, UNEVEN))


@pytest.mark.parametrize("ranks", range(1, 8))
def test_features_are_cut_in_units_of_the_format(ranks: int) -> None:
    for unit, size in product((16, 128), range(ranks, 600, 7)):
        builders = [
            Builder(Mesh(1, ranks, 1, ranks), rank, torch.float32, torch.device("cpu"), share_unit=unit)
            for rank in range(ranks)
        ]
        shares = [b.share("x", size, "world", cut=True) for b in builders]
        assert [share.start for share in shares] == [0, *(share.stop for share in shares[:-1])]
        assert shares[-1].stop == size and all(share.start < share.stop for share in shares)
        if size >= unit * ranks and size % ranks:
            assert not any(share.start % unit for share in shares)


@pytest.mark.parametrize(
    "family, mesh", [pytest.param(*case, marks=() if case in DAILY else pytest.mark.nightly) for case in ALL], ids=str
)
def test_logits_are_transformers(saved: Saved, family: str, mesh: Mesh) -> None:
    directory, oracle = saved(family)
    check(directory, mesh, oracle, 61, split=mesh.ep % 2 == 1, steps=in_two_steps)


@pytest.mark.parametrize("mesh", DISPATCHED, ids=str)
@pytest.mark.parametrize("experts", ["dispatch", "auto"])
@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3"])
def test_rows_that_are_sent_to_uneven_shares_of_experts(saved: Saved, family: str, mesh: Mesh, experts: Any) -> None:
    directory, oracle = saved(family)
    texts = texts_of(mesh)

    class Whole:
        """The oracle in the form of transformers' models."""

        def __init__(self, oracle: Oracle):
            self.oracle = oracle

        def __call__(self, tokens: Any) -> Any:
            self.logits = self.oracle(tokens[0])[None]
            return self

    found = run_world(mesh.world, lambda t: drive(t, directory, mesh, texts, experts=experts))
    compare(found, texts, mesh, Whole(oracle))
