"""Gated DeltaNet (arXiv 2412.06464) in plain torch: a convolution, the gated delta rule, and a gated norm."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.kernels.torch_reference import rms_norm

CHUNK, CHUNKS = 64, 16
"""(Tokens of a chunk, which solves all their corrections at once; chunks that are prepared at once.)"""


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
) -> None:
    """Fill out `[T, heads · V]`, of product's dtype, with the layer's output before its last product, and write the
    states after each sequence's rows.

    Args:
        product: `[T, 2 · keys + 2 · heads · V + 2 · heads]`, side by side: queries and keys (`keys` features each),
            values, the output's gate, the correction's gate, and the input of the state's decay. Consecutive heads, the
            same number for each key, share a query and a key.
        starts: int32 `[B + 1]`: sequence i has rows starts[i] … starts[i + 1] − 1, maybe none. None: each has one row.
            Rows without a sequence are not written.
        before, after: int64 `[B]`, slots of the state before the rows (−1: zeros) and after them; both may be equal. An
            `after` of −1 marks a padding sequence: no state is written, and its output is 0 if starts is None. A slot
            that one sequence writes, no other sequence reads or writes.
        conv: `[features, 1, window]`, of queries, keys and values.
        decay (logarithm of its rate), bias: float32 `[heads]`.
        weight, eps: `[V]` and a number, of the norm before the gate.
        states: float32 `[slots, heads, K, V]`.
        tails: float32 `[slots, features, window − 1]`, last inputs of the convolution.
    """
    (_, heads, key_dim, value_dim), (features, _, window) = states.shape, conv.shape
    keys = (features - heads * value_dim) // 2
    counts = [1] * len(before) if starts is None else starts.diff().tolist()
    for rows, sequences, count in equal_spans(counts):
        from_slots, to_slots = before[sequences], after[sequences]
        begins = from_slots < 0
        state, tail = (kept.index_select(0, from_slots.clamp(min=0)) for kept in (states, tails))
        state, tail = state.masked_fill(begins[:, None, None, None], 0.0), tail.masked_fill(begins[:, None, None], 0.0)
        parts = product[rows].unflatten(0, (-1, count)).split([features, heads * value_dim, heads, heads], dim=-1)
        mixed, z, b, a = parts
        inputs = torch.cat((tail, mixed.transpose(1, 2).float()), dim=-1)
        # One product per tap: on GPUs convolutions in float32 round their inputs to fewer bits.
        taps = [inputs[..., i : i + count] * conv[:, 0, i, None] for i in range(window)]
        mixed = F.silu(torch.stack(taps).sum(0)).transpose(1, 2)
        q, k, v = mixed.split([keys, keys, heads * value_dim], dim=-1)
        share = heads * key_dim // keys  # value heads of a key head
        q, k = (_unit(y.unflatten(-1, (-1, key_dim))).repeat_interleave(share, dim=2).transpose(1, 2) for y in (q, k))
        v = v.unflatten(-1, (-1, value_dim)).transpose(1, 2)
        beta = b.sigmoid().float().transpose(1, 2)
        falls = (-decay.exp() * F.softplus(a.float() + bias)).transpose(1, 2)
        seen = []
        for i in range(0, count, CHUNK * CHUNKS):
            at = slice(i, i + CHUNK * CHUNKS)
            part, state = delta_rule(
                q[:, :, at] * key_dim**-0.5, k[:, :, at], v[:, :, at], falls[:, :, at], beta[:, :, at], state
            )
            seen.append(part)
        normed = rms_norm(torch.cat(seen, dim=2).transpose(1, 2).to(product.dtype), weight, eps).flatten(2)
        real = to_slots >= 0
        gated = (normed * F.silu(z.float())).to(product.dtype)
        out[rows] = gated.masked_fill(~real[:, None, None], 0.0).flatten(0, 1)
        states[to_slots[real]], tails[to_slots[real]] = state[real], inputs[..., count:][real]


def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Apply the gated delta rule to consecutive tokens. Return (out `[…, rows, V]`, the state after them).

    Token by token it is S ← exp(decay) S; S ← S + k (beta (v − Sᵀ k))ᵀ; out = Sᵀ q. The corrections of a chunk depend
    on one another through a triangular system. Its inverse is computed for all chunks at once; then each chunk takes
    five products (the chunkwise form of arXiv 2406.06484, 2412.06464).

    Args:
        q, k: `[…, rows, K]`. v: `[…, rows, V]`. decay (at most 0), beta: `[…, rows]`. state: `[…, K, V]`. All float32.
    """
    rows = q.shape[-2]
    size = min(CHUNK, rows)
    chunks = -(-rows // size)
    # Tokens that pad the last chunk have no effect: their decay, beta and query are 0.
    q, k, v = (F.pad(x, (0, 0, 0, chunks * size - rows)).unflatten(-2, (chunks, size)) for x in (q, k, v))
    decay, beta = (F.pad(x, (0, chunks * size - rows)).unflatten(-1, (chunks, size)) for x in (decay, beta))
    total = decay.cumsum(-1)
    earlier = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    between = (total[..., :, None] - total[..., None, :]).masked_fill(~earlier, float("-inf")).exp()
    since, last = total.exp()[..., None], total[..., -1:]
    system = beta[..., None] * (k @ k.transpose(-1, -2)) * between  # its diagonal is not read: it counts as 1
    one = torch.eye(size, dtype=q.dtype, device=q.device).expand_as(system)
    inverse = torch.linalg.solve_triangular(system, one, upper=False, unitriangular=True) if size > 1 else one
    targets, seen = beta[..., None] * v, (beta[..., None] * since) * k
    inside, asked = (q @ k.transpose(-1, -2)) * between, since * q
    kept, keep = (k * (last - total)[..., None].exp()).transpose(-1, -2), last[..., None].exp()
    outputs = []
    for i in range(chunks):
        new = inverse[..., i, :, :] @ (targets[..., i, :, :] - seen[..., i, :, :] @ state)
        outputs.append(asked[..., i, :, :] @ state + inside[..., i, :, :] @ new)
        state = keep[..., i, :, :] * state + kept[..., i, :, :] @ new
    return torch.cat(outputs, dim=-2)[..., :rows, :], state


def equal_spans(counts: Sequence[int]) -> list[tuple[slice, slice, int]]:
    """Return (rows, sequences, rows of each sequence) per call: neighbouring sequences of one row share a call. counts:
    rows of each sequence."""
    spans: list[tuple[slice, slice, int]] = []
    first = at = 0
    for count, equal in itertools.groupby(counts):
        sequences = len(list(equal))
        for many in [sequences] if count == 1 else [1] * sequences:
            if count:
                spans.append((slice(first, first + count * many), slice(at, at + many), count))
            first, at = first + count * many, at + many
    return spans


def _unit(x: Tensor) -> Tensor:
    """Scale vectors to length one."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
