"""The plug-ins on ranks over shared memory, under a stand-in for each engine's interfaces (engines/)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import tomllib
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plugins.contracts import ENGINES, NEEDS, PLUGINS, versions

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "src"


def engine_path(engine: str, version: str, folder: Path) -> list[str]:
    """The stand-in with the metadata of an installed version, and the plug-in."""
    metadata = folder / f"{engine}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {engine}\nVersion: {version}\n")
    return [str(folder), str(HERE / "engines"), str(PLUGINS / f"weft-{engine}/src"), str(SOURCES)]


def environment_of(engine: str, version: str, folder: Path) -> dict[str, str]:
    path = ":".join([*engine_path(engine, version, folder), str(HERE.parent)])
    return {"PYTHONPATH": path, "PATH": "/usr/bin:/bin", "HOME": str(Path.home()), "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("engine", ENGINES)
def test_collectives_equal_gloos(engine: str, tmp_path: Path) -> None:
    """And merges, norms and gathers of attention their definitions; each switch turns the plug-in off."""
    environment = environment_of(engine, versions(engine)[-1], tmp_path)
    command = [sys.executable, str(HERE / f"{engine}_ranks.py"), str(tmp_path)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("engine", ENGINES)
def test_unknown_versions_are_off_and_say_so_in_a_line(
    engine: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Nothing of the engine is imported then: a None in sys.modules makes that an error."""
    for place in engine_path(engine, "99.0.1", tmp_path):
        monkeypatch.syspath_prepend(place)
    monkeypatch.setitem(sys.modules, engine, None)
    import_module(f"weft_{engine}").register()
    assert len(caplog.records) == 1
    message = caplog.records[0].getMessage()
    assert "99.0.1" in message and all(version in message for version in versions(engine)) and "\n" not in message


@pytest.mark.parametrize("engine", ENGINES)
def test_the_distribution_has_the_engines_entry_point(engine: str) -> None:
    project = tomllib.loads((PLUGINS / f"weft-{engine}/pyproject.toml").read_text())["project"]
    group = next(each.value for each in NEEDS[engine] if "PLUGINS_GROUP" in each.names[0]).strip("'")
    assert project["entry-points"] == {group: {"weft": f"weft_{engine}:register"}}
    assert project["name"] == f"weft-{engine}" and not any(engine in each for each in project["dependencies"])


SCRIPT, KERNELS = PLUGINS / "with_and_without.py", PLUGINS / "weft-vllm/benchmarks/kernels.py"


