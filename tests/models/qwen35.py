"""Small models of Qwen3.5-MoE as they are published, and transformers' implementation of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeForCausalLM

LINEAR, FULL = "linear_attention", "full_attention"


def small_config(**changes: Any) -> dict[str, Any]:
    """Every field that is published; divides over eight ranks, with fewer key heads than ranks in every layer.

    changes: of the text's part.
    """
    text = dict(
        model_type="qwen3_5_moe_text",
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=4,
        layer_types=[LINEAR, FULL, LINEAR, FULL],
        full_attention_interval=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
        attention_bias=True,
        attn_output_gate=True,
        linear_conv_kernel_dim=4,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=6,
        linear_value_head_dim=5,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=24,
        mlp_only_layers=[],
        rms_norm_eps=1e-6,
        max_position_embeddings=64,
        mamba_ssm_dtype="float32",
        mtp_num_hidden_layers=1,
        mtp_use_dedicated_embeddings=False,
        hidden_act="silu",
        dtype="float32",
        eos_token_id=0,
        rope_parameters=dict(
            rope_type="default",
            rope_theta=1e4,
            partial_rotary_factor=0.5,
            mrope_section=[2, 1, 1],
            mrope_interleaved=True,
        ),
    )
    return dict(
        architectures=["Qwen3_5MoeForConditionalGeneration"],
        model_type="qwen3_5_moe",
        text_config=text | changes,
        vision_config=dict(model_type="qwen3_5_moe", depth=27),
        image_token_id=56,
        video_token_id=57,
        vision_start_token_id=53,
        vision_end_token_id=54,
        tie_word_embeddings=False,
    )


class Qwen35(nn.Module):
    """transformers' text model, every weight random."""

    def __init__(self, values: dict[str, Any], seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.whole = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig.from_dict(dict(values["text_config"]))).eval()
        with torch.no_grad():
            for name, weight in self.whole.named_parameters():
                if name.endswith("linear_attn.norm.weight"):
                    weight.uniform_(0.5, 1.5)
                elif "norm" in name or name.endswith(("A_log", "dt_bias")):
                    weight.uniform_(-0.5, 0.5)
                else:
                    weight.normal_(0, 0.5 if weight.dim() == 1 else 1.2 / weight.shape[-1] ** 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of one sequence, `[tokens, vocabulary]`."""
        return self.whole(input_ids=tokens[None], use_cache=False).logits[0]

    def published(self) -> dict[str, Tensor]:
        """The weights by the names of the published index."""
        return {
            name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: weight
            for name, weight in self.whole.state_dict().items()
        }


def small_qwen35(directory: Path, seed: int = 0, **changes: Any) -> Qwen35:
    """A random model, saved into the directory."""
    values = small_config(**changes)
    model = Qwen35(values, seed)
    save_file(model.published(), directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(values))
    return model
