"""Fixtures of the advisor's tests."""

from __future__ import annotations

import multiprocessing

import pytest

from engine.conftest import model_dir
from weft.engine.advise import measured_load

__all__ = ["model_dir"]


@pytest.fixture
def forked_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of a measured load need not import torch. `e2e.test_advising` spawns them, as commands do."""
    monkeypatch.setattr(measured_load, "get_context", lambda method: multiprocessing.get_context("fork"))
