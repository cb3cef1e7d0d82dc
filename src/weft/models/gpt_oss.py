"""GPT-OSS (arXiv 2508.10925): windows and full attention by turns, sinks, biases everywhere, experts in MXFP4."""

from __future__ import annotations

from dataclasses import dataclass

from weft.models.attention import Attention, Heads
from weft.models.config import Fields, ModelConfig, ModelError, common_fields
from weft.models.decoder import Decoder, DecoderLayer
from weft.models.layers import Builder
from weft.models.moe import SparseMoE, Stored
from weft.models.routing import Routing

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class GptOssConfig(ModelConfig):
    """Widths in elements. heads: of each layer. limit, alpha: of the experts (`weft.models.moe.gated`)."""

    heads: tuple[Heads, ...]
    num_experts: int
    intermediate_size: int
    routing: Routing
    limit: float
    alpha: float

    def build(self, b: Builder) -> Decoder:
        return Decoder(b, self, [_layer(b, f"model.layers.{i}", self, i) for i in range(self.num_layers)])


def read(fields: Fields) -> GptOssConfig:
    """Raises ModelError."""
    chosen = fields.need("num_experts_per_tok")
    fields.only("experts_per_token", chosen)
    fields.get("initial_context_length")  # the same as rotary's
    kinds, window = fields.need("layer_types"), fields.get("sliding_window")
    for kind in kinds:
        if kind not in (FULL, SLIDING):
            raise ModelError(
                f"layer type {kind!r} is not supported for {fields.family!r}; supported: {FULL}, {SLIDING}"
            )
    common = common_fields(fields, fields.need("head_dim"))
    bias = fields.get("attention_bias", True)
    full, sliding = (
        Heads(
            common["num_heads"],
            common["num_kv_heads"],
            common["head_dim"],
            window=size,
            bias=bias,
            output_bias=bias,
            sinks=True,
        )
        for size in (None, window)
    )
    return GptOssConfig(
        **common,
        heads=tuple(full if kind == FULL else sliding for kind in kinds),
        num_experts=fields.need("num_local_experts"),
        intermediate_size=fields.need("intermediate_size"),
        routing=Routing(chosen, renormalise=True, offset=True),
        limit=float(fields.get("swiglu_limit", 7.0)),
        alpha=float(fields.get("swiglu_alpha", 1.702)),
    )


def _layer(b: Builder, path: str, c: GptOssConfig, index: int) -> DecoderLayer:
    mlp = SparseMoE(
        b,
        f"{path}.mlp",
        c.hidden_size,
        experts=c.num_experts,
        inner=c.intermediate_size,
        routing=c.routing,
        # In MXFP4 an output's inputs lie together, as they share scales; otherwise an input's outputs.
        stored=Stored("router", form="plain turns" if c.storage.mxfp4 else "turns"),
        limit=c.limit,
        alpha=c.alpha,
        expert_bias=True,
    )
    return DecoderLayer(b, path, c, Attention(b, f"{path}.self_attn", c.hidden_size, c.heads[index]), mlp)
