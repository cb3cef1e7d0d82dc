"""`--ray`: agents that Ray starts. By day with a stand-in for Ray; at night with Ray itself, where it is installed."""

from __future__ import annotations

import importlib.util
import json
import queue
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chaos.hosts_rig import joined_hosts
from e2e.here import weft_here
from weft.engine.assets import embedded_model_dir
from weft.engine.config.config import EngineConfig
from weft.serve.cli import ray_hosts
from weft.serve.cli.command import EngineArguments

TWO = ("--attn-tp", "2", "--device", "cpu", "--nnodes", "2", "--ray")
PROMPT = ("generate", "--prompt", "Tom has 3 apples", "--max-tokens", "8")


class StandIn(SimpleNamespace):
    """Stand-in for Ray: a cluster of hosts, `here` among them, and actors that note what they are to run."""

    def __init__(self, hosts: dict[str, bool]):
        nodes = [{"NodeID": name, "Alive": lives, "NodeManagerAddress": name} for name, lives in hosts.items()]
        affinity = SimpleNamespace(NodeAffinitySchedulingStrategy=lambda node, soft: (node, soft))
        util = SimpleNamespace(get_node_ip_address=lambda: "here", scheduling_strategies=affinity)
        super().__init__(nodes=lambda: nodes, util=util, exceptions=SimpleNamespace(RayError=OSError))
        self.runs: list[tuple[Any, dict[str, Any]]] = []
        self.killed: list[Any] = []
        self.ended: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def init(self, address: str, **options: Any) -> None:
        assert address == "auto"

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "here")

    def remote(self, actor: type) -> Any:
        assert actor is ray_hosts.Agent

        def options(scheduling_strategy: Any, num_cpus: int, num_gpus: int) -> Any:
            def run(message: str) -> str:
                self.runs.append(((*scheduling_strategy, num_cpus, num_gpus), json.loads(message)))
                return f"run {len(self.runs)}"

            return SimpleNamespace(remote=lambda: SimpleNamespace(run=SimpleNamespace(remote=run)))

        return SimpleNamespace(options=options)

    def wait(self, runs: list[Any], num_returns: int, timeout: float | None = None) -> tuple[list[Any], list[Any]]:
        if timeout is None:
            assert runs == ["run 1", "run 2"][-len(runs) :]
            return [runs[0]], runs[1:] if self.ended.get() else []
        return runs, []

    def get(self, run: str) -> int:
        if run == "run 2":
            raise OSError("the host is gone\nand more")
        return 3

    def kill(self, agent: Any) -> None:
        self.killed.append(agent)

    def shutdown(self) -> None:
        self.runs.append(("shut down", {}))


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    made = StandIn({"b": True, "here": True, "c": False, "a": True})
    monkeypatch.setitem(sys.modules, "ray", made)
    yield made


def options(**changes: Any) -> dict[str, Any]:
    return EngineArguments().values() | {"nnodes": 3, "attn_tp": 3, "device": "cpu"} | changes


def test_each_other_host_gets_an_agent_with_a_secret_of_this_run(
    ray: StandIn, capfd: pytest.CaptureFixture[str]
) -> None:
    config = EngineConfig(**ray_hosts.node_0(options()))
    assert (config.node_rank, config.master_addr) == (0, "here") and config.cluster_key is not None
    assert config.cluster_key.stat().st_mode & 0o77 == 0 or config.cluster_key.parent.stat().st_mode & 0o77 == 0
    secret = config.cluster_key.read_text()
    with ray_hosts.agents(config, True) as watching:
        [(first, one), (second, other)] = ray.runs
        assert (first, second) == (("a", False, 0, 0), ("b", False, 0, 0)), "in the order of their addresses"
        assert one | {"node_rank": 2} == other and one["node_rank"] == 1
        assert one["cluster_key"] == secret and len(secret) == 64 and one["model"] is None and one["nnodes"] == 3
        ray.ended.put(True)
        ray.ended.put(True)
        watching.join()
    said = capfd.readouterr().err
    assert "weft: the agent of node 1 (a) has ended with exit code 3\n" in said
    assert "weft: the agent of node 2 (b) is gone: the host is gone\n" in said
    assert len(ray.killed) == 2 and ray.runs[-1][0] == "shut down"


def test_what_is_named_is_taken(ray: StandIn, tmp_path: Path) -> None:
    (key := tmp_path / "key").write_text("a secret of mine\n")
    found = ray_hosts.node_0(options(master_addr="10.0.0.1", cluster_key=key))
    assert (found["master_addr"], found["cluster_key"]) == ("10.0.0.1", key)
    (model := tmp_path / "model").mkdir()
    sent = json.loads(ray_hosts.message(EngineConfig(**found | {"model": model}), 1))
    assert (sent["model"], sent["cluster_key"]) == (str(model), "a secret of mine")
    assert EngineConfig.from_dict(sent | {"cluster_key": str(key)}).model == model != embedded_model_dir()
    assert ray_hosts.agents(EngineConfig(), False).__enter__() is None


