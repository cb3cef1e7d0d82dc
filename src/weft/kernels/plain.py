"""What kernels compute, in plain torch: the definitions that they are tested against, and what runs without them."""

from __future__ import annotations

from functools import reduce
from math import inf

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / √(mean(x²) + eps) over the last dimension, in float32 at least, rounded to x's dtype, times weight.

    x: `[…, width]`; weight: `[width]`. (arXiv 1910.07467)
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def merge_weights(lses: Tensor) -> tuple[Tensor, Tensor]:
    """What each part of the keys counts for, and what all of them together have for a log-sum-exp.

    lses: `[parts, …]`, each part's logarithm (base e) of its sum of exponentials; −inf, and NaN and +inf, which some
    kernels give: the part is empty. Gives weights `[parts, …]`, which add up to 1, or are 0 where every part is empty,
    and lse `[…]`, −inf there. Summed in the parts' order, so that a row's bits depend on its own parts alone.
    """
    known = lses.nan_to_num(nan=-inf, posinf=-inf, neginf=-inf)
    most = known.amax(0)
    most = most.where(most > -inf, 0.0)
    terms = (known - most).exp()
    total = reduce(torch.add, terms.unbind())
    return terms / total.where(total > 0, 1.0), most + total.log()


def softmax_merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over all keys from attention over each part of them (arXiv 2205.14135, 2501.01005).

    outs: `[parts, …, D]`; lses: `[parts, …]`, as `merge_weights` takes them. Gives the output `[…, D]` of outs' dtype
    and its lse. Summed in the parts' order, in float32 at least. A part of weight 0 is not read: it may be NaN.
    """
    wide = torch.promote_types(outs.dtype, torch.float32)
    weights, lse = merge_weights(lses)
    terms = [(w[..., None] * out.to(wide)).where(w[..., None] > 0, 0.0) for w, out in zip(weights, outs, strict=True)]
    return reduce(torch.add, terms).to(outs.dtype), lse
