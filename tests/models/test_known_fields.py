"""The fields of a config that transformers reads: none that its code reads is missing from `known_fields`."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

from weft.engine.models.config_json.fields import HARMLESS
from weft.engine.models.config_json.known_fields import READ_OF_ANY_CLASS, known_fields
from weft.engine.models.registry import FAMILIES, IN_TRANSFORMERS

SPEC = find_spec("transformers")
assert SPEC is not None and SPEC.origin is not None
SOURCES = Path(SPEC.origin).parent
SHARED = ("cache_utils.py", "masking_utils.py", "modeling_rope_utils.py", "modeling_utils.py")
"""The code that runs a config of any class, and loads its weights."""
OF_OTHERS = frozenset({"_attn_implementation_internal", "_experts_implementation_internal"})
OF_OTHERS |= {"base_model_pp_plan", "base_model_tp_plan", "distributed_config", "sub_configs"}
OF_OTHERS |= {"init_std", "initializer_factor", "gradient_checkpointing", "sep_token_id"}
"""Names that say how a model is laid out over processes, trained or initialised."""


def read_of_configs(source: Path) -> set[str]:
    """Names of `config.name` and `getattr(config, "name", …)`."""
    names = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Attribute):
            of, name = node.value, node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            if not isinstance(node.args[1], ast.Constant):
                continue
            of, name = node.args[0], node.args[1].value
        else:
            continue
        if ast.unparse(of).rpartition(".")[2] in ("config", "text_config", "effective_config", "layer_config"):
            names.add(name)
    return names


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_models_code_reads_is_known(family: str) -> None:
    kind = CONFIG_MAPPING[IN_TRANSFORMERS.get(family, family)]
    fields = known_fields(kind)
    known = fields.keys() | {name for section in kind.sub_configs for name in fields[section]}
    sources = (SOURCES / "models" / kind.__module__.split(".")[2]).glob("modeling_*.py")
    read = {name for source in sources for name in read_of_configs(source)}
    vision = {
        "head_dim",
        "vision_config",
        "text_config",
        "image_token_id",
        "projector_bias",
        "num_nextn_predict_layers",
    }
    vision |= {"image_size", "layer_norm_eps", "layer_scale_init_value", "num_channels", "patch_size"}
    assert len(read) > 10 and read <= known | HARMLESS | vision, read - known - HARMLESS


def test_what_transformers_shared_code_reads_of_a_config_is_known() -> None:
    read = {name for file in SHARED for name in read_of_configs(SOURCES / file)}
    known = known_fields(CONFIG_MAPPING["llama"]).keys() | HARMLESS | OF_OTHERS
    assert {"sliding_window", "is_causal", "layer_types"} <= read <= known, read - known
    assert not READ_OF_ANY_CLASS.keys() & HARMLESS
