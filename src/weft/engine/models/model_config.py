"""Model configs, and a reader of config.json that skips no field."""

from __future__ import annotations

import re
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import translate
from functools import cache
from typing import Any, ClassVar, TypeVar

import torch

from weft.engine.models.layers import Builder, Embedding, Layer
from weft.engine.models.rotary import ROPES, Rope
from weft.planner.experts import Forms

T = TypeVar("T")
HARMLESS = (
    frozenset({"_name_or_path", "architectures", "auto_map", "model_type", "transformers_version", "id2label"})
    | {
        "label2id",
        "problem_type",
        "dtype",
        "torch_dtype",
        "bos_token_id",
        "pad_token_id",
        "chunk_size_feed_forward",
        "num_labels",
    }
    | {"use_cache", "return_dict", "use_return_dict", "output_attentions", "output_hidden_states"}
    | {"output_router_logits", "name_or_path", "initializer_range", "attention_dropout", "router_aux_loss_coef"}
    | {"_attn_implementation", "attn_implementation", "_experts_implementation", "experts_implementation"}
    | {"aux_loss_alpha", "seq_aux", "router_jitter_noise", "pretraining_tp", "ep_size"}
)
"""Fields that may have any value, because they do not change the logits: names, a library's outputs, training."""
MAX_SIZE, MAX_LAYERS, MAX_EXPERTS, MAX_NUMBER = 2**31 - 1, 4096, 16384, 1e30
"""Limits on the sizes in a config. A larger value is a mistake, and would fill the memory before it is noticed."""
MAX_ROTATED, TINY = 2**16, 1e-30
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
SECTIONS: Mapping[str, Mapping[str, Any]] = {
    "rope_parameters": {},
    "rope_scaling": {},
    "quantization_config": {"dequantize": False, "modules_to_convert": None, "expert_dtype": "fp8"},
}
"""Fields of nested objects that transformers reads and Weft does not, each with its default."""


class ModelError(ValueError):
    """Model directory that cannot be served. The message is one line with a remedy."""


