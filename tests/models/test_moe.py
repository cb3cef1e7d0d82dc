"""The experts on a CPU, against the definition."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from weft.engine.kernels import ops
from weft.engine.models.layers.basic import Builder
from weft.engine.models.layers.moe import Experts, MoEConfig
from weft.engine.models.layers.routing import Routing
from weft.planner.spec import LayoutError, Mesh


@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_experts_elsewhere_add_nothing(tokens: int) -> None:
    """Experts 3 … 6 of ten are here; some tokens have none of theirs here, some experts no token."""
    torch.manual_seed(tokens)
    x = torch.randn(tokens, 16)
    gate_up, down = torch.randn(4, 16, 16), torch.randn(4, 16, 8)
    expert = torch.stack([torch.randperm(10)[:3] for _ in range(tokens)])
    expert[expert == 5] = 0
    probability = torch.rand(tokens, 3)
    out = torch.full((tokens, 16), torch.nan)
    routed = ops.route_chosen(probability, expert, None, range(3, 7), False)
    assert ops.experts(x, routed, gate_up, down, out) is out
    wanted = torch.zeros(tokens, 16, dtype=torch.float64)
    for t in range(tokens):
        for e, p in zip(expert[t].tolist(), probability[t].double(), strict=True):
            if 3 <= e < 7:
                gate, up = (gate_up[e - 3].double() @ x[t].double()).chunk(2)
                wanted[t] += p * (down[e - 3].double() @ (F.silu(gate) * up))
    assert torch.allclose(out.double(), wanted, atol=1e-4)


def test_sizes_that_gpus_do_not_take_are_refused_when_built() -> None:
    builder = Builder(Mesh(1, 4, 1, 4), 0, torch.bfloat16, torch.device("cuda"))
    with pytest.raises(
        LayoutError, match=r"experts: 12 inner features a rank .* multiples of 8; choose a smaller moe_tp"
    ):
        Experts(builder, "experts", 64, MoEConfig(4, 48, Routing(1)))
