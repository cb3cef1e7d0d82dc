"""Gated DeltaNet (arXiv 2412.06464): linear attention with a state that decays and is corrected by each token."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.attention.caches import StepCaches
from weft.hidden import Hidden
from weft.kv.cache_spec import Recurrent
from weft.models.decoder import on_group_rows
from weft.models.layers import Builder, ColumnLinear, HeadNorm, Layer, Out, RowLinear
from weft.models.rotary import RotaryTable
from weft.models.source import Fused, PartOfGroups, Source

CHUNK, CHUNKS = 64, 16
"""Tokens of a chunk, which solves all their corrections at once; chunks that are prepared at once."""


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """The heads of a layer, summed over all ranks. Neighbouring value heads share a key head and its query.

    window: tokens that the convolution reads, a row's own included.
    by_key_head: checkpoints store the projections in two tensors, key head by key head (Qwen3-Next).
    """

    key: int
    value: int
    key_dim: int
    value_dim: int
    window: int
    by_key_head: bool = False


class GatedDeltaNet(Layer):
    """A short convolution over each feature of queries, keys and values, the gated delta rule, and a norm after a gate.

    Value heads are split over attn_tp, and with them the state: float32 `[value heads, key_dim, value_dim]`, and the
    last window − 1 inputs of the convolution. Where there are fewer key heads than ranks, several ranks hold the same
    one.

    Prompts are computed in plain torch on all devices, in chunks of `CHUNK` tokens; on GPUs a sequence's single token
    is computed by Triton kernels, which update the states in place.
    """

    def __init__(self, b: Builder, path: str, width: int, heads: DeltaHeads, eps: float):
        super().__init__(path)
        self.heads, self.in_place = heads, b.device.type == "cuda"
        keys, values = heads.key * heads.key_dim, heads.value * heads.value_dim
        fused = [Fused(start, 2 * keys + values) for start in (0, keys, 2 * keys)]
        outs = _by_key_head(path, heads) if heads.by_key_head else _one_after_another(path, heads, fused)
        self.project = ColumnLinear(b, f"{path}.in_proj", width, outs, over="attn_tp")
        self.sizes, features = self.project.sizes, sum(self.project.sizes[:3])
        self.conv = b.empty(features, 1, heads.window)
        self.sources["conv"] = []
        start = 0
        for out, view in zip(outs[:3], fused, strict=True):
            share = b.share(out.name, out.features, "attn_tp", out.unit, out.replicate)
            at = (slice(start, start + share.stop - share.start),)
            shape = (out.features, 1, heads.window)
            self.sources["conv"].append(Source(f"{path}.conv1d.weight", shape, (share,), at, (view,)))
            start = at[0].stop
        mine = b.share(f"{path} (heads)", heads.value, "attn_tp")
        held = mine.stop - mine.start
        self.decay, self.bias = (b.empty(held, dtype=torch.float32) for _ in range(2))
        self.sources["decay"] = [Source(f"{path}.A_log", (heads.value,), (mine,))]
        self.sources["bias"] = [Source(f"{path}.dt_bias", (heads.value,), (mine,))]
        self.norm = HeadNorm(b, f"{path}.norm", heads.value_dim, eps)
        self.out = RowLinear(b, f"{path}.out_proj", values, width, over="attn_tp", unit=heads.value_dim)
        self.cache = Recurrent(((held, heads.key_dim, heads.value_dim), (features, heads.window - 1)))

    def forward(self, x: Hidden, rotary: RotaryTable, caches: StepCaches) -> Hidden:
        on_group_rows(self.path, x)

        def run(product: Tensor) -> Tensor:
            out = product.new_empty(len(product), self.sizes[3])
            for rows, sequences, count in equal_spans(caches.batch.spans, len(product)):
                if count == 1 and self.in_place:
                    self._step(product[rows], sequences, caches, out[rows])
                    continue
                state, tail = caches.load(self, sequences)
                seen, state, tail = self._run(product[rows].unflatten(0, (-1, count)), state, tail)
                caches.store(self, (state, tail), sequences)
                out[rows] = seen.flatten(0, 1)
            return out

        return self.out(self.project(x).elementwise(run, self.path))

    def _step(self, product: Tensor, sequences: slice, caches: StepCaches, out: Tensor) -> None:
        """Fills the output of sequences with one row each, `[B, features]`, and updates their states in place."""
        from weft.kernels.triton.delta_step import delta_step  # GPUs only: a CPU need not have Triton

        (states, tails), slots = caches.states_and_slots(self)
        before, after = slots.before[sequences], slots.after[sequences]
        of_layer = (self.conv, self.decay, self.bias, self.norm.weight, self.norm.eps)
        delta_step(product, before, after, *of_layer, states, tails, out)

    def _run(self, product: Tensor, state: Tensor, tail: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The output of sequences with equally many rows, `[B, rows, features]`, and their states after it."""
        h, rows = self.heads, product.shape[1]
        mixed, z, b, a = product.split([sum(self.sizes[:3]), *self.sizes[3:]], dim=-1)
        inputs = torch.cat((tail, mixed.transpose(1, 2).float()), dim=-1)
        # A product a tap: on GPUs convolutions in float32 round their inputs to fewer bits.
        taps = [inputs[..., i : i + rows] * self.conv[:, 0, i, None] for i in range(h.window)]
        mixed = F.silu(torch.stack(taps).sum(0)).transpose(1, 2)
        q, k, v = mixed.split(self.sizes[:3], dim=-1)
        share = self.sizes[4] * h.key_dim // self.sizes[1]  # value heads of a key head
        q, k = (_unit(y.unflatten(-1, (-1, h.key_dim))).repeat_interleave(share, dim=2).transpose(1, 2) for y in (q, k))
        v = v.unflatten(-1, (-1, h.value_dim)).transpose(1, 2)
        beta = b.sigmoid().float().transpose(1, 2)
        decay = (-self.decay.exp() * F.softplus(a.float() + self.bias)).transpose(1, 2)
        seen = []
        for i in range(0, rows, CHUNK * CHUNKS):
            at = slice(i, i + CHUNK * CHUNKS)
            part, state = delta_rule(
                q[:, :, at] * h.key_dim**-0.5, k[:, :, at], v[:, :, at], decay[:, :, at], beta[:, :, at], state
            )
            seen.append(part)
        out = self.norm(torch.cat(seen, dim=2).transpose(1, 2).to(product.dtype)).flatten(2)
        return (out * F.silu(z.float())).to(product.dtype), state, inputs[..., rows:]


