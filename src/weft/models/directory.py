"""Checks whether a path is a model's directory or file, without slow imports."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def is_gguf(model: Path) -> bool:
    """Whether a path names a GGUF file: a model in one file, instead of a directory."""
    return model.suffix == ".gguf" and not model.is_dir()


def config_file(model: Path) -> Path:
    """The file with a model's config: config.json of a directory, or the GGUF file itself."""
    return model if is_gguf(model) else model / "config.json"


def no_model(path: Path) -> str | None:
    """Why a path is no model of Hugging Face's or llama.cpp's, in one line that says what to do; None where it is one.
    """
    if is_gguf(path) and path.is_file() and find_spec("gguf") is None:
        return f"{path} needs the package gguf: pip install 'weft[gguf]'"
    if config_file(path).is_file():
        return None
    if is_gguf(path):
        return f"there is no file {path}"
    if HUB_NAME.fullmatch(str(path)) and not path.exists():
        return (
            f"there is no directory {path}; if this is the name of a model on the Hugging Face hub, run "
            f"`hf download {path}`, and give the directory that it prints"
        )
    if files := sorted(path.glob("*.gguf")):
        return f"{path} has no config.json; to run a GGUF file, name the file: {files[0]}"
    return f"{path} has no config.json; give the directory of a Hugging Face model, or a GGUF file"
