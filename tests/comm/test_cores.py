"""Cores that share a cache, and their use by transport shm."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from comm.processes import run_threads
from weft.comm import shm
from weft.comm.cores import core_list, share_a_cache
from weft.comm.shm import ShmTransport, ShmTuning
from weft.planner.spec import Mesh


def host(root: Path, caches: dict[int, list[tuple[int, str]]]) -> Path:
    """A /sys of caches by core: their levels and the cores that share each."""
    for core, found in caches.items():
        for at, (level, shared) in enumerate(found):
            (index := root / f"cpu{core}" / "cache" / f"index{at}").mkdir(parents=True)
            (index / "level").write_text(f"{level}\n")
            (index / "shared_cpu_list").write_text(f"{shared}\n")
    return root


def test_cores_share_a_cache_of_the_second_or_third_level(tmp_path: Path) -> None:
    def caches(core: int) -> list[tuple[int, str]]:
        pair = f"{core // 2 * 2}-{core // 2 * 2 + 1}"
        return [(1, "0-7"), (2, pair), (3, "0-3,8" if core < 4 else "4-7")]

    cpus = host(tmp_path, {core: caches(core) for core in range(8)})
    shared = [{0}, {0, 1}, {6, 7}, {0, 3}, {1, 8}, {4, 5, 6, 7}]
    apart = [{0, 4}, {3, 4}, {0, 1, 2, 3, 4}, {7, 8}]
    assert [share_a_cache(cores, cpus) for cores in shared + apart] == [True] * len(shared) + [False] * len(apart)


def test_a_system_that_does_not_say_has_no_shared_cache(tmp_path: Path) -> None:
    host(tmp_path, {0: [(3, "")]})
    assert not share_a_cache({0, 1}, tmp_path) and not share_a_cache({5}, tmp_path)


@pytest.mark.parametrize("text", ["", "a", "3-1", "0,,1", "0-99999999999"])
def test_other_texts_are_no_list_of_cores(text: str) -> None:
    with pytest.raises(ValueError):
        core_list(text)


@pytest.mark.parametrize(("tuning", "shared", "stored"), [
    (None, True, shm.NEVER), (None, False, 32 << 10), (ShmTuning(stream_slot_bytes=5), True, 5),
])  # fmt: skip
def test_only_cores_without_a_shared_cache_store_past_it(
    tuning: ShmTuning | None, shared: bool, stored: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[set[int]] = []
    monkeypatch.setattr(shm, "share_a_cache", lambda cores: seen.append(cores) or shared)
    kernels, tunings = shm.cpu_kernels(), []

    class Recorded:
        def __getattr__(self, name: str) -> Any:
            return getattr(kernels, name)

        def create(self, *arguments: Any) -> int:
            tunings.append(arguments[-2])
            return int(kernels.create(*arguments))

    monkeypatch.setattr(shm, "cpu_kernels", Recorded)
    run_threads(Mesh(1, 2, 2, 1), tmp_path, barrier, tuning=tuning)
    assert [sizes[3] for sizes in tunings] == [stored] * 2
    assert all(cores == os.sched_getaffinity(0) for cores in seen) and len(seen) == 2 * (tuning is None)


@pytest.mark.parametrize(("of_others", "spins"), [({0, 1}, 2000), ({0}, 20)])
def test_ranks_with_a_core_each_spin_long(
    of_others: set[int], spins: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bound rank sees one core of its own, which does not make the host crowded."""
    kernels, found = shm.cpu_kernels(), []

    class Recorded:
        def __getattr__(self, name: str) -> Any:
            return getattr(kernels, name)

        def create(self, *arguments: Any) -> int:
            found.append(arguments[-4])
            return int(kernels.create(*arguments))

    monkeypatch.setattr(shm, "cpu_kernels", Recorded)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: of_others if pid else {0})
    run_threads(Mesh(1, 2, 2, 1), tmp_path, barrier)
    assert found == [spins] * 2


def barrier(transport: ShmTransport, mesh: Mesh) -> None:
    transport.barrier(mesh.peers("world", transport.rank))
