"""Products of few rows against float64, next to NaN wherever nothing may be read or written."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpu.triton_checks.worker import INTERPRETED
from weft.engine.kernels.triton import dense
from weft.engine.kernels.triton.dense import DenseTile

NAN = float("nan")
DTYPES = [torch.float16] if INTERPRETED else [torch.bfloat16, torch.float16]
"""The interpreter multiplies bfloat16's bits as if they were integers."""
LAYERS = ((2560, 2048), (2048, 2048), (4096, 2048), (576, 2048), (2048, 704), (2880, 512))
"""Outputs and inputs of products that decode steps have."""


def inside(rows: int, columns: int, device: torch.device, dtype: torch.dtype, skew: bool = False) -> Tensor:
    """Random values with NaN around them. skew: columns differ by powers of ten, and so do rows."""
    whole = torch.full((rows + 2, columns + 16), NAN, device=device, dtype=dtype)
    value = torch.randn(rows, columns, device=device)
    if skew:
        value *= 10 ** (2 * torch.rand(rows, 1, device=device) + torch.rand(columns, device=device))
    whole[1:-1, 8:-8] = value
    return whole[1:-1, 8:-8]


def tile_for(x: Tensor, weight: Tensor, added_next: bool = False) -> DenseTile:
    tile = dense.tile_for(x, weight, added_next)
    assert tile is not None
    return tile


def assert_product(x: Tensor, weight: Tensor, bias: Tensor | None, tile: DenseTile | None) -> Tensor:
    """Check a product's float32 sums, and that the memory around them stays as it was; return them."""
    whole = torch.full((len(x) + 1, len(weight) + 16), NAN, device=x.device)
    out = dense.linear(x, weight, tile or tile_for(x, weight), whole[:-1, 8:-8], bias)
    wanted = x.double() @ weight.double().mT
    size = x.double().abs() @ weight.double().abs().mT  # what rounding of the sums goes by
    if bias is not None:
        wanted, size = wanted + bias.double(), size + bias.double().abs()
    assert ((out.double() - wanted).abs() <= 1e-5 * size).all()
    assert whole[-1].isnan().all() and whole[:, :8].isnan().all() and whole[:, -8:].isnan().all()
    return out


