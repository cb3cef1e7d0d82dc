"""The ends of a decode step that runs without the host: its inputs from the requests' state, and the state's update.

The state lies on the device by request row: `last_token`, `length` (tokens in the caches) and a page table for each
group of caches. A step takes the rows that `rows` names, which hold any order; those from `live` on are there only
because the captured graph is larger.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class StepInputs(NamedTuple):
    """What a step of `capacity` rows reads.

    tokens int64, positions int64, lengths int32 (the new token included), table int32 (the request row) and live bool,
    each `[capacity]`. A row that is not live has token 0, position 0, length 0, table 0. A row without a last token
    (−1) has token 0, so that no memory is read that is not there; `step_out` tells.
    """

    tokens: Tensor
    positions: Tensor
    lengths: Tensor
    table: Tensor
    live: Tensor


@triton.jit(do_not_specialize=["capacity"])
def _step_in(
    rows, live, last_token, length, tokens, positions, lengths, table, mask, capacity, BLOCK: tl.constexpr
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < capacity
    real = inside & (i < tl.load(live))
    row = tl.load(rows + i, mask=real, other=0)
    token = tl.load(last_token + row, mask=real, other=0)
    position = tl.load(length + row, mask=real, other=0)
    tl.store(tokens + i, tl.maximum(token, 0).to(tl.int64), mask=inside)
    tl.store(positions + i, position.to(tl.int64), mask=inside)
    tl.store(lengths + i, tl.where(real, position + 1, 0), mask=inside)
    tl.store(table + i, row, mask=inside)
    tl.store(mask + i, real, mask=inside)


@triton.jit(do_not_specialize=["capacity", "pages_row"])
def _new_slots(
    table, lengths, pages, slots, capacity, pages_row, max_pages, PAGE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < capacity
    position = tl.load(lengths + i, mask=inside, other=0) - 1
    real = position >= 0
    tl.device_assert((position // PAGE < max_pages) | ~real, "a row has no page for its token")
    row = tl.load(table + i, mask=real, other=0).to(tl.int64)
    page = tl.load(pages + row * pages_row + position // PAGE, mask=real, other=0)
    tl.device_assert((page >= 0) | ~real, "a row's token goes to a page that it was not given")
    tl.store(slots + i, tl.where(real, page.to(tl.int64) * PAGE + position % PAGE, -1), mask=inside)


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


def step_in(rows: Tensor, live: Tensor, last_token: Tensor, length: Tensor) -> StepInputs:
    """A decode step's inputs: each row's last token, to be stored and attended from at the row's length.

    rows int32 `[capacity]`: the request row of each of the step's rows, of which the first `live` (int32 `[1]`) count.
    last_token, length int32 `[R]`.
    """
    capacity = rows.shape[0]
    if last_token.shape != length.shape:
        raise ValueError(f"length is {list(length.shape)}, last_token {list(last_token.shape)}: they must be alike")
    like = live.new_empty
    out = StepInputs(
        tokens=like(capacity, dtype=torch.int64),
        positions=like(capacity, dtype=torch.int64),
        lengths=like(capacity),
        table=like(capacity),
        live=like(capacity, dtype=torch.bool),
    )
    if capacity:
        block = min(256, triton.next_power_of_2(capacity))
        _step_in[(triton.cdiv(capacity, block),)](rows, live, last_token, length, *out, capacity, BLOCK=block)
    return out


def new_slots(table: Tensor, lengths: Tensor, pages: Tensor, page_size: int) -> Tensor:
    """Where the last of each row's `lengths` tokens is stored by its page table, int64 `[capacity]`; −1 for length 0.

    table, lengths: as `step_in` gives them. pages int32 `[R, max_pages]`, where the page of that token is present.
    """
    capacity, slots = table.shape[0], table.new_empty(table.shape[0], dtype=torch.int64)
    if pages.dtype != torch.int32 or pages.stride(1) != 1:
        raise ValueError(f"pages are {pages.dtype}, strides {pages.stride()}: they must be int32, rows contiguous")
    if capacity:
        block = min(256, triton.next_power_of_2(capacity))
        _new_slots[(triton.cdiv(capacity, block),)](
            table, lengths, pages, slots, capacity, pages.stride(0), pages.shape[1], PAGE=page_size, BLOCK=block
        )
    return slots


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
