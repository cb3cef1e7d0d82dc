"""Run the tests of libraries' matrix products as processors of other types would: `make test-processors`.

Give names of types for fewer of them. Two types may differ in OpenBLAS's kernels alone, which numpy has, and Triton's
interpreter by it; the second of them runs the interpreter's checks of products only. Ranks that are processes would
have this processor's kernels of models, so tests of ranks as threads run. `engine/test_cpu_kernels.py` and
`comm/test_rows.py` run every instruction set of native kernels by its name.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
BY_TORCH = (
    *("attention", "dcp/test_attention.py", "dcp/test_engine.py", "dcp/test_logits.py", "dcp/test_merge.py"),
    *("engine/test_families.py", "engine/test_greedy.py", "engine/test_reuse.py", "engine/test_scoring.py"),
    *(f"models/test_{name}.py" for name in ("as_transformers", "bf16", "every_layout", "float8", "logits", "moe")),
    *("models/test_gpt_oss.py", "models/test_qwen35.py", "models/test_step.py", "bench/test_word_problems.py"),
)
"""Tests whose expected values depend on products by torch."""
PRODUCTS = ("backend", "decode_attention", "dense", "float8", "gated_delta", "latent_prompts", "moe", "multiply_heads")
BY_NUMPY = tuple(f"gpu/triton_checks/test_{name}.py" for name in (*PRODUCTS, "prefill_attention"))
"""Checks of Triton's kernels with products, in its interpreter."""

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
    "Prescott": ("pni", NO_AVX2, "scalar", BY_TORCH + BY_NUMPY),
    "Nehalem": ("sse4_2", NO_AVX2, "scalar", BY_NUMPY),
    "Haswell": ("avx2", NO_AVX512, "avx2", BY_TORCH + BY_NUMPY),
    "Zen": ("avx2", NO_AVX512, "avx2", BY_NUMPY),
    "SkylakeX": ("avx512bw", AVX512, "avx512", BY_TORCH + BY_NUMPY),
}
"""Types by OpenBLAS's names: feature that Linux reports, settings for other libraries, instruction set of our kernels
(`WEFT_TESTS_ISA`, see `conftest.py`), tests."""

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
        needs, told, isa, paths = TYPES[name]
        if needs not in flags:
            print(f"{name}: left out, as this processor has no {needs}", flush=True)
            continue
        environment = os.environ | told | {"OPENBLAS_CORETYPE": name, "WEFT_TESTS_ISA": isa}
        said = subprocess.check_output([sys.executable, "-c", FORCED], env=environment, text=True)
        print(f"{name}: {said.strip()}", flush=True)
        plugins = ["-p", "xdist", "-p", "timeout", "-n", "3", "--dist", "loadfile", "--no-loadscope-reorder"]
        plugins += ["-m", "not nightly"]
        command = [sys.executable, "-m", "pytest", "-q", *plugins, *(str(TESTS / path) for path in paths)]
        if subprocess.run(command, env=environment).returncode:
            failed.append(name)
    print(f"failed as {', '.join(failed)}" if failed else "no type failed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
