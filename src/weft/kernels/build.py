"""Native kernels: libraries from the wheel, or compiled when first needed and cached by a hash.

A library does not depend on torch's or Python's ABI (tvm-ffi), so that one serves every version of both. The hash
covers the sources and flags. A library that does not load, as it needs a newer tvm-ffi, is compiled again. Ranks that
start at the same time wait for one build.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from weft.planner.cost import cache_folder

CSRC = Path(__file__).parent / "csrc"
BUILT = Path(__file__).parent / "built"
"""Folder of a wheel's libraries: NAME.so, and NAME.json with the hash and the targets of its build."""
# GCC 12 warns of its own AVX-512 headers. Products and sums are rounded one by one, so that all instruction sets give
# the same bits, also those with a fused multiply-add.
CPU_FLAGS = ("-O3", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-maybe-uninitialized")

CUDA_FLAGS = ("-O3", "--threads=0")
ARCHITECTURES = ("80", "89", "90a", "100", "120")
"""Targets of a wheel's CUDA kernels."""
OLDEST_GPU = (8, 0)
CPU_KERNELS, CUDA_KERNELS = ("weft_cpu", CSRC / "cpu" / "shm.cc"), ("weft_cuda", CSRC / "cuda" / "peer.cu")
MODEL_KERNELS = ("weft_model", CSRC / "model" / "model.cc", CSRC / "cpu")
HOPPER_KERNELS, HOPPER = ("weft_hopper", CSRC / "hopper" / "experts.cu", CSRC / "cuda"), (9, 0)
_log = logging.getLogger(__name__)


class BuildError(RuntimeError):
    """Failed build of a native kernel. The message is one line with the missing part."""


class KernelError(RuntimeError):
    """Failed native call. The message names the mistake in the call."""


class KernelPeerLost(KernelError):
    """End of a rank's process. The message is the number of the rank."""


class KernelTimeout(KernelError):
    """Timeout of a wait for a rank. The message is the number of the rank."""


_ERRORS = {"WeftCallError": KernelError, "WeftPeerLost": KernelPeerLost, "WeftTimeout": KernelTimeout}


@cache
def cpu_kernels() -> Any:
    """Return the module of `csrc/cpu/shm.cc`: one function for each exported name. Raises BuildError."""
    return load(*CPU_KERNELS, flags=CPU_FLAGS)


@cache
def model_kernels() -> Any:
    """Return the module of `csrc/model/model.cc`: the models' kernels on CPUs. Raises BuildError."""
    return load(*MODEL_KERNELS, flags=CPU_FLAGS)


@cache
def cuda_kernels() -> Any:
    """Return the module of `csrc/cuda/peer.cu`, for the GPUs that this process sees. Raises BuildError."""
    import torch

    gpus = range(torch.cuda.device_count())
    found = {torch.cuda.get_device_capability(gpu): torch.cuda.get_device_name(gpu) for gpu in gpus}
    for capability, name in found.items():
        if capability < OLDEST_GPU:
            raise BuildError(f"{name} ({_sm(capability)}) is older than sm_80, which peer memory requires: use NCCL")
    return load(*CUDA_KERNELS, flags=CUDA_FLAGS, gpus=sorted(found))


@cache
def hopper_kernels() -> Any:
    """Return the module of `csrc/hopper/experts.cu`: the models' kernels on Hopper GPUs. Raises BuildError."""
    return load(*HOPPER_KERNELS, flags=CUDA_FLAGS, gpus=[HOPPER])


def can_load(name: str) -> bool:
    """Return True if the CUDA kernels `name` are installed, or nvcc is here to compile them."""
    return (BUILT / f"{name}.so").is_file() or shutil.which(nvcc()) is not None


def load(name: str, source: Path, *folders: Path, flags: Sequence[str], gpus: Sequence[tuple[int, int]] = ()) -> Any:
    """Return the module `name` of `source`, which may include files of its own folder and of `folders`.

    Uses the wheel's library if it was built from these sources for these GPUs, and loads; otherwise compiles with
    `flags` and prints the reason. gpus: compute capabilities that the kernels must run on. Raises BuildError.
    """
    if (BUILT / f"{name}.so").is_file():
        try:
            check_built(BUILT / f"{name}.json", source_hash(source, *folders), gpus)
            return module(BUILT / f"{name}.so")
        except (OSError, RuntimeError, ValueError) as error:
            why = " ".join(str(error).split())
            _log.warning("weft: the installed kernels %s are not used, others are compiled: %s", name, why)
    own = ["90a" if gpu == (9, 0) else f"{gpu[0]}{gpu[1]}" for gpu in gpus]
    flags = (*flags, *for_gpus(own))
    library = compiled(name, source, *folders, flags=flags)
    written = library.stat().st_mtime_ns
    try:
        return module(library)
    except (OSError, RuntimeError):
        return module(compiled(name, source, *folders, flags=flags, unlike=written))


def module(library: Path) -> Any:
    """Return a function for each exported name. Raises OSError or RuntimeError if the library does not load."""
    import tvm_ffi

    for kind, error_class in _ERRORS.items():
        tvm_ffi.register_error(kind, error_class)
    return tvm_ffi.load_module(library)


def source_hash(source: Path, *folders: Path) -> str:
    """Return the hash of a source and all files that it may include."""
    files = [path for folder in (source.parent, *folders) for path in sorted(folder.iterdir())]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def check_built(description: Path, sources: str, gpus: Sequence[tuple[int, int]]) -> None:
    """Raise ValueError unless the library of `description` was built from the hash `sources`, for these `gpus`."""
    built = json.loads(description.read_text())
    if built["sources"] != sources:
        raise ValueError("they were built from other sources than those installed; install Weft again")
    for gpu in gpus:
        if not any(runs_on(architecture, gpu) for architecture in built["architectures"]):
            raise ValueError(f"they are for sm_{', sm_'.join(built['architectures'])}, and a GPU here is {_sm(gpu)}")


def runs_on(architecture: str, gpu: tuple[int, int]) -> bool:
    """Return True if a GPU runs code for this architecture: of its generation, and no newer than the GPU."""
    if architecture.endswith("a"):
        return _sm(gpu) == f"sm_{architecture[:-1]}"
    return int(architecture[:-1]) == gpu[0] and int(architecture[-1]) <= gpu[1]


def _sm(gpu: tuple[int, int]) -> str:
    return f"sm_{gpu[0]}{gpu[1]}"


def for_gpus(architectures: Sequence[str]) -> list[str]:
    """Return nvcc's flags."""
    return [f"-gencode=arch=compute_{each},code=sm_{each}" for each in architectures]


def compiled(name: str, source: Path, *folders: Path, flags: Sequence[str], unlike: int | None = None) -> Path:
    """Return the library `name` of `source`, compiled with `flags` if needed. Raises BuildError.

    unlike: modification time, in ns, of a library that does not load and is replaced.
    """
    parts = (source_hash(source, *folders), *flags)
    folder = cache_folder() / "kernels" / f"{name}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}"
    library = folder / f"{name}.so"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released when the process ends, even if killed
            if not library.exists() or library.stat().st_mtime_ns == unlike:
                with tempfile.TemporaryDirectory(dir=folder) as scratch:
                    _compile(source, Path(scratch) / library.name, folders, flags)
                    (Path(scratch) / library.name).rename(library)
    except OSError as error:
        raise BuildError(f"compiled kernels cannot be kept: {error}; set XDG_CACHE_HOME") from error
    return library


def _compile(source: Path, library: Path, folders: Sequence[Path], flags: Sequence[str]) -> None:
    from tvm_ffi import libinfo

    cuda = source.suffix == ".cu"
    time = "one to two minutes" if cuda else "less than a minute"
    _log.warning("weft: compiling %s, which takes %s, once on this host", source.name, time)
    # CUDA's runtime is linked into the library, to be independent of torch's.
    compiler = [nvcc(), "--cudart=static", "-Xcompiler=-fPIC"] if cuda else [os.environ.get("CXX", "c++"), "-fPIC"]
    include = (libinfo.find_include_path(), libinfo.find_dlpack_include_path(), source.parent, *folders)
    runtime = Path(libinfo.find_libtvm_ffi())  # already loaded under this name: the library needs no path of this host
    command = [*compiler, "-std=c++17", "-shared", *flags, *(f"-I{path}" for path in include), str(source)]
    command += ["-o", str(library), f"-L{runtime.parent}", "-ltvm_ffi"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
        said = "" if done.returncode == 0 else done.stderr + done.stdout or f"status {done.returncode}"
    except OSError as error:
        said = f"error: {error}"
    if said:
        lines = [line for line in said.splitlines() if "error" in line.lower()] or [said]
        needs = "CUDA's nvcc" if cuda else "a C++17 compiler, such as Debian's g++"
        raise BuildError(f"{source.name} does not compile: {lines[0].strip()}; it needs {needs}")


def nvcc() -> str:
    """Return the path of CUDA's compiler: from PATH, else CUDA_HOME, else CUDA's usual folder."""
    home = Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda")
    return shutil.which("nvcc") or shutil.which("nvcc", path=home / "bin") or "nvcc"


def build_ahead(folder: Path) -> None:
    """Compile a wheel's libraries into `folder`; print a line on each omitted one. Raises BuildError."""
    folder.mkdir(parents=True, exist_ok=True)
    todo: list[tuple[tuple[Any, ...], tuple[str, ...], tuple[str, ...]]] = [
        (CPU_KERNELS, CPU_FLAGS, ()),
        (MODEL_KERNELS, CPU_FLAGS, ()),
    ]
    if shutil.which(nvcc()):
        todo += [(CUDA_KERNELS, CUDA_FLAGS, ARCHITECTURES), (HOPPER_KERNELS, CUDA_FLAGS, ("90a",))]
    else:
        print("weft: no nvcc here: the wheel goes without CUDA kernels, which are compiled when first used")
    for (name, *sources), flags, architectures in todo:
        library = compiled(name, *sources, flags=(*flags, *for_gpus(architectures)))
        shutil.copyfile(library, folder / f"{name}.so")
        description = {"sources": source_hash(*sources), "architectures": architectures}
        (folder / f"{name}.json").write_text(json.dumps(description) + "\n")
