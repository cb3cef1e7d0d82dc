"""EAGLE-3 heads with random weights, and their definition: each draft by a pass over all rows, without a cache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import rms_norm, silu
from transformers import AutoConfig, AutoModelForCausalLM

DRAFTED, HEADS, KV_HEADS, DIM, INNER = 120, 4, 2, 8, 24


def make_head(folder: Path, target: Path, inputs: Sequence[int] = (0, 1, 2), seed: int = 1, **changes: Any) -> Path:
    """Write a head for a model that reads the inputs of these layers. changes: of its config; `embedding`: a seed of an
    embedding of its own."""
    of, generator = AutoConfig.from_pretrained(target), torch.Generator().manual_seed(seed)
    width, embedding = changes.pop("hidden_size", of.hidden_size), changes.pop("embedding", None)
    values = dict(
        architectures=["LlamaForCausalLMEagle3"],
        model_type="llama",
        hidden_size=width,
        intermediate_size=INNER,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=DIM,
        vocab_size=of.vocab_size,
        draft_vocab_size=DRAFTED,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        tie_word_embeddings=False,
        target_hidden_size=of.hidden_size,
        eagle_config=dict(eagle_aux_hidden_state_layer_ids=[i - 1 for i in inputs], use_aux_hidden_state=True),
    )
    values |= changes

    def weight(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    queries, values_width, layer = HEADS * DIM, KV_HEADS * DIM, "midlayer"
    shapes = {
        "fc": (width, 3 * of.hidden_size),
        f"{layer}.self_attn.q_proj": (queries, 2 * width),
        f"{layer}.self_attn.k_proj": (values_width, 2 * width),
        f"{layer}.self_attn.v_proj": (values_width, 2 * width),
        f"{layer}.self_attn.o_proj": (width, queries),
        f"{layer}.mlp.gate_proj": (INNER, width),
        f"{layer}.mlp.up_proj": (INNER, width),
        f"{layer}.mlp.down_proj": (width, INNER),
        "lm_head": (values["draft_vocab_size"], width),
    }
    tensors = {f"{name}.weight": weight(*shape) for name, shape in shapes.items()}
    for name in (f"{layer}.input_layernorm", f"{layer}.hidden_norm", f"{layer}.post_attention_layernorm", "norm"):
        tensors[f"{name}.weight"] = 1 + weight(width)
    if embedding is not None:
        tensors["embed_tokens.weight"] = torch.randn(of.vocab_size, width, generator=generator)
    if values["draft_vocab_size"] < of.vocab_size:
        chosen = torch.randperm(of.vocab_size, generator=generator)[:DRAFTED].sort().values
        tensors["d2t"] = chosen - torch.arange(DRAFTED)
        tensors["t2d"] = torch.zeros(of.vocab_size, dtype=torch.bool).index_fill_(0, chosen, True)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


class DefinedHead:
    """Drafts of a head after a target, as the paper and its checkpoints define them. inputs: layers of the target."""

    def __init__(self, target: Path, head: Path, inputs: Sequence[int] = (0, 1, 2)):
        self.model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self.tensors, self.inputs = load_file(head / "model.safetensors"), inputs

    def weight(self, name: str) -> Tensor:
        return self.tensors[f"{name}.weight"]

    def norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, x.shape[-1:], self.weight(name), 1e-5)

    def heads(self, x: Tensor, name: str, rotated: bool = True) -> Tensor:
        """Return `[heads, T, DIM]`, each key and value for all query heads that share it."""
        y = (x @ self.weight(f"midlayer.self_attn.{name}_proj").t()).unflatten(-1, (-1, DIM)).transpose(0, 1)
        if rotated:
            angles = torch.arange(len(x))[:, None] / 1e4 ** (torch.arange(0, DIM, 2) / DIM)
            cos, sin, (left, right) = angles.cos(), angles.sin(), y.chunk(2, -1)
            y = torch.cat([left * cos - right * sin, right * cos + left * sin], -1)
        return y.repeat_interleave(HEADS // len(y), 0)

    def layer(self, tokens: Sequence[int], hidden: Tensor) -> Tensor:
        """Return the rows after the layer, before the last norm."""
        embedding = self.tensors.get("embed_tokens.weight", self.model.get_input_embeddings().weight)
        normed = self.norm(embedding[list(tokens)], "midlayer.input_layernorm")
        x = torch.cat([normed, self.norm(hidden, "midlayer.hidden_norm")], -1)
        scores = self.heads(x, "q") @ self.heads(x, "k").transpose(1, 2) / DIM**0.5
        seen = torch.ones(scores.shape[1:]).tril() > 0
        values = scores.where(seen, -torch.inf).softmax(-1) @ self.heads(x, "v", rotated=False)
        rows = hidden + values.transpose(0, 1).flatten(1) @ self.weight("midlayer.self_attn.o_proj").t()
        y = self.norm(rows, "midlayer.post_attention_layernorm")
        gate, up = (y @ self.weight(f"midlayer.mlp.{name}_proj").t() for name in ("gate", "up"))
        return rows + (silu(gate) * up) @ self.weight("midlayer.mlp.down_proj").t()

    @torch.no_grad()
    def drafts(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return the drafts after a sequence, whose last token has not run."""
        states = self.model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        hidden = torch.cat([states[layer][0] for layer in self.inputs], -1) @ self.weight("fc").t()
        follow = list(tokens[1:])
        for _ in range(count):
            last = self.layer(follow, hidden)[-1:]
            best = int((self.norm(last, "norm") @ self.weight("lm_head").t()).argmax())
            follow.append(best + int(self.tensors["d2t"][best]) if "d2t" in self.tensors else best)
            hidden = torch.cat([hidden, last])
        return follow[len(tokens) - 1 :]
