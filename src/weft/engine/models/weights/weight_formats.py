"""Table of the formats of weights, by the quant_method of a config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from weft.engine.models.config_json.fields import SHOWN, Fields, ModelError
from weft.engine.models.weights.float8_weights import Float8Format
from weft.engine.models.weights.source import Shape, Slices
from weft.engine.models.weights.weight_format import StoredTensors, WeightFormat

MXFP4_BLOCK = 32
MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of a four-bit float with two bits of exponent and one of mantissa; the fourth bit is the sign."""


class Mxfp4Format(WeightFormat):
    """Format with quant_method mxfp4 (OCP Microscaling Formats 1.0), without products: `name_blocks` has two values a
    byte with the lower four bits first, `name_scales` the power of two of each 32 values plus 127."""

    name: ClassVar[str] = "MXFP4"
    ends: ClassVar[tuple[str, ...]] = ("_blocks", "_scales")

    def read(self, tensors: StoredTensors, name: str, shape: Shape, take: Slices) -> Tensor:
        if tensors.has(name) or not tensors.has(f"{name}_blocks"):
            return super().read(tensors, name, shape, take)
        groups = -(-shape[-1] // MXFP4_BLOCK)
        first, last = take[-1].start // MXFP4_BLOCK, -(-take[-1].stop // MXFP4_BLOCK)
        whole = (*take[:-1], slice(first, last))
        stored = (*shape[:-1], groups, MXFP4_BLOCK // 2)
        packed = tensors.part(f"{name}_blocks", stored, (torch.uint8,))[(*whole, slice(0, MXFP4_BLOCK // 2))]
        scales = tensors.part(f"{name}_scales", (*shape[:-1], groups), (torch.uint8,))[whole]
        values = torch.tensor((*MXFP4_VALUES, *(-v for v in MXFP4_VALUES)))
        pairs = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
        part: Tensor = torch.ldexp(values[pairs.long()], scales.int()[..., None] - 127).flatten(-2)
        return part.narrow(-1, take[-1].start - first * MXFP4_BLOCK, take[-1].stop - take[-1].start)


PLAIN: WeightFormat = Float8Format()
"""Format of a checkpoint without quantization_config: floats; a tensor in FP8 is refused with what is missing."""
WEIGHT_FORMATS: Mapping[str, Callable[[Fields, tuple[str, ...]], WeightFormat | None]] = MappingProxyType(
    {"fp8": Float8Format.of, "mxfp4": lambda method, plain: Mxfp4Format()}
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