def _one_after_another(path: str, heads: DeltaHeads, fused: list[Fused]) -> list[Out]:
    """The projections to queries, keys, values, the output's gate, the corrections' strength and the decay."""
    keys, values, name = heads.key * heads.key_dim, heads.value * heads.value_dim, f"{path}.in_proj_qkv"
    return [
        Out(name, keys, heads.key_dim, replicate=True, views=(fused[0],)),
        Out(name, keys, heads.key_dim, replicate=True, views=(fused[1],)),
        Out(name, values, heads.value_dim, views=(fused[2],)),
        Out(f"{path}.in_proj_z", values, heads.value_dim),
        Out(f"{path}.in_proj_b", heads.value),
        Out(f"{path}.in_proj_a", heads.value),
    ]


def _by_key_head(path: str, heads: DeltaHeads) -> list[Out]:
    """The same projections."""
    keys, values, share = heads.key * heads.key_dim, heads.value * heads.value_dim, heads.value // heads.key
    key, value, (qkvz, ba) = heads.key_dim, share * heads.value_dim, (f"{path}.in_proj_qkvz", f"{path}.in_proj_ba")
    starts, stride = (0, key, 2 * key, 2 * key + value), 2 * key + 2 * value
    q, k, v, z = (PartOfGroups(at, size, stride) for at, size in zip(starts, (key, key, value, value), strict=True))
    return [
        Out(qkvz, keys, heads.key_dim, replicate=True, views=(q,)),
        Out(qkvz, keys, heads.key_dim, replicate=True, views=(k,)),
        Out(qkvz, values, heads.value_dim, views=(v,)),
        Out(qkvz, values, heads.value_dim, views=(z,)),
        Out(ba, heads.value, views=(PartOfGroups(0, share, 2 * share),)),
        Out(ba, heads.value, views=(PartOfGroups(share, share, 2 * share),)),
    ]


def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The gated delta rule over consecutive tokens: (out `[…, rows, V]`, the state after them).

    Token by token it is S ← exp(decay) S; S ← S + k (beta (v − Sᵀ k))ᵀ; out = Sᵀ q. The corrections of a chunk depend
    on one another through a triangular system. Its inverse is computed for all chunks at once; then each chunk takes
    five products (the chunkwise form of arXiv 2406.06484, 2412.06464).

    q, k `[…, rows, K]`; v `[…, rows, V]`; decay (not above 0), beta `[…, rows]`; state `[…, K, V]`; all float32.
    """
    rows = q.shape[-2]
    size = min(CHUNK, rows)
    chunks = -(-rows // size)
    # Tokens that fill the last chunk have no effect: their decay, beta and query are 0.
    q, k, v = (F.pad(x, (0, 0, 0, chunks * size - rows)).unflatten(-2, (chunks, size)) for x in (q, k, v))
    decay, beta = (F.pad(x, (0, chunks * size - rows)).unflatten(-1, (chunks, size)) for x in (decay, beta))
    total = decay.cumsum(-1)
    earlier = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    between = (total[..., :, None] - total[..., None, :]).masked_fill(~earlier, float("-inf")).exp()
    since, last = total.exp()[..., None], total[..., -1:]
    system = beta[..., None] * (k @ k.transpose(-1, -2)) * between  # its diagonal is not read: it counts as 1
    one = torch.eye(size, dtype=q.dtype, device=q.device).expand_as(system)
    inverse = torch.linalg.solve_triangular(system, one, upper=False, unitriangular=True) if size > 1 else one
    wanted, seen = beta[..., None] * v, (beta[..., None] * since) * k
    inside, asked = (q @ k.transpose(-1, -2)) * between, since * q
    kept, keep = (k * (last - total)[..., None].exp()).transpose(-1, -2), last[..., None].exp()
    found = []
    for i in range(chunks):
        new = inverse[..., i, :, :] @ (wanted[..., i, :, :] - seen[..., i, :, :] @ state)
        found.append(asked[..., i, :, :] @ state + inside[..., i, :, :] @ new)
        state = keep[..., i, :, :] * state + kept[..., i, :, :] @ new
    return torch.cat(found, dim=-2)[..., :rows, :], state


def equal_spans(spans: tuple[tuple[int, int], ...] | None, rows: int) -> list[tuple[slice, slice, int]]:
    """(rows, sequences, rows of each sequence) of each call: neighbouring sequences of one row share a call.

    spans: as in `Batch`.
    """
    found: list[tuple[slice, slice, int]] = []
    first = at = 0
    for count, equal in itertools.groupby([1] * rows if spans is None else [count for count, _ in spans]):
        sequences = len(list(equal))
        for many in [sequences] if count == 1 else [1] * sequences:
            if count:
                found.append((slice(first, first + count * many), slice(at, at + many), count))
            first, at = first + count * many, at + many
    return found


def _unit(x: Tensor) -> Tensor:
    """Vectors of length one."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
