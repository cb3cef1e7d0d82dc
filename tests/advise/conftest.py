"""Fixtures of the advisor's tests."""

from __future__ import annotations

from engine.conftest import model_dir

__all__ = ["model_dir"]
