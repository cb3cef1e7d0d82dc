"""Gated DeltaNet (arXiv 2412.06464) over the rows of a step, for sequences of one row and of several.

Sequences of several rows are computed in chunks (arXiv 2406.06484), which begin at the sequence's first row of the
step. The corrections of a chunk's tokens depend on one another through a unit lower triangular system. Its inverse, and
the scores of queries with the chunk's keys, need no state: they are computed for all chunks at once. Then a program
walks over the chunks of one sequence with a part of one head's state in registers. All programs find their rows on the
device. Sums are in float32; operands of products have the dtype of the rows.
"""

# Why not flash-linear-attention (fla-org)? Its source was read at 0315a70, 18039d8, 0080966, 0091f40 and 19089ff, not
# run. Its kernels are good, but:
# - Bits: `common/chunk_delta_h.py` and `gated_delta_rule/chunk_fwd.py` choose BK, BV, warps and stages by timing at the
#   first call (`fla_cache_autotune`). No batch changes the choice, but BK is the order of a sum: ranks, restarts and
#   layouts may differ, where Weft resumes a request with the same tokens. FLA_INTRACARD_CP=1 cuts by lengths.
# - Capture: `utils/index.py:prepare_chunk_indices` reads the number of chunks on the host. The newer static buffers
#   (`utils/graph.py`) are one for each name and shape: "interleaved replay of graphs with identical keys is not
#   supported", which is what an engine does with its graphs.
# - States: h0 and ht are tensors in the order of sequences, not slots. A decode step would copy each state twice more,
#   and states are most of the bytes that it moves. Prompts also write the state of each chunk to memory, in the dtype
#   of the rows; this module keeps it in registers, in float32.
# - `gated_delta_rule/chunk.py` refuses float32, the dtype of comparisons with the definition in tests.
# Convolution, gates and norm would stay separate kernels. A pinned FLA_CONFIG_DIR removes the first reason alone.

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from weft.engine.kernels.triton.delta_step import SLOTS, check, delta_step
from weft.kernels.triton import overlap
from weft.kernels.triton.launch import cdiv, kernel, next_power_of_2

ROWS = 32
"""Rows of a program that convolves or gates."""


class ChunkTile(NamedTuple):
    """Tile of the chunked kernels. tokens: tokens of a chunk. values: elements of a value head in a program's state.
    warps, stages: of the programs that walk over chunks."""

    tokens: int
    values: int
    warps: int
    stages: int


@triton.jit
def _chunk_of(starts, sequences, item, CHUNK: tl.constexpr, BLOCK_B: tl.constexpr):
    """Return (True if the chunk exists, its sequence, its first row, the sequence's end). Sequences of one row have no
    chunk."""
    index = tl.arange(0, BLOCK_B)
    first = tl.load(starts + index, mask=index < sequences, other=0)
    count = tl.load(starts + index + 1, mask=index < sequences, other=0) - first
    chunks = tl.where(count > 1, tl.cdiv(count, CHUNK), 0)
    until = tl.cumsum(chunks, 0)
    sequence = tl.sum((until <= item).to(tl.int32), 0)
    real = item < tl.sum(chunks, 0)
    own = index == sequence
    place = item - tl.sum(tl.where(own, until - chunks, 0), 0)
    begin = tl.sum(tl.where(own, first, 0), 0)
    end = begin + tl.sum(tl.where(own, count, 0), 0)
    return real, sequence, begin + place * CHUNK, end


