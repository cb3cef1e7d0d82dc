"""Fixtures for all tests."""

from __future__ import annotations

import socket

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
