"""Llama 2 and 3 (arXiv 2407.21783), Mistral (arXiv 2310.06825) and Mixtral (arXiv 2401.04088)."""

from __future__ import annotations

from weft.engine.models.config_json.common_fields import FULL, check_layer_types, common_fields
from weft.engine.models.config_json.fields import MAX_EXPERTS, Fields, ModelError
from weft.engine.models.families.eagle3 import is_eagle3
from weft.engine.models.families.shared_layers import GroupedQueryConfig, heads_of
from weft.engine.models.layers.moe import MoEConfig
from weft.engine.models.layers.routing import Routing
from weft.engine.models.weights.expert_sources import ExpertStorage


def read(fields: Fields) -> GroupedQueryConfig:
    """Read a config of Llama, Mistral or Mixtral. Raises ModelError."""
    if is_eagle3(fields):
        raise ModelError("an EAGLE-3 head is no model: name it by --draft-model, with --speculative eagle3")
    bias, window, moe, inner = False, None, None, fields.size("intermediate_size")
    if fields.family == "llama":
        bias = fields.flag("attention_bias")
        fields.only("mlp_bias", False)
    elif fields.get("sliding_window") is not None:
        window = fields.size("sliding_window")
    check_layer_types(fields, fields.items("layer_types", str, ()), FULL)
    if fields.family == "mixtral":
        routing = Routing(fields.size("num_experts_per_tok"), renormalise=True)
        stored = ExpertStorage(layout="per_expert_w123", block="block_sparse_moe")
        moe = MoEConfig(fields.size("num_local_experts", high=MAX_EXPERTS), inner, routing, stored=stored)
    common = common_fields(fields)
    heads = heads_of(common, window=window, bias=bias, output_bias=bias)
    return GroupedQueryConfig(**common, heads=heads, intermediate_size=inner, moe=moe)
