"""Table of the formats of weights, by the quant_method of a config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from weft.engine.models.config_json.fields import SHOWN, Fields, ModelError
from weft.engine.models.weights.float8_weights import Float8Format
from weft.engine.models.weights.mxfp4_weights import Mxfp4Format
from weft.engine.models.weights.weight_format import WeightFormat

PLAIN: WeightFormat = Float8Format()
"""Format of a checkpoint without quantization_config: floats; a tensor in FP8 is refused with what is missing."""
WEIGHT_FORMATS: Mapping[str, Callable[[Fields, tuple[str, ...]], WeightFormat | None]] = MappingProxyType(
    {"fp8": Float8Format.of, "mxfp4": lambda method, plain: Mxfp4Format(plain)}
)
"""Reader of quantization_config and of the modules that it leaves in floats, by quant_method; None: not supported."""


def format_of(fields: Fields) -> WeightFormat:
    """Return the format that a config.json names in quantization_config. Raises ModelError."""
    given = fields.get("quantization_config")
    if given is None:
        return PLAIN
    method = fields.section("quantization_config")
    plain = tuple(n for f in ("modules_to_not_convert", "ignored_layers") for n in method.items(f, str, ()))
    read = WEIGHT_FORMATS.get(str(method.get("quant_method")))
    found = read and read(method, plain)
    if found is None:
        raise ModelError(
            f"quantization_config {SHOWN.repr(given)} is not supported; supported: quant_method mxfp4, or fp8 with a "
            "weight_block_size"
        )
    return found
