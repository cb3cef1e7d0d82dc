"""Typed tensors: a value, its placement, and the block that made it.

Blocks work on `Hidden`s by three rules: a sum requires equal placements, a linear map keeps a debt, all else requires a
complete value. An operation that breaks a rule raises PlacementError with both placements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from weft.planner.row_formats import Format
from weft.planner.spec import Mesh, Placement, PlacementError
from weft.stream.block_exchanges import BlockExchanges
from weft.stream.formats import QuantisedWeight


@dataclass(slots=True)
class ReadInfo:
    """Facts of a read, which a stream gives a block with the rows."""

    exchanges: BlockExchanges | None  # exchanges inside the block
    live: Tensor | None = None  # int32 `[1]` on the device: rows that are tokens, before padding; None: all
    extra: Tensor | None = None  # int32 `[rows, n]`, sent with rows in a format (`Stream.read`)
    made: dict[Format, Any] = field(default_factory=dict)  # the rows in each format that a reader used
    plain: bool = False  # a reader used the rows in the activations' dtype


@dataclass(frozen=True, slots=True)
class Hidden:
    """Value `[rows, width]` with its placement.

    Rows that travelled in a format, as recorded in the placement, have a value of the right shape and dtype without
    elements.
    """

    value: Tensor
    placement: Placement
    mesh: Mesh
    origin: str  # qualified name of the block or parameter that made it, for messages
    given: ReadInfo | None = None  # set by a stream on its reads

    @property
    def live(self) -> Tensor | None:
        return None if self.given is None else self.given.live

    @property
    def extra(self) -> Tensor | None:
        return None if self.given is None else self.given.extra

    @property
    def exchanges(self) -> BlockExchanges | None:
        return None if self.given is None else self.given.exchanges

    def __add__(self, other: Hidden) -> Hidden:
        """Return the sum; two sums that owe the same owe it once. Raises PlacementError for unequal placements."""
        self.require_same(other)
        return Hidden(self._elements("a sum") + other._elements("a sum"), self.placement, self.mesh, self.origin)

    def __iadd__(self, other: Hidden) -> Hidden:
        """Add in this value's memory: the caller must have just made it, and have no other reference to it."""
        self.require_same(other)
        self.value.add_(other.value)
        return self

    def require_same(self, other: Hidden) -> None:
        """Raise PlacementError unless both may be added."""
        if self.placement != other.placement:
            raise PlacementError(
                f"cannot add {other.origin} {other.placement} to {self.origin} {self.placement}: "
                "both must hold the same rows and owe the same"
            )

    def scale(self, factor: Hidden) -> Hidden:
        """Multiply by a complete factor on the same rows, e.g. a gate, in place like `__iadd__`; keeps the debt."""
        factor.require_complete(f"a factor of {self.origin}")
        if factor.placement.rows != self.placement.rows:
            raise PlacementError(
                f"cannot scale {self.origin} {self.placement} by {factor.origin} {factor.placement}: other rows"
            )
        self._elements("a product").mul_(factor._elements("a product"))
        return self

    def elementwise(self, function: Callable[[Tensor], Tensor], origin: str) -> Hidden:
        """Apply a nonlinear function that does not mix features of two ranks: of single features, or of whole heads.

        Split features stay split. Raises PlacementError for a value that owes a sum.
        """
        if self.placement.owes:
            raise PlacementError(
                f"{origin} is not linear and needs a complete value, but {self.origin} is {self.placement}"
            )
        return Hidden(function(self._elements(origin)), self.placement, self.mesh, origin)

    def rowwise(self, function: Callable[[Tensor], Tensor], origin: str) -> Hidden:
        """Apply a nonlinear function of whole rows, such as a norm or a softmax.

        Raises PlacementError for a value that owes a sum or has split features.
        """
        return Hidden(function(self.require_complete(origin)), self.placement, self.mesh, origin)

    def require_placement(self, placement: Placement, reader: str) -> None:
        """Raise PlacementError, naming the reader, for another placement; rows may be in any format."""
        if replace(self.placement, wire=None) != placement:
            raise PlacementError(f"{reader} needs {placement}, but {self.origin} is {self.placement}")

    def require_complete(self, reader: str) -> Tensor:
        """Return the value, which must be complete and in no format. Raises PlacementError with the reader."""
        self._require_features(reader)
        return self._elements(reader)

    def taken(self, weight: Tensor | QuantisedWeight, reader: str) -> Any:
        """Return this value as the weight's product needs it: rows in a quantised weight's format, else the tensor.

        Raises PlacementError like `require_complete`.
        """
        self._require_features(reader)
        if self.given is None or isinstance(weight, Tensor) or weight.format is None:
            return self.require_complete(reader)
        return self.in_format(weight.format)

    def in_format(self, format: Format) -> Any:
        """Return the rows of a read in a format, made once. Raises PlacementError for rows that travelled in another
        format."""
        assert self.given is not None
        formats = self.given.made
        if format not in formats:
            if self.placement.wire:
                raise PlacementError(f"{self.origin} is {self.placement}, but a block requires it in {format}")
            formats[format] = format.make(self.value)
        return formats[format]

    def _elements(self, reader: str) -> Tensor:
        if self.placement.wire:
            raise PlacementError(
                f"{reader} needs {replace(self.placement, wire=None)}, but {self.origin} is {self.placement}"
            )
        if self.given is not None:
            self.given.plain = True
        return self.value

    def _require_features(self, reader: str) -> None:
        if self.placement.owes or self.placement.split:
            complete = Placement(self.placement.rows)
            raise PlacementError(f"{reader} needs {complete}, but {self.origin} is {self.placement}")
