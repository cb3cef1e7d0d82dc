"""Sources of weights: a slice of a checkpoint's tensor, and the views between its stored form and its use."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import ClassVar, Protocol

from torch import Tensor

Shape = tuple[int, ...]
Slices = tuple[slice, ...]
"""Slices with a start, a stop and step 1, one per dimension."""


class View(Protocol):
    """One difference between a tensor in use and its stored form. unit: maximum number of rows, from a multiple of it
    on, that are consecutive in the stored tensor too and begin at a multiple of it there; 0: no limit."""

    @property
    def unit(self) -> int: ...

    def stored(self, shape: Shape, take: Slices) -> tuple[Shape, Slices]:
        """Return the stored tensor's shape, and its slice for the used tensor's slice `take`."""

    def restore(self, part: Tensor) -> Tensor:
        """Return the used tensor's slice from the stored one."""


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
    """Stored with others of its shape, at `index` of `count`: all experts of a layer in one tensor."""

    unit: ClassVar[int] = 0
    index: int
    count: int

    def stored(self, shape: Shape, take: Slices) -> tuple[Shape, Slices]:
        return (self.count, *shape), (slice(self.index, self.index + 1), *take)

    def restore(self, part: Tensor) -> Tensor:
        return part.squeeze(0)


@dataclass(frozen=True, slots=True)
class Fused:
    """Stored with others along a first dimension of `total` elements: every `step`-th of them from `start`. Gate and up
    are stored side by side, or alternate."""

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
    """Stored with others group by group: `size` rows from `start` on, of every `stride` rows. A slice is of whole
    groups, or lies in one."""

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
class OffsetFromOne:
    """Stored as its difference from one: the weights of norms that training keeps near zero."""

    unit: ClassVar[int] = 0

    def stored(self, shape: Shape, take: Slices) -> tuple[Shape, Slices]:
        return shape, take

    def restore(self, part: Tensor) -> Tensor:
        return part.float() + 1.0


@dataclass(frozen=True, slots=True)
class Source:
    """Source of a part of a weight: tensor `name` of the checkpoint, of `shape`, sliced by `take`, goes to `at`. take:
    may omit trailing dimensions, which are read whole. views: from the tensor in use, which shape and take describe, to
    its stored form."""

    name: str
    shape: Shape
    take: Slices
    at: tuple[slice | int, ...] = ()
    views: tuple[View, ...] = ()

    @property
    def used(self) -> Slices:
        """`take`, with a start and stop for every dimension."""
        takes = (*self.take, *[slice(None)] * (len(self.shape) - len(self.take)))
        return tuple(slice(*take.indices(size)) for take, size in zip(takes, self.shape, strict=True))

    def stored(self) -> tuple[Shape, Slices]:
        """Shape of the stored tensor, and the slice of it to read."""
        shape, take = self.shape, self.used
        for view in self.views:
            shape, take = view.stored(shape, take)
        return shape, take

    def restore(self, part: Tensor) -> Tensor:
        """Return the used tensor's slice from the stored one."""
        for view in reversed(self.views):
            part = view.restore(part)
        return part
