"""Definitions of the models' kernels in plain torch. Tests compare kernels with them, and CPUs run them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.engine.kernels.side_stream import nothing
from weft.engine.kernels.split_k import SplitKPartials
from weft.planner.shards import first_holders
from weft.stream.formats import QuantisedWeight


def sums_of_squares(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return float32 or float64 `[T, 2]`: sums of squares of two parts of each row, the first sizes[0] features and the
    next sizes[1]. x: `[T, features]`."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return torch.stack([part.square().sum(-1) for part in wide[:, : sum(sizes)].split(list(sizes), dim=-1)], dim=-1)


def norm_by_squares(
    x: Tensor,
    squares: Tensor,
    weight: Tensor,
    sizes: Sequence[int],
    features: Sequence[int],
    shares: Sequence[int],
    eps: float,
) -> Tensor:
    """Apply `rms_norm` in place to two parts of each row, which are split over ranks.

    Args:
        x: `[T, features]`: this rank's sizes[0] features of the first part and sizes[1] of the second, then others.
        squares: `[ranks, T, 2]`, each rank's `sums_of_squares`.
        weight: `[sum(sizes)]`, of x's dtype.
        features: features of the whole parts.
        shares: number of different shares of each part. If they are fewer than ranks, neighbours have the same one
            (`weft.planner.shards.replicated`), and only the first of them counts.
    """
    begin, ranks = 0, len(squares)
    for part, (size, whole, count) in enumerate(zip(sizes, features, shares, strict=True)):
        at, firsts = slice(begin, begin + size), first_holders(count, ranks)
        wide = x[:, at].to(squares.dtype)
        normed = wide * torch.rsqrt(squares[firsts, :, part].sum(0)[:, None] / whole + eps)
        x[:, at] = weight[at] * normed.to(x.dtype)
        begin += size
    return x


def linear(x: Tensor, weight: Tensor, out: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """Return x Wᵀ + bias of x `[rows, inputs]`, weight `[outputs, inputs]`, bias `[outputs]`, in out if it is given."""
    if out is None:
        return F.linear(x, weight, bias)
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


def multiply_heads(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """Fill and return out `[T, heads, columns]`: out[t, h] = x[t, h] · weight[h]. x: `[T, heads, depth]`. weight:
    `[heads, depth, columns]`."""
    torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))
    return out


def linear_or_partials(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor | SplitKPartials:
    """Return `linear`, or split-K partials on GPUs if the next kernel sums them. dtype: of the result and of the
    arithmetic; None: x's."""
    if dtype is None:
        return F.linear(x, weight, bias)
    if not len(x):  # a trace, which need not convert weights
        return x.new_empty(0, len(weight), dtype=dtype)
    return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def rounded(x: Any, weight: Tensor | QuantisedWeight, dtype: torch.dtype) -> Tensor:
    """Return rows as a weight's product reads them: quantised, unless they are, and dequantised. x: `[rows, inputs]`,
    or rows in the weight's format."""
    if isinstance(weight, Tensor):
        return cast(Tensor, x)
    if weight.format is None:
        return cast(Tensor, x.to(dtype))
    rows = weight.format.make(x) if isinstance(x, Tensor) else x
    return cast(Tensor, weight.format.dequantise(rows, dtype))


def linear_quantised(x: Any, weight: QuantisedWeight, out: Tensor) -> Tensor:
    """Compute x Wᵀ in float32; fill and return out `[rows, outputs]`. x: as in `rounded`."""
    wide = torch.float32
    return out.copy_(rounded(x, weight, wide) @ weight.dequantise(wide).mT) if out.shape[0] else out


def logits(x: Tensor, weight: Tensor) -> Tensor:
    """Return x Wᵀ of the head, `[rows, vocabulary]`, by the GPU library on GPUs."""
    return F.linear(x, weight)


