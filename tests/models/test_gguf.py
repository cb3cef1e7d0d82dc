"""GGUF files: transformers' logits on layouts that cut blocks, every type by slices, one line for each refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, dequantize

from models.gguf_files import small_gguf
from models.layouts import check
from weft.engine.models.config_json.directory import explain_no_model
from weft.engine.models.config_json.fields import ModelError
from weft.engine.models.load import load_model
from weft.engine.models.registry import load_config
from weft.engine.models.weights.gguf_file import GgufFile
from weft.engine.models.weights.source import Source
from weft.planner.spec import Mesh

Kind = GGMLQuantizationType


@pytest.mark.parametrize(
    "family, kind",
    [
        ("llama", Kind.Q8_0),  # rows of queries and keys in another order, their biases too; stretched as Llama 3.1
        ("mixtral", Kind.Q4_1),
        ("qwen2", Kind.Q5_0),
        ("qwen2_moe", Kind.Q4_0),
        ("qwen3", Kind.BF16),
        ("qwen3_moe", Kind.Q8_0),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_logits_are_transformers(family: str, kind: Kind, tmp_path: Path) -> None:
    file, model = small_gguf(family, tmp_path / "model", kind)
    for mesh in (Mesh(1, 4, 2, 2), Mesh(1, 3, 1, 3)):
        check(file, mesh, lambda tokens: model(tokens[None], use_cache=False).logits[0], 61)


def written(
    path: Path, tensors: dict[str, tuple[Any, Kind]], metadata: dict[str, Any] | None = None, arch: str = "llama"
) -> Path:
    """A file with a few of a model's tensors. metadata: integers or texts, behind the architecture's name."""
    writer = GGUFWriter(path, arch)
    shape = {"block_count": 1, "embedding_length": 8, "context_length": 9, "attention.head_count": 2}
    for name, value in (shape | (metadata or {})).items():
        kinds = {str: GGUFValueType.STRING, float: GGUFValueType.FLOAT32}
        writer.add_key_value(f"{arch}.{name}", value, kinds.get(type(value), GGUFValueType.UINT32))
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.filterwarnings("ignore:invalid value")  # scales of random bits
@pytest.mark.parametrize("kind", sorted(Kind, key=str), ids=lambda kind: kind.name)
def test_every_type_is_read_by_slices_or_refused_by_name(kind: Kind, tmp_path: Path) -> None:
    block, size = GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(0).integers(0, 256, (3, 5, 2 * size), np.uint8)
    try:
        whole = torch.from_numpy(dequantize(data, kind))
    except NotImplementedError:
        file = written(tmp_path / "x.gguf", {"blk.0.ffn_up_exps.weight": (data, kind)})
        with pytest.raises(ModelError, match=rf"blk\.0\.ffn_up_exps\.weight is stored as {kind.name}, which the"):
            GgufFile(file)
        return
    file = written(tmp_path / "x.gguf", {"blk.0.ffn_up_exps.weight": (data, kind)}, {"expert_count": 3})
    with GgufFile(file) as opened:
        for rows, columns in ((slice(0, 5), slice(0, 2 * block)), (slice(1, 3), slice(block // 2, block + 1))):
            name = "model.layers.0.block_sparse_moe.experts.1.w3.weight"
            part = opened.read(Source(name, (5, 2 * block), (rows, columns)))
            assert torch.equal(part.nan_to_num(), whole[1, rows, columns].nan_to_num()), (rows, columns)


PLAIN = np.zeros((5, 8), np.float32)


@pytest.mark.parametrize(
    "metadata, message",
    [
        ({"attention.sliding_window": 4}, r"llama.attention.sliding_window \(value 4\) is not understood"),
        ({"rope.dimension_count": 2}, "llama.rope.dimension_count is 2; supported: 4, a head's size"),
        ({"rope.scaling.type": "longrope"}, "longrope"),
        ({"attention.head_count": 0}, r"the metadata have no num_attention_heads \(attention.head_count\)"),
        ({"attention.head_count": "two"}, "TypeError"),
        ({"feed_forward_length": 0}, "intermediate_size=0 is not an integer of 1 or more"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_one_line_says_what_is_refused(metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = written(tmp_path / "x.gguf", {"token_embd.weight": (PLAIN, Kind.F32)}, {"feed_forward_length": 8} | metadata)
    with pytest.raises(ModelError, match=message) as raised:
        load_config(path)
    assert str(raised.value).startswith(str(path)) and "\n" not in str(raised.value)


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "x.gguf", {}, arch="gemma3")
    with pytest.raises(ModelError, match="'gemma3' is not supported in GGUF; supported: llama, qwen2, qwen2moe, qwen3"):
        load_config(path)


def test_a_file_that_is_no_model_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    assert explain_no_model(path) == f"there is no file {path}"
    whole = written(path, {"token_embd.weight": (PLAIN, Kind.F32)}).read_bytes()
    assert explain_no_model(path) is None
    assert explain_no_model(tmp_path) == f"{tmp_path} has no config.json; to run a GGUF file, name the file: {path}"
    for broken in (b"", b"GGUF", b"{}" * 99, whole[:200], whole[:-40]):
        path.write_bytes(broken)
        with pytest.raises(ModelError, match=r"x.gguf cannot be read: .*; is the download complete\?"):
            GgufFile(path)
    part = GGUFWriter(path, "llama")
    part.add_key_value("split.count", 3, GGUFValueType.UINT16)
    part.write_header_to_file()
    part.write_kv_data_to_file()
    part.close()
    with pytest.raises(ModelError, match=r"x\.gguf is one of 3 parts; llama-gguf-split --merge joins them"):
        GgufFile(path)


def test_factors_that_no_llama_has_are_refused(tmp_path: Path) -> None:
    factors = np.array([1.0, 5.0], np.float32)
    tensors = {"token_embd.weight": (PLAIN, Kind.F32), "rope_freqs.weight": (factors, Kind.F32)}
    with pytest.raises(ModelError, match=r"rope_freqs.weight does not stretch .* as Llama 3.1"):
        load_config(written(tmp_path / "x.gguf", tensors))


def test_a_tensor_that_no_weight_reads_is_refused(tmp_path: Path) -> None:
    """Layers after the last one that is asked for are spares."""
    file, _ = small_gguf("qwen3", tmp_path / "model", Kind.F32)
    assert load_model(file, load_config(file, num_layers=1), Mesh(), 0).config.num_layers == 1
    reader = GGUFReader(file)
    tensors = {tensor.name: (np.array(tensor.data), Kind.F32) for tensor in reader.tensors}
    shape = {name.removeprefix("qwen3."): field.contents() for name, field in reader.fields.items() if "qwen3." in name}
    more = written(tmp_path / "x.gguf", tensors | {"blk.0.attn_sinks.weight": (PLAIN, Kind.F32)}, shape, "qwen3")
    with pytest.raises(ModelError, match=r"x\.gguf has a tensor .*0\.attn_sinks\.weight that a model .* does not read"):
        load_model(more, load_config(more), Mesh(), 0)
