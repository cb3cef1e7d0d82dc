"""The commands that measure, as a user runs them: help, what they refuse before measuring, and one small run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from signal import SIGINT
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from e2e.here import weft_here
from weft.serve.cli import cmd_tune
from weft.tune.ranks import Report, run_ranks
from weft_bench.baselines import DeepSpeed, build_deepspeed
from weft_bench.commands import cmd_bench_collectives, cmd_bench_dcp, cmd_bench_latency

MODULES = {
    "bench collectives": cmd_bench_collectives,
    "bench dcp": cmd_bench_dcp,
    "bench latency": cmd_bench_latency,
    "tune": cmd_tune,
}
FILES = {"bench collectives": "--json", "bench dcp": "--json", "bench latency": "--json", "tune": "--out"}


def measured(*args: Any) -> NoReturn:
    raise AssertionError("something was measured")


@pytest.fixture(autouse=True)
def no_table(empty_cache: None) -> None:
    """Ignore the host's tuned table."""


@pytest.fixture
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in MODULES.values():
        monkeypatch.setattr(module, "run_ranks", measured)


def refused(*arguments: str) -> str:
    """The one line that says why."""
    code, out, err = weft_here(*arguments)
    assert code == 2 and not out and err.startswith("weft: ") and err.count("\n") == 1, err
    return err


def interrupted(rank: int, directory: Path, report: Report) -> None:
    os.kill(os.getpid(), SIGINT)
    report(rank)


def test_ctrl_c_is_left_to_the_command() -> None:
    """A terminal's Ctrl-C reaches the ranks too; a traceback of each would be all that the user sees."""
    assert list(run_ranks(1, interrupted)) == [0]


@pytest.mark.parametrize("command, module", MODULES.items())
def test_help_teaches(command: str, module: ModuleType) -> None:
    code, out, _ = weft_here(*command.split(), "--help")
    examples = out.split("Examples:")[1].split("options")[0]
    assert code == 0 and examples.count(f"weft {command}") >= 2
    assert FILES[command] in examples and FILES[command] in out.split("options")[1]


@pytest.mark.usefixtures("no_ranks")
@pytest.mark.parametrize("command", MODULES)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(command: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "x.json", Path("/proc/x.json"), Path("/proc/none/x.json")):
        text = refused(*command.split(), FILES[command], str(path))
        assert f"cannot write {path}: " in text and f"with {FILES[command]}" in text


@pytest.mark.usefixtures("no_ranks")
@pytest.mark.parametrize("command", MODULES)
def test_what_was_measured_before_stays_until_there_is_more(command: str, tmp_path: Path) -> None:
    """Looking whether the file can be written neither empties it nor leaves one behind."""
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("figures")
    for path in (old, new):
        with pytest.raises(AssertionError, match="something was measured"):
            weft_here(*command.split(), FILES[command], str(path))
    assert old.read_text() == "figures" and not new.exists()


BAD = [
    ("bench collectives --edges nope", "no edge 'nope'; one of all_reduce, reduce_scatterv, "),
    ("bench collectives --baselines nccl", "--baselines nccl does not run on --device cpu; one of gloo, deepspeed"),
    ("bench collectives --sizes 17", "size '17' is not a number of bytes such as 1K"),
    ("bench collectives --ranks 1", "--ranks accepts numbers from 2 to 16"),
    ("bench collectives --ranks 2 99", "--ranks accepts numbers from 2 to 16"),
    ("bench dcp --ranks 3", "--ranks takes powers of two from 2 to 16"),
    ("bench dcp --batches 0", "--batches takes numbers of 1 or more"),
    ("bench dcp --device cuda", "--device cuda requires two GPUs or more; this machine has 0"),
    ("bench latency --tp 0", "attn_tp is 0"),
    ("bench latency --output 1", "--output 2 or more"),
    ("bench latency --transports", "--transports takes gloo, shm or both"),
    ("tune --ranks 1", "--ranks accepts numbers from 2 to 16"),
    ("tune --ranks 2 17", "--ranks accepts numbers from 2 to 16"),
    ("tune --transports peer", "--transports peer does not run on --device cpu"),
    ("bench collectives --device cuda", "--device cuda requires two GPUs or more; this machine has 0"),
    ("tune --device cuda", "--device cuda requires two GPUs or more; this machine has 0"),
]


