"""Qwen3-Next and the text part of Qwen3.5-MoE, its successor: layers of Gated DeltaNet and of gated attention, all with
experts and a shared one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from weft.engine.models.config_json.common_fields import FULL, LINEAR, common_fields
from weft.engine.models.config_json.fields import MAX_EXPERTS, MAX_LAYERS, Fields, ModelError
from weft.engine.models.families.shared_layers import ExpertsConfig, heads_of
from weft.engine.models.layers.attention import Attention, HeadNorms, Heads
from weft.engine.models.layers.basic import Builder, Layer
from weft.engine.models.layers.deltanet import DeltaHeads, GatedDeltaNet
from weft.engine.models.layers.moe import MoEConfig
from weft.engine.models.layers.routing import Routing
from weft.engine.models.weights.expert_sources import ExpertStorage


@dataclass(frozen=True)
class Qwen35Config(ExpertsConfig):
    """kinds: one per layer. heads: heads of full attention. delta: heads of linear attention."""

    norms_less_one: ClassVar[bool] = True
    prefix: ClassVar[str] = "model.language_model"
    spares: ClassVar[tuple[str, ...]] = ("mtp.", "model.visual.")

    kinds: tuple[str, ...]
    heads: Heads
    delta: DeltaHeads

    def attention(self, b: Builder, path: str, index: int) -> Layer:
        if self.kinds[index] == FULL:
            return Attention(b, f"{path}.self_attn", self.hidden_size, self.heads)
        return GatedDeltaNet(b, f"{path}.linear_attn", self.hidden_size, self.delta, self.rms_norm_eps)


@dataclass(frozen=True)
class Qwen3NextConfig(Qwen35Config):
    """Text-only model."""

    prefix: ClassVar[str] = "model"


def read_qwen3_next(fields: Fields) -> Qwen35Config:
    """Read a config of Qwen3-Next or Qwen3-Coder-Next. Raises ModelError."""
    return read_text(fields, Qwen3NextConfig, qwen3_next=True)


def read(whole: Fields) -> Qwen35Config:
    """Read a published config, of text and pictures, as a text-only model. Raises ModelError."""
    for name in ("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"):
        whole.get(name)
    whole.only("language_model_only", False, True)
    for name in ("tie_word_embeddings", "is_encoder_decoder"):
        whole.only(name, False)
    text = whole.section("text_config", quantization_config=whole.get("quantization_config"))
    return read_text(text, Qwen35Config)


def read_text(fields: Fields, kind: type[Qwen35Config], qwen3_next: bool = False) -> Qwen35Config:
    """Read the fields of the text part. Raises ModelError. qwen3_next: checkpoints group DeltaNet's projections by key
    head, and store experts one by one."""
    fields.get("mtp_num_hidden_layers"), fields.get("mtp_use_dedicated_embeddings")  # draft layers, which are not run
    fields.get("intermediate_size")  # for layers without experts, which do not occur
    fields.only("tie_word_embeddings", False)
    fields.only("mlp_only_layers", [])
    fields.only("decoder_sparse_step", 1)
    for name in ("attn_output_gate", "norm_topk_prob"):
        fields.only(name, True)
    fields.only("mamba_ssm_dtype", "float32")
    layers = range(fields.size("num_hidden_layers", high=MAX_LAYERS))
    interval = fields.size("full_attention_interval", 4)
    kinds = tuple(fields.items("layer_types", str, [LINEAR if (i + 1) % interval else FULL for i in layers]))
    if len(kinds) != len(layers) or not set(kinds) <= {FULL, LINEAR}:
        raise ModelError(f"layer_types {list(kinds)} are not {len(layers)} of {FULL} and {LINEAR}")
    parameters = fields.section("rope_parameters")
    part = parameters.number("partial_rotary_factor", fields.number("partial_rotary_factor", 0.25), high=1.0)
    fields.only("partial_rotary_factor", part)
    for name in ("mrope_section", "mrope_interleaved"):  # for text, all three positions are equal
        parameters.get(name)
    common = common_fields(fields, fields.size("head_dim"), part=part)
    norms, bias = HeadNorms(common["rms_norm_eps"], less_one=True), fields.flag("attention_bias")
    fused = not qwen3_next and fields.get("quantization_config") is None
    return kind(
        **common,
        kinds=kinds,
        heads=heads_of(common, norms=norms, bias=bias, output_bias=bias, gate="element"),
        delta=DeltaHeads(
            fields.size("linear_num_key_heads"),
            fields.size("linear_num_value_heads"),
            fields.size("linear_key_head_dim"),
            fields.size("linear_value_head_dim"),
            fields.size("linear_conv_kernel_dim"),
            by_key_head=qwen3_next,
        ),
        moe=MoEConfig(
            fields.size("num_experts", high=MAX_EXPERTS),
            fields.size("moe_intermediate_size"),
            Routing(fields.size("num_experts_per_tok"), renormalise=True),
            shared=fields.size("shared_expert_intermediate_size"),
            stored=ExpertStorage(layout="fused" if fused else "per_expert"),
        ),
    )
