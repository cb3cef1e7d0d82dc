"""Choice of a wheel's kernels: those built from the sources here, with code for the GPUs here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import tvm_ffi

from weft.kernels.build import ARCHITECTURES, BuildError, check_built, cuda_kernels, load, runs_on


@pytest.mark.parametrize(
    ("gpu", "by"),
    [
        ((8, 0), "80"),
        ((8, 6), "80"),
        ((8, 9), "80 89"),
        ((9, 0), "90a"),
        ((10, 0), "100"),
        ((10, 3), "100"),
        ((12, 0), "120"),
        ((7, 5), ""),
        ((11, 0), ""),
    ],
)
def test_code_runs_on_gpus_of_its_generation(gpu: tuple[int, int], by: str) -> None:
    assert [each for each in ARCHITECTURES if runs_on(each, gpu)] == by.split()


def test_what_does_not_fit_is_one_line(tmp_path: Path) -> None:
    description = tmp_path / "weft_cuda.json"
    description.write_text(json.dumps({"sources": "abc", "architectures": ["80", "90a"]}))
    check_built(description, "abc", [(8, 0), (9, 0)])
    with pytest.raises(ValueError, match=r"^they are for sm_80, sm_90a, and a GPU here is sm_120$"):
        check_built(description, "abc", [(8, 0), (12, 0)])
    with pytest.raises(ValueError, match=r"^they were built from other sources than those installed"):
        check_built(description, "abd", [])


def test_a_gpu_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu: "Tesla T4")
    with pytest.raises(
        BuildError, match=r"^Tesla T4 \(sm_75\) is older than sm_80, which peer memory requires: use NCCL$"
    ):
        cuda_kernels()


@pytest.mark.nightly
def test_ranks_without_kernels_and_compiler_end_with_one_line(tmp_path: Path) -> None:
    environment = os.environ | {"CXX": "no-such-compiler", "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "weft.serve.cli.main", "generate", "--prompt", "x", "--attn-tp", "2"]
    done = subprocess.run([*command, "--transport", "shm"], capture_output=True, text=True, env=environment)
    error = done.stderr.splitlines()[-1]  # behind how far the start is
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert error.startswith("weft: ") and "shm.cc does not compile: " in error and "it needs a C++17 compiler" in error


SOURCE = """
#include <tvm/ffi/function.h>
static int64_t one() { return 1; }
TVM_FFI_DLL_EXPORT_TYPED_FUNC(one, one);
"""


def test_a_library_is_compiled_once_unless_it_does_not_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (folder := tmp_path / "source").mkdir()
    (folder / "one.cc").write_text(SOURCE)

    def compilations() -> int:
        caplog.clear()
        assert load("one", folder / "one.cc", flags=("-O0",)).one() == 1
        return sum("compiling one.cc, which takes less than a minute" in line for line in caplog.messages)

    assert compilations() == 1
    monkeypatch.setattr(tvm_ffi, "__version__", "0.0.1")
    assert compilations() == 0, "a tvm-ffi of another version runs it"
    [library] = (tmp_path / "cache").rglob("one.so")
    library.unlink()  # not rewritten in place: this process has it mapped
    library.write_bytes(b"of a newer tvm-ffi")
    (tmp_path / "cache").rename(tmp_path / "moved")  # this process would not read a path again that it has loaded
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "moved"))
    assert compilations() == 1
    assert compilations() == 0
