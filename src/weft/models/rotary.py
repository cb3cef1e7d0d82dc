"""Rotary position embedding (arXiv 2104.09864): its frequencies, and how it turns queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_ALL = frozenset({"rope_type", "type", "rope_theta"})
_STRETCHED = _ALL | {"factor", "original_max_position_embeddings"}
ROPES: Mapping[str, frozenset[str]] = {
    "default": _ALL,
    "linear": _STRETCHED,
    "llama3": _STRETCHED | {"low_freq_factor", "high_freq_factor"},
    "yarn": _STRETCHED | {"beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate"},
}
"""The kinds whose frequencies do not change with the sequence's length, and the parameters that each understands."""


@dataclass(frozen=True)
class Rope:
    """parameters: as transformers names them (`rope_parameters`). dim: elements of a head that are turned."""

    parameters: Mapping[str, Any]
    dim: int
    max_position: int

    def frequencies(self) -> tuple[Tensor, float]:
        """(inverse frequencies float32 `[dim / 2]`, factor on cos and sin), as transformers has them."""
        base = self.parameters["rope_theta"]
        kind = self.parameters.get("rope_type", "default")
        if kind == "default":
            return 1.0 / base ** (torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim), 1.0
        shape = dict(head_dim=self.dim, max_position_embeddings=self.max_position, hidden_size=1, num_attention_heads=1)
        values: dict[str, Any] = shape | {"rope_parameters": dict(self.parameters)}
        inverse, factor = ROPE_INIT_FUNCTIONS[kind](PretrainedConfig(**values), torch.device("cpu"))
        return inverse, float(factor)


class Rotary(nn.Module):
    """Makes the tables of a step's positions, in the half-split form that most Hugging Face checkpoints use."""

    def __init__(self, rope: Rope, device: torch.device):
        super().__init__()
        inverse, self.factor = rope.frequencies()
        self.inverse = inverse.to(device)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> RotaryTable:
        """cos and sin for int64 positions `[T]`."""
        angles = positions[:, None].float() * self.inverse
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        return RotaryTable((angles.cos() * self.factor).to(dtype), (angles.sin() * self.factor).to(dtype))


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """cos, sin: `[T, 1, head_dim]`."""

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Turns x `[T, heads, head_dim]`."""
        left, right = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat((-right, left), dim=-1) * self.sin
