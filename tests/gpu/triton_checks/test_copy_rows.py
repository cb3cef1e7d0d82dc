"""Rows in another order: those that the device counts, of all widths that caches and queries have."""

from __future__ import annotations

import pytest
import torch

from weft.engine.kernels.triton.copy_rows import copy_rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("rows, live, width", [(300, 300, 20), (300, 129, 256), (7, 0, 16), (5, 4, 1), (9, 5, 1536)])
def test_rows_in_another_order(rows: int, live: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    """The target is a part of wider rows; rows without a source, and those behind the live ones, stay as they are."""
    torch.manual_seed(rows)
    source = torch.randint(0, 200, (40, width), device=device).to(dtype)
    index = torch.randint(-1, 40, (rows,), dtype=torch.int32, device=device)
    whole = torch.full((rows, width + 3), 7, dtype=dtype, device=device)
    expected = whole.clone()
    for row in range(live):
        if index[row] >= 0:
            expected[row, :width] = source[index[row]]
    copy_rows(source, index, torch.tensor([live], dtype=torch.int32, device=device), whole[:, :width])
    assert torch.equal(whole, expected)
    with pytest.raises(ValueError, match="index"):
        copy_rows(source, index[:-1], index, whole[:, :width])
