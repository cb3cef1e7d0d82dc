"""Tables of rotary position embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from weft.engine.kernels.ops import cos_sin
from weft.engine.models.config_json.common_fields import Rope


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
