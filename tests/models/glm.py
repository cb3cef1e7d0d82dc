"""Small models of GLM-4.5 as they are published, and transformers' implementation of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM


def small_config(**changes: Any) -> dict[str, Any]:
    """Every feature of both sizes; divides over eight ranks, with fewer key heads than ranks."""
    values = dict(
        architectures=["Glm4MoeForCausalLM"],
        model_type="glm4_moe",
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=8,
        attention_bias=True,
        use_qk_norm=True,
        partial_rotary_factor=0.5,
        rope_theta=1e4,
        max_position_embeddings=64,
        first_k_dense_replace=1,
        n_routed_experts=16,
        n_shared_experts=2,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=3,
        moe_intermediate_size=8,
        norm_topk_prob=True,
        routed_scaling_factor=1.5,
        num_nextn_predict_layers=1,
        rms_norm_eps=1e-5,
        hidden_act="silu",
        eos_token_id=0,
        tie_word_embeddings=False,
        torch_dtype="float32",
    )
    return values | changes


class Glm(nn.Module):
    """transformers' model, every weight random."""

    def __init__(self, values: dict[str, Any], seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.whole = Glm4MoeForCausalLM(Glm4MoeConfig.from_dict(dict(values))).eval()
        with torch.no_grad():
            for name, weight in self.whole.named_parameters():
                if "norm" in name:
                    weight.uniform_(0.5, 1.5)
                else:
                    weight.normal_(0, 0.5 if weight.dim() == 1 else 1.2 / weight.shape[-1] ** 0.5)
            for name, weight in self.whole.named_buffers():
                if name.endswith("correction_bias"):
                    weight.uniform_(-0.5, 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of one sequence, `[tokens, vocabulary]`."""
        return self.whole(input_ids=tokens[None], use_cache=False).logits[0]

    def published(self) -> dict[str, Tensor]:
        """The weights by the names of the published index, where no experts are stacked or fused."""
        tensors: dict[str, Tensor] = {}
        for name, weight in self.whole.state_dict().items():
            head, _, end = name.rpartition(".")
            if not head.endswith(".experts"):
                tensors[name] = weight
                continue
            for e, expert in enumerate(weight):
                parts = dict(zip(("gate", "up"), expert.chunk(2), strict=True)) if end[0] == "g" else {"down": expert}
                tensors |= {f"{head}.{e}.{part}_proj.weight": half.contiguous() for part, half in parts.items()}
        return tensors


def small_glm(directory: Path, seed: int = 0, **changes: Any) -> Glm:
    """A random model, saved into the directory as transformers saves it."""
    model = Glm(small_config(**changes), seed)
    model.whole.save_pretrained(directory)
    return model
