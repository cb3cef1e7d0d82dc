"""A step's tokens and positions are embedded before the layers as torch does it."""

from __future__ import annotations

import pytest
import torch

from weft.engine.kernels import model_reference
from weft.engine.kernels.triton import embed as kernels


@pytest.mark.parametrize("first, held", [(None, 40), (7, 20), (0, 20), (30, 10)])
@pytest.mark.parametrize("rows, width", [(5, 96), (1, 2100), (0, 8)])
def test_embeddings(rows: int, width: int, first: int | None, held: int, device: torch.device) -> None:
    torch.manual_seed(rows)
    weight = torch.full((held, width + 8), float("nan"), dtype=torch.bfloat16, device=device)
    weight[:, :width] = torch.randn(held, width)
    tokens = torch.randint(0, 40, (rows,), device=device)
    tokens[:3] = torch.tensor([0, 39, 7])[:rows]  # what lies around a share is none of it
    wanted = model_reference.embed(tokens, weight[:, :width], first)
    found = kernels.embed(tokens, weight[:, :width], first)
    assert found.dtype == wanted.dtype and torch.equal(found, wanted)
    if first is not None and rows:
        assert not found[(tokens < first) | (tokens >= first + held)].any()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("pairs", [32, 24])
def test_angles(pairs: int, interleaved: bool, device: torch.device) -> None:
    """Also of positions far away."""
    positions = torch.tensor([0, 1, 2, 1000, 40_959, 262_143, 1_048_575], device=device)
    inverse = (1.0 / 10_000 ** (torch.arange(pairs) / pairs)).to(device)
    given = (positions, inverse, 1.25, torch.float32, interleaved)
    for found, wanted in zip(kernels.cos_sin(*given), model_reference.cos_sin(*given), strict=True):
        assert found.shape == (7, 1, 2 * pairs) and torch.allclose(found, wanted, rtol=0, atol=3e-7)
    low = kernels.cos_sin(positions[:0], inverse, 1.0, torch.bfloat16, interleaved)[0]
    assert low.dtype == torch.bfloat16 and low.shape == (0, 1, 2 * pairs)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    one = torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="contiguous"):
        kernels.embed(one, torch.zeros(3, 4, device=device).T)
    with pytest.raises(ValueError, match="float32"):
        kernels.cos_sin(one, torch.zeros(3, dtype=torch.float64, device=device), 1.0, torch.float32, False)