@pytest.mark.usefixtures("no_ranks")
@pytest.mark.parametrize("arguments, text", BAD, ids=[b[0] for b in BAD])
def test_bad_input_ends_in_one_line(arguments: str, text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    path = tmp_path / "x.json"
    assert text in refused(*arguments.split(), FILES[arguments.split(" --")[0]], str(path))
    assert not path.exists()


@pytest.mark.usefixtures("no_ranks")
def test_words_that_are_no_choice() -> None:
    commands = ("bench collectives --baselines nope", "bench latency --transports nope", "tune --transports nope")
    for arguments in commands:
        code, out, err = weft_here(*arguments.split())
        assert code == 2 and not out and "'nope'" in err and "'gloo'" in err and "Traceback" not in err


def test_flashinfer_is_compared_with_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(cmd_bench_collectives, "run_ranks", lambda *args: iter(given.append(args[-1]) or ()))
    command = ["bench", "collectives", "--device", "cuda"]
    for installed in (True, False):
        monkeypatch.setattr(cmd_bench_collectives, "has_flashinfer", lambda installed=installed: installed)
        assert weft_here(*command)[0] == 0
    assert given == [["nccl", "window", "symm", "flashinfer"], ["nccl", "window", "symm"]]
    wanted = refused(*command, "--baselines", "flashinfer").split()[-1]
    assert f'bench-gpu = ["{wanted}"]' in (Path(__file__).parents[2] / "pyproject.toml").read_text()


def test_deepspeeds_kernel_is_compiled_before_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks wait a minute for each other; a compiler may take longer."""
    begun: list[tuple[int, Any]] = []
    ended: list[int] = []

    def run(world: int, work: Any, *args: Any) -> Iterator[Any]:
        assert len(ended) == len(begun), "the one before has not ended"
        begun.append((world, work))
        yield from ()
        ended.append(world)

    monkeypatch.setattr(cmd_bench_collectives, "run_ranks", run)
    command = ["bench", "collectives", "--ranks", "2", "3", "--sizes", "1K"]
    code, _, err = weft_here(*command, "--baselines", "gloo", "deepspeed")
    measured_by = cmd_bench_collectives.cpu.measure
    assert code == 0 and begun == [(1, build_deepspeed), (2, measured_by), (3, measured_by)]
    assert err == "compiling DeepSpeed's kernel, which takes minutes the first time\n"
    begun.clear(), ended.clear()
    assert weft_here(*command)[0] == 0 and begun == [(2, measured_by), (3, measured_by)]


def test_deepspeed_is_loaded_without_the_settings_of_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And what is compiled is what ranks load."""
    calls: list[tuple[str, ...]] = []
    module = SimpleNamespace(initialize=lambda world, rank: calls.append(("initialize", str(world), str(rank))))

    class Builder:
        def load(self, verbose: bool) -> Any:
            calls.append(("load", os.environ["DS_ACCELERATOR"], os.environ.get("WORLD_SIZE", "")))
            return module

    fake: Any = ModuleType("deepspeed.ops.op_builder.cpu")
    fake.ShareMemCommBuilder = Builder
    for name in ("deepspeed", "deepspeed.ops", "deepspeed.ops.op_builder"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.setattr(torch.ops.deepspeed, "inference_all_reduce_", SimpleNamespace(default=abs), raising=False)
    with monkeypatch.context() as patched:
        patched.setattr(os, "environ", {})
        build_deepspeed(0, tmp_path, print)
        DeepSpeed(2, 1, tmp_path, lambda: calls.append(("barrier",)))
    assert calls == [("load", "cpu", ""), ("load", "cpu", "2"), ("barrier",), ("initialize", "2", "1"), ("barrier",)]


@pytest.mark.usefixtures("no_ranks")
def test_a_table_that_is_none() -> None:
    cmd_tune.host_table().write_text("{")
    for command in ("bench collectives", "bench dcp", "bench latency"):
        assert "is no table of weft tune" in refused(*command.split())


@pytest.mark.usefixtures("forked_ranks")
def test_a_small_run(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    words = "bench collectives --ranks 2 --sizes 1K --edges all_reduce --dtypes fp32 --baselines gloo --json"
    code, out, err = weft_here(*words.split(), str(path))
    assert code == 0, err
    _, title, names, row = out.splitlines()
    assert title.startswith("all_reduce, 2 ranks: µs a call") and "".join(names.split()) == "shmzerocopyinplacegloo"
    assert re.fullmatch(r"fp32 +1K( +[\d.,]+){4} \d+(\.\d)?×", row)
    assert max(map(len, (title, names, row))) <= 80
    found = json.loads(path.read_text())
    assert found["what"] == "weft bench collectives --device cpu"
    assert found["host"]["cores"] == os.cpu_count() and {"cpu", "kernel", "torch", "weft"} <= set(found["host"])
    [row] = found["rows"]
    assert row | {"us": 0} == {"ranks": 2, "edge": "all_reduce", "dtype": "fp32", "bytes": 1024, "us": 0}
    assert set(row["us"]) == {"shm", "shm zero copy", "shm in place", "gloo"} and min(row["us"].values()) > 0


@pytest.mark.usefixtures("forked_ranks")
def test_a_small_run_of_merges(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    words = "bench dcp --ranks 2 --shapes qwen3-235b --batches 1 --json"
    code, out, err = weft_here(*words.split(), str(path))
    assert code == 0, err
    [row] = json.loads(path.read_text())["rows"]
    assert row | {"us": 0} == dict(ranks=2, shape="qwen3-235b", batch=1, dtype="fp32", bytes=64 * 128 * 4, us=0)
    recipes = {
        "fused shm",
        *(f"{recipe} {by}" for recipe in ("a2a", "ag_rs", "reduce_scatterv") for by in ("shm", "gloo")),
    }
    assert set(row["us"]) == recipes and min(row["us"].values()) > 0
    assert out.splitlines()[1] == "qwen3-235b: 64 heads × 128, fp32, over 2 ranks: µs a call"


def test_who_is_ended_takes_the_ranks_along(tmp_path: Path) -> None:
    words = ["bench", "collectives", "--ranks", "2"]
    bench = subprocess.Popen(
        [sys.executable, "-m", "weft.serve.cli.main", *words], env=dict(os.environ) | {"TMPDIR": str(tmp_path)}
    )
    children = Path(f"/proc/{bench.pid}/task/{bench.pid}/children")
    while len(started := children.read_text().split()) < 3:  # and what tracks resources
        time.sleep(0.02)
    assert len(started) == 3 and list(tmp_path.glob("weft-bench-*"))
    bench.terminate()
    assert bench.wait() == 130
    while any(Path(f"/proc/{r}").exists() for r in started):
        time.sleep(0.02)
    assert not list(tmp_path.glob("weft-bench-*"))
