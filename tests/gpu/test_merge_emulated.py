"""The merge's kernel on transport peer, emulated on a CPU; tests/gpu/test_merge_peer.py asks GPUs the same."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from gpu.emulation import run_emulated
from gpu.merges import Step, merge_everything, merge_in_pieces, merge_live_rows, refuse_merges
from gpu.test_emulated import one_thread
from weft.comm.peer import PeerTransport
from weft.comm.peer_launch import PeerTuning
from weft.planner.spec import Mesh

__all__ = ["one_thread"]
FEW = PeerTuning(threads=32, merge_blocks=3, merge_threads=64)  # a block that has few threads takes more turns
MESHES = [Mesh(1, 2, 2, 1, dcp=2), Mesh(1, 3, 3, 1, dcp=3), Mesh(2, 4, 8, 1, dcp=2), Mesh(1, 8, 8, 1, dcp=8)]
UNEVEN = [Mesh(1, 5, 5, 1, dcp=5), Mesh(1, 6, 6, 1, dcp=6), Mesh(1, 7, 7, 1, dcp=7), Mesh(2, 3, 6, 1, dcp=3)]
AT_NIGHT = [pytest.param(mesh, marks=pytest.mark.nightly) for mesh in (MESHES[3], *UNEVEN)]
UNEVEN_AT_NIGHT = [pytest.param(mesh, marks=pytest.mark.nightly) for mesh in (MESHES[2], *UNEVEN[:2], UNEVEN[3])]


@pytest.mark.parametrize("mesh", [*MESHES[:3], *AT_NIGHT], ids=str)
def test_every_shape(mesh: Mesh) -> None:
    run_emulated(mesh, partial(merge_everything, large=False), FEW, max_bytes=1 << 20)


@pytest.mark.parametrize("mesh", [MESHES[0], pytest.param(MESHES[1], marks=pytest.mark.nightly)], ids=str)
def test_the_plain_form_of_gpus_before_hopper(mesh: Mesh) -> None:
    run_emulated(mesh, partial(merge_everything, large=False), FEW, plain=True, max_bytes=1 << 20)


def same(transport: PeerTransport, step: Step) -> Step:
    return step


@pytest.mark.parametrize("mesh", [*MESHES[:2], UNEVEN[2], *UNEVEN_AT_NIGHT], ids=str)
def test_live_rows_change_from_call_to_call(mesh: Mesh) -> None:
    run_emulated(mesh, partial(merge_live_rows, turns=12, again=same), replace(FEW, merge_blocks=2), max_bytes=1 << 20)


@pytest.mark.parametrize(
    "mesh, max_bytes",
    [(MESHES[0], 600), (MESHES[1], 800), pytest.param(MESHES[3], 3000, marks=pytest.mark.nightly)],
    ids=str,
)
def test_what_exceeds_a_call_goes_in_several(mesh: Mesh, max_bytes: int) -> None:
    run_emulated(mesh, merge_in_pieces, FEW, max_bytes=max_bytes)


def test_what_cannot_be_is_refused() -> None:
    run_emulated(MESHES[0], refuse_merges, FEW, max_bytes=1 << 20)
