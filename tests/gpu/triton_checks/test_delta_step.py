"""One token of Gated DeltaNet against its twin in float64, over states where all that must not be read is NaN."""

from __future__ import annotations

import pytest
import torch

from gpu import definitions
from weft.kernels.triton import delta_step as kernels

NAN = float("nan")
BEFORE = (-1, 6, 3, -1, 2, -1)  # begins; goes on elsewhere; in place; begins; goes on where another begins; padding
AFTER = (1, 0, 3, 5, 8, -1)


@pytest.mark.parametrize(
    "heads, key_heads, key_dim, value_dim, window, dtype",
    [(4, 2, 6, 5, 4, torch.float32), (3, 3, 16, 8, 2, torch.float32), (2, 1, 8, 8, 4, torch.float16)],
    ids=str,
)
def test_a_token(
    heads: int,
    key_heads: int,
    key_dim: int,
    value_dim: int,
    window: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    torch.manual_seed(heads)
    rows, slots = len(BEFORE), 10
    features, values = (2 * key_heads * key_dim + heads * value_dim), heads * value_dim
    wide = torch.randn(rows, features + values + 2 * heads + 3, device=device) * 3
    wide[-1] = NAN
    product = wide.to(dtype)[:, : features + values + 2 * heads]  # of rows that lie further apart
    states = torch.randn(slots, heads, key_dim, value_dim, device=device)
    tails = torch.randn(slots, features, window - 1, device=device)
    unread = [slot for slot in range(slots) if slot not in BEFORE]
    states[unread], tails[unread] = NAN, NAN
    conv, weight = torch.randn(features, 1, window, device=device), torch.rand(value_dim, device=device) + 0.5
    decay, bias = torch.randn(2, heads, device=device)
    before, after = (torch.tensor(x, device=device) for x in (BEFORE, AFTER))
    of_layer = (conv.to(dtype), decay, bias, weight.to(dtype), 1e-3)
    wanted_states, wanted_tails = states.double(), tails.double()
    wanted = definitions.delta_step(product.double(), before, after, *of_layer, wanted_states, wanted_tails)
    out = torch.full((rows, values), NAN, dtype=dtype, device=device)
    kernels.delta_step(product, before, after, *of_layer, states, tails, out)
    tolerance = dict(rtol=2e-3, atol=2e-3) if dtype == torch.float16 else dict(rtol=1e-4, atol=1e-5)
    assert torch.allclose(out.double(), wanted, **tolerance) and (out[-1] == 0).all()
    assert torch.allclose(states.double(), wanted_states, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert torch.allclose(tails.double(), wanted_tails, rtol=1e-6, atol=0, equal_nan=True)
    assert states[[4, 7, 9]].isnan().all() and not states[list(AFTER[:-1])].isnan().any()


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    none, conv = torch.zeros(0, dtype=torch.int64, device=device), torch.zeros(20, 1, 4, device=device)
    states, tails, vector = (torch.zeros(*s, device=device) for s in ((2, 2, 4, 6), (2, 20, 3), (2,)))
    of_layer = (conv, vector, vector, vector, 0.0)
    product, out = torch.zeros(0, 20 + 12 + 4, device=device), torch.zeros(0, 12, device=device)
    kernels.delta_step(product, none, none, *of_layer, states, tails, out)
    one, two = torch.zeros(2, 36, device=device), torch.zeros(2, 12, device=device)
    with pytest.raises(ValueError, match="contiguous"):
        slots = torch.zeros(2, 2, dtype=torch.int64, device=device)
        kernels.delta_step(one, slots[:, 0], slots[0], *of_layer, states, tails, two)
    with pytest.raises(ValueError, match="product is"):
        kernels.delta_step(product[:, 1:], none, none, *of_layer, states, tails, out)
    with pytest.raises(ValueError, match="out"):
        kernels.delta_step(product, none, none, *of_layer, states, tails, out[:, 1:])
    with pytest.raises(ValueError, match="no heads of 3"):
        kernels.delta_step(product, none, none, *of_layer, torch.zeros(2, 2, 3, 6, device=device), tails, out)
