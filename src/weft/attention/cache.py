"""Paged keys and values (the layout of vLLM's paged attention, arXiv 2309.06180)."""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """One rank's keys and values: for each layer `[slots, kv_heads, head_dim]`, addressed by slot.

    A slot is page · page_size + offset. Behind the `num_pages` that are handed out lies one page more, which takes
    the rows that are to be stored nowhere, on devices where leaving them out would need the host.
    """

    def __init__(
        self,
        layers: int,
        num_pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ):
        self.num_pages, self.page_size = num_pages, page_size
        shape = (layers, (num_pages + 1) * page_size, kv_heads, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes on this rank, all layers."""
        layers, _, heads, dim = self.keys.shape
        return 2 * layers * heads * dim * self.keys.element_size()

    def writable(self, slots: Tensor) -> Tensor:
        """Slots `[T]` with −1 replaced by one that no sequence reads."""
        return torch.where(slots < 0, self.num_pages * self.page_size, slots)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Stores `[T, kv_heads, head_dim]` at `writable` slots `[T]`."""
        self.keys[layer].index_copy_(0, slots, keys)
        self.values[layer].index_copy_(0, slots, values)
