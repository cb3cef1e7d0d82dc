"""Checkpoints: shards of ranks, several files, and directories that cannot be served."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import small_model
from torch import Tensor
from transformers import Qwen3ForCausalLM

from weft.engine.models.config_json.fields import ModelError
from weft.engine.models.load import load_model, model_shape
from weft.engine.models.registry import load_config
from weft.engine.models.weights import expert_sources
from weft.planner.spec import LayoutError, Mesh


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    small_model("qwen2_moe", 4, tmp_path)
    return tmp_path


def test_a_rank_holds_its_shard_only(directory: Path) -> None:
    config = load_config(directory)
    whole = dict(load_model(directory, config, Mesh(), 0).named_parameters())
    ranks = [dict(load_model(directory, config, Mesh(1, 4, 2, 2), r).named_parameters()) for r in range(4)]
    for name, weight in whole.items():
        held = [r[name].numel() for r in ranks]
        replicated = any(part in name for part in ("norm", "embed", "head", "gate.weight", "router", "shared_gate"))
        if replicated:
            assert held == [weight.numel()] * 4, name
        elif "qkv" not in name:  # two of its key-value heads are held twice
            assert held == [weight.numel() // 4] * 4, name


def test_a_shape_makes_no_sources_of_experts(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first one of each weight, by which the weight's format is chosen."""
    config, made, true = load_config(directory), list[str](), expert_sources._parts_of_expert
    monkeypatch.setattr(expert_sources, "_parts_of_expert", lambda path, *more: made.append(path) or true(path, *more))
    model_shape(config, Mesh(), torch.float32)
    assert 0 < max(Counter(made).values()) <= 3
    load_model(directory, config, Mesh(), 0)
    assert min(Counter(made).values()) > 2 * 4  # of four experts


