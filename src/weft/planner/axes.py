"""A mesh's axes: the digits of a rank number. Groups of ranks are sets of axes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

GROUP_NAMES = ("world", "attn_tp", "attn_dp", "moe_tp", "ep", "dcp", "host", "rail")
"""Names of rank groups; if two name the same set of ranks, the first is the canonical one.

host: ranks of one host. rail: ranks with the same place on each host.
"""
AxisSet = int
"""Set of a mesh's axes, as bits; neighbouring ranks differ in the axis of the lowest bit."""


@dataclass(frozen=True)
class Axes:
    """The axes of a mesh of these sizes (`weft.planner.spec.Mesh`).

    Rank numbers are cut at 1, dcp, attn_tp, moe_tp, the hosts' borders and the world, as far as each cut divides the
    next. A group that begins or ends at another cut is no set of axes.
    """

    world: int
    attn_tp: int
    moe_tp: int
    dcp: int
    hosts: int

    @cached_property
    def host_block(self) -> int:
        """Number of neighbouring ranks on a host before the next host's begin.

        Blocks of max(attn_tp, moe_tp) ranks go to the hosts round-robin, so rows gathered across hosts and then inside
        each are already in rank order. If such a block does not fit a host, a host's ranks are neighbours.
        """
        run, on_host = max(self.attn_tp, self.moe_tp), self.world // self.hosts
        fits = on_host % run == 0 and run % self.attn_tp == 0 and run % self.moe_tp == 0
        return run if fits else on_host

    @cached_property
    def _host_cuts(self) -> tuple[int, ...]:
        return (self.host_block, self.host_block * self.hosts) if self.hosts > 1 else ()

    @cached_property
    def _cuts(self) -> tuple[int, ...]:
        """The cuts of the rank numbers, ascending, each dividing the next."""
        cuts = {1, self.world}
        for cut in (self.attn_tp, self.dcp, *self._host_cuts, self.moe_tp):
            if all(cut % other == 0 or other % cut == 0 for other in cuts):
                cuts.add(cut)
        return tuple(sorted(cuts))

    @cached_property
    def strides(self) -> tuple[tuple[int, int], ...]:
        """(stride, extent) of each axis."""
        return tuple((low, high // low) for low, high in itertools.pairwise(self._cuts))

    def between(self, low: int, high: int) -> AxisSet | None:
        """Return the axes from one cut to another; None if the ranks are not cut there."""
        if low not in self._cuts or high not in self._cuts:
            return None
        return sum(1 << i for i, (stride, _) in enumerate(self.strides) if low <= stride < high)

    @cached_property
    def of_name(self) -> dict[str, AxisSet]:
        """The axes of each name of GROUP_NAMES that is a set of axes."""
        rail = self.between(*self._host_cuts) if self._host_cuts else 0
        names = {
            "world": self.between(1, self.world),
            "attn_tp": self.between(1, self.attn_tp),
            "attn_dp": self.between(self.attn_tp, self.world),
            "moe_tp": self.between(1, self.moe_tp),
            "ep": self.between(self.moe_tp, self.world),
            "dcp": self.between(1, self.dcp),
            "host": None if rail is None else (1 << len(self.strides)) - 1 & ~rail,
            "rail": rail,
        }
        return {name: axes for name, axes in names.items() if axes is not None}

    @cached_property
    def combined(self) -> dict[str, AxisSet]:
        """Sets of axes without a name that are intersections of two with a name, or unions of these."""
        by_axes: dict[AxisSet, str] = {}
        for a, b in itertools.combinations(self.of_name, 2):
            by_axes.setdefault(self.of_name[a] & self.of_name[b], f"{a}∩{b}")
        for i, (stride, extent) in enumerate(self.strides):
            by_axes.setdefault(1 << i, f"{extent} ranks {stride} apart")
        named, names = set(self.of_name.values()), {}
        for axes in range(1, 1 << len(self.strides)):
            if axes not in named:
                singles = [by_axes[1 << i] for i in range(len(self.strides)) if axes >> i & 1]
                names[by_axes.get(axes) or " × ".join(singles)] = axes
        return names

    @cached_property
    def names(self) -> dict[AxisSet, str]:
        """The canonical name of each set of axes."""
        names: dict[AxisSet, str] = {}
        for name in GROUP_NAMES:
            if name in self.of_name:
                names.setdefault(self.of_name[name], name)
        return names | {axes: name for name, axes in self.combined.items()}

    @cached_property
    def of_streams(self) -> tuple[AxisSet, ...]:
        """Unions of the axes over which hidden states gather rows and owe sums; the empty set first.

        The cut between the ranks of a dcp group is omitted: they hold outputs of the same heads over parts of the
        keys, which is no sum (`weft.planner.recipes`).
        """
        cuts = sorted({1, self.attn_tp, self.moe_tp, *self._host_cuts, self.world} & set(self._cuts))
        single = [axes for low, high in itertools.pairwise(cuts) if (axes := self.between(low, high))]
        return tuple(sum(some) for n in range(len(single) + 1) for some in itertools.combinations(single, n))

    def extent(self, axes: AxisSet) -> int:
        """Return the number of ranks in a group of these axes."""
        size = 1
        for i, (_, extent) in enumerate(self.strides):
            size *= extent if axes >> i & 1 else 1
        return size

    def peers(self, axes: AxisSet, rank: int) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` only in these axes, ascending, including `rank`."""
        ranks = [rank]
        for i, (stride, extent) in enumerate(self.strides):
            if axes >> i & 1:
                first = rank // stride % extent * stride
                ranks = [r - first + at * stride for r in ranks for at in range(extent)]
        return tuple(sorted(ranks))
