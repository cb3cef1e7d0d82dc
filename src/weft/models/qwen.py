"""Qwen2-MoE, Qwen3-MoE and dense Qwen3: one decoder whose layers differ in a few parts."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from weft.attention.backend import HeadSplit
from weft.attention.caches import Caches
from weft.hidden import Hidden
from weft.kv.spec import PagedKV
from weft.models.config import Fields, ModelConfig, ModelError, common_fields
from weft.models.decoder import Decoder, DecoderLayer, on_group_rows
from weft.models.layers import (
    Builder,
    ColumnLinear,
    HeadNorm,
    Layer,
    Out,
    RowLinear,
)
from weft.models.moe import GatedMLP, SparseMoE
from weft.models.rotary import RotaryTable
from weft.models.routing import Routing


@dataclass(frozen=True)
class QwenConfig(ModelConfig):
    """Widths in elements. bias: of query, key and value; output_bias: of attention's output; head_norms: queries and
    keys are normalised head by head. moe_layers: which layers have experts instead of an MLP. shared_expert_size: 0
    where there is none.
    """

    bias: bool
    output_bias: bool
    head_norms: bool
    intermediate_size: int
    moe_layers: frozenset[int]
    num_experts: int
    moe_intermediate_size: int
    shared_expert_size: int
    routing: Routing

    def build(self, b: Builder) -> Decoder:
        return Decoder(b, self, [_layer(b, f"model.layers.{i}", self, i) for i in range(self.num_layers)])


def read(fields: Fields) -> QwenConfig:
    """Reads the config of all three; `_moe` in the name of the family says that it has experts. Raises ModelError."""
    fields.only("use_sliding_window", False)
    fields.get("sliding_window"), fields.get("max_window_layers")  # of no effect without use_sliding_window
    layers = range(fields.need("num_hidden_layers"))
    for kind in fields.get("layer_types", ()):
        if kind != "full_attention":
            raise ModelError(f"layer type {kind!r} is not supported for {fields.family!r}; supported: full_attention")
    qwen3, moe = not fields.family.startswith("qwen2"), fields.family.endswith("_moe")
    bias = bool(fields.get("attention_bias" if qwen3 else "qkv_bias", not qwen3))
    common = common_fields(
        fields, fields.get("head_dim", fields.need("hidden_size") // fields.need("num_attention_heads"))
    )
    dense = fields.get("mlp_only_layers", ()) if moe else layers
    every = fields.get("decoder_sparse_step", 1) if moe else 1
    return QwenConfig(
        **common,
        bias=bias,
        output_bias=bias and qwen3,
        head_norms=qwen3,
        intermediate_size=fields.need("intermediate_size"),
        moe_layers=frozenset(i for i in layers if i not in dense and (i + 1) % every == 0),
        num_experts=fields.need("num_local_experts" if qwen3 else "num_experts") if moe else 0,
        moe_intermediate_size=fields.need("moe_intermediate_size") if moe else 0,
        shared_expert_size=0 if qwen3 else fields.need("shared_expert_intermediate_size"),
        routing=Routing(fields.need("num_experts_per_tok"), renormalise=fields.get("norm_topk_prob", False))
        if moe
        else Routing(0),
    )


class Attention(Layer):
    """Grouped-query attention, heads split over attn_tp; Qwen3 normalises each head's query and key."""

    def __init__(self, b: Builder, path: str, c: QwenConfig):
        super().__init__(path)
        self.head_dim, self.scale = c.head_dim, c.head_dim**-0.5
        kv_features = c.num_kv_heads * c.head_dim
        outs = [
            Out(f"{path}.q_proj", c.num_heads * c.head_dim, unit=c.head_dim),
            Out(f"{path}.k_proj", kv_features, unit=c.head_dim, replicate=True),
            Out(f"{path}.v_proj", kv_features, unit=c.head_dim, replicate=True),
        ]
        self.qkv = ColumnLinear(b, f"{path}.qkv", c.hidden_size, outs, over="attn_tp", bias=c.bias)
        self.cache = PagedKV(self.qkv.sizes[1] // c.head_dim, c.head_dim)
        inputs = c.num_heads * c.head_dim
        self.out = RowLinear(
            b, f"{path}.o_proj", inputs, c.hidden_size, over="attn_tp", unit=c.head_dim, bias=c.output_bias
        )
        self.q_norm = HeadNorm(b, f"{path}.q_norm", c.head_dim, c.rms_norm_eps) if c.head_norms else None
        self.k_norm = HeadNorm(b, f"{path}.k_norm", c.head_dim, c.rms_norm_eps) if c.head_norms else None

    def forward(self, x: Hidden, rotary: RotaryTable, caches: Caches) -> Hidden:
        on_group_rows(self.path, x)

        norms = (self.q_norm, self.k_norm) if self.q_norm is not None and self.k_norm is not None else None
        heads = HeadSplit(self.qkv.sizes, self.head_dim, rotary, norms)

        def attend(qkv: Tensor) -> Tensor:
            return caches.project(self, qkv, heads, self.scale).flatten(1)

        return self.out(self.qkv(x).elementwise(attend, self.path))


def _layer(b: Builder, path: str, c: QwenConfig, index: int) -> DecoderLayer:
    mlp: Layer
    if index in c.moe_layers:
        mlp = SparseMoE(
            b,
            f"{path}.mlp",
            c.hidden_size,
            experts=c.num_experts,
            inner=c.moe_intermediate_size,
            routing=c.routing,
            shared=c.shared_expert_size,
        )
    else:
        mlp = GatedMLP(b, f"{path}.mlp", c.hidden_size, c.intermediate_size)
    return DecoderLayer(b, path, c, Attention(b, f"{path}.self_attn", c), mlp)
