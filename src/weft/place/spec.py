"""What a hidden state holds and what it still owes.

A `Mesh` lays N ranks out twice: for attention (`attn_dp × attn_tp`) and for the mixture of experts (`ep × moe_tp`).
Inside attn_tp, `dcp` neighbouring ranks may share their heads and split the cached tokens between them (decode context
parallelism).
A `Placement` is the type of a hidden state on that mesh. All is normalised, so that placements that mean the
same compare equal: a group of one rank is `None`, and two names of the same partition of the ranks are one name.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import cache, cached_property

GROUP_NAMES = ("world", "attn_tp", "attn_dp", "moe_tp", "ep", "dcp")
"""Names of rank groups; where two name the same partition, the one further left is the canonical one."""

Partition = tuple[tuple[int, ...], ...]


class LayoutError(ValueError):
    """A layout that cannot be: the text says which numbers clash and what to change."""


class PlacementError(TypeError):
    """Two placements that do not fit: the text names the block and both placements."""


class Rows(enum.IntEnum):
    """Which tokens a rank holds; a larger value holds more."""

    OWN = 0  # its share of its DP group's tokens
    GROUP = 1  # every token of its DP group
    WORLD = 2  # the tokens of every DP group, in group order


@dataclass(frozen=True, slots=True)
class Placement:
    """The type of a hidden state. Build it with `Mesh.placement`, which normalises.

    rows:  the tokens held.
    owes:  None for a complete value. Otherwise the value is a partial sum: the terms of the group's other ranks are
           still to be added.
    split: the group over which the feature dimension is split, or None; only inside a block, never on the stream.
    """

    rows: Rows
    owes: str | None = None
    split: str | None = None

    def __str__(self) -> str:
        text = self.rows.name
        if self.owes:
            text += f", owes sum over {self.owes}"
        if self.split:
            text += f", features split over {self.split}"
        return f"({text})"


@dataclass(frozen=True)
class Mesh:
    """A layout of N = attn_dp·attn_tp = ep·moe_tp ranks.

    Rank r is place `r % attn_tp` of DP group `r // attn_tp`, place `r % moe_tp` of expert group `r // moe_tp`, and
    place `r % dcp` of the `dcp` neighbours that hold a share of the same cached tokens each. Raises LayoutError where
    the two views differ in size, or dcp does not divide attn_tp.
    """

    attn_dp: int = 1
    attn_tp: int = 1
    ep: int = 1
    moe_tp: int = 1
    dcp: int = 1

    def __post_init__(self) -> None:
        for name in ("attn_dp", "attn_tp", "ep", "moe_tp", "dcp"):
            if getattr(self, name) < 1:
                raise LayoutError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if self.attn_dp * self.attn_tp != self.ep * self.moe_tp:
            raise LayoutError(
                f"attn_dp × attn_tp = {self.attn_dp}×{self.attn_tp} = {self.attn_dp * self.attn_tp} ranks, but "
                f"ep × moe_tp = {self.ep}×{self.moe_tp} = {self.ep * self.moe_tp}; both must be the number of ranks"
            )
        if self.attn_tp % self.dcp:
            divisors = [n for n in range(1, self.attn_tp + 1) if self.attn_tp % n == 0]
            below, above = (max(n for n in divisors if n < self.dcp), [n for n in divisors if n > self.dcp][:1])
            legal = " and ".join(map(str, [below, *above]))
            raise LayoutError(f"dcp={self.dcp} does not divide attn_tp={self.attn_tp}; nearest that do: {legal}")

    def __str__(self) -> str:
        dcp = f" dcp={self.dcp}" if self.dcp > 1 else ""
        return f"attn_dp={self.attn_dp} attn_tp={self.attn_tp} ep={self.ep} moe_tp={self.moe_tp}{dcp}"

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.attn_dp * self.attn_tp

    def group_of(self, rank: int) -> int:
        """The DP group of a rank."""
        return rank // self.attn_tp

    def leader(self, group: int) -> int:
        """The first rank of a DP group: the one whose sampled tokens count."""
        return group * self.attn_tp

    # --- groups -----------------------------------------------------------------------------------------------

    @cached_property
    def partitions(self) -> dict[str, Partition]:
        """Each group name's partition of the ranks, members in ascending order."""
        ranks = range(self.world)

        def blocks(size: int) -> Partition:
            return tuple(tuple(range(s, s + size)) for s in range(0, self.world, size))

        def strided(stride: int) -> Partition:
            return tuple(tuple(range(s, self.world, stride)) for s in range(stride))

        return {
            "world": (tuple(ranks),),
            "attn_tp": blocks(self.attn_tp),
            "attn_dp": strided(self.attn_tp),
            "moe_tp": blocks(self.moe_tp),
            "ep": strided(self.moe_tp),
            "dcp": blocks(self.dcp),
        }

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Every group that may communicate, once, the world first. With dcp = 1 there are none of dcp."""
        names = [name for name in GROUP_NAMES if name != "dcp" or self.dcp > 1]
        return tuple(dict.fromkeys(group for name in names for group in self.partitions[name]))

    @cached_property
    def _canonical(self) -> dict[str, str | None]:
        first: dict[Partition, str] = {}
        for name in GROUP_NAMES:
            first.setdefault(self.partitions[name], name)
        return {n: first[p] if len(p[0]) > 1 else None for n, p in self.partitions.items()}

    @cached_property
    def _peers(self) -> dict[str, dict[int, tuple[int, ...]]]:
        return {name: {rank: p for p in found for rank in p} for name, found in self.partitions.items()}

    def canonical(self, group: str | None) -> str | None:
        """The one name of a group's partition; None for groups of a single rank. KeyError for an unknown name."""
        return None if group is None else self._canonical[group]

    def peers(self, group: str | None, rank: int) -> tuple[int, ...]:
        """The ranks of `rank`'s group, ascending, itself included."""
        return (rank,) if group is None else self._peers[group][rank]

    def size(self, group: str | None) -> int:
        """Ranks in one group."""
        return 1 if group is None else len(self.partitions[group][0])

    def same_rows(self, rows: Rows, group: str | None) -> bool:
        """Whether every rank of each group holds the same tokens; only then may the group sum, or split features."""
        if rows is Rows.OWN and self.attn_tp == 1:
            rows = Rows.GROUP
        if group is None or rows is Rows.WORLD or (rows is Rows.GROUP and self.attn_dp == 1):
            return True
        if rows is Rows.OWN:
            return False
        return all(len({self.group_of(r) for r in p}) == 1 for p in self.partitions[group])

    def left_after(self, owes: str, group: str) -> tuple[bool, str | None]:
        """(legal, rest): what a debt over `owes` still owes once it was summed over `group`.

        Legal when `group` divides `owes` evenly: owes = group × rest.
        """
        if owes == group:
            return True, None
        if owes != "world":
            return False, None
        rest = {"attn_dp": "attn_tp", "attn_tp": "attn_dp", "ep": "moe_tp", "moe_tp": "ep"}[group]
        return True, self.canonical(rest)

    # --- placements -------------------------------------------------------------------------------------------

    def placement(self, rows: Rows, owes: str | None = None, split: str | None = None) -> Placement:
        """The normalised placement. Raises PlacementError where ranks that would be summed hold different tokens."""
        found = self._placements.get((rows, owes, split))
        if found is None:
            found = self._placements[rows, owes, split] = self._placement(rows, owes, split)
        return found

    @cached_property
    def _placements(self) -> dict[tuple[Rows, str | None, str | None], Placement]:
        """Those that were asked for, as every block of every step asks for the same."""
        return {}

    def _placement(self, rows: Rows, owes: str | None, split: str | None) -> Placement:
        owes, split = self.canonical(owes), self.canonical(split)
        if rows is Rows.WORLD and self.attn_dp == 1:
            rows = Rows.GROUP
        if rows is Rows.GROUP and self.attn_tp == 1:
            rows = Rows.OWN
        for group in (owes, split):
            if not self.same_rows(rows, group):
                raise PlacementError(
                    f"{Placement(rows, owes, split)}: the ranks of {group} hold different tokens in {rows.name} rows"
                )
        return Placement(rows, owes, split)

    # --- rows -------------------------------------------------------------------------------------------------

    def row_range(self, rows: Rows, rank: int, counts: tuple[int, ...]) -> tuple[int, int]:
        """[start, stop) of a rank's rows, counted in WORLD rows. `counts`: tokens of each DP group.

        OWN rows are the group's rows cut into attn_tp runs whose lengths differ by at most one, longer ones first.
        """
        start = 0 if rows is Rows.WORLD else sum(counts[: self.group_of(rank)])
        if rows is Rows.OWN:
            place, (least, more) = rank % self.attn_tp, divmod(counts[self.group_of(rank)], self.attn_tp)
            start += place * least + min(place, more)
        return start, start + self.row_count(rows, rank, counts)

    def row_count(self, rows: Rows, rank: int, counts: tuple[int, ...]) -> int:
        """Number of rows a rank holds."""
        if rows is Rows.WORLD:
            return sum(counts)
        n = counts[self.group_of(rank)]
        return n if rows is Rows.GROUP else (n + self.attn_tp - 1 - rank % self.attn_tp) // self.attn_tp


@cache
def layouts(max_world: int) -> tuple[Mesh, ...]:
    """Every layout of up to `max_world` ranks."""
    return tuple(
        Mesh(dp, world // dp, ep, world // ep)
        for world in range(1, max_world + 1)
        for dp in range(1, world + 1)
        if world % dp == 0
        for ep in range(1, world + 1)
        if world % ep == 0
    )
