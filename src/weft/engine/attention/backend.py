"""The interface of attention over a paged cache, for all libraries that implement it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from weft.engine.attention.forward_batch import Batch, PageTables
from weft.engine.kernels import ops
from weft.engine.kernels.split_k import SplitKPartials
from weft.engine.kv.cache import KVCache


class RotaryTable(Protocol):
    """A rotary embedding's table: cos, sin `[T, 1, dim]`; rotates `[T, heads, dim]`."""

    @property
    def cos(self) -> Tensor: ...

    @property
    def sin(self) -> Tensor: ...

    @property
    def interleaved(self) -> bool: ...

    @property
    def halves(self) -> tuple[Tensor, Tensor]:
        """cos and sin `[T, dim / 2]`: one for each pair of elements that is rotated."""

    def __call__(self, x: Tensor) -> Tensor: ...


class NormScale(Protocol):
    """A norm over the last dimension of `[T, heads, dim]`, with a weight `[dim]`."""

    @property
    def weight(self) -> Tensor: ...

    @property
    def eps(self) -> float: ...

    def __call__(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """How `[T, features]` becomes queries, keys and values: `sizes` features of each, in heads of `dim`. Each head of
    queries and keys is normalised, where there are norms, and rotated. gathered: as `Backend.attend`, for the queries.
    """

    sizes: Sequence[int]
    dim: int
    rotary: RotaryTable
    norms: tuple[NormScale, NormScale] | None
    gathered: bool = False

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, `[T, heads, dim]` each."""
        q, k, v = (part.unflatten(-1, (-1, self.dim)) for part in qkv.split(list(self.sizes), dim=-1))
        if self.norms is not None:
            q, k = self.norms[0](q), self.norms[1](k)
        return self.rotary(q), self.rotary(k), v


@dataclass(frozen=True, slots=True)
class LatentSplit:
    """How queries `[T, heads · dim]` and the cached vectors `[T, width]` become the inputs of latent attention.

    The last elements of a vector, and of each head's query, are rotated; the other elements of a vector are normalised.
    gathered: as `Backend.attend`.
    """

    dim: int
    rotary: RotaryTable
    norm: NormScale
    gathered: bool = False

    def split(self, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Queries `[T, heads, dim]` and keys `[T, 1, width]`."""
        (left, rest), (latent, key) = (
            x.tensor_split([x.shape[-1] - self.rotary.cos.shape[-1]], dim=-1)
            for x in (q.unflatten(-1, (-1, self.dim)), kv[:, None])
        )
        return torch.cat((left, self.rotary(rest)), dim=-1), torch.cat((self.norm(latent), self.rotary(key)), dim=-1)


@dataclass(frozen=True, slots=True)
class Absorbed:
    """The projections from a latent vector to heads' keys and values, applied to the query and to the output.

    keys: `[heads, n, width]`, the factor of a query's first n elements; None: queries are projected already. values:
    `[heads, value dim, width]`, the factor of the output. Both are linear in each head, so ranks that hold parts of the
    tokens exchange the narrower side: queries before and outputs after. There they are of all heads of a dcp group.
    up: both side by side, `[heads, n + value dim, width]`, for prompts with expanded tokens. plain: `[T, heads,
    n]`, the first elements of queries before the projection; given where only those of rows that attend absorbed are
    projected.
    """

    keys: Tensor | None
    values: Tensor
    up: Tensor | None = None
    plain: Tensor | None = None

    def part(self, place: int, parts: int) -> Absorbed:
        """The heads of the rank at `place` of so many."""
        keys, up = (None if x is None else x.chunk(parts)[place] for x in (self.keys, self.up))
        return Absorbed(keys, self.values.chunk(parts)[place], up)

    def query(self, q: Tensor) -> Tensor:
        """`[T, heads, n + rest]` → `[T, heads, width + rest]`."""
        if self.keys is None:
            return q
        first, rest = q.tensor_split([self.keys.shape[1]], dim=-1)
        return torch.cat((torch.einsum("thn,hnw->thw", first, self.keys), rest), dim=-1)

    def output(self, out: Tensor) -> Tensor:
        """`[T, heads, width]` → `[T, heads, value dim]`."""
        seen = out.new_empty(*out.shape[:2], self.values.shape[1])
        return ops.multiply_heads(out, self.values.transpose(1, 2), seen)


class Backend(Protocol):
    """Causal grouped-query attention of a step's rows over a paged cache.

    A backend is made once, with its cache. `plan` once a step; then each layer stores its rows and attends. Inside a
    CUDA graph plans are captured, or replayed with the same tensors: nothing is read back from the device where
    `Batch.spans` is None. layer: its place in the cache.
    """

    @property
    def cache(self) -> KVCache: ...

    def plan(self, batch: Batch, tables: PageTables) -> Any:
        """The shared values of all layers of this step, immutable. tables: those of the cache's group."""

    def store(self, plan: Any, layer: int, k: Tensor, v: Tensor | None) -> None:
        """Stores k and v `[T, kv_heads, D]`; a row with slot −1 is not stored.

        For a latent cache k is `[T, 1, width]`, and v None.
        """

    def store_projected(self, plan: Any, layer: int, qkv: Tensor | SplitKPartials, heads: HeadSplit) -> Tensor:
        """`store` from queries, keys and values side by side, `[T, features]` or its parts. They are still to be added
        up, split, normalised and rotated as `heads` says: one kernel can do that together with the write to the cache.
        Returns the queries.
        """
        ...

    def store_latent(
        self, plan: Any, layer: int, q: Tensor, kv: Tensor, parts: LatentSplit, absorbed: Absorbed
    ) -> tuple[Tensor, Absorbed]:
        """`store` for a latent cache, from queries `[T, heads · dim]` and vectors `[T, width]`, which are still to be
        normalised and rotated as `parts` says. q may be overwritten. Returns the queries, and the projections that
        remain to be absorbed.
        """
        ...

    def attend(
        self,
        plan: Any,
        layer: int,
        q: Tensor,
        scale: float,
        lse: bool,
        absorbed: Absorbed | None,
        gathered: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Attends with q `[T, heads, D]`: a row sees its sequence's tokens up to itself, within the cache's window if
        it has one.

        scale: of the scores q·k. absorbed: for a latent cache, the remaining projections of query and output.
        gathered: q has the heads of all ranks of a dcp group, in rank order; the output has this rank's in any case.

        Returns the output `[T, heads, value dim]`, and where `lse` is set also the natural logarithm of the sum of
        exponentials of each row's scaled scores, float32 `[T, heads]`; else None. A row that sees nothing (length 0)
        has output 0 and lse −inf.
        """
        ...
