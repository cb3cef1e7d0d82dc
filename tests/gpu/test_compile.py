"""The CUDA kernels compile, where there is nvcc: a syntax error need not wait for a GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tvm_ffi import libinfo

from weft.kernels.build import ARCHITECTURES, CSRC, CUDA_FLAGS, HOPPER_KERNELS, for_gpus

NVCC = shutil.which("nvcc")
pytestmark = pytest.mark.skipif(NVCC is None, reason="needs nvcc, of CUDA 12.8 or later")
SOONER = ("-std=c++17", *CUDA_FLAGS, "-Xcicc", "-O1")
FEW_KERNELS = """
#include "kernel.cuh"
#include "merge.cuh"
namespace weft {
template __global__ void exchange<__nv_bfloat16, true, 4, Algorithm::kTwoShot, Epilogue::kQuantise>(
    const __grid_constant__ Call);
template __global__ void merge<__half, 4>(const __grid_constant__ Merge);
}
"""


def compile_with(*arguments: str | Path) -> None:
    include = libinfo.find_include_path(), libinfo.find_dlpack_include_path()
    command = [str(NVCC), *SOONER, *(f"-I{path}" for path in include), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.nightly  # half a minute; by day g++ compiles the same text, and nvcc what differs between GPUs
def test_the_kernels_compile(tmp_path: Path) -> None:
    folder, cubin = shutil.copytree(CSRC / "cuda", tmp_path / "cuda"), tmp_path / "peer.cubin"
    source = folder / "peer.cu"
    # Of the numbers of ranks that a kernel is made for one, and of the types of rows that are no whole units one: the
    # others are the same text, which takes long to compile; g++ does so for test_emulated.py.
    text, left_out = re.subn(r"\b(kernel_of<T, true|merge<T), (2|kMaxRanks)>", r"\1, 4>", source.read_text())
    assert left_out == 4
    text, left_out = re.subn(r"\bkernel_of<T, false", "kernel_of<__half, false", text)
    assert left_out == 1
    source.write_text(text)
    compile_with(*for_gpus(["90a"]), "-cubin", "-o", cubin, source)
    for kernel in (b"exchangeIf", b"13__nv_bfloat16Lb1ELi4ELNS_9AlgorithmE2ELNS_8EpilogueE2E", b"6__halfLb0ELi8E"):
        assert kernel in cubin.read_bytes()


@pytest.mark.parametrize("targets", [("80", "90a"), pytest.param(ARCHITECTURES, marks=pytest.mark.nightly)], ids=str)
def test_what_differs_compiles_for_every_architecture(targets: tuple[str, ...], tmp_path: Path) -> None:
    """Two kernels with every feature compile: the plain form before Hopper, and newer GPUs'."""
    source = tmp_path / "few.cu"
    source.write_text(FEW_KERNELS)
    compile_with(*for_gpus(targets), f"-I{CSRC / 'cuda'}", "-fatbin", "-o", tmp_path / "few.fatbin", source)


def test_hoppers_kernels_keep_their_sums_in_registers(tmp_path: Path) -> None:
    """The compiler neither spills registers nor lets products wait for each other, and would warn of both."""
    _, source, *folders = HOPPER_KERNELS
    include = libinfo.find_include_path(), libinfo.find_dlpack_include_path(), *folders
    command = [str(NVCC), "-std=c++17", *CUDA_FLAGS, *for_gpus(["90a"]), *(f"-I{folder}" for folder in include)]
    command += ["-Xptxas", "-v", "-cubin", "-o", str(tmp_path / "experts.cubin"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "Performance Loss" not in done.stderr, done.stderr
    assert done.stderr.count(" 0 bytes spill stores, 0 bytes spill loads") == 3, done.stderr
