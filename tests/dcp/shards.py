"""Attention over shards of the keys, and over all of them in float64: inputs of a merge, and its expected outputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

SPREAD = 8.0
TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-6, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
"""Tolerance of the root mean square of a row's differences; values are of size 1. The lse is float32 in any case."""


@dataclass
class Shards:
    """outs `[ranks, T, H, D]`, lses `[ranks, T, H]`: each rank's part; out, lse in float64: over all keys."""

    outs: Tensor
    lses: Tensor
    out: Tensor
    lse: Tensor


def attend(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return float64 attention of scores `[T, H, L]`, −inf for a key that is not seen, over values `[L, H, D]`."""
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().nan_to_num(0.0)
    return torch.einsum("thl,lhd->thd", weights, values), lse


def shards_of(
    lengths: list[int],
    ranks: int,
    heads: int,
    dim: int,
    dtype: torch.dtype = torch.float32,
    *,
    seed: int = 0,
    run: int = 1,
    apart: float = 0.0,
    empty: Callable[[int, int], bool] = lambda rank, row: False,
) -> Shards:
    """Return shards in which row t sees `lengths[t]` keys, key g of which lies on rank `g // run % ranks`.

    Scores are skewed by SPREAD, and each rank's scores too; the ranks' scores are `apart` from each other. empty(rank,
    row): keys that the row does not see after all. Outputs of empty parts are NaN, their lse −inf, +inf or NaN in turn;
    outputs of parts that weigh nothing, even in float64, are NaN too.
    """
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths, default=0)
    position = torch.arange(longest)
    owner = position // run % ranks
    scores = torch.randn(len(lengths), heads, longest, generator=generator, dtype=torch.float64) * SPREAD
    scores += (torch.randn(len(lengths), heads, ranks, generator=generator, dtype=torch.float64) * SPREAD)[:, :, owner]
    scores += apart * ((owner + seed) % ranks)
    values = torch.randn(longest, heads, dim, generator=generator, dtype=torch.float64)
    seen = position < torch.tensor(lengths, dtype=torch.int64)[:, None]
    for row, rank in ((t, r) for t in range(len(lengths)) for r in range(ranks) if empty(r, t)):
        seen[row] &= owner != rank
    scores = scores.masked_fill(~seen[:, None], -math.inf)
    whole = attend(scores, values)
    outs, lses = [], []
    for rank in range(ranks):
        out, lse = attend(scores.masked_fill(owner != rank, -math.inf), values)
        nothing, little = lse == -math.inf, lse < whole[1] - 800
        outs.append(out.masked_fill((nothing | little)[..., None], math.nan).to(dtype))
        lses.append(lse.masked_fill(nothing, (-math.inf, math.inf, math.nan)[(rank + seed) % 3]).float())
    return Shards(torch.stack(outs), torch.stack(lses), *whole)


def check(got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor], what: str) -> None:
    """Compare row by row with float64; rows that see nothing are 0, their lse −inf."""
    (out, lse), (exact, exact_lse) = got, wanted
    assert out.shape == exact.shape and lse.shape == exact_lse.shape and lse.dtype == torch.float32, what
    nothing = exact_lse == -math.inf
    assert not out[nothing].any() and (lse[nothing] == -math.inf).all(), f"rows that see nothing, {what}"
    error = (out.double() - exact)[~nothing].square().mean(-1).sqrt()
    assert (error <= TOLERANCE[out.dtype]).all(), f"{what}: error {error.max():.1e}"
    assert torch.allclose(lse[~nothing].double(), exact_lse[~nothing], rtol=1e-6, atol=1e-5), f"lse, {what}"


def own(x: Tensor, ranks: int, rank: int) -> Tensor:
    """Return a rank's heads of `[T, H, …]`."""
    return x.unflatten(1, (ranks, -1))[:, rank]
