"""Families that a plugin adds, and configs that no family understands."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from support import small_config, small_model
from transformers import CONFIG_MAPPING

from models import glm, oss, qwen3_next, qwen35, stepfun
from weft.engine.config.config import EngineConfig
from weft.engine.controller.startup import check_plans
from weft.engine.models.config_json.fields import HARMLESS, ModelError
from weft.engine.models.registry import FAMILIES, IN_TRANSFORMERS, load_config, read_config, registry

PLUGIN = """
from __future__ import annotations

from dataclasses import dataclass
from weft.engine.models.families import qwen
from weft.engine.models.families.shared_layers import GroupedQueryConfig

@dataclass(frozen=True)
class Homemade(GroupedQueryConfig):
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
    with pytest.raises(ModelError, match=r"model type 'homemade' is not supported .*; supported: qwen2_moe"):
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


@pytest.mark.parametrize(
    "kind, nearest",
    [("llama4", "llama"), ("glm4_moe_lite", "glm4_moe"), ("mistral3", "mistral"), ("deepseek_v32", "deepseek_v3")],
)
def test_the_nearest_family_is_named(kind: str, nearest: str) -> None:
    with pytest.raises(ModelError, match=f"^model type '{kind}' is not supported .nearest by name: '{nearest}'.; "):
        read_config({"model_type": kind})


@pytest.mark.parametrize(
    "kind, architecture, nearest",
    [("aquila", "LlamaForCausalLM", "llama"), ("k9", "DeepseekV3ForCausalLM", "deepseek_v3")],
)
def test_the_family_of_the_nearest_architecture_is_named(kind: str, architecture: str, nearest: str) -> None:
    with pytest.raises(ModelError, match=rf"\(nearest by its architecture {architecture}: '{nearest}'\); supported"):
        read_config({"model_type": kind, "architectures": [architecture]})


def test_no_family_is_named_where_none_is_near() -> None:
    with pytest.raises(ModelError, match=r"^model type 'bert' is not supported; supported: qwen2_moe, .*--plugins"):
        read_config({"model_type": "bert"})
    with pytest.raises(ModelError, match=r"^config\.json has no model_type"):
        read_config({"hidden_size": 8})


@pytest.mark.parametrize("plugin", ["no.such.module", "no/such/file.py", "json"])
def test_what_is_no_plugin_is_refused(plugin: str) -> None:
    with pytest.raises(ModelError, match=f"plugin {plugin} (cannot be imported|defines no FAMILIES)"):
        registry([plugin])


@pytest.mark.parametrize(
    "source, text",
    [
        ("import torch\nunknown\n", r"fails on import: NameError: .*family\.py, line 2\)"),
        ("def read(:\n", "fails on import: SyntaxError: .*line 1"),
        ("import nosuchpackage", r"No module named 'nosuchpackage' \(.*family\.py, line 1\)$"),
        ("FAMILIES = {'homemade': 3}", r"FAMILIES\['homemade'\] is no function"),
        ("FAMILIES = {'homemade': lambda fields: None}", "the reader of model type 'homemade' gives a NoneType"),
        ("def read(fields):\n  return fields['x']\nFAMILIES = {'homemade': read}", ", line 2, does not read"),
    ],
    ids=range(6),
)
def test_what_a_plugin_does_wrong_is_not_said_of_the_config(homemade: Path, source: str, text: str) -> None:
    (homemade / "family.py").write_text(source)
    with pytest.raises(ModelError, match=rf"^plugin {homemade}/family\.py.*{text}") as error:
        EngineConfig(model=homemade, plugins=(str(homemade / "family.py"),)).read_model()
    assert "\n" not in str(error.value) and "cannot be understood" not in str(error.value)


def test_a_plugin_with_a_model_that_cannot_be_built_is_named(homemade: Path) -> None:
    broken = PLUGIN.replace("    pass", "    def build(self, b):\n        return self.nothing(b)")
    (homemade / "family.py").write_text(broken)
    config = EngineConfig(model=homemade, plugins=(str(homemade / "family.py"),))
    file = rf"^{homemade}/config\.json: plugin {homemade}/family\.py, line 11"
    with pytest.raises(ModelError, match=rf"{file}, builds no model from config\.json: At"):
        check_plans(config, config.read_model())


def published(family: str) -> dict[str, Any]:
    """A small config of the family, in the form in which it is published."""
    if family in OWN:
        return OWN[family]()
    return small_config(IN_TRANSFORMERS.get(family, family), 2).to_dict() | {"model_type": family}


