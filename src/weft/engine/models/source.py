"""Sources of weights: a slice of a checkpoint's tensor, and how the tensor is stored if not as it is used."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
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
class PartOfGroups:
    """Stored with others group by group: of every `stride` rows, the `size` rows from `start` on. A slice is of whole
    groups, or lies in one.
    """

    start: int
    size: int
    stride: int

    @property
    def unit(self) -> int:
        return gcd(self.start, self.size, self.stride)

    def stored(self, shape: Shape, take: Slices) -> tuple[Shape, Slices]:
        rows, (group, offset) = take[0].stop - take[0].start, divmod(take[0].start, self.size)
        first = group * self.stride
        if rows < self.size:
            assert offset + rows <= self.size, "a slice begins in one group and ends in another"
            first, last = first + self.start + offset, first + self.start + offset + rows
        else:
            assert offset == rows % self.size == 0, "a group is cut"
            last = first + rows // self.size * self.stride
        return (shape[0] // self.size * self.stride, *shape[1:]), (slice(first, last), *take[1:])

    def restore(self, part: Tensor) -> Tensor:
        if len(part) < self.stride:
            return part
        return part.unflatten(0, (-1, self.stride))[:, self.start : self.start + self.size].flatten(0, 1)


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
