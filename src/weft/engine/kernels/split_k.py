"""Products split over their depth (split-K): the reader sums the partial products."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class SplitKPartials(NamedTuple):
    """Partial products of x Wᵀ.

    Args:
        values: float32 `[parts, T, N]`, to be summed in order.
        bias: `[N]`, added to the sum.
        dtype: dtype of the rounded sum.
    """

    values: Tensor
    bias: Tensor | None
    dtype: torch.dtype

    @property
    def is_cuda(self) -> bool:
        return self.values.is_cuda

    def total(self) -> Tensor:
        """Return the product, `[T, N]`."""
        total = self.values[0]
        for part in self.values[1:]:
            total = total + part
        return (total if self.bias is None else total + self.bias).to(self.dtype)


def as_partials(x: Tensor | SplitKPartials) -> SplitKPartials:
    """Return partials unchanged, and a tensor as the only part."""
    return x if isinstance(x, SplitKPartials) else SplitKPartials(x[None], None, x.dtype)