@pytest.mark.parametrize("rows, outputs, width, tile", [
    (1, 64, 256, None),
    (3, 40, 200, None),  # neither outputs nor inputs fill their tiles
    (16, 24, 2304, DenseTile(64, 5, 512, 4)),  # of parts
    (3, 16, 4224, DenseTile(64, 5, 512, 4)),  # of parts of two blocks
    (17, 16, 1152, None),
    (17, 96, 520, None),
    (64, 72, 256, None),
    (2, 48, 640, DenseTile(32, 3, 128, 4)),  # the last part has less to do
    (16, 16, 384, DenseTile(16, 2, 128, 8)),
    (5, 70, 300, DenseTile(64, 1, 128, 4)),
    (1, 32, 512, DenseTile(16, 1, 64, 4, True)),  # slices of the whole depth,
    (9, 40, 200, DenseTile(16, 1, 16, 4, True)),  # of which the last have less to do
    (16, 40, 300, DenseTile(32, 1, 32, 4, True)),
    (64, 24, 300, DenseTile(16, 1, 64, 2, True)),  # and rows in turn
])  # fmt: skip
@pytest.mark.parametrize("dtype", DTYPES)
def test_products(
    rows: int, outputs: int, width: int, tile: DenseTile | None, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(rows)
    x, weight = inside(rows, width, device, dtype, skew=True), inside(outputs, width, device, dtype)
    bias = torch.randn(outputs, device=device, dtype=dtype) if rows % 2 else None
    assert_product(x, weight, bias, tile)


@pytest.mark.parametrize(
    "rows, tile",
    [
        (4, None),
        (33, None),
        (4, DenseTile(16, 2, 128, 4)),
        (4, DenseTile(16, 1, 64, 8, True)),
        (33, DenseTile(16, 1, 64, 4, True)),
    ],
)
def test_a_row_depends_on_no_other(rows: int, tile: DenseTile | None, device: torch.device) -> None:
    torch.manual_seed(1)
    x, weight = inside(rows, 512, device, DTYPES[0]), inside(40, 512, device, DTYPES[0])
    out = assert_product(x, weight, None, tile)
    for alone in (0, rows - 1):
        others = torch.full_like(x, NAN)
        others[alone] = x[alone]
        again = dense.linear(others, weight, tile or tile_for(x, weight), torch.full_like(out, NAN))
        assert torch.equal(again[alone], out[alone]) and again.isnan().all(1).sum() == rows - 1


def test_rounded_once(device: torch.device) -> None:
    """To x's dtype, after the bias, with one part or several, or slices."""
    torch.manual_seed(2)
    x, weight = (torch.randn(n, 512, device=device).to(DTYPES[0]) for n in (3, 32))
    bias = 100 * torch.randn(32, device=device).to(DTYPES[0])
    for tile in (DenseTile(16, 1, 128, 4), DenseTile(16, 4, 128, 4), DenseTile(16, 1, 128, 4, True)):
        exact = dense.linear(x, weight, tile, x.new_empty(3, 32, dtype=torch.float32), bias)
        assert torch.equal(dense.linear(x, weight, tile, None, bias), exact.to(DTYPES[0]))


def test_parts_are_left_to_others(device: torch.device) -> None:
    torch.manual_seed(3)
    x, weight = (torch.randn(n, 640, device=device).to(DTYPES[0]) for n in (5, 20))
    found = dense.linear_partials(x, weight, tile_for(x, weight, added_next=True), None, torch.float32)
    assert found.values.shape == (3, 5, 20) and found.bias is None and found.dtype == torch.float32
    for i, part in enumerate(found.values.double()):
        of = slice(256 * i, 256 * (i + 1))
        torch.testing.assert_close(part, x[:, of].double() @ weight[:, of].double().mT, rtol=0, atol=1e-4)
    total = found.values[0] + found.values[1] + found.values[2]
    assert torch.equal(dense.add_partials(found.values, torch.full_like(total, NAN)), total)


def test_which_products_are_taken(device: torch.device) -> None:
    """Few rows of the layers, and neither many rows nor a head over the vocabulary."""
    for outputs, width in LAYERS:
        for rows in (1, 16):
            assert dense.tile_of(rows, outputs, width) is not None, (rows, outputs, width)
        assert dense.tile_of(65, outputs, width) is None
    assert dense.tile_of(8, 2048, 2048) == DenseTile(16, 1, 256, 8, True)
    assert dense.tile_of(16, 2048, 2048) == DenseTile(16, 1, 64, 8, True)
    assert dense.tile_of(8, 4096, 2048) == DenseTile(32, 1, 256, 8, True)  # two programs of half the outputs do not fit
    assert dense.tile_of(8, 2048, 768) == dense.tile_of(8, 4096, 1024) == DenseTile(16, 1, 128, 8, True)
    for sizes in ((17, 2048, 2048), (16, 4096, 2048), (16, 2048, 4096), (8, 8, 2048), (8, 576, 7168)):
        tile = dense.tile_of(*sizes)
        assert tile is not None and not tile.sliced, sizes
    assert dense.tile_of(1, 5120, 2048) == dense.tile_of(4, 5120, 2048) == DenseTile(64, 8, 256, 4)
    assert dense.tile_of(1, 5632, 2048) == DenseTile(128, 8, 256, 8)  # seven hundred programs of half the columns
    assert dense.tile_of(5, 5120, 2048) is None  # five hundred programs
    assert dense.tile_of(64, 2560, 2048) is None and dense.tile_of(64, 2560, 2048, True) == DenseTile(128, 4, 512, 8)
    for rows in (1, 16, 17, 64):
        assert dense.tile_of(rows, 151_936, 2048) is None and dense.tile_of(rows, 75_968, 2048) is None
    for rows in (1, 64):  # a router's, whatever its depth
        assert dense.tile_of(rows, 128, 2048, True) == DenseTile(64, 8, 256, 4)
        assert dense.tile_of(rows, 256, 7168, True) == DenseTile(64, 14, 512, 4)
    x, weight = (torch.zeros(n, 64, device=device, dtype=torch.bfloat16) for n in (2, 32))
    assert dense.tile_for(x, weight) and dense.tile_for(x.half(), weight.half())
    refused = (x.float(), weight.float()), (x.float(), weight), (x[:0], weight), (weight.t()[:2, :32], weight[:, :32])
    assert not any(dense.tile_for(*tensors) for tensors in refused)


def test_refuses(device: torch.device) -> None:
    x, weight = (torch.zeros(n, 64, device=device, dtype=torch.bfloat16) for n in (2, 32))
    tile, bias = DenseTile(64, 1, 128, 4), weight[:, 0]
    for tensors in ((x[:, :32], weight), (x.half(), weight), (x[:0], weight), (x, weight, bias)):
        with pytest.raises(ValueError, match="x is"):
            dense.linear_partials(*tensors[:2], tile, *tensors[2:])
    for other, out in ((tile, x), (DenseTile(64, 1, 64, 4, True), None)):
        with pytest.raises(ValueError, match="out"):
            dense.linear(x, weight, other, out)
