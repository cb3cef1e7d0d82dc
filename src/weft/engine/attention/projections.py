"""Projections of a layer, split into queries and rows of its cache.

On a GPU one kernel sums split-K partials, splits, normalises, rotates and writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from weft.engine.kernels import cpu_ops, ops
from weft.engine.kernels.split_k import SplitKPartials
from weft.engine.kv.cache import KVCache
from weft.kernels.stream_ops import on_gpu


class RotaryTable(Protocol):
    """Table of a rotary embedding: cos, sin `[T, 1, dim]`; rotates `[T, heads, dim]`."""

    @property
    def cos(self) -> Tensor: ...

    @property
    def sin(self) -> Tensor: ...

    @property
    def interleaved(self) -> bool: ...

    @property
    def halves(self) -> tuple[Tensor, Tensor]:
        """cos and sin `[T, dim / 2]`, one entry per rotated pair of elements."""

    def __call__(self, x: Tensor) -> Tensor: ...


class NormScale(Protocol):
    """Norm over the last dimension of `[T, heads, dim]`, with a weight `[dim]`."""

    @property
    def weight(self) -> Tensor: ...

    @property
    def eps(self) -> float: ...

    def __call__(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """Split of `[T, features]` into queries, keys and values: `sizes` features of each, in heads of `dim`. Heads of
    queries and keys are normalised if there are norms, then rotated. gathered: see `Queries`."""

    sizes: Sequence[int]
    dim: int
    rotary: RotaryTable
    norms: tuple[NormScale, NormScale] | None
    gathered: bool = False

    def store(self, cache: KVCache, layer: int, slots: Tensor, qkv: Tensor | SplitKPartials) -> Tensor:
        """Store keys and values, and return queries `[T, heads, D]`.

        Args:
            cache: cache of keys and values.
            layer: index in the cache.
            slots: int32 or int64 `[T]`; −1: not stored.
            qkv: `[T, features]` or its split-K partials.
        """
        q_norm, k_norm = self.norms or (None, None)
        if not on_gpu(qkv):
            whole = qkv.total() if isinstance(qkv, SplitKPartials) else qkv
            if (rotated := self._store_on_cpu(cache, layer, slots, whole)) is not None:
                return rotated
            q, k, v = (part.unflatten(-1, (-1, self.dim)) for part in whole.split(list(self.sizes), dim=-1))
            if q_norm is not None and k_norm is not None:
                q, k = q_norm(q), k_norm(k)
            cache.write(layer, slots, self.rotary(k), v)
            return self.rotary(q)
        from weft.engine.kernels.triton.norm_rope_cache import norm_rope_cache  # a CPU need not have Triton

        queries: Tensor = self._store_by(norm_rope_cache, cache, layer, slots, qkv)
        return queries

    def _store_on_cpu(self, cache: KVCache, layer: int, slots: Tensor, qkv: Tensor) -> Tensor | None:
        """Apply `store` by one kernel; None: it does not cover these arguments."""
        unused = cache.num_pages * cache.page_size
        queries: Tensor | None = self._store_by(
            partial(cpu_ops.norm_rope_cache, unused=unused), cache, layer, slots, qkv
        )
        return queries

    def _store_by(self, kernel: Callable[..., Any], cache: KVCache, layer: int, slots: Tensor, qkv: Any) -> Any:
        q_norm, k_norm = self.norms or (None, None)
        return kernel(
            qkv,
            self.sizes[0] // self.dim,
            *self.rotary.halves,
            slots,
            *cache.of_layer(layer),
            q_weight=None if q_norm is None else q_norm.weight,
            k_weight=None if k_norm is None else k_norm.weight,
            eps=0.0 if q_norm is None else q_norm.eps,
            interleaved=self.rotary.interleaved,
        )


@dataclass(frozen=True, slots=True)
class Absorbed:
    """Projections from a latent vector to heads' keys and values, applied to the query and to the output.

    Both are linear in each head, so ranks with sharded tokens exchange the narrower side: queries before their
    projection and outputs after it. After the exchange, projections have the heads of all ranks of the dcp group.

    Args:
        keys: `[heads, n, width]`, factor of a query's first n elements; None: queries are projected already.
        values: `[heads, value dim, width]`, factor of the output.
        up: both next to each other, `[heads, n + value dim, width]`, for prompts with expanded tokens.
        plain: `[T, heads, n]`, first elements of queries before the projection, if only some rows are projected.
    """

    keys: Tensor | None
    values: Tensor
    up: Tensor | None = None
    plain: Tensor | None = None

    def part(self, place: int, parts: int) -> Absorbed:
        """Return the heads of the rank at `place` of `parts`."""
        keys, up = (None if x is None else x.chunk(parts)[place] for x in (self.keys, self.up))
        return Absorbed(keys, self.values.chunk(parts)[place], up)

    def first(self, q: Tensor) -> Tensor:
        """Return `[T, heads, n]`: first elements of queries before the projection."""
        if self.keys is not None:
            return q[..., : self.keys.shape[1]]
        assert self.plain is not None
        return self.plain

    def query(self, q: Tensor, rows: Tensor | None = None) -> Tensor:
        """Project `[T, heads, n + rest]` to `[T, heads, width + rest]`. rows: bool `[T]`, the rows to project; None:
        all."""
        if self.keys is None:
            return q
        n, width = self.keys.shape[1:]
        first, rest = q.tensor_split([n], dim=-1)
        whole = q.new_empty(*q.shape[:2], width + q.shape[2] - n)
        _multiply(first, self.keys, rows, whole[..., :width])
        whole[..., width:] = rest
        return whole

    def output(self, out: Tensor, rows: Tensor | None = None, to: Tensor | None = None) -> Tensor:
        """Project `[T, heads, width]` to `[T, heads, value dim]`. rows: see `query`. to: filled and returned."""
        to = out.new_empty(*out.shape[:2], self.values.shape[1]) if to is None else to
        _multiply(out, self.values.transpose(1, 2), rows, to)
        return to


def _multiply(x: Tensor, weight: Tensor, rows: Tensor | None, out: Tensor) -> None:
    if rows is None:
        ops.multiply_heads(x, weight, out)
    elif on_gpu(x):
        from weft.engine.kernels.triton.latent_prompts import project_heads  # a CPU need not have Triton

        project_heads(x, weight, rows, out)
    else:
        out[rows] = torch.einsum("thd,hdc->thc", x[rows], weight)


@dataclass(frozen=True, slots=True)
class LatentSplit:
    """Split of queries `[T, heads · dim]` and cached vectors `[T, width]` into the inputs of latent attention.

    The last elements of a vector, and of each head's query, are rotated; the other elements of a vector are normalised.
    gathered: see `Queries`.
    """

    dim: int
    rotary: RotaryTable
    norm: NormScale
    gathered: bool = False

    def split(self, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries `[T, heads, dim]` and keys `[T, 1, width]`."""
        (left, rest), (latent, key) = (
            x.tensor_split([x.shape[-1] - self.rotary.cos.shape[-1]], dim=-1)
            for x in (q.unflatten(-1, (-1, self.dim)), kv[:, None])
        )
        return torch.cat((left, self.rotary(rest)), dim=-1), torch.cat((self.norm(latent), self.rotary(key)), dim=-1)

    def store(
        self,
        cache: KVCache,
        layer: int,
        slots: Tensor,
        q: Tensor,
        kv: Tensor,
        absorbed: Absorbed | None = None,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Absorbed | None]:
        """Store vectors, and return queries `[T, heads, D]` and the projections that remain to be applied.

        Args:
            cache, layer, slots: as in `HeadSplit.store`; the cache holds latent vectors.
            q: `[T, heads · dim]`, may be overwritten.
            kv: `[T, width]`.
            absorbed: projections that may be applied to the queries; None: none.
            rows: bool `[T]`, rows with queries to project; None: all.
        """
        if not on_gpu(q):
            q, key = self.split(q, kv)
            cache.write(layer, slots, key, None)
            return q, absorbed
        from weft.engine.kernels.triton.norm_rope_cache import latent_rope_cache  # a CPU need not have Triton

        q, rotary, norm = q.unflatten(-1, (-1, self.dim)), self.rotary, self.norm
        where = rotary.cos[:, 0], rotary.sin[:, 0], slots, cache.of_layer(layer)[0]
        store = partial(latent_rope_cache, q, kv, *where, norm.weight, norm.eps, interleaved=rotary.interleaved)
        if absorbed is None or absorbed.keys is None:
            store()
            return q, absorbed
        # Both parts of a query are written next to each other; a concatenation would copy them.
        n, width = absorbed.keys.shape[1:]
        first, whole = q[..., :n], q.new_empty(*q.shape[:2], width + self.dim - n)
        store(q_rotated=whole[..., width:])
        _multiply(first, absorbed.keys, rows, whole[..., :width])
        return whole, Absorbed(None, absorbed.values, absorbed.up, None if rows is None else first)
