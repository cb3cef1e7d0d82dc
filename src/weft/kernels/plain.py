"""What kernels compute, in plain torch: the definitions that they are tested against, and what runs without them."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / √(mean(x²) + eps) over the last dimension, in float32 at least, rounded to x's dtype, times weight.

    x: `[…, width]`; weight: `[width]`. (arXiv 1910.07467)
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
