"""Draws against their twin, whose noise is Philox written in plain integers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpu import definitions
from weft.engine.kernels.triton import sample as kernels

VOCABULARY = 2600
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def inputs(device: torch.device, rows: int = 5) -> Inputs:
    """(logits, temperature, seed, position): greedy rows among others."""
    temperature = torch.tensor([0.0, 1.0, 0.6, 0.0, 1.7])[:rows]
    seed = torch.tensor([3, -5, 2**40 + 3, 2**62, 0])[:rows]
    position = torch.tensor([0, 5, 70_000, 2, 1])[:rows]
    logits = torch.randn(rows, VOCABULARY) * 2
    return logits.to(device), temperature.to(device), seed.to(device), position.to(device)


def live(count: int, device: torch.device) -> Tensor:
    return torch.tensor([count], dtype=torch.int32, device=device)


@pytest.mark.parametrize("min_p", [False, True])
@pytest.mark.parametrize("count", [5, 3, 0])
def test_samples(min_p: bool, count: int, seed: int, device: torch.device) -> None:
    given = inputs(device)
    given[0][count:] = float("nan")
    minimum = torch.tensor([0.5, 0.0, 0.2, 0.0, 0.9], device=device) if min_p else None
    value, token = kernels.sample(*given, live(count, device), min_p=minimum)
    wanted_value, wanted = definitions.sample(*given, count, min_p=minimum)
    assert token.tolist() == wanted.tolist()
    assert torch.allclose(value, wanted_value, rtol=1e-4, atol=1e-4)
    assert (token[count:] == -1).all() and (token[:count] >= 0).all()


@pytest.mark.parametrize("programs, block", [(1, 256), (15, 256), (20, 512)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_programs_share_a_row(
    programs: int, block: int, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draws depend neither on the programs' number nor on their blocks; parameters are read by the request's row."""
    torch.manual_seed(programs)
    logits, temperature, seed, position = inputs(device)
    logits = logits.to(dtype)
    logits[0] = float("-inf")
    logits[3, 1:] = -1.0
    minimum = torch.tensor([0.5, 0.0, 0.2, 0.0, 0.9], device=device)
    given = temperature, seed, minimum
    table = torch.tensor([6, 2, 0, 3, 8], device=device).int()
    tables = [
        torch.full((9,), fill, dtype=x.dtype, device=device) for x, fill in zip(given, (9.0, 77, 1.0), strict=True)
    ]
    for kept, x in zip(tables, given, strict=True):
        kept[table.long()] = x
    wanted = definitions.sample(logits, temperature, seed, position, 4, min_p=minimum)
    monkeypatch.setattr(kernels, "BLOCK", block)
    monkeypatch.setattr(kernels, "PROGRAMS", programs)
    more = dict(min_p=tables[2], table=table)
    found = kernels.candidates(logits, *tables[:2], position, live(4, device), **more)
    assert found.shape[1] == max(1, programs // 5)
    value, token = kernels.best(found, live(4, device)).unbind(1)
    assert token.tolist() == wanted[1].tolist() and token[0] == 0
    assert torch.allclose(value, wanted[0], rtol=1e-4, atol=1e-4)


def test_a_row_samples_the_same_in_any_batch(device: torch.device) -> None:
    given = inputs(device)
    _, together = kernels.sample(*given, live(5, device))
    for row in range(5):
        _, alone = kernels.sample(*(x[row : row + 1] for x in given), live(1, device))
        assert alone.item() == together[row].item()


@pytest.mark.parametrize("cut", [1204, 1203, 1025, 1022])
def test_ranks_that_share_the_vocabulary_sample_what_one_would(cut: int, device: torch.device) -> None:
    """Wherever the cut is, in the middle of a block or of the four tokens whose noise is made at once."""
    given = inputs(device)
    given[0][3] = float("-inf")  # nothing to draw from: of equal values the lowest token's, of a share its own
    given[0][0, 300], given[0][1, 2000] = 50.0, 90.0
    value, token = kernels.sample(*given, live(5, device))
    parts = [kernels.sample(given[0][:, a:b], *given[1:], live(5, device), first=a) for a, b in ((0, cut), (cut, None))]
    best = torch.stack([part[0] for part in parts]).argmax(0)
    tokens = torch.stack([part[1] for part in parts]).gather(0, best[None])[0]
    assert torch.equal(tokens, token) and torch.equal(torch.maximum(parts[0][0], parts[1][0]), value)
    assert token[3] == 0 and parts[1][1][3] == cut
    assert set(best.tolist()) == {0, 1}, "both parts must win somewhere"


def test_ties_go_to_the_lower_token_and_nan_to_none(device: torch.device) -> None:
    logits = torch.zeros(4, VOCABULARY, device=device)
    logits[1, [2000, 900, 1500]] = 4.0
    logits[2:] = float("nan")
    logits[2, 1999] = -1.0
    zero = torch.zeros(4, device=device)
    _, token = kernels.sample(logits, zero, zero.long(), zero.long(), live(4, device))
    assert token.tolist() == [0, 900, 1999, 0], "of NaN alone any token is right that exists"


def test_noise_is_of_gumbels_distribution(device: torch.device) -> None:
    noise = definitions.gumbel(torch.arange(20), torch.arange(20), 0, 5000)
    for level in (-1.0, 0.0, 1.0, 4.0):
        wanted = torch.tensor(-level).exp().neg().exp().item()
        assert abs((noise <= level).float().mean().item() - wanted) < 0.006
    assert len(noise[0].unique()) > 4990 and not torch.equal(noise[0], noise[1])
    again = definitions.gumbel(torch.arange(20), torch.arange(20) + 1, 0, 5000)
    assert not torch.isclose(noise, again).float().mean() > 0.01, "another position must have other noise"


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    given = inputs(device)
    for whole in (dict(min_p=given[1]), dict(top_k=given[3].int(), top_p=given[1])):
        with pytest.raises(ValueError, match="it must be 0"):
            kernels.sample(*given, live(5, device), first=4, **whole)
    with pytest.raises(ValueError, match="given together"):
        kernels.sample(*given, live(5, device), top_p=given[1])
