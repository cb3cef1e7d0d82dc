"""Registry of model families: one line each, including plugins' families."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from textwrap import shorten
from types import MappingProxyType
from typing import Any

from transformers import CONFIG_MAPPING

from weft.engine.models.config_json.directory import config_file, explain_no_model, is_gguf
from weft.engine.models.config_json.fields import HARMLESS, MAX_LAYERS, Fields, ModelError, first_line, read_json
from weft.engine.models.config_json.known_fields import known_fields
from weft.engine.models.families import deepseek, eagle3, glm, gpt_oss, llama, minimax, qwen, qwen35, step
from weft.engine.models.layers.model_config import ModelConfig
from weft.engine.models.weights.weight_formats import format_of
from weft.plugins import PluginError, load_plugins

Registry = Mapping[str, Callable[[Fields], ModelConfig]]
"""Readers of config.json by model type. The config that a reader returns builds the family's model."""

FAMILIES: Registry = MappingProxyType(
    {
        "qwen2_moe": qwen.read,
        "qwen3_moe": qwen.read,
        "qwen3": qwen.read,
        "qwen2": qwen.read,
        "llama": llama.read,
        "mistral": llama.read,
        "mixtral": llama.read,
        "deepseek_v2": deepseek.read,
        "deepseek_v3": deepseek.read,
        "kimi_k2": deepseek.read,
        "step3p5": step.read,
        "qwen3_5_moe": qwen35.read,
        "qwen3_next": qwen35.read_qwen3_next,
        "gpt_oss": gpt_oss.read,
        "glm4_moe": glm.read,
        "minimax_m2": minimax.read,
    }
)

KEPT = frozenset({"dtype", "torch_dtype", "architectures"})
"""Fields without effect on the logits that readers read."""
MAX_REASON = 400
"""Maximum characters of transformers' errors, which may include the whole value."""

AS_PUBLISHED = frozenset({"step3p5", "qwen3_5_moe"})
"""Types that are read from config.json as it is, because transformers' class silently drops fields."""

IN_TRANSFORMERS: Mapping[str, str] = MappingProxyType({"kimi_k2": "deepseek_v3"})
"""Types that transformers knows by another name."""


def registry(plugins: Sequence[str] = ()) -> Registry:
    """Return the families of Weft and of plugins' `FAMILIES` (`weft.plugins`). Raises ModelError."""
    known = dict(FAMILIES)
    try:
        modules = list(load_plugins(plugins))
    except PluginError as error:
        raise ModelError(str(error)) from error
    for name, module in zip(plugins, modules, strict=True):
        families = getattr(module, "FAMILIES", {})
        if not isinstance(families, Mapping):
            raise ModelError(f"plugin {name}: FAMILIES is no dict from model type to the reader of its config")
        if wrong := [kind for kind, reader in families.items() if not callable(reader)]:
            raise ModelError(f"plugin {name}: FAMILIES[{wrong[0]!r}] is no function that reads the fields of a config")
        known |= families
    return known


def load_config(model_dir: Path, families: Registry = FAMILIES, num_layers: int | None = None) -> ModelConfig:
    """Read config.json of `model_dir`, or a GGUF file's metadata. num_layers: truncate the model to its first layers.
    Raises ModelError for a missing directory, an unknown model type, or a field that none of `families` supports."""
    if (why := explain_no_model(model_dir)) is not None:
        raise ModelError(why)
    path = config_file(model_dir)
    values = _values(path)
    try:
        if num_layers is not None:
            values = deepcopy(values)
            text = values.get("text_config", values)  # multimodal models
            there = Fields({"model_type": None, **text}).size("num_hidden_layers", high=MAX_LAYERS)
            if num_layers > there:
                raise ModelError(f"{num_layers} layers were requested; there are {there}")
            text["num_hidden_layers"] = num_layers
            if isinstance(text.get("layer_types"), list):
                text["layer_types"] = text["layer_types"][:num_layers]
        return read_config(values, families)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    except Exception as error:  # any error from values of a wrong type, or from a plugin
        plugin = plugin_line(error, families.get(str(values.get("model_type"))))
        what = f"{plugin} does not read {path}" if plugin else f"{path} cannot be understood"
        raise ModelError(f"{what}: {type(error).__name__}: {first_line(error)}") from error


