"""Fields of config.json that all families have, with rotary embeddings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from weft.engine.models.config_json.fields import MAX_LAYERS, Fields, ModelError

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
MAX_ROTATED, TINY = 2**16, 1e-30
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
"""Types of layers in config.json."""
_ALL = frozenset({"rope_type", "type", "rope_theta"})
_STRETCHED = _ALL | {"factor", "original_max_position_embeddings"}
ROPES: Mapping[str, frozenset[str]] = {
    "default": _ALL,
    "linear": _STRETCHED,
    "llama3": _STRETCHED | {"low_freq_factor", "high_freq_factor"},
    "yarn": _STRETCHED | {"beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate"},
}
"""Types with frequencies that do not depend on the sequence's length, and the parameters of each."""


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding, as config.json describes it.

    Args:
        parameters: in transformers' names (`rope_parameters`).
        dim: number of a head's first elements that are rotated.
        interleaved: rotate neighbouring elements (DeepSeek) instead of pairs across halves (most checkpoints).
    """

    parameters: Mapping[str, Any]
    dim: int
    max_position: int
    interleaved: bool = False

    def attention_scale(self) -> float:
        """Return the factor of attention's scores in DeepSeek's models with YaRN (arXiv 2309.00071)."""
        all_dim, factor = self.parameters.get("mscale_all_dim") or 0.0, self.parameters.get("factor") or 1.0
        return (0.1 * all_dim * math.log(factor) + 1.0) ** 2 if factor > 1 else 1.0

    def frequencies(self) -> tuple[Tensor, float]:
        """Return (inverse frequencies float32 `[dim / 2]`, factor on cos and sin), as transformers computes them."""
        base = self.parameters["rope_theta"]
        kind = self.parameters.get("rope_type", "default")
        if kind == "default":
            return 1.0 / base ** (torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim), 1.0
        shape = dict(head_dim=self.dim, max_position_embeddings=self.max_position, hidden_size=1, num_attention_heads=1)
        values: dict[str, Any] = shape | {"rope_parameters": dict(self.parameters)}
        inverse, factor = ROPE_INIT_FUNCTIONS[kind](PretrainedConfig(**values), torch.device("cpu"))
        return inverse, float(factor)


def common_fields(
    fields: Fields,
    head_dim: int | None = None,
    part: float = 1.0,
    rope: Rope | None = None,
    eps: float | None = None,
) -> dict[str, Any]:
    """Read the fields of ModelConfig itself. Raises ModelError.

    Args:
        head_dim: elements of a head; None: by its field, or the hidden size divided by the heads.
        part: fraction of a head's elements that is rotated.
        rope: rotary embedding, unless these and `rope_parameters` describe it.
        eps: default of the norms' epsilon.
    """
    fields.only("hidden_act", "silu")
    fields.only("is_encoder_decoder", False)
    dtype = fields.get("dtype", fields.get("torch_dtype", "bfloat16"))
    dtype = dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype), None)
    if dtype not in FLOATS:
        given = fields.get("dtype", fields.get("torch_dtype"))
        raise ModelError(f"dtype={given!r} is not supported; supported: {', '.join(map(str, FLOATS))}")
    max_position = fields.size("max_position_embeddings")
    heads = fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ModelError(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
    if head_dim is None:
        head_dim = fields.size("head_dim", fields.size("hidden_size") // heads)
    if rope is None:
        rope = rope_of(fields.section("rope_parameters"), int(head_dim * part), max_position, part=part)
    return dict(
        family=fields.family,
        vocab_size=fields.size("vocab_size"),
        hidden_size=fields.size("hidden_size"),
        num_layers=fields.size("num_hidden_layers", high=MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        rms_norm_eps=fields.number("rms_norm_eps", eps),
        tie_embeddings=fields.flag("tie_word_embeddings"),
        eos_token_ids=fields.tokens("eos_token_id"),
        dtype=dtype,
        rope=rope,
    )


def check_layer_types(fields: Fields, kinds: Sequence[str], *supported: str) -> None:
    """Raise ModelError for a type of layers that a family does not support."""
    for kind in kinds:
        if kind not in supported:
            names = ", ".join(supported)
            raise ModelError(f"layer type {kind!r} is not supported for {fields.family!r}; supported: {names}")


def rope_of(parameters: Fields, dim: int, max_position: int, interleaved: bool = False, part: float = 1.0) -> Rope:
    """Return the rotary embedding of a section of parameters in transformers' names. Raises ModelError. dim: elements
    of a head that are rotated. part: their fraction."""
    kind = parameters.get("type", "default")
    kind = parameters.get("rope_type", kind)
    if not isinstance(kind, str) or kind not in ROPES:
        raise ModelError(f"rope type {kind!r} is not supported; supported: {', '.join(ROPES)}")
    if dim < 2 or dim % 2 or dim > MAX_ROTATED:
        raise ModelError(
            f"rotary embeddings rotate pairs of elements, but {dim} elements of a head are to be rotated; supported: "
            f"2 to {MAX_ROTATED}"
        )
    parameters.only("partial_rotary_factor", part)
    found: dict[str, Any] = {"rope_type": kind, "rope_theta": parameters.number("rope_theta", low=TINY)}
    if "truncate" in ROPES[kind]:
        found["truncate"] = parameters.flag("truncate", True)
    for name in ROPES[kind] - ROPES["default"] - {"truncate"}:
        if parameters.get(name) is not None:
            whole = name == "original_max_position_embeddings"
            found[name] = parameters.size(name) if whole else parameters.number(name)
    rope = Rope(found, dim, max_position, interleaved)
    try:
        finite = all(bool(torch.as_tensor(each).isfinite().all()) for each in rope.frequencies())
    except Exception as error:  # a missing parameter, or a division by zero
        raise ModelError(f"rope parameters {found} cannot be used: {type(error).__name__}: {error}") from error
    if not finite:
        raise ModelError(f"rope parameters {found} cannot be used: not all frequencies are finite")
    return rope
