"""Files that come with Weft: the embedded model, and the published configs of other models (presets)."""

from __future__ import annotations

from pathlib import Path

PRESETS = Path(__file__).parent / "presets"


def embedded_model_dir() -> Path:
    """The directory of the embedded model: a small Qwen2-MoE that solves arithmetic word problems."""
    return Path(__file__).parent / "embedded"


def preset_names() -> tuple[str, ...]:
    """The presets there are."""
    return tuple(sorted(path.name for path in PRESETS.iterdir()))


def preset_dir(name: str) -> Path:
    """The directory of a preset: a config.json, without weights. Raises ValueError for an unknown name."""
    if name not in preset_names():
        raise ValueError(f"there is no preset {name!r}; there are {', '.join(preset_names())}")
    return PRESETS / name
