"""Small models of Qwen3-Next as they are published, and transformers' implementation of them."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM


def small_config(**changes: Any) -> dict[str, Any]:
    """Every field that is published; divides over eight ranks, with fewer key heads than ranks in every layer."""
    values = dict(
        architectures=["Qwen3NextForCausalLM"],
        model_type="qwen3_next",
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        layer_types=["linear_attention", "full_attention"] * 2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
        attention_bias=True,
        partial_rotary_factor=0.5,
        rope_theta=1e4,
        linear_conv_kernel_dim=4,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=6,
        linear_value_head_dim=5,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        moe_intermediate_size=16,
        shared_expert_intermediate_size=24,
        rms_norm_eps=1e-6,
        max_position_embeddings=64,
        hidden_act="silu",
        eos_token_id=0,
        tie_word_embeddings=False,
        torch_dtype="float32",
    )
    return values | changes


class Qwen3Next(nn.Module):
    """transformers' model, every weight random."""

    def __init__(self, values: dict[str, Any], seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.whole = Qwen3NextForCausalLM(Qwen3NextConfig.from_dict(dict(values))).eval()
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
        """The weights as transformers saves them, which is by the names of the published index."""
        with TemporaryDirectory() as directory:
            self.whole.save_pretrained(directory)
            return load_file(Path(directory) / "model.safetensors")


def small_qwen3_next(directory: Path, seed: int = 0, **changes: Any) -> Qwen3Next:
    """A random model, saved into the directory as transformers saves it."""
    model = Qwen3Next(small_config(**changes), seed)
    model.whole.save_pretrained(directory)
    return model
