"""Checks whether a path is a model's directory, without slow imports."""

from __future__ import annotations

import re
from pathlib import Path

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def no_model(path: Path) -> str | None:
    """Why a path is no directory of a Hugging Face model, in one line that says what to do; None where it is one."""
    if (path / "config.json").is_file():
        return None
    if HUB_NAME.fullmatch(str(path)) and not path.exists():
        return (
            f"there is no directory {path}; if this is the name of a model on the Hugging Face hub, run "
            f"`hf download {path}`, and give the directory that it prints"
        )
    return f"{path} has no config.json; give the directory of a Hugging Face model"
