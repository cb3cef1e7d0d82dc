"""MiniMax-M2 and its successors up to M2.7: grouped-query attention with norms over all heads, and experts."""

from __future__ import annotations

from weft.engine.models.config_json.common_fields import common_fields
from weft.engine.models.config_json.fields import MAX_EXPERTS, Fields, ModelError
from weft.engine.models.families.shared_layers import GroupedQueryConfig, heads_of
from weft.engine.models.layers.attention import HeadNorms
from weft.engine.models.layers.moe import MoEConfig
from weft.engine.models.layers.routing import Routing
from weft.engine.models.weights.expert_sources import ExpertStorage


def read(fields: Fields) -> GroupedQueryConfig:
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
    rotated = fields.size("rotary_dim", dim, high=dim)
    # Newer versions of transformers derive it from rotary_dim.
    part = fields.section("rope_parameters").number("partial_rotary_factor", rotated / dim, high=1.0)
    if fields.get("rotary_dim", int(dim * part)) != int(dim * part):
        raise ModelError(f"rotary_dim and partial_rotary_factor={part} differ for heads of {dim} elements")
    common = common_fields(fields, dim, part=part)
    return GroupedQueryConfig(
        **common,
        heads=heads_of(common, norms=HeadNorms(common["rms_norm_eps"], whole=True)),
        moe=MoEConfig(
            fields.size("num_local_experts", high=MAX_EXPERTS),
            fields.size("intermediate_size"),
            Routing(fields.size("num_experts_per_tok"), score="sigmoid", bias=True, renormalise=True, wide=True),
            stored=ExpertStorage(bias="e_score_correction_bias", layout="per_expert_w123", block="block_sparse_moe"),
        ),
    )
