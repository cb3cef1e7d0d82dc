"""Measurements over several hosts: hosts meet, node 0 decides the work, and plans over hosts go by the table."""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from chaos.hosts_rig import arguments, joined_hosts
from e2e.here import weft_here
from engine.test_agents import is_given, reserved_ports
from weft.comm.ports import reserve
from weft.comm.shm import ShmTuning
from weft.comm.transport_registry import GLOO, SHM
from weft.engine.config.config import EngineConfig, EngineError
from weft.engine.hosts import measurement
from weft.engine.hosts.measurement import run_over_hosts
from weft.engine.worker.open_transports import cost_model, table_file
from weft.planner.cost import ETHERNET, costs, host_table
from weft.planner.spec import Mesh
from weft.tune import cpu_costs as tune
from weft.tune import host_costs as tune_hosts
from weft_bench import collectives_hosts

SIZES = [4096]


@pytest.fixture(autouse=True)
def no_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def node(number: int, port: int, key: Path, **options: Any) -> EngineConfig:
    meeting: Any = dict(master_addr="127.0.0.1", master_port=port, cluster_key=key, node_rank=number)
    return EngineConfig(attn_dp=2, nnodes=2, device="cpu", **meeting, **options)


@pytest.mark.nightly
def test_hosts_are_tuned_and_plans_go_by_the_table(tmp_path: Path) -> None:
    """One rank on each of two hosts, by one size: each kind of exchange between hosts, as many as are announced."""
    (key := tmp_path / "cluster.key").write_text("a secret of this test\n")
    options = [SHM.option, GLOO.option]
    task = {"options": options, "sizes": SIZES, "tuning": asdict(ShmTuning())}
    elsewhere: list[Any] = []
    with reserved_ports() as port:
        over, work = node(0, port, key), tune_hosts.price
        config = node(1, port, key)
        other = threading.Thread(target=lambda: elsewhere.extend(run_over_hosts(config, work, dict, print)))
        other.start()
        rows = list(run_over_hosts(over, work, lambda: task, print))
        other.join()
    assert not elsewhere, "node 0 alone reports"
    mesh = tune_hosts.mesh_of(2, 1)
    assert len(rows) == tune_hosts.count(mesh, options, SIZES)
    assert {row["kind"] for row in rows} == {"all_gatherv", "all_reduce", "reduce_scatterv", "all_to_allv"}
    assert all((r["transport"], r["ranks"], r["hosts"], r["world"]) == (GLOO.name, 2, 2, 2) for r in rows)
    host_table(hosts=2).parent.mkdir(parents=True)
    found = [row | {"bytes": 1000.0, "us": 7.0} for row in rows]
    table = {"local": [[8, 1]], "epilogue": [[8, 1]], "transports": {GLOO.name: found}}
    alone = EngineConfig(attn_dp=2, device="cpu")
    assert table_file(over) is None and cost_model(over).name == "cpu"
    host_table(hosts=2).write_text(json.dumps(table))
    assert cost_model(over).of(GLOO.name, 2).collective_us("all_reduce", 2, 1000, hosts=2) == 7.0
    assert cost_model(alone).name == "cpu" and table_file(alone) is None, "of one host nothing was measured"
    host_table().write_text(json.dumps(table))
    assert table_file(alone) == host_table() and table_file(over) == host_table(hosts=2)


def test_groups_inside_hosts_and_across_are_measured_apart() -> None:
    mesh, sizes = tune_hosts.mesh_of(2, 2), [4096]
    like = torch.empty(0, tune.WIDTH, dtype=tune.DTYPE)
    rows = [row for *_, row in tune.edges_to_price(mesh, 0, sizes, like)]
    reduced = {(row["ranks"], row["hosts"]) for row in rows if row["kind"] == "all_reduce"}
    assert reduced == {(2, 1), (2, 2), (4, 2)}, "inside a host, a rank of each, and all"
    both, across = (tune_hosts.count(mesh, options, sizes) for options in (["shm", "gloo"], ["gloo"]))
    assert both > across > sum(int(row["hosts"]) == 2 for row in rows)
    one = [row for *_, row in tune.edges_to_price(Mesh(2, 2, 2, 2), 0, sizes, like)]
    assert not any("hosts" in row for row in one), "tables of one host are as they were"


