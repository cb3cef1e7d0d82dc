"""Products that come in parts, to be added up where they are read."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class SplitKPartials(NamedTuple):
    """A product whose depth was cut: float32 `[parts, T, N]`, to be added in their order, and then to bias `[N]`.

    dtype: to which the sum is then rounded.
    """

    values: Tensor
    bias: Tensor | None
    dtype: torch.dtype

    def total(self) -> Tensor:
        """The product, `[T, N]`."""
        total = self.values[0]
        for part in self.values[1:]:
            total = total + part
        return (total if self.bias is None else total + self.bias).to(self.dtype)


def as_partials(x: Tensor | SplitKPartials) -> SplitKPartials:
    """What is whole as a single part."""
    return x if isinstance(x, SplitKPartials) else SplitKPartials(x[None], None, x.dtype)
