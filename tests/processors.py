"""Run the tests of libraries' matrix products as processors of other types would: `make test-processors`.

Give names of types for fewer of them. Row kernels have no part in this: tests run each of their forms by its name.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
PATHS = ("attention", "dcp", "engine", "gpu/triton_checks", "models", "bench/test_word_problems.py")

NO_AVX2 = {
    "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX512_ICL AVX512_SPR",
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",  # which MKL heeds on Intel's own processors alone
    "MKL_CBWR": "COMPATIBLE",
}
NO_AVX512 = {
    "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
AVX512 = {
    "NPY_DISABLE_CPU_FEATURES": "AVX512_ICL AVX512_SPR",
    "ATEN_CPU_CAPABILITY": "avx512",
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
    "MKL_ENABLE_INSTRUCTIONS": "AVX512",
}
TYPES = {
    "Prescott": ("pni", NO_AVX2),
    "Nehalem": ("sse4_2", NO_AVX2),
    "Haswell": ("avx2", NO_AVX512),
    "Zen": ("avx2", NO_AVX512),
    "SkylakeX": ("avx512bw", AVX512),
}
"""Types by OpenBLAS's names: features that Linux reports, and settings for other libraries."""

FORCED = """
import numpy, torch
found = numpy.show_config(mode="dicts")["SIMD Extensions"].get("found", [])
print(*(f"no {name}" for name in ("X86_V3", "X86_V4") if name not in found), torch.backends.cpu.get_cpu_capability())
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", default=list(TYPES), help=f"types, of {', '.join(TYPES)}; all by default")
    flags, failed = set(Path("/proc/cpuinfo").read_text().split()), []
    for name in parser.parse_args().types:
        needs, told = TYPES[name]
        if needs not in flags:
            print(f"{name}: left out, as this processor has no {needs}", flush=True)
            continue
        environment = os.environ | told | {"OPENBLAS_CORETYPE": name}
        said = subprocess.check_output([sys.executable, "-c", FORCED], env=environment, text=True)
        print(f"{name}: {said.strip()}", flush=True)
        plugins = ["-p", "xdist", "-p", "timeout", "-n", "3", "--dist", "loadfile", "--no-loadscope-reorder"]
        command = [sys.executable, "-m", "pytest", "-q", *plugins, *(str(TESTS / path) for path in PATHS)]
        if subprocess.run(command, env=environment).returncode:
            failed.append(name)
    print(f"failed as {', '.join(failed)}" if failed else "no type failed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
