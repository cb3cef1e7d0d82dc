"""Fixtures of the tests of speculation."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.conftest import byte_model
from server.conftest import chat_model_dir
from weft.engine.speculation import drafting

__all__ = ["chat_model_dir"]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_model(tmp_path_factory.mktemp("speculation-model"))


@pytest.fixture
def never_pausing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sequences draft in every step."""
    monkeypatch.setattr(drafting, "MIN_GAIN", -9.0)