def first_line(error: Exception) -> str:
    """Return the first line of a library's error, or its class if it has no text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(": ")


class Fields:
    """Fields of a JSON object of a checkpoint, such as config.json. A reader asks for the fields that it supports;
    `finish` rejects the others, unless they cannot change what the model computes.

    Methods that read raise ModelError, which names the field, for a value of a wrong type or out of range.

    Args:
        values: the object, with the `model_type` that errors name.
        known: fields that the model's definition reads, each with its default; None: any field may matter.
        prefix: prefix of field names in errors.
    """

    def __init__(self, values: Mapping[str, Any], known: Mapping[str, Any] | None = None, prefix: str = ""):
        self.family: str = values.get("model_type", "")
        self._where = f", for model type {self.family!r}" if self.family else ""
        self._values, self._known, self._prefix = values, known, prefix
        self._read: set[str] = set()
        self._sections: dict[str, Fields] = {}

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field of any type, or the default if it is missing or null."""
        self._read.add(name)
        value = self._values.get(name)
        return default if value is None else value

    def need(self, name: str) -> Any:
        """Return a field of any type. Raises ModelError if it is missing or null."""
        value = self.get(name)
        if value is None:
            raise ModelError(f"a config of model type {self.family!r} needs a value for {self._prefix + name!r}")
        return value

    def size(self, name: str, default: int | None = None, low: int = 1, high: int = MAX_SIZE) -> int:
        """Return an integer, or the default. Required without a default."""
        value = self.need(name) if default is None else self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise self._wrong(name, f"an integer of {low} or more")
        if value > high:
            raise self._wrong(name, f"at most {high}")
        return value

    def number(self, name: str, default: float | None = None, low: float = 0.0, high: float = MAX_NUMBER) -> float:
        """Return a finite number, or the default. Required without a default."""
        value = self.need(name) if default is None else self.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
            raise self._wrong(name, f"a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a boolean, or the default."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def items(self, name: str, kind: type[T], default: Sequence[T] | None = None) -> Sequence[T]:
        """Return a list of values of one type, or the default. Required without a default."""
        value = self.need(name) if default is None else self.get(name, default)
        if not isinstance(value, list | tuple) or any(type(each) is not kind for each in value):
            raise self._wrong(name, f"a list of {kind.__name__}")
        return value

    def only(self, name: str, *supported: Any) -> None:
        """Read a field with a limited choice of values. Missing and null are accepted. Raises ModelError."""
        value = self.get(name)
        alike = (value == each and isinstance(value, bool) == isinstance(each, bool) for each in supported)
        if value is not None and not any(alike):
            values = ", ".join(map(repr, supported)) or "leaving it out"
            raise ModelError(
                f"{self._prefix}{name}={_SHOWN.repr(value)} is not supported for model type {self.family!r}; "
                f"supported: {values}"
            )

    def section(self, name: str, **defaults: Any) -> Fields:
        """Return the fields of a nested object, empty if it is missing. `finish` includes them. defaults: values of
        missing fields."""
        if name not in self._sections:
            value = self.get(name, {})
            if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
                raise self._wrong(name, "an object")
            values = {**defaults, **value, "model_type": self.family}
            known = SECTIONS.get(name, (self._known or {}).get(name))
            known = known if isinstance(known, Mapping) else self._known and {}
            self._sections[name] = Fields(values, known, f"{self._prefix}{name}.")
        return self._sections[name]

    def finish(self) -> list[str]:
        """Return the names of ignored fields: not read here, and not by the model's definition either. Raises
        ModelError for an unread field that may change what the model computes."""
        ignored = []
        for name, value in self._values.items():
            if name in self._read or name in HARMLESS or value is None:
                continue
            if self._known is None or (name in self._known and value != self._known[name]):
                raise ModelError(
                    f"config field {self._prefix + name!r} (value {_SHOWN.repr(value)}) is not understood for model "
                    f"type {self.family!r}: it may change what the model computes; remove it if it does not"
                )
            if name not in self._known:
                ignored.append(self._prefix + name)
        return ignored + [name for section in self._sections.values() for name in section.finish()]

    def _wrong(self, name: str, rule: str) -> ModelError:
        value = _SHOWN.repr(self._values.get(name))
        return ModelError(f"{self._prefix}{name}={value} is not {rule}{self._where}")


_SHOWN = reprlib.Repr()
_SHOWN.maxdict = _SHOWN.maxlist = _SHOWN.maxtuple = 12
_SHOWN.maxstring = _SHOWN.maxother = 60


@dataclass(frozen=True)
class Storage:
    """Storage formats of a checkpoint's weights (see `weft.engine.models.checkpoint.Checkpoint`).

    Args:
        plain: modules that are not in FP8, as config.json lists them: names, parts of names between dots, or patterns
            with `*`.
    """

    float8_block: tuple[int, int] | None = None
    mxfp4: bool = False
    plain: tuple[str, ...] = ()

    def in_float8(self, name: str) -> bool:
        """Check if products with the weight can be computed in FP8: stored in 128 × 128 blocks, and not plain."""
        module = f".{name.removesuffix('.weight')}."
        return self.float8_block == (128, 128) and not _pattern(self.plain).match(module)


@cache  # a checkpoint names thousands of experts
def _pattern(plain: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern of the modules `.a.b.c.` that one of `Storage.plain` names."""
    return re.compile("|".join(translate(f"*.{name}.*") for name in plain) or r"(?!)")


@dataclass(frozen=True)
class ModelConfig(ABC):
    """Fields that all families have; each family adds its own. Widths are in elements.

    Args:
        norms_less_one: norms store their weights minus one.
        prefix: prefix of the decoder's weights.
        spares: prefixes of tensors that the model does not use, such as drafts and vision towers.
        family: model type in the registry.
        max_position: maximum tokens of a sequence.
        dtype: dtype of the checkpoint.
        rope: rotary embedding of queries and keys, unless a layer names another.
        storage: storage format of the weights.
        ignored: fields of config.json that cannot change what the model computes.

    The layout sets these fields; config.json does not have them:
        split_vocabulary: shard embedding and head over attn_tp by tokens of the vocabulary.
        replicate_queries: each rank of a dcp group computes the queries of all its ranks.
        experts: allowed exchanges of rows for mixtures of experts (`weft.planner.experts`).
        float8: compute products with FP8 weights in FP8 (`weft.engine.models.products`) instead of dequantising the
            weights.
    """

    norms_less_one: ClassVar[bool] = False
    prefix: ClassVar[str] = "model"
    spares: ClassVar[tuple[str, ...]] = ("mtp.",)
    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    tie_embeddings: bool
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    rope: Rope
    storage: Storage
    ignored: tuple[str, ...] = field(default=(), kw_only=True, compare=False)
    split_vocabulary: bool = field(default=False, kw_only=True)
    replicate_queries: bool = field(default=False, kw_only=True)
    experts: Forms = field(default="gather", kw_only=True)
    float8: bool = field(default=False, kw_only=True)

    @abstractmethod
    def build(self, b: Builder) -> LanguageModel:
        """Build one rank's model with unfilled weights. Raises LayoutError if it does not divide over the layout."""


class LanguageModel(Layer):
    """Model on one rank. forward: (stream, batch, caches) → logits `[S, vocabulary]` of the sampled rows, or this
    rank's share of a split vocabulary."""

    config: ModelConfig
    embed: Embedding


def common_fields(
    fields: Fields,
    head_dim: int,
    rope_dim: int | None = None,
    interleaved: bool = False,
    rope: Rope | None = None,
    eps: float | None = None,
) -> dict[str, Any]:
    """Read the fields of ModelConfig itself. Raises ModelError.

    Args:
        rope_dim: number of a head's elements that are rotated; None: all.
        interleaved: as in `Rope`.
        rope: rotary embedding of a family that does not read it from `rope_parameters`.
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
    if rope is None:
        rope = rope_of(fields.section("rope_parameters"), rope_dim or head_dim, max_position, interleaved)
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
        eos_token_ids=tokens(fields, "eos_token_id"),
        dtype=dtype,
        rope=rope,
        storage=_storage(fields),
    )


def tokens(fields: Fields, name: str) -> tuple[int, ...]:
    """Return a field that holds a token, a list of tokens, or nothing. Raises ModelError."""
    if isinstance(fields.get(name, ()), list | tuple):
        return tuple(fields.items(name, int, ()))
    return (fields.size(name, low=-MAX_SIZE),)


def full_attention(fields: Fields) -> None:
    """Read the layer types of a family with full attention only. Raises ModelError for another type."""
    for kind in fields.items("layer_types", str, ()):
        if kind != "full_attention":
            raise ModelError(f"layer type {kind!r} is not supported for {fields.family!r}; supported: full_attention")


def _storage(fields: Fields) -> Storage:
    given = fields.get("quantization_config")
    if given is None:
        return Storage()
    method = fields.section("quantization_config")
    ignored = ("modules_to_not_convert", "ignored_layers")
    plain = tuple(name for field in ignored for name in method.items(field, str, ()))
    kind, block = method.get("quant_method"), tuple(method.items("weight_block_size", int, ()))
    if kind == "mxfp4":
        return Storage(mxfp4=True)
    if kind != "fp8" or len(block) != 2 or min(block) < 1:
        raise ModelError(
            f"quantization_config {_SHOWN.repr(given)} is not supported; supported: quant_method mxfp4, or fp8 with a "
            "weight_block_size"
        )
    method.only("activation_scheme", "dynamic")
    method.only("fmt", "e4m3", "float8_e4m3fn")
    method.only("scale_fmt", "float", "ue8m0")  # scales are read in their stored dtype
    return Storage(float8_block=(block[0], block[1]), plain=plain)


def rope_of(
    parameters: Fields, dim: int, max_position: int, interleaved: bool = False, part: float | None = None
) -> Rope:
    """Return the rotary embedding of a section of parameters in transformers' names. Raises ModelError. dim: elements
    of a head that are rotated. part: their fraction, if the family reads `partial_rotary_factor`."""
    kind = parameters.get("type", "default")
    kind = parameters.get("rope_type", kind)
    if not isinstance(kind, str) or kind not in ROPES:
        raise ModelError(f"rope type {kind!r} is not supported; supported: {', '.join(ROPES)}")
    if dim < 2 or dim % 2 or dim > MAX_ROTATED:
        raise ModelError(
            f"rotary embeddings rotate pairs of elements, but {dim} elements of a head are to be rotated; supported: "
            f"2 to {MAX_ROTATED}"
        )
    parameters.only("partial_rotary_factor", 1.0 if part is None else part)
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