@pytest.mark.parametrize("exchange", collectives_hosts.EXCHANGES)
def test_flat_plans_are_of_all_ranks(exchange: str) -> None:
    mesh = tune_hosts.mesh_of(2, 2)
    plans = collectives_hosts.plans_of(exchange, 1 << 20, mesh, "cpu")
    flat, planned = ([(s.transport, e.group) for _, s, e in plans[by].moves()] for by in ("flat", "planned"))
    assert {by for by, _ in flat} == {GLOO.name} and {group for _, group in flat} == {"world"}
    assert {by for by, _ in planned} == {SHM.name, GLOO.name}
    us = [sum(step.us for read in plans[by].reads for step in read.steps) for by in ("flat", "planned")]
    assert ETHERNET.us < us[1] < us[0], "each crosses the network"


def test_hosts_that_measure_something_else_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (key := tmp_path / "cluster.key").write_text("a secret of this test\n")
    for task in ({"work": "collectives"}, {"attn_dp": 2}, None):
        agent = SimpleNamespace(run=lambda: None, task=task, node=1)
        monkeypatch.setattr(measurement, "_MeasurementAgent", lambda config, say, agent=agent: agent)
        with pytest.raises(EngineError, match="start the same command there as on node 1"):
            list(run_over_hosts(node(1, 29600, key), tune_hosts.price, dict, print))


def test_no_program_is_given_the_stores_port_from_the_meeting_of_hosts_to_the_end_of_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def announce(config: EngineConfig, task: dict[str, Any]) -> dict[str, Any]:
        reserved.close()  # the reservation of the measurement is left
        return task

    (key := tmp_path / "cluster.key").write_text("a secret of this test\n")
    with reserved_ports() as port:
        reserved = reserve(port + 1)
    config = node(0, port, key)
    monkeypatch.setattr(measurement, "_announce", announce)
    monkeypatch.setattr(measurement, "run_ranks", lambda *_: iter([is_given(config.store_port)]))
    assert list(run_over_hosts(config, tune_hosts.price, dict, print)) == [False]
    assert is_given(config.store_port)


def test_what_is_not_measured_over_hosts_is_refused() -> None:
    two = ("--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1", "--cluster-key", "k")
    for given, text in (
        (("tune", "--nnodes", "2"), "weft: --nnodes 2 requires --node-rank"),
        (("tune", *two, "--ranks", "2", "4"), "weft: --nnodes measures ranks on CPUs; give --ranks one number"),
        (("tune", *two, "--device", "cuda"), "weft: --nnodes measures ranks on CPUs; give --ranks one number"),
        (("bench", "collectives", *two, "--baselines", "gloo"), "weft: --nnodes times ranks on CPUs"),
        (("bench", "collectives", *two, "--edges", "barrier"), "weft: no edge 'barrier'; one of all_reduce,"),
    ):
        code, _, err = weft_here(*given)
        assert code == 2 and err.startswith(text) and err.count("\n") == 1, err


@pytest.mark.nightly
def test_two_hosts_of_the_rig(tmp_path: Path) -> None:
    """Tuned, planned by the table, and measured compared with what it predicts."""
    (key := tmp_path / "cluster.key").write_text("a secret of this test\n")
    table, figures = tmp_path / "table.json", tmp_path / "figures.json"
    try:
        with joined_hosts(2) as both:
            for command in (
                ("tune", "--ranks", "2", "--out", str(table)),
                ("bench", "latency", "--tp", "4", "--input", "8", "--output", "3", "--rounds", "1"),
                ("bench", "collectives", "--cost", str(table), "--sizes", "8K", "1M", "--json", str(figures)),
            ):
                started = [
                    host.start(sys.executable, "-m", "weft.serve.cli.main", *command, *arguments(host, key))
                    for host in both
                ]
                assert [process.wait() for process in started] == [0, 0]
    except PermissionError as error:
        pytest.skip(str(error))
    measured = costs(str(table))
    assert set(measured.by_transport) == {SHM.name, GLOO.name}
    code, out, _ = weft_here("plan", "--hosts", "2", "--transport", "shm", "gloo", "--cost", str(table))
    assert code == 0 and "· shm" in out and "· torchdist/gloo" in out
    rows = json.loads(figures.read_text())["rows"]
    assert len(rows) == 2 * 2 * len(collectives_hosts.EXCHANGES)
    assert all(min(row["us"]) > 0 and row["predicted_us"] > 0 for row in rows)
