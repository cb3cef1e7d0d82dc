"""GPT-OSS (arXiv 2508.10925): alternating window and full attention, sinks, biases everywhere, experts in MXFP4."""

from __future__ import annotations

from dataclasses import dataclass

from weft.engine.models.config_json.common_fields import FULL, SLIDING, check_layer_types, common_fields
from weft.engine.models.config_json.fields import MAX_EXPERTS, Fields
from weft.engine.models.families.shared_layers import ExpertsConfig, heads_of
from weft.engine.models.layers.attention import Attention, Heads
from weft.engine.models.layers.basic import Builder, Layer
from weft.engine.models.layers.moe import MoEConfig
from weft.engine.models.layers.routing import Routing
from weft.engine.models.weights.expert_sources import ExpertStorage


@dataclass(frozen=True)
class GptOssConfig(ExpertsConfig):
    """heads: one per layer."""

    heads: tuple[Heads, ...]

    def attention(self, b: Builder, path: str, index: int) -> Layer:
        return Attention(b, f"{path}.self_attn", self.hidden_size, self.heads[index])


def read(fields: Fields) -> GptOssConfig:
    """Read a config of GPT-OSS. Raises ModelError."""
    chosen = fields.size("num_experts_per_tok")
    fields.only("experts_per_token", chosen)
    fields.get("initial_context_length")  # equal to the rotary embedding's
    kinds = fields.items("layer_types", str)
    check_layer_types(fields, kinds, FULL, SLIDING)
    window = fields.size("sliding_window") if SLIDING in kinds else None
    fields.get("sliding_window")
    common = common_fields(fields, fields.size("head_dim"))
    bias = fields.flag("attention_bias", True)
    packed = fields.section("quantization_config").get("quant_method") == "mxfp4"
    full, sliding = (heads_of(common, window=size, bias=bias, output_bias=bias, sinks=True) for size in (None, window))
    return GptOssConfig(
        **common,
        heads=tuple(full if kind == FULL else sliding for kind in kinds),
        moe=MoEConfig(
            fields.size("num_local_experts", high=MAX_EXPERTS),
            fields.size("intermediate_size"),
            Routing(chosen, renormalise=True, offset=True),
            # MXFP4 stores an output's inputs contiguously, since they share scales; other formats store an input's
            # outputs so.
            stored=ExpertStorage("router", layout="interleaved" if packed else "interleaved_transposed"),
            limit=fields.number("swiglu_limit", 7.0),
            alpha=fields.number("swiglu_alpha", 1.702),
            bias=True,
        ),
    )