def with_draft(config: ModelConfig, directory: Path | None, head: bool, plugins: Sequence[str]) -> ModelConfig:
    """Return the config of a model with the draft model of a directory, or its EAGLE-3 `head`, split alike. Raises
    ModelError."""
    if directory is None:
        return config
    known = registry(plugins)
    draft = load_config(directory, dict.fromkeys(known, eagle3.read) if head else known)
    draft = replace(draft, replicate_queries=config.replicate_queries, experts=config.experts, float8=config.float8)
    try:
        tapped = draft.inputs_in(config) if isinstance(draft, eagle3.Eagle3Config) else ()
    except ModelError as error:
        raise ModelError(f"{config_file(directory)}: {error}") from error
    return replace(config, draft_model=draft, tapped_layers=tapped)


def _values(path: Path) -> dict[str, Any]:
    """Return the fields of a config.json or of a GGUF file's metadata. Raises ModelError."""
    if is_gguf(path):
        from weft.engine.models.weights.gguf_file import GgufFile  # the package is an optional dependency

        return GgufFile(path).values()
    return read_json(path)


def read_config(values: Mapping[str, Any], families: Registry = FAMILIES) -> ModelConfig:
    """Read the values of a config.json. transformers fills in defaults and renames old fields of the types that it
    knows."""
    if "model_type" not in values:
        raise ModelError("config.json has no model_type, which names the family")
    kind = str(values["model_type"])
    if kind not in families:
        near = _nearest(kind, values, families)
        raise ModelError(
            f"model type {kind!r} is not supported{near}; supported: {', '.join(families)}; --plugins adds others"
        )
    theirs = IN_TRANSFORMERS.get(kind, kind)
    known = None
    if theirs in CONFIG_MAPPING:
        known = known_fields(CONFIG_MAPPING[theirs])
        if kind not in AS_PUBLISHED:
            values = _with_defaults(values, theirs) | {"model_type": kind}
    fields = Fields(values, known)
    storage, config = format_of(fields), families[kind](fields)
    if not isinstance(config, ModelConfig):
        raise TypeError(f"the reader of model type {kind!r} gives a {type(config).__name__}, not a ModelConfig")
    return replace(config, storage=storage, ignored=tuple(fields.finish()))


def _with_defaults(values: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return a config with transformers' defaults and names. Raises ModelError, which names the field."""
    given = {name: value for name, value in values.items() if name not in HARMLESS or name in KEPT}
    # transformers fills lists per layer.
    Fields({**given, "model_type": kind}).size("num_hidden_layers", 1, high=MAX_LAYERS)

    def fill(leave_out: str = "") -> dict[str, Any]:
        kept = {name: value for name, value in given.items() if name != leave_out}
        filled: dict[str, Any] = CONFIG_MAPPING[kind].from_dict(deepcopy(kept) | {"model_type": kind}).to_dict()
        return filled

    def is_wrong(name: str) -> bool:
        with suppress(Exception):
            return bool(fill(leave_out=name))
        return False

    try:
        return fill()
    except Exception as error:  # its checks raise many classes of errors, and some do not name the field
        why = shorten(str(error), MAX_REASON) or type(error).__name__
        if not any(f"'{name}'" in why or f"`{name}`" in why for name in given):
            why = f"{next(filter(is_wrong, given), 'several fields')}: {why}"
        raise ModelError(f"not a config of model type {kind!r}: {why}") from error


def _nearest(kind: str, values: Mapping[str, Any], families: Registry) -> str:
    """Return the family with the nearest model type, or else the nearest architecture, in brackets."""
    for name in get_close_matches(kind, families, n=1):
        return f" (nearest by name: {name!r})"
    plain = {family.replace("_", ""): family for family in families}
    for architecture in values.get("architectures") or ():
        for name in get_close_matches(str(architecture).lower().partition("for")[0], plain, n=1):
            return f" (nearest by its architecture {architecture}: {plain[name]!r})"
    return ""


def plugin_line(error: Exception, at: Any) -> str | None:
    """Return the line of a plugin that raised an error, or called the code that did; None for Weft's own code. at: the
    called object: a family's reader, or the class of its config."""
    module = sys.modules.get(getattr(at, "__module__", ""))
    if module is None or module.__name__.startswith("weft."):
        return None
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == module.__file__]
    return f"plugin {module.__file__}" + (f", line {lines[-1]}," if lines else "")
