"""Default threads and cores of CPU ranks, on made-up hosts and in engines."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest

from weft.comm.cores import core_list, core_text, own_cores
from weft.engine.config import cpu_shares
from weft.engine.config.config import EngineConfig
from weft.engine.config.cpu_shares import cores_of_engines, cpu_quota, divide, with_cpu_shares
from weft.engine.controller.engine import Engine
from weft.engine.processes.fork_client import ForkServer

HOSTS: dict[str, tuple[str, str]] = {  # hyperthreads of each core, and the CPUs of each NUMA node
    "two cores": ("0|1", "0-1"),
    "eight cores with hyperthreads": ("0,8|1,9|2,10|3,11|4,12|5,13|6,14|7,15", "0-15"),
    "two cores, neighbouring hyperthreads": ("0-1|2-3", "0-3"),
    "two sockets of four": ("0|1|2|3|4|5|6|7", "0-3|4-7"),
    "two sockets, CPUs in turns": ("0|1|2|3", "0,2|1,3"),
    "two nodes of one": ("0|1", "0|1"),
    "a node without CPUs": ("0|1", "0-1|"),
    "sixteen cores": ("|".join(map(str, range(16))), "0-15"),
}
ALL = ""
TABLE = [
    # host, CPUs of the affinity mask, ranks, quota; threads and cores
    ("two cores", ALL, 1, None, 2, "0-1"),
    ("two cores", ALL, 2, None, 1, "0|1"),
    ("two cores", ALL, 3, None, 1, "off"),
    ("two cores", ALL, 1, 1.5, 1, "off"),
    ("two cores", ALL, 1, 0.5, 1, "off"),
    ("two cores", ALL, 1, 2, 2, "0-1"),
    ("eight cores with hyperthreads", ALL, 1, None, 7, "0-6"),  # one is left to the controller
    ("eight cores with hyperthreads", ALL, 2, None, 4, "0-3|4-7"),
    ("eight cores with hyperthreads", ALL, 3, None, 2, "0-1|2-3|4-5"),
    ("eight cores with hyperthreads", ALL, 9, None, 1, "off"),
    ("eight cores with hyperthreads", ALL, 2, 7.9, 3, "off"),
    ("eight cores with hyperthreads", "1,3,8-11,13", 2, None, 2, "1,3|8,10"),  # 9 and 11 share cores with 1 and 3
    ("two cores, neighbouring hyperthreads", ALL, 2, None, 1, "0|2"),
    ("two cores, neighbouring hyperthreads", "1-2", 1, None, 2, "1-2"),
    ("two sockets of four", ALL, 1, None, 4, "0-3"),  # its weights lie in one node's memory
    ("two sockets of four", ALL, 2, None, 4, "0-3|4-7"),
    ("two sockets of four", ALL, 3, None, 2, "0-1|2-3|4-5"),
    ("two sockets of four", ALL, 4, None, 2, "0-1|2-3|4-5|6-7"),
    ("two sockets of four", "0-4", 2, None, 2, "0-1|2-3"),  # two cores of one node, rather than one of the other
    ("two sockets of four", "3-7", 1, None, 4, "4-7"),
    ("two sockets, CPUs in turns", ALL, 2, None, 2, "0,2|1,3"),
    ("two nodes of one", ALL, 2, None, 1, "0|1"),
    ("a node without CPUs", ALL, 2, None, 1, "0|1"),
    ("sixteen cores", ALL, 1, None, 15, "0-14"),
    ("sixteen cores", ALL, 2, None, 7, "0-6|7-13"),
    ("sixteen cores", ALL, 3, None, 5, "0-4|5-9|10-14"),
    ("sixteen cores", ALL, 4, None, 4, "0-3|4-7|8-11|12-15"),  # each keeps four
]


def host(root: Path, name: str, monkeypatch: pytest.MonkeyPatch, mask: str = ALL) -> Path:
    """Write a /sys/devices/system of this host, and restrict this process to the mask."""
    cores, nodes = HOSTS[name]
    for siblings in cores.split("|"):
        for cpu in core_list(siblings):
            (topology := root / "cpu" / f"cpu{cpu}" / "topology").mkdir(parents=True)
            (topology / "thread_siblings_list").write_text(f"{siblings}\n")
    for number, cpus in enumerate(nodes.split("|")):
        (node := root / "node" / f"node{number}").mkdir(parents=True)
        for cpu in core_list(cpus) if cpus else ():
            (root / "cpu" / f"cpu{cpu}" / node.name).symlink_to(node)
    known = core_list(mask or cores.replace("|", ","))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: known)
    return root / "cpu"


@pytest.mark.parametrize(("name", "mask", "ranks", "quota", "threads", "cores"), TABLE)
def test_each_rank_has_an_equal_share_of_one_node(
    name: str,
    mask: str,
    ranks: int,
    quota: float | None,
    threads: int,
    cores: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = own_cores(host(tmp_path, name, monkeypatch, mask))
    found = divide(nodes, ranks, *() if quota is None else (quota,))
    assert found[:2] == (threads, cores) and (cores == "off") == bool(found[2])
    if cores != "off":
        assert all(len(core_list(part)) == threads for part in cores.split("|"))


def test_cores_of_another_engine_bind_nobody_else() -> None:
    nodes = {0: [0, 1, 2, 3]}
    assert divide(nodes, 2, taken={4, 9}) == (2, "0-1|2-3", "")
    threads, cores, reason = divide(nodes, 2, taken={2, 3, 9})
    assert (threads, cores) == (2, "off") and "another engine use core(s) 2-3;" in reason


def test_a_system_that_says_nothing_has_one_node_of_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {7, 2})
    assert own_cores(tmp_path) == {0: [2, 7]}


def version1(folder: str, quota: int) -> dict[str, str]:
    return {f"{folder}/cpu.cfs_quota_us": str(quota), f"{folder}/cpu.cfs_period_us": "100000"}


@pytest.mark.parametrize(
    ("own", "files", "quota"),
    [
        ("0::/\n", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/\n", {"cpu.max": "max 100000"}, None),
        ("0::/a/b\n", {"a/cpu.max": "400000 100000", "a/b/cpu.max": "max 100000"}, 4),
        ("0::/not/seen/in/the/container\n", {"cpu.max": "50000 100000"}, 0.5),
        (
            "4:cpu,cpuacct:/x\n3:cpuset:/x\n",
            version1("cpu/x", 300000),
            3,
        ),
        ("4:cpuacct,cpu:/x\n0::/\n", version1("cpu", 25000), 0.25),
        ("4:cpu:/\n", version1("cpu", -1), None),
        ("3:cpuset:/x\n", {"cpuset/x/cpu.max": "1 1"}, None),
        ("", {}, None),
    ],
)
def test_quotas_of_containers(own: str, files: dict[str, str], quota: float | None, tmp_path: Path) -> None:
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        (tmp_path / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / name).write_text(f"{text}\n")
    assert cpu_quota(tmp_path / "cgroup", tmp_path / "own") == (float("inf") if quota is None else quota)


@pytest.mark.parametrize("text", ["0", "0-1", "0,2", "0-3,8", "1,3-4,9-12"])
def test_cores_are_written_as_they_are_read(text: str) -> None:
    assert core_text(core_list(text)) == text


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(cpu_shares, "own_cores", lambda: {0: [0, 1, 2, 3]})
    monkeypatch.setattr(cpu_shares, "cpu_quota", lambda: float("inf"))
    monkeypatch.setattr(cpu_shares, "cores_of_engines", set)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


TWO = EngineConfig(attn_dp=2, ep=2, device="cpu")


@pytest.mark.usefixtures("four_cores")
@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({}, (2, "0-1|2-3")),
        ({"threads": 3}, (3, "0-1|2-3")),
        ({"cpu_bind": "off"}, (2, "off")),
        ({"cpu_bind": "1-3|0"}, (1, "1-3|0")),
        ({"cpu_bind": "0|0", "threads": 4}, (4, "0|0")),
        ({"executor": "thread"}, (1, "off")),
        ({"nnodes": 2}, (1, "off")),  # both hosts' ranks would get this machine's first cores
    ],
)
def test_options_replace_the_defaults(options: dict[str, object], found: tuple[int, str]) -> None:
    config = with_cpu_shares(replace(TWO, **options))  # type: ignore[arg-type]
    assert (config.threads, config.cpu_bind) == found
    assert with_cpu_shares(config) == config


@pytest.mark.usefixtures("four_cores")
@pytest.mark.parametrize(("text", "threads"), [("3", 3), ("2,1", 2), ("0", 1)])
def test_omp_num_threads_is_a_number_without_cores(text: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    config = with_cpu_shares(TWO)
    assert (config.threads, config.cpu_bind) == (threads, "off")
    assert with_cpu_shares(replace(TWO, threads=1)).cpu_bind == "0-1|2-3"


@pytest.mark.usefixtures("four_cores")
def test_gpu_ranks_have_a_thread_and_any_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_shares, "on_gpus", lambda config: True)
    config = with_cpu_shares(TWO)
    assert (config.threads, config.cpu_bind) == (1, "off")


def test_a_second_engine_is_not_bound_to_the_first_ones_cores(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here = os.sched_getaffinity(0)
    config = EngineConfig(device="cpu", threads=1, cpu_bind=core_text([min(here)]), kv_tokens=512)
    with Engine(config) as engine:
        assert min(here) in cores_of_engines() and engine.config.cpu_bind == str(min(here))
        monkeypatch.setattr(cpu_shares, "own_cores", lambda: {0: [min(here)]})
        monkeypatch.setattr(cpu_shares, "cpu_quota", lambda: float("inf"))
        with caplog.at_level(logging.WARNING):
            assert with_cpu_shares(replace(config, cpu_bind="auto")).cpu_bind == "off"
    assert f"ranks of another engine use core(s) {min(here)};" in caplog.text


@pytest.mark.parametrize("given", [None, "7"])
def test_openmp_threads_of_ranks_spin_shortly_unless_users_say_how_long(
    given: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if given is not None:
        monkeypatch.setenv("GOMP_SPINCOUNT", given)
    server = ForkServer(tmp_path)
    try:
        while (environment := Path(f"/proc/{server._process.pid}/environ").read_bytes()) == b"":
            pass
        assert f"GOMP_SPINCOUNT={given or 1000}".encode() in environment.split(b"\0")
    finally:
        server.close()
