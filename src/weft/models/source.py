"""Sources of weights: a slice of a checkpoint's tensor, and how the tensor is stored if not as it is used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

Shape = tuple[int, ...]
Slices = tuple[slice, ...]
"""A slice with a start, a stop and step 1 for every dimension."""


class View(Protocol):
    """One difference between a tensor as it is used and as it is stored.

    unit: up to so many rows that begin at a multiple of it are consecutive in the stored tensor, too, and begin there
    at a multiple of it; 0: any number of rows.
    """

    @property
    def unit(self) -> int: ...

    def stored(self, shape: Shape, take: Slices) -> tuple[Shape, Slices]:
        """The stored tensor's shape, and its slice for the used tensor's slice `take`."""

    def restore(self, part: Tensor) -> Tensor:
        """The used tensor's slice from the stored one's."""


@dataclass(frozen=True, slots=True)
class Transposed:
    """Stored with its last two dimensions exchanged."""

    unit: ClassVar[int] = 1

    def stored(self, shape: Shape, take: Slices) -> tuple[Shape, Slices]:
        return (*shape[:-2], shape[-1], shape[-2]), (*take[:-2], take[-1], take[-2])

    def restore(self, part: Tensor) -> Tensor:
        return part.transpose(-1, -2)


@dataclass(frozen=True, slots=True)
class Stacked:
    """Stored with others of its shape, the index-th of `count`: all experts of a layer in one tensor."""

    unit: ClassVar[int] = 0
    index: int
    count: int

    def stored(self, shape: Shape, take: Slices) -> tuple[Shape, Slices]:
        return (self.count, *shape), (slice(self.index, self.index + 1), *take)

    def restore(self, part: Tensor) -> Tensor:
        return part.squeeze(0)


@dataclass(frozen=True, slots=True)
class Fused:
    """Stored with others along its first dimension, which has `total` elements: every `step`-th of them from `start`.

    Gate and up are stored side by side, or alternate.
    """

    start: int
    total: int
    step: int = 1

    @property
    def unit(self) -> int:
        return self.start if self.step == 1 else 1

    def stored(self, shape: Shape, take: Slices) -> tuple[Shape, Slices]:
        first, last = (self.start + i * self.step for i in (take[0].start, take[0].stop - 1))
        return (self.total, *shape[1:]), (slice(first, max(first, last + 1)), *take[1:])

    def restore(self, part: Tensor) -> Tensor:
        return part[:: self.step]


@dataclass(frozen=True, slots=True)
class PartOfHeads:
    """Stored with others head by head: `dim` rows of each of `count` tensors (this is the index-th), then the next
    head's. Only whole heads can be read.
    """

    index: int
    count: int
    dim: int

    @property
    def unit(self) -> int:
        return self.dim

    def stored(self, shape: Shape, take: Slices) -> tuple[Shape, Slices]:
        assert take[0].start % self.dim == take[0].stop % self.dim == 0, "a head is cut"
        rows = slice(take[0].start * self.count, take[0].stop * self.count)
        return (shape[0] * self.count, *shape[1:]), (rows, *take[1:])

    def restore(self, part: Tensor) -> Tensor:
        return part.unflatten(0, (-1, self.count, self.dim))[:, self.index].flatten(0, 1)


@dataclass(frozen=True, slots=True)
class LessOne:
    """Stored as its difference from one: the weights of norms that training keeps near zero."""

    unit: ClassVar[int] = 0

    def stored(self, shape: Shape, take: Slices) -> tuple[Shape, Slices]:
        return shape, take

    def restore(self, part: Tensor) -> Tensor:
        return part.float() + 1.0


@dataclass(frozen=True, slots=True)
class Source:
    """The source of a part of a weight: tensor `name` of the checkpoint, of `shape`, cut by `take`, goes to `at`.

    take: may omit dimensions at the end, which are taken whole. views: from the tensor as it is used, which shape and
    take describe, to the tensor as it is stored.
    """

    name: str
    shape: Shape
    take: Slices
    at: tuple[slice | int, ...] = ()
    views: tuple[View, ...] = ()

    @property
    def used(self) -> Slices:
        """`take`, with every dimension's start and stop."""
        takes = (*self.take, *[slice(None)] * (len(self.shape) - len(self.take)))
        return tuple(slice(*take.indices(size)) for take, size in zip(takes, self.shape, strict=True))

    def stored(self) -> tuple[Shape, Slices]:
        """The stored tensor's shape, and the slice of it to read."""
        shape, take = self.shape, self.used
        for view in self.views:
            shape, take = view.stored(shape, take)
        return shape, take

    def restore(self, part: Tensor) -> Tensor:
        """The used tensor's slice, from the stored slice."""
        for view in reversed(self.views):
            part = view.restore(part)
        return part
