"""Draft model: a whole model that drafts for another one, on the same ranks and pages."""

from __future__ import annotations

from torch import Tensor

from weft.engine.attention.caches import StepCaches
from weft.engine.attention.forward_batch import Batch
from weft.engine.models.layers.basic import Layer
from weft.engine.models.layers.model_config import DraftSourceLayer, LanguageModel
from weft.stream.stream import Stream, TraceStream


class DraftModel(DraftSourceLayer):
    """Source of drafts that runs a model, from the tokens alone. It renames the model's layers."""

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
