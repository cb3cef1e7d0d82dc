"""Compiles the native kernels when first needed, and keeps them by a hash of source and flags.

The compiled file is free of torch's and Python's ABI (tvm-ffi). Ranks that start together wait for one build.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

CSRC = Path(__file__).parent / "csrc"
CPU_FLAGS = ("-O3", "-Wall", "-Wextra", "-Wno-maybe-uninitialized")  # GCC 12 warns of its own AVX-512 headers


class BuildError(RuntimeError):
    """A native kernel does not compile here: one line that says what is missing."""


class KernelError(RuntimeError):
    """A native call failed: the text says what of the call is wrong."""


class KernelPeerLost(KernelError):
    """The text is the rank whose process is gone."""


class KernelTimeout(KernelError):
    """The text is the rank that was waited for."""


_ERRORS = {"WeftCallError": KernelError, "WeftPeerLost": KernelPeerLost, "WeftTimeout": KernelTimeout}


@cache
def cpu_kernels() -> Any:
    """The module of `csrc/cpu/shm.cc`, a function for each exported name. Raises BuildError."""
    import tvm_ffi
    from tvm_ffi import cpp

    for kind, error_class in _ERRORS.items():
        tvm_ffi.register_error(kind, error_class)
    folder = CSRC / "cpu"
    # tvm-ffi hashes the named file, not what it includes: the includes' hash goes in as a definition.
    text = b"".join(path.read_bytes() for path in sorted(folder.iterdir()))
    version = hashlib.sha256(text).hexdigest()[:15]
    try:
        path = cpp.build(
            "weft_cpu",
            sources=str(folder / "shm.cc"),
            extra_cflags=[*CPU_FLAGS, f"-DWEFT_SOURCE=0x{version}ull"],
            extra_include_paths=[str(folder)],
        )
    except (RuntimeError, OSError) as error:
        lines = [line for line in str(error).splitlines() if "error" in line.lower()] or [str(error)]
        raise BuildError(
            f"the CPU kernels do not compile: {lines[0].strip()}; they need a C++17 compiler, such as Debian's g++"
        ) from error
    return tvm_ffi.load_module(path)
