"""Compiles the native kernels when first needed, and keeps them by a hash of source and flags.

The compiled file is free of torch's and Python's ABI (tvm-ffi). Ranks that start together wait for one build.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

CSRC = Path(__file__).parent / "csrc"
# GCC 12 warns of its own AVX-512 headers. Products and sums are rounded one by one, so that all instruction sets give
# the same bits, also those with a fused multiply-add.
CPU_FLAGS = ("-O3", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-maybe-uninitialized")

CUDA_FLAGS = ("-O3", "-gencode=arch=compute_90a,code=sm_90a")


class BuildError(RuntimeError):
    """A native kernel does not compile here. The text is one line that says what is missing."""


class KernelError(RuntimeError):
    """A native call failed. The text says what is wrong in the call."""


class KernelPeerLost(KernelError):
    """The process of a rank is gone. The text is the number of the rank."""


class KernelTimeout(KernelError):
    """A wait for a rank took too long. The text is the number of the rank."""


_ERRORS = {"WeftCallError": KernelError, "WeftPeerLost": KernelPeerLost, "WeftTimeout": KernelTimeout}


@cache
def cpu_kernels() -> Any:
    """The module of `csrc/cpu/shm.cc`: one function for each exported name. Raises BuildError."""
    return load("weft_cpu", CSRC / "cpu" / "shm.cc", extra_cflags=list(CPU_FLAGS))


@cache
def cuda_kernels() -> Any:
    """The module of `csrc/cuda/peer.cu`, for Hopper GPUs. Raises BuildError."""
    return load("weft_cuda", CSRC / "cuda" / "peer.cu", extra_cuda_cflags=list(CUDA_FLAGS))


def load(name: str, source: Path, *folders: Path, **options: Any) -> Any:
    """The module of `source`, which may include files of its own folder and of `folders`. Raises BuildError.

    options: flags, as tvm-ffi's `cpp.build` takes them.
    """
    import tvm_ffi
    from tvm_ffi import cpp

    for kind, error_class in _ERRORS.items():
        tvm_ffi.register_error(kind, error_class)
    # tvm-ffi hashes the named file, not the files that it includes: their hash goes in as a definition.
    folders = (source.parent, *folders)
    text = b"".join(path.read_bytes() for folder in folders for path in sorted(folder.iterdir()))
    version = f"-DWEFT_SOURCE=0x{hashlib.sha256(text).hexdigest()[:15]}ull"
    options = {key: [*flags, version] for key, flags in options.items()}
    try:
        path = cpp.build(name, sources=str(source), extra_include_paths=[*map(str, folders)], **options)
    except (RuntimeError, OSError) as error:
        lines = [line for line in str(error).splitlines() if "error" in line.lower()] or [str(error)]
        needs = "CUDA's nvcc" if source.suffix == ".cu" else "a C++17 compiler, such as Debian's g++"
        raise BuildError(f"{source.name} does not compile: {lines[0].strip()}; it needs {needs}") from error
    return tvm_ffi.load_module(path)
