"""Placements: what a hidden state holds and what it owes.

A `Mesh` lays N ranks out twice: for attention (`attn_dp × attn_tp`) and for the mixture of experts (`ep × moe_tp`).
Inside attn_tp, `dcp` neighbouring ranks may share their heads and split the cached tokens between them (decode context
parallelism). The ranks may be spread over several hosts.

The mesh cuts the rank numbers at each of these boundaries into the digits of a mixed radix, its **axes**. A group is a
set of axes: the ranks that differ in these digits alone. So the rows that a rank holds and the sum that a value owes
are both sets of axes, and a sum is legal where owed ⊆ gathered: ranks that are summed hold the same rows. Models and
people use the names of such sets (`attn_tp`, `ep`, `world` …). If two cuts do not divide each other (attn_tp 2 and
moe_tp 3), the one that fits no axis stays a pair of named groups that make up the world.

A `Placement` is the type of a hidden state on that mesh. It is normalised, so that placements with the same meaning
compare equal: a group of one rank is `None`, and two names of the same set are one name.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from weft.planner.axes import GROUP_NAMES, Axes, AxisSet
from weft.planner.row_formats import Wire

Partition = tuple[tuple[int, ...], ...]


class LayoutError(ValueError):
    """Impossible layout: the message names the conflicting numbers and what to change."""


class PlacementError(TypeError):
    """Mismatch of two placements: the message names the block and both placements."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Tokens that a rank holds: the OWN rows of all ranks of its group `over`, in rank order.

    over: name of a group; None for the rank's own rows alone. A mesh normalises it (`Mesh.rows_over`).
    """

    over: str | None

    OWN: ClassVar[Rows]
    """Rank's share of its DP group's tokens."""
    GROUP: ClassVar[Rows]
    """All tokens of its DP group."""
    WORLD: ClassVar[Rows]
    """The tokens of all DP groups, in group order."""

    @property
    def name(self) -> str:
        """OWN, GROUP, WORLD, or the name of the group that holds them."""
        return {None: "OWN", "attn_tp": "GROUP", "world": "WORLD"}.get(self.over, f"{self.over} rows")

    def __str__(self) -> str:
        return self.name


Rows.OWN, Rows.GROUP, Rows.WORLD = Rows(None), Rows("attn_tp"), Rows("world")
NAMED_ROWS = (Rows.OWN, Rows.GROUP, Rows.WORLD)
"""The rows that models read, each holding more than the one before."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Type of a hidden state. Build it with `Mesh.placement`, which normalises.

    Attributes:
        rows: tokens held.
        owes: group of a pending sum: the terms of its other ranks must still be added. None for a complete value.
        split: group over which the feature dimension is split, or None; only inside a block, never on the stream.
        wire: format of complete rows, or None for the activations' dtype; only between a norm and its readers.
    """

    rows: Rows
    owes: str | None = None
    split: str | None = None
    wire: Wire | None = None

    def __str__(self) -> str:
        text = self.rows.name
        if self.wire:
            text += f" in {self.wire}"
        if self.owes:
            text += f", owes sum over {self.owes}"
        if self.split:
            text += f", features split over {self.split}"
        return f"({text})"


@dataclass(frozen=True)
class Mesh:
    """Layout of N = attn_dp·attn_tp = ep·moe_tp ranks, the same number on each of `hosts` hosts (`host_of`).

    Rank r is place `r % attn_tp` of DP group `r // attn_tp`, place `r % moe_tp` of expert group `r // moe_tp`, and
    place `r % dcp` of the `dcp` neighbours that shard the same cached tokens. Raises LayoutError if the two views
    differ in size, dcp does not divide attn_tp, or hosts does not divide the ranks.
    """

    attn_dp: int = 1
    attn_tp: int = 1
    ep: int = 1
    moe_tp: int = 1
    dcp: int = 1
    hosts: int = 1

    def __post_init__(self) -> None:
        for name in ("attn_dp", "attn_tp", "ep", "moe_tp", "dcp", "hosts"):
            if getattr(self, name) < 1:
                raise LayoutError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if self.attn_dp * self.attn_tp != self.ep * self.moe_tp:
            raise LayoutError(
                f"attn_dp × attn_tp = {self.attn_dp}×{self.attn_tp} = {self.attn_dp * self.attn_tp} ranks, but "
                f"ep × moe_tp = {self.ep}×{self.moe_tp} = {self.ep * self.moe_tp}; both must be the number of ranks"
                f", so ep is one of {', '.join(map(str, divisors(self.world)))}"
            )
        _check_divides("dcp", self.dcp, f"attn_tp={self.attn_tp}", self.attn_tp)
        _check_divides("hosts", self.hosts, f"the {self.world} ranks", self.world)

    def __str__(self) -> str:
        dcp = f" dcp={self.dcp}" if self.dcp > 1 else ""
        hosts = f" hosts={self.hosts}" if self.hosts > 1 else ""
        return f"attn_dp={self.attn_dp} attn_tp={self.attn_tp} ep={self.ep} moe_tp={self.moe_tp}{dcp}{hosts}"

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.attn_dp * self.attn_tp

    def group_of(self, rank: int) -> int:
        """Return the DP group of a rank."""
        return rank // self.attn_tp

    def leader(self, group: int) -> int:
        """Return the first rank of a DP group: the engine uses its sampled tokens."""
        return group * self.attn_tp

    # --- axes -------------------------------------------------------------------------------------------------

    @cached_property
    def _axes(self) -> Axes:
        return Axes(self.world, self.attn_tp, self.moe_tp, self.dcp, self.hosts)

    def host_of(self, rank: int) -> int:
        """Return the host of a rank (`Axes.host_block`)."""
        return rank // self._axes.host_block % self.hosts

    def axes(self, group: str | None) -> AxisSet | None:
        """Return the axes of a group, 0 for None; None if it is no set of axes. KeyError for an unknown name."""
        if group is None:
            return 0
        return self._axes.of_name.get(group) if group in GROUP_NAMES else self._axes.combined[group]

    def named(self, axes: AxisSet) -> str | None:
        """Return the canonical name of a set of axes; None for the empty set."""
        return self._axes.names[axes] if axes else None

    def extent(self, axes: AxisSet) -> int:
        """Return the number of ranks in a group of these axes."""
        return self._axes.extent(axes)

    @cached_property
    def communicating(self) -> tuple[str, ...]:
        """Canonical names of the groups that may exchange hidden states, the world first.

        On one host only named groups: each costs transport memory. Over several hosts all sets of axes.
        """
        result = [canonical for name in GROUP_NAMES[:5] if (canonical := self.canonical(name))]
        if self.hosts > 1:
            result += [name for axes in self._axes.of_streams if (name := self.named(axes))]
        return tuple(dict.fromkeys(result))

    @cached_property
    def row_kinds(self) -> tuple[Rows, ...]:
        """Rows that hidden states may hold, each once, fewest first; over several hosts one entry per set of axes."""
        result = [self.rows(rows) for rows in NAMED_ROWS]
        if self.hosts > 1:
            result += [self.rows_over(axes) for axes in self._axes.of_streams]
        return tuple(sorted(dict.fromkeys(result), key=lambda rows: self.extent(self.gathered(rows))))

    def gathered(self, rows: Rows) -> AxisSet:
        """Return the axes over which rows are gathered."""
        axes = self.axes(rows.over)
        assert axes is not None, "rows are gathered over axes: attn_tp, the world, or parts of them"
        return axes

    def rows_over(self, axes: AxisSet) -> Rows:
        """Return the rows that are gathered over these axes."""
        return next((rows for rows in NAMED_ROWS if self.axes(rows.over) == axes), Rows(self.named(axes)))

    def rows(self, rows: Rows) -> Rows:
        """Return the canonical form of `rows`."""
        result = self._rows.get(rows)
        if result is None:
            result = self._rows[rows] = self.rows_over(self.gathered(rows))
        return result

    @cached_property
    def _rows(self) -> dict[Rows, Rows]:
        return {}

    # --- groups -----------------------------------------------------------------------------------------------

    @cached_property
    def _named(self) -> dict[str, tuple[int, int]]:
        """(stride, extent) of each name for a range or a stride of rank numbers."""
        return {
            "world": (1, self.world),
            "attn_tp": (1, self.attn_tp),
            "attn_dp": (self.attn_tp, self.attn_dp),
            "moe_tp": (1, self.moe_tp),
            "ep": (self.moe_tp, self.ep),
            "dcp": (1, self.dcp),
            "rail": (self._axes.host_block, self.hosts),
            "host": (0, self.world // self.hosts),
        }

    @cached_property
    def partitions(self) -> dict[str, Partition]:
        """Each group name's partition of the ranks, members in ascending order."""
        return {
            name: tuple(dict.fromkeys(self.peers(name, rank) for rank in range(self.world))) for name in GROUP_NAMES
        }

    @cached_property
    def _group_names(self) -> list[str]:
        return [*GROUP_NAMES[:5], *(["dcp"] if self.dcp > 1 else []), *self.communicating]

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """All groups that may communicate, each once, the world first. With dcp = 1 there are no dcp groups."""
        return tuple(dict.fromkeys(self.peers(name, rank) for name in self._group_names for rank in range(self.world)))

    def groups_on_host(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """Return the groups of a rank that never cross hosts: the same number on all ranks, in the same order."""
        names = (name for name in self._group_names if self.hosts_of(name) == 1)
        return tuple(dict.fromkeys(self.peers(name, rank) for name in names))

    @cached_property
    def _canonical(self) -> dict[str, str | None]:
        result: dict[str, str | None] = {}
        for name in GROUP_NAMES:
            axes = self.axes(name)
            result[name] = None if self.size(name) == 1 else name if axes is None else self.named(axes)
        return result | {name: name for name in self._axes.combined}

    def canonical(self, group: str | None) -> str | None:
        """Return the one name of a group's set of ranks; None for a single rank. KeyError for an unknown name."""
        return None if group is None else self._canonical[group]

    @cached_property
    def _peers(self) -> dict[tuple[str, int], tuple[int, ...]]:
        return {}

    def peers(self, group: str | None, rank: int) -> tuple[int, ...]:
        """Return the ranks of `rank`'s group, ascending, including `rank`."""
        if group is None:
            return (rank,)
        result = self._peers.get((group, rank))
        if result is None:
            result = self._find_peers(group, rank)
            for peer in result:
                self._peers[group, peer] = result
        return result

    def _find_peers(self, group: str, rank: int) -> tuple[int, ...]:
        axes = self.axes(group)
        if axes is not None:
            return self._axes.peers(axes, rank)
        if group == "host":
            return tuple(r for r in range(self.world) if self.host_of(r) == self.host_of(rank))
        stride, extent = self._named[group]
        first = rank - rank // stride % extent * stride
        return tuple(range(first, first + stride * extent, stride))

    def size(self, group: str | None) -> int:
        """Return the number of ranks in one group."""
        if group is None:
            return 1
        axes = self.axes(group)
        return self._named[group][1] if axes is None else self.extent(axes)

    def hosts_of(self, group: str | None) -> int:
        """Return the number of hosts that a group spans: the maximum over the groups of this name."""
        if self.hosts == 1:
            return 1
        axes, rail = self.axes(group), self.axes("rail")
        if axes is not None and rail is not None:
            return self.extent(axes & rail)
        return max(len({self.host_of(r) for r in self.peers(group, rank)}) for rank in range(self.world))

    def same_rows(self, rows: Rows, group: str | None) -> bool:
        """Return True if all ranks of each group hold the same tokens: only then may it sum or split features."""
        known = self._same_rows.get((rows, group))
        if known is None:
            known = self._same_rows[rows, group] = self._holds_same(self.gathered(rows), group)
        return known

    @cached_property
    def _same_rows(self) -> dict[tuple[Rows, str | None], bool]:
        return {}

    def _holds_same(self, gathered: AxisSet, group: str | None) -> bool:
        axes = self.axes(group)
        if axes is not None:
            return not axes & ~gathered
        name = self.named(gathered)
        return all(len({self.peers(name, r) for r in self.peers(group, rank)}) == 1 for rank in range(self.world))

    def left_after(self, owes: str, group: str) -> tuple[bool, str | None]:
        """Return (legal, rest): `rest` is the debt that remains of `owes` after a sum over `group`.

        Legal if `group` divides `owes` evenly: owes = group × rest.
        """
        if owes == group:
            return True, None
        of, over = self.axes(owes), self.axes(group)
        if of is not None and over is not None:
            return (False, None) if over & ~of else (True, self.named(of & ~over))
        if owes != "world":
            return False, None
        rest = {"attn_dp": "attn_tp", "attn_tp": "attn_dp", "ep": "moe_tp", "moe_tp": "ep"}.get(group)
        return rest is not None, self.canonical(rest)

    # --- placements -------------------------------------------------------------------------------------------

    def placement(self, rows: Rows, owes: str | None = None, split: str | None = None) -> Placement:
        """Return the normalised placement.

        Raises PlacementError for an unknown group, and if ranks to sum hold different tokens.
        """
        result = self._placements.get((rows, owes, split))
        if result is None:
            result = self._placements[rows, owes, split] = self._placement(rows, owes, split)
        return result

    @cached_property
    def _placements(self) -> dict[tuple[Rows, str | None, str | None], Placement]:
        """A cache: all blocks of all steps ask for the same placements."""
        return {}

    def _placement(self, rows: Rows, owes: str | None, split: str | None) -> Placement:
        for group in (owes, split):
            if group not in (None, *self._canonical):
                raise PlacementError(f"there is no group {group!r} of ranks; there are {', '.join(self._canonical)}")
        rows, owes, split = self.rows(rows), self.canonical(owes), self.canonical(split)
        for group in (owes, split):
            if not self.same_rows(rows, group):
                raise PlacementError(
                    f"{Placement(rows, owes, split)}: the ranks of {group} hold different tokens in {rows.name} rows"
                )
        return Placement(rows, owes, split)

    # --- rows -------------------------------------------------------------------------------------------------

    def row_range(self, rows: Rows, rank: int, counts: tuple[int, ...]) -> tuple[int, int]:
        """Return [start, stop) of a rank's OWN, GROUP or WORLD rows, counted in WORLD rows; `counts`: tokens per DP
        group.

        OWN rows are the group's rows cut into attn_tp ranges; their lengths differ by at most one, longer ones first.
        """
        rows = self.rows(rows)
        start = 0 if rows == self.rows(Rows.WORLD) else sum(counts[: self.group_of(rank)])
        if rows == Rows.OWN and self.attn_tp > 1:
            place, (fewest, more) = rank % self.attn_tp, divmod(counts[self.group_of(rank)], self.attn_tp)
            start += place * fewest + min(place, more)
        return start, start + self.row_count(rows, rank, counts)

    def row_count(self, rows: Rows, rank: int, counts: tuple[int, ...]) -> int:
        """Return the number of rows that a rank holds."""
        if rows == Rows.WORLD:
            return sum(counts)
        if rows == Rows.OWN:
            return (counts[self.group_of(rank)] + self.attn_tp - 1 - rank % self.attn_tp) // self.attn_tp
        if rows == Rows.GROUP:
            return counts[self.group_of(rank)]
        return sum(self.row_count(Rows.OWN, peer, counts) for peer in self.peers(rows.over, rank))


def divisors(whole: int) -> list[int]:
    """Return the numbers that divide `whole`, ascending."""
    return [n for n in range(1, whole + 1) if whole % n == 0]


def _check_divides(name: str, part: int, of: str, whole: int) -> None:
    if whole % part:
        below, above = ([n for n in divisors(whole) if (n > part) == more] for more in (False, True))
        legal = " and ".join(map(str, [*below[-1:], *above[:1]]))
        raise LayoutError(f"{name}={part} does not divide {of}; nearest that do: {legal}")
