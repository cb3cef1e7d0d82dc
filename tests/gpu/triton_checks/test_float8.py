"""FP8: rows quantised, dense products and experts, against their definitions in plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from gpu import definitions
from gpu.definitions import linear_float8 as plain_linear
from gpu.triton_checks import test_moe
from weft.engine.kernels.triton import float8_linear as float8
from weft.engine.kernels.triton import fused_experts
from weft.engine.kernels.triton.experts_tiles import ExpertsTile
from weft.kernels.float8 import FLOAT8, LARGEST, Fp8Rows, Fp8Weight, dequantise
from weft.kernels.float8 import quantise as plain_quantise
from weft.kernels.triton import float8_rows

NAN = float("nan")


def weight_of(*shape: int, unit: tuple[int, int], device: torch.device) -> Fp8Weight:
    """Random values, a block of which are zeros, and scales that differ from block to block by powers of ten."""
    blocks = (*shape[:-2], -(-shape[-2] // unit[0]), -(-shape[-1] // unit[1]))
    values = (torch.randn(shape, device=device) * 60).clamp(-LARGEST, LARGEST)
    values[..., : unit[0], : unit[1]] = 0
    return Fp8Weight(values.to(FLOAT8), 10 ** (2 * torch.rand(blocks, device=device) - 4), unit)


def skewed(rows: int, width: int, device: torch.device) -> Tensor:
    """Fp8Rows of which some have one huge value, one is of zeros, and one tiny."""
    x = torch.randn(rows, width, device=device)
    x[3::4, width // 2] *= 1e4
    if rows > 2:
        x[1], x[2] = 0, x[2] * 1e-6
    return x


def off(found: Tensor, wanted: Tensor) -> float:
    """The root of the mean over rows of the squared relative error; a row of zeros must be one."""
    size = wanted.norm(dim=1)
    assert (found[size == 0] == 0).all()
    return ((found.double() - wanted).norm(dim=1)[size > 0] / size[size > 0]).square().mean().sqrt().item()


def rounding(device: torch.device) -> float:
    """Return the tolerance of sums in float32; a GPU's tensor cores sum a group of FP8 with about 14 bits."""
    return 1e-5 if device.type == "cpu" else 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "rows, width, group_size", [(1, 128, 128), (5, 640, 128), (3, 200, 64), (4, 96, 32), (0, 128, 128)]
)
def test_quantises_rows(rows: int, width: int, group_size: int, dtype: torch.dtype, device: torch.device) -> None:
    x = (skewed(rows, width + 8, device) if rows else torch.zeros(0, width + 8, device=device)).to(dtype)[:, 4:-4]
    found, wanted = float8_rows.quantise(x, group_size), plain_quantise(x, group_size)
    assert torch.equal(found.values.view(torch.uint8), wanted.values.view(torch.uint8))
    assert torch.equal(found.scales, wanted.scales)
    largest = F.pad(x.float(), (0, -width % group_size)).unflatten(-1, (-1, group_size)).abs().amax(-1)
    bound = (largest.repeat_interleave(group_size, -1)[:, :width] * 2.0**-10).maximum(x.float().abs() * 2.0**-4) + 1e-12
    assert ((dequantise(found) - x.float()).abs() <= bound * 1.001).all()


def test_what_is_not_finite_stays_so(device: torch.device) -> None:
    x = torch.ones(2, 256, device=device)
    x[0, 3], x[1, 200] = NAN, float("inf")
    found = dequantise(float8_rows.quantise(x, 128))
    assert found[0, 3].isnan() and found[1, 200].isnan() and found[0, 128:].eq(1).all() and found[1, :128].eq(1).all()


LINEAR = {
    "one row": (1, 48, 256, (128, 128)),
    "few rows": (17, 200, 384, (128, 128)),
    "rows past a tile": (33, 160, 128, (128, 128)),
    "many rows": (70, 136, 256, (128, 128)),
    "a ragged group": (5, 64, 200, (64, 128)),
    "cut blocks": (9, 96, 192, (32, 64)),
    "blocks of a row": (20, 24, 96, (1, 32)),
}


def rotated(device: torch.device) -> float:
    """Sums in another order, or of fewer bits, turn the rounding of a few values between the products of experts, by 1
    part in 16 at most."""
    return 6e-3


