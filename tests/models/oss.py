"""Small models of GPT-OSS as they are published, and transformers' implementation of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GptOssConfig, GptOssForCausalLM


def small_config(**changes: Any) -> dict[str, Any]:
    """Every field that is published; divides over eight ranks."""
    return (
        dict(
            architectures=["GptOssForCausalLM"],
            model_type="gpt_oss",
            vocab_size=61,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            sliding_window=3,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=8,
            attention_bias=True,
            num_local_experts=8,
            num_experts_per_tok=3,
            experts_per_token=3,
            swiglu_limit=1.0,
            max_position_embeddings=64,
            initial_context_length=16,
            rope_theta=1e4,
            rope_scaling=dict(
                rope_type="yarn",
                factor=4.0,
                original_max_position_embeddings=16,
                beta_fast=32.0,
                beta_slow=1.0,
                truncate=False,
            ),
            rms_norm_eps=1e-5,
            hidden_act="silu",
            eos_token_id=0,
            tie_word_embeddings=False,
            torch_dtype="float32",
        )
        | changes
    )


class GptOss(nn.Module):
    """transformers' model, every weight random."""

    def __init__(self, values: dict[str, Any], seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        config = GptOssConfig.from_dict(dict(values))
        config._attn_implementation = "eager"
        self.whole = GptOssForCausalLM(config).eval()
        with torch.no_grad():
            for name, weight in self.whole.named_parameters():
                if "norm" in name:
                    weight.uniform_(0.5, 1.5)
                else:
                    vector = weight.dim() == 1 or name.endswith("_bias")
                    weight.normal_(0, 0.5 if vector else 1.2 / 32**0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of one sequence, `[tokens, vocabulary]`."""
        return self.whole(input_ids=tokens[None], use_cache=False).logits[0]

    def published(self) -> dict[str, Tensor]:
        """The weights by the names of the published index, experts not quantised."""
        return dict(self.whole.state_dict())


def small_gpt_oss(directory: Path, seed: int = 0, **changes: Any) -> GptOss:
    """A random model, saved into the directory."""
    values = small_config(**changes)
    model = GptOss(values, seed)
    save_file(model.published(), directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(values))
    return model
