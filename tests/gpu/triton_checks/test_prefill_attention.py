"""Attention of prompts against its definition in float64, over memory where all that must not be read is NaN."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpu import definitions
from gpu.triton_checks.test_decode_attention import PAGE, TOLERANCE, close, paged
from weft.engine.kernels.triton.prefill_attention import PrefillTile, prefill_attention
from weft.kernels.float8 import Stored

SPANS = ((5, 40), (1, 9), (33, 0), (0, 3), (2, 17), (1, 0), (70, 21))
"""(rows, context) of each sequence."""


class Step:
    """A step's tensors: the rows of each sequence are its last tokens."""

    def __init__(
        self, spans: tuple[tuple[int, int], ...], heads: int, dim: int, dtype: torch.dtype, device: torch.device
    ):
        self.cache, self.pages, _ = paged(tuple(a + b for a, b in spans), heads, dim, dtype, device)
        counts = torch.tensor([rows for rows, _ in spans])
        self.starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int().to(device)
        limits = [context + i + 1 for rows, context in spans for i in range(rows)]
        self.limits = torch.tensor(limits, dtype=torch.int32, device=device)
        self.sequence = torch.repeat_interleave(torch.arange(len(spans)), counts).to(device)
        self.several = torch.repeat_interleave(counts > 1, counts).to(device)


def attend(
    step: Step, q: Tensor, keys: Stored, values: Stored, window: int | None = None, tile: PrefillTile | None = None
) -> tuple[Tensor, Tensor]:
    """(output, lse), −7 where nothing was written."""
    out = torch.full((*q.shape[:2], values.shape[2]), -7.0, dtype=q.dtype, device=q.device)
    lse = torch.full(q.shape[:2], -7.0, device=q.device)
    where = (step.pages, step.starts, step.limits, PAGE, 0.3)
    prefill_attention(q, keys, values, *where, out, window=window, lse=lse, tile=tile)
    return out, lse


def compare(step: Step, q: Tensor, keys: Tensor, values: Tensor, window: int | None, tile: PrefillTile | None) -> None:
    out, lse = attend(step, q, keys, values, window, tile)
    wide = (x.double() for x in (q, keys, values))
    wanted, wanted_lse = definitions.decode_attention(*wide, step.pages[step.sequence], step.limits, PAGE, 0.3, window)
    several = step.several
    assert close(out[several], wanted[several], TOLERANCE[q.dtype])
    assert torch.allclose(lse[several].double(), wanted_lse[several], rtol=1e-5, atol=TOLERANCE[q.dtype])
    assert (out[~several] == -7).all() and (lse[~several] == -7).all(), "a sequence of one row was touched"


@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("dtype, tile", [(torch.float32, None), (torch.float16, PrefillTile(64, 32, 4, 2))], ids=str)
def test_prompts(dtype: torch.dtype, tile: PrefillTile | None, window: int | None, device: torch.device) -> None:
    step = Step(SPANS, 4, 24, dtype, device)
    q = torch.randn(len(step.limits), 6, 24, device=device).to(dtype)
    if window is not None:  # pages that no row's window reaches are given back
        for sequence, (_, context) in enumerate(SPANS):
            step.pages[sequence, : max(0, context + 1 - window) // PAGE] = -(1 << 24)
    compare(step, q, step.cache[:, :2], step.cache[:, 2:], window, tile)


def test_latents(device: torch.device) -> None:
    step = Step(((5, 20), (1, 2), (4, 0)), 1, 24, torch.float32, device)
    q = torch.randn(len(step.limits), 20, 24, device=device)
    compare(step, q, step.cache, step.cache[..., :16], None, PrefillTile(16, 16, 4, 1))  # heads in two blocks


def test_a_row_has_the_same_bits_however_its_prompt_is_cut(device: torch.device) -> None:
    whole = Step(((61, 0),), 2, 16, torch.float32, device)
    q = torch.randn(61, 4, 16, device=device)
    keys, values = whole.cache[:, :1], whole.cache[:, 1:]
    for window in (None, 9):
        together = attend(whole, q, keys, values, window)
        for begin, end in ((0, 23), (23, 25), (25, 61)):
            chunk = Step(((end - begin, begin),), 2, 16, torch.float32, device)
            chunk.pages = whole.pages
            alone = attend(chunk, q[begin:end].clone(), keys, values, window)
            assert all(torch.equal(a, b[begin:end]) for a, b in zip(alone, together, strict=True))


def test_rows_that_see_nothing(device: torch.device) -> None:
    step = Step(((4, 0),), 2, 16, torch.float32, device)
    step.limits[:] = torch.tensor([0, 0, 1, 1], device=device)  # as where other ranks hold the other tokens
    q = torch.randn(4, 4, 16, device=device)
    out, lse = attend(step, q, step.cache[:, :1], step.cache[:, 1:])
    assert (out[:2] == 0).all() and (lse[:2] == float("-inf")).all()
    first = step.pages[0, 0].long() * PAGE
    assert torch.allclose(out[2:], step.cache[first, 1].expand(2, 4, 16), rtol=1e-6)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    step = Step(((2, 0),), 2, 16, torch.float32, device)
    q = torch.randn(2, 4, 16, device=device)
    with pytest.raises(ValueError, match="must be alike"):
        attend(step, q.half(), step.cache, step.cache)
    with pytest.raises(ValueError, match="q is"):
        attend(step, q[:, :3], step.cache, step.cache)
