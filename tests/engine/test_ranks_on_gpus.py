"""Decisions of a host with GPUs before its ranks start; the number of GPUs is pretended, so none is needed."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from e2e.here import weft_here
from weft.comm.transport import offer_of
from weft.comm.transport_registry import NCCL, PEER
from weft.engine.config.config import EngineConfig
from weft.engine.config.device import check_formats, check_gpu, device_of, enabled_transports
from weft.engine.controller import startup
from weft.engine.hosts import digests
from weft.engine.models.weights.float8_weights import Float8Format
from weft.engine.worker.open_transports import cost_model, lacks_cost_table, open_transports
from weft.engine.worker.planning import plan_model
from weft.kernels.float8 import FLOAT8
from weft.planner.cost import INFINIBAND, host_table, read_table
from weft.planner.spec import LayoutError
from weft.serve.cli import cmd_tune
from weft.serve.cli.command import UserError
from weft.serve.cli.start import start_engine

TWO = EngineConfig(attn_tp=2, moe_tp=2)


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


def write(name: str, world: int) -> None:
    row = {"kind": "all_reduce", "ranks": world, "world": world, "bytes": 8, "us": 3}
    table = {"local": [[8, 1]], "epilogue": [[8, 1]], "transports": {"peer": [row], name: [row]}}
    host_table(gpus=True).parent.mkdir(parents=True, exist_ok=True)
    host_table(gpus=True).write_text(json.dumps(table))


def test_a_host_is_measured_where_no_table_says_what_is_asked() -> None:
    assert lacks_cost_table(TWO) and cost_model(TWO).name == "h200x4"
    write("torchdist/nccl", 2)
    assert not lacks_cost_table(TWO) and cost_model(TWO).name == str(host_table(gpus=True))
    assert lacks_cost_table(EngineConfig(attn_tp=4, moe_tp=4)), "the table is of fewer ranks"
    write("peer", 2)
    assert lacks_cost_table(TWO) and not lacks_cost_table(EngineConfig(attn_tp=2, moe_tp=2, transport="peer"))
    for changes in (
        dict(transport="nccl"),
        dict(cost="h200-nvlink"),
        dict(device="cpu"),
        dict(attn_tp=1, moe_tp=1),
        dict(attn_tp=8, moe_tp=8),
    ):
        assert not lacks_cost_table(EngineConfig(**dict(attn_tp=2, moe_tp=2) | changes)), changes


def test_gpus_of_several_hosts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Peer inside a host, NCCL across, by the usual network of GPUs; with one on each host, NCCL alone."""
    limits = dict(max_running=64, max_batch_tokens=2048)  # which else follow from a GPU
    over = EngineConfig(attn_dp=2, attn_tp=2, ep=2, moe_tp=2, nnodes=2, dtype="float32", **limits)
    monkeypatch.setattr(startup, "find_spec", lambda name: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert enabled_transports(over) == (PEER, NCCL)
    assert [device_of(over, rank).index for rank in range(4)] == [0, 1, 0, 1]
    assert cost_model(over).of(NCCL.name, 4).collective_us("all_reduce", 2, 0.0, hosts=2) == INFINIBAND.us
    model = over.read_model()
    assert startup.check_plans(startup.resolve_defaults(over), model).moe_exchange == "gather"
    offers = [offer_of(entry, over.mesh, cost_model(over).of(entry.name, 4)) for entry in (PEER, NCCL)]
    plan = plan_model(model, over.mesh, torch.float32, offers).plan((1, 1))
    used = {(step.transport, over.mesh.hosts_of(edge.group)) for _, step, edge in plan.moves()}
    assert used == {(PEER.name, 1), (NCCL.name, 2)}
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: one < 2 > other)
    with pytest.raises(LayoutError, match="--moe-exchange dispatch on GPUs supports one host only"):
        startup.check_plans(replace(over, moe_exchange="dispatch"), model)
    apart = EngineConfig(attn_tp=2, moe_tp=2, nnodes=2)
    assert enabled_transports(apart) == (NCCL,) and not lacks_cost_table(apart), "no GPU has a neighbour on its host"


