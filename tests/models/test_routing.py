"""Routers and rotary embeddings of DeepSeek's models against transformers' own modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

from weft.engine.kernels.model_reference import choose
from weft.engine.models.config_json.common_fields import Rope
from weft.engine.models.layers.basic import Builder
from weft.engine.models.layers.rotary import Rotary
from weft.engine.models.layers.routing import Router, Routing
from weft.planner.spec import Mesh, Rows
from weft.stream.hidden import Hidden

EXPERTS = 16
GROUPED: dict[str, Any] = dict(n_group=4, topk_group=2, num_experts_per_tok=5, routed_scaling_factor=2.5)
CASES = {
    "v2 greedy": (DeepseekV2Config(num_experts_per_tok=5, n_routed_experts=EXPERTS), Routing(5, wide=True)),
    "v2 grouped": (
        DeepseekV2Config(n_routed_experts=EXPERTS, topk_method="group_limited_greedy", **GROUPED),
        Routing(5, groups=4, top_groups=2, scale=2.5, wide=True),
    ),
    "v3": (
        DeepseekV3Config(n_routed_experts=EXPERTS, norm_topk_prob=True, **GROUPED),
        Routing(5, "sigmoid", 4, 2, 2, bias=True, renormalise=True, scale=2.5, wide=True),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_routers_are_transformers(name: str) -> None:
    config, routing = CASES[name]
    config.hidden_size = 24
    theirs = (v3.DeepseekV3TopkRouter if name == "v3" else v2.DeepseekV2TopkRouter)(config)
    b = Builder(Mesh(), 0, torch.bfloat16, torch.device("cpu"))
    router = Router(b, "gate", 24, EXPERTS, routing)
    torch.manual_seed(2)
    router.weight.data.normal_()
    theirs.weight.data = router.weight.data
    if routing.bias:
        router.bias.data.normal_(0, 0.3)
        theirs.e_score_correction_bias.data = router.bias.data
    x = torch.randn(300, 24).bfloat16()
    weight, expert = router.choose(Hidden(x, b.mesh.placement(Rows.WORLD), b.mesh, "x"))
    with torch.no_grad():
        _, wanted_weight, wanted_expert = theirs(x)

    def dense(weight: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        return torch.zeros(300, EXPERTS).scatter_(1, expert, weight.float())

    assert (expert.sort().values == wanted_expert.sort().values).all()
    assert torch.allclose(dense(weight, expert), dense(wanted_weight.bfloat16(), wanted_expert), rtol=2**-7)
    if routing.groups > 1:
        assert all(len({e // 4 for e in row}) <= 2 for row in expert.tolist())


def test_a_bias_chooses_and_does_not_weigh() -> None:
    routing = Routing(1, "sigmoid", bias=True)
    weight, expert = choose(torch.tensor([[0.0, 1.0]]), routing, bias=torch.tensor([5.0, 0.0]))
    assert expert.item() == 0 and weight.item() == 0.5


def test_interleaved_rotary_is_transformers() -> None:
    parameters = dict(rope_type="yarn", rope_theta=1e4, factor=40.0, beta_fast=32.0, beta_slow=1.0)
    parameters |= dict(mscale=0.707, mscale_all_dim=1.0, original_max_position_embeddings=64)
    config = DeepseekV2Config(qk_rope_head_dim=16, rope_parameters=parameters, max_position_embeddings=2560)
    rope = Rope(parameters, 16, 2560, interleaved=True)
    positions = torch.tensor([0, 3, 900, 2559])
    q, k = torch.randn(2, 4, 3, 16).unbind(0)
    with torch.no_grad():
        table = v2.DeepseekV2RotaryEmbedding(config)(q, positions[None])
        wanted = v2.apply_rotary_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], table)
    ours = Rotary(rope, torch.device("cpu"))(positions, torch.float32)
    for x, y in zip((q, k), wanted, strict=True):
        assert torch.allclose(ours(x), y[0].transpose(0, 1), atol=1e-5)
    assert rope.attention_scale() == pytest.approx(v2.yarn_apply_mscale(parameters, 1.0))
    assert Rope({"rope_theta": 1e4}, 16, 64).attention_scale() == 1.0
