"""Fixtures of the tests of speculation."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.conftest import byte_model
from server.conftest import chat_model_dir
from speculation.toy import FixedPrices
from weft.engine.speculation import drafting
from weft.engine.speculation.draft_prices import Price

__all__ = ["chat_model_dir"]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_model(tmp_path_factory.mktemp("speculation-model"))


@pytest.fixture(autouse=True)
def fixed_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the number of drafts depend on no time."""
    monkeypatch.setattr(drafting, "StepPrices", FixedPrices)


@pytest.fixture
def never_pausing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sequences have all drafts in every step, since they cost nothing."""
    monkeypatch.setattr(FixedPrices, "value", Price(0.0, -1e-3))
