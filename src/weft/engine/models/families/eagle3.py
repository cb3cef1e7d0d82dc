"""Draft heads of EAGLE-3 (arXiv 2503.01840) for any model: `LlamaForCausalLMEagle3`, `Eagle3LlamaForCausalLM`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from weft.engine.models.config_json.common_fields import common_fields
from weft.engine.models.config_json.fields import Fields, ModelError
from weft.engine.models.families.shared_layers import heads_of
from weft.engine.models.layers.attention import Heads
from weft.engine.models.layers.basic import Builder
from weft.engine.models.layers.decoder import DecoderConfig
from weft.engine.models.layers.draft_head import TAPS, Eagle3Head
from weft.engine.models.layers.model_config import ModelConfig


@dataclass(frozen=True)
class Eagle3Config(ModelConfig):
    """Widths in elements. heads, intermediate_size: of its layer. drafted_tokens: number of tokens that it drafts.
    target_width: of the target's hidden state. inputs_of: layers of the target with the inputs that it reads; empty: by
    their number."""

    spares: ClassVar[tuple[str, ...]] = ("t2d", "d2t", "embed_tokens.")
    heads: Heads
    intermediate_size: int
    drafted_tokens: int
    target_width: int
    inputs_of: tuple[int, ...]

    def build(self, b: Builder) -> Any:
        return Eagle3Head(b, self, self.heads, self.intermediate_size, self.drafted_tokens, self.target_width)

    def inputs_in(self, model: ModelConfig) -> tuple[int, ...]:
        """Return the layers of a model with the inputs that the head reads. Raises ModelError for another model."""
        layers = model.num_layers
        found = sorted(self.inputs_of or (2, layers // 2, layers - 3))  # as vLLM and SGLang choose them
        distinct = len(set(found)) == TAPS and found[0] >= 0
        gives = isinstance(model, DecoderConfig) and model.hidden_size == self.target_width
        if not (distinct and gives and found[-1] < layers):
            reads = f"the head reads inputs of layers {found} with {self.target_width} elements"
            raise ModelError(f"{reads}; the model has {layers} layers with {model.hidden_size}: choose a head of it")
        return tuple(found)


def is_eagle3(fields: Fields) -> bool:
    """Tell whether a config.json names an EAGLE-3 head as its architecture."""
    return any("eagle3" in str(name).lower() for name in fields.get("architectures", ()))


def read(fields: Fields) -> Eagle3Config:
    """Read a config of a head. Raises ModelError."""
    if not is_eagle3(fields):
        raise ModelError(
            "no EAGLE-3 head: none of its architectures is LlamaForCausalLMEagle3 or Eagle3LlamaForCausalLM"
        )
    fields.only("num_hidden_layers", 1)
    for name in ("norm_before_residual", "attention_bias", "mlp_bias"):
        fields.only(name, False)
    own = fields.section("eagle_config")
    for name in ("use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm"):
        own.only(name, True)
    own.only("use_mtp_layernorm", False)
    # SGLang's numbers are of the layers with these outputs, vLLM's of the layers with these inputs.
    outputs = own.items("eagle_aux_hidden_state_layer_ids", int, ())
    inputs = fields.items("eagle_aux_hidden_state_layer_ids", int, [layer + 1 for layer in outputs])
    common = common_fields(fields)
    return Eagle3Config(
        **common,
        heads=heads_of(common),
        intermediate_size=fields.size("intermediate_size"),
        drafted_tokens=fields.size("draft_vocab_size", common["vocab_size"], high=common["vocab_size"]),
        target_width=fields.size("target_hidden_size", common["hidden_size"]),
        inputs_of=tuple(inputs),
    )
