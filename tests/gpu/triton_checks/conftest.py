"""Where the checks run: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from gpu.triton_checks.worker import INTERPRETED


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture(params=[0] if INTERPRETED else [0, 1])  # the interpreter takes its time
def seed(request: pytest.FixtureRequest) -> int:
    torch.manual_seed(request.param)
    return request.param
