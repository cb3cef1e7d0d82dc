"""The ends of a step that runs without the host: a decode step's inputs from the requests' state, and its update.

The state lies on the device by request row: `last_token`, `length` (tokens in the caches) and `entries`, the tables of
all groups of caches side by side. A step takes the rows that `rows` names, which hold any order; those from `live` on
are there only because the captured graph is larger.

`step_in` is a graph's first kernel, and starts early where a kernel is before it, as all others do: what was queued
before a graph has ended when its first kernel starts, and a launch behind a copy waits for it. So new pages, which are
copied before a replay, are seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from weft.kernels.triton import overlap
from weft.kernels.triton.launch import kernel, next_power_of_2
from weft.kernels.triton.sample import better

ENTRIES = 1024
"""Of a row's table, that one program copies."""


class StepInputs(NamedTuple):
    """What a step of `capacity` rows reads.

    tokens int64, positions int64 and lengths int32 (the new token included), each `[capacity]`. entries int32
    `[capacity, width]`: the rows' tables; of pages those that hold tokens of the row, and nothing is written behind.
    slots int64 `[groups, 2, capacity]`: of pages, in the first place, where the new token is stored; of states, the
    slots before and after the step. A row that is not live has token 0, position 0, length 0, slots −1 and no entries.
    A row without a last token (−1) has token 0, so that no memory is read that is not there; `step_out` tells.
    """

    tokens: Tensor
    positions: Tensor
    lengths: Tensor
    entries: Tensor
    slots: Tensor


