"""Expanded keys and values of prompts against their definition in float64, over memory where all else is NaN."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpu import definitions
from gpu.triton_checks.test_decode_attention import PAGE, TOLERANCE, close
from gpu.triton_checks.test_prefill_attention import Step
from weft.engine.kernels.triton import latent_prompts as kernels
from weft.engine.kernels.triton.prefill_attention import PrefillTile, expanded_prefill_attention, prefill_attention

SPANS = ((1, 9), (5, 40), (2, 17), (0, 3), (33, 120), (1, 0), (70, 0))
"""(rows, context) of each sequence; every second one of several rows has a base."""
LATENT, ROTARY, N, VALUE, HEADS = 40, 8, 20, 12, 3
TILES = {torch.float32: PrefillTile(16, 16, 4, 1), torch.float16: PrefillTile(32, 32, 4, 2)}


def expanded_by(latents: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """(keys, values) of all slots, each head's own."""
    both = torch.einsum("sw,hcw->shc", latents[:, 0, :LATENT], up)
    rotated = latents[:, :, LATENT:].expand(-1, HEADS, -1)
    return torch.cat((both[..., :N], rotated), -1), both[..., N:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_prompts_with_expanded_keys(dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(3)
    step = Step(SPANS, 1, LATENT + ROTARY, dtype, device)
    rows, latents = len(step.limits), step.cache
    up = (torch.randn(HEADS, N + VALUE, LATENT, device=device) / 6).to(dtype)
    q = torch.randn(rows, HEADS, N + ROTARY + 3, device=device).to(dtype)[..., : N + ROTARY]
    bases = torch.tensor([-1, 0, -1, -1, 128, -1, 384], dtype=torch.int32, device=device)
    lengths = torch.tensor([a + b for a, b in SPANS], dtype=torch.int32, device=device)
    live = torch.tensor([454], dtype=torch.int32, device=device)
    expanded = torch.full((600, HEADS, N + VALUE), float("nan"), dtype=dtype, device=device)
    kernels.expand_latents(latents, step.pages, bases, lengths, live, PAGE, up, expanded)
    out = torch.full((rows, HEADS, VALUE), -7.0, dtype=dtype, device=device)
    where = step.pages, step.starts, step.limits
    expanded_prefill_attention(
        q[..., :N], q[..., N:], expanded, latents[..., LATENT:], *where, bases, PAGE, 0.3, out, tile=TILES[dtype]
    )
    chosen = (bases >= 0)[step.sequence]
    keys, values = expanded_by(latents.double(), up.double())
    pages = step.pages[step.sequence]
    wanted, _ = definitions.decode_attention(q.double(), keys, values, pages, step.limits, PAGE, 0.3)
    assert close(out[chosen], wanted[chosen], 2 * TOLERANCE[dtype]) and (out[~chosen] == -7).all()
    # The other prompts, by the launch that leaves these out.
    absorbed = torch.cat((torch.einsum("thn,hnw->thw", q[..., :N], up[:, :N]), q[..., N:]), -1)
    seen = torch.full((rows, HEADS, LATENT), -7.0, dtype=dtype, device=device)
    prefill_attention(absorbed, latents, latents[..., :LATENT], *where, PAGE, 0.3, seen, bases=bases)
    others = step.several & ~chosen
    found = torch.einsum("thw,hvw->thv", seen.double(), up[:, N:].double())
    assert close(found[others], wanted[others], 2 * TOLERANCE[dtype]) and (seen[~others] == -7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_projections_of_some_rows(dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(4)
    rows = 150
    up = torch.randn(HEADS, N + VALUE, LATENT, device=device).to(dtype)
    wanted = torch.rand(rows, device=device) < 0.1
    wanted[64:128] = False
    for weight in (up[:, :N], up[:, N:].transpose(1, 2)):
        x = torch.randn(rows, HEADS, weight.shape[1] + 5, device=device).to(dtype)[..., : weight.shape[1]]
        x[~wanted] = float("nan")
        out = torch.full((rows, HEADS, weight.shape[2]), -7.0, dtype=dtype, device=device)
        kernels.project_heads(x, weight, wanted, out)
        product = torch.einsum("thd,hdc->thc", x.double(), weight.double())
        assert torch.allclose(
            out[wanted].double(), product[wanted], rtol=2e-3, atol=4e-2 if dtype.itemsize < 4 else 1e-4
        )
        assert (out[~wanted] == -7).all()


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    step = Step(((2, 0),), 1, LATENT + ROTARY, torch.float32, device)
    up, out = torch.zeros(HEADS, N + VALUE, LATENT, device=device), torch.zeros(128, HEADS, N, device=device)
    with pytest.raises(ValueError, match="must be alike"):
        kernels.expand_latents(step.cache, step.pages, step.starts, step.starts, step.starts, PAGE, up, out)
    with pytest.raises(ValueError, match="x is"):
        kernels.project_heads(out, up, step.several, out)
