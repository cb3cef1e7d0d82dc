"""Parts of `make test-gpu-parts` exist, and omit no test of GPUs."""

from __future__ import annotations

import re
from pathlib import Path

from gpu.parts import PARTS, REPOSITORY

ON_CPUS = {"emulated", "merge_emulated", "lanes", "compile", "triton_compile"}
"""These need no GPU: `make test` runs them."""


def test_every_test_of_gpus_is_in_a_part() -> None:
    arguments = [a for part in PARTS.values() for command in part.commands for a in command.arguments]
    named = [a.removeprefix("--ignore=") for a in arguments if re.match(r"(--ignore=)?(tests|bench)/", a)]
    assert named and all((REPOSITORY / name).exists() for name in named)
    alone, ignored = ({Path(a).stem for a in arguments if a.startswith(how)} for how in ("tests/gpu/", "--ignore="))
    assert ignored == alone | {f"test_{name}" for name in ON_CPUS}
