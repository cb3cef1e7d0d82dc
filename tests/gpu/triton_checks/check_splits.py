"""The order of a step's splits against a sort."""

from __future__ import annotations

import pytest
import torch

from weft.kernels.triton.splits import Cut, order_splits

CUT = Cut(8, 4, 2)


def splits_of(length: int, window: int | None, cut: Cut) -> list[tuple[int, int]]:
    """First token and the one behind the last of each split of a row, by the definition."""
    seen = min(length, window or length)
    span = cut.tokens
    while span * cut.splits < seen:
        span *= 2
    borders = list(range(length - seen, length - span // 4 * cut.spare, span)) or [0]
    return [(a, b) for a, b in zip(borders, [*borders[1:], length], strict=True)]


@pytest.mark.parametrize("spare", [0, 1, 2])
@pytest.mark.parametrize("window", [None, 13])
@pytest.mark.parametrize(
    "lengths",
    [(17, 16, 18, 8, 12, 13, 3), (0, 0, 0), (0, 200, 9, 0, 9, 9, 1, 33), (32, 33, 64, 65, 36, 37), (1,), (128,) * 5],
    ids=str,
)
def check_items_are_the_splits_longest_first(
    lengths: tuple[int, ...], window: int | None, spare: int, device: torch.device
) -> None:
    cut = CUT._replace(spare=spare)
    wanted = [
        (row, start, end, split)
        for row, length in enumerate(lengths)
        for split, (start, end) in enumerate(splits_of(length, window, cut))
    ]
    wanted.sort(key=lambda item: item[1] - item[2])  # stable
    found = order_splits(torch.tensor(lengths, dtype=torch.int32, device=device), 200, window, cut)
    items = [(row, start, end, split % 256) for row, start, end, split in found.items[: found.total.item()].tolist()]
    assert [end - start for _, start, end, _ in items] == [end - start for _, start, end, _ in wanted]
    assert sorted(items) == sorted(wanted)
    parts = [sum(row == other for other, *_ in items) for row, *_ in items]
    assert [split // 256 for *_, split in found.items[: found.total.item()].tolist()] == parts
    assert not found.ready.any()
    assert len(wanted) <= len(found.items) == len(lengths) * found.room
