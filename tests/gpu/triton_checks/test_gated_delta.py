"""Gated DeltaNet against its twin in float64, over states where all that must not be read is NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from gpu import definitions
from weft.engine.kernels import delta_rule as in_torch
from weft.engine.kernels.triton.delta_chunks import ChunkTile, gated_delta

NAN = float("nan")
BEFORE = (-1, 6, 3, -1, 2, -1)  # begins; goes on elsewhere; in place; begins; goes on where another begins; padding
AFTER = (1, 0, 3, 5, 8, -1)
COUNTS = (1, 2, 40, 0, 1, 17, 33, 1, 16)
"""Rows of each sequence, with borders of chunks of 16 among them, and fewer than the convolution keeps."""


class Heads(NamedTuple):
    """The sizes of a layer."""

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    window: int

    @property
    def features(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    @property
    def values(self) -> int:
        return self.heads * self.value_dim


class Given:
    """Random inputs: rows lie further apart than they are long, and states that no sequence begins from are NaN."""

    def __init__(
        self,
        sizes: Heads,
        counts: tuple[int, ...] | None,
        before: tuple[int, ...],
        after: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ):
        rows, slots, width = sum(counts or [1] * len(before)), 12, sizes.features + sizes.values + 2 * sizes.heads
        self.product = (torch.randn(rows, width + 3, device=device) * 3).to(dtype)[:, :width]
        begins = [0, *torch.tensor(counts or ()).cumsum(0).tolist()]
        self.starts = None if counts is None else torch.tensor(begins, dtype=torch.int32, device=device)
        self.before, self.after = (torch.tensor(x, device=device) for x in (before, after))
        self.states = torch.randn(slots, sizes.heads, sizes.key_dim, sizes.value_dim, device=device)
        self.tails = torch.randn(slots, sizes.features, sizes.window - 1, device=device)
        unread = [slot for slot in range(slots) if slot not in before]
        self.states[unread], self.tails[unread] = NAN, NAN
        conv, weight = torch.randn(sizes.features, 1, sizes.window, device=device), torch.rand(sizes.value_dim) + 0.5
        self.decay, self.bias = torch.randn(2, sizes.heads, device=device)
        self.conv, self.weight = conv.to(dtype), weight.to(device, dtype)

    def run(self, form: Callable[..., None], tile: ChunkTile | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """(out, states, tails) by a form of the op, or by the definition in float64."""
        wide = form is definitions.gated_delta
        states, tails = ((x.double() if wide else x).clone() for x in (self.states, self.tails))
        product = self.product.double() if wide else self.product
        out = torch.full((len(product), self.values), NAN, dtype=product.dtype, device=product.device)
        more = {} if tile is None else {"tile": tile}
        where = self.starts, self.before, self.after
        form(product, *where, self.conv, self.decay, self.bias, self.weight, 1e-3, states, tails, out, **more)
        return out, states, tails

    @property
    def values(self) -> int:
        return self.states.shape[1] * self.states.shape[3]


def compare(given: Given, form: Callable[..., None], rtol: float, atol: float, tile: ChunkTile | None = None) -> None:
    """NaN is NaN: nothing else may be read, and nothing else written."""
    found, wanted = given.run(form, tile), given.run(definitions.gated_delta)
    for what, x, y in zip(("out", "states", "tails"), found, wanted, strict=True):
        assert torch.allclose(x.double(), y, rtol=rtol, atol=atol, equal_nan=True), what
    assert torch.allclose(found[2].double(), wanted[2], rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "sizes, dtype",
    [
        (Heads(4, 2, 6, 5, 4), torch.float32),
        (Heads(3, 3, 16, 8, 2), torch.float32),
        (Heads(2, 1, 8, 8, 4), torch.float16),
    ],
    ids=str,
)
def test_a_token(sizes: Heads, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(sizes.heads)
    given = Given(sizes, None, BEFORE, AFTER, dtype, device)
    given.product[-1] = NAN
    tolerance = (2e-3, 2e-3) if dtype == torch.float16 else (1e-4, 1e-5)
    compare(given, gated_delta, *tolerance)
    given.product[-1] = 0.0  # plain torch may compute what it drops
    compare(given, in_torch.gated_delta, *tolerance)


def prompts(sizes: Heads, counts: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Given:
    """Sequences that begin, go on in place, and go on elsewhere."""
    before = [{1: 1, 2: 11, 6: 6, 7: 7}.get(i, -1) for i in range(len(counts))]
    after = [i if count else -1 for i, count in enumerate(counts)]
    return Given(sizes, counts, tuple(before), tuple(after), dtype, device)


@pytest.mark.parametrize("sizes", [Heads(4, 2, 20, 24, 4), Heads(2, 2, 16, 40, 2)], ids=str)
def test_prompts(sizes: Heads, seed: int, device: torch.device) -> None:
    given = prompts(sizes, COUNTS, torch.float32, device)
    compare(given, gated_delta, 1e-4, 2e-5)
    compare(given, in_torch.gated_delta, 1e-4, 2e-5)


def test_prompts_in_16_bits(device: torch.device) -> None:
    """Operands of products are rounded; chunks are of 64 tokens."""
    torch.manual_seed(1)
    given = prompts(Heads(2, 1, 16, 24, 4), (3, 130, 1, 64), torch.float16, device)
    compare(given, gated_delta, 2e-2, 2e-2)


@pytest.mark.parametrize("rate", [-20.0, 3.0, 8.0])
def test_keys_that_repeat_and_states_that_are_forgotten(rate: float, device: torch.device) -> None:
    """All tokens write to one key: the system's powers grow as binomials do. rate: the decay's logarithm, from none to
    all in a token; every fourth token of it forgets nothing."""
    torch.manual_seed(0)
    sizes = Heads(2, 1, 16, 16, 2)
    given = prompts(sizes, (70, 35), torch.float32, device)
    of_keys, gate = slice(16, 32), sizes.features + sizes.values
    given.product[:, of_keys] = given.product[:1, of_keys]
    given.product[:, gate : gate + 2] = 9.0  # corrections are made in full
    given.decay[:] = rate
    given.product[::4, gate + 2 :] = -200.0
    compare(given, gated_delta, 1e-3, 1e-4, ChunkTile(64, 16, 4, 1))
    compare(given, gated_delta, 1e-3, 1e-4)
    compare(given, in_torch.gated_delta, 1e-3, 1e-4)


def test_a_sequence_has_the_same_bits_in_any_company(device: torch.device) -> None:
    torch.manual_seed(2)
    given = prompts(Heads(2, 1, 16, 16, 4), (5, 21, 40), torch.float32, device)
    together = given.run(gated_delta)
    given.product, given.starts = given.product[5:26], torch.tensor([0, 21], dtype=torch.int32, device=device)
    given.before, given.after = given.before[1:2].clone(), given.after[1:2].clone()
    alone = given.run(gated_delta)
    assert torch.equal(alone[0], together[0][5:26])
    assert torch.equal(alone[1][1], together[1][1]) and torch.equal(alone[2][1], together[2][1])


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    none, conv = torch.zeros(0, dtype=torch.int64, device=device), torch.zeros(20, 1, 4, device=device)
    states, tails, vector = (torch.zeros(*s, device=device) for s in ((2, 2, 4, 6), (2, 20, 3), (2,)))
    of_layer = (conv, vector, vector, vector, 0.0)
    product, out = torch.zeros(0, 20 + 12 + 4, device=device), torch.zeros(0, 12, device=device)
    gated_delta(product, None, none, none, *of_layer, states, tails, out)
    one, two = torch.zeros(2, 36, device=device), torch.zeros(2, 12, device=device)
    slots = torch.zeros(2, 2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="contiguous"):
        gated_delta(one, None, slots[:, 0], slots[0], *of_layer, states, tails, two)
    with pytest.raises(ValueError, match="a slot for each sequence"):
        gated_delta(one, slots[0].int(), slots[0], slots[0], *of_layer, states, tails, two)
    with pytest.raises(ValueError, match="product is"):
        gated_delta(product[:, 1:], None, none, none, *of_layer, states, tails, out)
    with pytest.raises(ValueError, match="out"):
        gated_delta(product, None, none, none, *of_layer, states, tails, out[:, 1:])
    with pytest.raises(ValueError, match="no heads of 3"):
        gated_delta(product, None, none, none, *of_layer, torch.zeros(2, 2, 3, 6, device=device), tails, out)
