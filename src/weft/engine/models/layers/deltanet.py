"""Gated DeltaNet (arXiv 2412.06464): linear attention with a state that decays and is corrected by each token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.engine.attention.caches import StepCaches
from weft.engine.kernels.ops import gated_delta
from weft.engine.kv.cache_spec import Recurrent
from weft.engine.models.layers.basic import Builder, ColumnLinear, HeadNorm, Layer, Out, RowLinear
from weft.engine.models.layers.decoder import on_group_rows
from weft.engine.models.layers.rotary import RotaryTable
from weft.engine.models.weights.source import Fused, PartOfGroups, Source
from weft.stream.hidden import Hidden


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """Heads of a layer, summed over all ranks. Neighbouring value heads share a key head and its query.

    Args:
        window: tokens that the convolution reads, including a row's own.
        by_key_head: checkpoints store the projections in two tensors, grouped by key head (Qwen3-Next).
    """

    key: int
    value: int
    key_dim: int
    value_dim: int
    window: int
    by_key_head: bool = False


class GatedDeltaNet(Layer):
    """Short convolution over each feature of queries, keys and values, the gated delta rule, and a gated norm.

    Value heads are split over attn_tp, and with them the state: float32 `[value heads, key_dim, value_dim]`, and the
    last window − 1 inputs of the convolution. With fewer key heads than ranks, several ranks hold the same one.
    """

    def __init__(self, b: Builder, path: str, width: int, heads: DeltaHeads, eps: float):
        super().__init__(path)
        keys, values = heads.key * heads.key_dim, heads.value * heads.value_dim
        fused = [Fused(start, 2 * keys + values) for start in (0, keys, 2 * keys)]
        outs = _by_key_head(path, heads) if heads.by_key_head else _consecutive(path, heads, fused)
        self.project = ColumnLinear(b, f"{path}.in_proj", width, outs, over="attn_tp")
        self.sizes, features = self.project.sizes, sum(self.project.sizes[:3])
        self.conv = b.empty(features, 1, heads.window)
        sources, start = list[Source](), 0
        self.sources["conv"] = sources
        for out, view in zip(outs[:3], fused, strict=True):
            share = out.share(b, "attn_tp")
            at = (slice(start, start + share.stop - share.start),)
            shape = (out.features, 1, heads.window)
            sources.append(Source(f"{path}.conv1d.weight", shape, (share,), at, (view,)))
            start = at[0].stop
        mine = b.share(f"{path} (heads)", heads.value, "attn_tp", groups=heads.key)
        held = mine.stop - mine.start
        self.decay, self.bias = (b.empty(held, dtype=torch.float32) for _ in range(2))
        self.sources["decay"] = [Source(f"{path}.A_log", (heads.value,), (mine,))]
        self.sources["bias"] = [Source(f"{path}.dt_bias", (heads.value,), (mine,))]
        self.norm = HeadNorm(b, f"{path}.norm", heads.value_dim, eps)
        self.out = RowLinear(
            b, f"{path}.out_proj", values, width, over="attn_tp", unit=heads.value_dim, groups=heads.key
        )
        self.cache = Recurrent(((held, heads.key_dim, heads.value_dim), (features, heads.window - 1)), by_starts=True)

    def forward(self, x: Hidden, rotary: RotaryTable, caches: StepCaches) -> Hidden:
        on_group_rows(self.path, x)
        (states, tails), slots = caches.states_and_slots(self)

        def run(product: Tensor) -> Tensor:
            out = product.new_empty(len(product), self.sizes[3])
            gated_delta(
                product,
                caches.batch.starts,
                slots.before,
                slots.after,
                self.conv,
                self.decay,
                self.bias,
                self.norm.weight,
                self.norm.eps,
                states,
                tails,
                out,
            )
            return out

        return self.out(self.project(x).elementwise(run, self.path))


def _consecutive(path: str, heads: DeltaHeads, fused: list[Fused]) -> list[Out]:
    """Return the projections to queries, keys, values, output gate, correction strength and decay, in consecutive
    tensors."""
    keys, values, name = heads.key * heads.key_dim, heads.value * heads.value_dim, f"{path}.in_proj_qkv"
    return [
        Out(name, keys, heads.key_dim, replicate=True, views=(fused[0],)),
        Out(name, keys, heads.key_dim, replicate=True, views=(fused[1],)),
        Out(name, values, heads.value_dim, views=(fused[2],), groups=heads.key),
        Out(f"{path}.in_proj_z", values, heads.value_dim, groups=heads.key),
        Out(f"{path}.in_proj_b", heads.value, groups=heads.key),
        Out(f"{path}.in_proj_a", heads.value, groups=heads.key),
    ]


def _by_key_head(path: str, heads: DeltaHeads) -> list[Out]:
    """Return the same projections, grouped by key head."""
    keys, values, share = heads.key * heads.key_dim, heads.value * heads.value_dim, heads.value // heads.key
    key, value, (qkvz, ba) = heads.key_dim, share * heads.value_dim, (f"{path}.in_proj_qkvz", f"{path}.in_proj_ba")
    starts, stride = (0, key, 2 * key, 2 * key + value), 2 * key + 2 * value
    q, k, v, z = (PartOfGroups(at, size, stride) for at, size in zip(starts, (key, key, value, value), strict=True))
    return [
        Out(qkvz, keys, heads.key_dim, replicate=True, views=(q,)),
        Out(qkvz, keys, heads.key_dim, replicate=True, views=(k,)),
        Out(qkvz, values, heads.value_dim, views=(v,), groups=heads.key),
        Out(qkvz, values, heads.value_dim, views=(z,), groups=heads.key),
        Out(ba, heads.value, views=(PartOfGroups(0, share, 2 * share),), groups=heads.key),
        Out(ba, heads.value, views=(PartOfGroups(share, share, 2 * share),), groups=heads.key),
    ]
