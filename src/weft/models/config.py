"""What Weft needs to know of a model, read from a Hugging Face directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

ARCHITECTURES = ("qwen2_moe", "qwen3_moe", "qwen3")
ROPES = ("default", "linear", "yarn", "llama3")
"""Rotary embeddings whose frequencies do not change with the sequence's length."""


class ModelError(ValueError):
    """A model directory that cannot be served: one line with what to do."""


@dataclass(frozen=True)
class ModelConfig:
    """architecture: transformers' model_type. Widths in elements; `moe_layers` says which layers have experts.

    source: the transformers configuration, for what only one family needs.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    tie_embeddings: bool
    eos_token_ids: tuple[int, ...]
    intermediate_size: int
    num_experts: int
    experts_per_token: int
    moe_intermediate_size: int
    shared_expert_size: int
    norm_topk_prob: bool
    moe_layers: frozenset[int]
    source: Any

    def rope(self) -> tuple[torch.Tensor, float]:
        """(inverse frequencies float32 `[head_dim / 2]`, factor on cos and sin), as transformers has them."""
        kind = self.source.rope_parameters["rope_type"]
        if kind != "default":
            inverse, factor = ROPE_INIT_FUNCTIONS[kind](self.source, torch.device("cpu"))
            return inverse, float(factor)
        base = self.source.rope_parameters["rope_theta"]
        return 1.0 / base ** (torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim), 1.0


def load_config(model_dir: Path) -> ModelConfig:
    """Reads config.json. Raises ModelError for a missing directory or a model that Weft does not know."""
    if not (model_dir / "config.json").is_file():
        raise ModelError(f"{model_dir} has no config.json; give the directory of a Hugging Face model")
    try:
        source: Any = AutoConfig.from_pretrained(model_dir)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{model_dir / 'config.json'} cannot be read: {str(error).splitlines()[0]}") from error
    return from_transformers(source)


def from_transformers(source: Any) -> ModelConfig:
    """The same from a transformers configuration."""
    kind = source.model_type
    if kind not in ARCHITECTURES:
        raise ModelError(f"model type {kind!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    sliding = getattr(source, "layer_types", None) or []
    if any(t != "full_attention" for t in sliding) or (
        getattr(source, "use_sliding_window", False) and getattr(source, "sliding_window", None)
    ):
        raise ModelError(f"{kind} with sliding-window attention is not supported yet; set use_sliding_window to false")
    rope = source.rope_parameters["rope_type"]
    if rope not in ROPES:
        raise ModelError(f"rope type {rope!r} is not supported; supported: {', '.join(ROPES)}")
    if source.hidden_act != "silu":
        raise ModelError(f"activation {source.hidden_act!r} is not supported; supported: silu")
    experts = getattr(source, "num_experts", 0) or getattr(source, "num_local_experts", 0) or 0
    moe_layers = frozenset(
        i
        for i in range(source.num_hidden_layers)
        if experts and i not in source.mlp_only_layers and (i + 1) % source.decoder_sparse_step == 0
    )
    eos = source.eos_token_id
    return ModelConfig(
        architecture=kind,
        vocab_size=source.vocab_size,
        hidden_size=source.hidden_size,
        num_layers=source.num_hidden_layers,
        num_heads=source.num_attention_heads,
        num_kv_heads=source.num_key_value_heads,
        head_dim=getattr(source, "head_dim", None) or source.hidden_size // source.num_attention_heads,
        max_position=source.max_position_embeddings,
        rms_norm_eps=source.rms_norm_eps,
        tie_embeddings=bool(source.tie_word_embeddings),
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (eos,),
        intermediate_size=source.intermediate_size,
        num_experts=experts,
        experts_per_token=getattr(source, "num_experts_per_tok", 0),
        moe_intermediate_size=getattr(source, "moe_intermediate_size", 0),
        shared_expert_size=getattr(source, "shared_expert_intermediate_size", 0) or 0,
        norm_topk_prob=bool(getattr(source, "norm_topk_prob", False)),
        moe_layers=moe_layers,
        source=source,
    )
