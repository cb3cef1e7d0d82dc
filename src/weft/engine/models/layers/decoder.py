"""Decoder that families share: per layer norm, attention, norm, then experts or an MLP; at the end the head."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from weft.engine.attention.caches import StepCaches
from weft.engine.attention.forward_batch import Batch
from weft.engine.kernels.ops import join
from weft.engine.models.config_json.common_fields import Rope
from weft.engine.models.layers.basic import Builder, Embedding, Head, Layer, Linear, RMSNorm
from weft.engine.models.layers.mlp import FeedForward
from weft.engine.models.layers.model_config import DraftSourceLayer, LanguageModel, ModelConfig
from weft.engine.models.layers.rotary import Rotary, RotaryTable
from weft.stream.hidden import Hidden
from weft.stream.stream import GROUP, Site, Stream, TraceStream


@dataclass(frozen=True)
class DraftNames:
    """Prefixes of a draft layer's weights in the checkpoint: decoder layer, norms of the embedding and of the hidden
    state, projection of both, and last norm."""

    layer: str
    embedding_norm: str
    hidden_norm: str
    join: str
    norm: str


@dataclass(frozen=True)
class DecoderConfig(ModelConfig):
    """Config of a family with a `Decoder` as its model; it builds each layer."""

    @property
    def ropes_of_layers(self) -> Sequence[Rope]:
        """Rotary embeddings from which layers choose, by index."""
        return (self.rope,)

    @property
    def draft_names(self) -> DraftNames:
        """Names of the draft layer's weights; as in Qwen3-Next."""
        return DraftNames("mtp.layers.0", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")

    @abstractmethod
    def layer(self, b: Builder, path: str, index: int) -> DecoderLayer:
        """Build layer `index`, with weights' names that begin with `path`; the draft layer is the one after the last.
        Raises LayoutError, see `build`."""

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
        self.draft = DraftLayer(b, c, self) if c.drafts else None

    def forward(self, stream: Stream | TraceStream, batch: Batch, caches: StepCaches) -> Tensor:
        logits: Tensor = self.head(self.rows(stream, batch, caches, batch.sample_rows))
        return logits

    def rows(
        self,
        stream: Stream | TraceStream,
        batch: Batch,
        caches: StepCaches,
        wanted: Tensor | slice | None = None,
        tapped: list[Tensor] | None = None,
    ) -> Tensor:
        """Return the normalised rows after the last layer, `[T, width]`, or only the rows `wanted`. tapped: gets a copy
        of all rows before each of `tapped_layers`."""
        hidden = self.embed(batch.tokens)
        tables = [rotary(batch.positions, hidden.value.dtype) for rotary in self.rotaries]
        stream.add(hidden)
        kept, last = False, len(self.layers) - 1
        for i, (layer, rope) in enumerate(zip(self.layers, self._rope_of_layer, strict=True)):
            if i in self.config.tapped_layers:
                rows = stream.read(Site(f"{layer.path}.input"), rows=GROUP).require_complete("fc")
                if tapped is not None:
                    tapped.append(rows.clone())  # the stream's memory is not kept
            kept = layer(stream, tables[rope], caches, wanted if i == last else None)
        rows = stream.read(self.norm, rows=GROUP).require_complete("lm_head")
        return rows if kept or wanted is None else rows[wanted]


class DraftLayer(DraftSourceLayer):
    """Layer of a checkpoint that predicts the token after the next one (DeepSeek-V3, arXiv 2412.19437): a chain of its
    own, with the model's embedding and head.

    forward returns its normalised rows `[T, width]`, which may be the hidden states of a next pass, and logits
    `[S, vocabulary]` of the batch's sampled rows. Row i has the position of a token, and predicts from what follows it.

    Args:
        model: gives its embedding, head and rotary embeddings.
        batch: its `tokens` are the tokens after each row's.
        hidden: the model's rows `[T, width]` (`Decoder.rows`), or the rows of the pass before.
    """

    follows = True

    def __init__(self, b: Builder, c: DecoderConfig, model: Decoder):
        super().__init__("draft")
        self.width, names = c.hidden_size, c.draft_names
        self.embedding_norm, self.hidden_norm = _norm(b, names.embedding_norm, c), _norm(b, names.hidden_norm, c)
        self.join = Linear(b, names.join, 2 * c.hidden_size, c.hidden_size, plain=True)
        self.layer = c.layer(b, names.layer, c.num_layers)
        self.norm = _norm(b, names.norm, c)
        self._model = [model]  # in a list, so that it does not become a submodule

    def forward(
        self, stream: Stream | TraceStream, batch: Batch, caches: StepCaches, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        [model] = self._model
        embedded = model.embed(batch.tokens)
        follows = Hidden(hidden, embedded.placement, embedded.mesh, self.hidden_norm.path)
        both = [self.embedding_norm(embedded).value, self.hidden_norm(follows).value]
        stream.add(self.join(Hidden(join(*both), embedded.placement, embedded.mesh, self.join.path)))
        self.layer(stream, model.rotaries[self.layer.rope](batch.positions, hidden.dtype), caches)
        rows = stream.read(self.norm, rows=GROUP).require_complete("lm_head")
        return rows, model.head(rows[batch.sample_rows])


def _norm(b: Builder, path: str, c: ModelConfig) -> RMSNorm:
    return RMSNorm(b, path, c.hidden_size, c.rms_norm_eps, c.norms_less_one)


def on_group_rows(path: str, x: Hidden) -> None:
    """Raise PlacementError unless x has the rows of one DP group: attention reads that group's cache."""
    x.require_placement(x.mesh.placement(GROUP), path)
