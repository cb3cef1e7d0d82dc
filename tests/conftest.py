"""Fixtures for all tests."""

from __future__ import annotations

import socket

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("weft", deadline=None)  # no test depends on how fast a busy machine is
settings.load_profile("weft")


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
