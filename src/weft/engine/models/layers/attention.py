"""Grouped-query attention with the families' additions: norms of heads, windows, output gates, sinks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from weft.engine.attention.caches import StepCaches
from weft.engine.attention.projections import HeadSplit
from weft.engine.kernels.ops import gate_heads, norm_by_squares, sums_of_squares
from weft.engine.kernels.split_k import SplitKPartials
from weft.engine.kv.cache_spec import PagedKV, Window
from weft.engine.models.layers.basic import Builder, ColumnLinear, HeadNorm, Layer, Out, RowLinear
from weft.engine.models.layers.decoder import on_group_rows
from weft.engine.models.layers.rotary import RotaryTable
from weft.engine.models.weights.source import PartOfGroups, Source
from weft.planner.recipes import Gather
from weft.stream.hidden import Hidden


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Norms of queries and keys per head. less_one: as in `RMSNorm`. whole: over all heads jointly, not less_one."""

    eps: float
    less_one: bool = False
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of a layer, summed over all ranks. dim: elements of a head.

    Args:
        window: a row sees itself and the window − 1 tokens before it.
        bias: biases of query, key and value.
        gate: sigmoid of another projection that scales each head of the output ("head", checkpoint `g_proj`) or each
            element ("element", stored per head after the queries in `q_proj`).
        sinks: each query head has a learnt score for a token without a value, which takes a share of the softmax (arXiv
            2309.17453).
    """

    query: int
    kv: int
    dim: int
    norms: HeadNorms | None = None
    window: int | None = None
    bias: bool = False
    output_bias: bool = False
    gate: Literal["head", "element"] | None = None
    sinks: bool = False


SQUARES = Gather("sums of squares", 8)
"""Float32 sums of squares of a row's queries and of its keys."""


class WholeNorms(Layer):
    """RMSNorm over all query heads jointly, and over all key heads, with heads split over attn_tp.

    The mean of squares is over the heads of all ranks, which gather their sums of squares (`weft.planner.recipes`). Of
    neighbouring ranks with the same heads, only the first one counts. outs: outputs of the projection for queries and
    keys.
    """

    def __init__(self, b: Builder, path: str, outs: Sequence[Out], eps: float):
        super().__init__(path)
        self.eps, self.ranks = eps, b.mesh.size("attn_tp")
        shares = [out.share(b, "attn_tp") for out in outs]
        self.sizes = tuple(share.stop - share.start for share in shares)
        self.features = tuple(out.features for out in outs)
        self.shares = tuple(
            min(o.features // o.unit, self.ranks) if o.replicate else self.ranks // o.shared_by for o in outs
        )
        self.weight = b.empty(sum(self.sizes))
        sources, start = list[Source](), 0
        self.sources["weight"] = sources
        for name, out, share, size in zip(("q_norm", "k_norm"), outs, shares, self.sizes, strict=True):
            at = (slice(start, start + size),)
            sources.append(Source(f"{path}.{name}.weight", (out.features,), (share,), at))
            start += size

    def forward(self, qkv: Tensor, x: Hidden) -> Tensor:
        """Normalise queries and keys `[T, features]` in place. x: input of their projection."""
        squares = sums_of_squares(qkv, self.sizes)
        if self.ranks > 1:
            assert x.exchanges is not None
            squares = x.exchanges.gather(SQUARES, "attn_tp", squares, (len(qkv),) * self.ranks)
        of_ranks = squares.view(self.ranks, len(qkv), 2)
        return norm_by_squares(qkv, of_ranks, self.weight, self.sizes, self.features, self.shares, self.eps)


class Attention(Layer):
    """Attention of each query head to the keys and values of its group's head. Heads are split over attn_tp. With fewer
    key-value heads than ranks, several ranks hold the same one. inputs: elements of its input; None: its width."""

    def __init__(self, b: Builder, path: str, width: int, heads: Heads, inputs: int | None = None):
        super().__init__(path)
        self.dim, self.scale = heads.dim, heads.dim**-0.5
        queries, values = heads.query * heads.dim, heads.kv * heads.dim
        shared_by = b.queries_shared_by if heads.window is None else 1  # tokens of windows are not sharded
        self.gathered = shared_by > 1
        q = Out(f"{path}.q_proj", queries, unit=heads.dim, shared_by=shared_by, groups=heads.kv)
        k, v = (Out(f"{path}.{name}_proj", values, unit=heads.dim, replicate=True) for name in "kv")
        outs = [q, k, v]
        if heads.gate == "head":
            outs.append(Out(f"{path}.g_proj", heads.query, groups=heads.kv))
        elif heads.gate == "element":
            of_query, of_gate = (PartOfGroups(start, heads.dim, 2 * heads.dim) for start in (0, heads.dim))
            outs = [replace(q, views=(of_query,)), k, v, replace(q, views=(of_gate,), shared_by=1)]
        self.qkv = ColumnLinear(b, f"{path}.qkv", inputs or width, outs, over="attn_tp", bias=heads.bias)
        self.sizes = self.qkv.sizes[:3]
        kv = self.sizes[1] // heads.dim
        self.cache = PagedKV(kv, heads.dim) if heads.window is None else Window(heads.window, kv, heads.dim)
        self.out = RowLinear(
            b, f"{path}.o_proj", queries, width, over="attn_tp", unit=heads.dim, bias=heads.output_bias, groups=heads.kv
        )
        self.sinks = None
        if heads.sinks:
            share = b.share(f"{path} (heads)", heads.query, "attn_tp", groups=heads.kv)
            self.sinks = b.empty(share.stop - share.start)
            self.sources["sinks"] = [Source(f"{path}.sinks", (heads.query,), (share,))]
        self.q_norm = self.k_norm = self.whole_norms = None
        if heads.norms is not None and heads.norms.whole:
            self.whole_norms = WholeNorms(b, path, outs[:2], heads.norms.eps)
        elif heads.norms is not None:
            eps, less_one = heads.norms.eps, heads.norms.less_one
            self.q_norm, self.k_norm = (
                HeadNorm(b, f"{path}.{name}", heads.dim, eps, less_one) for name in ("q_norm", "k_norm")
            )

    def forward(self, x: Hidden, rotary: RotaryTable, caches: StepCaches) -> Hidden:
        on_group_rows(self.path, x)
        norms = (self.q_norm, self.k_norm) if self.q_norm is not None and self.k_norm is not None else None
        heads = HeadSplit(self.sizes, self.dim, rotary, norms, self.gathered)

        def attend(qkv: Tensor | SplitKPartials, gate: Tensor | None = None) -> Tensor:
            if self.whole_norms is not None:
                qkv = self.whole_norms(qkv.total() if isinstance(qkv, SplitKPartials) else qkv, x)
            out, lse = caches.project(self, qkv, heads, scale=self.scale, lse=self.sinks is not None)
            if gate is not None or self.sinks is not None:
                out = gate_heads(out, gate, lse, self.sinks)
            return out.flatten(1)

        if len(self.qkv.sizes) == len(self.sizes):
            return self.out(self.qkv.feed(x, attend, self.path))
        parts = [sum(self.sizes), sum(self.qkv.sizes[3:])]
        return self.out(self.qkv(x).elementwise(lambda both: attend(*both.split(parts, dim=-1)), self.path))
