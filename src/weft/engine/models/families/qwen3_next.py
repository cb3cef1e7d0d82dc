"""Qwen3-Next: the layers of Qwen3.5-MoE, its successor, under other names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from weft.engine.models.config_json.fields import Fields
from weft.engine.models.families.qwen35 import Qwen35Config, read_text


@dataclass(frozen=True)
class Qwen3NextConfig(Qwen35Config):
    """Text-only model."""

    prefix: ClassVar[str] = "model"


def read(fields: Fields) -> Qwen35Config:
    """Read a config of Qwen3-Next or Qwen3-Coder-Next. Raises ModelError."""
    return read_text(fields, Qwen3NextConfig, qwen3_next=True)
