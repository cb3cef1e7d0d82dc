"""Attention by torch against its definition: ragged steps, padding rows, caches full of NaN."""

from __future__ import annotations

import pytest
import torch

from attention.oracle import check, make_case, padded
from weft.attention.batch import Batch, SeqRows
from weft.attention.cache import KVCache
from weft.attention.sdpa import SDPA

STEPS = {
    "one row": [(1, 0)],
    "decode": [(1, 7), (1, 0), (1, 20), (1, 3)],
    "a whole prompt": [(9, 0)],
    "chunks": [(5, 4), (3, 9), (2, 1)],
    "mixed": [(1, 12), (6, 2), (1, 0), (4, 0), (1, 31)],
}


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("step", STEPS)
def test_rows_see_what_they_should(step: str, kv_heads: int) -> None:
    for seed in range(3):
        case = make_case(STEPS[step], seed=seed, kv_heads=kv_heads)
        check(SDPA(case.cache), case, STEPS[step])


@pytest.mark.parametrize("capacity", [4, 5, 8])
def test_padding_rows_write_nothing_and_see_nothing(capacity: int) -> None:
    case = padded(make_case(STEPS["decode"], seed=capacity), capacity)
    check(SDPA(case.cache), case, STEPS["decode"])


def test_no_rows_at_all() -> None:
    cache = KVCache(1, 1, 4, 2, 8, torch.float32)
    backend = SDPA(cache)
    backend.plan(Batch.build([], [], [], 4))
    out, lse = backend(0, torch.empty(0, 4, 8), torch.empty(0, 2, 8), torch.empty(0, 2, 8), scale=1.0, lse=True)
    assert out.shape == (0, 4, 8) and lse is not None and lse.shape == (0, 4)


def test_a_table_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="1 pages of 4 do not hold 5 tokens"):
        Batch.build([1], [4], [SeqRows(1, 4, [0], True)], 4)
    with pytest.raises(ValueError, match="2 tokens, 1 positions, 1 rows"):
        Batch.build([1, 2], [0], [SeqRows(1, 0, [0], True)], 4)
