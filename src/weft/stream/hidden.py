"""The typed tensor: a value, its placement, and the block that made it.

Blocks work on `Hidden`s by three rules: a sum needs equal placements, a linear map keeps a debt, all else needs a
complete value. An operation that breaks a rule raises PlacementError with both placements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from weft.kernels.float8 import Fp8Rows, Fp8Weight
from weft.planner.row_formats import Float8, Format
from weft.planner.spec import Mesh, Placement, PlacementError
from weft.stream.block_exchanges import BlockExchanges

InFormat = Callable[[Format], Any]
"""Gives rows in a format (`weft.stream.formats`)."""


@dataclass(frozen=True, slots=True)
class Hidden:
    """value: `[rows, width]`. origin: the qualified name of the block or parameter that made it, for messages.

    live: int32 `[1]` on the device, the number of rows that are tokens; rows after them are padding. None: all are. Set
        by a stream on its reads, for blocks that work on live rows alone, such as routers.
    exchanges: set by a stream: those of the reading block.
    in_format: set by a stream: gives the rows in a format, for products that take them so.
    beside: int32 `[rows, n]`, for rows that travelled in a format: what was computed from them before (`Stream.read`).
    on_plain: set by a trace: called where a reader takes the value itself.

    Rows that travelled in a format, as the placement then says, have a value of the right shape and dtype without
    elements.
    """

    value: Tensor
    placement: Placement
    mesh: Mesh
    origin: str
    live: Tensor | None = None
    exchanges: BlockExchanges | None = None
    in_format: InFormat | None = None
    beside: Tensor | None = None
    on_plain: Callable[[], None] | None = None

    def __add__(self, other: Hidden) -> Hidden:
        """The sum; two sums that owe the same owe it once. Raises PlacementError for unequal placements."""
        self.require_same(other)
        return Hidden(self._elements("a sum") + other._elements("a sum"), self.placement, self.mesh, self.origin)

    def __iadd__(self, other: Hidden) -> Hidden:
        """The sum, in this value's memory: the caller must have just made it, and have no other reference to it."""
        self.require_same(other)
        self.value.add_(other.value)
        return self

    def require_same(self, other: Hidden) -> None:
        """Raises PlacementError unless both may be added."""
        if self.placement != other.placement:
            raise PlacementError(
                f"cannot add {other.origin} {other.placement} to {self.origin} {self.placement}: "
                "both must hold the same rows and owe the same"
            )

    def scale(self, factor: Hidden) -> Hidden:
        """The product with a complete factor on the same rows, e.g. a gate, over this value as `__iadd__`; keeps the
        debt.
        """
        factor.require_complete(f"a factor of {self.origin}")
        if factor.placement.rows != self.placement.rows:
            raise PlacementError(
                f"cannot scale {self.origin} {self.placement} by {factor.origin} {factor.placement}: other rows"
            )
        self._elements("a product").mul_(factor._elements("a product"))
        return self

    def elementwise(self, function: Callable[[Tensor], Tensor], origin: str) -> Hidden:
        """A nonlinear function that does not mix features of two ranks: of single features, or of whole heads.

        Split features stay split. Raises PlacementError for a value that owes a sum.
        """
        if self.placement.owes:
            raise PlacementError(
                f"{origin} is not linear and needs a complete value, but {self.origin} is {self.placement}"
            )
        return Hidden(function(self._elements(origin)), self.placement, self.mesh, origin)

    def rowwise(self, function: Callable[[Tensor], Tensor], origin: str) -> Hidden:
        """A nonlinear function of whole rows, such as a norm or a softmax.

        Raises PlacementError for a value that owes a sum or has split features.
        """
        return Hidden(function(self.require_complete(origin)), self.placement, self.mesh, origin)

    def require_placement(self, placement: Placement, reader: str) -> None:
        """Raises PlacementError, naming the reader, for another placement; in any format of the rows."""
        if replace(self.placement, wire=None) != placement:
            raise PlacementError(f"{reader} needs {placement}, but {self.origin} is {self.placement}")

    def require_complete(self, reader: str) -> Tensor:
        """The value, if it owes nothing, has all features and no format; else PlacementError naming the reader."""
        self._require_features(reader)
        return self._elements(reader)

    def taken(self, weight: Tensor | Fp8Weight, reader: str) -> Tensor | Fp8Rows:
        """The complete rows as a product with the weight takes them: in FP8 where the weight is, if a stream gives them
        so. Raises PlacementError as `require_complete`.
        """
        self._require_features(reader)
        if self.in_format is None or not isinstance(weight, Fp8Weight):
            return self.require_complete(reader)
        rows: Fp8Rows = self.in_format(Float8(weight.unit[1]))
        return rows

    def _elements(self, reader: str) -> Tensor:
        if self.placement.wire:
            raise PlacementError(
                f"{reader} needs {replace(self.placement, wire=None)}, but {self.origin} is {self.placement}"
            )
        if self.on_plain is not None:
            self.on_plain()
        return self.value

    def _require_features(self, reader: str) -> None:
        if self.placement.owes or self.placement.split:
            complete = Placement(self.placement.rows)
            raise PlacementError(f"{reader} needs {complete}, but {self.origin} is {self.placement}")
