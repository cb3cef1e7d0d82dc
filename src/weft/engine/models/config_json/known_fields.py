"""Fields of config.json that transformers reads, for one configuration class or for any class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from transformers import PretrainedConfig

READ_OF_ANY_CLASS: Mapping[str, Any] = {
    "attention_chunk_size": None,
    "configuration_files": None,
    "decoder": None,
    "fusion_config": None,
    "generator": None,
    "is_causal": True,
    "kv_sharing_modes": None,
    "layer_types": None,
    "number_of_conv_states": 1,
    "original_max_position_embeddings": None,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    "rope_parameters": None,
    "rope_scaling": None,
    "rope_theta": None,
    "sliding_window": None,
    "text_config": None,
    "text_encoder": None,
    "transformers_weights": None,
    "use_bidirectional_attention": False,
}
"""Fields that transformers' shared code (masks, caches, rotary embeddings, loading) reads from a config of any class,
each with the value that has no effect. `tests/models/test_known_fields.py` compares them with transformers' sources."""


def known_fields(kind: type[PretrainedConfig]) -> dict[str, Any]:
    """Return the fields that transformers reads for a configuration class, each with its default, or its own fields.
    Other fields cannot change what transformers computes, unless a checkpoint brings its own code."""
    own = {field.name: field.default for field in fields(kind)}
    sections = {name: known_fields(section) for name, section in kind.sub_configs.items()}
    aliases = {alias: own.get(name) for alias, name in kind.attribute_map.items()}
    attributes = {name: getattr(kind, name, None) for name in dir(kind)}
    return {**attributes, **READ_OF_ANY_CLASS, **aliases, **own, **sections}
