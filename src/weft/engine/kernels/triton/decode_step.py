"""First and last kernel of a decode step that runs without the host.

`step_in` makes the step's inputs from the state of the requests; `step_out` samples and updates that state. The state
is on the device, by request row: `last_token`, `length` (tokens in the caches) and `entries`, the tables of all groups
of caches side by side. `rows` names the request rows of a step, in any order; those from `live` on are padding of a
captured graph.

`step_in` is a graph's first kernel. Kernels start early only after another kernel: earlier work of the stream has ended
when a graph's first kernel starts, and a launch after a copy waits for the copy. So a replay sees the new pages, which
are copied before it.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from weft.engine.kernels import step_inputs
from weft.engine.kernels.step_inputs import StepInputs, TablePieces, unfilled_inputs
from weft.engine.kernels.triton.sample import better
from weft.kernels.triton import overlap
from weft.kernels.triton.launch import kernel, next_power_of_2


@kernel(do_not_specialize=["capacity"])
def _step_in(
    rows, places, drafts, live, last_token, length, entries, steps, pieces, tokens, positions, lengths, found, slots,
    capacity, entries_row, found_row, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    overlap.begin()
    i = tl.program_id(0)
    if (i == 0) & (tl.program_id(1) == 0):
        tl.store(steps, tl.load(steps) + 1)
    piece = pieces + tl.program_id(1) * 5
    group, state = tl.load(piece), tl.load(piece + 1)
    begin, width, first = tl.load(piece + 2), tl.load(piece + 3), tl.load(piece + 4)
    real = i < tl.load(live)
    row = tl.where(real, tl.load(rows + i), 0).to(tl.int64)
    place = tl.load(places + i, mask=real, other=0)
    position = tl.load(length + row, mask=real, other=0) + place
    if tl.program_id(1) == 0:
        token = tl.load(last_token + row, mask=real & (place == 0), other=0)
        token += tl.load(drafts + i, mask=real & (place > 0), other=0)
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
    rows, live, decode_rows, candidates, lengths, last_token, length, tokens, steps, token_ring, ring_rows, ring_row,
    capacity, each, all_candidates, BLOCK: tl.constexpr,
):  # fmt: skip
    overlap.begin()
    i = tl.program_id(0)
    row = tl.load(rows + i)
    if i >= tl.load(live):
        tl.store(tokens + i, -1)
        return
    c = tl.arange(0, BLOCK)
    at = candidates + (((c // each).to(tl.int64) * capacity + i) * each + c % each) * 2
    value = tl.load(at, mask=c < all_candidates, other=float("-inf"))
    token = tl.load(at + 1, mask=c < all_candidates, other=0.0).to(tl.int32)
    _, best = better(value, tl.where(c < all_candidates, token, 2147483647))
    best = tl.where((i < tl.load(decode_rows)) & (tl.load(last_token + row) < 0), -1, best)
    tl.store(last_token + row, best)
    tl.store(length + row, tl.load(lengths + i))
    tl.store(tokens + i, best)
    tl.store(token_ring + (tl.load(steps) & (ring_rows - 1)) * ring_row + i, best)


def step_in(
    rows: Tensor,
    places: Tensor,
    drafts: Tensor,
    live: Tensor,
    last_token: Tensor,
    length: Tensor,
    entries: Tensor,
    steps: Tensor,
    pieces: TablePieces,
    page_size: int,
) -> StepInputs:
    """Return a decode step's inputs: each row's last token, at the position that is the row's length, or a draft.

    Args:
        rows: int32 `[capacity]`, request row of each of the step's rows.
        places: int32 `[capacity]`: 0 for the last token, n for the n-th draft, n positions behind it.
        drafts: int32 `[capacity]`, tokens of drafts.
        live: int32 `[1]`, number of valid rows.
        last_token, length: int32 `[R]`, of each request row.
        entries: int32 `[R, width]`, tables that already include the new token's page.
        steps: int32 `[1]`, incremented.
        pieces: result of `table_pieces` for these tables.
        page_size: tokens of an entry.

    Raises ValueError if shapes, dtypes or strides do not match.
    """
    capacity, out = rows.shape[0], unfilled_inputs((rows, places, drafts), (last_token, length, entries), pieces)
    if capacity:
        _step_in[(capacity, len(pieces.each))](
            rows, places, drafts, live, last_token, length, entries, steps, pieces.each, *out, capacity,
            entries.stride(0), out.entries.stride(0), PAGE=page_size,
            BLOCK=min(step_inputs.ENTRIES, next_power_of_2(entries.shape[1])), num_warps=4, **overlap.options(),
        )  # fmt: skip
    return out


def step_out(
    rows: Tensor,
    live: Tensor,
    decode_rows: Tensor,
    candidates: Tensor,
    lengths: Tensor,
    last_token: Tensor,
    length: Tensor,
    tokens: Tensor,
    steps: Tensor,
    token_ring: Tensor,
) -> None:
    """Sample the best candidate of each row and update the state with it.

    Args:
        rows, live: see `step_in`. The state of a row with drafts ends as one of its tokens has it: the caller sets it
            once the drafts are accepted.
        decode_rows: int32 `[1]`. A row before this one without a last token (−1) samples −1, so that the reader of the
            tokens sees the fault.
        candidates: float32 `[ranks, capacity, each, 2]`, contiguous: scores and tokens, by `sample.candidates`.
        lengths: int32 `[capacity]`, the state's new lengths.
        tokens: int32 `[≥ capacity]`, filled with the samples, −1 for rows that are not live.
        steps: int32 `[1]`, number of the step.
        token_ring: int32 `[a power of two, ≥ capacity]`, maybe pinned memory of the host; its row `steps` modulo the
            number of its rows is filled with the tokens of the live rows.

    Raises ValueError if shapes do not match.
    """
    capacity, (ranks, count, each, two) = rows.shape[0], candidates.shape
    fits = min(tokens.shape[0], token_ring.shape[1]) >= capacity and count == capacity == lengths.shape[0]
    if not fits or token_ring.shape[0] & (token_ring.shape[0] - 1) or two != 2 or not candidates.is_contiguous():
        raise ValueError(
            f"rows are {list(rows.shape)}, candidates {list(candidates.shape)}, tokens {list(tokens.shape)}"
        )
    if capacity:
        _step_out[(capacity,)](
            rows, live, decode_rows, candidates, lengths, last_token, length, tokens, steps, token_ring,
            token_ring.shape[0], token_ring.stride(0), capacity, each, ranks * each,
            BLOCK=next_power_of_2(ranks * each), num_warps=1, **overlap.options(),
        )  # fmt: skip
