"""Decode attention against its twin in float64, over memory where all that must not be read is NaN."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpu import definitions
from weft.engine.kernels.triton import decode_attention as kernels
from weft.engine.kernels.triton.splits import order_splits

PAGE = 16
RAGGED = (0, 1, 16, 129, 300)
LONG_AND_SHORT = (128, 0, 129, 5, 700, 193, 192)
"""Whole splits next to shorter and longer ones."""
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}


def paged(
    lengths: tuple[int, ...], heads: int, dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """(cache `[slots, heads, dim]`, pages, lengths): NaN in every slot that no row has; skewed values in the others."""
    per_row = max(1, -(-max(lengths) // PAGE)) + 1
    pages = torch.randperm(len(lengths) * per_row + 3)[: len(lengths) * per_row].view(len(lengths), per_row).int()
    cache = torch.full((int(pages.max() + 1) * PAGE, heads, dim), float("nan"), dtype=dtype)
    for row, length in enumerate(lengths):
        token = torch.arange(length)
        slots = pages[row].long()[token // PAGE] * PAGE + token % PAGE
        cache[slots] = torch.randn(length, heads, dim).mul(torch.rand(length, heads, 1).mul(6).exp() / 20).to(dtype)
        pages[row, -(-length // PAGE) :] = -(1 << 24)  # pages that the row does not have
    return cache.to(device), pages.to(device), torch.tensor(lengths, dtype=torch.int32, device=device)


def close(found: Tensor, wanted: Tensor, tolerance: float) -> bool:
    return bool((found.double() - wanted).norm() <= tolerance * wanted.norm())


@pytest.mark.parametrize(
    "lengths, dtype",
    [*((lengths, torch.float32) for lengths in (RAGGED, (1,), (0, 0), LONG_AND_SHORT)), (RAGGED, torch.float16)],
    ids=str,
)
def test_grouped_query_attention(lengths: tuple[int, ...], dtype: torch.dtype, seed: int, device: torch.device) -> None:
    cache, pages, length = paged(lengths, 4, 48, dtype, device)
    keys, values = cache[:, :2], cache[:, 2:]
    q = torch.randn(len(lengths), 6, 48, device=device).to(dtype)
    q[length == 0] = float("nan")  # a row that is only there to fill the graph
    lse = torch.full((len(lengths), 6), float("nan"), device=device)
    out = torch.full((len(lengths), 6, 48), float("nan"), dtype=dtype, device=device)
    kernels.decode_attention(q, keys, values, pages, length, PAGE, 0.3, out=out, lse=lse)
    wanted, wanted_lse = definitions.decode_attention(
        q.double(), keys.double(), values.double(), pages, length, PAGE, 0.3
    )
    assert close(out, wanted, TOLERANCE[dtype])
    empty = length == 0
    assert (out[empty] == 0).all() and (lse[empty] == float("-inf")).all()
    assert torch.allclose(lse[~empty].double(), wanted_lse[~empty], rtol=1e-5, atol=TOLERANCE[dtype])


def test_latent_attention(seed: int, device: torch.device) -> None:
    latents, pages, length = paged((140, 0, 33), 1, 40, torch.float32, device)
    q = torch.randn(3, 20, 40, device=device)
    found = kernels.latent_decode_attention(q, latents, 32, pages, length, PAGE, 0.2)
    wide = latents.double()
    wanted, _ = definitions.decode_attention(q.double(), wide, wide[..., :32], pages, length, PAGE, 0.2)
    assert close(found, wanted, 2e-6) and (found[1] == 0).all()


@pytest.mark.parametrize("window", [1, 20, 130, 1000])
def test_a_window(window: int, device: torch.device) -> None:
    lengths = (300, 5, 0, 131)
    cache, pages, length = paged(lengths, 2, 32, torch.float32, device)
    q, keys, values = torch.randn(4, 4, 32, device=device), cache[:, :1], cache[:, 1:]
    wide = (x.double() for x in (q, keys, values))
    wanted, wanted_lse = definitions.decode_attention(*wide, pages, length, PAGE, 0.2, window)
    for row, seen in enumerate(lengths):  # pages that no window reaches are given back
        pages[row, : max(0, seen - window) // PAGE] = -(1 << 24)
    lse = torch.full((4, 4), float("nan"), device=device)
    found = kernels.decode_attention(q, keys, values, pages, length, PAGE, 0.2, window=window, lse=lse)
    assert close(found, wanted, 2e-6) and torch.allclose(lse.double(), wanted_lse, rtol=1e-5, atol=1e-5)


def test_a_row_has_the_same_bits_in_any_company_and_order(device: torch.device) -> None:
    cache, pages, length = paged((300, 7, 150, 0), 2, 32, torch.float32, device)
    q = torch.randn(4, 4, 32, device=device)
    keys, values = cache[:, :1], cache[:, 1:]
    together = kernels.decode_attention(q, keys, values, pages, length, PAGE, 0.2)
    for row in range(4):
        at = slice(row, row + 1)
        alone = kernels.decode_attention(q[at], keys, values, pages[at], length[at], PAGE, 0.2)
        assert torch.equal(alone, together[at])
    for programs in (1, 3):  # they take turns at the splits, and the last turn has too few for all
        few = kernels.tile_of(32, 4)._replace(programs=programs)
        assert torch.equal(kernels.decode_attention(q, keys, values, pages, length, PAGE, 0.2, tile=few), together)
    order = torch.tensor([2, 0, 3], device=device)
    fewer = kernels.decode_attention(q[order], keys, values, pages[order], length[order], PAGE, 0.2)
    assert torch.equal(fewer, together[order])


def test_items_of_several_splits(seed: int, device: torch.device) -> None:
    cache, pages, length = paged(LONG_AND_SHORT, 4, 48, torch.float16, device)
    keys, values = cache[:, :2], cache[:, 2:]
    q = torch.randn(len(LONG_AND_SHORT), 6, 48, device=device).half()
    wanted, wanted_lse = definitions.decode_attention(
        q.double(), keys.double(), values.double(), pages, length, PAGE, 0.3
    )
    outs = []
    for programs, at_once in (528, 264), (3, 264), (3, 2), (528, None):
        splits = order_splits(length, pages.shape[1] * PAGE, None, at_once, kernels.cut_of(48))
        tile = kernels.tile_of(48, 3)._replace(programs=programs, consecutive=at_once is not None)
        lse = torch.full((len(q), 6), float("nan"), device=device)
        out = torch.full((len(q), 6, 48), float("nan"), dtype=q.dtype, device=device)
        kernels.decode_attention(q, keys, values, pages, length, PAGE, 0.3, out=out, lse=lse, splits=splits, tile=tile)
        assert close(out, wanted, 2e-3) and (out[1] == 0).all()
        assert torch.allclose(lse.double(), wanted_lse, rtol=1e-5, atol=2e-3)
        outs.append(out)
    assert all(torch.equal(out, outs[0]) for out in outs), "how splits are shared out changes no bits"


def test_a_longer_row_has_longer_splits(device: torch.device) -> None:
    # Beyond 64 × 64 tokens a split has 128: the second half of each must not be left out.
    cache, pages, length = paged((4200,), 2, 16, torch.float32, device)
    q = torch.randn(1, 1, 16, device=device)
    found = kernels.decode_attention(q, cache[:, :1], cache[:, 1:], pages, length, PAGE, 0.2)
    wide = cache.double()
    assert close(
        found, definitions.decode_attention(q.double(), wide[:, :1], wide[:, 1:], pages, length, PAGE, 0.2)[0], 2e-6
    )


def test_rows_that_are_not_short_have_longer_splits(device: torch.device) -> None:
    lengths = (300, 64, 0, 65, 130)
    latents, pages, length = paged(lengths, 1, 40, torch.float32, device)
    q = torch.randn(len(lengths), 20, 40, device=device)
    tile = kernels.tile_of(512, 20)
    splits = order_splits(length, pages.shape[1] * PAGE, None, None, kernels.SplitRule(32, 8, 2, 64))
    found = kernels.latent_decode_attention(q, latents, 32, pages, length, PAGE, 0.2, splits=splits, tile=tile)
    wide = latents.double()
    wanted, _ = definitions.decode_attention(q.double(), wide, wide[..., :32], pages, length, PAGE, 0.2)
    assert close(found, wanted, 2e-6)


def test_layers_share_the_order_of_a_step(device: torch.device) -> None:
    cache, pages, length = paged((40, 3), 2, 16, torch.float32, device)
    q = torch.randn(2, 1, 16, device=device)
    keys, values = cache[:, :1], cache[:, 1:]
    splits = kernels.splits_of(length, pages.shape[1] * PAGE, None, 16, 1)
    for layer in (keys, values):
        alone = kernels.decode_attention(q, layer, values, pages, length, PAGE, 0.2)
        assert torch.equal(kernels.decode_attention(q, layer, values, pages, length, PAGE, 0.2, splits=splits), alone)
    with pytest.raises(ValueError, match="of other rows"):
        kernels.decode_attention(q[:1], keys, values, pages[:1], length[:1], PAGE, 0.2, splits=splits)
    with pytest.raises(ValueError, match="of other rows"):
        kernels.decode_attention(q, keys, values, pages, length, PAGE, 0.2, splits=splits, window=8)
    with pytest.raises(ValueError, match="one by one"):
        tile = kernels.tile_of(16, 1)._replace(consecutive=False)
        kernels.decode_attention(q, keys, values, pages, length, PAGE, 0.2, splits=splits, tile=tile)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    cache, pages, length = paged((3,), 2, 32, torch.float32, device)
    q = torch.randn(1, 4, 32, device=device)
    with pytest.raises(ValueError, match="must be alike"):
        kernels.decode_attention(q.half(), cache, cache, pages, length, PAGE, 1.0)
    with pytest.raises(ValueError, match="q is"):
        kernels.decode_attention(q[:, :3], cache, cache, pages, length, PAGE, 1.0)
    with pytest.raises(ValueError, match="latents are"):
        kernels.latent_decode_attention(q, cache[:, :1], 33, pages, length, PAGE, 1.0)
