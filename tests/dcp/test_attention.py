"""Attention over sharded tokens is attention over all of them: at every boundary, with prompts and padding rows."""

from __future__ import annotations

import pytest
import torch

from attention.oracle import make_case, padded
from dcp.interleaved import run_interleaved
from weft.engine.attention.backend_registry import TORCH
from weft.engine.kv.cache_spec import Latent, PagedKV
from weft.kernels.float8 import FLOAT8
from weft.stream.interleave import Interleave

INTERLEAVES = [Interleave(2, 1, 4), Interleave(2, 4, 4), Interleave(4, 2, 4), Interleave(3, 4, 4)]
SPECS = [PagedKV(1, 8), Latent(12, 8)]


def borders(interleave: Interleave) -> list[tuple[int, int]]:
    """A decode step of sequences that end around every border: of a rank's chunk, of a round, of a page."""
    lengths = {place * interleave.chunk for place in range(interleave.ranks)} | {
        interleave.chunk * interleave.ranks,
        interleave.span,
        2 * interleave.span,
    }
    return [(1, n - 1) for n in sorted({n + d for n in lengths for d in (-1, 0, 1)}) if n > 0]


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, FLOAT8], ids=str)
"""Dtypes of the cache."""


@DTYPES
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("interleave", INTERLEAVES, ids=str)
def test_decode_rows_of_every_length(interleave: Interleave, spec: PagedKV | Latent, dtype: torch.dtype) -> None:
    spans, heads = borders(interleave), 2 * interleave.ranks
    case = make_case(spans, seed=interleave.chunk, page=interleave.span, heads=heads, spec=spec, dtype=dtype)
    for recipe in ("ag_rs", "a2a", "fused"):
        run_interleaved(TORCH.make, case, spans, interleave, recipe)
    run_interleaved(TORCH.make, padded(case, len(spans) + 3), spans, interleave)


@DTYPES
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("interleave", INTERLEAVES, ids=str)
@pytest.mark.parametrize("max_bytes", [None, 1500])
def test_prompts_and_decode_rows(
    interleave: Interleave, spec: PagedKV | Latent, max_bytes: int | None, dtype: torch.dtype
) -> None:
    """Chunks on top of what is cached, whole prompts, and decode rows between them; gathered or merged, at once or in
    pieces.
    """
    spans = [(1, 12), (6, 2), (1, 0), (4, 0), (5, 31), (1, 30), (2, 0)]
    ranks = interleave.ranks
    case = make_case(spans, seed=ranks, page=interleave.span, heads=ranks, spec=spec, dtype=dtype)
    run_interleaved(TORCH.make, case, spans, interleave, max_bytes=max_bytes)
    for recipe in ("ag_rs", "fused"):
        run_interleaved(TORCH.make, case, spans, interleave, recipe, max_bytes, "merge")
