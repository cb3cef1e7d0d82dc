"""Qwen2, Qwen2.5, Qwen3, Qwen2-MoE and Qwen3-MoE: one decoder with a few differences between its layers."""

from __future__ import annotations

from dataclasses import dataclass

from weft.engine.models.config_json.common_fields import FULL, check_layer_types, common_fields
from weft.engine.models.config_json.fields import MAX_EXPERTS, MAX_LAYERS, Fields
from weft.engine.models.layers.attention import Attention, HeadNorms, Heads
from weft.engine.models.layers.basic import Builder
from weft.engine.models.layers.decoder import DecoderConfig, DecoderLayer
from weft.engine.models.layers.mlp import FeedForward, GatedMLP
from weft.engine.models.layers.moe import MoEConfig, SparseMoE
from weft.engine.models.layers.routing import Routing


@dataclass(frozen=True)
class QwenConfig(DecoderConfig):
    """Widths in elements. bias: biases of query, key and value. output_bias: bias of attention's output. head_norms:
    norms of queries and keys per head. moe_layers: layers with experts (`moe`) instead of an MLP."""

    bias: bool
    output_bias: bool
    head_norms: bool
    intermediate_size: int
    moe_layers: frozenset[int]
    moe: MoEConfig | None

    def layer(self, b: Builder, path: str, index: int) -> DecoderLayer:
        mlp: FeedForward
        if self.moe is not None and index in self.moe_layers:
            mlp = SparseMoE(b, f"{path}.mlp", self.hidden_size, self.moe)
        else:
            mlp = GatedMLP(b, f"{path}.mlp", self.hidden_size, self.intermediate_size)
        norms = HeadNorms(self.rms_norm_eps) if self.head_norms else None
        heads = Heads(
            self.num_heads, self.num_kv_heads, self.head_dim, norms, bias=self.bias, output_bias=self.output_bias
        )
        return DecoderLayer(b, path, self, Attention(b, f"{path}.self_attn", self.hidden_size, heads), mlp)


def read(fields: Fields) -> QwenConfig:
    """Read a config of any of these; `_moe` in the model type means experts. Raises ModelError."""
    fields.only("use_sliding_window", False)
    fields.get("sliding_window"), fields.get("max_window_layers")  # no effect without use_sliding_window
    drafts = fields.size("mtp_num_hidden_layers", 0, low=0, high=MAX_LAYERS)
    layers = range(fields.size("num_hidden_layers", high=MAX_LAYERS) + drafts)
    check_layer_types(fields, fields.items("layer_types", str, ()), FULL)
    qwen3, has_experts = not fields.family.startswith("qwen2"), fields.family.endswith("_moe")
    bias = fields.flag("attention_bias") if qwen3 else fields.flag("qkv_bias", True) if has_experts else True
    common = common_fields(
        fields, fields.size("head_dim", fields.size("hidden_size") // fields.size("num_attention_heads"))
    )
    counted = "num_local_experts" if qwen3 else "num_experts"
    experts = fields.size(counted, low=0, high=MAX_EXPERTS) if has_experts else 0
    dense = fields.items("mlp_only_layers", int, ()) if has_experts else ()
    interval = fields.size("decoder_sparse_step", 1) if has_experts else 1
    moe = None
    if has_experts:
        routing = Routing(fields.size("num_experts_per_tok"), renormalise=fields.flag("norm_topk_prob"))
        inner = fields.size("moe_intermediate_size")
        shared = 0 if qwen3 else fields.size("shared_expert_intermediate_size", low=0)
        moe = MoEConfig(experts, inner, routing, shared) if experts else None
    return QwenConfig(
        **common,
        bias=bias,
        output_bias=bias and qwen3,
        head_norms=qwen3,
        draft_layers=drafts,
        intermediate_size=fields.size("intermediate_size"),
        moe_layers=frozenset(i for i in layers if experts and i not in dense and (i + 1) % interval == 0),
        moe=moe,
    )
