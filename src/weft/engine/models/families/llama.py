"""Llama 2 and 3 (arXiv 2407.21783), Mistral (arXiv 2310.06825) and Mixtral (arXiv 2401.04088)."""

from __future__ import annotations

from dataclasses import dataclass

from weft.engine.models.config_json.common_fields import FULL, check_layer_types, common_fields
from weft.engine.models.config_json.fields import MAX_EXPERTS, Fields, ModelError
from weft.engine.models.families.eagle3 import is_eagle3
from weft.engine.models.layers.attention import Attention, Heads
from weft.engine.models.layers.basic import Builder
from weft.engine.models.layers.decoder import DecoderConfig, DecoderLayer
from weft.engine.models.layers.mlp import FeedForward, GatedMLP
from weft.engine.models.layers.moe import MoEConfig, SparseMoE
from weft.engine.models.layers.routing import Routing
from weft.engine.models.weights.expert_sources import ExpertStorage


@dataclass(frozen=True)
class LlamaConfig(DecoderConfig):
    """Widths in elements. heads: heads of every layer. intermediate_size: inner features of the MLP. moe: experts of
    Mixtral's layers, which replace the MLP."""

    heads: Heads
    intermediate_size: int
    moe: MoEConfig | None

    def layer(self, b: Builder, path: str, index: int) -> DecoderLayer:
        mlp: FeedForward
        if self.moe is not None:
            mlp = SparseMoE(b, f"{path}.block_sparse_moe", self.hidden_size, self.moe)
        else:
            mlp = GatedMLP(b, f"{path}.mlp", self.hidden_size, self.intermediate_size)
        return DecoderLayer(b, path, self, Attention(b, f"{path}.self_attn", self.hidden_size, self.heads), mlp)


def read(fields: Fields) -> LlamaConfig:
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
        stored = ExpertStorage(layout="per_expert_w123")
        moe = MoEConfig(fields.size("num_local_experts", high=MAX_EXPERTS), inner, routing, stored=stored)
    dim = fields.size("head_dim", fields.size("hidden_size") // fields.size("num_attention_heads"))
    common = common_fields(fields, dim)
    return LlamaConfig(
        **common,
        heads=Heads(common["num_heads"], common["num_kv_heads"], dim, window=window, bias=bias, output_bias=bias),
        intermediate_size=inner,
        moe=moe,
    )
