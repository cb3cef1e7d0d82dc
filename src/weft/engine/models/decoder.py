"""The decoder that families share: norm, attention, norm, experts or an MLP, layer after layer, then the head."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from weft.engine.attention.caches import StepCaches
from weft.engine.attention.forward_batch import Batch
from weft.engine.models.layers import Builder, Embedding, Head, Layer, RMSNorm
from weft.engine.models.mlp import FeedForward
from weft.engine.models.model_config import LanguageModel, ModelConfig
from weft.engine.models.rotary import Rope, Rotary, RotaryTable
from weft.stream.hidden import Hidden
from weft.stream.stream import GROUP, Stream, TraceStream


@dataclass(frozen=True)
class DecoderConfig(ModelConfig):
    """The config of a family with a `Decoder` as its model: it says what each layer is."""

    @property
    def ropes_of_layers(self) -> Sequence[Rope]:
        """The rotary embeddings from which layers choose, by number."""
        return (self.rope,)

    @abstractmethod
    def layer(self, b: Builder, path: str, index: int) -> DecoderLayer:
        """Layer number index; its weights' names begin with path. Raises LayoutError as `build`."""

    def build(self, b: Builder) -> Decoder:
        return Decoder(b, self)


class DecoderLayer(Layer):
    """Attention on the DP group's tokens, then experts or an MLP on the rows that it `takes`.

    attention: (Hidden, RotaryTable, StepCaches) → Hidden. mlp: Hidden → Hidden. rope: number of the decoder's rotary
    embedding for its queries and keys.

    forward returns whether the stream has only the rows `wanted` from now on (`Stream.keep`), so that the mlp computes
    these alone; None: all are wanted.
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
        stream.add(self.mlp(stream.read(self.post_norm, rows=self.mlp.takes, beside=self.mlp.beside)))
        return kept


class Decoder(LanguageModel):
    """The decoder and its head. forward returns logits `[S, vocabulary]` of the batch's sampled rows, in the weights'
    dtype; where the vocabulary is split, those of this rank's share.
    """

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
    """Raises PlacementError unless x has the rows of one DP group: attention reads that group's cache."""
    x.require_placement(x.mesh.placement(GROUP), path)
