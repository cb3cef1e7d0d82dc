"""What `weft doctor` finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "slow", "bad"]


@dataclass(frozen=True)
class Finding:
    """One thing about the host. why: what follows from it, and what to do, where it is not ok."""

    level: Level
    what: str
    why: str = ""
