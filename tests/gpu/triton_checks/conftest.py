"""Device of the checks: a GPU if there is one, else Triton's interpreter."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from gpu.triton_checks.worker import INTERPRETED


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks be threads, of which the interpreter takes one at a time."""
    from triton.runtime import interpreter

    index, launch = threading.Lock(), interpreter.GridExecutor.__call__

    def one_at_a_time(*args: Any, **options: Any) -> None:
        with index:
            launch(*args, **options)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", one_at_a_time)


@pytest.fixture(params=[0] if INTERPRETED else [0, 1])  # the interpreter takes its time
def seed(request: pytest.FixtureRequest) -> int:
    torch.manual_seed(request.param)
    return request.param
