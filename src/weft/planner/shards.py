"""Shards: the range of units, such as heads, experts or tokens of a vocabulary, that each of several ranks holds.

Ranges are in the order of the ranks' places. Their lengths differ by at most one, and the first is one of the longest:
a plan for place 0 is a plan for the largest shard.
"""

from __future__ import annotations

from typing import Any


def shard(units: int, ranks: int, place: int) -> range:
    """Return the units of the rank at `place` of `ranks`; empty for some places if `units` are fewer than ranks."""
    return range(-(-place * units // ranks), -(-(place + 1) * units // ranks))


def owner(unit: Any, units: int, ranks: int) -> Any:
    """Return the place, of `ranks`, that holds a unit of `units` by `shard`. unit: a number, or a tensor of them."""
    return unit * ranks // units


def replicated(units: int, ranks: int, place: int) -> range:
    """Return the units of the rank at `place` of `ranks`. If `units` are fewer, neighbouring ranks hold the same one.

    Numbers of ranks per unit then differ by at most one, and the first unit has the fewest.
    """
    if units >= ranks:
        return shard(units, ranks, place)
    unit = -(-(place + 1) * units // ranks) - 1
    return range(unit, unit + 1)


def first_holders(units: int, ranks: int) -> list[int]:
    """Return the place of the first of `ranks` that holds each share of `units` by `replicated`, one per share."""
    return [place for place in range(ranks) if -place * units % ranks < units]


def in_groups(units: int, groups: int, ranks: int, place: int) -> range:
    """Return the units of the rank at `place` of `ranks`, where `groups` of neighbouring `units` are `replicated`.

    A rank has all units of its groups, or shares its only group with the other ranks that have it: query heads follow
    their key-value heads.
    """
    each, held = units // groups, replicated(groups, ranks, place)
    if groups >= ranks:
        return range(held.start * each, held.stop * each)
    first, behind = (group * ranks // groups for group in (held.start, held.stop))
    part = shard(each, behind - first, place - first)
    return range(held.start * each + part.start, held.start * each + part.stop)
