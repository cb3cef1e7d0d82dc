"""The CUDA kernels compile, where there is nvcc: a syntax error need not wait for a GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tvm_ffi import libinfo

from weft.kernels.build import CSRC, CUDA_FLAGS

NVCC = shutil.which("nvcc")


@pytest.mark.skipif(NVCC is None, reason="needs nvcc, of CUDA 12 or later")
def test_the_kernels_compile(tmp_path: Path) -> None:
    flags = ["-std=c++17", *CUDA_FLAGS, "-Xcicc", "-O1"]  # little optimised: sooner
    command = [str(NVCC), *flags, f"-I{libinfo.find_include_path()}", f"-I{libinfo.find_dlpack_include_path()}"]
    folder, cubin = shutil.copytree(CSRC / "cuda", tmp_path / "cuda"), tmp_path / "peer.cubin"
    source = folder / "peer.cu"
    # Of the numbers of ranks that a kernel is made for one, and of the types of rows that are no whole units one: the
    # others are the same text, which takes long to compile; g++ does so for test_emulated.py.
    text, left_out = re.subn(r"\b(kernel_of<T, true|merge<T), (2|kMaxRanks)>", r"\1, 4>", source.read_text())
    assert left_out == 4
    text, left_out = re.subn(r"\bkernel_of<T, false", "kernel_of<__half, false", text)
    assert left_out == 1
    source.write_text(text)
    done = subprocess.run([*command, "-cubin", "-o", str(cubin), str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for kernel in (b"exchangeIf", b"13__nv_bfloat16Lb1ELi4ELNS_9AlgorithmE2ELNS_8EpilogueE2E", b"6__halfLb0ELi8E"):
        assert kernel in cubin.read_bytes()