def embed(tokens: Tensor, weight: Tensor, first: int | None = None) -> Tensor:
    """Return rows of the embedding, `[T, width]`, for int64 tokens `[T]`. weight: `[held, width]`. first: the weight's
    first token in a split vocabulary. Rows of tokens on other ranks are 0."""
    if first is None:
        return F.embedding(tokens, weight)
    elsewhere = (tokens < first) | (tokens >= first + len(weight))
    return F.embedding((tokens - first).masked_fill(elsewhere, 0), weight).masked_fill(elsewhere[:, None], 0.0)


def join(left: Tensor, right: Tensor) -> Tensor:
    """Return rows of left and right `[T, …]` next to each other."""
    return torch.cat((left, right), -1)


def cos_sin(
    positions: Tensor, inverse: Tensor, factor: float, dtype: torch.dtype, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Return cos and sin times factor, `[T, 1, 2 · n]` each, of the angles positions · inverse (arXiv 2104.09864). Each
    angle occurs twice: in neighbouring elements if interleaved, else once per half.

    Args:
        positions: int64 `[T]`.
        inverse: float32 `[n]`, inverse frequencies.
    """
    angles = positions[:, None, None].float() * inverse
    angles = angles.repeat_interleave(2, dim=-1) if interleaved else torch.cat((angles, angles), dim=-1)
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def gated(
    x: Tensor, limit: float | None = None, alpha: float | None = None, score: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Return silu(gate) · up of `[…, 2 · inner]`, gate first.

    Args:
        limit: maximum of silu(gate); up is clamped to ± limit.
        alpha: requires a limit. Then the result is gate · sigmoid(alpha · gate) · (up + 1), where gate is at most the
            limit and up is clamped to ± limit.
        score: (rows `[T, width]`, weight `[1, width]`) for x `[T, …]`: the sigmoid of their product scales each row
            too.
    """
    gate, up = x.chunk(2, dim=-1)
    if limit is None:
        value = F.silu(gate) * up
    elif alpha is not None:
        gate = gate.clamp(max=limit)
        value = gate * (alpha * gate).sigmoid() * (up.clamp(-limit, limit) + 1)
    else:
        value = F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)
    if score is None:
        return value
    factor = F.linear(*score).sigmoid()
    return value * factor.view(-1, *[1] * (x.dim() - 1))


