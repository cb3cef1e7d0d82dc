"""Families that a plugin adds, and configs that no family understands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import small_config, small_model

from weft.engine.config import EngineConfig
from weft.models.config import ModelError
from weft.models.registry import FAMILIES, load_config, read_config, registry

PLUGIN = """
from __future__ import annotations

from dataclasses import dataclass
from weft.models import qwen

@dataclass(frozen=True)
class Homemade(qwen.QwenConfig):
    pass

def read(fields):
    fields.only("flavour", "plain")
    return Homemade(**vars(qwen.read(fields)))

FAMILIES = {"homemade": read}
"""


@pytest.fixture
def homemade(tmp_path: Path) -> Path:
    """A Qwen3 under a name that neither Weft nor transformers knows."""
    small_model("qwen3", 2, tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"model_type": "homemade", "flavour": "plain"}))
    (tmp_path / "family.py").write_text(PLUGIN)
    return tmp_path


def test_a_plugin_adds_a_family(homemade: Path) -> None:
    with pytest.raises(ModelError, match="model type 'homemade' is not supported; supported: qwen2_moe"):
        load_config(homemade)
    config = EngineConfig(model=homemade, plugins=(str(homemade / "family.py"),))
    # A rank's process reads the engine's config from JSON, and finds the family as the controller does.
    for read in (config, EngineConfig.from_dict(json.loads(json.dumps(config.to_dict())))):
        assert read.read_model().family == "homemade" and read.read_model().num_layers == 3
    assert "homemade" not in FAMILIES


def test_a_plugin_refuses_fields_by_its_own_rules(homemade: Path) -> None:
    families = registry([str(homemade / "family.py")])
    values = json.loads((homemade / "config.json").read_text())
    with pytest.raises(ModelError, match="flavour='sour' is not supported for model type 'homemade'; supported: 'pl"):
        read_config(values | {"flavour": "sour"}, families)
    with pytest.raises(ModelError, match=r"'colour' \(value 'red'\) is not understood"):
        read_config(values | {"colour": "red"}, families)


@pytest.mark.parametrize("plugin", ["no.such.module", "no/such/file.py", "json"])
def test_what_is_no_plugin_is_refused(plugin: str) -> None:
    with pytest.raises(ModelError, match=f"plugin {plugin} (cannot be imported|defines no FAMILIES)"):
        registry([plugin])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_field_of_another_family_is_refused(family: str) -> None:
    """Such as another name for the number of experts: read as none, the model would be another one."""
    values = small_config(family, 2).to_dict()
    foreign = "moe_num_experts" if family.startswith("deepseek") else "n_routed_experts"
    with pytest.raises(ModelError, match=rf"'{foreign}' \(value 64\) is not understood"):
        read_config(values | {foreign: 64})
    assert read_config(values | {"initializer_range": 0.5, "attention_dropout": 0.1}) == read_config(values)
