"""`weft doctor`, `weft --version`, `weft bench`."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from e2e.here import weft_here
from weft import __version__
from weft.serve.cli import cmd_doctor


def test_this_host_is_examined() -> None:
    code, out, err = weft_here("doctor")
    assert code in (0, 1) and not err
    for text in (f"weft {__version__}", "torch", "cores", "NUMA node(s)", "/dev/shm", "open files"):
        assert text in out, out
    assert "no GPU" not in out or "host's GPUs" not in out


def test_versions_and_lists() -> None:
    assert weft_here("--version")[:2] == (0, f"weft {__version__}\n")
    code, out, _ = weft_here("bench")
    assert code == 2 and "bench latency" in out and "\n  serve " not in out
    assert weft_here("bench", "--help")[0] == 0


def test_what_is_slow_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = list(cmd_doctor.processor("flags\t\t: sse avx2 avx512f\n", 8, 0.1))
    assert [f.level for f in fast] == ["ok"] and "avx512f" in fast[0].what
    slow = list(cmd_doctor.processor("flags : sse\n", 2, 9.0))
    assert [f.level for f in slow] == ["slow", "slow"] and all(f.why for f in slow)
    assert cmd_doctor.memory(tmp_path / "none").level == "bad"
    assert cmd_doctor.descriptors(128).level == "slow" and cmd_doctor.descriptors(2**20).level == "ok"
    assert cmd_doctor.compiler("no-such-compiler").level == "slow"


TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-47\t0
GPU1\tNV18\t X \tSYS\tNODE\t0-47\t0
GPU2\tSYS\tSYS\t X \tNODE\t0-47\t0
NIC0\tPIX\tNODE\tNODE\t X \t\t

Legend:
  SYS  = Connection traversing PCIe
"""


def test_the_links_between_gpus() -> None:
    fast, slow = cmd_doctor.links(TOPOLOGY)
    assert (fast.level, fast.what) == ("ok", "NVLink (NV18) GPU0–GPU1")
    assert (slow.level, slow.what) == ("slow", "no NVLink (SYS) GPU0–GPU2, GPU1–GPU2") and slow.why
    assert not list(cmd_doctor.links("")) and not list(cmd_doctor.links("nvidia-smi has failed"))


def test_the_tables_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "run weft tune" in cmd_doctor.table().why
    from weft.planner import cost
    from weft.planner.cost import host_table

    host_table().parent.mkdir(parents=True)
    host_table().write_text("{")
    assert cmd_doctor.table().level == "bad"
    shipped = Path(cost.__file__).with_name("h200x4.json")
    host_table().write_text(shipped.read_text())
    assert cmd_doctor.table().level == "ok"
    long_ago = time.time() - 40 * 86400
    os.utime(host_table(), (long_ago, long_ago))
    assert cmd_doctor.table().level == "slow"