@kernel(do_not_specialize=["capacity"])
def _step_in(
    rows, live, last_token, length, entries, steps, parts, tokens, positions, lengths, found, slots, capacity,
    entries_row, found_row, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    overlap.begin()
    i = tl.program_id(0)
    if (i == 0) & (tl.program_id(1) == 0):
        tl.store(steps, tl.load(steps) + 1)
    part = parts + tl.program_id(1) * 5
    group, state = tl.load(part), tl.load(part + 1)
    begin, width, first = tl.load(part + 2), tl.load(part + 3), tl.load(part + 4)
    real = i < tl.load(live)
    row = tl.where(real, tl.load(rows + i), 0).to(tl.int64)
    position = tl.load(length + row, mask=real, other=0)
    if tl.program_id(1) == 0:
        token = tl.load(last_token + row, mask=real, other=0)
        tl.store(tokens + i, tl.maximum(token, 0).to(tl.int64))
        tl.store(positions + i, position.to(tl.int64))
        tl.store(lengths + i, tl.where(real, position + 1, 0))
    table = entries + row * entries_row + begin
    slot = slots + 2 * group * capacity + i
    if state != 0:
        tl.store(slot, tl.load(table, mask=real, other=-1).to(tl.int64))
        tl.store(slot + capacity, tl.load(table + 1, mask=real, other=-1).to(tl.int64))
    else:
        last = position // PAGE
        at = first + tl.arange(0, BLOCK)
        held = real & (at < width) & (at <= last)
        page = tl.load(table + at, mask=held, other=0)
        tl.store(found + i.to(tl.int64) * found_row + begin + at, page, mask=held)
        if first == 0:
            own = tl.load(table + last, mask=real & (last < width), other=-1)
            tl.device_assert((own >= 0) | (real == 0), "a row's token goes to a page that it was not given")
            tl.store(slot, tl.where(own >= 0, own.to(tl.int64) * PAGE + position % PAGE, -1))


@kernel(do_not_specialize=["capacity"])
def _step_out(
    rows, live, answers, drawn, lengths, last_token, length, tokens, steps, told, told_rows, told_row, capacity, each,
    every, BLOCK: tl.constexpr,
):  # fmt: skip
    overlap.begin()
    i = tl.program_id(0)
    row = tl.load(rows + i)
    if i >= tl.load(live):
        tl.store(tokens + i, -1)
        return
    c = tl.arange(0, BLOCK)
    at = drawn + (((c // each).to(tl.int64) * capacity + i) * each + c % each) * 2
    value = tl.load(at, mask=c < every, other=float("-inf"))
    token = tl.load(at + 1, mask=c < every, other=0.0).to(tl.int32)
    _, best = better(value, tl.where(c < every, token, 2147483647))
    best = tl.where((i < tl.load(answers)) & (tl.load(last_token + row) < 0), -1, best)
    tl.store(last_token + row, best)
    tl.store(length + row, tl.load(lengths + i))
    tl.store(tokens + i, best)
    tl.store(told + (tl.load(steps) & (told_rows - 1)) * told_row + i, best)


class Parts(NamedTuple):
    """What the programs of `step_in` do for a row, of the tables of so many groups. each int32 `[parts, 5]`: the group,
    whether it is of states, where its table begins, how wide it is, and the first entry that the program copies.
    """

    groups: int
    each: Tensor


def parts(widths: Sequence[int], states: Sequence[bool], device: torch.device) -> Parts:
    """Of groups whose tables lie side by side: how wide each is, and whether it has the slots of states."""
    found, begin = [], 0
    for group, (width, state) in enumerate(zip(widths, states, strict=True)):
        for first in range(0, width, width if state else ENTRIES):
            found.append((group, int(state), begin, width, first))
        begin += width
    return Parts(len(widths), torch.tensor(found, dtype=torch.int32, device=device))


def step_in(
    rows: Tensor,
    live: Tensor,
    last_token: Tensor,
    length: Tensor,
    entries: Tensor,
    steps: Tensor,
    parts: Parts,
    page_size: int,
) -> StepInputs:
    """A decode step's inputs: each row's last token, to be stored and attended from at the row's length.

    rows int32 `[capacity]`: the request row of each of the step's rows, of which the first `live` (int32 `[1]`) count.
    last_token, length int32 `[R]`; entries int32 `[R, width]`, in which the new token has its page; steps int32 `[1]`,
    to which one is added. parts: of these tables, by `parts`; page_size: tokens of an entry. Raises ValueError where
    they do not fit together.
    """
    capacity, like = rows.shape[0], live.new_empty
    if not last_token.shape == length.shape == entries.shape[:1]:
        shapes = f"{list(length.shape)}, last_token {list(last_token.shape)}, entries {list(entries.shape)}"
        raise ValueError(f"length is {shapes}: they must have the same rows")
    if entries.dtype != torch.int32 or entries.stride(1) != 1:
        raise ValueError(f"entries are {entries.dtype} with strides {entries.stride()}, not rows of int32")
    out = StepInputs(
        tokens=like(capacity, dtype=torch.int64),
        positions=like(capacity, dtype=torch.int64),
        lengths=like(capacity),
        entries=like(capacity, entries.shape[1]),
        slots=like(parts.groups, 2, capacity, dtype=torch.int64),
    )
    if capacity:
        _step_in[(capacity, len(parts.each))](
            rows, live, last_token, length, entries, steps, parts.each, *out, capacity, entries.stride(0),
            out.entries.stride(0), PAGE=page_size, BLOCK=min(ENTRIES, next_power_of_2(entries.shape[1])),
            num_warps=4, **overlap.options(),
        )  # fmt: skip
    return out


def step_out(
    rows: Tensor,
    live: Tensor,
    answers: Tensor,
    drawn: Tensor,
    lengths: Tensor,
    last_token: Tensor,
    length: Tensor,
    tokens: Tensor,
    steps: Tensor,
    told: Tensor,
) -> None:
    """Draws the best of the tokens of `sample.candidates`, and takes it into the state, as it takes the new lengths
    (int32 `[capacity]`); tokens int32 `[≥ capacity]` get what was drawn, −1 for rows that are not live. The live rows'
    are also written to one row of told (int32 `[a power of two, ≥ capacity]`, which may be pinned memory of the host):
    `steps` (int32 `[1]`) modulo the number of its rows.

    drawn: float32 `[ranks, capacity, each, 2]`, contiguous, scores and tokens. Of the first `answers` (int32 `[1]`) a
    row without a last token (−1) draws none, so that the fault is seen by whoever looks at the tokens. A row of the
    state appears at most once among the live `rows`. Raises ValueError where shapes do not fit together.
    """
    capacity, (ranks, count, each, two) = rows.shape[0], drawn.shape
    fits = min(tokens.shape[0], told.shape[1]) >= capacity and count == capacity == lengths.shape[0]
    if not fits or told.shape[0] & (told.shape[0] - 1) or two != 2 or not drawn.is_contiguous():
        raise ValueError(f"rows are {list(rows.shape)}, drawn {list(drawn.shape)}, tokens {list(tokens.shape)}")
    if capacity:
        _step_out[(capacity,)](
            rows, live, answers, drawn, lengths, last_token, length, tokens, steps, told, told.shape[0],
            told.stride(0), capacity, each, ranks * each,
            BLOCK=next_power_of_2(ranks * each), num_warps=1, **overlap.options(),
        )  # fmt: skip
