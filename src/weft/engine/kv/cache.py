"""Cache tensors (paged: the layout of vLLM's paged attention, arXiv 2309.06180)."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.engine.kv.cache_spec import Latent, PagedKV, Recurrent, Window
from weft.kernels.float8 import FLOAT8, Fp8Vectors, Stored, to_vectors


def token_bytes(spec: PagedKV | Window | Latent, dtype: torch.dtype) -> int:
    """Return the bytes of a token in the cache of a layer. dtype: see `KVCache`."""
    vectors, width = (1, spec.width) if isinstance(spec, Latent) else (2 * spec.heads, spec.dim)
    return vectors * (width * dtype.itemsize + (dtype == FLOAT8))


def state_bytes(spec: Recurrent) -> int:
    """Return the bytes of a sequence's state in a layer."""
    return 4 * sum(torch.Size(shape).numel() for shape in spec.shapes)


class KVCache:
    """Keys `[layers, slots, heads, dim]` and values of one rank, for layers that declared the same cache.

    A slot is page · page_size + offset. One page more follows the `num_pages` that are allocated: it receives rows that
    are not stored, since filtering them would need the host on GPUs. The values of a latent cache are a part of its
    keys.

    Args:
        dtype: dtype of the activations, or float8_e4m3fn. In FP8 each key and value has an exponent (see `Fp8Vectors`):
            `exponents` is `[2, layers, slots, heads]`, or `[1, …]` in a latent cache, where the latent and the rotated
            part of a vector share one (3 bits of mantissa down to 2⁻¹⁴ of the largest element).
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
        latent, slots = isinstance(spec, Latent), (num_pages + 1) * page_size
        heads, dim = (1, spec.width) if isinstance(spec, Latent) else (spec.heads, spec.dim)
        self.keys = torch.zeros(layers, slots, heads, dim, dtype=dtype, device=device)
        self.values = self.keys[..., : spec.value_width] if isinstance(spec, Latent) else torch.zeros_like(self.keys)
        self.exponents: Tensor | None = None
        if dtype == FLOAT8:
            self.exponents = torch.zeros(2 - latent, layers, slots, heads, dtype=torch.int8, device=device)

    def of_layer(self, layer: int) -> tuple[Stored, Stored]:
        """Return the keys and values of a layer, `[slots, heads, dim]` each."""
        keys, values = self.keys[layer], self.values[layer]
        if self.exponents is None:
            return keys, values
        return Fp8Vectors(keys, self.exponents[0, layer]), Fp8Vectors(values, self.exponents[-1, layer])

    @property
    def window(self) -> int | None:
        """Number of tokens that a row sees, including its own; None: all up to its own."""
        return self.spec.size if isinstance(self.spec, Window) else None

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors, `[layers, slots, …]` each. FP8 is viewed as bytes, because torch lacks operations on FP8."""
        stored = [self.keys] if isinstance(self.spec, Latent) else [self.keys, self.values]
        if self.exponents is None:
            return stored
        return [*(x.view(torch.uint8) for x in stored), *self.exponents]

    def readable(self, pages: Tensor) -> Tensor:
        """Return page tables that libraries may read whole, even before a window."""
        return pages if self.window is None else pages.clamp(min=0)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor | None) -> None:
        """Store keys `[T, heads, dim]` of a `layer` at slots `[T]`; −1: not stored. values: None in a latent cache."""
        slots = torch.where(slots < 0, self.num_pages * self.page_size, slots)  # a slot that no sequence reads
        rows = [keys] if values is None else [keys, values]
        if self.exponents is not None:
            vectors = [to_vectors(x) for x in rows]
            rows = [x.values.view(torch.uint8) for x in vectors] + [x.exponents for x in vectors]
        for tensor, new in zip(self.tensors, rows, strict=True):
            tensor[layer].index_copy_(0, slots, new)

    def copy(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy pages `[N]` onto others. All sources are read before the first write."""
        for tensor in self.tensors:
            pages = tensor.unflatten(1, (-1, self.page_size))
            pages.index_copy_(1, destinations, pages.index_select(1, sources))


class StateCache:
    """Recurrent states of one rank, for layers that declared the same: a float32 tensor `[layers, slots, …]` per shape.

    Two slots follow the allocated ones: zeros, the initial state of every sequence, and a slot for the states of
    padding sequences.
    """

    def __init__(self, spec: Recurrent, layers: int, slots: int, device: torch.device | str = "cpu"):
        self.spec, self.slots = spec, slots
        self.states = [torch.zeros(layers, slots + 2, *shape, device=device) for shape in spec.shapes]

    def load(self, layer: int, slots: Tensor) -> tuple[Tensor, ...]:
        """Return the states of slots `[B]`, `[B, …]` each; −1: zeros."""
        at = torch.where(slots < 0, self.slots, slots)
        return tuple(s[layer].index_select(0, at) for s in self.states)

    def store(self, layer: int, slots: Tensor, states: tuple[Tensor, ...]) -> None:
        """Write states `[B, …]` of a `layer` to slots `[B]`; −1: not stored."""
        at = torch.where(slots < 0, self.slots + 1, slots)
        for tensor, state in zip(self.states, states, strict=True):
            tensor[layer].index_copy_(0, at, state.float())
