"""The row kernels of every instruction set against the scalar ones; AArch64's under emulation, where there is one."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from comm.builds import ISAS, NEEDS, Fault, compile_all, run

CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
FAULTS = {
    "forgets the tail": [Fault("rows.inl", r"for \(; i < count; \+\+i\) one\(i\);", r"if (planted::fault != 1) \g<0>")],
    "forgets the norm's tail": [
        Fault("rows.inl", r"tail \+= rounded", "tail = (planted::fault == 2 ? 0.0f : tail) + rounded")
    ],
    "forgets the tail of weighted sums": [
        Fault(
            "rows.inl",
            r"(for \(; i < count; \+\+i\)) (\{\s+float total = widen\(from)",
            r"\1 if (planted::fault != 3) \2",
        )
    ],
    "rounds ties up": [
        Fault(f"vec_{isa}.inl", "0x7fff", "(planted::fault == 4 ? 0x8000 : 0x7fff)")
        for isa in ("avx2", "avx512", "neon")
    ],
}
NUMBER = {name: number for number, name in enumerate(FAULTS, 1)}
"""Number by which the program is told its fault."""
BROKEN = [fault for faults in FAULTS.values() for fault in faults]


@pytest.fixture(scope="module")
def built() -> dict[str, Path]:
    programs = {"right": ("compare.cc", ["-O3"], []), "broken": ("compare.cc", ["-O1"], BROKEN)}
    return compile_all(programs)


EACH = [pytest.param(isa, marks=pytest.mark.skipif(isa not in ISAS, reason=f"this CPU has no {isa}")) for isa in NEEDS]


@pytest.mark.parametrize("isa", EACH)
def test_an_instruction_set(isa: str, built: dict[str, Path]) -> None:
    done = run(built["right"], 60, 0, isa)
    assert done.returncode == 0 and done.stdout.split() == [isa], done.stdout


def test_no_instruction_set_is_taken_that_the_cpu_lacks(built: dict[str, Path]) -> None:
    assert run(built["right"], 1).stdout.split() == ISAS


@pytest.mark.parametrize("isa", EACH[1:])  # the first is what the others are compared with
@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_compared_shows(fault: str, isa: str, built: dict[str, Path]) -> None:
    done = run(built["broken"], 2, 0, isa)
    assert done.returncode == 0, f"without the fault: {done.stdout}"
    done = run(built["broken"], 60, NUMBER[fault], isa)
    assert done.returncode == 1 and done.stdout.startswith(f"{isa}: ") and " not " in done.stdout, done.stdout


@pytest.mark.skipif(
    platform.machine() == "aarch64" or not (shutil.which(CROSS) and shutil.which(EMULATOR)),
    reason=f"needs {CROSS} and {EMULATOR}: on Debian, apt-get install g++-aarch64-linux-gnu qemu-user",
)
def test_aarch64() -> None:
    quick = ["-O1", "-static"]
    programs = compile_all(
        {
            "compare": ("compare.cc", ["-O3", "-static"], ()),
            "broken": ("compare.cc", quick, BROKEN),
            "stress": ("stress.cc", quick, ()),
        },
        compiler=CROSS,
    )

    def emulated(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        command = [EMULATOR, str(programs[name]), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=600)

    done = emulated("compare", 20)
    assert done.returncode == 0 and done.stdout.split() == ["scalar", "neon"], done.stdout
    assert "neon: sum of" in emulated("broken", 20, NUMBER["rounds ties up"]).stdout
    done = emulated("stress", 3, 20_000, 1, 1)
    assert done.returncode == 0, done.stderr