def run_script(script: Path, *arguments: str, folder: Path, torchrun: bool = False) -> subprocess.CompletedProcess[str]:
    environment = environment_of("vllm", versions("vllm")[-1], folder)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if torchrun else []
    command = [sys.executable, *launcher, str(script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_with_and_without_compares_tokens_and_times(tmp_path: Path) -> None:
    """The script's own steps, under the stand-in, which samples alike in both arms."""
    report = tmp_path / "report.json"
    asked = ("--batches", "1", "2", "--steps", "3", "--rounds", "1", "--json", str(report), "--cases")
    for what, cases in (("tokens", ["tp"]), ("time", ["tp", "dp"])):
        folder = tmp_path / what
        folder.mkdir()
        done = run_script(SCRIPT, "vllm", what, *asked, *cases, "--profile", str(folder / "traces"), folder=folder)
        assert done.returncode == 0, done.stderr
        result = json.loads(report.read_text())
        assert result["passed"] and list(result["cases"]) == cases
        turns = ["without", "with"] if what == "tokens" else ["without", "with", "with", "without"]
        for case in result["cases"].values():
            assert [arm for arm, _ in case["runs"]] == turns
            assert case["groups"] == {"without": [], "with": ["tp:0"]}
            if what == "tokens":
                assert case["equal"] == case["sequences"] == 3
            else:
                assert case["step_ms_with"].keys() == case["step_ms_without"].keys() == {"1", "2"}
                assert case["gpu_ms_with"] == case["gpu_ms_without"] == {"1": 1.0, "2": 1.0}


def test_an_engine_that_fails_ends_its_case_alone(tmp_path: Path) -> None:
    """The stand-in knows no decode context parallelism."""
    report = tmp_path / "report.json"
    asked = ("--batches", "1", "--steps", "3", "--rounds", "1", "--json", str(report), "--cases", "dcp", "tp")
    done = run_script(SCRIPT, "vllm", "time", *asked, folder=tmp_path)
    assert done.returncode == 1 and "the engine without the plug-in ended" in done.stdout
    cases = json.loads(report.read_text())["cases"]
    assert cases["tp"]["passed"] and not cases["dcp"]["passed"]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    specification = spec_from_file_location("with_and_without", SCRIPT)
    assert specification is not None and specification.loader is not None
    module = module_from_spec(specification)
    monkeypatch.setitem(sys.modules, "with_and_without", module)  # its dataclasses look their annotations up there
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize("without, other, passed", [([], ["tp:0"], True), ([], [], False), (["tp:0"], ["tp:0"], False)])
def test_a_plug_in_that_carries_nothing_is_no_comparison(
    script: Any, without: list[str], other: list[str], passed: bool
) -> None:
    """Two engines without it sample the same, too."""
    ranks = [{"tokens": [[1, 2]], "logprobs": [[-1.0, -1.0]]}]
    pair = [
        SimpleNamespace(groups=set(groups), reply=lambda seconds: [], turn=lambda seconds: ranks)
        for groups in (without, other)
    ]
    [(_, found)] = script.measured({"tp": pair}, SimpleNamespace(start_s=1.0, what="tokens"))
    assert found["passed"] == passed and found["equal"] == 1 and ("error" in found) != passed


def test_a_reply_waits_for_the_groups_that_precede_it_in_the_log(script: Any) -> None:
    ours, theirs = socket.socketpair()
    log, written = map(open, os.pipe(), ("rb", "wb"))
    engine = object.__new__(script.Engine)  # without a process
    engine.arm, engine.channels, engine.groups = "with", [ours], set()
    engine.replies_in_logs = [replies := threading.Semaphore(0)]
    with ours, theirs, log:
        theirs.sendall(b"{}\n")
        with pytest.raises(RuntimeError, match=f"sent a reply, but the line '{script.REPLY}' is missing in its log"):
            engine.reply(0.1)
        theirs.sendall(b"{}\n")
        with written:
            written.write(f"INFO weft-vllm carries group tp:0, calls\nhalf a line\n{script.REPLY}\n".encode())
        reader = threading.Thread(target=engine._pass_on, args=[log, replies])
        reader.start()
        assert engine.reply(60) == [{}] and engine.groups == {"tp:0"}
        reader.join()


def test_tokens_that_differ_end_with_an_error(script: Any) -> None:
    def arm(tokens: list[int], logprobs: list[float]) -> list[dict[str, Any]]:
        return [{"tokens": [[1, 2], tokens], "logprobs": [[-1.0, -1.0], logprobs]}]

    def compared(what: str, *other: Any) -> dict[str, Any]:
        return script.compared([("without", arm([3, 4], [-1.0, -2.0])), ("with", arm(*other))], what)

    assert compared("tokens", [3, 4], [-1.0, -2.0])["passed"]
    assert not compared("tokens", [3, 5], [-1.0, -2.0])["passed"]
    near = compared("logprobs", [3, 5], [-1.05, -9.0])  # beyond the first other token nothing is compared
    assert near["passed"] and near["equal"] == 1 and abs(near["logprobs_differ_by"] - 0.05) < 1e-9
    assert not compared("logprobs", [3, 4], [-1.0, -2.5])["passed"]


@pytest.mark.nightly
def test_kernels_runs_on_cpus(tmp_path: Path) -> None:
    report = tmp_path / "kernels.json"
    asked = (
        "--device",
        "cpu",
        "--rows",
        "2",
        "--hidden",
        "64",
        "--calls",
        "2",
        "--replays",
        "2",
        "--json",
        str(report),
    )
    done = run_script(KERNELS, *asked, "--json", str(report), folder=tmp_path, torchrun=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(report.read_text())["rows"]
    transports = [("all_reduce", "weft"), ("all_reduce+norm", "weft, then a norm"), ("all_reduce+norm", "weft, fused")]
    assert [(row["op"], row["carrier"]) for row in rows] == transports
    assert all(row["us"] > 0 and row["error"] < 4 for row in rows)