@pytest.mark.parametrize("case", LINEAR.values(), ids=LINEAR.keys())
def test_linear(case: tuple[int, int, int, tuple[int, int]], device: torch.device) -> None:
    torch.manual_seed(0)
    rows, outputs, width, unit = case
    weight, x = weight_of(outputs, width, unit=unit, device=device), skewed(rows, width, device)
    wanted = plain_linear(x, weight, torch.float64)
    around = torch.full((rows, outputs + 16), NAN, device=device)
    out = float8.linear(x, weight, around[:, 8:-8])
    assert off(out, wanted) <= rounding(device) and around[:, :8].isnan().all() and around[:, -8:].isnan().all()
    if rows == 5:
        assert torch.equal(float8.linear(float8_rows.quantise(x, unit[1]), weight, torch.full_like(out, NAN)), out)
    exact = x.double() @ dequantise(weight, torch.float64).mT
    assert off(wanted, exact) > 5e-3  # so that rows left unquantised would be seen


@pytest.mark.parametrize("rows, tile", [
    (70, float8.Fp8Tile(64, 64, 1, 4, 4)),
    (66, float8.Fp8Tile(128, 128, 2, 8, 3)),
    (3, float8.Fp8Tile(16, 64, 2, 4, 4)),
    (18, float8.Fp8Tile(32, 128, 2, 4, 4)),
])  # fmt: skip
def test_tiles_and_parts(rows: int, tile: float8.Fp8Tile, device: torch.device) -> None:
    """Four groups and a ragged one, in one part or several; a row's bits depend on no other row."""
    weight, x = weight_of(136, 600, unit=(128, 128), device=device), skewed(rows, 600, device)
    out = float8.linear(x, weight, torch.full((rows, 136), NAN, device=device), tile)
    assert off(out, plain_linear(x, weight, torch.float64)) <= rounding(device)
    alone = torch.full_like(x, NAN)
    alone[0] = x[0]
    again = float8.linear(alone, weight, torch.full((rows, 136), NAN, device=device), tile)
    assert torch.equal(again[0], out[0]) and again[1:].isnan().all()


def test_few_tiles_are_cut_into_parts() -> None:
    assert float8.tile_of(1, 576, 56).parts == 7 and float8.tile_of(64, 4608, 56).parts == 3
    assert float8.tile_of(1, 576, 3).parts == 1 and float8.tile_of(4096, 4608, 56).parts == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_linear_of_the_library() -> None:
    """Fp8Rows that come by four, and what is left over."""
    device = torch.device("cuda")
    for outputs, width in ((256, 512), (320, 1024)):  # the last block of columns is half a block
        weight = weight_of(outputs, width, unit=(128, 128), device=device)
        x = skewed(float8.LIBRARY_ROWS + 3, width, device)
        out = torch.full((len(x), outputs), NAN, device=device, dtype=torch.bfloat16)
        assert float8.uses_cublas(len(x), weight, out) == (torch.cuda.get_device_capability() == (9, 0))
        assert not float8.uses_cublas(len(x), weight, out.float()) and not float8.uses_cublas(
            len(x), weight, out[:, ::2]
        )
        assert off(float8.linear(x, weight, out), plain_linear(x, weight, torch.float64)) <= 4e-3


def test_linear_refuses(device: torch.device) -> None:
    weight, x = weight_of(64, 128, unit=(64, 64), device=device), torch.randn(2, 128, device=device)
    out = torch.empty(2, 64, device=device)
    with pytest.raises(ValueError, match=r"by groups of 128, the weight .* by 64"):
        float8.linear(float8_rows.quantise(x, 128), weight, out)
    with pytest.raises(ValueError, match="out"):
        float8.linear(x, weight, out[:1])
    with pytest.raises(ValueError, match=r"with one for 128 × 64 they must be float8_e4m3fn and float32 \[1, 2\]"):
        float8.linear(x, weight._replace(unit=(128, 64), scales=weight.scales.repeat(2, 1)), out)


