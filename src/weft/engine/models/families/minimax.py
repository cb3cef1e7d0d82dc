"""MiniMax-M2 and its successors up to M2.7: grouped-query attention with norms over all heads, and experts."""

from __future__ import annotations

from dataclasses import dataclass

from weft.engine.models.config_json.common_fields import common_fields, rope_of
from weft.engine.models.config_json.fields import MAX_EXPERTS, Fields, ModelError
from weft.engine.models.layers.attention import Attention, HeadNorms, Heads
from weft.engine.models.layers.basic import Builder
from weft.engine.models.layers.decoder import DecoderConfig, DecoderLayer
from weft.engine.models.layers.moe import MoEConfig, SparseMoE
from weft.engine.models.layers.routing import Routing
from weft.engine.models.weights.expert_sources import ExpertStorage


@dataclass(frozen=True)
class MiniMaxConfig(DecoderConfig):
    """heads, moe: shared by all layers."""

    heads: Heads
    moe: MoEConfig

    def layer(self, b: Builder, path: str, index: int) -> DecoderLayer:
        mlp = SparseMoE(b, f"{path}.block_sparse_moe", self.hidden_size, self.moe)
        return DecoderLayer(b, path, self, Attention(b, f"{path}.self_attn", self.hidden_size, self.heads), mlp)


def read(fields: Fields) -> MiniMaxConfig:
    """Read a config of MiniMax-M2. Raises ModelError."""
    for name in ("use_mtp", "num_mtp_modules", "mtp_transformer_layers"):
        fields.get(name)  # draft layers, which are not run
    if set(kinds := fields.items("attn_type_list", int, ())) - {1}:
        raise ModelError(f"attn_type_list={kinds} is not supported for {fields.family!r}; supported: 1, full attention")
    fields.only("shared_intermediate_size", 0)
    fields.only("scoring_func", "sigmoid")
    fields.only("qk_norm_type", "per_layer")
    for name in ("use_qk_norm", "use_routing_bias"):
        fields.only(name, True)
    dim = fields.size("head_dim")
    parameters = fields.section("rope_parameters")
    rotated = fields.size("rotary_dim", dim, high=dim)
    # Newer versions of transformers derive it from rotary_dim.
    part = parameters.number("partial_rotary_factor", rotated / dim, high=1.0)
    if fields.get("rotary_dim", int(dim * part)) != int(dim * part):
        raise ModelError(f"rotary_dim and partial_rotary_factor={part} differ for heads of {dim} elements")
    rope = rope_of(parameters, int(dim * part), fields.size("max_position_embeddings"), part=part)
    common = common_fields(fields, dim, rope=rope)
    return MiniMaxConfig(
        **common,
        heads=Heads(common["num_heads"], common["num_kv_heads"], dim, HeadNorms(common["rms_norm_eps"], whole=True)),
        moe=MoEConfig(
            fields.size("num_local_experts", high=MAX_EXPERTS),
            fields.size("intermediate_size"),
            Routing(fields.size("num_experts_per_tok"), score="sigmoid", bias=True, renormalise=True, wide=True),
            stored=ExpertStorage(bias="e_score_correction_bias", layout="per_expert_w123"),
        ),
    )