def gate_heads(
    out: Tensor, gate: Tensor | None = None, lse: Tensor | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Apply a sink and a gate to attention's output `[T, heads, dim]`.

    Args:
        sinks: `[heads]`, scores of one more token without a value: a sink adds to the sum of exponentials, and so
            scales the output (arXiv 2309.17453). Requires lse `[T, heads]`, the log-sum-exp of the other tokens'
            scores.
        gate: `[T, heads]` or `[T, heads · dim]`: its sigmoid scales each head, or each element.
    """
    if sinks is not None and lse is not None:
        out = out * (lse - sinks).sigmoid().to(out.dtype)[..., None]
    if gate is not None:
        out = out * gate.sigmoid().unflatten(-1, (out.shape[1], -1))
    return out


class Rule(Protocol):
    """Rule that chooses k experts per token, and their weights.

    Attributes:
        score: "softmax" or "sigmoid" of the token's logits. The k experts of the greatest score (+ bias) are chosen.
        groups: number of groups of consecutive experts. Experts are chosen from the `top_groups` groups with the
            greatest sum of their `group_best` greatest scores.
        renormalise: divide the weights, which are the scores, by their sum.
        scale: final factor of the weights.
    """

    @property
    def k(self) -> int: ...
    @property
    def score(self) -> str: ...
    @property
    def groups(self) -> int: ...
    @property
    def top_groups(self) -> int: ...
    @property
    def group_best(self) -> int: ...
    @property
    def renormalise(self) -> bool: ...
    @property
    def scale(self) -> float: ...


Chosen = tuple[Tensor, Tensor]
"""(weight float32 `[T, k]`, expert int32 or int64 `[T, k]`), in no particular order. On GPUs `route` and `route_chosen`
return a `weft.engine.kernels.triton.route.Routing` instead, which `experts` accepts there."""


def choose(
    logits: Tensor | SplitKPartials, rule: Rule, live: Tensor | None = None, *, bias: Tensor | None = None
) -> Chosen:
    """Return the experts of tokens with logits `[T, E]`. bias: `[E]`. live: int32 `[1]`, number of rows that are
    tokens; None: all. Other rows get expert −1 on GPUs, else any."""
    logits = (logits.total() if isinstance(logits, SplitKPartials) else logits).float()
    scores = logits.softmax(-1) if rule.score == "softmax" else logits.sigmoid()
    ranked = scores if bias is None else scores + bias
    if rule.groups > 1:
        by_group = ranked.unflatten(-1, (rule.groups, -1))
        best = by_group.topk(rule.group_best, dim=-1).values.sum(-1).topk(rule.top_groups, dim=-1).indices
        out = torch.ones(by_group.shape[:2], dtype=torch.bool, device=logits.device).scatter_(1, best, False)
        ranked = by_group.masked_fill(out[..., None], -inf).flatten(1)
    expert = ranked.topk(rule.k, dim=-1).indices
    weight = scores.gather(-1, expert)
    if rule.renormalise:
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)  # all sigmoids may be 0
    return weight * rule.scale, expert


def route(
    logits: Tensor | SplitKPartials, rule: Rule, live: Tensor | None, mine: range, quantised: bool, bias: Tensor | None
) -> Chosen:
    """Apply `choose` for `experts`. mine: this rank's experts; results count from the first of them. quantised: their
    weights are."""
    return route_chosen(*choose(logits, rule, live, bias=bias), live, mine, quantised)


def route_chosen(weight: Tensor, expert: Tensor, live: Tensor | None, mine: range, quantised: bool) -> Chosen:
    """Like `route`, for experts that are already chosen; −1: none."""
    return weight, expert - mine.start


def experts(
    x: Any,
    chosen: Chosen,
    gate_up: Tensor | QuantisedWeight,
    down: Tensor | QuantisedWeight,
    out: Tensor,
    *,
    limit: float | None = None,
    alpha: float | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    add: bool = False,
    wait: Callable[[], None] = nothing,
) -> Tensor:
    """Fill and return out `[T, width]`: Σ of weight · down(gated(gate_up(x))) over a token's experts on this rank. With
    quantised weights the rows of both products may be quantised too, and sums are in float32.

    Args:
        x: `[T, width]`, or rows in the format of quantised weights.
        chosen: result of `route`; an index outside `[0, E)` is an expert of another rank.
        gate_up: `[E, 2·inner, width]`, gate's rows first.
        down: `[E, width, inner]`.
        limit, alpha: as in `gated`.
        gate_up_bias, down_bias: `[E, 2·inner]`, `[E, width]`.
        add: add the sum to the values of out.
        wait: called once, before out is read or written (`weft.engine.kernels.side_stream`).
    """
    wait()
    quantised, (weight, expert) = not isinstance(gate_up, Tensor), chosen
    dtype = torch.promote_types(out.dtype, torch.float32) if quantised else out.dtype
    total = torch.zeros_like(out, dtype=dtype) if add or quantised else out.zero_()
    if not len(out):
        return out
    k, held = expert.shape[1], gate_up.shape[0]
    weights = weight.to(out.dtype).to(dtype).flatten()[:, None]

    def product(rows: Tensor, weight: Tensor | QuantisedWeight, e: int, bias: Tensor | None) -> Tensor:
        each = weight[e] if isinstance(weight, Tensor) else weight.dequantise(dtype, e)
        return F.linear(rows, each, None if bias is None else bias[e].to(dtype))

    given = rounded(x, gate_up, dtype)
    pairs, order = expert.flatten().sort(stable=True)
    numbers, sizes = pairs.unique_consecutive(return_counts=True)
    for e, at in zip(numbers.tolist(), order.split(sizes.tolist()), strict=True):
        if 0 <= e < held:
            token = at // k
            inner = gated(product(given[token], gate_up, e, gate_up_bias), limit, alpha)
            inner = product(rounded(inner, down, dtype), down, e, down_bias)
            total.index_add_(0, token, inner * weights[at])
    return out if total is out else out.add_(total.to(out.dtype)) if add else out.copy_(total)
