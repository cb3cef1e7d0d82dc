"""Readers of a checkpoint's JSON files, which are untrusted input; no field is skipped."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
_NAMES = """
_name_or_path architectures auto_map model_type transformers_version id2label label2id problem_type dtype torch_dtype
bos_token_id pad_token_id chunk_size_feed_forward num_labels use_cache return_dict use_return_dict output_attentions
output_hidden_states output_router_logits name_or_path initializer_range attention_dropout router_aux_loss_coef
_attn_implementation attn_implementation _experts_implementation experts_implementation aux_loss_alpha seq_aux
router_jitter_noise pretraining_tp ep_size
"""
HARMLESS = frozenset(_NAMES.split())
"""Fields that may have any value, because they do not change the logits: names, a library's outputs, training."""
MAX_SIZE, MAX_LAYERS, MAX_EXPERTS, MAX_NUMBER = 2**31 - 1, 4096, 16384, 1e30
"""Limits on the sizes in a config. A larger value is a mistake, and would fill the memory before it is noticed."""
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


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises ModelError, in one line that names the file, for any other content."""
    try:
        value = json.loads(path.read_bytes(), object_pairs_hook=_object)
    except RecursionError as error:
        raise ModelError(f"{path} is nested too deeply to be read") from error
    except (OSError, ValueError) as error:  # including bytes that are not UTF-8
        raise ModelError(f"{path} cannot be read: {error}; is the download complete?") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}, not a JSON object")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        for name, value in pairs:
            if values[name] != value:
                raise ValueError(f"{name!r} is there twice with different values")
    return values


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
        """Return the integer `name` from `low` to `high`, or the `default`. Required without a default."""
        value = self.need(name) if default is None else self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise self._wrong(name, f"an integer of {low} or more")
        if value > high:
            raise self._wrong(name, f"at most {high}")
        return value

    def number(self, name: str, default: float | None = None, low: float = 0.0, high: float = MAX_NUMBER) -> float:
        """Return the finite number `name` from `low` to `high`, or the `default`. Required without a default."""
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
        """Return the list `name` of values of type `kind`, or the `default`. Required without a default."""
        value = self.need(name) if default is None else self.get(name, default)
        if not isinstance(value, list | tuple) or any(type(each) is not kind for each in value):
            raise self._wrong(name, f"a list of {kind.__name__}")
        return value

    def tokens(self, name: str) -> tuple[int, ...]:
        """Return the tokens of a field that holds a token, a list of tokens, or nothing."""
        if isinstance(self.get(name, ()), list | tuple):
            return tuple(self.items(name, int, ()))
        return (self.size(name, low=-MAX_SIZE),)

    def only(self, name: str, *supported: Any) -> None:
        """Read a field with a limited choice of values. Missing and null are accepted. Raises ModelError."""
        value = self.get(name)
        alike = (value == each and isinstance(value, bool) == isinstance(each, bool) for each in supported)
        if value is not None and not any(alike):
            values = ", ".join(map(repr, supported)) or "leaving it out"
            raise ModelError(
                f"{self._prefix}{name}={SHOWN.repr(value)} is not supported for model type {self.family!r}; "
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
                    f"config field {self._prefix + name!r} (value {SHOWN.repr(value)}) is not understood for model "
                    f"type {self.family!r}: it may change what the model computes; remove it if it does not"
                )
            if name not in self._known:
                ignored.append(self._prefix + name)
        return ignored + [name for section in self._sections.values() for name in section.finish()]

    def _wrong(self, name: str, rule: str) -> ModelError:
        value = SHOWN.repr(self._values.get(name))
        return ModelError(f"{self._prefix}{name}={value} is not {rule}{self._where}")


SHOWN = reprlib.Repr()
SHOWN.maxdict = SHOWN.maxlist = SHOWN.maxtuple = 12
SHOWN.maxstring = SHOWN.maxother = 60
