"""GLM-4.5 and GLM-4.5-Air (arXiv 2508.06471): grouped-query attention that rotates half of each head, and experts."""

from __future__ import annotations

from dataclasses import dataclass

from weft.engine.models.config_json.common_fields import common_fields, rope_of
from weft.engine.models.config_json.fields import Fields
from weft.engine.models.families.first_dense import FirstDenseConfig, first_dense_fields
from weft.engine.models.layers.attention import Attention, HeadNorms, Heads
from weft.engine.models.layers.basic import Builder, Layer


@dataclass(frozen=True)
class GlmConfig(FirstDenseConfig):
    """heads: heads of each layer."""

    heads: Heads

    def attention(self, b: Builder, path: str) -> Layer:
        return Attention(b, path, self.hidden_size, self.heads)


def read(fields: Fields) -> GlmConfig:
    """Read a config of GLM-4.5, GLM-4.5-Air or GLM-4.6. Raises ModelError."""
    fields.get("num_mtp_layers")  # a version of num_nextn_predict_layers
    dim = fields.size("head_dim", fields.size("hidden_size") // fields.size("num_attention_heads"))
    parameters = fields.section("rope_parameters")
    # transformers has filled in a missing value, but not null.
    part = parameters.number("partial_rotary_factor", 1.0, high=1.0)
    fields.only("partial_rotary_factor", part)
    rope = rope_of(parameters, int(dim * part), fields.size("max_position_embeddings"), part=part)
    common = common_fields(fields, dim, rope=rope)
    norms = HeadNorms(common["rms_norm_eps"]) if fields.flag("use_qk_norm") else None
    bias = fields.flag("attention_bias")
    return GlmConfig(
        **common,
        **first_dense_fields(fields, sigmoid=True),
        heads=Heads(common["num_heads"], common["num_kv_heads"], dim, norms, bias=bias),
    )
