"""Fixtures for tests of commands."""

from __future__ import annotations

import multiprocessing

import pytest

from weft.tune import ranks


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of measurements need not import torch. `bench.test_over_hosts` spawns them, as commands do."""
    monkeypatch.setattr(ranks.mp, "get_context", lambda method: multiprocessing.get_context("fork"))
