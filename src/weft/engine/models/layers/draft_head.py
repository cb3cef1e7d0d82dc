"""Sources of drafts for a model: another whole model, and EAGLE-3 (arXiv 2503.01840), a head of one layer that reads
hidden states of three layers of its target."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from weft.engine.attention.caches import StepCaches
from weft.engine.attention.forward_batch import Batch
from weft.engine.kernels.ops import join
from weft.engine.models.config_json.fields import ModelError
from weft.engine.models.layers.attention import Attention, Heads
from weft.engine.models.layers.basic import Builder, Embedding, Head, Layer, Linear, RMSNorm
from weft.engine.models.layers.mlp import GatedMLP
from weft.engine.models.layers.model_config import DraftSourceLayer, LanguageModel, ModelConfig
from weft.engine.models.layers.rotary import Rotary
from weft.engine.models.weights.checkpoint import Checkpoint
from weft.stream.hidden import Hidden
from weft.stream.stream import GROUP, Site, Stream, TraceStream

TAPS = 3
"""Hidden states of the target that a row reads."""


class Eagle3Head(DraftSourceLayer):
    """Draft head: a chain of its own, with the target's embedding unless its checkpoint has another.

    forward returns its rows before the last norm `[T, width]`, which are the hidden states of a next pass, and logits
    `[S, vocabulary]` of the batch's sampled rows: −∞ for tokens that it does not draft. Row i has the position of a
    token, and predicts from what follows it.

    Args:
        c: config of the head.
        heads, inner: attention heads, and inner features of the MLP.
        drafted: number of tokens that it drafts.
        target_width: elements of the target's hidden state.
        batch: its `tokens` are the tokens after each row's.
        hidden: rows `[T, 3 · target_width]` of the target (`Decoder.rows`), or rows `[T, width]` of the pass before.

    Attributes:
        tokens: int64 `[drafted]`, the target's token for each of the head's. mapped: they differ.
    """

    follows = True

    def __init__(self, b: Builder, c: ModelConfig, heads: Heads, inner: int, drafted: int, target_width: int):
        super().__init__("midlayer")
        self.width, self.vocabulary, path = c.hidden_size, c.vocab_size, self.path
        self.fc = Linear(b, "fc", TAPS * target_width, self.width, plain=True)
        names = f"{path}.input_layernorm", f"{path}.hidden_norm", f"{path}.post_attention_layernorm", "norm"
        norms = (RMSNorm(b, name, self.width, c.rms_norm_eps) for name in names)
        self.embedding_norm, self.hidden_norm, self.post_norm, self.norm = norms
        self.rotary = Rotary(c.rope, b.device)
        self.attention = Attention(b, f"{path}.self_attn", self.width, heads, inputs=2 * self.width)
        self.mlp = GatedMLP(b, f"{path}.mlp", self.width, inner)
        self.head = Head(b, "lm_head", drafted, self.width, False, None)
        self.tokens, self.mapped = torch.arange(drafted, device=b.device), drafted != self.vocabulary
        embedding = partial(Embedding, path="embed_tokens", vocabulary=c.vocab_size, width=self.width)
        self.embed = embedding(b) if self.width != target_width else None
        self._make_embedding = partial(embedding, replace(b, shape_only=True))

    def read_others(self, checkpoint: Checkpoint) -> None:
        """Read the tensors that not all checkpoints have: the embedding, and the drafted tokens. Raises ModelError."""
        embed = self._make_embedding()
        [source] = embed.sources["weight"]
        if self.embed is None and checkpoint.has(source.name):
            self.embed, weight = embed, checkpoint.read(source).to(self.norm.weight)
            embed.weight = nn.Parameter(weight, requires_grad=False)
        if self.mapped or checkpoint.has("d2t"):
            self.mapped = True
            offsets = checkpoint.part("d2t", tuple(self.tokens.shape), (torch.int64, torch.int32))[:]
            self.tokens += offsets.to(self.tokens)
            if not 0 <= int(self.tokens.min()) <= int(self.tokens.max()) < self.vocabulary:
                raise ModelError(f"d2t of {checkpoint.directory} names a token beyond the model's {self.vocabulary}")

    def of(self, model: LanguageModel) -> Eagle3Head:
        """Return this head as a source of drafts for its target."""
        if self.embed and self.width == model.config.hidden_size and torch.equal(self.embed.weight, model.embed.weight):
            self.embed = None
        self._model = [model]  # in a list, so that it does not become a submodule
        return self

    def forward(
        self, stream: Stream | TraceStream, batch: Batch, caches: StepCaches, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        [model] = self._model
        embedded: Hidden = (self.embed or model.embed)(batch.tokens)

        def given(rows: Tensor, origin: str) -> Hidden:
            return Hidden(rows, embedded.placement, embedded.mesh, origin)

        if hidden.shape[1] != self.width:
            hidden = self.fc(given(hidden, "hidden states")).value
        stream.add(given(hidden, self.path))
        normed = stream.read(self.hidden_norm, rows=GROUP).require_complete(self.attention.path)
        both = given(join(self.embedding_norm(embedded).value, normed), self.attention.path)
        stream.add(self.attention(both, self.rotary(batch.positions, hidden.dtype), caches))
        stream.add(self.mlp(stream.read(self.post_norm, rows=self.mlp.takes)))
        rows = stream.read(Site("midlayer.output"), rows=GROUP).require_complete(self.norm.path)
        logits = self.head(self.norm(given(rows[batch.sample_rows], self.path)).value)
        if not self.mapped:
            return rows, logits
        whole = logits.new_full((len(logits), self.vocabulary), float("-inf"))
        return rows, whole.index_copy_(1, self.tokens, logits)


class DraftModel(DraftSourceLayer):
    """Source of drafts that runs a whole model, from the tokens alone, on the same ranks and pages. It renames the
    model's layers."""

    follows = False

    def __init__(self, model: LanguageModel):
        super().__init__("draft")
        self.model, self.width = model, model.config.hidden_size
        for layer in model.modules():
            if isinstance(layer, Layer):
                layer.path = f"draft.{layer.path}"  # caches and plans are found by it

    def forward(
        self, stream: Stream | TraceStream, batch: Batch, caches: StepCaches, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        return hidden, self.model(stream, batch, caches)