def minimax() -> dict[str, Any]:
    values = small_config("minimax_m2", 2).to_dict()
    return values | {"rope_theta": values.pop("rope_parameters")["rope_theta"]}


OWN = {
    "minimax_m2": minimax,
    "step3p5": stepfun.small_config,
    "qwen3_5_moe": qwen35.small_config,
    "gpt_oss": oss.small_config,
    "glm4_moe": glm.small_config,
    "qwen3_next": qwen3_next.small_config,
}
DRAFTS = {"num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"}
DRAFTS |= {"use_mtp", "num_mtp_modules", "mtp_transformer_layers"}
WINDOWS = {"sliding_window", "max_window_layers"}  # use_sliding_window, which is refused, would switch them on
WITHOUT_EFFECT = {
    "deepseek_v2": {"head_dim"},  # that of rotary, whatever is given
    "qwen2_moe": WINDOWS,
    "qwen3_moe": WINDOWS,
    "qwen3": WINDOWS,
    "qwen2": WINDOWS,
    "step3p5": {"moe_every_n_layer", "moe_layer_offset", "max_seq_len"},  # of no effect next to moe_layers_enum
    "gpt_oss": {"initial_context_length"},  # the same as rotary's
    # Of layers without experts, of which there are none; next to layer_types.
    "qwen3_5_moe": {"intermediate_size", "full_attention_interval"},
    "qwen3_next": {"intermediate_size", "full_attention_interval"},
}
"""Fields that are read and change nothing, by family; layers that only draft tokens are not run in any."""


def other_than(value: Any) -> Any:
    """A value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, list | tuple):
        return [7, *value[1:]]
    return value + "?" if isinstance(value, str) else value + 1


def test_every_family_has_a_config_here() -> None:
    assert {family: published(family)["model_type"] for family in FAMILIES} == {family: family for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_field_of_another_family_is_refused_or_understood(family: str) -> None:
    """Such as another name for the number of experts: read as none, the model would be another one. Every field that
    any family has is given to this one with another value: it is refused by name, or makes another model, or is known
    to change nothing, or transformers' class has no such field, and it is ignored by name.
    """
    values = published(family)
    known, text, refused = read_config(values), values.get("text_config", values), set()
    theirs = CONFIG_MAPPING[IN_TRANSFORMERS.get(family, family)]
    theirs = CONFIG_MAPPING[f"{family}_text"] if "text_config" in values else theirs
    aliases = set(theirs.attribute_map)
    if "rope_parameters" in text:
        aliases.add("rope_theta")
    seen: list[tuple[str, Any]] = []
    for foreign in map(published, FAMILIES):
        for name, value in foreign.get("text_config", foreign).items():
            given = value if text.get(name) is None else text[name]
            if name in HARMLESS | DRAFTS or name in aliases or value is None or isinstance(value, dict):
                continue
            if (name, value) in seen:
                continue
            seen.append((name, value))
            harmless, matters, ignored = name in WITHOUT_EFFECT.get(family, ()), False, False
            for tried in (value, other_than(given)):
                changed = {name: tried}
                try:
                    config = read_config(values | ({"text_config": text | changed} if text is not values else changed))
                    matters |= config != known
                    ignored |= name in {path.rpartition(".")[2] for path in config.ignored}
                except ValueError as error:
                    assert name in text or name.rstrip("s") in str(error).replace("layer type", "layer_type"), error
                    matters = True
                    refused.add(name)
            assert not (ignored and (matters or hasattr(theirs, name))), f"{name} is ignored, though it is read"
            assert matters != (harmless or ignored), (
                f"{name}={other_than(given)!r} is {'harmless' * harmless or 'skipped'}"
            )
    assert len(refused) > 5, refused


@pytest.mark.parametrize("family", FAMILIES)
def test_fields_that_transformers_does_not_read_are_ignored_by_name(family: str) -> None:
    values = published(family)
    known = read_config(values)
    found = read_config(values | {"flux": 64, "rope_interleaved": False})
    assert found == known and set(found.ignored) - set(known.ignored) == {"flux", "rope_interleaved"}
    if "text_config" in values:
        found = read_config(values | {"text_config": values["text_config"] | {"flux": 64}})
        assert found == known and "text_config.flux" in found.ignored
    assert read_config(values | {"initializer_range": 0.5, "attention_dropout": 0.1}) == known


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_one_small_file(family: str) -> None:
    path = inspect.getsourcefile(FAMILIES[family])
    assert path is not None and len(Path(path).read_text().splitlines()) < 250