FORMS = {
    "few pairs": ((2, 2, 16, 2, 0, 16), (128, 128), (128, 128)),
    "one row": ((1, 1, 8, 3, 0, 8), (64, 128), (64, 128)),
    "one kernel": ((24, 21, 6, 3, 0, 6), (64, 128), (128, 128)),
    "experts elsewhere": ((9, 9, 12, 4, 8, 4), (64, 128), (64, 128)),
    "cut blocks": ((20, 20, 4, 2, 0, 4), (32, 128), (128, 32)),
    "many rows": ((68, 60, 7, 2, 3, 3), (64, 128), (64, 128)),
    "many rows, cut blocks": ((68, 68, 3, 1, 0, 3), (64, 64), (128, 64)),
    "no row is live": ((9, 0, 4, 2, 0, 4), (64, 128), (128, 128)),
}


@pytest.mark.parametrize(
    "case, quantised",
    [*((name, False) for name in FORMS), ("few pairs", True)],
)
def test_experts(case: str, quantised: bool, device: torch.device) -> None:
    torch.manual_seed(0)
    chosen, first_unit, last_unit = FORMS[case]
    rows, live, held = chosen[0], chosen[1], chosen[5]
    found, probability, expert = test_moe.routed(*chosen, device, tile_rows=16 if rows < 64 else 32)
    width, inner = 160, 192 if first_unit[0] < 128 else 128  # a group is 128, the rest of a row another
    x = skewed(rows, width, device)
    x[live:] = NAN
    gate_up = weight_of(held, 2 * inner, width, unit=first_unit, device=device)
    down = weight_of(held, width, inner, unit=last_unit, device=device)
    unchosen = [e for e in range(held) if e not in expert.flatten().tolist()]
    gate_up.scales[unchosen], down.scales[unchosen] = NAN, NAN
    out = torch.full((rows, width), NAN, device=device)
    given: Tensor | Fp8Rows = float8_rows.quantise(x, first_unit[1]) if quantised else x
    tile = None if not quantised else ExpertsTile(64, 128, 4, 2)  # of few rows, the depth is cut into two parts
    fused_experts.experts(given, found, gate_up, down, out, tile, tile)
    wanted = definitions.experts(x.double(), probability, expert, gate_up, down)
    assert (out[(expert < 0).all(-1)] == 0).all()
    if live:
        assert off(out[:live], wanted[:live]) <= rotated(device)
        wide = [dequantise(w, torch.float64) for w in (gate_up, down)]
        assert off(wanted[:live], definitions.experts(x.double(), probability, expert, *wide)[:live]) > 2e-2


@pytest.mark.parametrize("case, limit, alpha", [("few pairs", 0.5, 1.7), ("one kernel", 0.5, None)])
def test_experts_with_limits_and_biases(
    case: str, limit: float | None, alpha: float | None, device: torch.device
) -> None:
    chosen = FORMS[case][0]
    rows, live, held = chosen[0], chosen[1], chosen[5]
    found, probability, expert = test_moe.routed(*chosen, device)
    gate_up = weight_of(held, 384, 160, unit=(64, 128), device=device)
    down = weight_of(held, 160, 192, unit=(128, 128), device=device)  # both are two groups deep, each of them a part
    x, biases = skewed(rows, 160, device), [torch.randn(held, n, device=device) for n in (384, 160)]
    tile = ExpertsTile(64, 128, 4, 2)
    out = fused_experts.experts(x, found, gate_up, down, torch.full_like(x, NAN), tile, tile, limit, alpha, *biases)
    wanted = definitions.experts(x.double(), probability, expert, gate_up, down, limit, alpha, *biases)
    assert off(out[:live], wanted[:live]) <= rotated(device)


def test_experts_refuse(device: torch.device) -> None:
    found, _, _ = test_moe.routed(2, 2, 8, 2, 0, 8, device)
    x, out = torch.randn(2, 128, device=device), torch.empty(2, 128, device=device)
    gate_up = weight_of(8, 128, 128, unit=(128, 128), device=device)
    down = weight_of(8, 128, 64, unit=(128, 64), device=device)
    with pytest.raises(ValueError, match="up begins at row 64, in the middle of a block of 128"):
        fused_experts.experts(x, found, gate_up, down, out)
    with pytest.raises(ValueError, match="must be alike"):
        fused_experts.experts(x, found, gate_up, torch.empty(8, 128, 64, device=device), out)
