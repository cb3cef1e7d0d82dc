"""Ranks of the tests of models are threads."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def plan_once(planned_once: None) -> None:
    """Plan once, for every test here."""