@kernel(do_not_specialize=["sequences"], do_not_specialize_on_alignment=SLOTS)
def _convolve_chunks(
    product, starts, before, after, conv, tails, mixed, sequences, product_row, tail_slot, mixed_row,
    KEPT: tl.constexpr, BLOCK_KEPT: tl.constexpr, KEYS: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Convolve a chunk's rows of one head of queries, keys or values."""
    overlap.begin()
    real, sequence, row, end = _chunk_of(starts, sequences, tl.program_id(0), CHUNK, BLOCK_B)
    if not real:
        return
    head = tl.program_id(1)
    start = tl.load(starts + sequence)
    at = tl.load(before + sequence).to(tl.int64)
    width, first = K, head * K
    if head >= 2 * KEYS // K:
        width, first = V, 2 * KEYS + (head - 2 * KEYS // K) * V
    d = tl.arange(0, BLOCK_D)
    f, inside = first + d, d < width
    r = row + tl.arange(0, CHUNK)
    total = tl.zeros([CHUNK, BLOCK_D], tl.float32)
    for tap in tl.static_range(KEPT + 1):
        source = (r - KEPT + tap)[:, None]
        x = tl.load(
            product + source.to(tl.int64) * product_row + f[None, :],
            mask=(source >= start) & (source < end) & inside[None, :],
            other=0.0,
        ).to(tl.float32)
        if row == start:
            x += tl.load(
                tails + at * tail_slot + f[None, :] * KEPT + source - start + KEPT,
                mask=(source < start) & (at >= 0) & inside[None, :],
                other=0.0,
            )
        total += x * tl.load(conv + f * (KEPT + 1) + tap, mask=inside, other=0.0).to(tl.float32)[None, :]
    total = total / (1 + tl.exp(-total))
    if head < 2 * KEYS // K:
        total *= tl.rsqrt(tl.sum(total * total, 1, keep_dims=True) + 1e-6)
    if head < KEYS // K:
        total *= tl.rsqrt(K * 1.0)
    to = mixed + r.to(tl.int64)[:, None] * mixed_row + f[None, :]
    tl.store(to, total.to(mixed.dtype.element_ty), mask=(r < end)[:, None] & inside[None, :])
    # Only the first chunk's programs read the kept inputs, so they also write the next ones.
    slot = tl.load(after + sequence).to(tl.int64)
    if (row == start) & (slot >= 0):
        i = tl.arange(0, BLOCK_KEPT)[None, :]
        since = end - KEPT + i - start
        kept = inside[:, None] & (i < KEPT)
        newest = tl.load(
            product + (start + since).to(tl.int64) * product_row + f[:, None], mask=kept & (since >= 0), other=0.0
        ).to(tl.float32)
        newest += tl.load(
            tails + at * tail_slot + f[:, None] * KEPT + since + KEPT,
            mask=kept & (since < 0) & (at >= 0),
            other=0.0,
        )
        tl.debug_barrier()  # all kept inputs are read before any is overwritten
        tl.store(tails + slot * tail_slot + f[:, None] * KEPT + i, newest, mask=kept)


@kernel(do_not_specialize=["sequences"], do_not_specialize_on_alignment=SLOTS[:1])
def _prepare_chunks(
    product, mixed, starts, decay, bias, inverse, scores, gates, sequences, product_row, mixed_row,
    KEYS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, HEADS: tl.constexpr, SHARE: tl.constexpr,
    CHUNK: tl.constexpr, LEVELS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_B: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a chunk's inverse, scores and gates for one value head."""
    overlap.begin()
    real, _, row, end = _chunk_of(starts, sequences, tl.program_id(0), CHUNK, BLOCK_B)
    if not real:
        return
    head = tl.program_id(1)
    i = tl.arange(0, CHUNK)
    r = (row + i).to(tl.int64)
    there = r < end
    d = tl.arange(0, BLOCK_K)
    at = mixed + r[:, None] * mixed_row + head // SHARE * K + d[None, :]
    inside = there[:, None] & (d < K)[None, :]
    query, key = tl.load(at, mask=inside, other=0.0), tl.load(at + KEYS, mask=inside, other=0.0)
    of_gates = product + r * product_row + 2 * KEYS + 2 * HEADS * V + head
    b = tl.load(of_gates, mask=there, other=0.0).to(tl.float32)
    a = tl.load(of_gates + HEADS, mask=there, other=0.0).to(tl.float32) + tl.load(bias + head)
    softplus = tl.maximum(a, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(a)))
    # Rows after the end have no effect: their decay and correction are 0.
    total = tl.cumsum(tl.where(there, -tl.exp(tl.load(decay + head)) * softplus, 0.0), 0)
    beta = tl.where(there, 1 / (1 + tl.exp(-b)), 0.0)
    to_gates = gates + (r * HEADS + head) * 2
    tl.store(to_gates, total, mask=there)
    tl.store(to_gates + 1, beta, mask=there)
    x, y = i[:, None], i[None, :]
    between = tl.exp(tl.where(x >= y, total[:, None] - total[None, :], 0.0))
    key_t = tl.trans(key)
    score = tl.where(x >= y, tl.dot(query, key_t, input_precision="ieee") * between, 0.0)
    system = tl.where(x > y, tl.dot(key, key_t, input_precision="ieee") * between * beta[:, None], 0.0)
    # Invert by blocks, as stable as substitution: of [[A, 0], [M, B]] it is [[A⁻¹, 0], [−B⁻¹ M A⁻¹, B⁻¹]]. A level
    # joins all pairs of blocks of its size.
    found = tl.where(x == y, 1.0, 0.0) - tl.where(x // 2 == y // 2, system, 0.0)
    for level in tl.static_range(1, LEVELS):
        joined = (x >> (level + 1) == y >> (level + 1)) & (x >> level != y >> level)
        half = tl.dot(found, tl.where(joined, system, 0.0), input_precision=PRECISION)
        found -= tl.dot(half, found, input_precision=PRECISION)
    to = (r[:, None] * HEADS + head) * CHUNK + y
    tl.store(inverse + to, found.to(inverse.dtype.element_ty), mask=there[:, None])
    tl.store(scores + to, score.to(scores.dtype.element_ty), mask=there[:, None])


@kernel(do_not_specialize_on_alignment=SLOTS)
def _walk_chunks(
    mixed, inverse, scores, gates, starts, before, after, states, out, mixed_row, state_slot, out_row,
    KEYS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, HEADS: tl.constexpr, SHARE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Walk over the chunks of one sequence with some columns of one head's state."""
    overlap.begin()
    sequence, head = tl.program_id(1), tl.program_id(0) % HEADS
    start, end = tl.load(starts + sequence), tl.load(starts + sequence + 1)
    if end - start < 2:
        return
    dtype: tl.constexpr = mixed.dtype.element_ty
    from_slot, to_slot = tl.load(before + sequence).to(tl.int64), tl.load(after + sequence).to(tl.int64)
    i, d = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    v = tl.program_id(0) // HEADS * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (d < K)[:, None] & (v < V)[None, :]
    place = head * K * V + d[:, None] * V + v[None, :]
    state = tl.load(states + from_slot * state_slot + place, mask=inside & (from_slot >= 0), other=0.0)
    for first in range(start, end, CHUNK):
        r = (first + i).to(tl.int64)
        there = r < end
        of_row, of_keys = mixed + r[:, None] * mixed_row, there[:, None] & (d < K)[None, :]
        of_values = there[:, None] & (v < V)[None, :]
        query = tl.load(of_row + head // SHARE * K + d[None, :], mask=of_keys, other=0.0)
        key = tl.load(of_row + KEYS + head // SHARE * K + d[None, :], mask=of_keys, other=0.0)
        value = tl.load(of_row + 2 * KEYS + head * V + v[None, :], mask=of_values, other=0.0).to(tl.float32)
        square = (r[:, None] * HEADS + head) * CHUNK + i[None, :]
        solve = tl.load(inverse + square, mask=there[:, None], other=0.0)
        score = tl.load(scores + square, mask=there[:, None], other=0.0)
        total = tl.load(gates + (r * HEADS + head) * 2, mask=there, other=0.0)
        beta = tl.load(gates + (r * HEADS + head) * 2 + 1, mask=there, other=0.0)
        last = tl.load(gates + ((tl.minimum(first + CHUNK, end) - 1).to(tl.int64) * HEADS + head) * 2)
        since, held = tl.exp(total)[:, None], state.to(dtype)
        error = beta[:, None] * (value - since * tl.dot(key, held, input_precision="ieee"))
        new = tl.dot(solve, error.to(dtype), input_precision="ieee")
        seen = since * tl.dot(query, held, input_precision="ieee")
        seen = tl.dot(score, new.to(dtype), seen, input_precision="ieee")
        tl.store(out + r[:, None] * out_row + head * V + v[None, :], seen.to(out.dtype.element_ty), mask=of_values)
        kept = (tl.exp(last - total)[:, None] * new).to(dtype)
        state = tl.dot(tl.trans(key), kept, state * tl.exp(last), input_precision="ieee")
    tl.store(states + to_slot * state_slot + place, state, mask=inside & (to_slot >= 0))


@kernel(do_not_specialize=["sequences"], do_not_specialize_on_alignment=SLOTS[:1])
def _gate_chunks(
    out, product, starts, weight, sequences, product_row, out_row, eps,
    FEATURES: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Apply the norm and the gate to a chunk of one head, in place."""
    overlap.begin()
    real, _, row, end = _chunk_of(starts, sequences, tl.program_id(0), CHUNK, BLOCK_B)
    if not real:
        return
    head = tl.program_id(1)
    r, v = (row + tl.arange(0, CHUNK)).to(tl.int64), tl.arange(0, BLOCK_V)
    inside = (r < end)[:, None] & (v < V)[None, :]
    to = out + r[:, None] * out_row + head * V + v[None, :]
    seen = tl.load(to, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(product + r[:, None] * product_row + FEATURES + head * V + v[None, :], mask=inside, other=0.0).to(
        tl.float32
    )
    seen *= tl.rsqrt(tl.sum(seen * seen, 1, keep_dims=True) / V + eps)
    seen *= tl.load(weight + v, mask=v < V, other=0.0).to(tl.float32)[None, :]
    tl.store(to, (seen * z / (1 + tl.exp(-z))).to(out.dtype.element_ty), mask=inside)


def tile_of(value_dim: int, element_size: int) -> ChunkTile:
    """Return a tile by the model's shape alone, so that a row has the same bits in every step."""
    if element_size > 2:
        return ChunkTile(16, min(32, max(16, next_power_of_2(value_dim))), 4, 1)
    return ChunkTile(64, min(32, max(16, next_power_of_2(value_dim))), 4, 3)


def gated_delta(
    product: Tensor,
    starts: Tensor | None,
    before: Tensor,
    after: Tensor,
    conv: Tensor,
    decay: Tensor,
    bias: Tensor,
    weight: Tensor,
    eps: float,
    states: Tensor,
    tails: Tensor,
    out: Tensor,
    *,
    tile: ChunkTile | None = None,
) -> None:
    """Compute `weft.engine.kernels.delta_rule.gated_delta`."""
    delta_step(product, starts, before, after, conv, decay, bias, weight, eps, states, tails, out)
    rows, sequences = product.shape[0], before.shape[0]
    if starts is None or rows < 2:
        return
    heads, key_dim, value_dim, keys, share = check(product, conv, states, tails)
    features, kept = conv.shape[0], conv.shape[-1] - 1
    tile = tile_of(value_dim, product.element_size()) if tile is None else tile
    size, cut = tile.tokens, min(sequences, rows // 2)  # at most that many chunks are cut short
    chunks, blocks = cdiv(rows, size) + cut, cdiv(rows, ROWS) + cut
    mixed = product.new_empty(rows, features)
    inverse, scores = product.new_empty(2, rows, heads, size)
    gates = states.new_empty(rows, heads, 2)
    block_k, block_v = (max(16, next_power_of_2(n)) for n in (key_dim, value_dim))
    of_heads = dict(KEYS=keys, K=key_dim, V=value_dim)
    options = dict(BLOCK_B=max(16, next_power_of_2(sequences)), num_warps=4, **overlap.options())
    _convolve_chunks[(blocks, 2 * keys // key_dim + heads)](
        product, starts, before, after, conv, tails, mixed, sequences, product.stride(0), tails.stride(0), features,
        KEPT=kept, BLOCK_KEPT=next_power_of_2(max(1, kept)), CHUNK=ROWS, BLOCK_D=max(block_k, block_v),
        **of_heads, **options,
    )  # fmt: skip
    _prepare_chunks[(chunks, heads)](
        product, mixed, starts, decay, bias, inverse, scores, gates, sequences, product.stride(0), features,
        HEADS=heads, SHARE=share, LEVELS=size.bit_length() - 1, BLOCK_K=block_k,
        CHUNK=size, PRECISION="ieee" if product.element_size() > 2 else "tf32", **of_heads, **options,
    )  # fmt: skip
    _walk_chunks[(heads * cdiv(value_dim, tile.values), sequences)](
        mixed, inverse, scores, gates, starts, before, after, states, out, features, states.stride(0), out.stride(0),
        HEADS=heads, SHARE=share, CHUNK=size, BLOCK_K=block_k, BLOCK_V=tile.values, num_warps=tile.warps,
        num_stages=tile.stages, **of_heads, **overlap.options(),
    )  # fmt: skip
    _gate_chunks[(blocks, heads)](
        out, product, starts, weight, sequences, product.stride(0), out.stride(0), eps,
        FEATURES=features, V=value_dim, CHUNK=ROWS, BLOCK_V=block_v, **options,
    )  # fmt: skip
