"""The scripts of bench/scripts fit the sources: each shows its help, and step_cpu.py, which replaces parts, runs."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from weft_bench.trees import alternate

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "bench" / "scripts").rglob("*.py"))
SCRIPTS = [script for script in SCRIPTS if "__main__" in script.read_text()]  # others are parts of these
LONG_RUNS = [ROOT / "tests" / "chaos" / name for name in ("soak.py", "overload.py")]


@pytest.mark.parametrize("script", [*SCRIPTS, *LONG_RUNS], ids=lambda path: path.stem)
def test_help(script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    if script.stem == "attention_backends":
        pytest.importorskip("triton")
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    if script in SCRIPTS:
        monkeypatch.syspath_prepend(script.parent)  # as Python does for a script; some share code
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 0 and "usage:" in capsys.readouterr().out


def test_trees_take_turns() -> None:
    order: list[str] = []
    found = alternate(3, ("before", "after"), order.append)
    assert order == ["before", "after", "after", "before", "before", "after"], "neither is always first"
    assert {name: len(results) for name, results in found.items()} == {"before": 3, "after": 3}


@pytest.mark.nightly
def test_cpu_time_of_a_step() -> None:
    script = next(script for script in SCRIPTS if script.stem == "step_cpu")
    done = subprocess.run(
        [sys.executable, str(script), "--sequences", "1", "--rounds", "1"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout)
    assert line["sequences"] == 1 and line["controller_us"] > 0 and line["rank_us"] > 0


@pytest.mark.nightly
def test_attention_backends_dry_run(tmp_path: Path) -> None:
    """A missing feature is reported in the backend's words; every case is checked against the definition first."""
    pytest.importorskip("triton")
    script, out = next(script for script in SCRIPTS if script.stem == "attention_backends"), tmp_path / "found.json"
    done = subprocess.run(
        [sys.executable, str(script), "--small", "--backends", "fa3", "torch", "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert {row["backend"] for row in found["rows"]} == {"torch"} and len(found["rows"]) == 6
    assert all(row["error"] < 1e-2 and row["us"] > 0 and row["plan_us"] > 0 for row in found["rows"])
    assert found["left_out"]["fa3, MLA 4"] == "attention_backend fa3 runs on GPUs only; omit it"
    assert found["host"]["torch"] and done.stdout.count("| GQA 8/1 |") == 3