def test_what_cannot_be_is_refused_in_one_line(ray: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, problem in (
        (("--attn-tp", "4", "--nnodes", "4"), "--nnodes 4: the Ray cluster has 3 host(s)"),
        (("--nnodes", "1"), "--ray starts the agents of other hosts: add --nnodes, the number of hosts, 2 or more"),
        (("--node-rank", "1"), "--ray starts the other hosts from this one, which is node 0: omit --node-rank"),
    ):
        code, _, err = weft_here(*PROMPT, *TWO, *arguments)
        assert (code, err) == (2, f"weft: {problem}\n")

    def refuse(*given: Any, **options: Any) -> None:
        raise ConnectionError("no cluster")

    monkeypatch.setattr(ray, "init", refuse)
    code, _, err = weft_here(*PROMPT, *TWO)
    assert code == 2 and err.startswith("weft: --ray: this host belongs to no Ray cluster; ray start --head here")
    monkeypatch.setitem(sys.modules, "ray", None)
    for command in (PROMPT, ("serve",), ("eval",)):
        code, _, err = weft_here(*command, *TWO)
        assert (code, err) == (2, "weft: --ray requires the package ray on every host: pip install 'weft[ray]'\n")


def test_an_agent_that_is_killed_is_started_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And one that ends by itself is not. It reads its first line, and its input stays open as long as its actor."""
    script = tmp_path / "agent.py"
    script.write_text(
        "import os, pathlib, sys\n"
        f"log = pathlib.Path({str(tmp_path / 'log')!r})\n"
        "with log.open('a') as file: file.write(sys.stdin.readline())\n"
        "if len(log.read_text()) < 8: os.kill(os.getpid(), 9)\n"
        "sys.exit(4)\n"
    )
    popen = subprocess.Popen
    monkeypatch.setattr(ray_hosts.subprocess, "Popen", lambda command, **how: popen([sys.executable, script], **how))
    monkeypatch.setattr(ray_hosts, "AGAIN_S", 0.0)
    assert ray_hosts.Agent().run("abc") == 4
    assert (tmp_path / "log").read_text() == "abc\n" * 2


@pytest.mark.nightly
def test_an_agent_ends_with_its_input(tmp_path: Path) -> None:
    config = EngineConfig(attn_tp=2, nnodes=2, device="cpu", node_rank=0, master_addr="127.0.0.1", cluster_key=tmp_path)
    values = config.to_dict() | {"cluster_key": "0123456789abcdef", "model": None, "node_rank": 1}
    agent = subprocess.Popen(
        [sys.executable, "-m", "weft.serve.cli.ray_hosts"], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert agent.stdin is not None and agent.stderr is not None
    print(json.dumps(values), file=agent.stdin, flush=True)
    assert agent.stderr.readline().startswith("node 1: waiting for node 0 at 127.0.0.1:29600")
    agent.stdin.close()
    assert agent.wait(60) == 130


@pytest.mark.nightly
def test_a_ray_cluster_of_two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray started on two hosts of the rig, and one command on the first."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "300")  # a busy machine may take long
    if importlib.util.find_spec("ray") is None:
        pytest.skip("the package ray is not installed: pip install 'weft[ray]'")
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--num-cpus=1", "--object-store-memory=100000000"]
    weft = [sys.executable, "-m", "weft.serve.cli.main"]
    try:
        # Ray's sockets are at paths of at most 107 characters.
        with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder, joined_hosts(2) as (first, second):
            head = ["--head", "--port=6399", "--include-dashboard=false", f"--temp-dir={folder}"]
            first.run(*start, *head, f"--node-ip-address={first.address}")
            second.run(*start, f"--address={first.address}:6399", f"--node-ip-address={second.address}")
            two = first.start(*weft, *PROMPT, *TWO, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            said = two.communicate()[0]
            assert two.returncode == 0, said
            assert "node 1: joined 10.77.0.1:29600" in said and "node 1: node 0 has ended" in said
            assert not re.search(r"weft\.serve\.cli\.ray_hosts|weft\.engine", second.run("ps", "-eo", "args"))
            code, alone, _ = weft_here(*PROMPT, "--attn-tp", "2", "--device", "cpu")
            assert code == 0 and alone.strip() in said
    except PermissionError as error:
        pytest.skip(f"no hosts can be made here: {error}")
