"""Qwen3-Next: the layers of Qwen3.5-MoE, which came after it, under other names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from weft.models.expert_sources import ExpertLayout
from weft.models.model_config import Fields
from weft.models.qwen35 import Qwen35Config, read_text


@dataclass(frozen=True)
class Qwen3NextConfig(Qwen35Config):
    """A model of text alone. Checkpoints store each expert by itself."""

    prefix: ClassVar[str] = "model"

    @property
    def expert_layout(self) -> ExpertLayout:
        return "per_expert"


def read(fields: Fields) -> Qwen35Config:
    """Reads a config of Qwen3-Next or Qwen3-Coder-Next. Raises ModelError."""
    return read_text(fields, Qwen3NextConfig, by_key_head=True)
