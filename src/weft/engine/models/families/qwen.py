"""Qwen2, Qwen2.5, Qwen3, Qwen2-MoE and Qwen3-MoE: one decoder with a few differences between its layers."""

from __future__ import annotations

from weft.engine.models.config_json.common_fields import FULL, check_layer_types, common_fields
from weft.engine.models.config_json.fields import MAX_EXPERTS, MAX_LAYERS, Fields
from weft.engine.models.families.shared_layers import GroupedQueryConfig, heads_of
from weft.engine.models.layers.attention import HeadNorms
from weft.engine.models.layers.moe import MoEConfig
from weft.engine.models.layers.routing import Routing


def read(fields: Fields) -> GroupedQueryConfig:
    """Read a config of any of these; `_moe` in the model type means experts. Raises ModelError."""
    fields.only("use_sliding_window", False)
    fields.get("sliding_window"), fields.get("max_window_layers")  # no effect without use_sliding_window
    drafts = fields.size("mtp_num_hidden_layers", 0, low=0, high=MAX_LAYERS)
    layers = range(fields.size("num_hidden_layers", high=MAX_LAYERS) + drafts)
    check_layer_types(fields, fields.items("layer_types", str, ()), FULL)
    qwen3, has_experts = not fields.family.startswith("qwen2"), fields.family.endswith("_moe")
    bias = fields.flag("attention_bias") if qwen3 else fields.flag("qkv_bias", True) if has_experts else True
    common = common_fields(fields)
    moe, mlp_layers = None, frozenset[int]()
    if has_experts:
        experts = fields.size("num_local_experts" if qwen3 else "num_experts", low=0, high=MAX_EXPERTS)
        dense, interval = fields.items("mlp_only_layers", int, ()), fields.size("decoder_sparse_step", 1)
        mlp_layers = frozenset(i for i in layers if i in dense or (i + 1) % interval)
        routing = Routing(fields.size("num_experts_per_tok"), renormalise=fields.flag("norm_topk_prob"))
        inner = fields.size("moe_intermediate_size")
        shared = 0 if qwen3 else fields.size("shared_expert_intermediate_size", low=0)
        moe = MoEConfig(experts, inner, routing, shared) if experts else None
    norms = HeadNorms(common["rms_norm_eps"]) if qwen3 else None
    return GroupedQueryConfig(
        **common,
        heads=heads_of(common, norms=norms, bias=bias, output_bias=bias and qwen3),
        draft_layers=drafts,
        intermediate_size=fields.size("intermediate_size"),
        mlp_layers=mlp_layers,
        moe=moe,
    )
