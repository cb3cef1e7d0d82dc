"""Compiles the native test programs, also against copies of the kernels' headers with a fault put in."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.kernels.build import CPU_FLAGS, CSRC, source_hash
from weft.planner.cost import cache_folder

NATIVE = Path(__file__).parent / "native"
FLAGS = ("-std=c++17", "-Werror", *(flag for flag in CPU_FLAGS if flag != "-O3"))  # how fast: as each test needs it
CANNOT_START = "unexpected memory mapping"
"""Message of a race detector that does not cope with this kernel's address space; not a finding."""
NEEDS = {
    "x86_64": {
        "scalar": set[str](),
        "avx2": {"avx2", "f16c"},
        "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "f16c"},
    },
    "aarch64": {"scalar": set[str](), "neon": {"asimd"}},
}[platform.machine()]
"""The instruction sets of this architecture that there are row kernels for, the widest last: what each needs."""
ISAS = [isa for isa, needs in NEEDS.items() if needs <= set(Path("/proc/cpuinfo").read_text().split())]
"""Instruction sets that this CPU has."""


@dataclass(frozen=True)
class Fault:
    """Every match of `pattern` in a header becomes `instead`."""

    header: str
    pattern: str
    instead: str


def headers(folder: Path, faults: Sequence[Fault]) -> Path:
    """A copy of the CPU kernels' sources with faults in."""
    shutil.copytree(CSRC / "cpu", folder)
    for fault in faults:
        path = folder / fault.header
        text, count = re.subn(fault.pattern, fault.instead, path.read_text())
        assert count, f"{fault.header} has no {fault.pattern}: put the fault in another way"
        path.write_text(text)
    return folder


def compile_all(
    programs: dict[str, tuple[str, Sequence[str], Sequence[Fault]]], *, compiler: str = "g++"
) -> dict[str, Path]:
    """Return the path of each program: name: (source, flags, faults). They are built two at a time, and kept like
    kernels by a hash of what they are built from."""
    kernels = cache_folder() / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    kept, todo, running = dict[str, Path](), list[str](), list[tuple[str, subprocess.Popen[str]]]()
    for name, (source, *how) in programs.items():
        parts = repr((source_hash(NATIVE / source, CSRC / "cpu"), source, compiler, FLAGS, how))
        kept[name] = kernels / f"weft_test_{name}-{hashlib.sha256(parts.encode()).hexdigest()[:16]}"
        todo += [name] * (not kept[name].exists())
    with tempfile.TemporaryDirectory(dir=kernels) as scratch:
        folder = Path(scratch)
        while todo or running:
            if todo and len(running) < 2:
                source, flags, faults = programs[name := todo.pop(0)]
                include = headers(folder / f"{name}.headers", faults) if faults else CSRC / "cpu"
                command = [compiler, *FLAGS, *flags, f"-I{include}", str(NATIVE / source), "-o", str(folder / name)]
                running.append((name, subprocess.Popen([*command, "-pthread"], stderr=subprocess.PIPE, text=True)))
                continue
            name, building = running.pop(0)
            _, errors = building.communicate()
            assert building.returncode == 0, errors
            (folder / name).rename(kept[name])
    return kept


def run(
    program: Path, *arguments: object, races: str = "halt_on_error=1:atexit_sleep_ms=0", timeout_s: float = 600
) -> subprocess.CompletedProcess[str]:
    """Run a program. races: what a race detector does; it goes without address randomisation if it must."""
    command = [str(program), *map(str, arguments)]
    environment = os.environ | {"TSAN_OPTIONS": races}

    def once(command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)

    done = once(command)
    if CANNOT_START in done.stderr and shutil.which("setarch"):
        done = once(["setarch", "-R", *command])
    return done
