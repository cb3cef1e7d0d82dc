"""The typed tensor: a value, its placement, and the block that made it.

Blocks work on `Hidden`s by three rules: a sum needs equal placements, a linear map keeps a debt, all else needs a
complete value. An operation that breaks a rule raises PlacementError with both placements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from weft.kernels.float8 import Fp8Rows, Fp8Weight
from weft.planner.row_formats import Float8, Format
from weft.planner.spec import Mesh, Placement, PlacementError
from weft.stream import formats
from weft.stream.block_exchanges import BlockExchanges


@dataclass(slots=True)
class ReadInfo:
    """Facts of a read, which a stream gives a block with the rows.

    Attributes:
        exchanges: those inside the block.
        live: int32 `[1]` on the device, the number of rows that are tokens; rows after them are padding. None: all are.
        beside: int32 `[rows, n]`, for rows that travelled in a format: computed from them before (`Stream.read`).
        made: the rows in each format (`weft.stream.formats`) in which a reader took them.
        plain: a reader took them in the activations' dtype.
    """

    exchanges: BlockExchanges | None
    live: Tensor | None = None
    beside: Tensor | None = None
    made: dict[Format, Any] = field(default_factory=dict)
    plain: bool = False


@dataclass(frozen=True, slots=True)
class Hidden:
    """value: `[rows, width]`. origin: the qualified name of the block or parameter that made it, for messages.

    given: set by a stream on its reads. Rows that travelled in a format, as the placement then says, have a value of
    the right shape and dtype without elements.
    """

    value: Tensor
    placement: Placement
    mesh: Mesh
    origin: str
    given: ReadInfo | None = None

    @property
    def live(self) -> Tensor | None:
        return None if self.given is None else self.given.live

    @property
    def beside(self) -> Tensor | None:
        return None if self.given is None else self.given.beside

    @property
    def exchanges(self) -> BlockExchanges | None:
        return None if self.given is None else self.given.exchanges

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
        if self.given is None or not isinstance(weight, Fp8Weight):
            return self.require_complete(reader)
        rows: Fp8Rows = self.in_format(Float8(weight.unit[1]))
        return rows

    def in_format(self, format: Format) -> Any:
        """The rows of a read in a format, made once. Raises PlacementError for rows that travelled in another one."""
        assert self.given is not None
        made = self.given.made
        if format not in made:
            if self.placement.wire:
                raise PlacementError(f"{self.origin} is {self.placement}, but a block takes it in {format}")
            made[format] = formats.make(self.value, format)
        return made[format]

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
