"""Packaged files: the embedded model, and published configs of other models (presets)."""

from __future__ import annotations

from pathlib import Path

PRESETS = Path(__file__).parent / "presets"


def embedded_model_dir() -> Path:
    """Return the directory of the embedded model: a small Qwen2-MoE that solves arithmetic word problems."""
    return Path(__file__).parent / "embedded"


def preset_names() -> tuple[str, ...]:
    """Return the names of the presets."""
    return tuple(sorted(path.name for path in PRESETS.iterdir()))


def preset_dir(name: str) -> Path:
    """Return the directory of a preset: a config.json without weights. Raises ValueError for an unknown name."""
    if name not in preset_names():
        raise ValueError(f"there is no preset {name!r}; there are {', '.join(preset_names())}")
    return PRESETS / name
