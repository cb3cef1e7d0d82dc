"""Kernels of a softmax merge over shards of the keys, before and after its collectives (`weft.stream.block_exchanges`).

The functions implement `weft.kernels.torch_reference`. A program has one head of one token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.torch_reference import packed_shards
from weft.kernels.triton.launch import kernel, next_power_of_2


@triton.jit
def _known(lse):
    """Return lse with −inf for NaN and +inf, which some kernels return for an empty part."""
    return tl.where(lse < float("inf"), lse, float("-inf"))


@triton.jit
def _max_and_sum(lses, stride, N: tl.constexpr):
    """Return the largest of N numbers `stride` apart (0 if all are −inf), and the sum of exp(number − largest)."""
    top = _known(tl.load(lses))
    for i in tl.static_range(1, N):
        top = tl.maximum(top, _known(tl.load(lses + i * stride)))
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.exp(_known(tl.load(lses)) - top)
    for i in tl.static_range(1, N):
        total += tl.exp(_known(tl.load(lses + i * stride)) - top)
    return top, total


@kernel
def _scale(
    out, lses, by_rank, own_lse, place, heads, out_token, out_head, part, dim, N: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    token, head = row // heads, row % heads
    own = heads // N
    reader, at = head // own, token * own + head % own
    d = tl.arange(0, BLOCK)
    top, total = _max_and_sum(lses + row, part, N)
    weight = tl.exp(_known(tl.load(lses + place * part + row)) - top) / tl.where(total > 0, total, 1.0)
    read = tl.where(weight > 0, dim, 0)
    x = tl.load(out + token * out_token + head * out_head + d, mask=d < read, other=0.0)
    to = by_rank + (reader * (part // N) + at) * dim
    tl.store(to + d, (weight * x.to(tl.float32)).to(by_rank.dtype.element_ty), mask=d < dim)
    if reader == place:
        tl.store(own_lse + at, top + tl.log(total))


@kernel
def _pack(
    out, lse, packed, packed_lse, heads, own, out_token, out_head, lse_token, lse_head, begin, size, lse_size, dim,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token, head = row // heads, row % heads
    reader, at = head // own, token * own + head % own
    d = tl.arange(0, BLOCK)
    x = tl.load(out + token * out_token + head * out_head + d, mask=d < dim)
    tl.store(packed + reader * size + begin + at * dim + d, x, mask=d < dim)
    tl.store(packed_lse + reader * lse_size + at, tl.load(lse + token * lse_token + head * lse_head))


@kernel
def _merge(packed, packed_lse, out, own_lse, begin, size, lse_size, dim, N: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    top, total = _max_and_sum(packed_lse + row, lse_size, N)
    merged = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(N):
        term = tl.exp(_known(tl.load(packed_lse + i * lse_size + row)) - top)
        weight = term / tl.where(total > 0, total, 1.0)
        read = tl.where(weight > 0, dim, 0)
        x = tl.load(packed + i * size + begin + row * dim + d, mask=d < read, other=0.0)
        merged += weight * x.to(tl.float32)
    tl.store(out + row * dim + d, merged.to(out.dtype.element_ty), mask=d < dim)
    tl.store(own_lse + row, top + tl.log(total))


def _cut(dim: int) -> dict[str, int]:
    block = next_power_of_2(dim)
    return {"BLOCK": block, "num_warps": max(1, min(4, block // 128))}


def scale_shard(out: Tensor, lses: Tensor, place: int, by_rank: Tensor) -> Tensor:
    """Run `weft.kernels.torch_reference.scale_shard`. lses, by_rank: contiguous."""
    (tokens, heads, dim), n = out.shape, len(lses)
    own_lse = lses.new_empty(tokens, heads // n)
    _scale[(tokens * heads,)](
        out, lses, by_rank, own_lse, place, heads, out.stride(0), out.stride(1), tokens * heads, dim, N=n, **_cut(dim)
    )
    return own_lse


def pack_shard(out: Tensor, lse: Tensor, packed: Tensor) -> None:
    """Run `weft.kernels.torch_reference.pack_shard`."""
    (tokens, heads, dim), n = out.shape, len(packed)
    begin, size = packed_shards(n, tokens, heads, dim, out.dtype)
    packed_lse = packed.view(torch.float32)
    _pack[(tokens * heads,)](
        out, lse, packed, packed_lse, heads, heads // n, out.stride(0), out.stride(1), lse.stride(0), lse.stride(1),
        begin, size, packed_lse.stride(0), dim, **_cut(dim),
    )  # fmt: skip


def merge_packed(packed: Tensor, tokens: int, heads: int, dim: int) -> tuple[Tensor, Tensor]:
    """Run `weft.kernels.torch_reference.merge_packed`. No float64."""
    n, own = len(packed), heads // len(packed)
    begin, size = packed_shards(n, tokens, heads, dim, packed.dtype)
    packed_lse = packed.view(torch.float32)
    out = packed.new_empty(tokens, own, dim)
    own_lse = packed_lse.new_empty(tokens, own)
    _merge[(tokens * own,)](packed, packed_lse, out, own_lse, begin, size, packed_lse.stride(0), dim, N=n, **_cut(dim))
    return out, own_lse
