"""The ends of a decode step that runs without the host: its inputs from the requests' state, and the state's update.

The state lies on the device by request row: `last_token`, `length` (tokens in the cache) and `pages`. A step takes the
rows that `rows` names, which hold any order; those from `live` on are there only because the captured graph is larger.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class StepInputs(NamedTuple):
    """What a step of `capacity` rows reads.

    tokens int64, positions int64, lengths int32 (the new token included), slots int64, table int32 (the row of `pages`)
    and live bool, each `[capacity]`. A row that is not live has token 0, position 0, length 0, slot −1, table 0. A row
    without a last token (−1) has token 0, so that no memory is read that is not there; `step_out` tells.
    """

    tokens: Tensor
    positions: Tensor
    lengths: Tensor
    slots: Tensor
    table: Tensor
    live: Tensor


@triton.jit(do_not_specialize=["capacity"])
def _step_in(
    rows, live, last_token, length, pages, tokens, positions, lengths, slots, table, mask, capacity, pages_row,
    PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < capacity
    real = inside & (i < tl.load(live))
    row = tl.load(rows + i, mask=real, other=0)
    token = tl.load(last_token + row, mask=real, other=0)
    position = tl.load(length + row, mask=real, other=0)
    tl.device_assert((position // PAGE < pages_row) | ~real, "a row has no page for its token")
    page = tl.load(pages + row.to(tl.int64) * pages_row + position // PAGE, mask=real, other=0)
    tl.device_assert((page >= 0) | ~real, "a row's token goes to a page that it was not given")
    tl.store(tokens + i, tl.maximum(token, 0).to(tl.int64), mask=inside)
    tl.store(positions + i, position.to(tl.int64), mask=inside)
    tl.store(lengths + i, tl.where(real, position + 1, 0), mask=inside)
    tl.store(slots + i, tl.where(real, page.to(tl.int64) * PAGE + position % PAGE, -1), mask=inside)
    tl.store(table + i, row, mask=inside)
    tl.store(mask + i, real, mask=inside)


@triton.jit(do_not_specialize=["capacity"])
def _step_out(rows, live, token, step, last_token, length, ring, capacity, ring_rows, ring_row, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < capacity
    real = inside & (i < tl.load(live))
    row = tl.load(rows + i, mask=real, other=0)
    drawn = tl.load(token + i, mask=real, other=-1)
    drawn = tl.where(tl.load(last_token + row, mask=real, other=0) < 0, -1, drawn)
    tl.store(last_token + row, drawn, mask=real)
    tl.store(length + row, tl.load(length + row, mask=real, other=0) + 1, mask=real)
    tl.store(ring + (tl.load(step) % ring_rows) * ring_row + i, drawn, mask=inside)


def step_in(
    rows: Tensor, live: Tensor, last_token: Tensor, length: Tensor, pages: Tensor, page_size: int
) -> StepInputs:
    """A decode step's inputs: each row's last token, to be stored and attended from at the row's length.

    rows int32 `[capacity]`: the request row of each of the step's rows, of which the first `live` (int32 `[1]`) count.
    last_token, length int32 `[R]`; pages int32 `[R, max_pages]`, where the page of the new token is present.
    """
    capacity = rows.shape[0]
    if pages.shape[0] != length.shape[0] or last_token.shape != length.shape or not pages.is_contiguous():
        raise ValueError(f"length is {list(length.shape)}, pages {list(pages.shape)}: they do not fit together")
    like = live.new_empty
    out = StepInputs(
        tokens=like(capacity, dtype=torch.int64),
        positions=like(capacity, dtype=torch.int64),
        lengths=like(capacity),
        slots=like(capacity, dtype=torch.int64),
        table=like(capacity),
        live=like(capacity, dtype=torch.bool),
    )
    if capacity:
        block = min(256, triton.next_power_of_2(capacity))
        _step_in[(triton.cdiv(capacity, block),)](
            rows, live, last_token, length, pages, *out, capacity, pages.stride(0), PAGE=page_size, BLOCK=block
        )
    return out


def step_out(
    rows: Tensor, live: Tensor, token: Tensor, step: Tensor, last_token: Tensor, length: Tensor, ring: Tensor
) -> None:
    """Takes the drawn tokens int32 `[capacity]` into the state, and into the ring's row of the step for the host.

    step: int32 or int64 `[1]`, the step's number; ring int32 `[steps, ≥ capacity]`: row step mod steps gets the tokens,
    −1 for rows that are not live. A row without a last token (−1) draws none either, so that the fault is seen by
    whoever looks at the tokens. A row of the state appears at most once among the live `rows`.
    """
    capacity = rows.shape[0]
    if ring.shape[1] < capacity or ring.stride(1) != 1 or token.shape[0] != capacity:
        raise ValueError(f"rows are {list(rows.shape)}, tokens {list(token.shape)}, the ring {list(ring.shape)}")
    if capacity:
        block = min(256, triton.next_power_of_2(capacity))
        _step_out[(triton.cdiv(capacity, block),)](
            rows, live, token, step, last_token, length, ring, capacity, ring.shape[0], ring.stride(0), BLOCK=block
        )
