"""Form of a captured step, by a CUDA graph or by recorded calls."""

from __future__ import annotations

from typing import Protocol


class CapturedStep(Protocol):
    """Captured step, or pass of a draft layer."""

    def replay(self) -> None: ...
