"""Layers that families share: attention, then routed experts or an MLP; and the reader of their heads."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from weft.engine.models.config_json.fields import MAX_EXPERTS, Fields
from weft.engine.models.layers.attention import Attention, Heads
from weft.engine.models.layers.basic import Builder, Layer
from weft.engine.models.layers.decoder import DecoderConfig, DecoderLayer, DraftNames
from weft.engine.models.layers.mlp import FeedForward, GatedMLP
from weft.engine.models.layers.moe import MoEConfig, SparseMoE
from weft.engine.models.layers.routing import Routing
from weft.engine.models.weights.expert_sources import ExpertStorage


@dataclass(frozen=True)
class ExpertsConfig(DecoderConfig):
    """Widths in elements.

    Args:
        moe: experts of all layers but `mlp_layers`; None: all layers have an MLP.
        intermediate_size: inner features of an MLP.
    """

    moe: MoEConfig | None
    mlp_layers: Collection[int] = field(default=(), kw_only=True)
    intermediate_size: int = field(default=0, kw_only=True)

    @abstractmethod
    def attention(self, b: Builder, path: str, index: int) -> Layer:
        """Build the attention of a layer. path: of the layer."""

    def layer(self, b: Builder, path: str, index: int) -> DecoderLayer:
        mlp: FeedForward
        if self.moe is None or index in self.mlp_layers:
            mlp = GatedMLP(b, f"{path}.mlp", self.hidden_size, self.intermediate_size)
        else:
            mlp = SparseMoE(b, f"{path}.{self.moe.stored.block}", self.hidden_size, self.moe)
        return DecoderLayer(b, path, self, self.attention(b, path, index), mlp)


@dataclass(frozen=True)
class GroupedQueryConfig(ExpertsConfig):
    """heads: heads of every layer."""

    heads: Heads

    def attention(self, b: Builder, path: str, index: int) -> Layer:
        return Attention(b, f"{path}.self_attn", self.hidden_size, self.heads)


@dataclass(frozen=True)
class FirstDenseConfig(ExpertsConfig):
    """DeepSeek's and GLM's structure: the first layers have an MLP, all others routed and shared experts."""

    @property
    def draft_names(self) -> DraftNames:
        path = f"{self.prefix}.layers.{self.num_layers}"
        return DraftNames(path, f"{path}.enorm", f"{path}.hnorm", f"{path}.eh_proj", f"{path}.shared_head.norm")


def heads_of(common: dict[str, Any], **more: Any) -> Heads:
    """Return heads with the numbers and the size of `common_fields`. more: other fields of `Heads`."""
    return Heads(common["num_heads"], common["num_kv_heads"], common["head_dim"], **more)


def first_dense_fields(fields: Fields, sigmoid: bool, grouped: bool = True) -> dict[str, Any]:
    """Read the layers of FirstDenseConfig. Raises ModelError. sigmoid: routing by sigmoids with a bias, which ranks
    groups by their best two experts (DeepSeek-V3), instead of a softmax (V2). grouped: experts are chosen among groups,
    if there are several."""
    inner = fields.size("moe_intermediate_size")
    groups, top_groups = fields.size("n_group", 1), fields.size("topk_group", 1)
    routing = Routing(
        fields.size("num_experts_per_tok"),
        score="sigmoid" if sigmoid else "softmax",
        groups=groups if grouped else 1,
        top_groups=top_groups if grouped else 1,
        group_best=2 if sigmoid else 1,
        bias=sigmoid,
        renormalise=fields.flag("norm_topk_prob"),
        scale=fields.number("routed_scaling_factor", 1.0),
        wide=True,
    )
    experts = fields.size("n_routed_experts", high=MAX_EXPERTS)
    shared, stored = inner * fields.size("n_shared_experts", 0, low=0), ExpertStorage(shared="shared_experts")
    return dict(
        draft_layers=fields.size("num_nextn_predict_layers", 0, low=0),
        intermediate_size=fields.size("intermediate_size"),
        mlp_layers=range(fields.size("first_k_dense_replace", 0, low=0)),
        moe=MoEConfig(experts, inner, routing, shared, shared_gate=False, stored=stored),
    )
