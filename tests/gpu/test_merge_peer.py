"""The merge on transport peer over GPUs, a process each: what tests/gpu/test_merge_emulated.py asks, and graphs."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from gpu.merges import merge_everything, merge_in_pieces, merge_live_rows, refuse_merges
from gpu.test_peer import GPUS, captured, run_gpus
from weft.planner.spec import Mesh

pytestmark = pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs; this machine has {GPUS}")
MESHES = [Mesh(1, 2, 2, 1, dcp=2), Mesh(1, 4, 4, 1, dcp=2), Mesh(1, 4, 4, 1, dcp=4), Mesh(1, 8, 8, 1, dcp=8)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_shape(mesh: Mesh, tmp_path: Path) -> None:
    run_gpus(mesh, tmp_path, partial(merge_everything, large=True), max_bytes=32 << 20)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_graph_serves_every_number_of_live_rows(mesh: Mesh, tmp_path: Path) -> None:
    run_gpus(mesh, tmp_path, partial(merge_live_rows, turns=500, again=captured))


def test_what_exceeds_a_call_goes_in_several(tmp_path: Path) -> None:
    run_gpus(MESHES[0], tmp_path, merge_in_pieces, max_bytes=600)


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    run_gpus(MESHES[0], tmp_path, refuse_merges)
