"""Products in parts of their depth (split-K): the reader adds the parts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class SplitKPartials(NamedTuple):
    """The partial products of x Wᵀ.

    values: float32 `[parts, T, N]`, to be added in their order. bias: `[N]`, added to their sum. dtype: the sum is
    rounded to it.
    """

    values: Tensor
    bias: Tensor | None
    dtype: torch.dtype

    @property
    def is_cuda(self) -> bool:
        """As a tensor's."""
        return self.values.is_cuda

    def total(self) -> Tensor:
        """The product, `[T, N]`."""
        total = self.values[0]
        for part in self.values[1:]:
            total = total + part
        return (total if self.bias is None else total + self.bias).to(self.dtype)


def as_partials(x: Tensor | SplitKPartials) -> SplitKPartials:
    """x as it is, or a tensor as the only part."""
    return x if isinstance(x, SplitKPartials) else SplitKPartials(x[None], None, x.dtype)
