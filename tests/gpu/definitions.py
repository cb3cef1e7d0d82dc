"""Definitions of the Triton kernels in plain torch, for any device: tests and a benchmark compare kernels with them.

The kernel's launcher documents arguments and results. Arithmetic is in float32, or in float64
where the inputs are. The code is written to be read: it waits for the host. Kernels that are the GPU's form of an op
have their definitions in `weft.kernels.torch_reference`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.engine.kernels.model_reference import Rule, gated
from weft.kernels.float8 import Fp8Rows, Fp8Weight, dequantise, quantise


def decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    lengths: Tensor,
    page_size: int,
    scale: float,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (output `[rows, heads, values' dim]`, natural log-sum-exp `[rows, heads]`)."""
    rows, heads, _ = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros(rows, heads, values.shape[-1], dtype=wide, device=q.device)
    lse = torch.full((rows, heads), float("-inf"), dtype=wide, device=q.device)
    group = heads // keys.shape[1]
    for row, length in enumerate(lengths.tolist()):
        if length:
            token = torch.arange(max(0, length - (window or length)), length, device=q.device)
            slot = pages[row].long()[token // page_size] * page_size + token % page_size
            k, v = (x[slot].to(wide).repeat_interleave(group, 1) for x in (keys, values))
            score = torch.einsum("hd,thd->ht", q[row].to(wide), k) * scale
            lse[row] = score.logsumexp(-1)
            out[row] = torch.einsum("ht,thd->hd", score.softmax(-1), v)
    return out.to(q.dtype), lse


def route(
    logits: Tensor, rule: Rule, live: int, first: int = 0, held: int | None = None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (weight float32 `[T, k]`, expert int32 `[T, k]`, −1 for an expert of another rank and for a token that is
    not live)."""
    held = logits.shape[1] - first if held is None else held
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    score = wide.softmax(-1) if rule.score == "softmax" else wide.sigmoid()
    ranked = score if bias is None else score + bias
    # A stable sort gives equal scores to the lower expert; topk does not say which of them it takes.
    by_group = ranked.unflatten(-1, (rule.groups, -1))
    best = by_group.sort(dim=-1, descending=True).values[..., : rule.group_best].sum(-1)
    last = best.sort(dim=-1, descending=True, stable=True).indices[:, rule.top_groups :]
    out = torch.zeros_like(best, dtype=torch.bool).scatter_(1, last, True)
    ranked = by_group.masked_fill(out[..., None], float("-inf")).flatten(1)
    expert = ranked.sort(dim=-1, descending=True, stable=True).indices[:, : rule.k]
    weight = score.gather(1, expert)
    if rule.renormalise:
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)
    weight, expert = (weight * rule.scale).float(), expert - first
    here = (expert >= 0) & (expert < held)
    here[live:] = False
    return weight, torch.where(here, expert, -1).int()


def linear_float8(x: Tensor | Fp8Rows, weight: Fp8Weight, dtype: torch.dtype = torch.float32) -> Tensor:
    """x Wᵀ `[T, N]`. The rows of x `[T, K]` are quantised first, by the weight's groups of columns."""
    rows = x if isinstance(x, Fp8Rows) else quantise(x, weight.unit[1])
    return dequantise(rows, dtype) @ dequantise(weight, dtype).mT


def experts(
    x: Tensor | Fp8Rows,
    weight: Tensor,
    expert: Tensor,
    gate_up: Tensor | Fp8Weight,
    down: Tensor | Fp8Weight,
    limit: float | None = None,
    alpha: float | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """Return `[T, width]`. Pairs of expert −1 are omitted. Between the products is
    `weft.engine.kernels.model_reference.gated`.

    With weights in FP8 the rows of both products are quantised (x only if it is not quantised yet), and the result is
    float32.
    """
    given, dtype = (x.values, torch.float32) if isinstance(x, Fp8Rows) else (x, x.dtype)
    wide = torch.promote_types(dtype, torch.float32)
    out = torch.zeros(given.shape, dtype=wide, device=given.device)

    def product(rows: Tensor | Fp8Rows, weight: Tensor | Fp8Weight, e: int, bias: Tensor | None) -> Tensor:
        if isinstance(weight, Fp8Weight):
            rows = rows if isinstance(rows, Fp8Rows) else quantise(rows, weight.unit[1])
            weight = dequantise(Fp8Weight(weight.values[e], weight.scales[e], weight.unit), wide)
        else:
            weight = weight[e].to(wide)
        given = dequantise(rows, wide) if isinstance(rows, Fp8Rows) else rows.to(wide)
        return F.linear(given, weight, None if bias is None else bias[e].to(wide))

    for e in expert.unique().tolist():
        if e >= 0:
            token, choice = (expert == e).nonzero(as_tuple=True)
            taken = Fp8Rows(x.values[token], x.scales[token], x.group_size) if isinstance(x, Fp8Rows) else x[token]
            inner = gated(product(taken, gate_up, e, gate_up_bias), limit, alpha)
            rows = product(inner, down, e, down_bias)
            out.index_add_(0, token, rows * weight[token, choice, None].to(wide))
    return out.to(dtype)


def norm_rope_cache(
    qkv: Tensor,
    heads: int,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
    interleaved: bool = False,
) -> Tensor:
    """Return the queries, and store keys and values."""
    kv_heads, d = keys.shape[1:]
    wide = torch.promote_types(qkv.dtype, torch.float32)
    q, k, v = qkv.unflatten(1, (-1, d)).split((heads, kv_heads, kv_heads), 1)

    def rotated(x: Tensor, weight: Tensor | None) -> Tensor:
        x = x.to(wide)
        if weight is not None:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(wide)
        part, rest = x.split((2 * cos.shape[1], d - 2 * cos.shape[1]), -1)
        return torch.cat((_rotate(part, cos.to(wide)[:, None], sin.to(wide)[:, None], interleaved), rest), -1)

    kept = slots >= 0
    keys[slots[kept].long()] = rotated(k, k_weight)[kept].to(keys.dtype)
    values[slots[kept].long()] = v[kept]
    return rotated(q, q_weight).to(qkv.dtype)


def latent_rope_cache(
    q: Tensor,
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    latents: Tensor,
    weight: Tensor,
    eps: float,
    *,
    interleaved: bool = False,
) -> None:
    """Rotate the queries in place, and store latent vectors and keys."""
    wide, rotary_dim, kept = torch.promote_types(q.dtype, torch.float32), cos.shape[1], slots >= 0
    c, s = (t[:, 0::2] if interleaved else t[:, : rotary_dim // 2] for t in (cos.to(wide), sin.to(wide)))
    q[..., -rotary_dim:] = _rotate(q[..., -rotary_dim:].to(wide), c[:, None], s[:, None], interleaved).to(q.dtype)
    latent = kv[:, :-rotary_dim].to(wide)
    latent = latent * torch.rsqrt(latent.square().mean(-1, keepdim=True) + eps) * weight.to(wide)
    both = torch.cat((latent, _rotate(kv[:, -rotary_dim:].to(wide), c, s, interleaved)), -1)
    latents[slots[kept].long(), 0] = both[kept].to(latents.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate pairs of the last dimension: neighbours if interleaved, otherwise one of each half. cos, sin: one angle
    per pair."""
    left, right = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    pair = (left * cos - right * sin, right * cos + left * sin)
    return torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)


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
    """Fill out, and update states and tails, token by token."""
    wide = torch.promote_types(product.dtype, torch.float32)
    (_, heads, key_dim, value_dim), features = states.shape, len(conv)
    keys = (features - heads * value_dim) // 2
    firsts = range(len(before) + 1) if starts is None else starts.tolist()
    for sequence, (at, to) in enumerate(zip(before.tolist(), after.tolist(), strict=True)):
        if to < 0:
            out[firsts[sequence] : firsts[sequence + 1]] = 0
            continue
        tail, state = ((x[at] if at >= 0 else torch.zeros_like(x[0])).to(wide) for x in (tails, states))
        for row in range(firsts[sequence], firsts[sequence + 1]):
            new, z, b, a = product[row].to(wide).split((features, heads * value_dim, heads, heads))
            inputs = torch.cat((tail, new[:, None]), 1)
            mixed = F.silu((inputs * conv[:, 0].to(wide)).sum(1))
            q, k, v = (
                part.unflatten(0, (-1, n))
                for part, n in zip(
                    mixed.split((keys, keys, heads * value_dim)), (key_dim, key_dim, value_dim), strict=True
                )
            )
            q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
            q, k = (x.repeat_interleave(heads // len(x), 0) for x in (q * key_dim**-0.5, k))
            state = state * (-decay.to(wide).exp() * F.softplus(a + bias.to(wide))).exp()[:, None, None]
            correction = b.sigmoid()[:, None] * (v - torch.einsum("hkv,hk->hv", state, k))
            state = state + k[:, :, None] * correction[:, None]
            seen = torch.einsum("hkv,hk->hv", state, q)
            seen = seen * torch.rsqrt(seen.square().mean(-1, keepdim=True) + eps) * weight.to(wide)
            out[row] = (seen * F.silu(z.unflatten(0, (heads, -1)))).flatten()
            tail = inputs[:, 1:]
        states[to], tails[to] = state.to(states.dtype), tail.to(tails.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """Return the normalised rows. Updates the residual in place."""
    wide = torch.promote_types(x.dtype, torch.float32)
    value = x.to(wide)
    if residual is not None:
        value = residual.copy_(residual.to(wide) + value).to(wide)
    return (value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps) * weight.to(wide)).to(x.dtype)


def sample(
    logits: Tensor,
    temperature: Tensor,
    seed: Tensor,
    position: Tensor,
    live: int,
    *,
    min_p: Tensor | None = None,
    first: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return (value `[rows]`, token int32 `[rows]`). The noise is the kernel's, up to rounding of logarithms."""
    value, vocabulary = logits.float(), logits.shape[1]
    value = torch.where(value.isnan(), float("-inf"), value)
    hot = temperature > 0
    scaled = value / temperature.clamp(min=1e-5)[:, None]
    if min_p is not None:
        threshold = scaled.amax(-1, keepdim=True) + min_p.log()[:, None]
        scaled = torch.where((min_p > 0)[:, None] & (scaled < threshold), float("-inf"), scaled)
    value = torch.where(hot[:, None], scaled + gumbel(seed, position, first, vocabulary), value)
    best = value.amax(-1)
    token = (value == best[:, None]).int().argmax(-1) + first
    best[live:], token[live:] = float("-inf"), -1
    return best, token.int()


def cut(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Return (bool `[rows, vocabulary]`, float64 of that shape): tokens that top_k and then top_p keep, by a sort; and
    for the tokens that top_k keeps, the probability of all tokens before, 1 for the rest. Greedy rows keep all."""
    vocabulary, tokens = logits.shape[1], torch.arange(logits.shape[1], device=logits.device)
    scaled = logits.float() / temperature.clamp(min=1e-5)[:, None]
    scaled = torch.where(scaled.isnan(), float("-inf"), scaled)
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    behind = tokens >= torch.where(top_k > 0, top_k, vocabulary)[:, None]
    weight = torch.where(ordered == ordered[:, :1], 1.0, (ordered.double() - ordered[:, :1]).exp())  # of ∞ and ∞, too
    probability = weight.masked_fill(behind, 0.0) / weight.masked_fill(behind, 0.0).sum(-1, keepdim=True)
    before = (probability.cumsum(-1) - probability).masked_fill(behind, 1.0)
    gone = (behind | ((before >= top_p[:, None]) & (top_p < 1)[:, None])) & (tokens > 0)
    gone &= (temperature > 0)[:, None]
    return torch.zeros_like(gone).scatter_(-1, order, ~gone), torch.zeros_like(before).scatter_(-1, order, before)


def gumbel(seed: Tensor, position: Tensor, first: int, count: int) -> Tensor:
    """Return Gumbel noise float32 `[rows, count]` of the tokens from `first` on. It depends on (seed, position, token)
    alone."""
    zero = torch.zeros_like(seed)
    key = _philox(seed & _MASK, (seed >> 32) & _MASK, position.long() & _MASK, position.long() >> 32 & _MASK)[0]
    token = torch.arange(first, first + count, device=seed.device)
    words = _philox(key[:, None], zero[:, None], token[None] // 4, zero[:, None])
    bits = torch.stack(words).gather(0, (token % 4).expand(1, len(seed), count))[0]
    signed = torch.where(bits >= 1 << 31, bits - (1 << 32), bits)
    uniform = torch.where(signed < 0, -signed - 1, signed).float() * 4.6566127342e-10
    return -(-torch.log1p(-uniform.clamp(min=4.66e-10))).log()


_MASK = 0xFFFFFFFF


def _philox(k0: Tensor, k1: Tensor, c0: Tensor, c1: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute Philox4x32-10 (Salmon et al., SC 2011) of 32-bit words held in int64; counters 2 and 3 are zero."""

    def product(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
        low, high = a * (b & 0xFFFF), a * (b >> 16)  # 48 bits each: a whole product takes 64
        return (high + (low >> 16)) >> 16, (((high & 0xFFFF) << 16) + low) & _MASK

    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0)
    for _ in range(10):
        (high_a, low_a), (high_b, low_b) = product(0xD2511F53, c0), product(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def step_in(
    rows: Tensor, places: Tensor, drafts: Tensor, live: int, last_token: Tensor, length: Tensor, entries: Tensor,
    steps: Tensor, groups: Sequence[tuple[int, bool]], page_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (tokens, positions, lengths, entries, slots), as `step.StepInputs`; −1 for entries that the kernel does
    not write and for slots that are not used. groups: (width of the table, whether it has states) of each group."""
    capacity, begin = len(rows), 0
    steps += 1
    tokens, positions, lengths = (torch.zeros(capacity, dtype=torch.int64, device=rows.device) for _ in range(3))
    found = torch.full((capacity, entries.shape[1]), -1, dtype=torch.int32, device=rows.device)
    slots = torch.full((len(groups), 2, capacity), -1, dtype=torch.int64, device=rows.device)
    for i, row in enumerate(rows[:live].tolist()):
        tokens[i] = drafts[i] if places[i] else last_token[row].clamp(min=0)
        positions[i] = length[row] + places[i]
        lengths[i] = positions[i] + 1
    for group, (width, state) in enumerate(groups):
        for i, row in enumerate(rows[:live].tolist()):
            table, (page, offset) = entries[row, begin : begin + width], divmod(int(positions[i]), page_size)
            if state:
                slots[group, :, i] = table
            else:
                found[i, begin : begin + page + 1] = table[: page + 1]
                slots[group, 0, i] = table[page] * page_size + offset
        begin += width
    return tokens, positions, lengths.int(), found, slots


def step_out(
    rows: Tensor, live: int, decode_rows: int, candidates: Tensor, lengths: Tensor, last_token: Tensor, length: Tensor,
    tokens: Tensor, steps: Tensor, token_ring: Tensor,
) -> None:  # fmt: skip
    """Update in place: the state, the tokens, and the step's row of `token_ring`."""
    tokens[: len(rows)] = -1
    for i, row in enumerate(rows[:live].tolist()):
        found = candidates[:, i].reshape(-1, 2)
        best = found[found[:, 0] == found[:, 0].max(), 1].min().int()
        last_token[row] = tokens[i] = torch.where((last_token[row] < 0) & (i < decode_rows), -1, best)
        token_ring[steps % len(token_ring), i] = tokens[i]
        length[row] = lengths[i]
