"""The order of a step's splits against a sort."""

from __future__ import annotations

import pytest
import torch

from weft.engine.kernels.triton.decode_attention import cut_of
from weft.engine.kernels.triton.splits import SplitRule, order_splits
from weft.engine.worker.memory import MAX_SPLIT_TOKENS

CUT = SplitRule(8, 4, 2)


def splits_of(length: int, window: int | None, cut: SplitRule) -> list[tuple[int, int]]:
    """First token and the one behind the last of each split of a row, by the definition."""
    seen = min(length, window or length)
    span = cut.tokens * (2 if cut.short is not None and seen > cut.short else 1)
    while span * cut.splits < seen:
        span *= 2
    borders = list(range(length - seen, length - span // 4 * cut.spare, span)) or [0]
    return [(a, b) for a, b in zip(borders, [*borders[1:], length], strict=True)]


@pytest.mark.parametrize("at_once", [1, 7, 1000])
@pytest.mark.parametrize(("spare", "short"), [(0, None), (2, None), (2, 16)])
@pytest.mark.parametrize("window", [None, 13])
@pytest.mark.parametrize(
    "lengths",
    [(17, 16, 18, 8, 12, 13, 3), (0, 0, 0), (0, 200, 9, 0, 9, 9, 1, 33), (32, 33, 64, 65, 36, 37), (1,), (128,) * 5],
    ids=str,
)
def test_items_are_the_splits_longest_first(
    lengths: tuple[int, ...], window: int | None, spare: int, short: int | None, at_once: int, device: torch.device
) -> None:
    cut = CUT._replace(spare=spare, short=short)
    splits = [splits_of(length, window, cut) for length in lengths]
    run = max(1, -(-sum(map(len, splits)) // at_once))
    wanted = []
    for row, each in enumerate(splits):
        for first in range(0, len(each), run):
            own = each[first : first + run]
            wanted.append((row, own[0][0], own[-1][1], first, len(own)))
    found = order_splits(torch.tensor(lengths, dtype=torch.int32, device=device), 200, window, at_once, cut)
    count, per_item = found.total.tolist()
    assert per_item == run
    *items, spans, of_row = zip(*(item[:7] for item in found.items[:count].tolist()), strict=True)
    assert all(count == len(splits[item_row]) for item_row, count in zip(items[0], of_row, strict=True))
    items = list(zip(*items, strict=True))
    assert sorted(items) == sorted(wanted)
    sizes = [end - start for _, start, end, *_ in items]
    assert sizes == sorted(sizes, reverse=True)
    for (row, *_), span in zip(items, spans, strict=True):
        assert span in (cut.tokens, 2 * cut.tokens) if len(splits[row]) < 2 else splits[row][0][1] - splits[row][0][0]
    assert len(wanted) <= len(found.items) == len(lengths) * found.max_splits


@pytest.mark.parametrize(("head_dim", "group"), [(64, 8), (128, 8), (256, 8), (512, 16), (512, 128)])
def test_no_longer_sequence_has_more_splits(head_dim: int, group: int) -> None:
    """Memory is measured with an answer of MAX_SPLIT_TOKENS tokens: it has as many splits as any."""
    cut = cut_of(head_dim, group)
    assert cut.tokens * cut.splits <= MAX_SPLIT_TOKENS
