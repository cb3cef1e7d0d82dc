"""Weights in FP8 with a scale for each block (DeepSeek-V3, arXiv 2412.19437).

`name`, float8_e4m3fn, has a tensor `name_scale_inv` with the factor of each block. A rank's slice may cut the
checkpoint's blocks. Then scales are repeated for smaller blocks, with sides that divide the block and the offsets of
the slice, so that no value changes. Activations are quantised in groups of the same number of columns. Fewer than
MIN_COLUMNS raise LayoutError, which names the weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any, ClassVar

import torch
from torch import Tensor

from weft.engine.kernels import ops
from weft.engine.models.config_json.common_fields import FLOATS
from weft.engine.models.config_json.fields import Fields, ModelError
from weft.engine.models.weights.source import Shape, Slices, Source
from weft.engine.models.weights.weight_format import DTYPES, Empty, FillDummy, StoredTensors, WeightFormat, is_plain
from weft.kernels.float8 import FLOAT8, LARGEST, Fp8Weight, dequantise
from weft.planner.spec import LayoutError
from weft.stream.formats import Float8

BLOCK, MIN_COLUMNS = 128, 32


class Float8Weight(Fp8Weight):
    """Weight of a layer, with its products."""

    __slots__ = ()
    experts = staticmethod(ops.experts)

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def format(self) -> Float8:
        return Float8(self.unit[1])

    @property
    def parameters(self) -> Mapping[str, Any]:
        return {"": self.values, "_scales": self.scales}

    def dequantise(self, dtype: torch.dtype, expert: int | None = None) -> Tensor:
        part = self if expert is None else Fp8Weight(self.values[expert], self.scales[expert], self.unit)
        return dequantise(part, dtype)

    def product(self, x: Any, out: Tensor) -> Tensor:
        return ops.linear_float8(x, self, out)


@dataclass(frozen=True)
class Float8Format(WeightFormat):
    """Format with quant_method fp8.

    Args:
        block: (rows, columns) of a weight that share a scale; None: config.json has none, and a weight in FP8 is
            refused.
        plain: modules that are not in FP8, as config.json lists them: names, parts of names between dots, or patterns
            with `*`.
    """

    name: ClassVar[str] = "FP8"
    capability: ClassVar[tuple[int, int]] = (8, 9)
    ends: ClassVar[tuple[str, ...]] = ("_scale_inv",)
    share_unit: ClassVar[int] = BLOCK
    block: tuple[int, int] | None = None
    plain: tuple[str, ...] = ()

    @classmethod
    def of(cls, method: Fields, plain: tuple[str, ...]) -> Float8Format | None:
        """Read quantization_config. Returns None without blocks. Raises ModelError."""
        block = tuple(method.items("weight_block_size", int, ()))
        if len(block) != 2 or min(block) < 1:
            return None
        method.only("activation_scheme", "dynamic")
        method.only("fmt", "e4m3", "float8_e4m3fn")
        method.only("scale_fmt", "float", "ue8m0")  # scales are read in their stored dtype
        return cls((block[0], block[1]), plain)

    @property
    def has_products(self) -> bool:
        return self.block is not None

    def keeps(self, name: str, tensors: StoredTensors | None = None) -> bool:
        listed = self.block != (BLOCK, BLOCK) or is_plain(name, self.plain)
        return not listed and (tensors is None or tensors.has(f"{name}_scale_inv"))

    def read(self, tensors: StoredTensors, name: str, shape: Shape, take: Slices) -> Tensor:
        part = self._values(tensors, name, shape, take)
        return part.float() * self._scales(tensors, name, shape, take) if part.dtype == FLOAT8 else part

    def declare(self, path: str, shape: Shape, sources: Iterable[Source], empty: Empty) -> Float8Weight:
        rows, columns = unit_of(path, len(shape), sources)
        blocks = (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // columns))
        return Float8Weight(empty(*shape, dtype=FLOAT8), empty(*blocks, dtype=torch.float32), (rows, columns))

    def load(self, weight: Float8Weight, tensors: StoredTensors, source: Source) -> None:
        shape, take = source.stored()
        weight.values.data[source.at].copy_(source.restore(self._values(tensors, source.name, shape, take)))
        scales = source.restore(self._scales(tensors, source.name, shape, take, weight.unit[1]))
        _scales_of(weight, source).copy_(scales[..., :: weight.unit[0], :])

    def make_up(self, weight: Float8Weight, source: Source, bound: float, fill: FillDummy) -> None:
        fill(weight.values.data[source.at], source, LARGEST)
        _scales_of(weight, source).fill_(bound / LARGEST)

    def _values(self, tensors: StoredTensors, name: str, shape: Shape, take: Slices) -> Tensor:
        part = tensors.part(name, shape, (*FLOATS, FLOAT8))
        if tensors.has(f"{name}_scale_inv") and (kind := part.get_dtype()) != DTYPES[FLOAT8]:
            raise ModelError(f"{name} has scales, but is stored in {kind}, not {DTYPES[FLOAT8]}")
        values: Tensor = part[take]
        return values

    def _scales(self, tensors: StoredTensors, name: str, shape: Shape, take: Slices, columns: int = 1) -> Tensor:
        """Return a scale for each row and each `columns` columns of a slice."""
        if self.block is None:
            raise ModelError(f"{name} is stored in FP8, but config.json has no weight_block_size")
        if len(shape) < 2:
            raise ModelError(f"{name} is stored in FP8, but only blocks of a matrix can have scales")
        blocks = tuple(-(-size // block) for size, block in zip(shape[-2:], self.block, strict=True))
        units = tuple(
            slice(t.start // block, -(-t.stop // block)) for t, block in zip(take[-2:], self.block, strict=True)
        )
        stored = tensors.part(f"{name}_scale_inv", (*shape[:-2], *blocks), (*FLOATS, torch.float8_e8m0fnu))
        scales: Tensor = stored[(*take[:-2], *units)].float()
        for dim, block, unit in zip((-2, -1), self.block, (1, columns), strict=True):
            at = torch.arange(take[dim].start, take[dim].stop, unit)
            scales = scales.index_select(dim, at // block - take[dim].start // block)
        return scales


def unit_of(path: str, dims: int, sources: Iterable[Source]) -> tuple[int, int]:
    """Return the (rows, columns) of a weight that share a scale. dims: dimensions of the weight. Raises LayoutError."""
    rows = columns = BLOCK
    for source in sources:
        at = source.at[dims - 2] if len(source.at) > dims - 2 else slice(0)
        begin = (at.start or 0) if isinstance(at, slice) else at
        *_, of_rows, of_columns = source.used
        rows = gcd(rows, begin, of_rows.start, *(view.unit for view in source.views))
        columns = gcd(columns, of_columns.start)
    if columns < MIN_COLUMNS:
        raise LayoutError(
            f"{path}: a rank's features begin {columns} columns into a block, and products in FP8 take {MIN_COLUMNS} "
            "or more; choose a smaller split (attn_tp, moe_tp), or --float8 off"
        )
    return rows, columns


def _scales_of(weight: Float8Weight, source: Source) -> Tensor:
    """Return the scales of the part of a weight that comes from a source."""
    scales, rows = weight.scales.data, weight.unit[0]
    *before, last = (*source.at, *[slice(None)] * (scales.dim() - 1))[: scales.dim() - 1]
    if isinstance(last, slice) and last.stop is not None:
        last = slice((last.start or 0) // rows, -(-last.stop // rows))
    return scales[(*before, last)]
