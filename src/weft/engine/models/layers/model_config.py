"""Configs and models of all families."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from weft.engine.models.config_json.common_fields import Rope
from weft.engine.models.layers.basic import Builder, Embedding, Layer
from weft.engine.models.weights.weight_format import WeightFormat
from weft.engine.models.weights.weight_formats import PLAIN
from weft.planner.experts import Forms


@dataclass(frozen=True)
class ModelConfig(ABC):
    """Fields that all families have; each family adds its own. Widths are in elements.

    Args:
        norms_less_one: norms store their weights minus one.
        prefix: prefix of the decoder's weights.
        spares: prefixes of tensors that the model does not use, such as drafts and vision towers.
        family: model type in the registry.
        max_position: maximum tokens of a sequence.
        dtype: dtype of the checkpoint.
        rope: rotary embedding of queries and keys, unless a layer names another.
        storage: format of the checkpoint's weights, which the registry sets.
        ignored: fields of config.json that cannot change what the model computes.
        draft_layers: draft layers of the checkpoint, which predict the token after the next one.

    The layout sets these fields; config.json does not have them:
        split_vocabulary: shard embedding and head over attn_tp by tokens of the vocabulary.
        replicate_queries: each rank of a dcp group computes the queries of all its ranks.
        experts: allowed exchanges of rows for mixtures of experts (`weft.planner.experts`).
        float8: compute products in the storage format, where it has them, instead of dequantising the weights.
        drafts: build the first draft layer.
        draft_model: config of the model or the head that drafts.
        tapped_layers: layers with the inputs that the head reads, in order.
    """

    norms_less_one: ClassVar[bool] = False
    prefix: ClassVar[str] = "model"
    spares: ClassVar[tuple[str, ...]] = ("mtp.",)
    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    tie_embeddings: bool
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    rope: Rope
    storage: WeightFormat = field(default=PLAIN, kw_only=True)
    ignored: tuple[str, ...] = field(default=(), kw_only=True, compare=False)
    draft_layers: int = field(default=0, kw_only=True)
    split_vocabulary: bool = field(default=False, kw_only=True)
    replicate_queries: bool = field(default=False, kw_only=True)
    experts: Forms = field(default="gather", kw_only=True)
    float8: bool = field(default=False, kw_only=True)
    drafts: bool = field(default=False, kw_only=True)
    draft_model: ModelConfig | None = field(default=None, kw_only=True)
    tapped_layers: tuple[int, ...] = field(default=(), kw_only=True)

    @abstractmethod
    def build(self, b: Builder) -> LanguageModel:
        """Build one rank's model with unfilled weights. Raises LayoutError if the layout has too many ranks for it."""


class LanguageModel(Layer):
    """Model on one rank. forward: (stream, batch, caches) → logits `[S, vocabulary]` of the sampled rows, or this
    rank's share of a split vocabulary. draft: its source of drafts, if it has one (`DraftSourceLayer`)."""

    config: ModelConfig
    embed: Embedding

    def __init__(self, path: str):
        super().__init__(path)
        self.draft: DraftSourceLayer | None = None


class DraftSourceLayer(Layer):
    """Chain of its own that proposes tokens after each step.

    forward: (stream, batch, caches, hidden) → (hidden rows, logits of the batch's sampled rows).

    Attributes:
        follows: a row runs the token after its own, with the model's row before the head, and gives a draft in the
            first pass. Otherwise a row runs its own token, and `hidden` is not read.
        width: elements of a hidden row.
    """

    follows: ClassVar[bool]
    width: int
