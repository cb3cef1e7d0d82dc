"""Step-3.5-Flash: full attention and windows by turns, heads behind gates, norms about one, a shared expert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from weft.models.attention import Attention, HeadNorms, Heads
from weft.models.config import Fields, ModelError, common_fields, rope_of
from weft.models.decoder import DecoderConfig, DecoderLayer
from weft.models.expert_sources import Stored
from weft.models.layers import Builder
from weft.models.mlp import FeedForward, GatedMLP
from weft.models.moe import SparseMoE
from weft.models.rotary import Rope
from weft.models.routing import Routing

FULL, SLIDING = "full_attention", "sliding_attention"
STORED = Stored("moe.gate", "moe.router_bias", "moe", "stacked", "share_expert")


@dataclass(frozen=True)
class StepConfig(DecoderConfig):
    """Widths in elements. heads, ropes: for each layer, which of `ropes` it turns by in `rope_of_layer`.

    limits, shared_limits: of the gated products of each layer's routed experts, and of its shared expert or MLP
    (`weft.kernels.plain.gated`).
    """

    norms_less_one: ClassVar[bool] = True

    heads: tuple[Heads, ...]
    ropes: tuple[Rope, ...]
    rope_of_layer: tuple[int, ...]
    intermediate_size: int
    moe_layers: frozenset[int]
    num_experts: int
    moe_intermediate_size: int
    shared_size: int
    routing: Routing
    limits: tuple[float | None, ...]
    shared_limits: tuple[float | None, ...]

    @property
    def ropes_of_layers(self) -> Sequence[Rope]:
        return self.ropes

    def layer(self, b: Builder, path: str, index: int) -> DecoderLayer:
        mlp: FeedForward
        if index in self.moe_layers:
            mlp = SparseMoE(
                b,
                path,
                self.hidden_size,
                experts=self.num_experts,
                inner=self.moe_intermediate_size,
                routing=self.routing,
                shared=self.shared_size,
                shared_gate=False,
                stored=STORED,
                limit=self.limits[index],
                shared_limit=self.shared_limits[index],
            )
        else:
            mlp = GatedMLP(b, f"{path}.mlp", self.hidden_size, self.intermediate_size, self.shared_limits[index])
        attention = Attention(b, f"{path}.self_attn", self.hidden_size, self.heads[index])
        return DecoderLayer(b, path, self, attention, mlp, self.rope_of_layer[index])


def read(fields: Fields) -> StepConfig:
    """Reads a config of Step-3.5-Flash as it is published: lists may go on behind the last layer, for layers that only
    draft tokens and are not run. Raises ModelError.
    """
    fields.only("att_impl_type", "GQA")
    fields.only("moe_router_activation", "sigmoid")
    fields.need("use_head_wise_attn_gate")
    for name in (
        "use_head_wise_attn_gate",
        "use_moe",
        "use_qk_norm",
        "use_moe_router_bias",
        "need_fp32_gate",
        "zero_centered",
    ):
        fields.only(name, True)
    for name in ("sink", "attention_bias", "mlp_bias"):
        fields.only(name, False)
    fields.only("use_rope_layers", [])
    fields.get("num_nextn_predict_layers"), fields.get("max_seq_len")
    fields.get("moe_every_n_layer"), fields.get("moe_layer_offset")  # of no effect beside moe_layers_enum
    layers = range(fields.need("num_hidden_layers"))
    kinds = _by_layer(fields, "layer_types", layers)
    for kind in kinds:
        if kind not in (FULL, SLIDING):
            raise ModelError(
                f"layer type {kind!r} is not supported for {fields.family!r}; supported: {FULL}, {SLIDING}"
            )
    ropes, rope_of_layer = _ropes(fields, kinds, layers)
    common = common_fields(fields, fields.need("head_dim"), rope=ropes[rope_of_layer[0]], eps=1e-5)
    common |= dict(num_kv_heads=fields.need("num_attention_groups"))
    fields.only("num_key_value_heads", common["num_kv_heads"])
    full = _heads(fields, common, {}, None)
    sliding = _heads(fields, common, fields.get("attention_other_setting", {}), fields.get("sliding_window"))
    named = fields.need("moe_layers_enum")
    moe_layers = frozenset(int(i) for i in (named.split(",") if isinstance(named, str) else named))
    return StepConfig(
        **common,
        heads=tuple(full if kind == FULL else sliding for kind in kinds),
        ropes=ropes,
        rope_of_layer=rope_of_layer,
        intermediate_size=fields.need("intermediate_size"),
        moe_layers=moe_layers & frozenset(layers),
        num_experts=fields.need("moe_num_experts"),
        moe_intermediate_size=fields.need("moe_intermediate_size"),
        shared_size=fields.need("share_expert_dim"),
        routing=Routing(
            fields.need("moe_top_k"),
            score="sigmoid",
            bias=True,
            renormalise=fields.get("norm_expert_weight", True),
            scale=fields.get("moe_router_scaling_factor", 1.0),
            wide=True,
        ),
        limits=_limits(fields, "swiglu_limits", layers),
        shared_limits=_limits(fields, "swiglu_limits_shared", layers),
    )


def _by_layer(fields: Fields, name: str, layers: range, default: Any = None) -> Sequence[Any]:
    """A list with a value for each layer; a single value, or the default, is every layer's. Raises ModelError."""
    values = fields.get(name, default) if default is not None else fields.need(name)
    values = values if isinstance(values, list | tuple) else [values] * len(layers)
    if len(values) < len(layers):
        raise ModelError(f"{name} has {len(values)} values for {len(layers)} layers of model type {fields.family!r}")
    return values[: len(layers)]


def _limits(fields: Fields, name: str, layers: range) -> tuple[float | None, ...]:
    return tuple(float(limit) if limit else None for limit in _by_layer(fields, name, layers, 0.0))  # 0: none


def _ropes(fields: Fields, kinds: Sequence[str], layers: range) -> tuple[tuple[Rope, ...], tuple[int, ...]]:
    """The different ones, and each layer's number among them."""
    bases = _by_layer(fields, "rope_theta", layers)
    parts = _by_layer(fields, "partial_rotary_factors", layers, 1.0)
    scaling = dict(fields.get("rope_scaling", {}))
    scaled = fields.need("yarn_only_types") if scaling else fields.get("yarn_only_types", ())
    dim, longest = fields.need("head_dim"), fields.need("max_position_embeddings")
    ropes: list[Rope] = []
    each = []
    for kind, base, part in zip(kinds, bases, parts, strict=True):
        parameters = {"rope_type": "default", **(scaling if kind in scaled else {}), "rope_theta": base}
        rope = rope_of(parameters, int(dim * part), longest)
        if rope not in ropes:
            ropes.append(rope)
        each.append(ropes.index(rope))
    return tuple(ropes), tuple(each)


def _heads(fields: Fields, common: dict[str, Any], other: dict[str, Any], window: int | None) -> Heads:
    """other: what a kind of attention has otherwise. Raises ModelError for what is not understood there."""
    known = {"attention_type": SLIDING, "head_dim": common["head_dim"], "true_head_dim": common["head_dim"]}
    for name, value in other.items():
        if name not in ("num_attention_heads", "num_attention_groups") and known.get(name) != value:
            raise ModelError(f"attention_other_setting: {name!r} (value {value!r}) is not supported")
    return Heads(
        other.get("num_attention_heads", common["num_heads"]),
        other.get("num_attention_groups", common["num_kv_heads"]),
        common["head_dim"],
        HeadNorms(common["rms_norm_eps"], less_one=True),
        window,
        gate="head",
    )
