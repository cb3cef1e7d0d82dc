"""What every implementation of attention over a paged cache does, whichever library it stands on."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from weft.attention.batch import Batch, PageTables
from weft.kv.cache import KVCache


class Backend(Protocol):
    """Causal grouped-query attention of a step's rows over a paged cache: `plan` once a step, then a call a layer.

    A backend is made once, with its cache. Inside a CUDA graph `plan` is captured or replayed with the same tensors:
    it reads nothing back from the device where `Batch.spans` is None.
    """

    cache: KVCache

    def plan(self, batch: Batch, tables: PageTables) -> None:
        """Prepares what all layers of this step share. tables: those of the cache's group."""

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, *, scale: float, lse: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Stores k and v `[T, kv_heads, D]`, then attends with q `[T, heads, D]`.

        layer: its place in the cache. v is None for a latent cache, whose k is `[T, 1, width]`. scale: of the scores
        q·k. A row sees its sequence's tokens up to itself, within the cache's window if it has one; a row whose slot
        is −1 is not stored.

        Gives the output `[T, heads, value dim]`, and where `lse` is set also the logarithm, to base e, of the sum of
        exponentials of each row's scaled scores, float32 `[T, heads]`; else None. A row that sees nothing (length 0)
        has output 0 and lse −inf.
        """
        ...
