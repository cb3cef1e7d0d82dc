"""Files that come with the package."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def embedded_model_dir() -> Path:
    """The directory of the embedded model: a small Qwen2-MoE that solves arithmetic word problems."""
    return Path(str(files("weft.assets"))) / "embedded"