def test_hosts_say_which_gpus_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu: ["H200", "H200", "H100"][gpu])
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    four = EngineConfig(attn_tp=4, moe_tp=4, nnodes=2)
    found = [digests.facts(config) for config in (four, replace(four, nnodes=1, attn_tp=3, moe_tp=3))]
    assert [f["devices"] for f in found] == ["2 × H200", "2 × H200 + 1 × H100"] and found[0]["nccl"] == "2.28.9"
    assert digests.facts(replace(four, device="cpu"))["devices"] == "CPUs"


def test_the_tables_of_cpus_and_gpus_are_two() -> None:
    write("torchdist/nccl", 2)
    assert cost_model(EngineConfig(attn_tp=2, moe_tp=2, device="cpu")).name == "cpu"
    assert not host_table().exists()


def test_the_first_start_measures_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[Any] = []

    def run_ranks(world: int, *given: Any) -> Any:
        asked.append((world, given[2]))
        row = {"kind": "all_reduce", "ranks": world, "world": world, "bytes": 8, "us": 3}
        yield "local", [[8, 1]]
        yield "epilogue", [[8, 1]]
        for name in ("peer", "torchdist/nccl"):
            yield "price", {"transport": name} | row

    monkeypatch.setattr(cmd_tune, "run_ranks", run_ranks)
    monkeypatch.setattr("weft.engine.controller.engine.Engine", lambda config, progress, kv_events: config)
    for _ in range(2):
        assert start_engine(TWO) is TWO
    assert asked == [(2, ["peer", "nccl"])]
    assert set(read_table(host_table(gpus=True)).by_transport) == {"peer", "torchdist/nccl"}
    assert str(host_table(gpus=True)) in capsys.readouterr().err
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    with pytest.raises(UserError, match=r"cannot write /proc/nowhere.*; name a cost model with --cost"):
        start_engine(TWO)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "find_spec", lambda name: None)
    with pytest.raises(LayoutError, match=r"require Triton, which is missing: pip install 'weft\[gpu\]'"):
        startup.check_packages(TWO)
    startup.check_packages(EngineConfig(device="cpu"))


def test_what_a_gpu_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0) if device.index else (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100" if device.index else "Tesla T4")
    with pytest.raises(LayoutError, match=r"^Tesla T4 \(sm_75\) is older than sm_80, .*, or --device cpu$"):
        check_gpu(torch.device("cuda", 0))
    in_float8 = SimpleNamespace(float8=True, storage=Float8Format((128, 128)))
    with pytest.raises(LayoutError, match=r"^A100 \(sm_80\) has no matmuls in FP8, which require sm_89: --float8 off$"):
        check_formats(in_float8, torch.bfloat16, torch.device("cuda", 1))
    plain = SimpleNamespace(float8=True, storage=Float8Format())
    with pytest.raises(LayoutError, match=r"^A100 \(sm_80\) converts no FP8, which requires sm_89: --kv-dtype auto$"):
        check_formats(plain, FLOAT8, torch.device("cuda", 1))
    check_formats(plain, torch.bfloat16, torch.device("cuda", 1))
    for device in (torch.device("cpu"), torch.device("cuda", 1)):
        check_gpu(device)
    check_formats(in_float8, FLOAT8, torch.device("cpu"))


def test_gpus_that_do_not_reach_each_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pairs = {(0, 1): True, (1, 0): True, (0, 2): True, (1, 2): False}
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: pairs[one, other])
    three = EngineConfig(attn_tp=3, moe_tp=3)
    with pytest.raises(LayoutError, match=r"GPU 1 does not reach the memory of GPU 2, .*--transport nccl"):
        open_transports(three, 1, tmp_path)


@pytest.mark.parametrize(
    ("have", "cuda", "arguments", "says"),
    [
        (0, None, "", "ranks are to run on GPUs, but torch is built without CUDA here"),
        (0, "13.0", "", "ranks are to run on GPUs, but CUDA sees no GPU here"),
        (
            1,
            "13.0",
            "--attn-tp 2",
            r"the layout has 2 ranks, a GPU each, and this machine has 1 GPU\(s\) that CUDA sees",
        ),
    ],
)
def test_a_command_without_its_gpus_ends_with_one_line(
    have: int, cuda: str | None, arguments: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: have)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    code, out, err = weft_here("generate", "--prompt", "x", "--device", "cuda", *arguments.split())
    assert (code, out) == (2, "") and re.fullmatch(rf"weft: {says}.*device cpu\n", err), err
