"""Cores and threads of each rank: as users write them, by default, and what the ranks' processes get."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest

from weft.engine.config.config import EngineConfig
from weft.engine.worker.open_transports import bind

EIGHT = set(range(8))


def bound(text: str, world: int = 2) -> EngineConfig:
    return EngineConfig(attn_dp=world, ep=world, cpu_bind=text)


def cores_in_a_fork(config: EngineConfig, rank: int) -> set[int]:
    """Return a process's cores after `bind`."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            left = bind(config, rank)
            assert replace(left, seed=1).cores is None, "a bound process makes configurations"
            os.write(writer, json.dumps(sorted(os.sched_getaffinity(0))).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with open(reader) as reply:
        return set(json.load(reply))


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: EIGHT)


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(
    "text, cores",
    [
        ("0-3|4-7", [{0, 1, 2, 3}, {4, 5, 6, 7}]),
        ("0|7", [{0}, {7}]),
        ("0,2-4,6|1", [{0, 2, 3, 4, 6}, {1}]),
        ("0-1|0-1", [{0, 1}, {0, 1}]),  # shared, if the user wants so
        (" 0 - 1 | 2 , 3 ", [{0, 1}, {2, 3}]),
    ],
)
def test_cores_as_written(text: str, cores: list[set[int]]) -> None:
    assert bound(text).cores == cores


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(
    "text", ["", "all", "0-3|", "0-|1", "-1|2", "3-1|0", "0;1|2", "0,|1", "0|0x1", "0-99999999999|1"]
)
def test_what_names_no_cores(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not auto, off or cores such as 0-3\|4-7, a part a rank") as error:
        bound(text)
    assert repr(text) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(
    "text, error",
    [
        ("0-3", r"has 1 part\(s\) for 2 rank\(s\); split them by \|"),
        ("0|1|2", r"has 3 part\(s\) for 2 rank\(s\)"),
        ("0-3|6-9", r"this machine gives no core 8, only \[0, 1, 2"),
    ],
)
def test_cores_that_do_not_fit(text: str, error: str) -> None:
    with pytest.raises(ValueError, match=f"cpu_bind .*{error}"):
        bound(text)


def test_each_rank_gets_its_cores() -> None:
    here = sorted(os.sched_getaffinity(0))
    first, last = here[0], here[-1]
    for text, cores in ((f"{first}|{last}", [{first}, {last}]), ("off", [set(here)] * 2)):
        assert [cores_in_a_fork(bound(text), rank) for rank in (0, 1)] == cores
    assert set(here) == os.sched_getaffinity(0)


def test_a_rank_reads_the_same_cores_from_its_file() -> None:
    here = sorted(os.sched_getaffinity(0))
    config = bound(f"{here[-1]}|{here[0]}")
    read = EngineConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert read.cores == config.cores == [{here[-1]}, {here[0]}]
