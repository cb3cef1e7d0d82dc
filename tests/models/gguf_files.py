"""Writes small models of transformers as GGUF files, as llama.cpp's converter does: its names, its order of the rows of
queries and keys, a layer's experts in one tensor.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, dequantize, quantize
from safetensors.torch import load_file, save_file
from support import MODELS, small_model
from tokenizers import pre_tokenizers
from torch import Tensor

from weft.engine.models.config_json.common_fields import Rope

ARCHITECTURES = {
    "llama": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "block_sparse_moe.experts.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.w3": "ffn_up_exps",
    "block_sparse_moe.experts.w2": "ffn_down_exps",
}
MERGES = ["a b", "Ġ Ġ"]
WIDE = dict(hidden_size=64, intermediate_size=64, num_attention_heads=8, num_key_value_heads=4)
"""Rows of two blocks, which splits over 4 ranks cut."""
MORE: dict[str, dict[str, Any]] = {
    "llama": dict(
        rope_parameters=dict(
            rope_type="llama3",
            rope_theta=5e5,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
        attention_bias=True,
    ),
    "mixtral": dict(sliding_window=None),
    "qwen2_moe": dict(mlp_only_layers=[], moe_intermediate_size=32, shared_expert_intermediate_size=64),
    "qwen3_moe": dict(mlp_only_layers=[], moe_intermediate_size=32),
}


def small_gguf(
    family: str, directory: Path, kind: GGMLQuantizationType, tokens: Sequence[str] = (), **changes: Any
) -> tuple[Path, Any]:
    """A small GGUF file with matrices of this type, and transformers' model with the weights that it holds.

    tokens: as `write_gguf`.
    """
    model = small_model(family, 4, directory, **(WIDE | MORE.get(family, {}) | changes))
    file = write_gguf(directory, kind, tokens)
    return file, MODELS[family].from_pretrained(directory, dtype=torch.float32, config=model.config).eval()


def write_gguf(directory: Path, kind: GGMLQuantizationType, tokens: Sequence[str] = ()) -> Path:
    """Write a directory's model next to it, with matrices of this type, and round the directory's own alike.

    tokens: of a byte-level vocabulary, the first one of which is a control token that ends texts.
    """
    config = json.loads((directory / "config.json").read_text())
    path = directory.with_name(f"{directory.name}.gguf")
    writer = GGUFWriter(path, arch := ARCHITECTURES[config["model_type"]])
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(7)
    rope, dim = config["rope_parameters"], config.get("head_dim") or config["hidden_size"] // heads
    writer.add_rope_freq_base(rope["rope_theta"])
    if arch == "llama":
        writer.add_rope_dimension_count(dim)
        writer.add_vocab_size(config["vocab_size"])
    else:
        writer.add_key_length(dim)
        writer.add_value_length(dim)
    if experts := config.get("num_experts") or config.get("num_local_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if arch.endswith("moe"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if arch == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    writer.add_eos_token_id(0)
    if tokens:
        _add_tokenizer(writer, tokens)
    if rope["rope_type"] == "llama3":
        plain = Rope({"rope_theta": rope["rope_theta"]}, dim, 1).frequencies()[0]
        writer.add_tensor("rope_freqs.weight", (plain / Rope(rope, dim, 1).frequencies()[0]).numpy())

    tensors, rounded = load_file(directory / "model.safetensors"), dict[str, Tensor]()
    stacks: defaultdict[str, list[Tensor]] = defaultdict(list)
    for name in sorted(tensors, key=lambda name: [int(part) if part.isdigit() else -1 for part in name.split(".")]):
        weight = tensors[name].float()
        matrix = len(weight) > 1 and weight.dim() > 1
        rounded[name] = torch.from_numpy(dequantize(quantize(weight.numpy(), kind), kind)) if matrix else weight
        stacks[_name(name)].append(_rows(name, weight, heads, kv_heads) if arch == "llama" else weight)
    for name, parts in stacks.items():
        whole = torch.stack(parts) if "_exps" in name else parts[0]
        whole = whole[0] if name.endswith("inp_shexp.weight") else whole
        if whole.dim() > 1:
            writer.add_tensor(name, quantize(whole.contiguous().numpy(), kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, whole.contiguous().numpy())
    save_file(rounded, directory / "model.safetensors", {"format": "pt"})
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_tokens(count: int) -> list[str]:
    """`count` tokens: an end, each byte, and two merges."""
    merged = [merge.replace(" ", "") for merge in MERGES]
    known = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *merged]
    return [*known, *(f"<unused{i}>" for i in range(len(known), count))]


def _add_tokenizer(writer: GGUFWriter, tokens: Sequence[str]) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL, *[TokenType.NORMAL] * (len(tokens) - 1)])
    writer.add_token_merges(MERGES)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}assistant:")


def _name(name: str) -> str:
    """The name in the file."""
    name, _, end = re.sub(r"\.experts\.\d+\.", ".experts.", name).rpartition(".")
    if layer := re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name):
        return f"blk.{layer[1]}.{NAMES[layer[2]]}.{end}"
    return f"{NAMES[name]}.{end}"


def _rows(name: str, weight: Tensor, heads: int, kv_heads: int) -> Tensor:
    """`permute` of llama.cpp's convert_hf_to_gguf.py."""
    count = {"q_proj": heads, "k_proj": kv_heads}.get(name.split(".")[-2])
    if count is None:
        return weight
    halves = weight.reshape(count, 2, weight.shape[0] // count // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)
