"""Attention over dealt tokens is attention over all of them: every boundary, prompts among answers, padding rows."""

from __future__ import annotations

import pytest

from attention.oracle import make_case, padded
from dcp.dealt import run_dealt
from weft.attention.sdpa import SDPA
from weft.dcp.interleave import Interleave
from weft.kv.cache_spec import Latent, PagedKV

DEALS = [Interleave(2, 1, 4), Interleave(2, 4, 4), Interleave(4, 2, 4), Interleave(3, 4, 4)]
SPECS = [PagedKV(1, 8), Latent(12, 8)]


def borders(deal: Interleave) -> list[tuple[int, int]]:
    """A decode step of sequences that end around every border: of a rank's run, of a turn, of a page."""
    lengths = {place * deal.run for place in range(deal.ranks)} | {deal.run * deal.ranks, deal.span, 2 * deal.span}
    return [(1, n - 1) for n in sorted({n + d for n in lengths for d in (-1, 0, 1)}) if n > 0]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("deal", DEALS, ids=str)
def test_answers_of_every_length(deal: Interleave, spec: PagedKV | Latent) -> None:
    spans = borders(deal)
    case = make_case(spans, seed=deal.run, page=deal.span, heads=2 * deal.ranks, spec=spec)
    for way in ("ag_rs", "a2a", "fused"):
        run_dealt(SDPA, case, spans, deal, way)
    run_dealt(SDPA, padded(case, len(spans) + 3), spans, deal)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("deal", DEALS, ids=str)
@pytest.mark.parametrize("max_bytes", [None, 1500])
def test_prompts_and_answers(deal: Interleave, spec: PagedKV | Latent, max_bytes: int | None) -> None:
    """Chunks on top of what is cached, whole prompts, and answers between them; gathered or merged, at once or in
    pieces.
    """
    spans = [(1, 12), (6, 2), (1, 0), (4, 0), (5, 31), (1, 30), (2, 0)]
    case = make_case(spans, seed=deal.ranks, page=deal.span, heads=deal.ranks, spec=spec)
    run_dealt(SDPA, case, spans, deal, max_bytes=max_bytes)
    for way in ("ag_rs", "fused"):
        run_dealt(SDPA, case, spans, deal, way, max_bytes, "merge")
