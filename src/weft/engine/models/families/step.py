"""Step-3.5-Flash: alternating full and window attention, gates on heads, norms around one, a shared expert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from weft.engine.models.config_json.common_fields import FULL, SLIDING, Rope, check_layer_types, common_fields, rope_of
from weft.engine.models.config_json.fields import MAX_EXPERTS, MAX_LAYERS, Fields, ModelError
from weft.engine.models.families.shared_layers import heads_of
from weft.engine.models.layers.attention import Attention, HeadNorms, Heads
from weft.engine.models.layers.basic import Builder
from weft.engine.models.layers.decoder import DecoderConfig, DecoderLayer
from weft.engine.models.layers.mlp import FeedForward, GatedMLP
from weft.engine.models.layers.moe import MoEConfig, SparseMoE
from weft.engine.models.layers.routing import Routing
from weft.engine.models.weights.expert_sources import ExpertStorage

EXPERT_STORAGE = ExpertStorage("moe.gate", "moe.router_bias", "moe", "stacked", "share_expert")


@dataclass(frozen=True)
class StepConfig(DecoderConfig):
    """Widths in elements.

    Args:
        heads, moe: one per layer.
        rope_of_layer: index in `ropes` per layer.
        moe_layers: layers with experts; the others have an MLP with the limit of a shared expert.
    """

    norms_less_one: ClassVar[bool] = True

    heads: tuple[Heads, ...]
    ropes: tuple[Rope, ...]
    rope_of_layer: tuple[int, ...]
    intermediate_size: int
    moe_layers: frozenset[int]
    moe: tuple[MoEConfig, ...]

    @property
    def ropes_of_layers(self) -> Sequence[Rope]:
        return self.ropes

    def layer(self, b: Builder, path: str, index: int) -> DecoderLayer:
        mlp: FeedForward
        moe = self.moe[index]
        if index in self.moe_layers:
            mlp = SparseMoE(b, path, self.hidden_size, moe)
        else:
            mlp = GatedMLP(b, f"{path}.mlp", self.hidden_size, self.intermediate_size, moe.shared_limit)
        attention = Attention(b, f"{path}.self_attn", self.hidden_size, self.heads[index])
        return DecoderLayer(b, path, self, attention, mlp, self.rope_of_layer[index])


def read(fields: Fields) -> StepConfig:
    """Read a config of Step-3.5-Flash as published, or as transformers writes it: with other names for some fields, and
    values per kind of layer instead of per layer. Values of further layers, which are drafts, are ignored. Raises
    ModelError."""
    written = fields.get("mlp_layer_types") is not None  # by transformers
    fields.only("att_impl_type", "GQA")
    fields.only("moe_router_activation", "sigmoid")
    if not written:  # the published code has no gate if the field is missing; transformers always has it
        fields.need("use_head_wise_attn_gate")
    for name in (
        "use_head_wise_attn_gate",
        "use_moe",
        "use_qk_norm",
        "use_moe_router_bias",
        "need_fp32_gate",
        "zero_centered",
        "norm_expert_weight",
    ):
        fields.only(name, True)
    for name in ("sink", "attention_bias", "mlp_bias"):
        fields.only(name, False)
    fields.only("use_rope_layers", [])
    for name in ("num_nextn_predict_layers", "mtp_layer_types", "mtp_mlp_layer_types", "max_seq_len"):
        fields.get(name)
    fields.get("moe_every_n_layer"), fields.get("moe_layer_offset")  # without effect next to the list of layers
    layers = range(fields.size("num_hidden_layers", high=MAX_LAYERS))
    kinds = fields.items("layer_types", str)[: len(layers)]
    if len(kinds) < len(layers):
        raise ModelError(
            f"layer_types has {len(kinds)} values for {len(layers)} layers of model type {fields.family!r}"
        )
    check_layer_types(fields, kinds, FULL, SLIDING)
    rotated_kinds = tuple(dict.fromkeys(kinds))
    ropes = tuple((_written_rope if written else _published_rope)(fields, kind, kinds) for kind in rotated_kinds)
    groups, experts, chosen = (
        fields.size(theirs if written else name, high=MAX_EXPERTS)
        for name, theirs in (
            ("num_attention_groups", "num_key_value_heads"),
            ("moe_num_experts", "n_routed_experts"),
            ("moe_top_k", "num_experts_per_tok"),
        )
    )
    fields.only("num_key_value_heads", groups)
    common = common_fields(fields, fields.size("head_dim"), rope=ropes[0], eps=1e-5) | dict(num_kv_heads=groups)
    fields.only("query_pre_attn_scalar", common["head_dim"])
    queries = (_written_sliding_heads if written else _published_sliding_heads)(fields, common, kinds)
    window = fields.size("sliding_window") if SLIDING in kinds else None
    fields.get("sliding_window")
    heads = {FULL: _heads(common, common["num_heads"], None), SLIDING: _heads(common, queries, window)}
    limits, shared_limits = (_limits(fields, f"swiglu_limits{of}", layers) for of in ("", "_shared"))
    moe = MoEConfig(
        experts,
        fields.size("moe_intermediate_size"),
        Routing(
            chosen,
            score="sigmoid",
            bias=True,
            renormalise=True,
            scale=fields.number("moe_router_scaling_factor", 1.0),
            wide=True,
        ),
        shared=fields.size("share_expert_dim"),
        shared_gate=False,
        stored=EXPERT_STORAGE,
    )
    return StepConfig(
        **common,
        heads=tuple(heads[kind] for kind in kinds),
        ropes=ropes,
        rope_of_layer=tuple(rotated_kinds.index(kind) for kind in kinds),
        intermediate_size=fields.size("intermediate_size"),
        moe_layers=_written_moe_layers(fields, layers) if written else _published_moe_layers(fields, layers),
        moe=tuple(replace(moe, limit=limits[i], shared_limit=shared_limits[i]) for i in layers),
    )


def _by_layer(fields: Fields, name: str, layers: range, default: float | None = None) -> list[float]:
    """Return a number per layer from a list, with 0 for null. A single number or the default holds for all layers.
    Raises ModelError."""
    given = fields.need(name) if default is None else fields.get(name, default)
    if not isinstance(given, list | tuple):
        return [fields.number(name, default)] * len(layers)
    if len(given) < len(layers):
        raise ModelError(f"{name} has {len(given)} values for {len(layers)} layers of model type {fields.family!r}")
    each = Fields({str(i): value for i, value in enumerate(given)} | {"model_type": fields.family}, prefix=f"{name}.")
    return [each.number(str(i), 0.0) for i in layers]


def _limits(fields: Fields, name: str, layers: range) -> tuple[float | None, ...]:
    return tuple(limit or None for limit in _by_layer(fields, name, layers, 0.0))  # 0: none


def _published_moe_layers(fields: Fields, layers: range) -> frozenset[int]:
    named = fields.need("moe_layers_enum")
    parts = (
        [part.strip() for part in named.split(",")] if isinstance(named, str) else fields.items("moe_layers_enum", int)
    )
    if not all(str(part).isdecimal() for part in parts):
        raise ModelError(f"moe_layers_enum={named!r} is not a list of layers, for model type {fields.family!r}")
    return frozenset(map(int, parts)) & frozenset(layers)


def _written_moe_layers(fields: Fields, layers: range) -> frozenset[int]:
    kinds = fields.items("mlp_layer_types", str)
    if len(kinds) < len(layers) or not set(kinds) <= {"sparse", "dense"}:
        raise ModelError(f"mlp_layer_types {list(kinds)} are not {len(layers)} of sparse and dense alone")
    return frozenset(i for i in layers if kinds[i] == "sparse")


def _published_rope(fields: Fields, kind: str, kinds: Sequence[str]) -> Rope:
    """Return the rotary embedding of a kind of layers. Raises ModelError if layers of that kind differ."""
    layers = range(len(kinds))
    bases = _by_layer(fields, "rope_theta", layers)
    parts = _by_layer(fields, "partial_rotary_factors", layers, 1.0)
    found = dict.fromkeys((base, part) for base, part, of in zip(bases, parts, kinds, strict=True) if of == kind)
    if len(found) > 1:
        raise ModelError(f"rope_theta and partial_rotary_factors differ among layers of {kind}: {list(found)}")
    if fields.get("rope_scaling"):
        fields.need("yarn_only_types")
        fields.only("yarn_only_types", [FULL])
    fields.get("yarn_only_types")
    [(base, part)] = found
    if kind == FULL:
        return _rope(fields, fields.section("rope_scaling", rope_theta=base), part)
    return _rope(fields, Fields({"rope_theta": base, "model_type": fields.family}), part)


def _written_rope(fields: Fields, kind: str, kinds: Sequence[str]) -> Rope:
    fields.get("yarn_only_types")  # published field, kept by transformers without effect
    parameters = fields.section("rope_parameters").section(kind)
    if parameters.get("rope_theta") is None:
        raise ModelError(f"rope_parameters say nothing of {kind} layers")
    return _rope(fields, parameters, parameters.number("partial_rotary_factor", 1.0, high=1.0))


def _rope(fields: Fields, parameters: Fields, part: float) -> Rope:
    dim = int(fields.size("head_dim") * part)
    return rope_of(parameters, dim, fields.size("max_position_embeddings"), part=part)


def _published_sliding_heads(fields: Fields, common: dict[str, Any], kinds: Sequence[str]) -> int:
    """Return the query heads of layers with windows. Raises ModelError for any other difference of those layers."""
    other = fields.section("attention_other_setting")
    other.only("attention_type", SLIDING)
    other.only("num_attention_groups", common["num_kv_heads"])
    for name in ("head_dim", "true_head_dim"):
        other.only(name, common["head_dim"])
    return other.size("num_attention_heads", common["num_heads"])


def _written_sliding_heads(fields: Fields, common: dict[str, Any], kinds: Sequence[str]) -> int:
    queries = fields.size("num_sliding_attention_heads", common["num_heads"])
    given = fields.get("per_layer_config", {})
    wanted = {i: {"num_attention_heads": queries} for i, kind in enumerate(kinds) if kind == SLIDING}
    of_layers = isinstance(given, Mapping) and all(str(i).isdecimal() for i in given)
    if not of_layers or (given and {int(i): given[i] for i in given if int(i) < len(kinds)} != wanted):
        raise ModelError(
            f"per_layer_config {given} is not supported; supported: num_attention_heads={queries} of {SLIDING} layers"
        )
    return queries


def _heads(common: dict[str, Any], queries: int, window: int | None) -> Heads:
    if queries % common["num_kv_heads"]:
        raise ModelError(f"{queries} query heads are not a multiple of {common['num_kv_heads']} key-value heads")
    norms = HeadNorms(common["rms_norm_eps"], less_one=True)
    return heads_of(common | dict(num_heads=queries), norms=norms, window=window, gate="head")
