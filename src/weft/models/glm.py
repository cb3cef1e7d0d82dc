"""GLM-4.5 and GLM-4.5-Air (arXiv 2508.06471): grouped-query attention that turns half of each head, and experts."""

from __future__ import annotations

from dataclasses import dataclass

from weft.models.attention import Attention, HeadNorms, Heads
from weft.models.config import Fields, ModelConfig, common_fields, rope_of
from weft.models.decoder import Decoder, DecoderLayer
from weft.models.layers import Builder
from weft.models.moe import FeedForward, GatedMLP, SparseMoE, Stored
from weft.models.routing import Routing


@dataclass(frozen=True)
class GlmConfig(ModelConfig):
    """Widths in elements. dense_layers: the first so many have an MLP instead of experts. shared_size: inner features
    of the shared experts, taken as one.
    """

    heads: Heads
    intermediate_size: int
    dense_layers: int
    num_experts: int
    moe_intermediate_size: int
    shared_size: int
    routing: Routing

    def build(self, b: Builder) -> Decoder:
        return Decoder(b, self, [_layer(b, f"model.layers.{i}", self, i) for i in range(self.num_layers)])


def read(fields: Fields) -> GlmConfig:
    """Reads a config of GLM-4.5, GLM-4.5-Air or GLM-4.6. Raises ModelError."""
    fields.get("num_nextn_predict_layers"), fields.get("num_mtp_layers")  # they only draft tokens, and are not run
    dim = fields.get("head_dim", fields.need("hidden_size") // fields.need("num_attention_heads"))
    parameters = dict(fields.need("rope_parameters"))
    part = parameters.pop("partial_rotary_factor", 0.5)
    fields.only("partial_rotary_factor", part)
    rope = rope_of(parameters, int(dim * part), fields.need("max_position_embeddings"))
    common = common_fields(fields, dim, rope=rope)
    norms = HeadNorms(common["rms_norm_eps"]) if fields.get("use_qk_norm", False) else None
    bias = fields.get("attention_bias", False)
    inner = fields.need("moe_intermediate_size")
    return GlmConfig(
        **common,
        heads=Heads(common["num_heads"], common["num_kv_heads"], dim, norms, bias=bias),
        intermediate_size=fields.need("intermediate_size"),
        dense_layers=fields.get("first_k_dense_replace", 0),
        num_experts=fields.need("n_routed_experts"),
        moe_intermediate_size=inner,
        shared_size=inner * fields.get("n_shared_experts", 0),
        routing=Routing(
            fields.need("num_experts_per_tok"),
            score="sigmoid",
            groups=fields.get("n_group", 1),
            top_groups=fields.get("topk_group", 1),
            group_best=2,
            bias=True,
            renormalise=fields.get("norm_topk_prob", True),
            scale=fields.get("routed_scaling_factor", 1.0),
            wide=True,
        ),
    )


def _layer(b: Builder, path: str, c: GlmConfig, index: int) -> DecoderLayer:
    mlp: FeedForward
    if index < c.dense_layers:
        mlp = GatedMLP(b, f"{path}.mlp", c.hidden_size, c.intermediate_size)
    else:
        mlp = SparseMoE(
            b,
            f"{path}.mlp",
            c.hidden_size,
            experts=c.num_experts,
            inner=c.moe_intermediate_size,
            routing=c.routing,
            shared=c.shared_size,
            shared_gate=False,
            stored=Stored(shared="shared_experts"),
        )
    return DecoderLayer(b, path, c, Attention(b, f"{path}.self_attn", c.hidden_size, c.heads), mlp)
