"""Experts in MXFP4 as GPT-OSS has them (arXiv 2508.10925): rows stay in 16 bits, and kernels dequantise the weights.

`name_blocks`, uint8, has two values a byte in rows of 16 bytes, and `name_scales` a power of two for each of them. A
rank's slice may not cut a block where weights are kept; where they are dequantised, it may.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from weft.engine.kernels import ops
from weft.engine.kernels.mxfp4 import BLOCK, GREATEST_SCALE, MAGNITUDES, Mxfp4, dequantise, quantise
from weft.engine.models.config_json.fields import ModelError
from weft.engine.models.weights.source import Shape, Slices, Source
from weft.engine.models.weights.weight_format import Empty, FillDummy, StoredTensors, WeightFormat, is_plain
from weft.planner.spec import LayoutError


class Mxfp4Weight(Mxfp4):
    """Weight of a layer, with its products."""

    __slots__ = ()
    format = None
    experts = staticmethod(ops.experts)

    @property
    def parameters(self) -> Mapping[str, Any]:
        return {"": self.values, "_scales": self.scales}

    def dequantise(self, dtype: torch.dtype, expert: int | None = None) -> Tensor:
        part = self if expert is None else Mxfp4(self.values[expert], self.scales[expert])
        return dequantise(part, dtype)

    def product(self, x: Any, out: Tensor) -> Tensor:
        raise NotImplementedError("only experts have products in MXFP4")


@dataclass(frozen=True)
class Mxfp4Format(WeightFormat):
    """Format with quant_method mxfp4. plain: modules that are not in MXFP4, as `Float8Format.plain`."""

    name: ClassVar[str] = "MXFP4"
    capability: ClassVar[tuple[int, int]] = (8, 0)
    ends: ClassVar[tuple[str, ...]] = ("_blocks", "_scales")
    share_unit: ClassVar[int] = BLOCK
    whole_unit: ClassVar[int] = BLOCK
    automatic: ClassVar[bool] = False  # slower than bfloat16 on a GPU so far
    quantises_rows: ClassVar[bool] = False
    plain: tuple[str, ...] = ()

    @property
    def has_products(self) -> bool:
        return True

    def keeps(self, name: str, tensors: StoredTensors | None = None) -> bool:
        listed = ".experts." not in name or is_plain(name, self.plain)
        return not listed and (tensors is None or tensors.has(f"{name}_blocks"))

    def read(self, tensors: StoredTensors, name: str, shape: Shape, take: Slices) -> Tensor:
        if tensors.has(name) or not tensors.has(f"{name}_blocks"):
            return super().read(tensors, name, shape, take)
        first, last = take[-1].start // BLOCK, -(-take[-1].stop // BLOCK)
        whole = dequantise(self._part(tensors, name, shape, (*take[:-1], slice(first, last))))
        return whole.narrow(-1, take[-1].start - first * BLOCK, take[-1].stop - take[-1].start)

    def declare(self, path: str, shape: Shape, sources: Iterable[Source], empty: Empty) -> Mxfp4Weight:
        for source in sources:
            features = source.used[-1]
            if features.start % BLOCK or features.stop % BLOCK:
                raise LayoutError(
                    f"{path}: a rank's features {features.start} to {features.stop} cut a block of {BLOCK} in MXFP4; "
                    "choose a smaller split (moe_tp), or --float8 off"
                )
        values, scales = (*shape[:-1], shape[-1] // 2), (*shape[:-1], shape[-1] // BLOCK)
        return Mxfp4Weight(empty(*values, dtype=torch.uint8), empty(*scales, dtype=torch.uint8))

    def load(self, weight: Mxfp4Weight, tensors: StoredTensors, source: Source) -> None:
        shape, take = source.stored()
        blocks = (*take[:-1], slice(take[-1].start // BLOCK, take[-1].stop // BLOCK))
        parts = self._part(tensors, source.name, shape, blocks)
        if (parts.scales > GREATEST_SCALE).any():
            raise ModelError(f"{source.name}_scales has values over {GREATEST_SCALE}; choose --float8 off")
        for to, part in zip(weight, parts, strict=True):
            to.data[source.at].copy_(source.restore(part))

    def make_up(self, weight: Mxfp4Weight, source: Source, bound: float, fill: FillDummy) -> None:
        exponent = round(math.log2(bound / MAGNITUDES[-1]))
        plain = torch.empty((*weight.values[source.at].shape[:-1], weight.shape[-1]), device=weight.values.device)
        fill(plain, source, math.ldexp(MAGNITUDES[-1], exponent))
        for at, part in enumerate(plain):  # an expert at a time, as its codes take memory
            for to, made in zip(weight, quantise(part, exponent), strict=True):
                to.data[source.at][at].copy_(made)

    @staticmethod
    def _part(tensors: StoredTensors, name: str, shape: Shape, take: Slices) -> Mxfp4:
        """Return a slice of a stored weight. take: its last slice counts blocks."""
        groups = -(-shape[-1] // BLOCK)
        values = tensors.part(f"{name}_blocks", (*shape[:-1], groups, BLOCK // 2), (torch.uint8,))
        scales = tensors.part(f"{name}_scales", (*shape[:-1], groups), (torch.uint8,))
        return Mxfp4(values[(*take, slice(0, BLOCK // 2))].flatten(-2), scales[take])
