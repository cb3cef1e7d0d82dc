"""The Triton kernels against their twins (`triton_checks`): on a GPU where there is one, else in Triton's interpreter.

Triton decides when it is imported whether it interprets, so the checks run in a process of their own: one for all of
them, as it imports torch and Triton for seconds.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CHECKS = Path(__file__).parent / "triton_checks"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton, which the extra gpu brings")
def test_kernels_are_their_twins() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # none is used, and they import for seconds
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", CHECKS / "pytest.ini", CHECKS]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=880)
    assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-2000:]