def test_progress_counts_every_tensor(directory: Path) -> None:
    seen: list[tuple[int, int]] = []
    load_model(directory, load_config(directory), Mesh(), 0, progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == list(range(1, seen[-1][1] + 1))


def test_several_files_give_the_same_weights(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    split = tmp_path_factory.mktemp("split")
    tensors = load_file(directory / "model.safetensors")
    names = sorted(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({n: tensors[n] for n in part}, split / file)
    weight_map = {n: file for file, part in files.items() for n in part}
    (split / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (split / "config.json").write_text((directory / "config.json").read_text())
    mesh = Mesh(2, 2, 4, 1)
    one, several = (dict(load_model(d, load_config(d), mesh, 3).named_parameters()) for d in (directory, split))
    assert one.keys() == several.keys() and all(torch.equal(one[n], several[n]) for n in one)


FLOAT8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def change_config(directory: Path, **values: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_directories_that_cannot_be_served(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json; give the directory"):
        load_config(tmp_path_factory.mktemp("empty"))
    good = load_config(directory)
    with pytest.raises(LayoutError, match=r"experts.*8 are too few for ep=9; choose ep of at most 8"):
        load_model(directory, good, Mesh(9, 1, 9, 1), 0)
    change_config(directory, vocab_size=62)
    with pytest.raises(
        ModelError, match=r"embed_tokens\.weight .* is \(61, 32\), but config\.json asks for \(62, 32\)"
    ):
        load_model(directory, load_config(directory), Mesh(), 0)
    for change, text in (
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported .*; supported: 'silu'"),
        ({"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window=True is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2}, "num_hidden_layers"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer type 'sliding_attention' is not supported"),
        ({"hidden_size": "wide"}, r"not a config of model type 'qwen2_moe': .*'hidden_size' expected int"),
        (
            {"attention_chunk_size": 8},
            r"config\.json: config field 'attention_chunk_size' \(value 8\) is not understood",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config .* is not supported"),
        (
            {"quantization_config": FLOAT8 | {"activation_scheme": "static"}},
            "quantization_config.activation_scheme='static' is not supported",
        ),
        (
            {"quantization_config": FLOAT8 | {"fmt": "e5m2"}},
            "quantization_config.fmt='e5m2' is not supported .*; supported: 'e4m3'",
        ),
        (
            {"quantization_config": FLOAT8 | {"weight_block_size": None}},
            "is not supported; supported: .* weight_block_",
        ),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "'awq'.* is not supported"),
        ({"dtype": "float2"}, "not a config .*'float2'"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope type 'dynamic'"),
        ({"model_type": "mamba2"}, "model type 'mamba2' is not supported.* supported: .*qwen2_moe"),
        (
            {
                "rope_parameters": {
                    "rope_type": "linear",
                    "rope_theta": 1e4,
                    "factor": 2.0,
                    "partial_rotary_factor": 0.5,
                }
            },
            r"rope_parameters.partial_rotary_factor=0.5 is not supported",
        ),
    ):
        before = (directory / "config.json").read_text()
        change_config(directory, **change)
        with pytest.raises(ModelError, match=text):
            load_config(directory)
        (directory / "config.json").write_text(before)
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ModelError, match=r"no tensor model\.layers\.1\.mlp\.up_proj\.weight; is the download complete"):
        load_model(directory, good, Mesh(), 0)
    (directory / "model.safetensors").write_bytes(b"half a file")
    with pytest.raises(ModelError, match="cannot be read"):
        load_model(directory, good, Mesh(), 0)
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no model\.safetensors"):
        load_model(directory, good, Mesh(), 0)


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int16, torch.bool, torch.complex64, torch.float8_e4m3fn]
)
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.self_attn.o_proj.weight"])
def test_weights_of_other_dtypes_than_floats_are_refused(directory: Path, name: str, dtype: torch.dtype) -> None:
    """Such dtypes come from a quantisation that config.json does not mention."""
    tensors = load_file(directory / "model.safetensors")
    save_file(tensors | {name: tensors[name].to(dtype)}, directory / "model.safetensors")
    with pytest.raises(ModelError, match=rf"{name} .*(is stored in (I|U|BOOL|C)|stored in FP8, but)"):
        load_model(directory, load_config(directory), Mesh(), 0)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.o_proj.weight_scale", "lm_head.bias", "adapter", "model.x"])
def test_tensors_that_no_weight_reads_are_refused_by_name(directory: Path, name: str) -> None:
    tensors = load_file(directory / "model.safetensors")
    save_file(tensors | {name: torch.ones(3)}, directory / "model.safetensors")
    with pytest.raises(
        ModelError, match=rf"model\.safetensors has a tensor {name} that a model of config\.json does not"
    ):
        load_model(directory, load_config(directory), Mesh(), 0)


def test_known_spares_are_left_in_the_file(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    layers = load_config(directory).num_layers
    spares = ["model.layers.0.self_attn.rotary_emb.inv_freq", f"model.layers.{layers}.enorm.weight", "mtp.fc.weight"]
    save_file(tensors | {name: torch.ones(3) for name in spares}, directory / "model.safetensors")
    load_model(directory, load_config(directory), Mesh(), 0)
    assert len(list(load_model(directory, load_config(directory, num_layers=1), Mesh(), 0).parameters())) > 5


Files = dict[str, dict[str, Tensor]]


def beside_an_index_of_files_that_are_gone(tensors: dict[str, Tensor]) -> tuple[Files, Any]:
    return {"model.safetensors": tensors}, {"weight_map": dict.fromkeys(tensors, "gone.safetensors")}


def beside_an_index_that_is_a_list(tensors: dict[str, Tensor]) -> tuple[Files, Any]:
    return {"model.safetensors": tensors}, [1]


def without_a_prefix(tensors: dict[str, Tensor]) -> tuple[Files, Any]:
    return {"model.safetensors": {name.removeprefix("model."): t for name, t in tensors.items()}}, None


def in_two_files(tensors: dict[str, Tensor]) -> tuple[Files, dict[str, Any]]:
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "below/b.safetensors": names[1::2]}
    index = {name: file for file, half in halves.items() for name in half}
    files = {file: {name: tensors[name] for name in half} for file, half in halves.items()}
    return files, {"metadata": {}, "weight_map": index}


def in_other_files_than_the_index_says(tensors: dict[str, Tensor]) -> tuple[Files, Any]:
    files, index = in_two_files(tensors)
    names = sorted(tensors)
    moved = {names[0]: "below/b.safetensors", names[1]: "a.safetensors"}
    listed = {name: file for name, file in index["weight_map"].items() if name != names[2]}
    return files, index | {"weight_map": listed | moved}


def in_two_files_at_once(tensors: dict[str, Tensor]) -> tuple[Files, Any]:
    files, index = in_two_files(tensors)
    name = next(iter(files["below/b.safetensors"]))
    files["a.safetensors"][name] = torch.zeros_like(tensors[name])
    return files, index


STORED = [
    beside_an_index_of_files_that_are_gone,
    beside_an_index_that_is_a_list,
    without_a_prefix,
    in_two_files,
    in_other_files_than_the_index_says,
    in_two_files_at_once,
]


@pytest.mark.parametrize("stored", STORED)
def test_what_transformers_loads_loads(
    stored: Callable[[dict[str, Tensor]], tuple[Files, Any]], tmp_path: Path
) -> None:
    small_model("qwen3", 2, tmp_path)
    wanted = dict(load_model(tmp_path, load_config(tmp_path), Mesh(), 0).named_parameters())
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    files, index = stored(tensors)
    (tmp_path / "below").mkdir()
    for file, held in files.items():
        save_file({name: t.clone() for name, t in held.items()}, tmp_path / file, {"format": "pt"})
    if index is not None:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    theirs = Qwen3ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in tensors.items())
    found = dict(load_model(tmp_path, load_config(tmp_path), Mesh(), 0).named_parameters())
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    "index, text",
    [
        ("[1]", r"holds a list, not a JSON object"),
        ("{}", "weight_map is not an object"),
        ('{"weight_map": {"model.norm.weight": 5}}', "weight_map is not an object"),
        (
            '{"weight_map": {"model.norm.weight": "../a.safetensors"}}',
            r"'\.\./a\.safetensors' is outside of the model's",
        ),
        ('{"weight_map": {"model.norm.weight": "/a.safetensors"}}', "'/a.safetensors' is outside of the model's"),
        ('{"weight_map": {"model.norm.weight": "\\u0000"}}', "is missing"),
        ('{"weight_map": {"model.norm.weight": "a", "model.norm.weight": "b"}}', "'model.norm.weight' is there twice"),
        ("[" * 100_000, "is nested too deeply"),
        ("\ud800".encode("utf-16", "surrogatepass").decode("latin1"), "cannot be read"),
    ],
)
def test_an_index_that_is_none_is_refused_in_one_line(directory: Path, index: str, text: str) -> None:
    (directory / "model.safetensors").rename(directory.parent / "a.safetensors")
    (directory / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=text) as error:
        load_model(directory, load_config(directory), Mesh(), 0)
    assert "\n" not in str(error.value) and str(directory) in str(error.value)
