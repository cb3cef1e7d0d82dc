"""Decoder that families share: per layer norm, attention, norm, then experts or an MLP; at the end the head."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from weft.engine.attention.caches import StepCaches
from weft.engine.attention.forward_batch import Batch
from weft.engine.models.config_json.common_fields import Rope
from weft.engine.models.layers.basic import Builder, Embedding, Head, Layer, RMSNorm
from weft.engine.models.layers.mlp import FeedForward
from weft.engine.models.layers.model_config import LanguageModel, ModelConfig
from weft.engine.models.layers.rotary import Rotary, RotaryTable
from weft.stream.hidden import Hidden
from weft.stream.stream import GROUP, Stream, TraceStream


@dataclass(frozen=True)
class DecoderConfig(ModelConfig):
    """Config of a family with a `Decoder` as its model; it builds each layer."""

    @property
    def ropes_of_layers(self) -> Sequence[Rope]:
        """Rotary embeddings from which layers choose, by index."""
        return (self.rope,)

    @abstractmethod
    def layer(self, b: Builder, path: str, index: int) -> DecoderLayer:
        """Build layer `index`, with weights' names that begin with `path`. Raises LayoutError, see `build`."""

    def build(self, b: Builder) -> Decoder:
        return Decoder(b, self)


class DecoderLayer(Layer):
    """Attention on the DP group's tokens, then experts or an MLP on the rows that it `takes`.

    Args:
        attention: (Hidden, RotaryTable, StepCaches) → Hidden.
        mlp: Hidden → Hidden.
        rope: index of its rotary embedding in the decoder.

    forward keeps only the rows `wanted` in the stream if it can (`Stream.keep`), so that the mlp computes these alone,
    and returns True if it did. wanted: None for all rows.
    """

    def __init__(self, b: Builder, path: str, c: ModelConfig, attention: Layer, mlp: FeedForward, rope: int = 0):
        super().__init__(path)
        self.rope = rope
        self.input_norm = _norm(b, f"{path}.input_layernorm", c)
        self.attention = attention
        self.post_norm = _norm(b, f"{path}.post_attention_layernorm", c)
        self.mlp = mlp

    def forward(
        self,
        stream: Stream | TraceStream,
        rotary: RotaryTable,
        caches: StepCaches,
        wanted: Tensor | slice | None = None,
    ) -> bool:
        stream.add(self.attention(stream.read(self.input_norm, rows=GROUP), rotary, caches))
        kept = wanted is not None and stream.keep(wanted)
        stream.add(self.mlp(stream.read(self.post_norm, rows=self.mlp.takes, extra=self.mlp.extra)))
        return kept


class Decoder(LanguageModel):
    """Decoder and its head. forward returns logits `[S, vocabulary]` of the batch's sampled rows, in the weights'
    dtype, or this rank's share of a split vocabulary."""

    def __init__(self, b: Builder, c: DecoderConfig):
        super().__init__("model")
        self.config = c
        self.embed = Embedding(b, f"{c.prefix}.embed_tokens", c.vocab_size, c.hidden_size, c.split_vocabulary)
        self.rotaries = nn.ModuleList(Rotary(rope, b.device) for rope in c.ropes_of_layers)
        layers = [c.layer(b, f"{c.prefix}.layers.{i}", i) for i in range(c.num_layers)]
        self.layers, self._rope_of_layer = nn.ModuleList(layers), [layer.rope for layer in layers]
        self.norm = _norm(b, f"{c.prefix}.norm", c)
        tied = self.embed if c.tie_embeddings else None
        self.head = Head(b, "lm_head", c.vocab_size, c.hidden_size, c.split_vocabulary, tied)

    def forward(self, stream: Stream | TraceStream, batch: Batch, caches: StepCaches) -> Tensor:
        hidden = self.embed(batch.tokens)
        tables = [rotary(batch.positions, hidden.value.dtype) for rotary in self.rotaries]
        stream.add(hidden)
        kept, last = False, len(self.layers) - 1
        for i, (layer, rope) in enumerate(zip(self.layers, self._rope_of_layer, strict=True)):
            kept = layer(stream, tables[rope], caches, batch.sample_rows if i == last else None)
        rows = stream.read(self.norm, rows=GROUP).require_complete("lm_head")
        logits: Tensor = self.head(rows if kept else rows[batch.sample_rows])
        return logits


def _norm(b: Builder, path: str, c: ModelConfig) -> RMSNorm:
    return RMSNorm(b, path, c.hidden_size, c.rms_norm_eps, c.norms_less_one)


def on_group_rows(path: str, x: Hidden) -> None:
    """Raise PlacementError unless x has the rows of one DP group: attention reads that group's cache."""
    x.require_placement(x.mesh.placement(GROUP), path)
