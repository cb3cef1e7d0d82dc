"""Rotary position embedding (arXiv 2104.09864): frequencies and tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from weft.engine.kernels.ops import cos_sin

_ALL = frozenset({"rope_type", "type", "rope_theta"})
_STRETCHED = _ALL | {"factor", "original_max_position_embeddings"}
ROPES: Mapping[str, frozenset[str]] = {
    "default": _ALL,
    "linear": _STRETCHED,
    "llama3": _STRETCHED | {"low_freq_factor", "high_freq_factor"},
    "yarn": _STRETCHED | {"beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate"},
}
"""Types with frequencies that do not depend on the sequence's length, and the parameters of each."""


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding, as config.json describes it.

    Args:
        parameters: in transformers' names (`rope_parameters`).
        dim: number of a head's first elements that are rotated.
        interleaved: rotate neighbouring elements (DeepSeek) instead of pairs across halves (most checkpoints).
    """

    parameters: Mapping[str, Any]
    dim: int
    max_position: int
    interleaved: bool = False

    def attention_scale(self) -> float:
        """Return the factor of attention's scores in DeepSeek's models with YaRN (arXiv 2309.00071)."""
        all_dim, factor = self.parameters.get("mscale_all_dim") or 0.0, self.parameters.get("factor") or 1.0
        return (0.1 * all_dim * math.log(factor) + 1.0) ** 2 if factor > 1 else 1.0

    def frequencies(self) -> tuple[Tensor, float]:
        """Return (inverse frequencies float32 `[dim / 2]`, factor on cos and sin), as transformers computes them."""
        base = self.parameters["rope_theta"]
        kind = self.parameters.get("rope_type", "default")
        if kind == "default":
            return 1.0 / base ** (torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim), 1.0
        shape = dict(head_dim=self.dim, max_position_embeddings=self.max_position, hidden_size=1, num_attention_heads=1)
        values: dict[str, Any] = shape | {"rope_parameters": dict(self.parameters)}
        inverse, factor = ROPE_INIT_FUNCTIONS[kind](PretrainedConfig(**values), torch.device("cpu"))
        return inverse, float(factor)


class Rotary(nn.Module):
    """Factory of the tables of a step's positions."""

    def __init__(self, rope: Rope, device: torch.device):
        super().__init__()
        inverse, self.factor = rope.frequencies()
        self.inverse, self.interleaved = inverse.to(device), rope.interleaved

    def forward(self, positions: Tensor, dtype: torch.dtype) -> RotaryTable:
        """Return cos and sin for int64 positions `[T]`."""
        cos, sin = cos_sin(positions, self.inverse, self.factor, dtype, self.interleaved)
        return RotaryTable(cos, sin, self.interleaved)


@dataclass(frozen=True)
class RotaryTable:
    """cos, sin: `[T, 1, dim]`. interleaved: as in `Rope`."""

    cos: Tensor
    sin: Tensor
    interleaved: bool = False

    @cached_property
    def halves(self) -> tuple[Tensor, Tensor]:
        """cos and sin `[T, dim / 2]`, one entry per rotated pair, computed once for all layers of a step."""
        cos, sin = self.cos[:, 0], self.sin[:, 0]
        if self.interleaved:
            return cos[:, ::2].contiguous(), sin[:, ::2].contiguous()
        half = cos.shape[1] // 2
        return cos[:, :half], sin[:, :half]

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate the first `dim` elements of x `[T, heads, at least dim]`."""
        rotary_dim = self.cos.shape[-1]
        if rotary_dim < x.shape[-1]:
            return torch.cat((self(x[..., :rotary_dim]), x[..., rotary_dim:]), dim=-1)
        if self.interleaved:
            across = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
        else:
            left, right = x.chunk(2, dim=-1)
            across = torch.cat((-right, left), dim=-1)
        return x * self.cos + across * self.sin
