"""GLM-4.5 and GLM-4.5-Air (arXiv 2508.06471): grouped-query attention that rotates half of each head, and experts."""

from __future__ import annotations

from dataclasses import dataclass

from weft.engine.models.config_json.common_fields import common_fields
from weft.engine.models.config_json.fields import Fields
from weft.engine.models.families.shared_layers import (
    FirstDenseConfig,
    GroupedQueryConfig,
    first_dense_fields,
    heads_of,
)
from weft.engine.models.layers.attention import HeadNorms


@dataclass(frozen=True)
class GlmConfig(FirstDenseConfig, GroupedQueryConfig):
    """DeepSeek's experts with attention of its own."""


def read(fields: Fields) -> GlmConfig:
    """Read a config of GLM-4.5, GLM-4.5-Air or GLM-4.6. Raises ModelError."""
    fields.get("num_mtp_layers")  # a version of num_nextn_predict_layers
    # transformers has filled in a missing value, but not null.
    part = fields.section("rope_parameters").number("partial_rotary_factor", 1.0, high=1.0)
    fields.only("partial_rotary_factor", part)
    common = common_fields(fields, part=part)
    norms = HeadNorms(common["rms_norm_eps"]) if fields.flag("use_qk_norm") else None
    heads = heads_of(common, norms=norms, bias=fields.flag("attention_bias"))
    return GlmConfig(**common, **first_dense_fields(fields, sigmoid=True), heads=heads)
