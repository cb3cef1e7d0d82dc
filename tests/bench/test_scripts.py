"""The scripts of benchmarks/ fit the sources: each shows its help, and step_cpu.py, which replaces parts, runs."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[2] / "benchmarks").rglob("*.py"))
SCRIPTS = [script for script in SCRIPTS if "__main__" in script.read_text()]  # others are parts of these


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_help(script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    if script.stem in ("gpu_kernels", "gpu_prompts"):
        pytest.importorskip("triton")
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    monkeypatch.syspath_prepend(script.parent)  # as Python does for a script; some share code
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 0 and "usage:" in capsys.readouterr().out


def test_cpu_time_of_a_step() -> None:
    script = next(script for script in SCRIPTS if script.stem == "step_cpu")
    done = subprocess.run(
        [sys.executable, str(script), "--sequences", "1", "--rounds", "1"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout)
    assert line["sequences"] == 1 and line["controller_us"] > 0 and line["rank_us"] > 0
