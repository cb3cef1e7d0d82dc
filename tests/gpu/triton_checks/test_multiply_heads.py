"""Product of each head's rows with a matrix of its own against float64, next to NaN wherever nothing may be read."""

from __future__ import annotations

import pytest
import torch

from gpu.triton_checks.worker import INTERPRETED
from weft.engine.kernels.triton.multiply_heads import multiply_heads

NAN = float("nan")
DTYPES = [torch.float16] if INTERPRETED else [torch.bfloat16, torch.float16]
"""The interpreter multiplies bfloat16's bits as if they were integers."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows, heads, depth, columns", [(1, 3, 32, 600), (17, 2, 500, 40), (64, 1, 128, 72)])
def test_products(
    rows: int, heads: int, depth: int, columns: int, transposed: bool, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(rows)
    x = torch.full((rows + 1, heads, depth + 8), NAN, device=device, dtype=dtype)[:-1, :, :depth]
    x.copy_(torch.randn(x.shape) * 10 ** (2 * torch.rand(rows, 1, 1)))
    shape = (columns, depth) if transposed else (depth, columns)
    weight = torch.full((heads, shape[0] + 1, shape[1] + 8), NAN, device=device, dtype=dtype)[:, :-1, : shape[1]]
    weight.copy_(torch.randn(heads, *shape) * 10 ** torch.rand(heads, 1, 1))
    weight = weight.transpose(1, 2) if transposed else weight
    whole = torch.full((rows + 1, heads, columns + 8), NAN, device=device)
    out = whole[:-1, :, :columns]
    assert multiply_heads(x, weight, out) is out
    wanted = torch.einsum("thd,hdc->thc", x.double(), weight.double())
    size = torch.einsum("thd,hdc->thc", x.double().abs(), weight.double().abs())
    assert ((out.double() - wanted).abs() <= 1e-5 * size).all()
    assert whole[-1].isnan().all() and whole[..., columns:].isnan().all()


def test_others_by_torch(device: torch.device) -> None:
    for rows, heads, dtype in (
        (0, 2, torch.float16),
        (65, 2, torch.float16),
        (3, 300, torch.float16),
        (3, 2, torch.float32),
    ):
        x = torch.randn(rows, heads, 16, device=device).to(dtype)
        weight = torch.randn(heads, 16, 24, device=device).to(dtype)
        out = torch.full((rows, heads, 24), NAN, device=device, dtype=dtype)
        multiply_heads(x, weight, out)
        assert torch.allclose(out, torch.einsum("thd,hdc->thc", x, weight), rtol=1e-2, atol=1e-2)
    with pytest.raises(ValueError, match="weight"):
        multiply_heads(x, weight.mT, out)
