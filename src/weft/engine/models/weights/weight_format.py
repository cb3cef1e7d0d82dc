"""Format of a checkpoint's weights: how they are read, and how they are kept for products in the format."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import translate
from functools import cache
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from weft.engine.models.config_json.common_fields import FLOATS
from weft.engine.models.weights.source import Shape, Slices, Source
from weft.stream.formats import QuantisedWeight

DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int8: "I8"}
DTYPES |= {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e8m0fnu: "F8_E8M0", torch.uint8: "U8"}
DTYPES |= {torch.int64: "I64", torch.int32: "I32"}
"""Names of dtypes in safetensors."""
Empty = Callable[..., nn.Parameter]
"""(*shape, dtype=…) → unfilled parameter."""
FillDummy = Callable[[Tensor, Source, float], None]
"""Fills the part of a tensor that comes from a source with dummy values up to a magnitude."""


class StoredTensors(Protocol):
    """Tensors of a checkpoint, by name."""

    def has(self, name: str) -> bool: ...

    def part(self, name: str, shape: Shape, dtypes: Sequence[torch.dtype]) -> Any:
        """Return a tensor to be sliced. Raises ModelError for another shape or dtype."""


class KeptWeight(QuantisedWeight, Protocol):
    """Weight that a rank keeps in the checkpoint's format. parameters: its tensors, by the ends of their names."""

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]: ...

    def product(self, x: Any, out: Tensor) -> Tensor:
        """Fill and return out `[rows, outputs]` with x Wᵀ. x: `[rows, inputs]`, or rows in `format`."""
        ...

    @property
    def experts(self) -> Callable[..., Tensor]:
        """Op like `weft.engine.kernels.model_reference.experts`, with weights in the format."""


class WeightFormat:
    """Storage in floats, and the base of formats. A format with products overrides all attributes and methods.

    Attributes:
        name: for messages.
        capability: minimum compute capability of a GPU for its products.
        ends: ends of the names of tensors that belong to a weight.
        share_unit: unit of features for uneven shares: tensor cores multiply 16 at a time.
        whole_unit: unit of features that no share cuts.
        automatic: products are in the format on GPUs, if nothing else is asked for.
        quantises_rows: products in the format quantise their rows too.
        has_products: products may be in the format.
    """

    name: ClassVar[str] = "floats"
    capability: ClassVar[tuple[int, int]] = (0, 0)
    ends: ClassVar[tuple[str, ...]] = ()
    share_unit: ClassVar[int] = 16
    whole_unit: ClassVar[int] = 1
    automatic: ClassVar[bool] = True
    quantises_rows: ClassVar[bool] = True

    @property
    def has_products(self) -> bool:
        return False

    def keeps(self, name: str, tensors: Any = None) -> bool:
        """Check if products with a weight can be in the format, by its name. tensors: a checkpoint, which must have the
        weight in the format."""
        return False

    def read(self, tensors: StoredTensors, name: str, shape: Shape, take: Slices) -> Tensor:
        """Return a slice of a stored weight, dequantised to float32 if it is in the format. Raises ModelError."""
        part: Tensor = tensors.part(name, shape, FLOATS)[take]
        return part

    def declare(self, path: str, shape: Shape, sources: Iterable[Source], empty: Empty) -> KeptWeight:
        """Return an unfilled weight of a layer. Raises LayoutError, which names the path."""
        raise NotImplementedError

    def load(self, weight: Any, tensors: StoredTensors, source: Source) -> None:
        """Fill the part of a declared weight that comes from a source. Raises ModelError."""

    def make_up(self, weight: Any, source: Source, bound: float, fill: FillDummy) -> None:
        """Fill this part with dummy values of up to `bound`."""


def is_plain(name: str, plain: tuple[str, ...]) -> bool:
    """Check if a weight is of one of the `plain` modules: names, parts of names between dots, or patterns with `*`."""
    return _pattern(plain).match(f".{name.removesuffix('.weight')}.") is not None


@cache  # a checkpoint names thousands of experts
def _pattern(plain: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(translate(f"*.{name}.*") for name in plain) or r"(?!)")
