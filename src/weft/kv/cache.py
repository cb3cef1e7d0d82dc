"""The tensors of caches (paged: the layout of vLLM's paged attention, arXiv 2309.06180)."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.kv.cache_spec import Latent, PagedKV, Recurrent, Window


class KVCache:
    """One rank's keys `[layers, slots, heads, dim]` and values, of layers that declared the same cache.

    A slot is page · page_size + offset. Behind the `num_pages` that are handed out lies one page more, which takes
    the rows that are to be stored nowhere, on devices where leaving them out would need the host. The values of a
    latent cache are a part of its keys.
    """

    def __init__(
        self,
        spec: PagedKV | Window | Latent,
        layers: int,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ):
        self.spec, self.num_pages, self.page_size = spec, num_pages, page_size
        slots = (num_pages + 1) * page_size
        if isinstance(spec, Latent):
            self.keys = torch.zeros(layers, slots, 1, spec.width, dtype=dtype, device=device)
            self.values = self.keys[..., : spec.value_width]
        else:
            self.keys = torch.zeros(layers, slots, spec.heads, spec.dim, dtype=dtype, device=device)
            self.values = torch.zeros_like(self.keys)

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Its keys and values, `[slots, heads, dim]` each."""
        return self.keys[layer], self.values[layer]

    @property
    def window(self) -> int | None:
        """How many tokens a row sees, its own included; None: all up to itself."""
        return self.spec.size if isinstance(self.spec, Window) else None

    def writable(self, slots: Tensor) -> Tensor:
        """Slots `[T]` with −1 replaced by one that no sequence reads."""
        return torch.where(slots < 0, self.num_pages * self.page_size, slots)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor | None) -> None:
        """Stores `[T, heads, dim]` at `writable` slots `[T]`; values: None in a latent cache."""
        self.keys[layer].index_copy_(0, slots, keys)
        if values is not None:
            self.values[layer].index_copy_(0, slots, values)

    def copy(self, sources: Tensor, destinations: Tensor) -> None:
        """Copies pages `[N]` onto others: all are read before any is written."""
        for kept in (self.keys,) if isinstance(self.spec, Latent) else (self.keys, self.values):
            pages = kept.unflatten(1, (-1, self.page_size))
            pages.index_copy_(1, destinations, pages.index_select(1, sources))


class StateCache:
    """One rank's recurrent states, of layers that declared the same: a float32 tensor `[layers, slots, …]` a shape.

    Behind the slots that are handed out lie two more: one of zeros, which is where every sequence begins, and one that
    takes the states of padding sequences.
    """

    def __init__(self, spec: Recurrent, layers: int, slots: int, device: torch.device | str = "cpu"):
        self.spec, self.slots = spec, slots
        self.states = [torch.zeros(layers, slots + 2, *shape, device=device) for shape in spec.shapes]

    def load(self, layer: int, slots: Tensor) -> tuple[Tensor, ...]:
        """The states of slots `[B]`, `[B, …]` each; −1: zeros."""
        at = torch.where(slots < 0, self.slots, slots)
        return tuple(s[layer].index_select(0, at) for s in self.states)

    def store(self, layer: int, slots: Tensor, states: tuple[Tensor, ...]) -> None:
        """Writes states `[B, …]` to slots `[B]`; −1: nowhere."""
        at = torch.where(slots < 0, self.slots + 1, slots)
        for kept, state in zip(self.states, states, strict=True):
            kept[layer].index_copy_(0, at, state.float())
