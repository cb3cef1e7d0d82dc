"""Format of a cached token that the ranks of a dcp group gather: everything that a layer has of it, as one row."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.engine.kv.cache import KVCache, token_bytes
from weft.engine.kv.cache_spec import Latent, PagedKV
from weft.kernels.float8 import FLOAT8, Fp8Vectors, Stored
from weft.planner.recipes import UNIT_BYTES


def gathered_bytes(spec: PagedKV | Latent, dtype: torch.dtype) -> int:
    """Return the bytes of a cached token that ranks gather. In FP8 exponents follow, padded to units of 16 bytes."""
    size = token_bytes(spec, dtype)
    return size if dtype != FLOAT8 else -(-size // UNIT_BYTES) * UNIT_BYTES


def rows_of(cache: KVCache, layer: int) -> list[Tensor]:
    """Return a layer's cached slots as rows of one dtype, `[slots, width]` each."""
    rows = [stored[layer].flatten(1) for stored in cache.tensors]
    return rows if cache.exponents is None else [x.view(torch.uint8) for x in rows]


def row_widths(cache: KVCache) -> list[int]:
    """Return the elements of each of `rows_of`, and in FP8 the padding of a gathered token to units of 16 bytes."""
    widths = [x[0].flatten(1).shape[1] for x in cache.tensors]
    return widths if cache.exponents is None else [*widths, -sum(widths) % UNIT_BYTES]


def vectors_of(cache: KVCache, rows: Tensor) -> tuple[Stored, Stored]:
    """Return the keys and values of gathered tokens. rows: the concatenation of `row_widths` elements."""
    (heads, dim), latent = cache.keys.shape[2:], isinstance(cache.spec, Latent)
    parts = rows.split(row_widths(cache), dim=1)
    vectors = [x.view(cache.keys.dtype).unflatten(1, (heads, dim)) for x in parts[: 2 - latent]]
    keys, values = vectors[0], vectors[-1][..., : cache.values.shape[-1]]
    if cache.exponents is None:
        return keys, values
    exponents = [x.view(torch.int8) for x in parts[2 - latent : len(cache.tensors)]]
    return Fp8Vectors(keys, exponents[0]), Fp8Vectors(values, exponents[-1])
