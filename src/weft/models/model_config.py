"""Model configs, and how config.json is read without skipping any field."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import translate
from functools import cache
from typing import Any, ClassVar

import torch

from weft.models.layers import Builder, Embedding, Layer
from weft.models.rotary import ROPES, Rope
from weft.place.experts import Forms

HARMLESS = (
    frozenset({"_name_or_path", "architectures", "auto_map", "model_type", "transformers_version", "id2label"})
    | {"label2id", "problem_type", "dtype", "torch_dtype", "bos_token_id", "pad_token_id", "chunk_size_feed_forward"}
    | {"use_cache", "return_dict", "output_attentions", "output_hidden_states", "output_router_logits"}
    | {"initializer_range", "attention_dropout", "router_aux_loss_coef", "aux_loss_alpha", "seq_aux"}
    | {"router_jitter_noise"}
    | {"pretraining_tp", "ep_size"}
)
"""Fields that may have any value, as they do not change the logits: names, a library's outputs, training."""


class ModelError(ValueError):
    """A model directory that cannot be served: one line that says what to do."""


def first_line(error: Exception) -> str:
    """The first line of a library's error; its class where it has no text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(": ")


class Fields:
    """The fields of a config.json. A reader asks for those that it understands; `finish` rejects the others.

    A field that is skipped may change what the model computes, and the only sign would be wrong text.
    """

    def __init__(self, values: Mapping[str, Any]):
        self.family: str = values["model_type"]
        self._values = values
        self._read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """The field, or the default where it is missing or null."""
        self._read.add(name)
        value = self._values.get(name)
        return default if value is None else value

    def need(self, name: str) -> Any:
        """The field. Raises ModelError where it is missing or null."""
        value = self.get(name)
        if value is None:
            raise ModelError(f"a config of model type {self.family!r} needs a value for {name!r}")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        """A field that counts something, or the default. Raises ModelError unless it is an integer of 1 or more."""
        value = self.get(name, default)
        if value is None:
            return int(self.need(name))
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{name}={value!r} is not an integer of 1 or more, for model type {self.family!r}")
        return value

    def only(self, name: str, *supported: Any) -> None:
        """Reads a field of which some values are supported. A missing field and null are. Raises ModelError."""
        value = self.get(name)
        if value is not None and value not in supported:
            values = ", ".join(map(repr, supported)) or "leaving it out"
            raise ModelError(f"{name}={value!r} is not supported for model type {self.family!r}; supported: {values}")

    def finish(self) -> None:
        """Raises ModelError for a field that was not read and is not known to be harmless."""
        for name, value in self._values.items():
            if name not in self._read and name not in HARMLESS and value is not None:
                raise ModelError(
                    f"config field {name!r} (value {value!r}) is not understood for model type {self.family!r}: it may "
                    "change what the model computes; remove it if it does not"
                )


@dataclass(frozen=True)
class Storage:
    """How a checkpoint may store weights, as `weft.models.checkpoint.Checkpoint` takes it.

    plain: modules that are not in FP8, as config.json lists them: names, parts of names between dots, or patterns with
    `*`.
    """

    float8_block: tuple[int, int] | None = None
    mxfp4: bool = False
    plain: tuple[str, ...] = ()

    def in_float8(self, name: str) -> bool:
        """Whether products with the weight may be computed in FP8: 128 × 128 blocks, and not listed as plain."""
        module = f".{name.removesuffix('.weight')}."
        return self.float8_block == (128, 128) and not _pattern(self.plain).match(module)


@cache  # a checkpoint names thousands of experts
def _pattern(plain: tuple[str, ...]) -> re.Pattern[str]:
    """Of modules `.a.b.c.` that one of `Storage.plain` names."""
    return re.compile("|".join(translate(f"*.{name}.*") for name in plain) or r"(?!)")


@dataclass(frozen=True)
class ModelConfig(ABC):
    """The fields that all families have; each family adds its own. Widths are in elements.

    norms_less_one: norms store their weights minus one.
    prefix: of the decoder's weights.
    family: its model type in the registry.
    max_position: maximum tokens of a sequence.
    dtype: the checkpoint's.
    rope: the rotary embedding of queries and keys, where a layer names no other.
    storage: of the weights.

    The layout sets these; config.json does not have them:
    split_vocabulary: embedding and head are split over attn_tp by tokens of the vocabulary.
    replicate_queries: each rank of a dcp group computes the queries of all ranks.
    experts: the forms in which mixtures of experts may take their rows (`weft.place.experts`).
    float8: products with weights that are stored in FP8 are computed in FP8 (`weft.models.products`); otherwise the
        weights are dequantised.
    """

    norms_less_one: ClassVar[bool] = False
    prefix: ClassVar[str] = "model"
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
    split_vocabulary: bool = field(default=False, kw_only=True)
    replicate_queries: bool = field(default=False, kw_only=True)
    experts: Forms = field(default="gather", kw_only=True)
    float8: bool = field(default=False, kw_only=True)

    @abstractmethod
    def build(self, b: Builder) -> LanguageModel:
        """The model on one rank, with unfilled weights. Raises LayoutError where it does not divide over the layout."""


class LanguageModel(Layer):
    """A model on one rank. forward: (stream, batch, caches) → logits `[S, vocabulary]` of the sampled rows, or of this
    rank's share of the vocabulary where it is split.
    """

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
    """ModelConfig's own fields. Raises ModelError.

    rope_dim: number of a head's elements that are rotated; None: all. interleaved: as `Rope`.
    rope: for a family that does not read it from `rope_parameters`.
    eps: of the norms, where a config may leave it out.
    """
    fields.only("hidden_act", "silu")
    fields.only("is_encoder_decoder", False)
    eos = fields.get("eos_token_id", ())
    dtype = fields.get("dtype", fields.get("torch_dtype", "bfloat16"))
    dtype = dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype), None)
    if not isinstance(dtype, torch.dtype):
        raise ModelError(f"dtype {fields.get('dtype')!r} is none of torch's, such as bfloat16")
    max_position = fields.size("max_position_embeddings")
    heads = fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ModelError(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
    return dict(
        family=fields.family,
        vocab_size=fields.size("vocab_size"),
        hidden_size=fields.size("hidden_size"),
        num_layers=fields.size("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        rms_norm_eps=fields.need("rms_norm_eps") if eps is None else fields.get("rms_norm_eps", eps),
        tie_embeddings=bool(fields.get("tie_word_embeddings", False)),
        eos_token_ids=tuple(eos) if isinstance(eos, list | tuple) else (eos,),
        dtype=dtype,
        rope=rope or rope_of(fields.need("rope_parameters"), rope_dim or head_dim, max_position, interleaved),
        storage=_storage(fields),
    )


def _storage(fields: Fields) -> Storage:
    given = dict(fields.get("quantization_config", {}))
    ignored = ("modules_to_not_convert", "ignored_layers")
    plain = tuple(str(name) for field in ignored for name in given.get(field) or ())
    rest = {name: value for name, value in given.items() if name not in ignored and value is not None}
    if not rest:
        return Storage()
    if rest == {"quant_method": "mxfp4"}:
        return Storage(mxfp4=True)
    block, given_fmt = rest.pop("weight_block_size", ()), rest.pop("fmt", "e4m3")
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    understood = given_fmt in ("e4m3", "float8_e4m3fn") and all(fp8.get(name) == value for name, value in rest.items())
    if len(block) != 2 or not understood or "quant_method" not in rest:
        raise ModelError(
            f"quantization_config {given} is not supported; supported: quant_method mxfp4, or fp8 with fmt e4m3, a "
            "weight_block_size and dynamic activations"
        )
    return Storage(float8_block=(block[0], block[1]), plain=plain)


def rope_of(parameters: Mapping[str, Any], dim: int, max_position: int, interleaved: bool = False) -> Rope:
    """Checks parameters as transformers names them. dim: elements of a head that are rotated. Raises ModelError."""
    kind = parameters.get("rope_type", "default")
    if kind not in ROPES:
        raise ModelError(f"rope type {kind!r} is not supported; supported: {', '.join(ROPES)}")
    for name, value in parameters.items():
        if name not in ROPES[kind] and value is not None and (name, value) != ("partial_rotary_factor", 1.0):
            raise ModelError(f"rope type {kind!r}: parameter {name!r} (value {value!r}) is not understood")
    if dim < 2 or dim % 2:
        raise ModelError(f"rotary embeddings rotate pairs of elements, but {dim} elements of a head are to be rotated")
    return Rope(parameters, dim, max_position, interleaved)
