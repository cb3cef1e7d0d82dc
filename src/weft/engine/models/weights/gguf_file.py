"""GGUF files of llama.cpp: config, tokenizer and weights of a model in one file."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import (
    GGML_QUANT_SIZES,
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFReader,
    GGUFValueType,
    ReaderTensor,
    dequantize,
    get_tensor_name_map,
)
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from weft.engine.models.config_json.common_fields import Rope
from weft.engine.models.config_json.fields import ModelError, first_line
from weft.engine.models.weights.source import Source

FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen2moe": "qwen2_moe", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
"""Model type of each supported GGUF architecture."""
FIELDS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
"""Metadata after the architecture's name, with the equivalent field of config.json."""
STRETCHED = {"factor": "factor", "original_context_length": "original_max_position_embeddings"}
"""Metadata after `rope.scaling.`, with the equivalent rotary parameter."""
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Rotary parameters of Llama 3.1 to 3.3. A file holds only the resulting factors."""
END_TOKENS = ("eos", "eot", "eom")
SPLITS: dict[str, PreTokenizer] = {
    "gpt-2": ByteLevel(add_prefix_space=False),
    "smollm": Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]),
}
"""Pre-tokenizers by their name in the file, for texts that transformers' default splits wrongly."""


class _Reader(GGUFReader):
    """GGUFReader that keeps lists of numbers as one array and skips lists of texts. The library makes three arrays per
    token and merge, which takes seconds for a vocabulary."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind, count = GGUFValueType(self._get(orig_offs, np.uint32)[0]), int(self._get(orig_offs + 4, np.uint64)[0])
        start = orig_offs + 12
        if kind in self.gguf_scalar_to_np:
            values = self._get(start, self.gguf_scalar_to_np[kind], count)
            return 12 + values.nbytes, [values], [0], [GGUFValueType.ARRAY, kind]
        end, order = start, "little" if self.byte_order == "I" else "big"
        for _ in range(count):
            end += 8 + int.from_bytes(self.data[end : end + 8].tobytes(), order)  # type: ignore[arg-type]
        return end - orig_offs, [], [], [GGUFValueType.ARRAY, kind]


class GgufFile:
    """Tensors of a GGUF file, by the names of Hugging Face's checkpoints. They are read slice by slice from the mapped
    file and dequantised to float32. A context manager, like `weft.engine.models.weights.checkpoint.Checkpoint`.

    Raises ModelError for a file that cannot be read, another architecture, or a type that `gguf` cannot dequantise.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            reader = _Reader(path)
            self.metadata: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
        except (OSError, ValueError, KeyError, IndexError) as error:
            raise ModelError(f"{path} cannot be read: {first_line(error)}; is the download complete?") from error
        if (parts := self.metadata.get("split.count", 1)) > 1:
            raise ModelError(f"{path} is one of {parts} parts; llama-gguf-split --merge joins them")
        self.tensors: dict[str, ReaderTensor] = {tensor.name: tensor for tensor in reader.tensors}
        for tensor in {tensor.tensor_type: tensor for tensor in reader.tensors}.values():
            _check_type(path, tensor)
        self.architecture = str(self.metadata.get("general.architecture"))
        if self.architecture not in FAMILIES:
            raise ModelError(
                f"{path}: architecture {self.architecture!r} is not supported in GGUF; supported: {', '.join(FAMILIES)}"
            )
        known = next(arch for arch in MODEL_ARCH if MODEL_ARCH_NAMES[arch] == self.architecture)
        self._names = get_tensor_name_map(known, int(self.field("block_count") or 0))

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: the file is unmapped with its last view."""

    def field(self, name: str) -> Any:
        """Return the architecture's metadata of this name, or None."""
        return self.metadata.get(f"{self.architecture}.{name}")

    def has(self, name: str) -> bool:
        """Check if a tensor exists."""
        return self._find(name)[0] in self.tensors

    def names(self, read: Collection[str]) -> dict[str, Path]:
        """Return the names of all tensors but rotary factors; tensors that weights read have their name in `read`."""
        known = {self._find(name)[0]: name for name in read}
        stored = (name for name in self.tensors if name != "rope_freqs.weight")
        return {known.get(name, re.sub(r"^blk\.", "model.layers.", name)): self.path for name in stored}

    def read(self, source: Source) -> Tensor:
        """Return the slice of a source in float32. Raises ModelError."""
        shape, take = source.stored()
        name, expert = self._find(source.name)
        if (tensor := self.tensors.get(name)) is None:
            raise ModelError(f"{self.path} has no tensor {name} for {source.name}; is the download complete?")
        found = tuple(map(int, reversed(tensor.shape)))
        wanted = shape if expert is None else (int(self.field("expert_count") or 0), *shape)
        if found not in (wanted, wanted[1:] if wanted[0] == 1 else wanted):
            raise ModelError(f"{name} in {self.path} is {found}, but the metadata asks for {wanted}")
        block, size = GGML_QUANT_SIZES[tensor.tensor_type]
        stored = tensor.data.view(np.uint8).reshape(*wanted[:-1], -1)
        if expert is not None:
            stored = stored[expert]
        if len(shape) == 1:
            values = dequantize(np.array(stored), tensor.tensor_type)[self._rows(name, take[0])]
        else:
            first, last = take[-1].start // block, -(-take[-1].stop // block)
            rows = (self._rows(name, take[0]), *take[1:-1], slice(first * size, last * size))
            values = dequantize(np.array(stored[rows]), tensor.tensor_type)
            values = values[..., take[-1].start - first * block : take[-1].stop - first * block]
        return source.restore(torch.from_numpy(values))

    def _find(self, name: str) -> tuple[str, int | None]:
        """Return the name of a tensor in the file, and the expert's index in it: the experts of a layer share a
        tensor."""
        expert = re.search(r"\.experts\.(\d+)\.", name)
        name = re.sub(r"\.experts\.\d+\.", ".experts.", name)
        return str(self._names.get_name(name, (".weight", ".bias"))), int(expert[1]) if expert else None

    def _rows(self, name: str, take: slice) -> Any:
        """Return the stored rows. Rotary embeddings of `llama` rotate neighbouring elements here, but pairs across
        halves in Hugging Face's checkpoints, so rows of queries and keys are permuted."""
        heads = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}.get(name.split(".")[-2])
        if self.architecture != "llama" or heads is None:
            return take
        dim = int(self.tensors[name].shape[-1]) // int(self.field(heads))
        head, row = np.divmod(np.arange(take.start, take.stop), dim)
        half, pair = np.divmod(row, dim // 2)
        return head * dim + 2 * pair + half

    def values(self) -> dict[str, Any]:
        """Return the fields of config.json from the metadata. Raises ModelError for unknown metadata."""
        try:
            return self._values()
        except Exception as error:  # metadata may have any type
            name = "" if isinstance(error, ModelError) else f"{type(error).__name__}: "
            raise ModelError(f"{self.path}: {name}{first_line(error)}") from error

    def _values(self) -> dict[str, Any]:
        prefix, tensors = f"{self.architecture}.", self.tensors
        left = {key.removeprefix(prefix): value for key, value in self.metadata.items() if key.startswith(prefix)}
        values = {field: left.pop(key) for key, field in FIELDS.items() if key in left}
        values["model_type"] = FAMILIES[self.architecture]
        if self.architecture == "llama" and values.get("num_experts"):
            values |= {"model_type": "mixtral", "num_local_experts": values.pop("num_experts")}
        if self.architecture == "qwen3moe":
            values["norm_topk_prob"] = True  # not in the metadata: llama.cpp always renormalises
        for field in ("hidden_size", "num_attention_heads"):
            if not values.get(field):
                raise ModelError(f"the metadata have no {field} ({', '.join(k for k in FIELDS if FIELDS[k] == field)})")
        dim = values.setdefault("head_dim", values["hidden_size"] // values["num_attention_heads"])
        for key in ("attention.value_length", "rope.dimension_count"):
            if left.pop(key, dim) != dim:
                raise ModelError(f"{prefix}{key} is {self.field(key)}; supported: {dim}, a head's size")
        left.pop("vocab_size", None)  # the embedding may have more rows
        values["vocab_size"] = int(tensors["token_embd.weight"].shape[1]) if "token_embd.weight" in tensors else None
        values["tie_word_embeddings"] = "output.weight" not in tensors
        if "blk.0.attn_q.bias" in tensors and not self.architecture.startswith("qwen2"):  # qwen2 always has biases
            values["attention_bias"] = True
        if "blk.0.ffn_down.bias" in tensors:
            values["mlp_bias"] = True
        ends = [self.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in END_TOKENS]
        values["eos_token_id"] = list(dict.fromkeys(end for end in ends if end is not None))
        values["rope_parameters"] = self._rope(left, dim)
        for key, value in left.items():
            raise ModelError(f"{prefix}{key} (value {value!r}) is not understood: it may change the logits")
        return values

    def _rope(self, left: dict[str, Any], dim: int) -> dict[str, Any]:
        """Return the rotary parameters, and remove what was read from `left`, the unread metadata."""
        base = left.pop("rope.freq_base", 10000.0)
        kind = left.pop("rope.scaling.type", "none")
        left.pop("rope.scaling.finetuned", None)
        found = {"rope_type": "default" if kind == "none" else kind, "rope_theta": base}
        found |= {field: left.pop(key) for name, field in STRETCHED.items() if (key := f"rope.scaling.{name}") in left}
        if "rope_freqs.weight" not in self.tensors:
            return found
        factors = torch.from_numpy(np.array(self.tensors["rope_freqs.weight"].data))
        stretched = {"rope_type": "llama3", "rope_theta": base, "factor": float(factors.max())} | LLAMA3
        plain, made = (Rope(p, dim, 1).frequencies()[0] for p in (found, stretched))
        if kind != "none" or factors.shape != plain.shape or not torch.allclose(plain / factors, made, rtol=1e-4):
            raise ModelError("rope_freqs.weight does not stretch the rotary embedding as Llama 3.1 does")
        return stretched


def read_tokenizer(path: Path) -> Any:
    """Return the tokenizer of the metadata, with its chat template. Raises ModelError for an unknown pre-tokenizer."""
    where = dict(gguf_file=path.name, name_or_path=str(path.parent))
    tokenizer = PreTrainedTokenizerFast(**where)  # type: ignore[no-untyped-call]
    split = GgufFile(path).metadata.get("tokenizer.ggml.pre")
    if split in SPLITS:
        tokenizer.backend_tokenizer.pre_tokenizer = SPLITS[split]
    elif isinstance(tokenizer.backend_tokenizer.pre_tokenizer, ByteLevel):  # transformers' silent default
        raise ModelError(f"its texts are split by {split!r} (tokenizer.ggml.pre), which is not known")
    return tokenizer


def _check_type(path: Path, tensor: ReaderTensor) -> None:
    """Raise ModelError for a type that cannot be dequantised."""
    kind = GGMLQuantizationType(tensor.tensor_type)
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError as error:
        what = f"{tensor.name} is stored as {kind.name}, which the package gguf does not dequantise"
        raise ModelError(f"{path}: {what}") from error
