"""Products with weights, including weights that stay in the checkpoint's format."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from weft.engine.kernels import ops
from weft.engine.kernels.split_k import SplitKPartials
from weft.engine.models.weights.weight_format import KeptWeight


def product(
    x: Any, weight: Tensor | KeptWeight, like: Tensor, out: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Return x Wᵀ + bias in out, or in a new tensor of like's dtype. x: `[rows, inputs]`, or rows in the weight's
    format. weight: `[outputs, inputs]`. bias: `[outputs]`."""
    if isinstance(weight, Tensor):
        return ops.linear(x, weight, out, bias)
    out = weight.product(x, like.new_empty(like.shape[0], weight.shape[0]) if out is None else out)
    return out if bias is None else out.add_(bias)


def product_or_partials(
    x: Any, weight: Tensor | KeptWeight, like: Tensor, bias: Tensor | None = None
) -> Tensor | SplitKPartials:
    """Return `product`, or its split-K partials if the next kernel is to sum them."""
    if isinstance(weight, Tensor):
        return ops.linear_or_partials(x, weight, bias)
    return product(x, weight, like, None, bias)
