"""Values of config.json and of checkpoints that are easily taken otherwise than transformers takes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import MODELS, small_config, small_model
from torch import Tensor
from transformers import DeepseekV2Config
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig

from models import glm, oss, qwen35, stepfun
from models.layouts import check
from weft.engine.assets import preset_dir
from weft.engine.models.config_json.fields import ModelError
from weft.engine.models.layers.basic import Head
from weft.engine.models.load import build_model, load_model
from weft.engine.models.registry import load_config, read_config
from weft.planner.spec import Mesh

SPLIT = Mesh(1, 2, 2, 1)
META = torch.device("meta")


def saved(directory: Path, family: str, **changes: Any) -> Callable[[Tensor], Tensor]:
    """A small model of transformers, its config.json with every field, those that are null too."""
    if family == "glm4_moe":
        model = glm.small_glm(directory, **changes).whole
    else:
        model = small_model(family, 2, directory, **changes)
    (directory / "config.json").write_text(json.dumps(model.config.to_dict() | changes))
    return logits_of(model)


def logits_of(model: Any) -> Callable[[Tensor], Tensor]:
    """Return a function for the logits of one sequence, `[tokens, vocabulary]`."""
    return lambda tokens: model(tokens[None], use_cache=False).logits[0]


@pytest.mark.parametrize(
    "family, changes",
    [
        ("deepseek_v3", dict(rope_interleave=None)),  # null is false, a missing one true
        ("glm4_moe", dict(partial_rotary_factor=None)),  # null rotates whole heads, a missing one half of each
        ("qwen2_moe", dict(num_experts=0, mlp_only_layers=[])),  # an MLP in every layer
        ("qwen3_moe", dict(num_experts=0)),
        ("llama", dict(attention_bias=True, head_dim=None)),  # a head's size that follows from the width
        ("mistral", dict(sliding_window=None)),
        ("mixtral", dict(sliding_window=3)),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_logits_are_transformers(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    check(tmp_path, SPLIT, saved(tmp_path, family, **changes), 61)


@pytest.mark.parametrize("mesh", [Mesh(1, 3, 1, 3), Mesh(3, 1, 3, 1), Mesh(3, 3, 3, 3)], ids=str)
def test_features_of_an_mlp_need_not_divide(mesh: Mesh, tmp_path: Path) -> None:
    """150 features are ten runs of 16, and the last one is shorter."""
    model = small_model("llama", 3, tmp_path, intermediate_size=150)
    check(tmp_path, mesh, logits_of(model), 61)
    config = load_config(tmp_path)
    inner = [
        build_model(config, mesh, r, torch.float32, META).layers[0].mlp.down.weight.shape[1] for r in range(mesh.world)
    ]
    assert sum(inner) == 150 and max(inner) == inner[0] and max(inner) - min(inner) < 32


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_a_head_of_its_own_beside_tied_embeddings(split: bool, tmp_path: Path) -> None:
    """transformers takes the checkpoint's head where it differs from the embedding, whatever config.json says."""
    small_model("qwen3", 2, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in tensors and load_config(tmp_path).tie_embeddings
    embedding = tensors["model.embed_tokens.weight"]

    for head, tied in ((embedding + torch.randn(embedding.shape), False), (embedding.clone(), True)):
        save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors", {"format": "pt"})
        theirs = MODELS["qwen3"].from_pretrained(tmp_path, dtype=torch.float32).eval()
        check(tmp_path, SPLIT, logits_of(theirs), 61, split)
        ours = load_model(tmp_path, load_config(tmp_path), SPLIT, 1)
        assert [layer.tied for layer in ours.modules() if isinstance(layer, Head)] == [tied]


def values_of(family: str) -> dict[str, Any]:
    small = {"step3p5": stepfun, "gpt_oss": oss, "glm4_moe": glm, "qwen3_5_moe": qwen35}.get(family)
    return small_config(family, 2).to_dict() if small is None else small.small_config()


NO_WINDOW = "needs a value for 'sliding_window'"


@pytest.mark.parametrize(
    "family, changes, message",
    [
        ("deepseek_v2", dict(rope_interleave=False), "rope_interleave=False is not supported"),  # transformers skips it
        # transformers gives experts of other groups the weight 0, or whatever experts topk finds among all −∞.
        ("deepseek_v2", dict(num_experts_per_tok=3), r"num_experts_per_tok=3 cannot be chosen.* 1 … 2 experts"),
        ("deepseek_v3", dict(num_experts_per_tok=3), "num_experts_per_tok=3 cannot be chosen"),
        ("glm4_moe", dict(num_experts_per_tok=9), "num_experts_per_tok=9 cannot be chosen"),
        ("deepseek_v2", dict(n_group=3), "n_group=3 cannot be chosen: 4 experts need equal groups"),
        ("deepseek_v2", dict(topk_group=3), "topk_group=3 of n_group=2 cannot be chosen"),
        ("deepseek_v2", dict(topk_group=0), "topk_group=0 is not an integer of 1 or more"),
        ("deepseek_v3", dict(n_group=4), "n_group=4 leaves 1 experts in a group; routing ranks 2"),
        ("qwen2_moe", dict(num_experts_per_tok=5), "num_experts_per_tok=5 cannot be chosen"),
        ("qwen3_moe", dict(num_experts_per_tok=5), "num_experts_per_tok=5 cannot be chosen"),
        ("mixtral", dict(num_experts_per_tok=5), "num_experts_per_tok=5 cannot be chosen"),
        ("mistral", dict(sliding_window=0), "sliding_window=0 is not an integer of 1 or more"),
        ("llama", dict(mlp_bias=True), "mlp_bias=True is not supported"),
        ("qwen2", dict(use_sliding_window=True), "use_sliding_window=True is not supported"),
        ("step3p5", dict(moe_top_k=17), "num_experts_per_tok=17 cannot be chosen"),
        ("gpt_oss", dict(num_local_experts=2), "num_experts_per_tok=3 cannot be chosen"),
        ("gpt_oss", dict(sliding_window=None), NO_WINDOW),
        ("step3p5", dict(sliding_window=None), NO_WINDOW),
        ("step3p5", dict(sliding_window=0), "sliding_window=0 is not an integer of 1 or more"),
        ("step3p5", dict(yarn_only_types=[]), r"yarn_only_types=\[\] is not supported"),
        ("step3p5", dict(norm_expert_weight=False), "norm_expert_weight=False is not supported"),
        ("step3p5", dict(rope_theta=[5e4, 1e4, 2e4, 5e4, 1e4, 1e4]), "differ among layers of sliding_attention"),
        ("step3p5", dict(num_attention_groups=1), "attention_other_setting.num_attention_groups=2 is not supported"),
        ("qwen3", dict(num_attention_heads=5), "num_attention_heads=5 is not a multiple of num_key_value_heads=2"),
        ("qwen3", dict(num_attention_heads=0), "num_attention_heads=0 is not an integer of 1 or more"),
        ("step3p5", dict(partial_rotary_factors=[0.4] * 6), "rotate pairs of elements, but 3 elements"),
        ("qwen3_moe", dict(decoder_sparse_step=0), "decoder_sparse_step=0 is not an integer of 1 or more"),
    ],
)
def test_what_cannot_be_computed_as_transformers_is_refused(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_config(values_of(family) | changes)


@pytest.mark.parametrize("family", ["gpt_oss", "step3p5"])
def test_a_missing_window_is_refused_where_a_layer_needs_it(family: str) -> None:
    values = values_of(family)
    del values["sliding_window"]
    if family == "gpt_oss":  # transformers fills in its own
        assert 128 in {heads.window for heads in read_config(values).heads}
    else:
        with pytest.raises(ModelError, match=NO_WINDOW):
            read_config(values)
    full = dict(layer_types=["full_attention"] * len(values["layer_types"]), sliding_window=None)
    full |= dict(rope_theta=1e4, partial_rotary_factors=None) if family == "step3p5" else {}
    assert {heads.window for heads in read_config(values | full).heads} == {None}


def test_deepseek_v2s_defaults_lack_one_value_alone() -> None:
    """transformers cannot run them either: it has no number of experts that a token goes to."""
    with pytest.raises(ModelError, match="needs a value for 'num_experts_per_tok'"):
        read_config(DeepseekV2Config().to_dict())
    config = read_config(DeepseekV2Config(num_experts_per_tok=6).to_dict())
    assert config.moe.routing.k == 6 and config.moe.routing.groups == 1 and not config.mlp_layers


def written(values: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json that transformers writes for a config that it has read."""
    return dict(json.loads(Step3p7TextConfig.from_dict(values).to_json_string()))


def test_a_config_of_step_as_transformers_writes_it() -> None:
    published = json.loads((preset_dir("step-3.5-flash") / "config.json").read_text())
    for values in (published, stepfun.small_config(), stepfun.small_config(rope_scaling=None)):
        assert "moe_layers_enum" not in written(values) and read_config(written(values)) == read_config(values)
    default = read_config(written({}))
    assert len(default.moe_layers) == 42 and {heads.window for heads in default.heads} == {None}


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(per_layer_config={"1": {"num_attention_heads": 4}}), "per_layer_config .* is not supported; supported"),
        (dict(per_layer_config={"0": {"num_attention_heads": 16}}), "per_layer_config .* is not supported"),
        (dict(query_pre_attn_scalar=16), "query_pre_attn_scalar=16 is not supported"),
        (dict(rope_parameters={"full_attention": {"rope_theta": 1e4}}), "say nothing of sliding_attention layers"),
        (dict(mlp_layer_types=["sparse", "dense", "linear", "sparse"]), "are not 4 of sparse and dense alone"),
        (dict(rope_theta=1e4), "'rope_theta' .value 10000.0. is not understood"),
        (dict(n_routed_experts=None), "needs a value for 'n_routed_experts'"),
        (dict(use_bidirectional_attention=True), "'use_bidirectional_attention' .value True. is not understood"),
    ],
)
def test_of_a_config_that_transformers_wrote_nothing_is_skipped(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_config(written(stepfun.small_config()) | changes)


def test_minimax_rotates_rotary_dim_elements_where_no_factor_says_so() -> None:
    """Published models rotate `rotary_dim` elements; transformers up to 5.17 fills in no factor, and rotates all."""
    values = values_of("minimax_m2") | dict(rope_parameters=dict(rope_type="default", rope_theta=1e4))
    assert read_config(values).rope.dim == values["rotary_dim"] == 4
    values["rope_parameters"] |= dict(partial_rotary_factor=0.25)
    with pytest.raises(ModelError, match="differ for heads of 8 elements"):
        read_config(values)
