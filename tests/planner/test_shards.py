"""Ranges of units that ranks hold."""

from __future__ import annotations

from itertools import chain, groupby, product

import pytest

from weft.planner.shards import first_holders, in_groups, owner, replicated, shard


@pytest.mark.parametrize("ranks", range(1, 10))
def test_shards_are_all_units_in_order(ranks: int) -> None:
    for units in range(40):
        shards = [shard(units, ranks, place) for place in range(ranks)]
        assert list(chain(*shards)) == list(range(units))
        lengths = list(map(len, shards))
        assert lengths[0] == max(lengths) <= min(lengths) + 1
        assert all(unit in shards[owner(unit, units, ranks)] for unit in range(units))


@pytest.mark.parametrize("ranks", range(1, 10))
def test_few_units_are_on_several_ranks_each(ranks: int) -> None:
    for units in range(1, 12):
        shards = [replicated(units, ranks, place) for place in range(ranks)]
        if units >= ranks:
            assert shards == [shard(units, ranks, place) for place in range(ranks)]
            continue
        assert [unit for unit, _ in groupby(only for [only] in shards)] == list(range(units))
        counts = [shards.count(range(unit, unit + 1)) for unit in range(units)]
        assert counts[0] == min(counts) >= max(counts) - 1
        # A norm over all ranks counts each unit once.
        firsts = [place for place in range(ranks) if not place or shards[place] != shards[place - 1]]
        assert firsts == first_holders(units, ranks)


@pytest.mark.parametrize("groups, each", [*product(range(1, 9), (1, 2, 3, 8))])
def test_query_heads_follow_their_key_value_heads(groups: int, each: int) -> None:
    for ranks in range(1, groups * each + 1):
        held = [(in_groups(groups * each, groups, ranks, p), replicated(groups, ranks, p)) for p in range(ranks)]
        assert list(chain(*(units for units, _ in held))) == list(range(groups * each))
        for units, own in held:
            assert units
            assert {unit // each for unit in units} <= set(own)
            # A rank's query heads divide evenly over its key-value heads, as attention's kernels require.
            assert len(units) == len(own) * each or len(own) == 1
        lengths = [len(units) for units, _ in held]
        assert lengths[0] == max(lengths)
        if groups % ranks == 0 or (ranks % groups == 0 and groups * each % ranks == 0):
            assert [units.start for units, _ in held] == [p * groups * each // ranks for p in range(ranks)]
