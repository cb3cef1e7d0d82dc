"""Engines whose ranks are on several hosts give one host's tokens: shm in each host, gloo across."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.test_engine import GREEDY, LAYOUTS, config, expected, prompts
from weft.engine.controller.engine import Engine

__all__ = ["expected"]


OF_AGENTS = pytest.mark.nightly
"""Their like run by day through agents, in `test_agents_greedy.py`."""


@pytest.mark.parametrize(
    "layout, nnodes", [("2x2", 2), pytest.param("1x4", 2, marks=OF_AGENTS), pytest.param("4x1", 4, marks=OF_AGENTS)]
)
def test_greedy_tokens_are_one_hosts(model_dir: Path, expected: Any, layout: str, nnodes: int) -> None:
    with Engine(config(model_dir, executor="process", nnodes=nnodes, device="cpu", **LAYOUTS[layout])) as engine:
        outputs = [result.token_ids for result in engine.generate(prompts(), GREEDY)]
        ran = {stat.step for stat in engine.comm_report()[0]}
    assert outputs == expected
    assert any("torchdist/gloo" in step for step in ran), ran
