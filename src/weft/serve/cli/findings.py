"""Findings of `weft doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "slow", "bad"]


@dataclass(frozen=True)
class Finding:
    """Result of one check of the host. why: consequence and remedy, unless the level is ok."""

    level: Level
    what: str
    why: str = ""
