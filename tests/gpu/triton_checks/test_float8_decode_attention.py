"""Decode attention over keys and values in FP8 against its twin in float64, and its bits."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from gpu import definitions
from gpu.triton_checks.test_decode_attention import LONG_AND_SHORT, PAGE, close, paged
from gpu.triton_checks.test_float8_cache import in_float8, widened
from weft.engine.kernels.triton import decode_attention as decode
from weft.engine.kernels.triton.splits import order_splits
from weft.kernels.float8 import Fp8Vectors

WINDOWED = (300, 5, 0, 131)


class Step(NamedTuple):
    q: Tensor
    keys: Fp8Vectors
    values: Fp8Vectors
    pages: Tensor
    lengths: Tensor


def step(lengths: tuple[int, ...], heads: int, kv_heads: int, dim: int, device: torch.device) -> Step:
    torch.manual_seed(0)
    cache, pages, length = paged(lengths, 2 * kv_heads, dim, torch.float32, device)
    q = torch.randn(len(lengths), heads, dim, device=device).half()
    q[length == 0] = float("nan")  # a row that is only there to fill the graph
    return Step(q, in_float8(cache[:, :kv_heads]), in_float8(cache[:, kv_heads:]), pages, length)


@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "dim", "window"),
    [
        ((0, 0), 6, 2, 48, None),
        ((150, 65), 20, 1, 128, None),
        *((WINDOWED, 4, 1, 32, window) for window in (1, 20, 130, 1000)),
        pytest.param(LONG_AND_SHORT, 6, 2, 48, None, marks=pytest.mark.nightly),
        pytest.param((4200,), 1, 1, 32, None, marks=pytest.mark.nightly),  # splits of 128 tokens
    ],
    ids=str,
)
def test_rows(
    lengths: tuple[int, ...], heads: int, kv_heads: int, dim: int, window: int | None, device: torch.device
) -> None:
    """Outputs and log-sum-exps, by which sinks count and outputs of sharded tokens merge."""
    q, keys, values, pages, length = step(lengths, heads, kv_heads, dim, device)
    wide = (q.double(), widened(keys), widened(values))
    wanted, wanted_lse = definitions.decode_attention(*wide, pages, length, PAGE, 0.2, window)
    for row, seen in enumerate(lengths):  # pages that no window reaches are given back
        pages[row, : max(0, seen - (window or seen)) // PAGE] = -(1 << 24)
    lse = torch.full(q.shape[:2], float("nan"), device=device)
    out = torch.full_like(q, float("nan"))
    decode.decode_attention(q, keys, values, pages, length, PAGE, 0.2, window=window, out=out, lse=lse)
    empty = length == 0
    assert (out[empty] == 0).all() and (lse[empty] == float("-inf")).all()
    assert close(out[~empty], wanted[~empty], 1e-3)
    assert torch.allclose(lse[~empty].double(), wanted_lse[~empty], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("longest", [150, pytest.param(1500, marks=pytest.mark.nightly)])
def test_company_order_and_programs_change_no_bits(longest: int, device: torch.device) -> None:
    """Programs sum up runs of splits that they have whole; the merge sums up the others."""
    q, keys, values, pages, length = step((longest, 0, 193, 5), 4, 1, 32, device)

    def attend(rows: list[int], **more: Any) -> Tensor:
        return decode.decode_attention(q[rows], keys, values, pages[rows], length[rows], PAGE, 0.2, **more)

    together = attend([0, 1, 2, 3])
    for rows in ([0], [1], [2], [3, 2, 0]):
        assert torch.equal(attend(rows), together[rows]), rows
    for at_once, programs in ((2, 1056), (3, 1), (4, 3)):  # items of 3 to 5 splits, or more; of one above
        splits = order_splits(length, pages.shape[1] * PAGE, None, at_once, decode.cut_of(32))
        tile = decode.tile_of(32, 4, float8=True)._replace(programs=programs)
        assert torch.equal(attend([0, 1, 2, 3], splits=splits, tile=tile), together), (at_once, programs)
