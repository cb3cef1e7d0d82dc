"""Routing and the routed experts against their twins, with rows that are not live full of NaN."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from weft.kernels.triton import moe, plain
from weft.kernels.triton import route as kernels

NAN = float("nan")


def routed(
    rows: int, live: int, experts: int, k: int, first: int, held: int, device: torch.device, tile_rows: int = 16
) -> tuple[kernels.Routing, Tensor, Tensor]:
    """(the kernel's routing, the twin's weights and experts) of skewed logits."""
    logits = torch.randn(rows, experts, device=device) + 2 * torch.randn(experts, device=device)
    logits[live:] = NAN
    count = torch.tensor([live], dtype=torch.int32, device=device)
    found = kernels.route(logits, k, True, count, tile_rows, first, held)
    return found, *plain.route(logits, k, True, live, first, held)


def assert_order(routing: kernels.Routing) -> None:
    """Every pair that is here is in one tile of its expert, in order, and nothing else is in any tile."""
    assert routing.order is not None and routing.tile_expert is not None
    expert, pairs = routing.expert.flatten().tolist(), routing.expert.numel()
    order, seen = routing.order.view(-1, routing.tile_rows).tolist(), []
    for tile, owner in zip(order, routing.tile_expert.tolist(), strict=True):
        if owner >= 0:
            real = [pair for pair in tile if pair != pairs]
            assert real and all(expert[pair] == owner for pair in real)
            assert tile == real + [pairs] * (len(tile) - len(real))
            seen += real
    assert seen == sorted((pair for pair in range(pairs) if expert[pair] >= 0), key=lambda pair: (expert[pair], pair))


CASES = {
    "few pairs": (2, 2, 16, 2, 0, 16),
    "one row": (1, 1, 8, 3, 0, 8),
    "one kernel": (24, 21, 6, 3, 0, 6),
    "two kernels": (66, 60, 7, 2, 3, 3),
    "experts elsewhere": (9, 9, 12, 4, 8, 4),
    "no row is live": (9, 0, 4, 2, 0, 4),
    "no expert chosen is here": (1, 1, 64, 1, 63, 1),
    "one expert": (20, 20, 1, 1, 0, 1),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def check_routes(case: tuple[int, ...], seed: int, device: torch.device) -> None:
    found, weight, expert = routed(*case, device)
    live = case[1]
    assert torch.equal(found.expert, expert)
    assert torch.allclose(found.weight[:live], weight[:live], rtol=1e-5, atol=1e-6)
    assert found.weight.isfinite().all()
    assert (found.order is None) == (case[0] * case[3] * 4 <= case[2])
    if found.order is not None:
        assert_order(found)


@pytest.mark.parametrize("pairs", [0, 1, 33, 200, 2048, 2049, 6000])
@pytest.mark.parametrize("held", [1, 5])
def check_sorts_pairs(pairs: int, held: int, device: torch.device) -> None:
    expert = torch.randint(-1, held, (pairs, 1), device=device).int()
    assert_order(kernels.sort_pairs(torch.ones(pairs, 1, device=device), expert, held, 16))


def check_equal_logits_go_to_the_lower_expert(device: torch.device) -> None:
    live = torch.tensor([3], dtype=torch.int32, device=device)
    found = kernels.route(torch.zeros(3, 8, device=device), 3, False, live, 16)
    assert found.expert.tolist() == [[0, 1, 2]] * 3
    assert torch.allclose(found.weight, torch.tensor(1 / 8, device=device))


HALF = ("few pairs", "one kernel")


@pytest.mark.parametrize(
    "case, dtype",
    [
        *(pytest.param(case, torch.float32, id=name) for name, case in CASES.items()),
        *(pytest.param(CASES[name], torch.float16, id=f"{name}, float16") for name in HALF),
    ],
)
def check_experts(case: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    rows, live, held = case[0], case[1], case[5]
    found, weight, expert = routed(*case, device)
    width, inner = 40, 24  # no multiples of a tile's sides
    x = torch.randn(rows, width, device=device).to(dtype)
    x[live:] = NAN
    gate_up = (torch.randn(held, 2 * inner, width, device=device) / 4).to(dtype)
    down = (torch.randn(held, width, inner, device=device) / 4).to(dtype)
    gate_up[[e for e in range(held) if e not in expert.flatten().tolist()]] = NAN  # unchosen weights are not read
    out = torch.full((rows, width), NAN, dtype=dtype, device=device)
    tile = moe.Tile(32, 32, 4, 2)
    moe.experts(x, found, gate_up, down, out, tile, tile)
    wanted = plain.experts(x.double(), weight, expert, gate_up.double(), down.double())
    assert (out.double() - wanted).norm() <= (2e-6 if dtype == torch.float32 else 3e-3) * wanted.norm()
    assert (out[(expert < 0).all(-1)] == 0).all()


@pytest.mark.parametrize("limit, alpha, biased", [(0.5, None, False), (0.5, 1.7, True), (None, None, True)])
@pytest.mark.parametrize("case", ["few pairs", "one kernel"])
def check_experts_with_limits_and_biases(
    case: str, limit: float | None, alpha: float | None, biased: bool, device: torch.device
) -> None:
    rows, _, held = CASES[case][0], CASES[case][1], CASES[case][5]
    found, weight, expert = routed(*CASES[case], device)
    width, inner = 40, 24
    x = torch.randn(rows, width, device=device)
    gate_up, down = (
        torch.randn(held, 2 * inner, width, device=device) / 4,
        torch.randn(held, width, inner, device=device),
    )
    biases = [torch.randn(held, n, device=device) if biased else None for n in (2 * inner, width)]
    tile = moe.Tile(32, 32, 4, 2)
    out = moe.experts(x, found, gate_up, down, torch.full_like(x, NAN), tile, tile, limit, alpha, *biases)
    wide = [None if b is None else b.double() for b in biases]
    wanted = plain.experts(x.double(), weight, expert, gate_up.double(), down.double(), limit, alpha, *wide)
    assert (out.double() - wanted).norm() <= 2e-6 * wanted.norm()


def check_a_token_has_the_same_bits_in_any_company(device: torch.device) -> None:
    live = torch.tensor([12], dtype=torch.int32, device=device)
    logits, x = torch.randn(12, 4, device=device), torch.randn(12, 32, device=device)
    gate_up, down = torch.randn(4, 64, 32, device=device), torch.randn(4, 32, 32, device=device)
    moved = torch.randperm(12, device=device)

    def run(logits: Tensor, x: Tensor) -> Tensor:
        return moe.experts(x, kernels.route(logits, 2, True, live, 16), gate_up, down, torch.empty_like(x))

    assert torch.equal(run(logits[moved], x[moved]), run(logits, x)[moved])


def check_what_does_not_fit_is_refused(device: torch.device) -> None:
    found, _, _ = routed(2, 2, 8, 2, 0, 8, device)
    x, out = torch.randn(2, 32, device=device), torch.empty(2, 32, device=device)
    gate_up, down = torch.randn(8, 64, 32, device=device), torch.randn(8, 32, 32, device=device)
    with pytest.raises(ValueError, match="gate_up"):
        moe.experts(x, found, gate_up[:, :32], down, out)
    with pytest.raises(ValueError, match="must be alike"):
        moe.experts(x, found, gate_up.half(), down, out)
    with pytest.raises(ValueError, match="contiguous"):
        moe.experts(x, found, gate_up.transpose(1, 2).contiguous().transpose(1, 2), down, out)
