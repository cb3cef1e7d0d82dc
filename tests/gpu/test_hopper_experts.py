"""Hopper's kernels of the routed experts in FP8 give the bits of Triton's, for ragged, half empty and empty tiles."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from weft.engine.kernels import hopper_experts
from weft.engine.kernels.triton import fused_experts
from weft.engine.kernels.triton.experts_tiles import float8_tiles_of
from weft.engine.kernels.triton.route import sort_pairs
from weft.kernels.float8 import FLOAT8, Fp8Weight
from weft.kernels.triton import float8_rows

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
ROWS, WIDTH, INNER = 1100, 512, 384
COUNTS = {
    "ragged": [1, 64, 65, 0, 127, 129, 128, 300],
    "one expert has all rows": [0, 0, 1000, 0],
    "few rows of many": [3, 0, 2],
    "no expert has a row": [0, 0],
}


def weight(*shape: int) -> Fp8Weight:
    """Return made-up values, some of which are large, with scales of about 1."""
    values = torch.randn(shape, device="cuda") / shape[-1] ** 0.5
    values.view(-1)[::1001] *= 16
    scales = torch.rand(shape[0], shape[1] // 128, shape[2] // 128, device="cuda") + 0.5
    return Fp8Weight(values.to(FLOAT8), scales, (128, 128))


@pytest.mark.parametrize("limit", [None, 0.3])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_bits_are_those_of_triton(counts: list[int], k: int, limit: float | None) -> None:
    """Rows without a pair hold NaN, and so do outputs before. An expert without a row has NaN scales."""
    torch.manual_seed(sum(counts) + k)
    pairs = torch.tensor([expert for expert, n in enumerate(counts) for _ in range(n)], dtype=torch.int64)
    expert = torch.full((ROWS * k,), -1)
    expert[torch.randperm(ROWS * k)[: len(pairs)]] = pairs
    expert = expert.view(ROWS, k).int().cuda()
    share, held = torch.rand(ROWS, k, device="cuda"), len(counts)
    x = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)
    x[(expert < 0).all(-1)] = torch.nan
    gate_up, down = weight(held, 2 * INNER, WIDTH), weight(held, WIDTH, INNER)
    for each in (gate_up, down):
        each.scales[[not n for n in counts]] = torch.nan
    rows = float8_rows.quantise(x, 128)
    ours, theirs = (sort_pairs(share, expert, held, tile) for tile in (hopper_experts.TILE_ROWS, 64))
    outs = [torch.full_like(x, torch.nan) for _ in range(2)]
    assert hopper_experts.takes(rows, ours, gate_up, down, outs[0])
    found = fused_experts.experts(rows, ours, gate_up, down, outs[0], limit=limit)
    wanted = fused_experts.experts(rows, theirs, gate_up, down, outs[1], *float8_tiles_of(ROWS), limit=limit)
    assert torch.equal(found, wanted) and found.isfinite().all() and bool(found.any()) == any(counts)
    assert not found[(expert < 0).all(-1)].any()


def test_steps_of_a_prompt_choose_these_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured graph gives the same bits after its inputs change."""
    calls: list[int] = []
    outputs = hopper_experts.pairs_outputs
    monkeypatch.setattr(hopper_experts, "pairs_outputs", lambda *given: calls.append(1) or outputs(*given))
    gate_up, down = weight(4, 2 * INNER, WIDTH), weight(4, WIDTH, INNER)
    x, out = (torch.empty(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    expert = torch.empty(ROWS, 2, device="cuda", dtype=torch.int32)
    share = torch.empty(ROWS, 2, device="cuda")

    def run() -> Tensor:
        routed = fused_experts.route_chosen(share, expert, None, range(4), True)
        return fused_experts.experts(x, routed, gate_up, down, out)

    def fill(seed: int) -> None:
        torch.manual_seed(seed)
        x.normal_(), share.uniform_(), expert.random_(-1, 4)

    fill(0), run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for seed in (1, 2):
        fill(seed)
        wanted = run().clone()
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, wanted)
    assert len(calls) == 4
