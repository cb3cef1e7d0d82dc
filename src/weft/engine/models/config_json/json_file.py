"""Reader of a checkpoint's JSON files, which are untrusted input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from weft.engine.models.config_json.fields import ModelError


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises ModelError, in one line that names the file, for any other content."""
    try:
        value = json.loads(path.read_bytes(), object_pairs_hook=_object)
    except RecursionError as error:
        raise ModelError(f"{path} is nested too deeply to be read") from error
    except (OSError, ValueError) as error:  # including bytes that are not UTF-8
        raise ModelError(f"{path} cannot be read: {error}; is the download complete?") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}, not a JSON object")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        for name, value in pairs:
            if values[name] != value:
                raise ValueError(f"{name!r} is there twice with different values")
    return values
