"""The typed tensor: a value, its placement, and the block that made it.

Blocks work on `Hidden`s, and the rules here are all there is to get right: a sum needs equal placements, a linear map
keeps a debt, anything else needs a complete value. Whatever breaks one raises PlacementError with both placements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from weft.comm.settle import Settling
from weft.kernels.float8 import Rows
from weft.place.spec import Mesh, Placement, PlacementError

Quantising = Callable[[int], Rows]
"""Rows in FP8, by runs of so many columns (`weft.kernels.float8`)."""


@dataclass(frozen=True, slots=True)
class Hidden:
    """value: `[rows, width]`; origin: the qualified name of the block or parameter that made it, for messages.

    live: int32 `[1]` on the device, how many of the rows are tokens; those behind are padding. None: all are. Set on
    what a stream reads, for blocks whose work depends on it, such as routers.
    settler: set by a stream: what the block that reads settles between ranks, it settles by this.
    quantised: set by a stream: gives the rows in FP8, by runs of so many columns, for products that take them so.
    """

    value: Tensor
    placement: Placement
    mesh: Mesh
    origin: str
    live: Tensor | None = None
    settler: Settling | None = None
    quantised: Quantising | None = None

    def __add__(self, other: Hidden) -> Hidden:
        """The sum; two sums that owe the same owe it once. Raises PlacementError for unequal placements."""
        self._require_same(other)
        return Hidden(self.value + other.value, self.placement, self.mesh, self.origin)

    def __iadd__(self, other: Hidden) -> Hidden:
        """The sum, over this value, which the caller has just made and shown to nobody: it stays where it lies."""
        self._require_same(other)
        self.value.add_(other.value)
        return self

    def _require_same(self, other: Hidden) -> None:
        if self.placement != other.placement:
            raise PlacementError(
                f"cannot add {other.origin} {other.placement} to {self.origin} {self.placement}: "
                "both must hold the same rows and owe the same"
            )

    def scale(self, factor: Hidden) -> Hidden:
        """The product with a complete factor on the same rows, e.g. a gate; keeps the debt."""
        factor.require_complete(f"a factor of {self.origin}")
        if factor.placement.rows != self.placement.rows:
            raise PlacementError(
                f"cannot scale {self.origin} {self.placement} by {factor.origin} {factor.placement}: other rows"
            )
        return Hidden(self.value * factor.value, self.placement, self.mesh, self.origin)

    def elementwise(self, function: Callable[[Tensor], Tensor], origin: str) -> Hidden:
        """A nonlinear function that never mixes features of two ranks: of each feature, or of each whole head.

        Split features stay split. Raises PlacementError for a value that owes a sum.
        """
        if self.placement.owes:
            raise PlacementError(
                f"{origin} is not linear and needs a complete value, but {self.origin} is {self.placement}"
            )
        return Hidden(function(self.value), self.placement, self.mesh, origin)

    def rowwise(self, function: Callable[[Tensor], Tensor], origin: str) -> Hidden:
        """A nonlinear function of whole rows, such as a norm or a softmax.

        Raises PlacementError for a value that owes a sum or whose features are split.
        """
        return Hidden(function(self.require_complete(origin)), self.placement, self.mesh, origin)

    def require_placement(self, placement: Placement, reader: str) -> None:
        """Raises PlacementError, naming the reader, unless it has this placement."""
        if self.placement != placement:
            raise PlacementError(f"{reader} needs {placement}, but {self.origin} is {self.placement}")

    def require_complete(self, reader: str) -> Tensor:
        """The value, if it owes nothing and holds all features; else PlacementError naming the reader."""
        if self.placement.owes or self.placement.split:
            complete = Placement(self.placement.rows)
            raise PlacementError(f"{reader} needs {complete}, but {self.origin} is {self.placement}")
        return self.value
