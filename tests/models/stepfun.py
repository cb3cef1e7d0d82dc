"""Small models of Step-3.5-Flash as they are published, and transformers' implementation of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7TextModel

FULL, SLIDING = "full_attention", "sliding_attention"


def small_config(**changes: Any) -> dict[str, Any]:
    """Every field that is published, lists as long as with the layers that draft tokens; divides over eight ranks."""
    kinds = [FULL, SLIDING, SLIDING, FULL, SLIDING, SLIDING]
    return (
        dict(
            model_type="step3p5",
            architectures=["Step3p5ForCausalLM"],
            vocab_size=61,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            max_seq_len=64,
            max_position_embeddings=64,
            torch_dtype="float32",
            use_qk_norm=True,
            layer_types=kinds,
            rope_theta=[5e4 if kind == FULL else 1e4 for kind in kinds],
            partial_rotary_factors=[0.5 if kind == FULL else 1.0 for kind in kinds],
            rope_scaling=dict(
                rope_type="llama3",
                factor=2.0,
                original_max_position_embeddings=16,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
            ),
            yarn_only_types=[FULL],
            use_rope_layers=[],
            num_attention_heads=8,
            num_attention_groups=2,
            head_dim=8,
            attention_other_setting=dict(
                attention_type=SLIDING, num_attention_heads=16, num_attention_groups=2, head_dim=8, true_head_dim=8
            ),
            use_head_wise_attn_gate=True,
            sliding_window=3,
            att_impl_type="GQA",
            sink=False,
            use_moe=True,
            moe_layers_enum="2,3",
            moe_num_experts=16,
            moe_top_k=3,
            moe_intermediate_size=8,
            moe_layer_offset=0,
            moe_every_n_layer=1,
            moe_router_activation="sigmoid",
            moe_router_scaling_factor=3.0,
            use_moe_router_bias=True,
            need_fp32_gate=True,
            norm_expert_weight=True,
            share_expert_dim=16,
            swiglu_limits=[0.0, 0.0, 0.0, 0.5, 0.0, 0.0],
            swiglu_limits_shared=[0.6, 0.0, 0.4, 0.0, 0.0, 0.0],
            zero_centered=True,
            num_nextn_predict_layers=2,
            tie_word_embeddings=False,
            bos_token_id=1,
            eos_token_id=[0],
        )
        | changes
    )


class Step(nn.Module):
    """transformers' decoder, which has no head of its own without pictures, and a head."""

    def __init__(self, values: dict[str, Any], seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        config = Step3p7TextConfig.from_dict(dict(values))
        config._attn_implementation = "eager"
        self.model = Step3p7TextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        with torch.no_grad():
            for name, weight in [*self.named_parameters(), *self.named_buffers()]:
                if "norm" in name or name.endswith("correction_bias"):
                    weight.uniform_(-0.5, 0.5)
                elif "inv_freq" not in name:
                    weight.normal_(0, 1.2 / weight.shape[-1] ** 0.5)
        self.eval()

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of one sequence, `[tokens, vocabulary]`."""
        return self.lm_head(self.model(input_ids=tokens[None], use_cache=False).last_hidden_state)[0]

    def published(self) -> dict[str, Tensor]:
        """The weights by the names of the published index, where experts are stacked and gate and up are not fused."""
        tensors: dict[str, Tensor] = {}
        for name, weight in self.state_dict().items():
            name = name.replace(".mlp.gate.e_score_correction_bias", ".moe.router_bias")
            name = name.replace(".mlp.gate.", ".moe.gate.").replace(".mlp.shared_experts.", ".share_expert.")
            if name.endswith(".mlp.experts.gate_up_proj"):
                for part, half in zip(("gate", "up"), weight.chunk(2, dim=1), strict=True):
                    tensors[name.replace("mlp.experts.gate_up_proj", f"moe.{part}_proj.weight")] = half.contiguous()
            else:
                tensors[name.replace(".mlp.experts.down_proj", ".moe.down_proj.weight")] = weight.contiguous()
        return tensors


def small_step(directory: Path, seed: int = 0, **changes: Any) -> Step:
    """A random model, saved into the directory."""
    values = small_config(**changes)
    model = Step(values, seed)
    save_file(model.published(), directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(values))
    return model
