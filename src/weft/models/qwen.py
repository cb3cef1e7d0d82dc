"""Qwen2-MoE, Qwen3-MoE and dense Qwen3: one decoder whose layers differ in a few parts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weft.attention.backend import Backend
from weft.attention.batch import Batch
from weft.hidden import Hidden
from weft.models.config import ModelConfig
from weft.models.layers import (
    Builder,
    ColumnLinear,
    Embedding,
    Layer,
    Linear,
    Out,
    RMSNorm,
    Rotary,
    RotaryTable,
    RowLinear,
)
from weft.models.moe import GatedMLP, SparseMoE
from weft.place.spec import PlacementError
from weft.stream import GROUP, WORLD, Stream, TraceStream


class Attention(Layer):
    """Grouped-query attention, heads split over attn_tp; Qwen3 normalises each head's query and key."""

    def __init__(self, b: Builder, path: str, c: ModelConfig, index: int):
        super().__init__(path)
        qwen3 = c.architecture != "qwen2_moe"
        bias = bool(c.source.attention_bias if qwen3 else c.source.qkv_bias)
        self.index, self.head_dim, self.scale = index, c.head_dim, c.head_dim**-0.5
        kv_features = c.num_kv_heads * c.head_dim
        outs = [
            Out(f"{path}.q_proj", c.num_heads * c.head_dim, unit=c.head_dim),
            Out(f"{path}.k_proj", kv_features, unit=c.head_dim, replicate=True),
            Out(f"{path}.v_proj", kv_features, unit=c.head_dim, replicate=True),
        ]
        self.qkv = ColumnLinear(b, f"{path}.qkv", c.hidden_size, outs, over="attn_tp", bias=bias)
        inputs = c.num_heads * c.head_dim
        out_bias = bias and qwen3
        self.out = RowLinear(b, f"{path}.o_proj", inputs, c.hidden_size, over="attn_tp", unit=c.head_dim, bias=out_bias)
        self.q_norm = RMSNorm(b, f"{path}.q_norm", c.head_dim, c.rms_norm_eps) if qwen3 else nn.Identity()
        self.k_norm = RMSNorm(b, f"{path}.k_norm", c.head_dim, c.rms_norm_eps) if qwen3 else nn.Identity()

    def forward(self, x: Hidden, rotary: RotaryTable, attention: Backend) -> Hidden:
        if x.placement != x.mesh.placement(GROUP):
            raise PlacementError(f"{self.path} needs {x.mesh.placement(GROUP)}, but {x.origin} is {x.placement}")

        def attend(qkv: Tensor) -> Tensor:
            q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in qkv.split(self.qkv.sizes, dim=-1))
            q, k = rotary(self.q_norm(q)), rotary(self.k_norm(k))
            return attention(self.index, q, k, v, scale=self.scale)[0].flatten(1)

        return self.out(self.qkv(x).map(attend, self.path))


class DecoderLayer(Layer):
    """Attention on the DP group's tokens, then experts (or an MLP) on everyone's."""

    def __init__(self, b: Builder, path: str, c: ModelConfig, index: int):
        super().__init__(path)
        self.input_norm = RMSNorm(b, f"{path}.input_layernorm", c.hidden_size, c.rms_norm_eps)
        self.attention = Attention(b, f"{path}.self_attn", c, index)
        self.post_norm = RMSNorm(b, f"{path}.post_attention_layernorm", c.hidden_size, c.rms_norm_eps)
        self.mlp: GatedMLP | SparseMoE
        if index in c.moe_layers:
            self.mlp = SparseMoE(
                b,
                f"{path}.mlp",
                c.hidden_size,
                experts=c.num_experts,
                k=c.experts_per_token,
                inner=c.moe_intermediate_size,
                shared=c.shared_expert_size,
                renormalise=c.norm_topk_prob,
            )
        else:
            self.mlp = GatedMLP(b, f"{path}.mlp", c.hidden_size, c.intermediate_size)

    def forward(self, stream: Stream | TraceStream, rotary: RotaryTable, attention: Backend) -> None:
        stream.add(self.attention(stream.read(self.input_norm, rows=GROUP), rotary, attention))
        stream.add(self.mlp(stream.read(self.post_norm, rows=WORLD)))


class Qwen(Layer):
    """The decoder and its head. forward gives float32 logits `[S, vocabulary]` of the batch's sampled rows.

    kv_heads: the key-value heads that this rank holds.
    """

    def __init__(self, b: Builder, c: ModelConfig):
        super().__init__("model")
        self.config = c
        self.embed = Embedding(b, "model.embed_tokens", c.vocab_size, c.hidden_size)
        self.rotary = Rotary(*c.rope(), b.device)
        self.layers = nn.ModuleList(DecoderLayer(b, f"model.layers.{i}", c, i) for i in range(c.num_layers))
        self.kv_heads = b.share("key-value heads", c.num_kv_heads, "attn_tp", replicate=True)
        self.norm = RMSNorm(b, "model.norm", c.hidden_size, c.rms_norm_eps)
        self.head = None if c.tie_embeddings else Linear(b, "lm_head", c.hidden_size, c.vocab_size)

    def forward(self, stream: Stream | TraceStream, batch: Batch, attention: Backend) -> Tensor:
        hidden = self.embed(batch.tokens)
        rotary = self.rotary(batch.positions, hidden.value.dtype)
        stream.add(hidden)
        for layer in self.layers:
            layer(stream, rotary, attention)
        rows = stream.read(self.norm, rows=GROUP).require_complete("lm_head")[batch.sample_rows]
        weight = self.embed.weight if self.head is None else self.head.weight
        return torch.nn.functional.linear(rows, weight).float()
