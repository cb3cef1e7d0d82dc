"""config.json is input: whatever it holds, a model loads or is refused in one line that names a field."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils import logging as transformers_logging

from models.test_registry import published
from weft.engine.models.config_json.fields import HARMLESS, ModelError
from weft.engine.models.load import build_model
from weft.engine.models.registry import FAMILIES, load_config, read_config
from weft.planner.spec import LayoutError, Mesh

DEEP: list[Any] = []
for _ in range(200):
    DEEP = [DEEP]
VALUES = ("x", "1", "", True, False, None, -1, 0, 1, 3, 7.5, -0.5, 10**9, 2**31 - 1, 10**30, float("nan"), float("inf"))
WRONG = (*VALUES, 1e-300, [], [1], ["x"], [None] * 3, {}, {"x": 1}, {"rope_type": []}, DEEP)
"""Values that each field is given."""
Change = tuple[tuple[str, ...], Any]


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]


def places(values: dict[str, Any], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Paths of all fields, of objects inside too."""
    found = [(*path, name) for name in values if name != "model_type" and name not in HARMLESS - {"dtype"}]
    return found + [
        p for name, value in values.items() if isinstance(value, dict) for p in places(value, (*path, name))
    ]


def changes_of(values: dict[str, Any]) -> list[Change]:
    more = [("rope_theta",), ("rope_scaling",), ("rope_parameters", "factor"), ("quantization_config",)]
    more += [("eos_token_id",), ("tie_word_embeddings",), ("head_dim",), ("sliding_window",), ("layer_types",)]
    return list(itertools.product(dict.fromkeys([*places(values), *more]), WRONG))


def changed(values: dict[str, Any], change: Change) -> dict[str, Any]:
    (*path, name), value = change
    copy = json.loads(json.dumps(values))
    at = copy
    for part in path:
        at = at.setdefault(part, {}) if isinstance(at.get(part, {}), dict) else {}
    at[name] = value
    return copy


def check(values: dict[str, Any], change: Change) -> None:
    try:
        config = read_config(changed(values, change))
        assert 0 <= config.rms_norm_eps < 1e31 and all(isinstance(token, int) for token in config.eos_token_ids)
        build_model(config, Mesh(), 0, torch.float32, torch.device("meta"))
    except (ModelError, LayoutError) as error:
        assert "\n" not in str(error) and len(str(error)) < 2000, change


@pytest.mark.parametrize("family", FAMILIES)
def test_a_wrong_value_of_a_field_is_refused_in_one_line(family: str) -> None:
    values = json.loads(json.dumps(published(family)))
    for change in random.Random(family).sample(changes_of(values), 24):
        check(values, change)


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_every_wrong_value_of_every_field_is_refused_in_one_line(family: str) -> None:
    values = json.loads(json.dumps(published(family)))
    for change in changes_of(values):
        check(values, change)


@pytest.mark.parametrize(
    "field, value, error",
    [
        ("rope_theta", "1e4", r"rope_parameters\.rope_theta='1e4' is not a number"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps=nan is not a number"),
        ("eos_token_id", "x", "'eos_token_id'"),
        ("num_hidden_layers", 10**9, "num_hidden_layers=1000000000 is not at most 4096"),
        ("dtype", "int8", "dtype='int8' is not supported; supported: torch.bfloat16"),
        ("rope_scaling", [1], "rope_scaling"),
        ("tie_word_embeddings", "yes", "'tie_word_embeddings'"),
        ("layer_types", "full_attention", "`layer_types` entries must be"),
        ("quantization_config", "fp8", "quantization_config: "),
        (
            "quantization_config",
            {"quant_method": "fp8", "weight_block_size": ["a", 1]},
            "weight_block_size=.* list of int",
        ),
    ],
)
def test_a_wrong_value_is_named(field: str, value: Any, error: str, tmp_path: Path) -> None:
    values = json.loads(json.dumps(published("llama")))
    if field in ("rope_theta", "rope_scaling"):
        del values["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(values | {field: value}))
    with pytest.raises(ModelError, match=rf"^{tmp_path}/config\.json: .*{error}") as raised:
        load_config(tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "text, error",
    [
        ("[]", "holds a list, not a JSON object"),
        ('"x"', "holds a str, not a JSON object"),
        ("[" * 100_000, "is nested too deeply"),
        ('{"a":' * 100_000, "is nested too deeply"),
        ('{"model_type": "llama", "vocab_size": 1, "vocab_size": 2}', "'vocab_size' is there twice"),
        ("{", "cannot be read: Expecting property name"),
        ("", "cannot be read: Expecting value"),
        ('{"vocab_size": ' + "9" * 5000 + "}", "cannot be read: Exceeds the limit"),
    ],
)
def test_what_is_no_object_is_refused_in_one_line(text: str, error: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=rf"^{tmp_path}/config\.json.* {error}|^{tmp_path}/config\.json {error}"):
        load_config(tmp_path)
