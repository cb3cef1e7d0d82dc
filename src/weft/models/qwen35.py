"""Qwen3.5-MoE, its text part: layers of Gated DeltaNet and of gated attention, all with experts and a shared one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from weft.models.attention import Attention, HeadNorms, Heads
from weft.models.decoder import DecoderConfig, DecoderLayer
from weft.models.deltanet import DeltaHeads, GatedDeltaNet
from weft.models.expert_sources import ExpertLayout, ExpertStorage
from weft.models.layers import Builder, Layer
from weft.models.model_config import Fields, ModelError, common_fields, rope_of
from weft.models.moe import SparseMoE
from weft.models.routing import Routing

FULL, LINEAR = "full_attention", "linear_attention"


@dataclass(frozen=True)
class Qwen35Config(DecoderConfig):
    """Widths in elements. kinds: of each layer. heads: of full attention; delta: of linear attention."""

    norms_less_one: ClassVar[bool] = True
    prefix: ClassVar[str] = "model.language_model"

    kinds: tuple[str, ...]
    heads: Heads
    delta: DeltaHeads
    num_experts: int
    moe_intermediate_size: int
    shared_size: int
    routing: Routing

    @property
    def expert_layout(self) -> ExpertLayout:
        """As the two releases have them."""
        return "fused" if self.storage.float8_block is None else "per_expert"

    def layer(self, b: Builder, path: str, index: int) -> DecoderLayer:
        mixer: Layer
        if self.kinds[index] == FULL:
            mixer = Attention(b, f"{path}.self_attn", self.hidden_size, self.heads)
        else:
            mixer = GatedDeltaNet(b, f"{path}.linear_attn", self.hidden_size, self.delta, self.rms_norm_eps)
        mlp = SparseMoE(
            b,
            f"{path}.mlp",
            self.hidden_size,
            experts=self.num_experts,
            inner=self.moe_intermediate_size,
            routing=self.routing,
            shared=self.shared_size,
            stored=ExpertStorage(layout=self.expert_layout),
        )
        return DecoderLayer(b, path, self, mixer, mlp)


def read(whole: Fields) -> Qwen35Config:
    """Reads a published config, of text and pictures, as a model of text alone. Raises ModelError."""
    for name in ("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"):
        whole.get(name)
    whole.only("language_model_only", False, True)
    for name in ("tie_word_embeddings", "is_encoder_decoder"):
        whole.only(name, False)
    text = dict(whole.need("text_config")) | {"model_type": whole.family}
    text.setdefault("quantization_config", whole.get("quantization_config"))
    fields = Fields(text)
    config = read_text(fields, Qwen35Config)
    fields.finish()
    return config


def read_text(fields: Fields, kind: type[Qwen35Config], by_key_head: bool = False) -> Qwen35Config:
    """Reads the fields of the text's part. by_key_head: as `DeltaHeads`. Raises ModelError."""
    fields.get("mtp_num_hidden_layers"), fields.get("mtp_use_dedicated_embeddings")  # draft layers, which are not run
    fields.get("intermediate_size")  # of layers without experts, of which there are none
    fields.only("tie_word_embeddings", False)
    fields.only("mlp_only_layers", [])
    fields.only("decoder_sparse_step", 1)
    for name in ("attn_output_gate", "norm_topk_prob"):
        fields.only(name, True)
    fields.only("mamba_ssm_dtype", "float32")
    layers, interval = range(fields.size("num_hidden_layers")), fields.size("full_attention_interval", 4)
    kinds = tuple(fields.get("layer_types", [LINEAR if (i + 1) % interval else FULL for i in layers]))
    if len(kinds) != len(layers) or not set(kinds) <= {FULL, LINEAR}:
        raise ModelError(f"layer_types {list(kinds)} are not {len(layers)} of {FULL} and {LINEAR}")
    parameters = dict(fields.need("rope_parameters"))
    part = parameters.pop("partial_rotary_factor", fields.get("partial_rotary_factor", 0.25))
    fields.only("partial_rotary_factor", part)
    for name in ("mrope_section", "mrope_interleaved"):  # of text alone, all three positions are one
        parameters.pop(name, None)
    dim = fields.need("head_dim")
    common = common_fields(
        fields, dim, rope=rope_of(parameters, int(dim * part), fields.need("max_position_embeddings"))
    )
    bias, experts = fields.get("attention_bias", False), fields.size("num_experts")
    return kind(
        **common,
        kinds=kinds,
        heads=Heads(
            common["num_heads"],
            common["num_kv_heads"],
            dim,
            HeadNorms(common["rms_norm_eps"], less_one=True),
            bias=bias,
            output_bias=bias,
            gate="element",
        ),
        delta=DeltaHeads(
            fields.need("linear_num_key_heads"),
            fields.need("linear_num_value_heads"),
            fields.need("linear_key_head_dim"),
            fields.need("linear_value_head_dim"),
            fields.need("linear_conv_kernel_dim"),
            by_key_head,
        ),
        num_experts=experts,
        moe_intermediate_size=fields.need("moe_intermediate_size"),
        shared_size=fields.need("shared_expert_intermediate_size"),
        routing=Routing(fields.size("num_experts_per_tok"), renormalise=True).among(experts),
    )
