"""DeepSeek-V2 (arXiv 2405.04434) and V3 (arXiv 2412.19437): latent attention, experts in groups, shared experts."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from weft.engine.attention.caches import StepCaches
from weft.engine.attention.projections import Absorbed, LatentSplit
from weft.engine.kv.cache_spec import Latent
from weft.engine.models.config_json.common_fields import common_fields, rope_of
from weft.engine.models.config_json.fields import Fields
from weft.engine.models.families.shared_layers import FirstDenseConfig, first_dense_fields
from weft.engine.models.layers.basic import Builder, ColumnLinear, HeadNorm, Layer, Out, RMSNorm, RowLinear
from weft.engine.models.layers.decoder import on_group_rows
from weft.engine.models.layers.rotary import RotaryTable
from weft.engine.models.weights.source import Source
from weft.stream.hidden import Hidden

LATENT_EPS = 1e-6  # of the norms inside attention, whatever the config says


@dataclass(frozen=True)
class DeepseekConfig(FirstDenseConfig):
    """Widths in elements.

    Args:
        q_rank: width of the latent vector of queries; None: queries are projected from the hidden state.
        kv_rank: width of the latent vector of keys and values.
        nope_dim, rope_dim: elements of a head's key from the latent vector, and rotated elements that all heads share.
        value_dim: elements of a head's value.
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int

    def attention(self, b: Builder, path: str, index: int) -> Layer:
        return LatentAttention(b, f"{path}.self_attn", self)


def read(fields: Fields) -> DeepseekConfig:
    """Read a config of DeepSeek-V2, V2-Lite, Coder-V2, V3, R1 or Kimi-K2. Raises ModelError."""
    v3 = fields.family != "deepseek_v2"
    for name in ("attention_bias", "mlp_bias"):
        fields.only(name, False)
    fields.only("moe_layer_freq", 1)
    fields.only("scoring_func", "sigmoid" if v3 else "softmax")
    fields.only("topk_method", *(("noaux_tc",) if v3 else ("greedy", "group_limited_greedy")))
    if v3:
        fields.get("num_mtp_layers")  # a version of num_nextn_predict_layers
    else:
        fields.only("norm_topk_prob", False)
        fields.only("rope_interleave", True)
    fields.only("num_key_value_heads", fields.size("num_attention_heads"))
    nope, rope = fields.size("qk_nope_head_dim"), fields.size("qk_rope_head_dim")
    interleaved = fields.flag("rope_interleave", not v3)  # null is false; transformers has filled in a missing value
    fields.only("qk_head_dim", nope + rope)
    fields.only("head_dim", rope)  # transformers' meaning of head_dim
    grouped = v3 or fields.get("topk_method", "greedy") != "greedy"
    parameters, max_position = fields.section("rope_parameters"), fields.size("max_position_embeddings")
    return DeepseekConfig(
        **common_fields(fields, nope + rope, rope=rope_of(parameters, rope, max_position, interleaved)),
        **first_dense_fields(fields, sigmoid=v3, grouped=grouped),
        q_rank=None if fields.get("q_lora_rank") is None else fields.size("q_lora_rank"),
        kv_rank=fields.size("kv_lora_rank"),
        nope_dim=nope,
        rope_dim=rope,
        value_dim=fields.size("v_head_dim"),
    )


class LatentAttention(Layer):
    """Attention with one latent vector and one rotated key per cached token, whole on all ranks, for all heads.

    Heads are split over attn_tp. The projections from the latent vector to keys and values are absorbed into the query
    and the output: q·(U c) = (Uᵀ q)·c. For prompts of many rows cached vectors are expanded instead, if that takes
    fewer operations (`weft.engine.attention.expansion`). Ranks of a dcp group hold the projections of all its heads.
    """

    def __init__(self, b: Builder, path: str, c: DeepseekConfig):
        super().__init__(path)
        self.dim, self.up_dims = c.head_dim, [c.nope_dim, c.value_dim]
        self.scale = c.head_dim**-0.5 * c.rope.attention_scale()
        name, self.gathered = "q_proj" if c.q_rank is None else "q_b_proj", b.queries_shared_by > 1
        q = Out(f"{path}.{name}", c.num_heads * c.head_dim, unit=c.head_dim, shared_by=b.queries_shared_by)
        cached = c.kv_rank + c.rope_dim
        kv = Out(f"{path}.kv_a_proj_with_mqa", cached, unit=cached, replicate=True)
        # All projections of the hidden state are one product.
        self.q_norm = self.q_up = None
        if c.q_rank is None:
            self.project = ColumnLinear(b, f"{path}.in_proj", c.hidden_size, [q, kv], over="attn_tp")
        else:
            down = Out(f"{path}.q_a_proj", c.q_rank, unit=c.q_rank, replicate=True)
            self.project = ColumnLinear(b, f"{path}.in_proj", c.hidden_size, [down, kv], over=None)
            self.q_norm = RMSNorm(b, f"{path}.q_a_layernorm", c.q_rank, LATENT_EPS)
            self.q_up = ColumnLinear(b, f"{path}.q", c.q_rank, [q], over="attn_tp")
        self.kv_norm = HeadNorm(b, f"{path}.kv_a_layernorm", c.kv_rank, LATENT_EPS)
        ups = c.num_heads * sum(self.up_dims)
        share = b.share(f"{path} (heads)", ups, "attn_tp", unit=sum(self.up_dims), shared_by=b.mesh.dcp)
        self.kv_up = b.empty(share.stop - share.start, c.kv_rank)
        self.sources["kv_up"] = [Source(f"{path}.kv_b_proj.weight", (ups, c.kv_rank), (share,))]
        heads = (share.stop - share.start) // sum(self.up_dims)
        self.cache = Latent(c.kv_rank + c.rope_dim, c.kv_rank, (c.nope_dim, c.value_dim), heads)
        self.out = RowLinear(
            b, f"{path}.o_proj", c.num_heads * c.value_dim, c.hidden_size, over="attn_tp", unit=c.value_dim
        )

    def forward(self, x: Hidden, rotary: RotaryTable, caches: StepCaches) -> Hidden:
        on_group_rows(self.path, x)
        made = self.project(x)
        parts = LatentSplit(self.dim, rotary, self.kv_norm, self.gathered)
        up = self.kv_up.unflatten(0, (-1, sum(self.up_dims)))
        keys, values = up.split(self.up_dims, dim=1)
        absorbed = Absorbed(keys, values, up)

        def attend(q: Tensor, kv: Tensor) -> Tensor:
            return caches.project_latent(self, q, kv, parts, scale=self.scale, absorbed=absorbed).flatten(1)

        def split(both: Tensor) -> list[Tensor]:
            return list(both.split(self.project.sizes, dim=-1))

        if self.q_norm is None or self.q_up is None:
            return self.out(made.elementwise(lambda both: attend(*split(both)), self.path))
        down, kv = split(made.require_complete(self.path))
        q = self.q_up(self.q_norm(Hidden(down, made.placement, made.mesh, self.path)))
        return self.out(q.elementwise(lambda q: attend(q, kv), self.path))
